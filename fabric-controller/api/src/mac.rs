use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// A VXLAN device's MAC address, which follows from its overlay address, so that nodes and
/// gateways never have to exchange it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// `0e:77` (locally administered, unicast) and the four octets of the overlay address.
    pub fn of_overlay(overlay: Ipv4Addr) -> Self {
        let [a, b, c, d] = overlay.octets();
        Self([0x0e, 0x77, a, b, c, d])
    }
}

/// The IPv6 next hop and ICMPv6 source that goes with an overlay address.
///
/// `fd77:6566:7400::/96` (RFC 4193, chosen once for weft; never leaves a cluster) followed by the
/// IPv4 overlay address. So one allocation serves both families.
pub fn overlay_v6(overlay: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = overlay.octets();
    let tail = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
    Ipv6Addr::new(0xfd77, 0x6566, 0x7400, 0, 0, 0, tail[0], tail[1])
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_from_the_overlay_address() {
        let overlay = Ipv4Addr::new(10, 80, 0, 5);
        assert_eq!(Mac::of_overlay(overlay).to_string(), "0e:77:0a:50:00:05");
        assert_eq!(overlay_v6(overlay).to_string(), "fd77:6566:7400::a50:5");
    }
}
