//! Looking around in a demo that was kept.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use weft_tests::{Cluster, MANIFESTS, bin_dir, find_holders};

use crate::GROUP;

pub(crate) fn print(rome: &Cluster, milan: &Cluster) -> Result<()> {
    let target = rome.view(&milan.spec)?.of(milan.nodes[1].pods[0].addresses[0])?;
    let this = std::env::current_exe().context("finding this program")?;
    let demo = this.display();
    println!(
        "\nEverything is still up. To look around:\n\
         \n  {demo} in rome-1 weft status\
         \n  {demo} in rome-1 weft get configuration milan\
         \n  {demo} in rome-1 ip route show table 18952\
         \n  {demo} in rome-2 nft list table inet weft\
         \n  {demo} in rome-2 ip netns exec pod-2-1 ping -c 3 {target}\
         \n  {demo} in switch tcpdump -ni br0 -c 10\
         \n\nEdit the manifests and watch:\
         \n\n  {}\n  {}\n  {demo} in milan-1 weft status --watch\
         \n\nRemove it: {demo} down",
        rome.outside(MANIFESTS).display(),
        milan.outside(MANIFESTS).display(),
    );
    Ok(())
}

/// Becomes a command on a machine.
pub(crate) fn run_in(machine: &str, command: &[String]) -> Result<()> {
    let holders = find_holders(GROUP);
    let names: Vec<_> = holders.iter().map(|(_, name)| name.as_str()).collect();
    let (pid, _) = holders.iter().find(|(_, name)| name == machine).with_context(|| {
        if names.is_empty() {
            "no demo is up; `demo --keep` leaves one".to_owned()
        } else {
            format!("no machine {machine}; there are {}", names.join(", "))
        }
    })?;
    let mut nsenter = Command::new("nsenter");
    if !nix::unistd::geteuid().is_root() {
        nsenter.arg(format!("--user=/proc/{pid}/ns/user")).arg("--preserve-credentials");
    }
    nsenter.arg(format!("--mount=/proc/{pid}/ns/mnt")).arg(format!("--net=/proc/{pid}/ns/net"));
    nsenter.arg(format!("--pid=/proc/{pid}/ns/pid_for_children")).arg("--").args(command);
    let path = std::env::var("PATH").unwrap_or_default();
    nsenter.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin_dir()?.display()));
    Err(nsenter.exec()).context("starting nsenter")
}
