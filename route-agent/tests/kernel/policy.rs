//! FORWARD and INPUT chains of others that drop what they have no rule for.

use std::io::ErrorKind;
use std::net::SocketAddr;

use crate::node::{PEER, World, config, connect, sh};

const DROPPING: [(&str, &str); 6] = [
    ("iptables-nft -P FORWARD DROP; iptables-nft -P INPUT DROP", "chain ip filter FORWARD drops"),
    (
        "iptables-legacy -P FORWARD DROP; iptables-legacy -P INPUT DROP",
        "iptables-legacy's chain FORWARD drops",
    ),
    (
        "nft 'add table inet f; add chain inet f forwarded { type filter hook forward priority 0; policy drop; }
              add chain inet f incoming { type filter hook input priority 0; policy drop; }'",
        "chain inet f forwarded drops",
    ),
    (
        "for c in FORWARD INPUT; do iptables-nft -A $c -j REJECT; done",
        "chain ip filter FORWARD drops",
    ),
    (
        "for c in FORWARD INPUT; do iptables-legacy -A $c -j REJECT; done",
        "iptables-legacy's chain FORWARD drops",
    ),
    (
        "nft 'add table inet firewalld; add chain inet firewalld f { type filter hook forward priority 10; }
              add rule inet firewalld f ct state established accept
              add rule inet firewalld f counter reject with icmpx admin-prohibited'",
        "chain inet firewalld f drops",
    ),
];

#[test]
fn a_chain_that_drops_by_policy_or_last_rule_is_told_and_weft_lets_its_own_pass() {
    for (policy, told) in DROPPING {
        let mut world = World::new();
        sh(&world.node, policy);
        world.configure(config());
        world.start(&[]);
        let problems = world.settle();
        assert!(problems.iter().any(|p| p.starts_with(told)), "{policy}: {problems:?}");
        assert_eq!(world.source_seen(&world.pod, PEER).unwrap().to_string(), "10.200.1.2");
    }
}

#[test]
fn without_accept_rules_foreign_chains_are_left_alone() {
    let mut world = World::new();
    let (policy, told) = DROPPING[0];
    sh(&world.node, policy);
    let before = sh(&world.node, "iptables-nft-save -t filter | grep -v '^#'");
    world.configure(config());
    world.start(&["--no-accept-rules"]);
    let problems = world.settle();
    assert!(problems.iter().any(|p| p.starts_with(told)), "{problems:?}");
    assert_eq!(sh(&world.node, "iptables-nft-save -t filter | grep -v '^#'"), before);
    let error = connect(&world.pod, SocketAddr::new(PEER.parse().unwrap(), 8080)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[test]
fn accepts_come_back_after_a_flush_and_iptables_can_still_read_its_table() {
    let mut world = World::new();
    sh(&world.node, DROPPING[0].0);
    world.configure(config());
    world.start(&[]);
    world.settle();
    let rules = || sh(&world.node, "iptables-nft -S FORWARD");
    let before = rules();
    assert!(before.contains("-i weft+ -m comment --comment weft -j ACCEPT"), "{before}");
    sh(&world.node, "iptables-nft -F FORWARD");
    crate::node::eventually("the accepts are back", std::time::Duration::from_millis(500), || {
        rules() == before
    });
}
