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
use super::{Scene, print};
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
    stay_well_of(scene, &[0], STOOD_STILL)?;
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
    let restart = ["rollout", "restart", "deployment/liqo-fabric-controller", "--namespace=liqo"];
    scene.cluster(0).kubectl(&restart)?;
    stay_well(scene, "controller replaced")?;
    scene.cluster(0).wait_for_weft(TIMEOUT)?;
    scene.wait_well(TIMEOUT)
}

fn agents_are_replaced(scene: &Scene<'_>) -> Result<()> {
    let restart = ["rollout", "restart", "daemonset/liqo-route-agent", "--namespace=liqo"];
    scene.cluster(0).kubectl(&restart)?;
    stay_well(scene, "agents replaced")?;
    scene.cluster(0).wait_for_weft(TIMEOUT)?;
    scene.wait_well(TIMEOUT)
}

/// The new one starts before the old one leaves, and then takes the peer's connection over.
fn gateway_is_replaced(scene: &Scene<'_>) -> Result<()> {
    let gateway = GATEWAYS[0];
    let restart = ["rollout", "restart", "deployment/gw-client", "--namespace", gateway.namespace];
    scene.cluster(0).kubectl(&restart)?;
    stay_well(scene, "gateway replaced")?;
    scene.wait_well(TIMEOUT)
}

/// Fails as soon as one of the clusters shows trouble with its peer.
fn stay_well(scene: &Scene<'_>, what: &str) -> Result<()> {
    stay_well_of(scene, &[0, 1], what)
}

fn stay_well_of(scene: &Scene<'_>, clusters: &[usize], what: &str) -> Result<()> {
    let (start, mut looks) = (Instant::now(), 0);
    while start.elapsed() < LONG {
        for i in clusters.iter().copied() {
            let (status, code) = scene.cluster(i).status_and_code()?;
            let peering = &status["peerings"][0];
            let is_well = peering["state"] == "Connected" && peering["faults"].is_null();
            let problems = status["problems"].as_array().into_iter().flatten();
            // A pod that is being replaced is named while it is.
            let is_of_pod = |line: &Value| {
                !["idle", "full load", STOOD_STILL].contains(&what)
                    && line.as_str().is_some_and(|line| line.contains("pod"))
            };
            let has_problems = problems.clone().any(|line| !is_of_pod(line));
            let is_of_others = |line: &Value| line.as_str().is_some_and(|l| l.contains(UNREACHED));
            let is_only_of_others = has_problems && problems.clone().all(is_of_others);
            if what == STOOD_STILL && start.elapsed() < PROBES && is_only_of_others {
                continue;
            }
            ensure!(
                is_well && code == 0 && !has_problems,
                "{what}, after {:?}, exit code {code}: {status}",
                start.elapsed()
            );
        }
        looks += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(looks > 3, "only {looks} looks in {LONG:?}");
    print(what, &format!("(no alarm in {looks} looks)"), LONG);
    Ok(())
}
