use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// A VXLAN device's MAC address, derived from what the cluster has of its owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// `0e:77` (locally administered, unicast) and the four octets of the overlay address.
    pub fn of_overlay(overlay: Ipv4Addr) -> Self {
        let [a, b, c, d] = overlay.octets();
        Self([0x0e, 0x77, a, b, c, d])
    }

    /// Address known only to those who may read the object of this uid: 46 bits of its SHA-256,
    /// locally administered, unicast. A device takes in what is sent to its address, so no other
    /// pod can send to it.
    pub fn of_uid(uid: &str) -> Self {
        let mut mac = [0; 6];
        mac.iter_mut().zip(Sha256::digest(uid)).for_each(|(to, from)| *to = from);
        mac[0] = (mac[0] & 0xfc) | 2;
        Self(mac)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a MAC address such as 0e:77:0a:50:00:05")]
pub struct ParseMacError;

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let octet = |part: &str| match part.as_bytes() {
            [a, b] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit() => {
                u8::from_str_radix(part, 16).map_err(|_| ParseMacError)
            }
            _ => Err(ParseMacError),
        };
        let octets = text.split(':').map(octet).collect::<Result<Vec<_>, _>>()?;
        octets.try_into().map(Self).map_err(|_| ParseMacError)
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

/// The IPv6 address of a gateway's link on a host with this IPv6 address.
///
/// Both have the same ones' complement sum (RFC 6296, section 3.1), so that a UDP checksum is as right
/// for the one as for the other. The kernel could not correct it: a packet whose inner checksum is
/// left to the device has its outer one complete, which looks like one left to the device, too.
pub fn link_v6(link: Ipv4Addr, host: Ipv6Addr) -> Ipv6Addr {
    const MODULUS: u32 = 0xffff;
    let sum = |words: [u16; 8]| words.into_iter().map(u32::from).sum::<u32>() % MODULUS;
    let mut words = overlay_v6(link).segments();
    let difference = (MODULUS + sum(host.segments()) - sum(words)) % MODULUS;
    words[5] = difference as u16;
    words.into()
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn addresses_follow_from_the_overlay_address() {
        let overlay = Ipv4Addr::new(10, 80, 0, 5);
        assert_eq!(Mac::of_overlay(overlay).to_string(), "0e:77:0a:50:00:05");
        assert_eq!(overlay_v6(overlay).to_string(), "fd77:6566:7400::a50:5");
    }

    #[test]
    fn link_address_leaves_checksums_as_they_are() {
        let link = Ipv4Addr::new(10, 80, 0, 10);
        for host in ["2001:db8::11", "fd77:6566:7400::a50:a", "ffff:ffff::1", "::1"] {
            let host: Ipv6Addr = host.parse().unwrap();
            let sum = |ip: Ipv6Addr| ip.segments().into_iter().map(u32::from).sum::<u32>() % 0xffff;
            let found = link_v6(link, host);
            assert_eq!(sum(found), sum(host), "{found}");
            assert_eq!(found.segments()[6..], overlay_v6(link).segments()[6..]);
        }
        let host = "2001:db8::11".parse().unwrap();
        assert_eq!(link_v6(link, host).to_string(), "fd77:6566:7400::4c91:a50:a");
    }

    #[test]
    fn address_of_uid_is_unicast_local_and_unique() {
        let macs: BTreeSet<Mac> = (0..1000).map(|n| Mac::of_uid(&format!("uid {n}"))).collect();
        assert_eq!(macs.len(), 1000);
        assert!(macs.iter().all(|mac| mac.0[0] & 3 == 2));
    }

    #[test]
    fn text_round_trips_and_others_are_rejected() {
        let mac = Mac::of_uid("a");
        assert_eq!(mac.to_string().parse(), Ok(mac));
        for bad in
            ["", "0e:77:0a:50:00", "0e:77:0a:50:00:05:06", "0e:77:0a:50:00:+5", "e:7:a:5:0:5"]
        {
            assert_eq!(bad.parse::<Mac>(), Err(ParseMacError), "{bad}");
        }
    }
}
