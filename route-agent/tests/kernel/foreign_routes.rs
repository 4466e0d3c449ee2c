//! Routes and rules of others that take packets between pods and peers: named with a remedy that is a command, left
//! alone, and named no longer once they are gone.

use std::time::Duration;

use crate::node::{World, config, eventually, sh};

const SOON: Duration = Duration::from_secs(5);

/// Commands that put something in weft's way, and parts of the problem.
const FOREIGN: [(&str, [&str; 2]); 16] = [
    (
        "ip route add 10.201.4.0/24 via 192.0.2.7 table 18952",
        ["10.201.4.0/24", "ip route del 10.201.4.0/24 via 192.0.2.7 dev eth0 table 18952"],
    ),
    (
        "ip -6 route add blackhole fd00:201:4::/64 table 18952",
        ["fd00:201:4::/64", "ip -6 route del blackhole fd00:201:4::/64 metric 1024 table 18952"],
    ),
    (
        "ip rule add priority 50 to 10.201.0.0/16 table 254",
        ["10.201.0.0/16", "ip rule del priority 50 to 10.201.0.0/16 table 254"],
    ),
    (
        "ip route add local 10.201.0.0/16 dev lo",
        ["10.201.0.0/16", "ip route del 10.201.0.0/16 table local"],
    ),
    ("ip rule add priority 104 blackhole", ["10.201.0.0/16", "ip rule del priority 104 blackhole"]),
    ("ip rule add priority 60 goto 32766", ["10.201.0.0/16", "ip rule del priority 60 goto 32766"]),
    (
        "ip -6 rule add priority 70 from fd00:200:1::/64 prohibit",
        ["fd00:201::/32", "ip -6 rule del priority 70 from fd00:200:1::/64 prohibit"],
    ),
    (
        "ip rule add priority 50 to 10.201.0.0/16 ipproto icmp blackhole",
        [
            "a part of the packets to 10.201.0.0/16",
            "ip rule del priority 50 to 10.201.0.0/16 ipproto icmp blackhole",
        ],
    ),
    (
        "ip -6 rule add priority 50 to fd00:201::/32 ipproto tcp dport 443 prohibit",
        [
            "a part of the packets to fd00:201::/32",
            "ip -6 rule del priority 50 to fd00:201::/32 dport 443 ipproto tcp prohibit",
        ],
    ),
    (
        "ip rule add priority 50 ipproto udp sport 53-54 unreachable",
        ["a part of the packets", "ip rule del priority 50 sport 53-54 ipproto udp unreachable"],
    ),
    (
        "ip rule add priority 50 to 10.201.0.0/16 fwmark 0x7/0xff table 254",
        [
            "a part of the packets to 10.201.0.0/16",
            "ip rule del priority 50 to 10.201.0.0/16 fwmark 0x7/0xff table 254",
        ],
    ),
    (
        "ip rule add priority 50 iif weft4 ipproto icmp blackhole",
        [
            "a part of the packets from 10.201.0.0/16 to this node's pods",
            "ip rule del priority 50 iif weft4 ipproto icmp blackhole",
        ],
    ),
    (
        "ip rule add priority 50 tos 0x10 blackhole",
        ["a part of the packets to 10.201.0.0/16", "ip rule del priority 50 tos 0x10 blackhole"],
    ),
    (
        "ip rule add not priority 50 to 10.9.0.0/16 table 254",
        ["10.201.0.0/16", "ip rule del not priority 50 to 10.9.0.0/16 table 254"],
    ),
    (
        "ip rule add not priority 50 fwmark 0x200000/0x200000 table 254",
        ["10.201.0.0/16", "ip rule del not priority 50 fwmark 0x200000/0x200000 table 254"],
    ),
    (
        "ip rule add priority 50 uidrange 0-999 blackhole",
        ["10.201.0.0/16", "ip rule del priority 50 uidrange 0-999 blackhole"],
    ),
];

#[test]
fn rule_about_a_mark_is_named_without_certainty() {
    let world = World::running(config());
    sh(
        &world.node,
        "ip route add default via 192.0.2.7; ip route add local default dev lo table 66
        ip rule add priority 49 fwmark 0x9 table 66; ip rule add priority 50 fwmark 0x7 table 254",
    );
    let remedy = "ip rule del priority 50 fwmark 0x7/0xffffffff table 254";
    eventually("it is named", SOON, || !world.problems().is_empty());
    let problems = world.problems();
    assert!(problems.len() == 1 && problems[0].contains(remedy), "{problems:#?}");
    assert_eq!(world.status().unwrap().1.diversions, []);
    sh(&world.node, remedy);
    eventually("it is solved", SOON, || world.problems().is_empty());
}

#[test]
fn foreign_routes_and_rules_are_named_until_gone() {
    let world = World::running(config());
    sh(&world.node, "ip route add default via 192.0.2.7");
    assert_eq!(world.problems(), Vec::<String>::new());
    for (command, [what, remedy]) in FOREIGN {
        sh(&world.node, command);
        let is_named = |problem: &String| problem.contains(what) && problem.contains(remedy);
        eventually(&format!("`{command}` is named"), SOON, || {
            world.problems().iter().any(is_named)
        });
        let diversions = world.status().unwrap().1.diversions;
        assert_eq!(diversions.len(), 1, "{diversions:?}");
        assert_eq!(diversions[0].removal, remedy);
        assert!(!diversions[0].prefixes.is_empty(), "{diversions:?}");
        // Weft leaves it there, so the remedy finds it.
        sh(&world.node, remedy);
        eventually(&format!("`{remedy}` solves it"), SOON, || world.problems().is_empty());
        assert_eq!(world.status().unwrap().1.diversions, []);
    }
}

#[test]
fn rules_that_take_nothing_are_no_problem() {
    let world = World::running(config());
    sh(
        &world.node,
        "ip route add default via 192.0.2.7
        ip rule add priority 50 table 254 suppress_prefixlength 0
        ip rule add priority 51 fwmark 0x200/0xf00 table 254
        ip rule add priority 51 fwmark 0x4000/0x4000 table 254
        ip rule add priority 51 oif eth0 table 254
        ip rule add priority 51 uidrange 1000-1000 table 254
        ip rule add not priority 51 from 10.200.0.0/15 to 10.0.0.0/8 iif pod0 table 254
        ip rule add priority 52 from 192.0.2.5 table 254
        ip rule add priority 53 to 10.9.0.0/16 blackhole
        ip rule add priority 100 table 255
        ip rule add priority 106 blackhole
        ip rule add priority 54 to 10.201.9.0/24 prohibit",
    );
    eventually("the one that takes packets is named", SOON, || !world.problems().is_empty());
    let problems = world.problems();
    assert!(problems.len() == 1 && problems[0].contains("priority 54"), "{problems:#?}");
}
