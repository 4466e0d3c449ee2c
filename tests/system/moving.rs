//! ```text
//!   rome-1 (client, 192.0.2.17, then 192.0.2.29) --------- milan-1 (server, maybe known by name)
//! ```

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::manifests::{self, Peering, join};
use weft_tests::traffic::udp_flow;
use weft_tests::wait_until;

use crate::scene::{
    ECHO, PATIENCE, PORT, Scene, first_pod, play, rome_and_milan, serve, traffic_passes,
};

#[test]
fn a_node_that_moves_keeps_its_peerings() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let pace = (Duration::from_millis(5), Duration::from_secs(3));
        let (report, moved) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
            std::thread::sleep(Duration::from_millis(500));
            rome.head().ip("addr del 192.0.2.17/24 dev eth0\naddr add 192.0.2.29/24 dev eth0\n\
                 route add default via 192.0.2.1\n")?;
            // As a kubelet would tell it.
            rome.apply("cluster", &manifests::own(&rome.spec).replace("192.0.2.17", "192.0.2.29"))
        })?;
        moved?;
        ensure!(
            report.longest_gap < Duration::from_millis(1500),
            "{:?} without an answer",
            report.longest_gap
        );
        wait_until("the server knows the new address", PATIENCE, || {
            let peering = milan.peering("rome")?;
            let endpoint = peering["endpoint"].as_str().unwrap_or_default();
            ensure!(endpoint.starts_with("192.0.2.29:"), "{peering}");
            ensure!(peering["state"] == "Connected", "{peering}");
            Ok::<_, anyhow::Error>(())
        })
    })
}

#[test]
fn the_server_may_be_known_by_a_name() -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(1))?;
    let hosts = scene.clusters[0].outside("/run/cluster/hosts");
    std::fs::write(hosts, "127.0.0.1 localhost\n192.0.2.33 gateway.milan.test\n")?;
    let bind = ["--bind", "/run/cluster/hosts", "/etc/hosts"];
    scene.clusters[0].head().command(Command::new("mount").args(bind), "")?;
    scene.clusters.iter_mut().try_for_each(weft_tests::Cluster::start)?;

    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
    peering.endpoint = vec!["gateway.milan.test".to_owned()];
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    rome.wait_connected("milan", PATIENCE)?;
    milan.wait_connected("rome", PATIENCE)?;
    traffic_passes(rome, milan)
}
