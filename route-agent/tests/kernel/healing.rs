//! Objects that another program deletes or alters are restored within 500 ms.

use std::time::Duration;

use crate::node::{PEER, World, config, eventually, sh};

const SOON: Duration = Duration::from_secs(5);
const HEALED: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(400);

#[test]
fn deleted_state_is_restored() {
    let world = World::running(config());
    let before = world.dump();
    for damage in [
        "ip route del 10.201.0.0/16 table 18952 metric 1024",
        "ip -6 route flush table 18952",
        "ip route flush table 18952",
        "ip rule del priority 105",
        "ip rule del priority 32765",
        "ip route flush table 18953",
        "ip -6 rule del priority 105",
        "ip neigh del 10.80.0.7 dev weft4",
        "bridge fdb del 0e:77:0a:50:00:07 dev weft4 dst 192.0.2.7 self",
        "bridge fdb replace 0e:77:0a:50:00:07 dev weft4 dst 192.0.2.99 self",
        "bridge fdb add 0e:77:0a:50:00:99 dev weft4 dst 192.0.2.99 self",
        "ip link set weft4 down",
        "ip link set weft4 mtu 1300",
        "ip link set weft4 address 0e:77:0a:50:00:55",
        "ip address add 10.99.0.1/32 dev weft4",
        "ip link del weft4",
        "nft delete table inet weft",
        "nft flush chain inet weft sources",
        "nft add rule inet weft refuse accept",
        "nft delete element inet weft vxlan_v4 '{ 192.0.2.7 }'",
        "nft flush ruleset",
        "echo 0 > /proc/sys/net/ipv4/conf/weft4/forwarding",
        "echo 1 > /proc/sys/net/ipv4/conf/weft4/rp_filter",
        "echo 2 > /proc/sys/net/ipv6/conf/weft4/accept_ra",
        "echo 0 > /proc/sys/net/ipv6/conf/weft4/forwarding",
        "echo 1 > /proc/sys/net/ipv6/conf/weft4/disable_ipv6",
    ] {
        // One after the other at once looks like churn by another program.
        std::thread::sleep(PAUSE);
        sh(&world.node, damage);
        eventually(damage, HEALED, || world.dump() == before);
    }
    assert_eq!(world.source_seen(&world.node, PEER).unwrap().to_string(), "10.70.0.9");
}

/// Waits for a moment in which the agent has not brought the device up again.
const RENAME: &str = "until ip link set weft4 down && ip link set weft4 name foo4; do :; done";

#[test]
fn renamed_vxlan_device_is_replaced() {
    let mut world = World::running(config());
    let before = world.dump();
    sh(&world.node, &format!("{RENAME}; ip link set foo4 up || true"));
    eventually("weft4 takes the place of foo4", HEALED, || world.dump() == before);
    assert_eq!(world.source_seen(&world.node, PEER).unwrap().to_string(), "10.70.0.9");
    world.stop();
    sh(&world.node, RENAME);
    assert!(world.dry_run().contains("ip link del foo4\n"));
    world.start(&[]);
    eventually("a new agent replaces foo4", Duration::from_secs(5), || world.dump() == before);
}

/// Devices that may be of another program: one lacks weft's alias, one the node's MAC address.
#[test]
fn foreign_device_with_our_vni_is_one_problem() {
    let make = "ip link add foo4 address 0e:77:0a:50:00:05 type vxlan id 18952 dstport 4879";
    let alter = "ip link set foo4 address 0e:77:0a:50:00:55 alias 'weft overlay over IPv4'";
    for (make, note) in [
        (make.to_owned(), "foo4; remove it"),
        (format!("{make}; {alter}"), "foo4 (made by weft, by its alias); remove it"),
    ] {
        let mut world = World::new();
        sh(&world.node, &format!("{make}; ip link set foo4 up"));
        world.configure(config());
        world.start(&[]);
        let problems = world.settle();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        for part in ["weft4", "VNI 18952", "port 4879", "`ip link del foo4`", note] {
            assert!(problems[0].contains(part), "{part}: {problems:#?}");
        }
        sh(&world.node, "ip link del foo4");
        eventually("weft4 is made", Duration::from_secs(5), || world.problems().is_empty());
        assert_eq!(world.source_seen(&world.node, PEER).unwrap().to_string(), "10.70.0.9");
    }
}

#[test]
fn stopped_agent_leaves_state_restart_plans_nothing() {
    let mut world = World::running(config());
    let before = world.dump();
    world.stop();
    assert_eq!(world.dump(), before);
    assert_eq!(world.dry_run(), "");
    sh(&world.node, "ip link del weft4; nft delete table inet weft");
    world.start(&[]);
    eventually("a new agent repairs", Duration::from_secs(5), || world.dump() == before);
}

/// Only the firewall's table is put anew, in one transaction.
#[test]
fn restarted_agent_loses_no_packet() {
    let mut world = World::running(config());
    let events = world.monitor();
    let flow = world.flow();
    for _ in 0..10 {
        world.stop();
        world.start(&[]);
        std::thread::sleep(PAUSE);
        assert!(world.settle().is_empty());
    }
    let (sent, received) = flow.end();
    assert!(sent > 2000 && received == sent, "{received} of {sent} datagrams");
    let events = events.end();
    let ours = |line: &&str| line.contains("weft") || line.contains("proto 119");
    assert_eq!(events.lines().find(ours), None, "{events}");
    // Control: the monitor does report changes.
    let events = world.monitor();
    sh(
        &world.node,
        "ip neigh replace 10.80.0.7 lladdr 0e:77:0a:50:00:07 dev weft4 nud permanent
        ip neigh del 10.80.0.7 dev weft4",
    );
    std::thread::sleep(PAUSE);
    let events = events.end();
    assert!(events.lines().any(|line| ours(&line)), "{events}");
}

#[test]
fn an_idle_agent_takes_no_time() {
    let world = World::running(config());
    let ticks = || {
        let pid = world.agent_pid();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<u64> =
            stat.rsplit(')').next().unwrap().split(' ').filter_map(|f| f.parse().ok()).collect();
        // utime and stime, of which the state letter and ten numbers come first.
        fields[10] + fields[11]
    };
    std::thread::sleep(Duration::from_millis(500));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(3));
    assert!(ticks() - before <= 1, "an idle agent was at work");
}

#[test]
fn underlay_without_carrier_is_named_until_it_is_back() {
    let world = World::running(config());
    // Whose changes are notified of as well.
    sh(&world.node, "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1; sleep 1");
    let named = "eth0, which has this node's address, is down or has no carrier";
    let is_named = || world.problems().iter().any(|p| p.starts_with(named));
    for node in ["true", "ip link set eth0 down; sleep 0.5; ip link set eth0 up"] {
        sh(&world.gw, "ip link set eth0 down");
        sh(&world.node, node);
        eventually("it is named", SOON, is_named);
        sh(&world.gw, "ip link set eth0 up");
        eventually("the problem is gone", SOON, || !is_named());
    }
}
