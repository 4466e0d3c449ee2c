//! Our names in the kernel.

use fabric_api::{Cidr, fabric};
use netlink::Scope;
use netplan::{Family, Sysctl};

/// The table of all routes to peers.
pub(crate) const TABLE: u32 = 18952;
/// The table of `unreachable` routes to all peers, which is looked into before the main one: it keeps packets
/// from leaving in clear while others have deleted [`TABLE`], or the rule that leads there.
pub(crate) const BACKSTOP_TABLE: u32 = 18953;
/// Marks our routes and rules.
pub(crate) const PROTOCOL: u8 = 119;
/// Marks routes of gateways on this host to their links.
pub(crate) const GATEWAY_PROTOCOL: u8 = 120;
/// Priority of the rules that send all packets past our table: between the local table and
/// everything else. Cilium has 100 and 109 to 112, EKS 512, 1024 and 1536.
pub(crate) const PRIORITY: u32 = 105;
/// Priorities of the rules for packets from peers to pods of the node: routes of the main table but
/// its default route, then none. They are weft's first ones, so that no later rule of another
/// program takes these packets.
pub(crate) const POD_ROUTES_PRIORITY: u32 = 103;
pub(crate) const NO_POD_PRIORITY: u32 = 104;
/// Priority of the rule for [`BACKSTOP_TABLE`]: that for the main table has the next one.
pub(crate) const BACKSTOP_PRIORITY: u32 = 32765;
pub(crate) const MAIN_TABLE: u32 = 254;
/// Least MTU of a device that Linux sends IPv6 through, in bytes.
pub(crate) const IPV6_MIN_MTU: u32 = 1280;

pub(crate) use fabric::{VNI, VXLAN_PORT};

/// The VXLAN device for underlay addresses of this family.
pub(crate) fn device(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "weft4",
        Family::Ipv6 => "weft6",
    }
}

/// Bytes that VXLAN adds to a packet on this underlay: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.
pub(crate) fn overhead(family: Family) -> u32 {
    match family {
        Family::Ipv4 => 50,
        Family::Ipv6 => 70,
    }
}

/// The setting by which a node forwards packets of a family.
pub(crate) fn forwarding(family: Family) -> Sysctl {
    Sysctl::of_namespace(match family {
        Family::Ipv4 => "net/ipv4/ip_forward",
        Family::Ipv6 => "net/ipv6/conf/all/forwarding",
    })
}

/// All that is ours, besides the firewall.
pub(crate) fn scope(sysctls: impl Iterator<Item = Sysctl>) -> Scope {
    Scope {
        links: [Family::Ipv4, Family::Ipv6].map(|f| device(f).to_owned()).into(),
        tables: [TABLE, BACKSTOP_TABLE].into(),
        protocol: PROTOCOL,
        last_rule: Some(PRIORITY),
        sysctls: sysctls.collect(),
        ..Scope::default()
    }
}

/// True for addresses that every machine has and that do not identify its networks.
pub(crate) fn is_everywhere(network: &Cidr) -> bool {
    match network.address() {
        std::net::IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
        std::net::IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    }
}
