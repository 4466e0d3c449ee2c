//! ```text
//!                            192.0.2.33, .43 eth0 +-----------+
//!   rome-1 (client) ---+------------ segment -----|           |
//!       192.0.2.17     |        198.51.100.2, .3  |  milan-1  |  default route: up1, later up2
//!                      +--- nat ------------- up1 |  (server) |
//!               192.0.2.200  \---------------- up2 |           |
//!                                     203.0.113.2 +-----------+
//! ```
//!
//! The NAT has 100.64.0.1 towards milan, and lets nothing pass to rome but answers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::udp_flow;
use weft_tests::{Host, on_segment, wait_until};

use crate::scene::{
    ECHO, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve, traffic_passes,
};

const NAT: [u8; 4] = [192, 0, 2, 200];
const FIRST: &str = "198.51.100.2";
const SECOND: &str = "198.51.100.3";
const OTHER_UPLINK: &str = "203.0.113.2";
/// Time without an answer when nothing is to be lost: a busy machine.
const NOTHING: Duration = Duration::from_millis(400);
/// Time in which packets may be lost after an address went.
const BACK: Duration = Duration::from_secs(3);

/// Puts the NAT in place, as the router of both.
fn behind_nat(scene: &Scene) -> Result<Host> {
    let nat = scene.lab.machine("nat", &[on_segment(NAT.into())])?;
    let (rome, milan) = (scene.cluster("rome").head(), scene.cluster("milan").head());
    milan.net().sysctl(&[
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/conf/eth0/rp_filter", "0"),
    ])?;
    nat.net().sysctl(&[
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv4/ip_forward", "1"),
    ])?;
    nat.net().ip(&format!(
        "link add name up1 type veth peer name up1 netns {0}\n\
         link add name up2 type veth peer name up2 netns {0}\n\
         addr add 198.51.100.1/24 dev up1\naddr add 203.0.113.1/24 dev up2\n\
         addr add 100.64.0.1/32 dev lo\nlink set up1 up\nlink set up2 up\n",
        milan.holder()
    ))?;
    milan.ip(&format!(
        "addr add {FIRST}/24 dev up1\naddr add {SECOND}/24 dev up1\n\
         addr add {OTHER_UPLINK}/24 dev up2\nlink set up1 up\nlink set up2 up\n\
         route replace default via 198.51.100.1 dev up1\n"
    ))?;
    rome.ip(&format!("route replace default via {}\n", IpAddr::from(NAT)))?;
    nat.net().nft(
        "table ip nat {\nchain out { type nat hook postrouting priority 100;\n\
         ip saddr 192.0.2.17 oifname \"up*\" snat to 100.64.0.1;\n}\n\
         chain answers { type filter hook forward priority 0;\n\
         iifname \"up*\" ct state != established drop;\n}\n}\n",
    )?;
    Ok(nat)
}

/// Peering in force, by which rome finds milan at that address.
fn peer_at(scene: &Scene, address: &str) -> Result<Peering> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
    peering.endpoint = vec![address.to_owned()];
    milan.apply("rome", &join(&peering.server_documents()))?;
    rome.apply("milan", &join(&peering.client_documents()))?;
    is_at(scene, address)?;
    Ok(peering)
}

/// Waits until both are connected, by that address of milan.
fn is_at(scene: &Scene, address: &str) -> Result<()> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    rome.wait_connected("milan", TIMEOUT)?;
    milan.wait_connected("rome", TIMEOUT)?;
    wait_until(&format!("milan is reached at {address}"), TIMEOUT, || {
        let peering = rome.peering("milan")?;
        ensure!(peering["endpoint"] == format!("{address}:{PORT}"), "{peering}");
        Ok::<_, anyhow::Error>(())
    })
}

/// The longest time without an answer while milan's addresses or routes change, for a pod of rome.
fn gap_while(scene: &Scene, change: &str) -> Result<Duration> {
    let _servers = serve(first_pod(scene.cluster("milan")))?;
    let (pod, target) = scene.way("rome", "milan")?;
    let pace = (Duration::from_millis(10), Duration::from_secs(5));
    let (report, changed) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
        std::thread::sleep(Duration::from_millis(500));
        scene.cluster("milan").head().ip(change)
    })?;
    changed?;
    eprintln!("{change}{:?} without an answer", report.longest_gap);
    Ok(report.longest_gap)
}

#[test]
fn every_address_of_a_server_answers_through_nat() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let _nat = behind_nat(scene)?;
        let mut peering = peer_at(scene, SECOND)?;
        traffic_passes(scene.cluster("milan"), scene.cluster("rome"))?;
        for address in [OTHER_UPLINK, FIRST] {
            peering.endpoint = vec![address.to_owned()];
            scene.cluster("rome").apply("milan", &join(&peering.client_documents()))?;
            is_at(scene, address)?;
            traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;
        }
        Ok(())
    })
}

#[test]
fn moved_default_route_keeps_address_asked() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let _nat = behind_nat(scene)?;
        peer_at(scene, SECOND)?;
        let routes = ["default via 203.0.113.1 dev up2", "default via 198.51.100.1 dev up1"];
        for route in routes {
            let gap = gap_while(scene, &format!("route replace {route}\n"))?;
            ensure!(gap < NOTHING, "{gap:?} without an answer after {route}");
            is_at(scene, SECOND)?;
        }
        Ok(())
    })
}

/// On one segment, without a NAT: the client follows.
#[test]
fn removed_address_is_replaced_by_another() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.cluster("milan").head().ip("addr add 192.0.2.43/24 dev eth0\n")?;
        peer_at(scene, "192.0.2.43")?;
        let gap = gap_while(scene, "addr del 192.0.2.43/24 dev eth0\n")?;
        ensure!(gap < BACK, "{gap:?} without an answer");
        is_at(scene, "192.0.2.33")
    })
}
