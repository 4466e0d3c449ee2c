//! ```text
//!   rome: pod --- rome-1 --------- milan-1 --- printer (192.0.2.200, no pod, knows no cluster)
//!                                  milan: IP resource, 10.70.0.x stands for 192.0.2.200
//! ```

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use weft_tests::traffic::{Service, TcpServer, http_get, ping};
use weft_tests::{manifests, on_segment, wait_until};

use crate::scene::{HTTP, PATIENCE, PORT, first_pod, play, rome_and_milan, serve};

#[test]
fn a_machine_outside_the_peer_is_reached_by_its_ip_resource() -> Result<()> {
    let outside: IpAddr = [192, 0, 2, 200].into();
    reaches_by_ip_resource(outside, true)
}

#[test]
fn a_pod_of_the_peer_is_reached_by_its_ip_resource() -> Result<()> {
    let pod: IpAddr = [10, 200, 1, 10].into();
    reaches_by_ip_resource(pod, false)
}

fn reaches_by_ip_resource(target: IpAddr, masquerade: bool) -> Result<()> {
    play(&rome_and_milan(2), |scene| {
        let printer = scene.lab.machine("printer", &[on_segment([192, 0, 2, 200].into())])?;
        let _printer = TcpServer::start(printer.net(), HTTP, Service::Http)?;
        let _pod = serve(first_pod(scene.cluster("milan")))?;
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        milan.apply("printer", &manifests::ip("printer", target, masquerade))?;
        let granted: IpAddr = wait_until("an address is granted", PATIENCE, || {
            let text = milan.weft(&["get", "ip", "printer", "-o", "json"])?;
            let ip: serde_json::Value = serde_json::from_str(&text)?;
            let granted = ip["status"]["ip"].as_str().with_context(|| format!("none: {ip}"))?;
            Ok::<IpAddr, anyhow::Error>(granted.parse()?)
        })?;
        let address = rome.view(&milan.spec)?.of(granted)?;
        for pod in rome.pods() {
            wait_until("the address answers", PATIENCE, || {
                let stats = ping(&pod.ns, address, 1)?;
                ensure!(stats.lost == 0, "{} to {address}: {stats:?}", pod.name);
                Ok::<_, anyhow::Error>(())
            })?;
            http_get(&pod.ns, SocketAddr::new(address, HTTP)).with_context(|| pod.name.clone())?;
        }
        Ok(())
    })
}
