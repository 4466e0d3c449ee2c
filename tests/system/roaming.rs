//! ```text
//!   rome-1 (client, behind a NAT) --------- milan-1 (server, known by a name)
//! ```
//!
//! The NAT is a few stateless rules on rome-1 itself: whatever the gateway's own port is, milan
//! sees the one in the rules.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{ping, udp_flow};
use weft_tests::{Cluster, ClusterSpec, SWITCH_V4, manifests, wait_until};

use crate::scene::{
    ECHO, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve, traffic_passes,
};

/// From the first packet that comes from elsewhere.
const ROAMED: Duration = Duration::from_secs(1);
/// Three unanswered probes, a lookup and a handshake; and what a client that has never been
/// connected waits before it tries another way.
const RESOLVED: Duration = Duration::from_secs(30);
const HOSTS: &str = "/run/cluster/hosts";
const NAME: &str = "gateway.milan.test";

#[test]
fn server_follows_client_behind_changing_nat() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        let own_port = listen_port(scene.cluster("rome"))?;
        for (nat_port, is_server_alone) in [(40_001, false), (40_002, true)] {
            // The first packet informs the server; then its sender must not be the server itself.
            let from = if is_server_alone { ["milan", "rome"] } else { ["rome", "milan"] };
            follow(scene, from, own_port, nat_port)?;
            is_seen_at(scene.cluster("milan"), &format!("192.0.2.17:{nat_port}"))?;
        }
        Ok(())
    })
}

/// A flow from one cluster to the other goes on while the NAT takes another port.
fn follow(scene: &Scene, [from, to]: [&str; 2], own_port: u64, nat_port: u16) -> Result<()> {
    let _servers = if to == "milan" { None } else { Some(serve(first_pod(scene.cluster(to)))?) };
    let (pod, target) = scene.way(from, to)?;
    let nat = format!(
        "table ip nat_box\ndelete table ip nat_box\ntable ip nat_box {{\n\
         chain out {{ type filter hook postrouting priority 300;\n\
         udp sport {own_port} udp dport {PORT} udp sport set {nat_port};\n}}\n\
         chain in {{ type filter hook prerouting priority -400;\n\
         udp sport {PORT} udp dport {nat_port} udp dport set {own_port} accept\n\
         udp sport {PORT} udp dport {own_port} drop;\n}}\n}}\n"
    );
    let pace = (Duration::from_millis(5), Duration::from_secs(4));
    let (report, changed) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
        std::thread::sleep(Duration::from_millis(300));
        scene.cluster("rome").head().net().nft(&nat)
    })?;
    changed?;
    // A client that only answers is received again with its next probe, at most two seconds later.
    let most = if from == "rome" { ROAMED } else { ROAMED + Duration::from_secs(2) };
    eprintln!("{from} to {to}: {:?} without an answer", report.longest_gap);
    ensure!(
        report.longest_gap < most,
        "{from} to {to}: {:?} without an answer",
        report.longest_gap
    );
    Ok(())
}

/// A NAT in front of the server has sent from another port than the configured one, which it closes then.
#[test]
fn client_goes_back_to_the_configured_endpoint() -> Result<()> {
    const STALE: u16 = 40_003;
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, own_port) = (scene.cluster("rome"), listen_port(scene.cluster("rome"))?);
        let nat = |out: &str, input: &str| {
            rome.head().net().nft(&format!(
                "table ip nat_box\ndelete table ip nat_box\ntable ip nat_box {{\n\
                 chain out {{ type filter hook postrouting priority 300;\n{out};\n}}\n\
                 chain in {{ type filter hook prerouting priority -400;\n{input};\n}}\n}}\n"
            ))
        };
        let endpoint = |port: u16| {
            let peering = rome.peering("milan")?;
            let found = peering["endpoint"].as_str().unwrap_or_default();
            let is_it = found.ends_with(&format!(":{port}")) && peering["state"] == "Connected";
            ensure!(is_it, "{peering}");
            Ok::<_, anyhow::Error>(())
        };
        nat(
            &format!("udp dport {STALE} udp dport set {PORT}"),
            &format!("udp sport {PORT} udp sport set {STALE}"),
        )?;
        wait_until("the client follows", TIMEOUT, || endpoint(STALE))?;
        nat(&format!("udp dport {STALE} drop"), &format!("udp dport {own_port} drop"))?;
        wait_until("the client goes back", TIMEOUT, || endpoint(PORT))
    })
}

/// The client gateway's UDP port.
fn listen_port(cluster: &Cluster) -> Result<u64> {
    let text = cluster.weft(&[
        "get",
        "gatewayconfig",
        "client",
        "-n",
        "liqo-tenant-milan",
        "-o",
        "json",
    ])?;
    let found: serde_json::Value = serde_json::from_str(&text)?;
    found["status"]["listenPort"].as_u64().with_context(|| format!("no port: {found}"))
}

fn is_seen_at(milan: &Cluster, endpoint: &str) -> Result<()> {
    wait_until("the server says where the client is", TIMEOUT, || {
        let peering = milan.peering("rome")?;
        ensure!(peering["endpoint"] == endpoint && peering["state"] == "Connected", "{peering}");
        Ok::<_, anyhow::Error>(())
    })
}

#[test]
fn a_name_that_was_wrong_at_first_is_looked_up_again() -> Result<()> {
    with_a_name("192.0.2.99", |scene, hosts| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        std::thread::sleep(Duration::from_secs(2));
        ensure!(rome.peering("milan")?["state"] == "Connecting", "{}", rome.peering("milan")?);
        hosts.point_to("192.0.2.33")?;
        rome.wait_connected("milan", RESOLVED)?;
        milan.wait_connected("rome", TIMEOUT)?;
        traffic_passes(rome, milan)
    })
}

#[test]
fn a_client_follows_the_name_of_a_server_that_moved() -> Result<()> {
    with_a_name("192.0.2.33", |scene, hosts| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        rome.wait_connected("milan", TIMEOUT)?;
        milan.wait_connected("rome", TIMEOUT)?;
        // A firewall in front of the server lets nothing out that was not asked for, or the
        // server's own packets would show the client its new address.
        milan.head().net().nft(&format!(
            "table ip front {{\nchain out {{ type filter hook output priority 0;\n\
             udp sport {PORT} ct direction original drop;\n}}\n}}\n"
        ))?;
        let moved = ClusterSpec { number: 3, ..milan.spec.clone() };
        let (old, new) = (milan.spec.node_address(1), moved.node_address(1));
        milan.head().ip(&format!(
            "addr del {old}/24 dev eth0\naddr add {new}/24 dev eth0\n\
             route add default via {SWITCH_V4}\n",
        ))?;
        milan.apply("cluster", &manifests::own(&moved))?;
        hosts.point_to(&new.to_string())?;
        let (pod, target) = scene.way("rome", "milan")?;
        wait_until("packets pass again", RESOLVED, || {
            let stats = ping(&pod.ns, target, 1)?;
            ensure!(stats.lost == 0, "{stats:?}");
            Ok::<_, anyhow::Error>(())
        })?;
        let endpoint = rome.peering("milan")?["endpoint"].clone();
        ensure!(endpoint == format!("{new}:{PORT}"), "it is at {endpoint}");
        Ok(())
    })
}

/// File that rome's resolver reads instead of `/etc/hosts`.
struct Hosts(std::path::PathBuf);

impl Hosts {
    /// In place: the file is mounted over another.
    fn point_to(&self, address: &str) -> Result<()> {
        let text = format!("127.0.0.1 localhost\n{address} {NAME}\n");
        fs::write(&self.0, text).with_context(|| format!("writing {}", self.0.display()))
    }
}

/// Peers rome with milan, which it knows by a name that stands for `address`.
fn with_a_name(address: &str, test: impl FnOnce(&Scene, &Hosts) -> Result<()>) -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(1))?;
    let hosts = Hosts(scene.clusters[0].outside(HOSTS));
    hosts.point_to(address)?;
    let bind = ["--bind", HOSTS, "/etc/hosts"];
    scene.clusters[0].head().command(Command::new("mount").args(bind), "")?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;

    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
    peering.endpoint = vec![NAME.to_owned()];
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    let result = test(&scene, &hosts);
    if result.is_err() {
        scene.clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
    }
    result
}
