//! Events that must not alarm.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use weft_tests::kubernetes::Object;
use weft_tests::traffic::{Service, TcpServer, bulk};

use super::faults::agent_of;
use super::{MAX, Scene, print};
use crate::pair::{GATEWAYS, TIMEOUT, pod_of};

/// Longer than several probes of either side.
const LONG: Duration = Duration::from_secs(7);
const STILL: Duration = Duration::from_secs(4);
/// Interval of the other nodes' probes: until the next one they report that a gateway was still.
const PROBES: Duration = Duration::from_secs(1);
const STOOD_STILL: &str = "host stood still";
const UNREACHED: &str = "is ready, but no other node reaches it over VXLAN";
const SINK: u16 = 9000;
const MEGABYTES: u64 = 1 << 20;

pub(super) fn all(scene: &Scene<'_>, runs: usize) -> Result<()> {
    let controls = [
        |scene: &Scene<'_>| stay_well(scene, "idle"),
        full_load,
        host_stands_still,
        controller_is_replaced,
        agents_are_replaced,
        gateway_is_replaced,
    ];
    controls.iter().try_for_each(|control| (0..runs).try_for_each(|_| control(scene)))
}

/// Stops the programs of weft and the kubelet, whose probes they would miss, on the node of rome's gateway for
/// [`STILL`]. The peer, which gets no answer meanwhile, reports that.
fn host_stands_still(scene: &Scene<'_>) -> Result<()> {
    let (rome, gateway) = (scene.cluster(0), GATEWAYS[0]);
    let pod = rome.get(Object::new("pod", gateway.namespace, &pod_of(rome, gateway)?))?;
    let node = pod["spec"]["nodeName"].as_str().context("the gateway's pod is on a node")?;
    let agent = agent_of(rome, node)?;
    let machine = rome.machines.iter().find(|machine| machine.name == node);
    let on_node = machine.context("the pod's node is a machine")?.host.processes();
    let kubelet = on_node.iter().find(|(_, line)| line.contains("/kubelet "));
    let processes = [
        rome.process_in(gateway.namespace, &pod_of(rome, gateway)?, "gateway")?,
        rome.process_in("liqo", &agent, "route-agent")?,
        kubelet.context("a node runs a kubelet")?.0,
    ];
    let all = |signal| processes.iter().try_for_each(|pid| kill(Pid::from_raw(*pid), signal));
    all(Signal::SIGSTOP)?;
    std::thread::sleep(STILL);
    all(Signal::SIGCONT)?;
    stay_well_while(scene, &[0], STOOD_STILL, || Ok(()))?;
    scene.wait_well(TIMEOUT)
}

fn full_load(scene: &Scene<'_>) -> Result<()> {
    let [of_milan, _] = scene.pair.views()?;
    let (from, to) = (&scene.pair.pods[0][1], &scene.pair.pods[1][1]);
    let _server = TcpServer::start(&to.ns, SINK, Service::Sink)?;
    let to = SocketAddr::new(of_milan.of(to.addresses[0])?, SINK);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                bulk(&from.ns, to, 32 * MEGABYTES)?;
            }
            Ok::<_, anyhow::Error>(())
        });
        let well = stay_well(scene, "full load");
        is_over.store(true, Ordering::Relaxed);
        load.join().expect("no panic")?;
        well
    })
}

fn controller_is_replaced(scene: &Scene<'_>) -> Result<()> {
    replace(scene, "controller replaced", ["liqo", "deployment/liqo-fabric-controller"])
}

fn agents_are_replaced(scene: &Scene<'_>) -> Result<()> {
    replace(scene, "agents replaced", ["liqo", "daemonset/liqo-route-agent"])
}

/// The new one starts before the old one leaves, and then takes the peer's connection over.
fn gateway_is_replaced(scene: &Scene<'_>) -> Result<()> {
    replace(scene, "gateway replaced", [GATEWAYS[0].namespace, "deployment/gw-client"])
}

/// Replaces all pods of a workload of rome's.
fn replace(scene: &Scene<'_>, what: &str, [namespace, workload]: [&str; 2]) -> Result<()> {
    stay_well_while(scene, &[0, 1], what, || {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let rollout = |verb, more: &[&str]| {
            let line = ["rollout", verb, workload, "--namespace", namespace];
            scene.cluster(0).kubectl(&[&line[..], more].concat()).map(drop)
        };
        rollout("restart", &[])?;
        rollout("status", &[&timeout])?;
        // The new pods report what they find wrong within so long.
        std::thread::sleep(MAX);
        Ok(())
    })?;
    scene.wait_well(TIMEOUT)
}

/// Fails as soon as one of the clusters shows trouble with its peer, for [`LONG`].
fn stay_well(scene: &Scene<'_>, what: &str) -> Result<()> {
    stay_well_while(scene, &[0, 1], what, || Ok(()))
}

/// The same at least until `event` has ended.
fn stay_well_while(
    scene: &Scene<'_>,
    clusters: &[usize],
    what: &str,
    event: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    let (start, mut looks) = (Instant::now(), 0);
    std::thread::scope(|scope| {
        let event = scope.spawn(event);
        while start.elapsed() < LONG || !event.is_finished() {
            clusters.iter().try_for_each(|i| is_quiet(scene, *i, what, start.elapsed()))?;
            looks += 1;
            std::thread::sleep(Duration::from_millis(100));
        }
        event.join().expect("no panic")
    })?;
    ensure!(looks > 3, "only {looks} looks in {:?}", start.elapsed());
    print(what, &format!("(no alarm in {looks} looks)"), start.elapsed());
    Ok(())
}

fn is_quiet(scene: &Scene<'_>, i: usize, what: &str, after: Duration) -> Result<()> {
    let (status, code) = scene.cluster(i).status_and_code()?;
    let peering = &status["peerings"][0];
    let problems = status["problems"].as_array().into_iter().flatten();
    // A pod that is being replaced is named while it is.
    let is_of_pod = |line: &Value| {
        !["idle", "full load", STOOD_STILL].contains(&what)
            && line.as_str().is_some_and(|line| line.contains("pod"))
    };
    let has_problems = problems.clone().any(|line| !is_of_pod(line));
    let is_of_others = |line: &Value| line.as_str().is_some_and(|l| l.contains(UNREACHED));
    let is_only_of_others = has_problems && problems.clone().all(is_of_others);
    if what == STOOD_STILL && after < PROBES && is_only_of_others {
        // Until their next probe, no other node has seen it answer, and it is not called Connected.
        ensure!(peering["state"] == "Error" && code == 3, "exit code {code}: {status}");
        return Ok(());
    }
    let is_well = peering["state"] == "Connected" && peering["faults"].is_null();
    ensure!(
        is_well && code == 0 && !has_problems,
        "{what}, after {after:?}, exit code {code}: {status}"
    );
    Ok(())
}
