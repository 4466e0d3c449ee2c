//! ```text
//!   pod --- rome-1 --------- milan-1 --- pod        each process of rome killed in turn
//! ```

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::traffic::{FlowReport, udp_flow};
use weft_tests::{Cluster, wait_until};

use crate::scene::{
    ECHO, PATIENCE, PORT, Scene, first_pod, play, rome_and_milan, serve, traffic_passes,
};

/// From the start of the process; the supervisor's own pause comes before that.
const FIRST_PACKET: Duration = Duration::from_millis(300);

#[test]
fn control_processes_can_be_killed_without_losing_a_packet_or_an_address() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let before = granted(rome)?;
        let report = with_flow(scene, Duration::from_secs(4), || {
            ["ipam", "fabric-controller", "route-agent"]
                .iter()
                .try_for_each(|p| replace(rome, p).map(drop))
        })?;
        ensure!(report.lost.is_empty(), "{report:?}");
        rome.wait_connected("milan", PATIENCE)?;
        ensure!(granted(rome)? == before, "before:\n{before}\nafter:\n{}", granted(rome)?);
        traffic_passes(rome, scene.cluster("milan"))
    })
}

#[test]
fn gateways_outlive_a_killed_weft_up_and_the_next_takes_them_over() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let gateway = scene.cluster("rome").processes(0, "gateway");
        let before = granted(scene.cluster("rome"))?;
        let up = scene.cluster_mut("rome").take_program("weft-up")?;
        up.signal(Signal::SIGKILL)?;
        let report = with_flow(scene, Duration::from_secs(1), || Ok(()))?;
        ensure!(report.lost.is_empty(), "{report:?}");

        scene.cluster_mut("rome").start_up(&[])?;
        let rome = scene.cluster("rome");
        rome.wait_connected("milan", PATIENCE)?;
        ensure!(rome.processes(0, "gateway") == gateway, "the gateway was replaced");
        ensure!(granted(rome)? == before, "something was granted anew");
        let _gone = up;
        traffic_passes(rome, scene.cluster("milan"))
    })
}

#[test]
fn a_killed_gateway_is_back_at_once_in_either_role() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        for id in ["rome", "milan"] {
            let cluster = scene.cluster(id);
            let before = granted(cluster)?;
            let mut best = Duration::MAX;
            for _ in 0..3 {
                best = best.min(outage(scene, cluster)?);
            }
            eprintln!("gateway of {id}: first packet {best:?} after its start");
            ensure!(best <= FIRST_PACKET, "the gateway of {id} took {best:?}");
            cluster.wait_connected(if id == "rome" { "milan" } else { "rome" }, PATIENCE)?;
            ensure!(granted(cluster)? == before, "something was granted anew");
        }
        Ok(())
    })
}

/// Kills the gateway; how long after its successor's start packets pass again.
fn outage(scene: &Scene, cluster: &Cluster) -> Result<Duration> {
    let mut supervisor = Duration::ZERO;
    let report = with_flow(scene, Duration::from_secs(3), || {
        std::thread::sleep(Duration::from_millis(200));
        let killed = Instant::now();
        replace(cluster, "gateway")?;
        supervisor = killed.elapsed();
        Ok(())
    })?;
    eprintln!(
        "killed: {:?} without an answer, of which {supervisor:?} without a process",
        report.longest_gap
    );
    Ok(report.longest_gap.saturating_sub(supervisor))
}

/// Kills a process and waits for the supervisor to start another; its ID.
fn replace(cluster: &Cluster, program: &str) -> Result<i32> {
    let old = cluster.processes(0, program);
    let pid = *old.first().with_context(|| format!("no {program} runs"))?;
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    let what = format!("another {program} runs");
    let new = wait_until(&what, PATIENCE, || {
        let now = cluster.processes(0, program);
        now.into_iter().find(|pid| !old.contains(pid)).ok_or("none does")
    })?;
    Ok(new)
}

fn with_flow(
    scene: &Scene,
    for_long: Duration,
    during: impl FnOnce() -> Result<()>,
) -> Result<FlowReport> {
    let _servers = serve(first_pod(scene.cluster("milan")))?;
    let (pod, target) = scene.way("rome", "milan")?;
    let pace = (Duration::from_millis(5), for_long);
    let (report, result) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, during)?;
    result?;
    Ok(report)
}

/// Every prefix and address granted in a cluster, one a line.
fn granted(cluster: &Cluster) -> Result<String> {
    let mut lines = Vec::new();
    for kind in ["network", "ip"] {
        let text = cluster.weft(&["get", kind, "-o", "json"])?;
        let list: serde_json::Value = serde_json::from_str(&text)?;
        for item in list["items"].as_array().into_iter().flatten() {
            lines.push(format!("{kind} {} {}", item["metadata"]["name"], item["status"]));
        }
    }
    lines.sort();
    Ok(lines.join("\n"))
}
