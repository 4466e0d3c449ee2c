//! ```text
//!   rome-1 (weft up), rome-2 (weft agent) --------- milan-1
//! ```

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::{Cluster, wait_until};

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

/// Agents that do not acknowledge are waited for, and then left.
#[test]
fn down_ends_without_an_agent_that_hangs() -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(2))?;
    let before = Kernel::of(scene.clusters[0].head().net())?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;
    scene.peer("rome", "milan", PORT)?;
    let rome = scene.cluster("rome");
    let agents = rome.processes(1, "route-agent");
    ensure!(agents.len() == 1, "agents on rome-2: {agents:?}");
    kill(Pid::from_raw(agents[0]), Signal::SIGSTOP)?;

    let script = format!("{} down 2>&1", weft_tests::bin_dir()?.join("weft").display());
    let start = Instant::now();
    let printed = rome.head().command(Command::new("sh").args(["-c", &script]), "")?;
    let took = start.elapsed();
    eprintln!("down took {took:?}");
    let bounds = Duration::from_secs(10)..Duration::from_secs(15);
    ensure!(bounds.contains(&took), "it took {took:?}");
    let left =
        "no answer from rome-2 within 10 s: what is there stays until `weft down` runs on each";
    ensure!(printed.contains(left), "down printed {printed}");
    ensure!(!rome.outside(rome.run_dir()).exists(), "the run directory is there: {printed}");
    before.ensure_same(&Kernel::of(rome.head().net())?)
}

#[test]
fn killed_run_is_taken_over_by_next() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let view = scene.cluster("rome").view(&scene.cluster("milan").spec)?;
        let everything = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];
        for pid in everything.iter().flat_map(|p| scene.cluster("rome").processes(0, p)) {
            kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        }
        scene.cluster_mut("rome").start_up(&[])?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        rome.wait_connected("milan", TIMEOUT)?;
        ensure!(rome.view(&milan.spec)? == view, "other prefixes were granted");
        // The killed gateway's report stands until the new gateway's, by which nodes refuse for a moment.
        wait_until("traffic passes", TIMEOUT, || traffic_passes(rome, milan))?;
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
