//! Scripts and commands for the kernel, as text: read the golden files as documentation.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;

use fabric_primitives::{Cidr, Mac};
use netplan::{
    Address, Device, Family, Firewall, Refusal, Route, RouteKey, Rule, RuleAction, State, Sysctl,
    Vxlan, plan,
};

#[test]
fn the_firewall_table_is_the_golden_one() {
    let firewall = Firewall {
        local_pods: [cidr("10.200.1.0/24"), cidr("fd00:200:1::/64")].into(),
        pods: [cidr("10.200.0.0/16"), cidr("fd00:200::/48")].into(),
        peers: [cidr("10.201.0.0/16"), cidr("10.71.0.0/16"), cidr("fd00:201::/48")].into(),
        unconnected: [cidr("10.71.0.0/16")].into(),
        probed: [cidr("10.80.0.7/32")].into(),
        external_v4: Some([10, 70, 0, 9].into()),
        external_v6: None,
        full_masquerade: false,
        targets: [(ip("10.70.0.20"), ip("10.200.1.2"))].into(),
        masqueraded: [ip("10.70.0.20")].into(),
        vxlan_sources: [ip("192.0.2.7"), ip("2001:db8::7"), ip("10.200.1.9")].into(),
        exits: ["eth0".to_owned()].into(),
        uplinks: ["eth0".to_owned()].into(),
        underlay: [cidr("192.0.2.0/24"), cidr("2001:db8::/64")].into(),
        own_networks: [cidr("10.201.5.0/24")].into(),
        conflicts: [cidr("192.0.0.0/16")].into(),
        has_symmetric_pods: true,
        ..Firewall::default()
    };
    assert_eq!(firewall.script(), include_str!("golden/firewall.nft"));
}

#[test]
fn the_refusal_table_is_the_golden_one() {
    let mut refusal = Refusal::of([cidr("10.201.0.0/16"), cidr("fd00:201::/48")].into());
    let own = [cidr("10.201.5.0/24"), cidr("192.0.2.0/24")];
    refusal.leave(own, &[cidr("10.200.1.0/24")].into());
    let seconds = std::time::Duration::from_secs;
    refusal.senders.insert((ip("10.200.1.2"), ip("10.201.0.9")), seconds(200));
    assert_eq!(refusal.script(seconds(300)), include_str!("golden/refusal.nft"));
}

#[test]
fn empty_firewall_drops_foreign_vxlan_only() {
    let empty = Firewall::default().script();
    assert!(!empty.contains("elements") && !empty.contains("daddr and"), "{empty}");
    assert!(empty.contains("udp dport 4879 ip saddr != @vxlan_v4 drop"));
}

#[test]
fn the_mark_follows_the_text() {
    let other = Firewall { peers: [cidr("10.201.0.0/16")].into(), ..Firewall::default() };
    assert_ne!(other.mark(), Firewall::default().mark());
    assert!(other.script().contains(&other.mark()));
}

#[test]
fn a_gateways_first_plan_is_the_golden_one() {
    assert_eq!(show(&State::default(), &inner()), include_str!("golden/inner.txt"));
}

#[test]
fn new_next_hop_replaces_old_before_neighbour() {
    let mut want = inner();
    let mac = Mac::of_overlay([10, 80, 0, 6].into());
    want.neighbours = [(("overlay4".to_owned(), ip("10.80.0.6")), mac)].into();
    want.fdb = [(("overlay4".to_owned(), mac), ip("192.0.2.6"))].into();
    let key = RouteKey::new(1, cidr("10.200.1.0/24"));
    want.routes.insert(key, Route::onlink(ip("10.80.0.6"), "overlay4", 119));
    assert_eq!(
        show(&inner(), &want),
        "\
bridge fdb replace 0e:77:0a:50:00:06 dev overlay4 self permanent dst 192.0.2.6
ip neigh replace 10.80.0.6 lladdr 0e:77:0a:50:00:06 dev overlay4 nud permanent
ip route replace 10.200.1.0/24 via 10.80.0.6 dev overlay4 onlink table 1 metric 1024 proto 119
ip neigh del 10.80.0.5 dev overlay4
bridge fdb del 0e:77:0a:50:00:05 dev overlay4 self dst 192.0.2.5
"
    );
}

#[test]
fn new_vni_rebuilds_device_and_its_routes() {
    let mut want = inner();
    want.links.get_mut("overlay4").unwrap().vni = 7;
    let text = show(&inner(), &want);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "ip link del overlay4");
    assert!(lines[1].starts_with("ip link add overlay4 up mtu 1450"));
    assert!(lines[1].ends_with("moved here from the underlay's namespace"));
    // One setting, address, FDB entry, neighbour and route.
    assert_eq!(lines.len(), 2 + 5, "{text}");
}

#[test]
fn a_renamed_device_makes_room_for_its_successor() {
    let mut want = inner();
    let link = want.links.remove("overlay4").unwrap();
    want = State { links: [("new4".to_owned(), link)].into(), ..State::default() };
    let text = show(&inner(), &want);
    let lines: Vec<&str> = text.lines().filter(|line| line.contains(" link ")).collect();
    assert_eq!(lines[0], "ip link del overlay4");
    assert!(lines[1].starts_with("ip link add new4 "));
    assert_eq!(lines.len(), 2);
}

#[test]
fn stray_address_removal_restores_routes() {
    let mut have = inner();
    let mut want = inner();
    have.addresses = [address("overlay4", "10.99.0.1")].into();
    want.addresses.clear();
    assert_eq!(
        show(&have, &want),
        "\
ip address del 10.99.0.1/32 dev overlay4
ip neigh replace 10.80.0.5 lladdr 0e:77:0a:50:00:05 dev overlay4 nud permanent
ip route replace 10.200.1.0/24 via 10.80.0.5 dev overlay4 onlink table 1 metric 1024 proto 119
"
    );
}

#[test]
fn kernel_made_entries_stay() {
    let mut have = inner();
    have.addresses.insert(address("lo", "127.0.0.1"));
    have.addresses.insert(address("tunnel", "fe80::1"));
    assert_eq!(show(&have, &inner()), "");
}

/// A gateway's inner namespace, with one node.
#[test]
fn widened_overlay_gets_no_link_local_address() {
    let (mut have, want) = (inner(), inner());
    let overlay = want.links.keys().next().unwrap().clone();
    have.links.get_mut(&overlay).unwrap().mtu = 1270;
    have.addresses.insert(address(&overlay, "fe80::1"));
    let steps = show(&have, &want);
    assert!(steps.contains(&format!("ip link set {overlay} addrgenmode none")), "{steps}");
    assert!(steps.contains("ip address del fe80::1"), "{steps}");
}

fn inner() -> State {
    let overlay = "overlay4".to_owned();
    let mac = Mac::of_overlay([10, 80, 0, 5].into());
    let vxlan = Vxlan {
        vni: 18952,
        port: 4879,
        family: Family::Ipv4,
        elsewhere: true,
        checksum: true,
        mtu: 1450,
        mac: Mac::of_overlay([10, 80, 0, 7].into()),
        up: true,
    };
    let rule = Rule {
        priority: 100,
        family: Family::Ipv4,
        iif: Some("tunnel".to_owned()),
        to: None,
        action: RuleAction::Lookup(1),
        protocol: 119,
    };
    State {
        links: [(overlay.clone(), vxlan)].into(),
        devices: [("tunnel".to_owned(), Device { mtu: 1340, up: true })].into(),
        addresses: [address("overlay4", "10.80.0.7")].into(),
        neighbours: [((overlay.clone(), ip("10.80.0.5")), mac)].into(),
        fdb: [((overlay, mac), ip("192.0.2.5"))].into(),
        routes: [
            (
                RouteKey::new(1, cidr("10.200.1.0/24")),
                Route::onlink(ip("10.80.0.5"), "overlay4", 119),
            ),
            (RouteKey::new(2, cidr("10.201.0.0/16")), Route::dev("tunnel", 119)),
            (RouteKey::new(1, cidr("0.0.0.0/0")), Route::unreachable(119)),
            (RouteKey::new(2, cidr("::/0")), Route::unreachable(119)),
        ]
        .into(),
        rules: [rule].into(),
        sysctls: [
            (Sysctl::of_namespace("net/ipv4/ip_forward"), 1),
            (Sysctl::of_device(Family::Ipv4, "overlay4", "rp_filter"), 0),
        ]
        .into(),
    }
}

fn show(have: &State, want: &State) -> String {
    plan(have, want).iter().map(|op| format!("{op}\n")).collect()
}

fn address(dev: &str, address: &str) -> Address {
    let address = ip(address);
    let len = if address.is_ipv4() { 32 } else { 128 };
    Address { dev: dev.to_owned(), address, len }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}
