//! ```text
//!  pod 10.200.1.2 ---- node ---- VXLAN ---- gw (10.201.0.1)
//!                        +------ default route ---- gw
//! ```
//! The node has a route for each pod, as Calico sets them up, and none for the rest of its pod CIDR.

use std::net::UdpSocket;
use std::time::Duration;

use fabric_api::fabric::NodeConfigSpec;

use crate::node::{PEER, PEER_V6, World, config, eventually, sh};

const SOON: Duration = Duration::from_secs(2);
const ROUTES: &str = "ip route del 10.200.1.0/24 dev pod0; ip route add 10.200.1.2/32 dev pod0
    ip route add default via 192.0.2.7
    ip -6 route del fd00:200:1::/64 dev pod0; ip -6 route add fd00:200:1::2/128 dev pod0
    ip -6 route add default via 2001:db8::7 dev eth0
    ip neigh add 2001:db8::7 lladdr 02:00:00:00:00:07 dev eth0";
const COUNTERS: &str = "nft -f - <<END
    table inet test {
      chain post {
        type filter hook postrouting priority 300
        oifname eth0 ip daddr 10.200.0.0/16 counter comment leaked
        oifname eth0 ip6 daddr fd00:200::/32 counter comment leaked
        oifname eth0 ip daddr 203.0.113.9 counter comment passed
        oifname pod0 udp dport 9 counter comment delivered
      }
    }
END";

#[test]
fn peers_packets_to_absent_pods_are_refused() {
    let world = leaky_node();
    for to in ["10.200.1.99", "fd00:200:1::99"] {
        send(&world, to);
    }
    // The datagram sent last leaves last.
    send(&world, "203.0.113.9");
    eventually("another destination is forwarded", SOON, || packets(&world, "passed") > 0);
    assert_eq!(packets(&world, "leaked"), 0);
}

#[test]
fn peers_packets_to_pods_take_their_own_routes() {
    let world = leaky_node();
    for (to, total) in [("10.200.1.2", 1), ("fd00:200:1::2", 2)] {
        send(&world, to);
        eventually("the pod has it", SOON, || packets(&world, "delivered") == total);
    }
}

#[test]
fn deleted_rule_of_pods_comes_back() {
    let world = leaky_node();
    let rules = || sh(&world.node, "ip rule show; ip -6 rule show").matches("iif weft4").count();
    assert_eq!(rules(), 4);
    sh(&world.node, "ip rule del priority 32765; ip -6 rule del priority 32764");
    eventually("all rules are back", SOON, || rules() == 4);
    world.reconfigure(NodeConfigSpec { local_pods: Vec::new(), ..config() });
    assert_eq!(rules(), 0);
}

fn leaky_node() -> World {
    let world = World::running(config());
    sh(&world.node, ROUTES);
    sh(&world.node, COUNTERS);
    sh(&world.gw, "ip route add 203.0.113.9 via 10.80.0.5 dev overlay4 onlink");
    world
}

fn send(world: &World, to: &str) {
    let from = if to.contains(':') { PEER_V6 } else { PEER };
    let socket = world.gw.run(|| UdpSocket::bind((from, 0))).unwrap().unwrap();
    socket.send_to(b"hi", (to, 9)).unwrap();
}

/// Packets counted by the rules of this comment.
fn packets(world: &World, comment: &str) -> u64 {
    let table = sh(&world.node, "nft list table inet test");
    let rules = table.lines().filter(|line| line.contains(&format!("\"{comment}\"")));
    let counted = rules.filter_map(|line| line.split("packets ").nth(1)?.split(' ').next());
    counted.map(|number| number.parse::<u64>().unwrap()).sum()
}
