//! ```text
//!  pod 10.200.1.2 ---- node ---- VXLAN ---- gw (10.201.0.1)
//!                        +------ default route ---- gw
//! ```
//! The node has a route for each pod, as Calico sets them up, and none for the rest of its pod CIDR.
//! Other programs' rules lead packets for pods to a table with a default route.

use std::net::UdpSocket;
use std::time::Duration;

use fabric_api::fabric::{NodeAddressMap, NodeConfigSpec};
use netlink::nft;
use netplan::{DIVERTED, FIREWALL_TABLE};

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
        oifname wan ip daddr 10.200.0.0/16 counter comment leaked
        oifname wan ip6 daddr fd00:200::/32 counter comment leaked
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

/// Table 77 of each family has a default route by the underlay.
const TABLE_77: &str = "ip route add default via 192.0.2.7 table 77
    ip -6 route add default via 2001:db8::7 dev eth0 table 77";
const TO_TABLE_77: [&str; 2] = [
    "to 10.200.0.0/16 lookup 77; ip -6 rule add priority PRIORITY to fd00:200::/32 lookup 77",
    "iif weft4 lookup 77; ip -6 rule add priority PRIORITY iif weft4 lookup 77",
];

fn add_rules(world: &World, priority: u32, rules: &str) {
    let rules = rules.replace("PRIORITY", &priority.to_string());
    sh(&world.node, &format!("{TABLE_77}; ip rule add priority {priority} {rules}"));
}

#[test]
fn later_rules_take_no_packets_for_pods() {
    for rules in TO_TABLE_77 {
        for priority in [105, 1000] {
            let world = leaky_node();
            add_rules(&world, priority, rules);
            for (to, total) in [("10.200.1.2", 1), ("fd00:200:1::2", 2)] {
                send(&world, to);
                let what = format!("{priority} {rules}: the pod has it");
                eventually(&what, SOON, || packets(&world, "delivered") == total);
            }
            for to in ["10.200.1.99", "fd00:200:1::99"] {
                send(&world, to);
            }
            send(&world, "203.0.113.9");
            let passed = || packets(&world, "passed") > 0 || rules.starts_with("iif");
            eventually("another destination is forwarded", SOON, passed);
            assert_eq!((packets(&world, "leaked"), dropped(&world)), (0, 0), "{priority} {rules}");
        }
    }
}

/// Routes of table 77 by a second uplink, with an address and without.
const UPLINKS: [&str; 2] = [
    "ip address add 198.51.100.5/24 dev wan; ip address add 2001:db8:1::5/64 dev wan nodad
    ip route add default via 198.51.100.1 table 77
    ip -6 route add default via 2001:db8:1::1 dev wan table 77",
    "ip route add default dev wan table 77; ip -6 route add default dev wan table 77",
];

#[test]
fn packets_diverted_to_the_underlay_are_dropped() {
    diverted_packets_are_dropped(TABLE_77, "");
}

#[test]
fn packets_diverted_to_a_second_uplink_are_dropped() {
    let link = "ip link add wan type veth peer name isp; ip link set isp up
        ip link set wan addrgenmode none up";
    UPLINKS.iter().for_each(|routes| diverted_packets_are_dropped(routes, link));
}

fn diverted_packets_are_dropped(routes: &str, link: &str) {
    for rules in TO_TABLE_77 {
        let world = leaky_node();
        sh(&world.node, &format!("{link}\n{routes}"));
        let rules = rules.replace("PRIORITY", "50");
        sh(&world.node, &format!("ip rule add priority 50 {rules}"));
        let from = ["10.201.0.0/16", "fd00:201::/32"]
            .map(|peer| format!("from {peer} to this node's pods"));
        eventually(&format!("{rules}: both are named"), SOON, || {
            let problems = world.problems();
            from.iter().all(|from| problems.iter().any(|problem| problem.contains(from)))
        });
        // Rules are read after devices: they may be named one pass before a new device is an exit.
        let exit = if link.is_empty() { "eth0" } else { "wan" };
        eventually(&format!("{rules}: {exit} is an exit"), SOON, || {
            sh(&world.node, "nft list chain inet weft from_peers").contains(exit)
        });
        for (to, total) in [("10.200.1.2", 1), ("fd00:200:1::2", 2)] {
            send(&world, to);
            let is_gone = || dropped(&world) == total || packets(&world, "leaked") > 0;
            eventually(&format!("{rules}: it is dropped"), SOON, is_gone);
        }
        assert_eq!(packets(&world, "leaked"), 0, "{rules}");
        let diversions = world.status().unwrap().1.diversions;
        assert_eq!(diversions.len(), 2, "{diversions:?}");
        for removal in diversions.iter().map(|diversion| &diversion.removal) {
            sh(&world.node, removal);
        }
        eventually("the remedies solve it", SOON, || world.problems().is_empty());
        send(&world, "10.200.1.2");
        eventually("the pod has it", SOON, || packets(&world, "delivered") == 1);
    }
}

#[test]
fn cni_table_behind_own_rules_is_named_with_remedy() {
    let world = leaky_node();
    // After a container's start, a CNI moves its routes.
    sh(
        &world.node,
        "ip route del 10.200.1.2/32 dev pod0; ip route add 10.200.1.2/32 dev pod0 table 200
        ip rule add priority 2000 lookup 200",
    );
    // The kernel notifies of rules before weft's and of routes in its own table only.
    sh(&world.node, "ip address add 198.51.100.9/32 dev eth0");
    let solution = "ip rule add priority 102 to 10.200.1.0/24 table 200 suppress_prefixlength 0";
    eventually("it is named", SOON, || !world.problems().is_empty());
    let diversions = world.status().unwrap().1.diversions;
    assert_eq!(diversions.len(), 1, "{diversions:?}");
    let cause = diversions[0].cause.clone().unwrap_or_default();
    let named = "its pods 10.200.1.0/24 are reached by routes of table 200 only, to which the IPv4 rule of \
                 priority 2000 leads";
    assert!(cause.starts_with(named), "{cause}");
    assert_eq!(diversions[0].removal, solution);
    sh(&world.node, solution);
    eventually("it is solved", SOON, || world.problems().is_empty());
    send(&world, "10.200.1.2");
    eventually("the pod has it", SOON, || packets(&world, "delivered") == 1);
}

/// Neither is in a pod CIDR of the node: an IP resource's target, and a pod outside.
#[test]
fn other_destinations_leave_over_the_underlay() {
    let (external, target) = ([10, 70, 0, 20].into(), [203, 0, 113, 9].into());
    let ips = vec![NodeAddressMap { external, target, masquerade: true }];
    let local_pods = [&config().local_pods[..], &["10.200.7.7/32".to_owned()]].concat();
    let world = World::running(NodeConfigSpec { ips, local_pods, ..config() });
    sh(&world.node, ROUTES);
    sh(&world.node, COUNTERS);
    sh(
        &world.gw,
        "for to in 10.70.0.20 10.200.7.7; do ip route add $to via 10.80.0.5 dev overlay4 onlink; done",
    );
    send(&world, "10.70.0.20");
    eventually("the target's packet leaves", SOON, || packets(&world, "passed") == 1);
    send(&world, "10.200.7.7");
    eventually("the pod's packet leaves", SOON, || packets(&world, "leaked") == 1);
    assert_eq!(dropped(&world), 0);
}

#[test]
fn deleted_rule_of_pods_comes_back() {
    let world = leaky_node();
    let rules = || sh(&world.node, "ip rule show; ip -6 rule show").matches("iif weft4").count();
    assert_eq!(rules(), 4);
    sh(&world.node, "ip rule del priority 104; ip -6 rule del priority 103");
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

/// Packets that weft's table dropped.
fn dropped(world: &World) -> u64 {
    nft::counted_packets(&world.node, FIREWALL_TABLE, DIVERTED).unwrap()
}

/// Packets counted by the rules of this comment.
fn packets(world: &World, comment: &str) -> u64 {
    let table = sh(&world.node, "nft list table inet test");
    let rules = table.lines().filter(|line| line.contains(&format!("\"{comment}\"")));
    let counted = rules.filter_map(|line| line.split("packets ").nth(1)?.split(' ').next());
    counted.map(|number| number.parse::<u64>().unwrap()).sum()
}
