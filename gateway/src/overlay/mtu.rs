//! How large packets may be, from the underlay up.

use std::net::{IpAddr, SocketAddr};

use netplan::Family;

/// What an underlay takes away from a packet of the overlay: outer IP, UDP, VXLAN, inner Ethernet.
const fn vxlan_overhead(family: Family) -> u32 {
    match family {
        Family::Ipv4 => 50,
        Family::Ipv6 => 70,
    }
}

/// What the way to the peer takes away from a packet of the tunnel: IP, UDP, WireGuard's 32.
const fn tunnel_overhead(family: Family) -> u32 {
    match family {
        Family::Ipv4 => 60,
        Family::Ipv6 => 80,
    }
}

/// The way to the peer: family of its address, and how large a packet the first link takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) family: Family,
    /// In bytes.
    pub(super) mtu: u32,
}

/// In bytes.
pub(super) fn overlay_mtu(family: Family, underlay: u32) -> u32 {
    underlay.saturating_sub(vxlan_overhead(family))
}

/// The tunnel's MTU in bytes: the least of what is wanted (`spec.mtu`), what the way to the peer
/// takes, and what the overlay takes.
pub(super) fn tunnel_mtu(
    wanted: u32,
    path: Option<Path>,
    overlays: impl IntoIterator<Item = u32>,
) -> u32 {
    let path = path.map(|path| path.mtu.saturating_sub(tunnel_overhead(path.family)));
    overlays.into_iter().chain(path).fold(wanted, u32::min)
}

/// The family that packets to `address` have on the wire.
pub(super) fn family_of(address: SocketAddr) -> Family {
    Family::of(canonical(address.ip()))
}

/// An IPv4 address that a dual-stack socket shows as IPv6, as IPv4.
pub(super) fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tunnel_takes_what_every_part_of_the_way_takes() {
        let v4 = |mtu| Some(Path { family: Family::Ipv4, mtu });
        let v6 = |mtu| Some(Path { family: Family::Ipv6, mtu });
        assert_eq!(tunnel_mtu(1340, None, []), 1340);
        assert_eq!(tunnel_mtu(9000, v4(1500), []), 1440);
        assert_eq!(tunnel_mtu(9000, v6(1500), []), 1420);
        assert_eq!(tunnel_mtu(9000, v6(1500), [overlay_mtu(Family::Ipv6, 1450)]), 1380);
        assert_eq!(overlay_mtu(Family::Ipv4, 1500), 1450);
        assert_eq!(overlay_mtu(Family::Ipv6, 1500), 1430);
    }

    #[test]
    fn an_ipv4_peer_behind_a_dual_stack_socket_is_an_ipv4_peer() {
        assert_eq!(family_of("[::ffff:192.0.2.1]:7".parse().unwrap()), Family::Ipv4);
        assert_eq!(family_of("[2001:db8::1]:7".parse().unwrap()), Family::Ipv6);
    }
}
