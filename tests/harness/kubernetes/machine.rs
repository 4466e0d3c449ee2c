use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Network;
use crate::cluster::join_pod_network;
use crate::{ClusterSpec, Host, Lab, Program, SWITCH_V4, on_segment};

/// Folder of a cluster on its machines: configuration, keys, logs.
pub const DIR: &str = "/run/kubernetes";

/// Nothing reaches the disk of the machine that we run on, and mounts made in one place are seen
/// in all of this machine. Some sysctls that a kubelet writes exist but once on a whole kernel:
/// it gets copies.
const PREPARE: &str = "set -e
mount --make-rshared /
mount -t tmpfs -o mode=755 none /var/lib
mount -t tmpfs -o mode=755 none /var/log
mkdir -p $0/log $0/home $0/sysctl $0/cni
for key in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
  kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  copy=$0/sysctl/$(echo $key | tr / .)
  cat /proc/sys/$key >$copy
  mount --bind $copy /proc/sys/$key
done";

/// A node.
pub struct Machine {
    pub host: Host,
    pub name: String,
    pub addresses: Vec<IpAddr>,
    /// Number of the machine, from 1.
    pub number: u8,
    programs: Mutex<BTreeMap<String, Program>>,
}

impl Machine {
    pub(super) fn new(lab: &Lab, spec: &ClusterSpec, number: u8) -> Result<Self> {
        let (name, addresses) = (spec.node_name(number), spec.node_addresses(number));
        let on_eth0: Vec<_> = addresses.iter().copied().map(on_segment).collect();
        let host = lab.machine(&name, &on_eth0)?;
        host.net().sysctl(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
        if spec.on_vpn {
            addresses.iter().try_for_each(|address| host.ip(&vpn(*address)))?;
        }
        if spec.network == Network::Bridge {
            join_pod_network(&host, spec, number)?;
        }
        host.command(Command::new("sh").args(["-c", PREPARE, DIR]), "")
            .with_context(|| format!("preparing {name}"))?;
        if spec.read_only {
            host.command(Command::new("mount").args(["-o", "remount,bind,ro", "/"]), "")
                .with_context(|| format!("making {name} read-only"))?;
        }
        Ok(Self { host, name, addresses, number, programs: Mutex::default() })
    }

    /// Starts a program under the name of its file.
    pub(super) fn start(&self, command: &mut Command) -> Result<()> {
        let path = std::path::Path::new(command.get_program());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let log = self.host.outside(format!("{DIR}/log/{name}.log"));
        let program = self.host.start(command, &log)?;
        self.programs().insert(name, program);
        Ok(())
    }

    /// Kills a program that was started.
    pub(super) fn stop(&self, name: &str) -> Result<()> {
        let program = self.programs().remove(name);
        program.with_context(|| format!("{name} does not run on {}", self.name)).map(drop)
    }

    /// Output of a program so far.
    pub fn log(&self, name: &str) -> String {
        self.programs().get(name).map(Program::log).unwrap_or_default()
    }

    /// Last output of the programs that have ended without being stopped.
    pub(super) fn failures(&self) -> Vec<String> {
        let programs = self.programs();
        let ended = programs.iter().filter(|(_, program)| program.ended().is_some());
        ended.map(|(name, program)| format!("{name} on {}: {}", self.name, last(program))).collect()
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.host.outside(format!("{DIR}/{name}"));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }

    fn programs(&self) -> MutexGuard<'_, BTreeMap<String, Program>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Device as Nebula and Tailscale have it, with routes to all other nodes.
fn vpn(address: IpAddr) -> String {
    let segment = on_segment(address);
    format!(
        "link set eth0 mtu 1300\n\
         addr del {segment} dev eth0\n\
         addr add {address} dev eth0\n\
         route add {} dev eth0 src {address}\n\
         route add default via {SWITCH_V4}\n",
        segment.trunc()
    )
}

/// Timeout for a program that is started while everything else is.
pub(super) const TIMEOUT: Duration = Duration::from_secs(120);

/// The last words of a program.
fn last(program: &Program) -> String {
    let log = program.log();
    let lines: Vec<_> = log.lines().rev().take(3).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" / ")
}
