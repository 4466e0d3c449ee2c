//! Events that must not alarm.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use weft_tests::traffic::{Service, TcpServer, bulk};

use super::{Scene, print};
use crate::pair::{GATEWAYS, TIMEOUT};

/// Longer than several probes of either side.
const LONG: Duration = Duration::from_secs(7);
const SINK: u16 = 9000;
const MEGABYTES: u64 = 1 << 20;

pub(super) fn all(scene: &Scene<'_>) -> Result<()> {
    stay_well(scene, "idle")?;
    full_load(scene)?;
    controller_is_replaced(scene)?;
    agents_are_replaced(scene)?;
    gateway_is_replaced(scene)
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

/// It starts before the old one leaves, and then takes the peer's connection over.
fn gateway_is_replaced(scene: &Scene<'_>) -> Result<()> {
    let gateway = GATEWAYS[0];
    let restart = ["rollout", "restart", "deployment/gw-client", "--namespace", gateway.namespace];
    scene.cluster(0).kubectl(&restart)?;
    stay_well(scene, "gateway replaced")?;
    scene.wait_well(TIMEOUT)
}

/// Fails as soon as one of the clusters shows trouble with its peer.
fn stay_well(scene: &Scene<'_>, what: &str) -> Result<()> {
    let (start, mut looks) = (Instant::now(), 0);
    while start.elapsed() < LONG {
        for i in 0..2 {
            let status = scene.cluster(i).status()?;
            let peering = &status["peerings"][0];
            let is_well = peering["state"] == "Connected" && peering["faults"].is_null();
            ensure!(is_well, "{what}, after {:?}: {status}", start.elapsed());
        }
        looks += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(looks > 3, "only {looks} looks in {LONG:?}");
    print(what, &format!("(no alarm in {looks} looks)"), LONG);
    Ok(())
}
