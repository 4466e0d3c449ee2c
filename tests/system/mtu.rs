//! ```text
//!   pod (1500) --- rome-1 --- tunnel (1340) --- milan-1 --- pod (1500)
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::traffic::{PingError, Pinger, bulk};
use weft_tests::{ClusterSpec, Pod};

use crate::scene::{PORT, SINK, first_pod, play, rome_and_milan, serve};

const TUNNEL: usize = 1340;

#[test]
fn oversized_packets_get_icmp_in_both_families() -> Result<()> {
    play(&rome_and_milan(1).map(ClusterSpec::dual_stack), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let view = rome.view(&milan.spec)?;
        for real in &first_pod(milan).addresses {
            limit_is(first_pod(rome), view.of(*real)?, TUNNEL)?;
        }
        Ok(())
    })
}

/// A packet of this size passes, a larger one is answered with this size.
fn limit_is(pod: &Pod, to: IpAddr, limit: usize) -> Result<()> {
    let pinger = Pinger::new(&pod.ns, to)?;
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let wait = Duration::from_secs(1);
    let fits = pinger.echo(1, limit - headers, wait)?;
    ensure!(fits.is_ok(), "{limit} bytes to {to}: {fits:?}");
    let over = pinger.echo(2, limit - headers + 1, wait)?;
    let expected = Err(PingError::TooBig { mtu: u32::try_from(limit)? });
    ensure!(over == expected, "{} bytes to {to}: {over:?}", limit + 1);
    Ok(())
}

#[test]
fn small_underlay_shrinks_tunnel_and_tcp_passes() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        for cluster in &scene.clusters {
            cluster.head().ip("link set dev eth0 mtu 1300\n")?;
        }
        scene.peer("rome", "milan", PORT)?;
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        let (pod, target) = scene.way("rome", "milan")?;
        limit_is(&pod, target, 1240)?;
        bulk(&pod.ns, SocketAddr::new(target, SINK), 5_000_000).map(drop)
    })
}
