//! Our words as the kernel's messages.

use std::net::IpAddr;

use fabric_primitives::Mac;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVxlan, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netplan::{Address, Family, NextHop, Route, RouteKey, Rule, Vxlan};

/// A route's MTU in the set of its locked metrics: `1 << RTAX_MTU`, as `RTAX_LOCK` has it.
pub(crate) const MTU_LOCK: u32 = 1 << 2;

pub(crate) fn family(family: Family) -> AddressFamily {
    match family {
        Family::Ipv4 => AddressFamily::Inet,
        Family::Ipv6 => AddressFamily::Inet6,
    }
}

pub(crate) fn link(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

pub(crate) fn link_up(index: u32) -> LinkMessage {
    let mut message = link(index, Vec::new());
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message
}

pub(crate) fn vxlan(name: &str, vxlan: &Vxlan) -> LinkMessage {
    let mut data = vec![
        InfoVxlan::Id(vxlan.vni),
        InfoVxlan::Port(vxlan.port),
        InfoVxlan::Learning(false),
        InfoVxlan::Ageing(0),
    ];
    if !vxlan.checksum {
        data.push(InfoVxlan::UDPCsum(false));
    }
    // Naming no group is what makes it an IPv6 one.
    if vxlan.family == Family::Ipv6 {
        data.push(InfoVxlan::Group6(std::net::Ipv6Addr::UNSPECIFIED));
    }
    let info = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(data))];
    let attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Mtu(vxlan.mtu),
        LinkAttribute::Address(vxlan.mac.0.to_vec()),
        LinkAttribute::LinkInfo(info),
    ];
    link(0, attributes)
}

/// Alias that marks a VXLAN device as ours. The kernel does not report its family; the alias does.
pub(crate) fn vxlan_alias(family: Family) -> String {
    format!("weft overlay over {family}")
}

/// Keeps the kernel from giving the device a link-local address.
pub(crate) fn no_generated_addresses(index: u32) -> LinkMessage {
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    link(index, vec![LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])])])
}

pub(crate) fn address(index: u32, address: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(Family::of(address.address));
    message.header.prefix_len = address.len;
    message.header.index = index;
    message.attributes.push(AddressAttribute::Local(address.address));
    message.attributes.push(AddressAttribute::Address(address.address));
    if address.address.is_ipv6() {
        message.header.flags = AddressHeaderFlags::Nodad;
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    message
}

pub(crate) fn neighbour(index: u32, ip: IpAddr, mac: Option<Mac>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(Family::of(ip));
    message.header.ifindex = index;
    message.attributes.push(NeighbourAttribute::Destination(ip.into()));
    if let Some(mac) = mac {
        message.header.state = NeighbourState::Permanent;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    }
    message
}

pub(crate) fn fdb(index: u32, mac: Mac, to: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    message.attributes.push(NeighbourAttribute::Destination(to.into()));
    message
}

/// `index` is that of the next hop's device, if it has one.
pub(crate) fn route(key: &RouteKey, route: &Route, index: Option<u32>) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(Family::of_prefix(&key.to));
    message.header.destination_prefix_length = key.to.len();
    message.header.protocol = RouteProtocol::from(route.protocol);
    message.header.kind = RouteType::Unicast;
    let attributes = &mut message.attributes;
    if !key.to.is_everything() {
        attributes.push(RouteAttribute::Destination(key.to.address().into()));
    }
    attributes.push(RouteAttribute::Table(key.table));
    attributes.push(RouteAttribute::Priority(key.metric));
    attributes.extend(index.map(RouteAttribute::Oif));
    attributes.extend(route.source.map(|ip| RouteAttribute::PrefSource(ip.into())));
    attributes.extend(route.mtu.map(|mtu| RouteAttribute::Metrics(mtu_metrics(mtu, key))));
    match &route.hop {
        NextHop::Via(via) => {
            attributes.push(RouteAttribute::Gateway(via.gateway.into()));
            if via.onlink {
                message.header.flags = RouteFlags::Onlink;
            }
        }
        NextHop::Dev(_) if key.to.is_ipv4() => message.header.scope = RouteScope::Link,
        NextHop::Dev(_) => {}
        NextHop::Unreachable => message.header.kind = RouteType::Unreachable,
    }
    message
}

/// Linux forwards IPv6 by a route's MTU only if that is locked, and else by the device's
/// (`ip6_dst_mtu_maybe_forward`).
fn mtu_metrics(mtu: u32, key: &RouteKey) -> Vec<RouteMetric> {
    let lock = (!key.to.is_ipv4()).then_some(RouteMetric::Lock(MTU_LOCK));
    lock.into_iter().chain([RouteMetric::Mtu(mtu)]).collect()
}

pub(crate) fn rule(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family(rule.family);
    let attributes = &mut message.attributes;
    message.header.action = match rule.action {
        netplan::RuleAction::Lookup(table) => {
            attributes.push(RuleAttribute::Table(table));
            RuleAction::ToTable
        }
        netplan::RuleAction::LookupSpecific(table) => {
            attributes.extend([RuleAttribute::Table(table), RuleAttribute::SuppressPrefixLen(0)]);
            RuleAction::ToTable
        }
        netplan::RuleAction::Unreachable => RuleAction::Unreachable,
    };
    attributes.push(RuleAttribute::Priority(rule.priority));
    attributes.push(RuleAttribute::Protocol(RouteProtocol::from(rule.protocol)));
    attributes.extend(rule.iif.clone().map(RuleAttribute::Iifname));
    if let Some(to) = &rule.to {
        message.header.dst_len = to.net().prefix_len();
        attributes.push(RuleAttribute::Destination(to.address()));
    }
    message
}
