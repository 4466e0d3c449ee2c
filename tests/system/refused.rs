//! ```text
//!   pod --- rome-1 -----/ /---- milan-1 (not there yet, or cut off)
//! ```

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::connect;
use weft_tests::{Netns, wait_until};

use crate::scene::{HTTP, PATIENCE, PORT, first_pod, play, rome_and_milan, serve, traffic_passes};

#[test]
fn connections_to_a_peer_that_never_came_are_reset_at_once() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        rome.apply("milan", &join(&peering.client_documents()))?;
        wait_until("rome sees milan somewhere", PATIENCE, || rome.view(&milan.spec))?;
        let (pod, target) = scene.way("rome", "milan")?;
        wait_until("the node knows the peer", PATIENCE, || refused(&pod.ns, target))?;
        for _ in 0..20 {
            refused(&pod.ns, target)?;
            refused(rome.head().net(), target)?;
        }
        Ok(())
    })
}

#[test]
fn a_peer_that_is_cut_off_is_noticed_refused_and_comes_back() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        scene.lab.cut("milan-1")?;
        // Five probes, two seconds apart.
        wait_until("rome says so", Duration::from_secs(20), || {
            let peering = rome.peering("milan")?;
            ensure!(peering["state"] == "Error", "{peering}");
            Ok::<_, anyhow::Error>(())
        })?;
        wait_until("connections are refused", PATIENCE, || refused(&pod.ns, target))?;
        scene.lab.restore("milan-1")?;
        rome.wait_connected("milan", PATIENCE)?;
        milan.wait_connected("rome", PATIENCE)?;
        drop(_servers);
        traffic_passes(rome, milan)
    })
}

/// Fails unless a connection is refused, and that without delay.
fn refused(ns: &Netns, target: IpAddr) -> Result<()> {
    let start = Instant::now();
    match connect(ns, SocketAddr::new(target, HTTP), Duration::from_secs(2)) {
        Ok(_) => bail!("it was accepted"),
        Err(error) => ensure!(error.kind() == ErrorKind::ConnectionRefused, "{error}"),
    }
    ensure!(start.elapsed() < Duration::from_millis(200), "it took {:?}", start.elapsed());
    Ok(())
}
