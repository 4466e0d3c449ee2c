//! Sizes of packets, from the underlay up. All are in bytes.

use std::net::{IpAddr, SocketAddr};

use fabric_api::fabric::MtuBound;
use netplan::{Family, names};

/// Overhead of the way to the peer for a packet of the tunnel: IP, UDP, WireGuard's 32.
const fn tunnel_overhead(family: Family) -> u32 {
    match family {
        Family::Ipv4 => 60,
        Family::Ipv6 => 80,
    }
}

/// The way to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    /// Family of the peer's address.
    pub(super) family: Family,
    /// The largest packet that the first link takes.
    pub(super) device: u32,
    /// The largest packet known to arrive.
    pub(super) found: Option<u32>,
    /// Source address that packets have.
    pub(super) source: Option<IpAddr>,
}

/// The way to the peer as far as it is worth probing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The largest IP packet that anything else but the path allows.
    pub limit: u32,
    /// The part of it that is not the tunnel's packet.
    pub overhead: u32,
}

/// The tunnel's MTU and what it follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelMtu {
    pub bytes: u32,
    pub bound: MtuBound,
    /// `None` while no address of the peer is known.
    pub way: Option<Way>,
}

pub(super) fn overlay_mtu(family: Family, underlay: u32) -> u32 {
    underlay.saturating_sub(names::overhead(family))
}

/// The least of what is wanted (`spec.mtu`), what the way to the peer takes, and what the overlay
/// takes.
pub(super) fn tunnel_mtu(
    wanted: u32,
    path: Option<Path>,
    overlays: impl IntoIterator<Item = u32>,
) -> TunnelMtu {
    let mut least = (wanted, MtuBound::Spec);
    let mut lower = |to: u32, bound| {
        if to < least.0 {
            least = (to, bound);
        }
        least
    };
    overlays.into_iter().for_each(|overlay| _ = lower(overlay, MtuBound::Overlay));
    let way = path.map(|path| {
        let overhead = tunnel_overhead(path.family);
        let (inside, _) = lower(path.device.saturating_sub(overhead), MtuBound::Device);
        if let Some(found) = path.found {
            lower(found.saturating_sub(overhead), MtuBound::Path);
        }
        Way { limit: inside + overhead, overhead }
    });
    TunnelMtu { bytes: least.0, bound: least.1, way }
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
        let path = |family, device, found| Some(Path { family, device, found, source: None });
        let v4 = |device| path(Family::Ipv4, device, None);
        let v6 = |device| path(Family::Ipv6, device, None);
        let mtu = |wanted, path, overlays: &[u32]| {
            let mtu = tunnel_mtu(wanted, path, overlays.iter().copied());
            (mtu.bytes, mtu.bound, mtu.way.map(|way| way.limit))
        };
        assert_eq!(mtu(1340, None, &[]), (1340, MtuBound::Spec, None));
        assert_eq!(mtu(1340, v4(1500), &[]), (1340, MtuBound::Spec, Some(1400)));
        assert_eq!(mtu(9000, v4(1500), &[1450]), (1440, MtuBound::Device, Some(1500)));
        assert_eq!(mtu(9000, v6(1500), &[]), (1420, MtuBound::Device, Some(1500)));
        let overlay = overlay_mtu(Family::Ipv6, 1450);
        assert_eq!(mtu(9000, v6(1500), &[overlay]), (1380, MtuBound::Overlay, Some(1460)));
        let found = path(Family::Ipv4, 9000, Some(1300));
        assert_eq!(mtu(1340, found, &[8950]), (1240, MtuBound::Path, Some(1400)));
        let all = path(Family::Ipv4, 9000, Some(1400));
        assert_eq!(mtu(1340, all, &[8950]), (1340, MtuBound::Spec, Some(1400)));
        assert_eq!(overlay_mtu(Family::Ipv4, 1500), 1450);
        assert_eq!(overlay_mtu(Family::Ipv6, 1500), 1430);
    }

    #[test]
    fn ipv4_peer_of_dual_stack_socket_is_ipv4() {
        assert_eq!(family_of("[::ffff:192.0.2.1]:7".parse().unwrap()), Family::Ipv4);
        assert_eq!(family_of("[2001:db8::1]:7".parse().unwrap()), Family::Ipv6);
    }
}
