//! Nothing is left behind.

use std::time::Duration;

use fabric_api::fabric::NodeConfigSpec;

use crate::node::{World, config, eventually, sh};

#[test]
fn cleanup_leaves_the_node_as_it_was() {
    let mut world = World::new();
    sh(
        &world.node,
        "iptables-nft -P FORWARD DROP; iptables-nft -P INPUT DROP
        iptables-nft -A INPUT -j ACCEPT; iptables-legacy -P FORWARD DROP
        nft add table inet other; nft add chain inet other forwarded \
            '{ type filter hook forward priority 5; policy drop; }'",
    );
    let before = world.dump();
    world.configure(config());
    world.start(&[]);
    world.settle();
    assert_ne!(world.dump(), before);
    world.stop();
    world.cleanup();
    assert_eq!(world.dump(), before);
    world.cleanup();
    assert_eq!(world.dump(), before);
}

#[test]
fn cleanup_beside_a_running_agent_is_refused() {
    let mut world = World::running(config());
    let before = world.dump();
    let error = world.refused_cleanup();
    let named = format!("a route-agent runs here (process {})", world.agent_pid());
    assert!(error.contains(&named) && error.contains("stop it first"), "{error}");
    assert_eq!(world.dump(), before);
    world.stop();
    world.cleanup();
    assert!(!sh(&world.node, "ip link").contains("weft4"));
}

#[test]
fn a_removed_node_is_cleaned_up_by_its_running_agent() {
    let mut world = World::new();
    let before = world.dump();
    world.configure(config());
    world.start(&[]);
    world.settle();
    world.configure(NodeConfigSpec { removed: true, ..config() });
    eventually("all is gone", Duration::from_secs(6), || world.dump() == before);
    world.reconfigure(config());
    assert!(sh(&world.node, "ip route show table 18952").contains("10.201.0.0/16 via"));
}

#[test]
fn a_peering_that_ends_takes_its_own_only() {
    let world = World::running(config());
    world.reconfigure(NodeConfigSpec { peerings: vec![], refuse_seconds: Some(1), ..config() });
    eventually("its routes are gone", Duration::from_secs(6), || {
        let routes = sh(&world.node, "ip route show table 18952");
        routes.trim() == "unreachable 10.70.0.9 proto 119 metric 1024"
    });
    assert!(!sh(&world.node, "ip link").contains("weft4"));
}
