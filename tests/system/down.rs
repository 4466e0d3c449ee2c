//! ```text
//!   rome-1 (weft up), rome-2 (weft agent) --------- milan-1
//! ```

use std::process::Command;

use anyhow::{Context, Result, ensure};
use weft_tests::Cluster;

use crate::kernel::Kernel;
use crate::scene::{PORT, Scene, TIMEOUT, play, rome_and_milan, traffic_passes};

#[test]
fn down_leaves_the_kernel_as_it_was() -> Result<()> {
    let specs = rome_and_milan(2);
    let mut scene = Scene::build(&specs)?;
    let nodes = scene.clusters[0].nodes.iter();
    let before: Vec<_> = nodes.map(|n| Kernel::of(n.host.net())).collect::<Result<_>>()?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;
    scene.peer("rome", "milan", PORT)?;
    traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;

    let rome = scene.cluster("rome");
    for (number, node) in rome.nodes.iter().enumerate() {
        let changed = Kernel::of(node.host.net())? != before[number];
        ensure!(changed, "the comparison sees nothing of weft on {}", node.host.name());
    }
    rome.nodes[1].host.command(&mut weft(&["down", "--run-dir", "/run/agent-2"])?, "")?;
    rome.weft(&["down"])?;

    for (number, node) in rome.nodes.iter().enumerate() {
        let name = node.host.name();
        before[number].ensure_same(&Kernel::of(node.host.net())?).context(name.to_owned())?;
        let left: Vec<_> =
            node.host.processes().into_iter().filter(|(_, line)| ours(line)).collect();
        ensure!(left.is_empty(), "still running on {name}: {left:?}");
    }
    rome.weft(&["down"]).map(drop)
}

#[test]
fn killed_run_is_taken_over_by_next() -> Result<()> {
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
        rome.wait_connected("milan", TIMEOUT)?;
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
