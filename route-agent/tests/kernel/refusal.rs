//! Packets to peers that are gone are refused.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use fabric_api::fabric::{NodeConfigSpec, RefusedPrefix, RefusedTraffic};
use fabric_store::{Kind, ObjectRef};
use futures::FutureExt as _;
use netlink::Netns;

use crate::node::{PEER, PEER_V6, World, config, connect, eventually, sh};

const SOON: Duration = Duration::from_secs(8);

fn without_peering(seconds: u32) -> NodeConfigSpec {
    NodeConfigSpec { peerings: vec![], refuse_seconds: Some(seconds), ..config() }
}

fn refusal(world: &World, peer: &str) -> Option<ErrorKind> {
    let to = SocketAddr::new(peer.parse().unwrap(), 80);
    connect(&world.pod, to).err().map(|error| error.kind())
}

fn is_refusing(world: &World) -> bool {
    sh(&world.node, "nft list tables").contains("weft_refused")
}

#[test]
fn departed_prefix_is_refused_until_quiet() {
    let world = World::running(config());
    let prefix =
        |text: &str| RefusedPrefix { peer_cluster_id: "milan".to_owned(), prefix: text.to_owned() };
    let refused = vec![prefix("10.201.0.0/16")];
    world.reconfigure(NodeConfigSpec { refused, ..without_peering(2) });
    for peer in [PEER, PEER_V6] {
        assert_eq!(refusal(&world, peer), Some(ErrorKind::ConnectionRefused), "{peer}");
    }
    eventually("the status has the sender", SOON, || {
        let pod: [IpAddr; 1] = [[10, 200, 1, 2].into()];
        world.refused().iter().any(|r| r.prefix == "10.201.0.0/16" && r.senders == pod && !r.quiet)
    });
    let routes = sh(&world.node, "ip route show table 18952");
    assert!(routes.contains("unreachable 10.201.0.0/16 proto 119 metric 4096"), "{routes}");
    let quiet = RefusedTraffic { prefix: "10.201.0.0/16".to_owned(), quiet: true, senders: vec![] };
    eventually("it is quiet", SOON, || world.refused().contains(&quiet));
    assert!(is_refusing(&world), "the config still wants it refused");
    world.reconfigure(without_peering(2));
    eventually("all is gone", SOON, || {
        !is_refusing(&world) && !sh(&world.node, "ip route show table 18952").contains("10.201")
    });
}

/// As on a node whose network grows over the peer's prefix: answers to the peer's connections do not leave either, nor
/// anything for a while after the peering.
#[test]
fn conflict_lets_nothing_out_and_outlives_its_peering() {
    let world = World::running(config());
    let peer = SocketAddr::new(PEER.parse().unwrap(), 0);
    let peer = world.gw.run(|| UdpSocket::bind(peer)).unwrap().unwrap();
    let pod = world.pod.run(|| UdpSocket::bind("10.200.1.2:0")).unwrap().unwrap();
    peer.connect(pod.local_addr().unwrap()).unwrap();
    peer.send(b"x").unwrap();
    pod.set_read_timeout(Some(SOON)).unwrap();
    let (_, from) = pod.recv_from(&mut [0; 8]).unwrap();
    pod.connect(from).unwrap();
    sh(&world.node, "ip route replace default via 192.0.2.7");
    sh(
        &world.node,
        "nft 'table ip count { chain c { type filter hook postrouting priority 200; \
                     oifname eth0 ip daddr 10.201.0.0/16 counter; }; }'",
    );
    let left = || {
        for _ in 0..5 {
            pod.send(b"x").unwrap();
        }
        sh(&world.node, "nft list table ip count | grep -o 'packets [0-9]*'")
    };
    let covered = |config: NodeConfigSpec| {
        let underlay = [&*config.underlay, &[[10, 201, 255, 9].into()]].concat();
        NodeConfigSpec { underlay, ..config }
    };
    world.configure(covered(config()));
    assert!(world.settle()[0].contains("the address 10.201.255.9, which the overlay runs on"));
    assert_eq!(left(), "packets 0\n", "answers to the peer");
    let refused = vec![RefusedPrefix {
        peer_cluster_id: "milan".to_owned(),
        prefix: "10.201.0.0/16".to_owned(),
    }];
    world.reconfigure(covered(NodeConfigSpec { refused, ..without_peering(2) }));
    assert_eq!(left(), "packets 0\n", "without the peering");
    let is_quiet =
        |is: bool| world.refused().iter().any(|r| r.prefix == "10.201.0.0/16" && r.quiet == is);
    assert!(is_quiet(false), "{:?}", world.refused());
    eventually("its time is over", SOON, || is_quiet(true));
    world.reconfigure(covered(without_peering(2)));
    assert_eq!(left(), "packets 5\n", "they are the node's network's again");
}

#[test]
fn established_connection_ends_with_its_peering() {
    use std::io::{Read as _, Write as _};
    let world = World::running(config());
    let (mut client, _server) = world.established();
    client.set_read_timeout(Some(SOON)).unwrap();
    world.reconfigure(without_peering(60));
    client.write_all(b"anything").unwrap();
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn peering_that_is_back_takes_its_prefix_over() {
    let world = World::running(config());
    world.reconfigure(without_peering(60));
    assert_eq!(refusal(&world, PEER), Some(ErrorKind::ConnectionRefused));
    world.reconfigure(config());
    assert_eq!(world.source_seen(&world.pod, PEER).unwrap().to_string(), "10.200.1.2");
    assert!(!is_refusing(&world));
}

#[test]
fn deleted_refusal_table_comes_back() {
    let world = World::running(config());
    world.reconfigure(without_peering(60));
    sh(&world.node, "nft delete table inet weft_refused");
    eventually("the table is back", SOON, || is_refusing(&world));
    assert_eq!(refusal(&world, PEER), Some(ErrorKind::ConnectionRefused));
}

#[test]
fn removed_node_refuses_remaining_senders() {
    let mut world = World::new();
    let before = world.dump();
    let config = NodeConfigSpec { refuse_seconds: Some(2), ..config() };
    world.configure(config.clone());
    world.start(&[]);
    world.settle();
    let sender = Pings::start(&world.pod);
    world.configure(NodeConfigSpec { removed: true, ..config });
    eventually("the agent has withdrawn", SOON, || world.is_settled());
    assert!(is_refusing(&world));
    assert!(world.refused().iter().any(|r| !r.senders.is_empty()), "{:?}", world.refused());
    assert!(!sh(&world.node, "ip link").contains("weft4"));
    drop(sender);
    eventually("all is gone", SOON, || world.dump() == before);
}

#[test]
fn removed_node_refuses_named_prefix_without_senders() {
    let mut world = World::new();
    let config = NodeConfigSpec { refuse_seconds: Some(1), ..config() };
    world.configure(config.clone());
    world.start(&[]);
    world.settle();
    let named =
        RefusedPrefix { peer_cluster_id: "milan".to_owned(), prefix: "10.201.0.0/16".to_owned() };
    world.configure(NodeConfigSpec { removed: true, refused: vec![named], ..config });
    eventually("the agent has withdrawn", SOON, || world.is_settled());
    let own = ObjectRef::new(Kind::NodeConfig, "", "n1");
    world.store.delete(&own).now_or_never().unwrap().unwrap();
    // Longer than prefixes without senders are refused.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(refusal(&world, PEER), Some(ErrorKind::ConnectionRefused));
    assert_ne!(refusal(&world, PEER_V6), Some(ErrorKind::ConnectionRefused), "it was not named");
    sh(&world.node, "nft delete table inet weft_refused");
    world.reconfigure(self::config());
    assert!(!is_refusing(&world));
}

#[test]
fn cleanup_keeps_the_refusal_only_if_asked_to() {
    let mut world = World::new();
    let before = world.dump();
    world.configure(config());
    world.start(&[]);
    world.settle();
    world.stop();
    let sender = Pings::start(&world.pod);
    assert_eq!(world.clean_up(&["--refuse"]), "10.200.1.2\n");
    assert!(is_refusing(&world));
    drop(sender);
    assert_eq!(world.clean_up(&["--refuse"]), "");
    assert_eq!(world.dump(), before);
}

/// A world whose agent has saved what it refuses, and the file.
fn saving() -> (World, PathBuf) {
    let mut world = World::new();
    let file = world.path("state/refusal.nft");
    world.configure(config());
    world.start(&["--refusal-file", file.to_str().unwrap()]);
    world.settle();
    eventually("it is saved", SOON, || file.exists());
    (world, file)
}

#[test]
fn saved_refusal_works_without_weft() {
    let (world, file) = saving();
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(&file).unwrap();
    let other = World::new();
    sh(&other.node, &format!("nft -f - <<'END'\n{text}END"));
    for peer in [PEER, PEER_V6] {
        assert_eq!(refusal(&other, peer), Some(ErrorKind::ConnectionRefused), "{peer}");
    }
    world.configure(NodeConfigSpec { removed: true, ..config() });
    eventually("nothing is saved any more", SOON, || !file.exists());
}

/// The node reaches its own networks within a refused prefix, and its pods do not.
#[test]
fn refused_prefix_leaves_the_nodes_networks() {
    const OWN: &str = "10.201.5.1";
    let give = |world: &World| {
        sh(&world.node, "ip link add br9 type bridge; ip link set br9 up");
        sh(&world.node, &format!("ip address add {OWN}/24 dev br9"));
        let at = SocketAddr::new(OWN.parse().unwrap(), 80);
        world.node.run(|| std::net::TcpListener::bind(at)).unwrap().unwrap()
    };
    let check = |world: &World, when: &str| {
        assert!(is_refusing(world), "{when}");
        let own = connect(&world.node, SocketAddr::new(OWN.parse().unwrap(), 80));
        assert!(own.is_ok(), "{when}: {own:?}");
        for peer in [PEER, "10.201.5.9"] {
            assert_eq!(refusal(world, peer), Some(ErrorKind::ConnectionRefused), "{when}: {peer}");
        }
    };
    let (world, file) = saving();
    let before = std::fs::read_to_string(&file).unwrap();
    let _listener = give(&world);
    let saved = || std::fs::read_to_string(&file).unwrap();
    eventually("what is saved names the network", SOON, || saved() != before);
    let text = saved();
    world.reconfigure(without_peering(60));
    check(&world, "without its peering");
    let sender = Pings::start(&world.pod);
    world.configure(NodeConfigSpec { removed: true, ..config() });
    eventually("the agent has withdrawn", SOON, || world.is_settled());
    check(&world, "removed");
    drop(sender);

    let other = World::new();
    let _listener = give(&other);
    sh(&other.node, &format!("nft -f - <<'END'\n{text}END"));
    check(&other, "as the host starts");
}

/// As after a restart of the host, during which the peering was removed.
#[test]
fn loaded_refusal_outlives_its_peering() {
    let (mut world, file) = saving();
    let text = std::fs::read_to_string(&file).unwrap();
    world.stop();
    assert_eq!(world.clean_up(&[]), "");
    sh(&world.node, &format!("nft -f - <<'END'\n{text}END"));
    world.configure(NodeConfigSpec { peerings: Vec::new(), ..config() });
    world.start(&[]);
    world.settle();
    assert!(is_refusing(&world));
    assert_eq!(refusal(&world, PEER), Some(ErrorKind::ConnectionRefused));
}

/// As the unit that refuses from the start of a host on does when it is started once more.
#[test]
fn refusal_loaded_beside_an_agent_ends_at_once() {
    let (world, file) = saving();
    let to = SocketAddr::new(PEER.parse().unwrap(), 80);
    let _listener = world.gw.run(|| std::net::TcpListener::bind(to)).unwrap().unwrap();
    for _ in 0..3 {
        sh(&world.node, &format!("nft -f {}", file.display()));
        eventually("the peer is reached", Duration::from_secs(2), || {
            refusal(&world, PEER).is_none()
        });
        assert!(!is_refusing(&world));
    }
    let oslo = "10.209.0.0/16".to_owned();
    let refused = vec![RefusedPrefix { peer_cluster_id: "oslo".to_owned(), prefix: oslo }];
    world.reconfigure(NodeConfigSpec { refused, ..config() });
    let add = "nft add element inet weft_refused prefixes_v4_16 { 10.201.0.0 }";
    for change in [format!("nft -f {}", file.display()), add.to_owned()] {
        // Until the agent has looked at its own changes.
        std::thread::sleep(Duration::from_secs(1));
        sh(&world.node, &change);
        eventually(&change, Duration::from_secs(2), || refusal(&world, PEER).is_none());
        assert!(is_refusing(&world), "what has no peering stays refused");
    }
}

#[test]
fn lost_published_directory_refuses_new_connections() {
    let world = World::running(config());
    let published = world.path("published/nodeconfigs");
    let to = SocketAddr::new(PEER.parse().unwrap(), 80);
    let _listener = world.gw.run(|| std::net::TcpListener::bind(to)).unwrap().unwrap();
    assert_eq!(refusal(&world, PEER), None);
    let away = world.path("away");
    std::fs::rename(&published, &away).unwrap();
    eventually("new connections are refused", Duration::from_secs(3), || {
        refusal(&world, PEER) == Some(ErrorKind::ConnectionRefused)
    });
    std::fs::rename(&away, &published).unwrap();
    eventually("they are not any more", SOON, || refusal(&world, PEER).is_none());
}

/// UDP packets to the peer until it is dropped.
struct Pings(std::process::Child);

impl Pings {
    fn start(pod: &Netns) -> Self {
        let script =
            format!("while :; do echo x > /dev/udp/{PEER}/7; sleep 0.05; done 2>/dev/null");
        let mut shell = crate::node::inside(pod, "bash");
        Self(shell.args(["-c", &script]).spawn().unwrap())
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
