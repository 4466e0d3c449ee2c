//! Events that must not alarm.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::traffic::bulk;
use weft_tests::{Cluster, wait_until};

use super::{is_well, solved};
use crate::scene::{PORT, SINK, SOON, Scene, first_pod, play, rome_and_milan, serve};

const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];
const SIDES: [(&str, &str); 2] = [("rome", "milan"), ("milan", "rome")];
/// Longer than several probes of either side.
const LONG: Duration = Duration::from_secs(7);
const MEGABYTES: u64 = 1 << 20;

/// A name, and what must not alarm.
pub(super) type Control = (&'static str, fn() -> Result<()>);

pub(super) const CONTROLS: [Control; 5] = [
    ("idle", idle_peering_shows_no_fault),
    ("full load", full_load_shows_no_fault),
    ("host that stood still", host_that_stood_still_shows_no_fault),
    ("restart of a gateway", restart_of_peers_gateway_shows_no_fault),
    ("restart of the controller", restart_of_controller_shows_no_fault),
];

#[test]
fn idle_peering_shows_no_fault() -> Result<()> {
    connected(|scene| stay_well(scene, &["rome", "milan"], LONG))
}

/// The sender is on the node without the gateway, whose probes share the overlay with its packets.
#[test]
fn full_load_shows_no_fault() -> Result<()> {
    connected_with(2, |scene| {
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        let (_, target) = scene.way("rome", "milan")?;
        let pod = &scene.cluster("rome").nodes[1].pods[0];
        let to = SocketAddr::new(target, SINK);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut bytes = 0;
                while !is_over.load(Ordering::Relaxed) {
                    bulk(&pod.ns, to, 32 * MEGABYTES)?;
                    bytes += 32 * MEGABYTES;
                }
                Ok::<_, anyhow::Error>(bytes)
            });
            let well = stay_well(scene, &["rome", "milan"], LONG);
            is_over.store(true, Ordering::Relaxed);
            let bytes = load.join().expect("no panic")?;
            eprintln!("truth: {} MB under full load", bytes / MEGABYTES);
            well
        })
    })
}

#[test]
fn host_that_stood_still_shows_no_fault() -> Result<()> {
    connected(|scene| {
        let rome = scene.cluster("rome");
        signal_all(rome, &PROGRAMS, Signal::SIGSTOP)?;
        sleep(Duration::from_secs(4));
        signal_all(rome, &PROGRAMS, Signal::SIGCONT)?;
        stay_well(scene, &["rome"], LONG)?;
        solved(scene, "milan", Instant::now()).map(drop)
    })
}

#[test]
fn restart_of_peers_gateway_shows_no_fault() -> Result<()> {
    for (restarted, peer) in SIDES {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            connected(|scene| {
                signal_all(scene.cluster(restarted), &["gateway"], signal)?;
                stay_well(scene, &[peer], LONG)?;
                solved(scene, restarted, Instant::now()).map(drop)
            })?;
        }
    }
    Ok(())
}

#[test]
fn restart_of_controller_shows_no_fault() -> Result<()> {
    connected(|scene| {
        let rome = scene.cluster("rome");
        let killed = rome.processes(0, "fabric-controller");
        signal_all(rome, &["fabric-controller"], Signal::SIGKILL)?;
        // Until then, that it does not run is no false alarm.
        wait_until("another one runs", SOON, || {
            ensure!(rome.processes(0, "fabric-controller") != killed, "it still runs");
            is_well(scene, "rome")
        })?;
        stay_well(scene, &["rome", "milan"], LONG)
    })
}

fn connected(test: impl FnOnce(&Scene) -> Result<()>) -> Result<()> {
    connected_with(1, test)
}

/// Two clusters with that number of nodes each, once both are well.
fn connected_with(nodes: u8, test: impl FnOnce(&Scene) -> Result<()>) -> Result<()> {
    play(&rome_and_milan(nodes), |scene| {
        scene.peer("rome", "milan", PORT)?;
        for cluster in ["rome", "milan"] {
            solved(scene, cluster, Instant::now())?;
        }
        test(scene)
    })
}

/// Fails as soon as one of the clusters shows a fault or problem, or leaves Connected.
fn stay_well(scene: &Scene, clusters: &[&str], time: Duration) -> Result<()> {
    let (start, mut looks) = (Instant::now(), 0);
    while start.elapsed() < time {
        clusters.iter().try_for_each(|cluster| is_well(scene, cluster))?;
        looks += 1;
        sleep(Duration::from_millis(100));
    }
    ensure!(looks > 3, "only {looks} looks in {time:?}");
    Ok(())
}

fn signal_all(cluster: &Cluster, programs: &[&str], signal: Signal) -> Result<()> {
    let pids: Vec<_> = programs.iter().flat_map(|name| cluster.processes(0, name)).collect();
    ensure!(pids.len() >= programs.len(), "only {pids:?} run of {programs:?}");
    pids.into_iter().try_for_each(|pid| Ok(kill(Pid::from_raw(pid), signal)?))
}
