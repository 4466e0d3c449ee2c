//! ```text
//!   rome-1 (weft up), rome-2 (weft agent) --------- milan-1        several of these side by side
//! ```
//! Lives of a fabric: it comes up, is peered, killed, stopped, damaged in some order, and taken
//! down. Then the kernel of every machine is as it was before the first of them.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::manifests::{Peering, join};
use weft_tests::{ClusterSpec, bin_dir, wait_until};

use crate::chance::{Chance, rounds};
use crate::kernel::Kernel;
use crate::scene::{PORT, Scene, TIMEOUT, play, traffic_passes};

/// Number of fabrics that live side by side, and of lives in all.
const SIDE_BY_SIDE: usize = 4;
const LIVES: usize = 12;
const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];

#[test]
fn down_restores_every_kernel_after_any_events() -> Result<()> {
    let mut chance = Chance::new();
    let lives = rounds(LIVES);
    std::thread::scope(|scope| {
        let labs = (0..SIDE_BY_SIDE).map(|lab| {
            let chance = chance.split();
            let lives = (lives + lab) / SIDE_BY_SIDE;
            scope.spawn(move || live_in_one_lab(lives, chance))
        });
        let labs: Vec<_> = labs.collect();
        labs.into_iter().try_for_each(|lab| lab.join().expect("a lab does not panic"))
    })
}

#[test]
fn sigterm_alone_keeps_a_nodes_state() -> Result<()> {
    play(&specs(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let before: Vec<_> = kernels(scene)?;
        for node in 0..rome.nodes.len() {
            let agents = rome.processes(node, "weft").into_iter();
            for pid in agents.chain(rome.processes(node, "route-agent")) {
                kill(Pid::from_raw(pid), Signal::SIGTERM)?;
            }
            wait_until("the agent has ended", TIMEOUT, || {
                let left = rome.processes(node, "route-agent");
                ensure!(left.is_empty(), "{left:?} run");
                Ok::<_, anyhow::Error>(())
            })?;
        }
        same(scene, &before)
    })
}

#[test]
fn emptied_run_directory_is_made_again() -> Result<()> {
    play(&specs(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let script = format!("rm -rf {}/*", rome.run_dir());
        rome.head().command(Command::new("sh").args(["-c", &script]), "")?;
        wait_until("weft up has noticed", TIMEOUT, || {
            let log = rome.log("weft-up");
            ensure!(log.contains("making it again"), "{log}");
            Ok::<_, anyhow::Error>(())
        })?;
        rome.wait_connected("milan", TIMEOUT)?;
        traffic_passes(rome, milan)?;
        traffic_passes(milan, rome)
    })
}

#[test]
fn a_node_that_rebooted_gets_its_routes_back() -> Result<()> {
    play(&specs(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        for node in [0, 1] {
            kill_some(scene, "rome", node, |_| true);
            // State that a reboot removes.
            let lost = "ip link del weft4; ip rule del priority 105; ip -6 rule del priority 105
                ip route flush table 18952; ip -6 route flush table 18952; nft delete table inet weft
                rm -rf /run/weft /run/agent-*; true";
            let host = &scene.cluster("rome").nodes[node].host;
            host.command(Command::new("sh").args(["-c", lost]), "")?;
        }
        scene.cluster_mut("rome").start()?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        rome.wait_connected("milan", TIMEOUT)?;
        traffic_passes(rome, milan)?;
        traffic_passes(milan, rome)
    })
}

/// By the command lines that `ps` shows.
#[test]
fn second_copies_end_with_the_reason() -> Result<()> {
    play(&specs(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let before = rome.head().processes();
        for program in PROGRAMS {
            for pid in rome.processes(0, program) {
                let line = before.iter().find(|(other, _)| *other == pid);
                let (_, line) = line.context("it has ended")?;
                let copy = rome
                    .head()
                    .command(Command::new("timeout").arg("10").args(line.split(' ')), "");
                let refused = copy.err().map(|error| format!("{error:#}")).unwrap_or_default();
                ensure!(refused.contains("is at work"), "{line}: {refused:?}");
            }
        }
        let ended = before.iter().find(|(pid, _)| !Path::new(&format!("/proc/{pid}")).exists());
        ensure!(ended.is_none(), "{ended:?} has ended");
        traffic_passes(rome, milan)
    })
}

/// All processes would look to that user as if they did not run.
#[test]
fn status_of_an_ordinary_user_asks_for_root() -> Result<()> {
    play(&specs(), |scene| {
        let script = "there=$(mktemp -d) && chmod 755 $there && cp \"$0\" $there/weft
            setpriv --reuid=65534 --regid=65534 --clear-groups $there/weft status 2>&1
            echo \"exit code $?\"; rm -r $there";
        let mut shell = Command::new("sh");
        let text = scene
            .cluster("rome")
            .head()
            .command(shell.args(["-c", script]).arg(bin_dir()?.join("weft")), "")?;
        ensure!(text.contains("run it as root") && text.contains("exit code 1"), "{text}");
        ensure!(!text.contains("does not run"), "{text}");
        Ok(())
    })
}

fn specs() -> [ClusterSpec; 2] {
    [ClusterSpec::new("rome", 1, 2).dual_stack(), ClusterSpec::new("milan", 2, 1).dual_stack()]
}

fn live_in_one_lab(lives: usize, mut chance: Chance) -> Result<()> {
    let mut scene = Scene::build(&specs())?;
    let before = kernels(&scene)?;
    for life in 1..=lives {
        let mut acts = Vec::new();
        let lived = live(&mut scene, &mut chance, &mut acts).and_then(|()| {
            down(&scene, &mut chance, &mut acts)?;
            same(&scene, &before)?;
            nothing_is_left(&scene)
        });
        if lived.is_err() {
            scene.clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
        }
        lived.with_context(|| format!("life {life}: {acts:#?}"))?;
    }
    Ok(())
}

/// Events that can happen to a fabric.
#[derive(Clone, Copy, Debug)]
enum Act {
    Peer,
    Unpeer,
    Kill,
    KillNode,
    Stop,
    StartAgain,
    Damage,
    Connect,
    Wait,
}

const ACTS: [Act; 11] = [
    Act::Peer,
    Act::Peer,
    Act::Unpeer,
    Act::Kill,
    Act::Kill,
    Act::KillNode,
    Act::Stop,
    Act::StartAgain,
    Act::Damage,
    Act::Connect,
    Act::Wait,
];

fn live(scene: &mut Scene, chance: &mut Chance, acts: &mut Vec<Act>) -> Result<()> {
    let peering = Peering::new(&scene.cluster("rome").spec, &scene.cluster("milan").spec, PORT);
    unpeer(scene);
    scene.clusters.iter_mut().try_for_each(weft_tests::Cluster::start)?;
    // Most lives begin with something to take down.
    if chance.percent(80) {
        acts.extend([Act::Peer, Act::Connect]);
        act(scene, chance, Act::Peer, &peering)?;
        act(scene, chance, Act::Connect, &peering)?;
    }
    for _ in 0..1 + chance.below(5) {
        let next = *chance.pick(&ACTS);
        acts.push(next);
        act(scene, chance, next, &peering)?;
    }
    Ok(())
}

fn act(scene: &mut Scene, chance: &mut Chance, act: Act, peering: &Peering) -> Result<()> {
    let (cluster, node) = *chance.pick(&[("rome", 0), ("rome", 1), ("milan", 0)]);
    match act {
        Act::Peer => {
            scene.cluster("rome").apply("milan", &join(&peering.client_documents()))?;
            scene.cluster("milan").apply("rome", &join(&peering.server_documents()))?;
        }
        Act::Unpeer => unpeer(scene),
        Act::Kill => kill_some(scene, cluster, node, |_| chance.percent(40)),
        Act::KillNode => kill_some(scene, cluster, node, |_| true),
        Act::Stop => {
            for pid in scene.cluster(cluster).processes(node, "weft") {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
        Act::StartAgain if node == 0 => scene.cluster_mut(cluster).start_up(&[])?,
        Act::StartAgain => scene.cluster_mut(cluster).start_agent(2)?,
        Act::Damage => {
            let damage = *chance.pick(&DAMAGES);
            let net = scene.cluster(cluster).nodes[node].host.net().clone();
            net.command(Command::new("sh").args(["-c", damage]), "")?;
        }
        // Success depends on which programs were killed before.
        Act::Connect => {
            let _ = scene.cluster("rome").wait_connected("milan", Duration::from_secs(3));
        }
        Act::Wait => std::thread::sleep(Duration::from_millis(chance.below(500) as u64)),
    }
    Ok(())
}

const DAMAGES: [&str; 4] = [
    "ip link del weft4; true",
    "nft delete table inet weft; true",
    "ip rule del priority 105; true",
    "ip route flush table 18952; true",
];

fn unpeer(scene: &Scene) {
    // It may not have been peered.
    let _ = scene.cluster("rome").remove("milan");
    let _ = scene.cluster("milan").remove("rome");
}

fn kill_some(scene: &Scene, cluster: &str, node: usize, mut is_chosen: impl FnMut(i32) -> bool) {
    let cluster = scene.cluster(cluster);
    // The supervisor first, or it starts the others again meanwhile.
    for pid in PROGRAMS.iter().flat_map(|program| cluster.processes(node, program)) {
        if is_chosen(pid) {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Takes all machines' fabrics down, often after everything was killed, sometimes after somebody
/// removed the run directory.
fn down(scene: &Scene, chance: &mut Chance, acts: &mut Vec<Act>) -> Result<()> {
    for cluster in &scene.clusters {
        // A program that has yet to find its run directory would come up after the end.
        for name in ["weft-up", "weft-agent-2"] {
            let Ok(program) = cluster.program(name) else { continue };
            wait_until("what was started is up", TIMEOUT, || {
                ensure!(program.ended().is_some() || program.log().contains("running;"), "{name}");
                Ok::<_, anyhow::Error>(())
            })?;
        }
        let (killed, removed) = (chance.percent(50), chance.percent(15));
        // An agent depends on what the head shares, so it goes first.
        for node in (0..cluster.nodes.len()).rev() {
            if killed {
                acts.push(Act::KillNode);
                kill_some(scene, &cluster.spec.id, node, |_| true);
            }
            let mut command = Command::new(bin_dir()?.join("weft"));
            command.arg("down");
            if node > 0 {
                command.args(["--run-dir", &format!("/run/agent-{}", node + 1)]);
            } else if removed {
                eprintln!("the run directory of {} is removed", cluster.spec.id);
                remove(&cluster.outside(cluster.run_dir()))?;
            }
            let host = &cluster.nodes[node].host;
            host.command(&mut command, "").with_context(|| format!("on {}", host.name()))?;
        }
    }
    Ok(())
}

/// Though programs may be at work in it.
fn remove(dir: &Path) -> Result<()> {
    wait_until("the directory is gone", TIMEOUT, || match fs::remove_dir_all(dir) {
        Err(error) if dir.exists() => Err(error),
        Ok(()) | Err(_) => Ok(()),
    })
}

fn kernels(scene: &Scene) -> Result<Vec<Kernel>> {
    let nodes = scene.clusters.iter().flat_map(|cluster| &cluster.nodes);
    nodes.map(|node| Kernel::of(node.host.net())).collect()
}

fn same(scene: &Scene, before: &[Kernel]) -> Result<()> {
    let nodes = scene.clusters.iter().flat_map(|cluster| &cluster.nodes);
    nodes.zip(before).zip(kernels(scene)?).try_for_each(|((node, before), now)| {
        before.ensure_same(&now).with_context(|| format!("{} is other", node.host.name()))
    })
}

fn nothing_is_left(scene: &Scene) -> Result<()> {
    for cluster in &scene.clusters {
        for node in 0..cluster.nodes.len() {
            for program in PROGRAMS {
                let left = cluster.processes(node, program);
                ensure!(left.is_empty(), "{program} still runs: {left:?}");
            }
        }
        let run_dir = cluster.outside(cluster.run_dir());
        ensure!(!run_dir.exists(), "{} is left", run_dir.display());
    }
    Ok(())
}
