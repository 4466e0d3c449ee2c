//! ```text
//!   rome-1 (weft up), rome-2 (weft agent) --------- milan-1
//! ```

use std::process::Command;

use anyhow::{Result, ensure};
use weft_tests::{Cluster, Host};

use crate::scene::{PATIENCE, PORT, Scene, play, rome_and_milan, traffic_passes};

#[test]
fn down_leaves_the_kernel_as_it_was() -> Result<()> {
    let specs = rome_and_milan(2);
    let mut scene = Scene::build(&specs)?;
    let before: Vec<_> =
        scene.clusters[0].nodes.iter().map(|n| kernel(&n.host)).collect::<Result<_>>()?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;
    scene.peer("rome", "milan", PORT)?;
    traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;

    let rome = scene.cluster("rome");
    for (number, node) in rome.nodes.iter().enumerate() {
        let changed = kernel(&node.host)? != before[number];
        ensure!(changed, "the comparison sees nothing of weft on {}", node.host.name());
    }
    rome.nodes[1].host.command(&mut weft(&["down", "--run-dir", "/run/agent-2"])?, "")?;
    rome.weft(&["down"])?;

    for (number, node) in rome.nodes.iter().enumerate() {
        let (old, new) = (&before[number], kernel(&node.host)?);
        ensure!(*old == new, "{}: {}", node.host.name(), difference(old, &new));
        let left: Vec<_> =
            node.host.processes().into_iter().filter(|(_, line)| ours(line)).collect();
        ensure!(left.is_empty(), "still running on {}: {left:?}", node.host.name());
    }
    rome.weft(&["down"]).map(drop)
}

#[test]
fn a_run_killed_in_the_middle_is_taken_over_by_the_next() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let view = scene.cluster("rome").view(&scene.cluster("milan").spec)?;
        let everything = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];
        for pid in everything.iter().flat_map(|p| scene.cluster("rome").processes(0, p)) {
            let pid = nix::unistd::Pid::from_raw(pid);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
        }
        scene.cluster_mut("rome").start_up(&[])?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        rome.wait_connected("milan", PATIENCE)?;
        ensure!(rome.view(&milan.spec)? == view, "other prefixes were granted");
        traffic_passes(rome, milan)?;
        traffic_passes(milan, rome)
    })
}

fn weft(args: &[&str]) -> Result<Command> {
    let mut command = Command::new(weft_tests::bin_dir()?.join("weft"));
    command.args(args);
    Ok(command)
}

fn ours(line: &str) -> bool {
    let program = line.split(' ').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    ["weft", "fabric-controller", "ipam", "route-agent", "gateway"].contains(&program)
}

/// All that weft could have changed, in words that are the same from one time to the next.
fn kernel(host: &Host) -> Result<String> {
    let script = "ip -o link | awk '{print $2, $3, $4, $5}'; ip -o -4 address; ip -4 route show table all; ip -6 route show table all | grep -v fe80; \
                  ip rule; ip -6 rule; ip neigh show nud permanent; bridge fdb show | grep -v -e master -e 33:33:ff; nft list ruleset; \
                  iptables-save; ip6tables-save; cd /proc/sys/net; \
                  grep -rs . ipv4/conf ipv6/conf/all ipv6/conf/default ipv4/ip_forward core/rmem_max | grep -v veth";
    let text = host.command(Command::new("sh").args(["-c", script]), "")?;
    Ok(text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{}\n", line.trim_end()))
        .collect())
}

fn difference(old: &str, new: &str) -> String {
    let minus =
        old.lines().filter(|line| !new.lines().any(|l| l == *line)).map(|l| format!("- {l}\n"));
    let plus =
        new.lines().filter(|line| !old.lines().any(|l| l == *line)).map(|l| format!("+ {l}\n"));
    minus.chain(plus).collect()
}
