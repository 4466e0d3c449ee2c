//! The inner namespace: VXLAN devices towards the nodes, the TUN towards the peer, and policy
//! routing between the two. There is no default route, so nothing can leak and nothing can loop.

use std::net::IpAddr;

use fabric_api::fabric::{VNI, VXLAN_PORT};
use fabric_api::{Cidr, overlay_v6};
use gateway_config::desired::{Desired, IPV6_MTU, Node};
use netlink::Scope;
use netplan::names::{GATEWAY_PROTOCOL as PROTOCOL, PRIORITY};
use netplan::{Address, Device, Family, Route, RouteKey, Rule, RuleAction, State, Sysctl, Vxlan};

use super::mtu::{Path, TunnelMtu, overlay_mtu, tunnel_mtu};

/// The TUN device.
pub const TUN: &str = "tunnel";
/// The VXLAN devices, one for each family of the underlay.
pub(super) const OVERLAYS: [(Family, &str); 2] =
    [(Family::Ipv4, "overlay4"), (Family::Ipv6, "overlay6")];

/// Routing tables: what comes from the nodes, from the tunnel, and from this namespace itself.
const FROM_NODES: u32 = 18952;
const FROM_TUNNEL: u32 = 18953;
const FROM_HERE: u32 = 18954;
const TABLES: [u32; 3] = [FROM_NODES, FROM_TUNNEL, FROM_HERE];

/// Whole-namespace settings, all of the inner namespace being ours: it forwards; where packets
/// may come from is the engine's business, not the reverse path filter's; refusals are not
/// rationed (the rate of all of them together counts for both families), or connections hang
/// instead of failing; nothing advertises or redirects; and a frame for everyone brings no packet,
/// or its sender would not have to know the device's MAC address.
const SYSCTLS: [(&str, u32); 16] = [
    ("net/ipv4/ip_forward", 1),
    ("net/ipv6/conf/all/forwarding", 1),
    ("net/ipv6/conf/default/forwarding", 1),
    ("net/ipv4/conf/all/rp_filter", 0),
    ("net/ipv4/conf/default/rp_filter", 0),
    ("net/ipv4/conf/all/send_redirects", 0),
    ("net/ipv4/conf/default/send_redirects", 0),
    ("net/ipv4/conf/all/accept_redirects", 0),
    ("net/ipv6/conf/all/accept_ra", 0),
    ("net/ipv6/conf/default/accept_ra", 0),
    ("net/ipv4/conf/all/drop_unicast_in_l2_multicast", 1),
    ("net/ipv6/conf/default/drop_unicast_in_l2_multicast", 1),
    ("net/ipv4/icmp_ratelimit", 0),
    ("net/ipv4/icmp_msgs_per_sec", 1_000_000),
    ("net/ipv4/icmp_msgs_burst", 1_000_000),
    ("net/ipv6/icmp/ratelimit", 0),
];

/// Facts beside the config that decide the desired state of the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// MTU of the device under the overlay, in bytes.
    pub(super) underlay_mtu: u32,
    /// The way to the peer, once an address of it is known.
    pub(super) path: Option<Path>,
}

/// Returns the desired state of the namespace, and the tunnel's MTU.
pub(super) fn wanted(desired: &Desired, facts: Facts) -> (State, TunnelMtu) {
    let mut state = State::default();
    let overlays = overlays_of(desired);
    let overlay_mtus = overlays.iter().map(|(family, _)| overlay_mtu(*family, facts.underlay_mtu));
    let mtu = tunnel_mtu(desired.mtu, facts.path, overlay_mtus);
    for (family, name) in overlays {
        let mtu = overlay_mtu(family, facts.underlay_mtu);
        add_overlay(
            &mut state,
            desired,
            name,
            Vxlan {
                vni: VNI,
                port: VXLAN_PORT,
                family,
                elsewhere: true,
                checksum: desired.link_address.is_none() || family == Family::Ipv6,
                mtu,
                mac: desired.mac,
                up: true,
            },
        );
    }
    state.devices.insert("lo".to_owned(), Device { mtu: 65_536, up: true });
    state.devices.insert(TUN.to_owned(), Device { mtu: mtu.bytes, up: true });
    state.addresses.insert(host_address(TUN, desired.tunnel_address.into()));
    for node in &desired.nodes {
        add_node(&mut state, node);
    }
    add_routes(&mut state, desired, mtu.bytes);
    for (family, iif, table) in rules() {
        let (iif, action) = (Some(iif.to_owned()), RuleAction::Lookup(table));
        let (priority, protocol) = (PRIORITY, PROTOCOL);
        state.rules.insert(Rule { priority, family, iif, to: None, action, protocol });
    }
    state.sysctls = sysctls().collect();
    (state, mtu)
}

/// Returns the part of the namespace that is ours to change.
pub(super) fn scope() -> Scope {
    Scope {
        links: OVERLAYS.iter().map(|(_, name)| (*name).to_owned()).collect(),
        devices: [TUN, "lo"].map(str::to_owned).into(),
        tables: TABLES.into(),
        protocol: PROTOCOL,
        sysctls: sysctls().map(|(sysctl, _)| sysctl).collect(),
        ..Scope::default()
    }
}

/// Set once, and never read again: while the kernel's lock of network settings is taken, a reader of
/// this one spins (`restart_syscall` in addrconf.c).
pub(super) const NO_LINK_LOCAL: (&str, u32) = ("net/ipv6/conf/default/addr_gen_mode", 1);

/// Settings that must be there before any device is made, for devices take them over.
pub(super) fn sysctls() -> impl Iterator<Item = (Sysctl, u32)> {
    SYSCTLS.into_iter().map(|(path, value)| (Sysctl::of_namespace(path), value))
}

fn rules() -> impl Iterator<Item = (Family, &'static str, u32)> {
    let inputs = OVERLAYS.map(|(_, name)| (name, FROM_NODES));
    let inputs = inputs.into_iter().chain([(TUN, FROM_TUNNEL), ("lo", FROM_HERE)]);
    inputs.flat_map(|(iif, table)| [Family::Ipv4, Family::Ipv6].map(|family| (family, iif, table)))
}

/// Only the families that nodes need.
fn overlays_of(desired: &Desired) -> Vec<(Family, &'static str)> {
    let needed = |(family, _): &(Family, &str)| {
        desired.nodes.iter().any(|node| Family::of(node.underlay) == *family)
    };
    OVERLAYS.into_iter().filter(needed).collect()
}

fn add_overlay(state: &mut State, desired: &Desired, name: &str, vxlan: Vxlan) {
    // Sources for the errors that the kernel makes here, such as "too big".
    state.addresses.insert(host_address(name, desired.overlay.into()));
    if vxlan.mtu >= IPV6_MTU {
        state.addresses.insert(host_address(name, overlay_v6(desired.overlay).into()));
    }
    state.links.insert(name.to_owned(), vxlan);
}

fn add_node(state: &mut State, node: &Node) {
    let dev = device_of(node);
    state.fdb.insert((dev.to_owned(), node.mac), node.underlay);
    for next_hop in [node.overlay.into(), overlay_v6(node.overlay).into()] {
        if carries(state, dev, next_hop) {
            state.neighbours.insert((dev.to_owned(), next_hop), node.mac);
        }
    }
}

fn add_routes(state: &mut State, desired: &Desired, mtu: u32) {
    for table in TABLES {
        let addresses: [IpAddr; 2] = [[0, 0, 0, 0].into(), [0u16; 8].into()];
        for everything in addresses.into_iter().filter_map(|any| Cidr::around(any, 0)) {
            let key = RouteKey::backstop(table, everything);
            state.routes.insert(key, Route::unreachable(PROTOCOL));
        }
    }
    let to_peer = Route::dev(TUN, PROTOCOL);
    let peer_address = Cidr::host(desired.peer_tunnel_address.into());
    for table in [FROM_NODES, FROM_HERE] {
        for remap in &desired.remaps {
            let passes = remap.local.is_ipv4() || mtu >= IPV6_MTU;
            let route = if passes { to_peer.clone() } else { Route::unreachable(PROTOCOL) };
            state.routes.insert(RouteKey::new(table, remap.local), route);
        }
        state.routes.insert(RouteKey::new(table, peer_address), to_peer.clone());
    }
    let egress = desired.nodes.iter().find(|node| Some(node.overlay) == desired.egress_node);
    let to_egress =
        egress.into_iter().flat_map(|node| desired.egress.iter().map(move |p| (node, p)));
    let to_owner =
        desired.nodes.iter().flat_map(|node| node.prefixes.iter().map(move |p| (node, p)));
    for (node, prefix) in to_egress.chain(to_owner) {
        let Some(route) = route_to_node(state, node, prefix) else { continue };
        for table in [FROM_TUNNEL, FROM_HERE] {
            state.routes.insert(RouteKey::new(table, *prefix), route.clone());
        }
    }
}

/// `None` if the node's overlay is too narrow for the prefix's family.
fn route_to_node(state: &State, node: &Node, prefix: &Cidr) -> Option<Route> {
    let dev = device_of(node);
    let next_hop: IpAddr = match Family::of_prefix(prefix) {
        Family::Ipv4 => node.overlay.into(),
        Family::Ipv6 => overlay_v6(node.overlay).into(),
    };
    carries(state, dev, next_hop).then(|| Route::onlink(next_hop, dev, PROTOCOL))
}

/// Returns whether a device is wide enough for the family of `address`.
fn carries(state: &State, dev: &str, address: IpAddr) -> bool {
    address.is_ipv4() || state.links.get(dev).is_some_and(|link| link.mtu >= IPV6_MTU)
}

fn device_of(node: &Node) -> &'static str {
    match Family::of(node.underlay) {
        Family::Ipv4 => OVERLAYS[0].1,
        Family::Ipv6 => OVERLAYS[1].1,
    }
}

pub(super) fn host_address(dev: &str, address: IpAddr) -> Address {
    Address { dev: dev.to_owned(), address, len: if address.is_ipv4() { 32 } else { 128 } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_config::config;

    const INNER_SETTINGS: Facts = Facts { underlay_mtu: 1500, path: None };

    #[test]
    fn packets_of_nodes_go_to_the_peer_and_nowhere_else() {
        let (state, mtu) = wanted(&desired(), INNER_SETTINGS);
        assert_eq!(mtu.bytes, 1340);
        assert_eq!(
            routes(&state, FROM_NODES),
            [
                "unreachable 0.0.0.0/0",
                "10.71.0.0/16 dev tunnel",
                "10.201.0.0/16 dev tunnel",
                "169.254.18.1/32 dev tunnel",
                "unreachable ::/0",
            ]
        );
    }

    #[test]
    fn packets_go_to_owning_node_or_egress_node() {
        let (state, _) = wanted(&desired(), INNER_SETTINGS);
        assert_eq!(
            routes(&state, FROM_TUNNEL),
            [
                "unreachable 0.0.0.0/0",
                "10.70.0.1/32 via 10.80.0.1 dev overlay4",
                "10.70.0.2/32 via 10.80.0.2 dev overlay4",
                "10.200.1.0/24 via 10.80.0.1 dev overlay4",
                "10.200.2.0/24 via 10.80.0.2 dev overlay4",
                "192.168.7.7/32 via 10.80.0.2 dev overlay4",
                "unreachable ::/0",
            ]
        );
    }

    #[test]
    fn nodes_of_both_families_get_a_device_each() {
        let mut desired = desired();
        desired.nodes[1].underlay = "2001:db8::2".parse().unwrap();
        desired.nodes[1].prefixes.push("fd00:2::/64".parse().unwrap());
        let (state, _) = wanted(&desired, INNER_SETTINGS);
        let links: Vec<_> = state.links.iter().map(|(n, l)| (n.as_str(), l.mtu)).collect();
        assert_eq!(links, [("overlay4", 1450), ("overlay6", 1430)]);
        let v6 = routes(&state, FROM_TUNNEL);
        assert!(
            v6.contains(&"fd00:2::/64 via fd77:6566:7400::a50:2 dev overlay6".to_owned()),
            "{v6:?}"
        );
        assert_eq!(state.fdb.len(), 2);
        assert_eq!(state.neighbours.len(), 4);
    }

    #[test]
    fn a_tunnel_too_narrow_for_ipv6_refuses_it() {
        let mut desired = desired();
        desired.mtu = 1200;
        desired.remaps[0].local = "fd00:9::/64".parse().unwrap();
        let (state, _) = wanted(&desired, INNER_SETTINGS);
        assert!(routes(&state, FROM_NODES).contains(&"unreachable fd00:9::/64".to_owned()));
    }

    #[test]
    fn a_prefix_in_use_before_and_after_keeps_its_route() {
        let (all, _) = wanted(&desired(), INNER_SETTINGS);
        let mut fewer = desired();
        fewer.nodes.pop();
        let (want, _) = wanted(&fewer, INNER_SETTINGS);
        let ops = netplan::plan(&all, &want);
        let kept = "10.200.1.0/24".parse().unwrap();
        assert!(
            !ops.iter().any(|op| matches!(op, netplan::Op::DelRoute(key, _) if key.to == kept))
        );
    }

    fn desired() -> Desired {
        Desired::parse(&config()).unwrap()
    }

    fn routes(state: &State, table: u32) -> Vec<String> {
        let show = |(key, route): (&RouteKey, &Route)| match &route.hop {
            netplan::NextHop::Unreachable => format!("unreachable {}", key.to),
            netplan::NextHop::Dev(dev) => format!("{} dev {dev}", key.to),
            netplan::NextHop::Via(via) => format!("{} via {} dev {}", key.to, via.gateway, via.dev),
        };
        state.routes.iter().filter(|(key, _)| key.table == table).map(show).collect()
    }
}
