//! Attribute values of netlink messages.

use std::net::IpAddr;

use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netplan::Address;

pub(crate) fn table_of(message: &RouteMessage) -> u32 {
    let table = |a: &RouteAttribute| if let RouteAttribute::Table(t) = a { Some(*t) } else { None };
    message.attributes.iter().find_map(table).unwrap_or_else(|| message.header.table.into())
}

pub(crate) fn output_device(message: &RouteMessage) -> Option<u32> {
    let oif = |a: &RouteAttribute| if let RouteAttribute::Oif(i) = a { Some(*i) } else { None };
    message.attributes.iter().find_map(oif)
}

pub(crate) fn mtu(link: &LinkMessage) -> u32 {
    let mtu = |a: &LinkAttribute| if let LinkAttribute::Mtu(mtu) = a { Some(*mtu) } else { None };
    link.attributes.iter().find_map(mtu).unwrap_or(0)
}

pub(crate) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    if let RouteAddress::Inet(ip) = address {
        Some((*ip).into())
    } else if let RouteAddress::Inet6(ip) = address {
        Some((*ip).into())
    } else {
        None
    }
}

/// Local is the device's own address; Address is the other end's on a point-to-point device.
pub(crate) fn as_address(message: &AddressMessage, dev: String) -> Option<Address> {
    let local = |a: &AddressAttribute| {
        if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None }
    };
    let plain = |a: &AddressAttribute| {
        if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None }
    };
    let attributes = &message.attributes;
    let found = attributes.iter().find_map(local).or_else(|| attributes.iter().find_map(plain));
    found.map(|address| Address { dev, address, len: message.header.prefix_len })
}
