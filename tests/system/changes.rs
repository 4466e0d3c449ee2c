//! ```text
//!   rome --------- milan --------- turin        what happens to turin must not touch rome
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::manifests::{Spelling, configuration, join};
use weft_tests::traffic::udp_flow;
use weft_tests::{Cluster, ClusterSpec, wait_until};

use crate::scene::{ECHO, PORT, SOON, Scene, first_pod, play, serve, traffic_passes};

fn three() -> Vec<ClusterSpec> {
    ["rome", "milan", "turin"].iter().zip(1..).map(|(id, n)| ClusterSpec::new(id, n, 1)).collect()
}

#[test]
fn peering_returns_without_loss_on_another() -> Result<()> {
    play(&three(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let peering = scene.peer("milan", "turin", PORT)?;
        let milan = scene.cluster("milan");
        let seen = milan.view(&scene.cluster("turin").spec)?.0[0].1.to_string();

        undisturbed(scene, || {
            ensure!(routes(milan)?.contains(&seen), "no route to turin at first");
            milan.remove("turin")?;
            wait_until("no route leads to the removed peering", SOON, || {
                let routes = routes(milan)?;
                ensure!(!routes.contains(&format!("{seen} via")), "there still is\n{routes}");
                ensure!(milan.processes(0, "gateway").len() == 1, "its gateway still runs");
                Ok::<_, anyhow::Error>(())
            })?;
            milan.apply("turin", &join(&peering.client_documents()))?;
            milan.wait_connected("turin", SOON * 2)
        })?;
        traffic_passes(milan, scene.cluster("turin"))
    })
}

#[test]
fn edit_is_in_kernel_within_a_second() -> Result<()> {
    play(&three(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let mut peering = scene.peer("milan", "turin", PORT)?;
        let (milan, turin) = (scene.cluster("milan"), scene.cluster("turin"));
        undisturbed(scene, || {
            peering.mtu = 1290;
            milan.apply("turin", &join(&peering.client_documents()))?;
            wait_until("the routes have the new MTU", SOON, || {
                let routes = routes(milan)?;
                let there = routes.lines().any(|line| line.contains("mtu 1290"));
                ensure!(there, "there is\n{routes}");
                Ok::<_, anyhow::Error>(())
            })
        })?;
        traffic_passes(milan, turin)
    })
}

#[test]
fn a_broken_manifest_is_reported_and_changes_nothing() -> Result<()> {
    play(&three()[..2], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let before = routes(milan)?;
        let broken =
            configuration(&rome.spec, Spelling::List).replace("10.200.0.0/16", "10.200.0.0/33");
        undisturbed(scene, || {
            milan.apply("broken", &broken.replace("name: rome", "name: rome2"))?;
            wait_until("the mistake is reported", SOON * 2, || {
                let status = milan.status()?;
                ensure!(status["problems"].to_string().contains("10.200.0.0/33"), "{status}");
                Ok::<_, anyhow::Error>(())
            })
        })?;
        ensure!(routes(milan)? == before, "the routes changed");
        Ok(())
    })
}

#[test]
fn a_peering_ends_although_the_other_side_is_gone() -> Result<()> {
    play(&three()[..2], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        milan.weft(&["down"])?;
        let seen = rome.view(&milan.spec)?.0[0].1.to_string();
        rome.remove("milan")?;
        wait_until("no route leads to the removed peering", SOON, || {
            let routes = routes(rome)?;
            ensure!(!routes.contains(&format!("{seen} via")), "there still is\n{routes}");
            ensure!(rome.processes(0, "gateway").is_empty(), "its gateway still runs");
            Ok::<_, anyhow::Error>(())
        })
    })
}

/// Fails if a numbered stream between rome and milan loses anything meanwhile.
fn undisturbed(scene: &Scene, change: impl FnOnce() -> Result<()>) -> Result<()> {
    let _servers = serve(first_pod(scene.cluster("milan")))?;
    let (pod, target) = scene.way("rome", "milan")?;
    let pace = (Duration::from_millis(5), Duration::from_secs(3));
    let (report, result) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, change)?;
    result?;
    ensure!(report.lost.is_empty() && report.reordered == 0, "the other peering: {report:?}");
    Ok(())
}

fn routes(cluster: &Cluster) -> Result<String> {
    let mut ip = std::process::Command::new("ip");
    cluster.head().command(ip.args(["route", "show", "table", "18952"]), "")
}
