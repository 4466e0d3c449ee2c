//! Our names in the kernel.

use fabric_primitives::Cidr;

use crate::{Family, Sysctl};

/// The table of all routes to peers.
pub const TABLE: u32 = 18952;
/// The table of `unreachable` routes to all peers, which is looked into before the main one: it keeps packets
/// from leaving in clear while others have deleted [`TABLE`], or the rule that leads there.
pub const BACKSTOP_TABLE: u32 = 18953;
/// Marks our routes and rules.
pub const PROTOCOL: u8 = 119;
/// Marks routes of gateways on this host to their links.
pub const GATEWAY_PROTOCOL: u8 = 120;
/// Priority of the rules that send all packets past our table: between the local table and
/// everything else. Cilium has 100 and 109 to 112, EKS 512, 1024 and 1536.
pub const PRIORITY: u32 = 105;
/// Priority of the rules for the node's own networks within peers' prefixes: routes of the main table but its default
/// route.
pub const OWN_NETWORKS_PRIORITY: u32 = 102;
/// Priorities of the rules for packets from peers to pods of the node: routes of the main table but
/// its default route, then none. They are weft's first ones, so that no later rule of another
/// program takes these packets.
pub const POD_ROUTES_PRIORITY: u32 = 103;
pub const NO_POD_PRIORITY: u32 = 104;
/// Priority of the rule for [`BACKSTOP_TABLE`]: that for the main table has the next one.
pub const BACKSTOP_PRIORITY: u32 = 32765;
pub const MAIN_TABLE: u32 = 254;
/// Least MTU of a device that Linux sends IPv6 through, in bytes: it takes IPv6 from one whose MTU is below, and gives it
/// back with all settings anew.
pub const IPV6_MIN_MTU: u32 = 1280;

/// The VXLAN device for underlay addresses of this family.
pub fn device(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "weft4",
        Family::Ipv6 => "weft6",
    }
}

/// Bytes that VXLAN adds to a packet on this underlay: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.
pub fn overhead(family: Family) -> u32 {
    match family {
        Family::Ipv4 => 50,
        Family::Ipv6 => 70,
    }
}

/// The setting by which a node forwards packets of a family.
pub fn forwarding(family: Family) -> Sysctl {
    Sysctl::of_namespace(match family {
        Family::Ipv4 => "net/ipv4/ip_forward",
        Family::Ipv6 => "net/ipv6/conf/all/forwarding",
    })
}

/// True for addresses that every machine has and that do not identify its networks.
pub fn is_everywhere(network: &Cidr) -> bool {
    match network.address() {
        std::net::IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
        std::net::IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    }
}
