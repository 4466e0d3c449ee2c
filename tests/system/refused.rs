//! ```text
//!   pod --- rome-1 -----/ /---- milan-1 (not there yet)
//! ```

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::connect;
use weft_tests::{Netns, wait_until};

use crate::scene::{HTTP, PATIENCE, PORT, play, rome_and_milan};

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
