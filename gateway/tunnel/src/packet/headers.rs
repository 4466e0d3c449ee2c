use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use super::Malformed;

/// IP protocol numbers that are distinguished here.
pub mod protocol {
    pub const HOP_BY_HOP: u8 = 0;
    pub const ICMP: u8 = 1;
    pub const TCP: u8 = 6;
    pub const UDP: u8 = 17;
    pub const DCCP: u8 = 33;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const AUTHENTICATION: u8 = 51;
    pub const ICMPV6: u8 = 58;
    pub const DESTINATION_OPTIONS: u8 = 60;
    pub const UDP_LITE: u8 = 136;
}

/// Extension headers of one packet that are walked at most; real packets have one or two, and
/// each costs a few nanoseconds.
const MAX_EXTENSION_HEADERS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V4,
    V6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// Not fragmented (an IPv6 fragment header with offset 0 and no more to come, RFC 6946, counts
    /// as that).
    Whole,
    /// The first of several: has the L4 header, but not the whole payload.
    First,
    /// A later one: no L4 header.
    Later,
}

/// Offsets of the parts of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    pub version: Version,
    /// Protocol of the transport header at [`Headers::l4_offset`], behind all extension headers.
    pub protocol: u8,
    pub fragment: Fragment,
    /// An IPv4 source route, or an IPv6 routing header with segments left: the destination in the
    /// IP header is not the last one.
    pub source_routed: bool,
    /// Length in bytes of the IP header (with IPv4 options) and the IPv6 extension headers: where
    /// the transport header starts, or a later fragment's payload.
    pub l4_offset: usize,
    /// True length of the packet in bytes, without padding behind it.
    pub total_len: usize,
}

impl Headers {
    /// Parses one packet. `packet` may be longer than the packet's own length field: a decrypted
    /// one has up to 15 bytes of padding (WireGuard whitepaper section 5.4.6).
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        let headers = Self::parse_train(packet)?;
        let total_len = match headers.version {
            Version::V4 => usize::from(word(packet, 2)?),
            Version::V6 => 40 + usize::from(word(packet, 4)?),
        };
        if total_len > packet.len() || total_len < headers.l4_offset {
            return Err(Malformed::TotalLength);
        }
        Ok(Self { total_len, ..headers })
    }

    /// Parses the headers of a train, or of a packet that was cut short: the length field is not
    /// looked at, `total_len` is that of `packet`.
    #[inline]
    pub fn parse_train(packet: &[u8]) -> Result<Self, Malformed> {
        match packet.first().ok_or(Malformed::Truncated)? >> 4 {
            4 => Self::parse_v4(packet),
            6 => Self::parse_v6(packet),
            _ => Err(Malformed::Version),
        }
    }

    #[inline]
    fn parse_v4(packet: &[u8]) -> Result<Self, Malformed> {
        let header: &[u8; 20] = packet.first_chunk().ok_or(Malformed::Truncated)?;
        let l4_offset = usize::from(header[0] & 0xf) * 4;
        let source_routed = match l4_offset {
            0..20 => return Err(Malformed::HeaderLength),
            20 => false,
            _ => has_source_route(packet.get(20..l4_offset).ok_or(Malformed::Truncated)?),
        };
        Ok(Self {
            version: Version::V4,
            protocol: header[9],
            fragment: fragment(u16::from_be_bytes([header[6], header[7]]), 0x1fff, 0x2000),
            source_routed,
            l4_offset,
            total_len: packet.len(),
        })
    }

    #[inline]
    fn parse_v6(packet: &[u8]) -> Result<Self, Malformed> {
        let header: &[u8; 40] = packet.first_chunk().ok_or(Malformed::Truncated)?;
        let mut headers = Self {
            version: Version::V6,
            protocol: header[6],
            fragment: Fragment::Whole,
            source_routed: false,
            l4_offset: 40,
            total_len: packet.len(),
        };
        if is_extension(headers.protocol) {
            headers.walk_extensions(packet)?;
        }
        Ok(headers)
    }

    /// Moves `protocol` and `l4_offset` behind the extension headers (RFC 8200 section 4).
    #[cold]
    fn walk_extensions(&mut self, packet: &[u8]) -> Result<(), Malformed> {
        for _ in 0..MAX_EXTENSION_HEADERS {
            if !is_extension(self.protocol) || self.fragment == Fragment::Later {
                return Ok(());
            }
            let rest = packet.get(self.l4_offset..).ok_or(Malformed::Truncated)?;
            let start: &[u8; 8] = rest.first_chunk().ok_or(Malformed::Truncated)?;
            let length = match self.protocol {
                protocol::FRAGMENT => {
                    let word = u16::from_be_bytes([start[2], start[3]]);
                    self.fragment = fragment(word, 0xfff8, 1);
                    8
                }
                protocol::AUTHENTICATION => (usize::from(start[1]) + 2) * 4,
                protocol::ROUTING => {
                    self.source_routed |= start[3] != 0;
                    (usize::from(start[1]) + 1) * 8
                }
                _ => (usize::from(start[1]) + 1) * 8,
            };
            if length > rest.len() {
                return Err(Malformed::Truncated);
            }
            self.protocol = start[0];
            self.l4_offset += length;
        }
        match is_extension(self.protocol) && self.fragment != Fragment::Later {
            true => Err(Malformed::ExtensionHeaders),
            false => Ok(()),
        }
    }

    /// Returns the range of the addresses: first half the source, second half the destination.
    pub fn addresses(&self) -> Range<usize> {
        match self.version {
            Version::V4 => 12..20,
            Version::V6 => 8..40,
        }
    }

    /// The source address of the packet that these headers were parsed from.
    pub fn source(&self, packet: &[u8]) -> Option<IpAddr> {
        match self.version {
            Version::V4 => bytes(packet, 12).map(|b: [u8; 4]| Ipv4Addr::from(b).into()),
            Version::V6 => bytes(packet, 8).map(|b: [u8; 16]| Ipv6Addr::from(b).into()),
        }
    }

    /// The destination address of the packet that these headers were parsed from.
    pub fn destination(&self, packet: &[u8]) -> Option<IpAddr> {
        match self.version {
            Version::V4 => bytes(packet, 16).map(|b: [u8; 4]| Ipv4Addr::from(b).into()),
            Version::V6 => bytes(packet, 24).map(|b: [u8; 16]| Ipv6Addr::from(b).into()),
        }
    }

    /// Returns the offset of the payload of TCP or UDP. `None` for other protocols, for later
    /// fragments, and if the TCP header is too short or runs past the end.
    #[inline]
    pub fn payload_offset(&self, packet: &[u8]) -> Option<usize> {
        if self.fragment == Fragment::Later {
            return None;
        }
        let length = match self.protocol {
            protocol::TCP => usize::from(packet.get(self.l4_offset + 12)? >> 4) * 4,
            protocol::UDP => 8,
            _ => return None,
        };
        let shortest = if self.protocol == protocol::TCP { 20 } else { 8 };
        let offset = self.l4_offset + length;
        (length >= shortest && offset <= self.total_len.min(packet.len())).then_some(offset)
    }

    /// Returns the offset of the transport checksum in the packet, if the protocol has one that
    /// covers the IP addresses. `None` for later fragments.
    #[inline]
    pub fn checksum_offset(&self) -> Option<usize> {
        if self.fragment == Fragment::Later {
            return None;
        }
        let within = match self.protocol {
            protocol::TCP => 16,
            protocol::UDP | protocol::UDP_LITE | protocol::DCCP => 6,
            protocol::ICMPV6 if self.version == Version::V6 => 2,
            _ => return None,
        };
        Some(self.l4_offset + within)
    }
}

#[inline]
fn is_extension(protocol: u8) -> bool {
    matches!(
        protocol,
        protocol::HOP_BY_HOP
            | protocol::ROUTING
            | protocol::FRAGMENT
            | protocol::AUTHENTICATION
            | protocol::DESTINATION_OPTIONS
    )
}

#[inline]
fn fragment(word: u16, offset: u16, more: u16) -> Fragment {
    match (word & offset, word & more) {
        (0, 0) => Fragment::Whole,
        (0, _) => Fragment::First,
        _ => Fragment::Later,
    }
}

/// Returns whether IPv4 options hold a loose or strict source route (RFC 791 section 3.1).
#[cold]
fn has_source_route(mut options: &[u8]) -> bool {
    loop {
        match *options {
            [] | [0, ..] => return false,
            [1, ..] => options = &options[1..],
            [131 | 137, ..] => return true,
            [_, length, ..] if length >= 2 && usize::from(length) <= options.len() => {
                options = &options[usize::from(length)..];
            }
            _ => return false,
        }
    }
}

fn word(packet: &[u8], at: usize) -> Result<u16, Malformed> {
    bytes(packet, at).map(u16::from_be_bytes).ok_or(Malformed::Truncated)
}

fn bytes<const N: usize>(packet: &[u8], at: usize) -> Option<[u8; N]> {
    packet.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    fn udp_v4() -> Vec<u8> {
        let mut packet = Vec::new();
        let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
        builder.write(&mut packet, b"payload").unwrap();
        packet
    }

    /// An IPv6 packet of zeros behind the given extension headers.
    fn v6(first: u8, extensions: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[6] = first;
        packet.extend(extensions);
        packet.extend([0; 60]);
        let length = (packet.len() - 40) as u16;
        packet[4..6].copy_from_slice(&length.to_be_bytes());
        packet
    }

    #[test]
    fn padding_is_not_part_of_the_packet() {
        let packet = udp_v4();
        for padding in 0..16 {
            let padded = [&packet[..], &[0; 16][..padding]].concat();
            assert_eq!(Headers::parse(&padded).unwrap().total_len, packet.len());
        }
    }

    #[test]
    fn truncated_packet_is_refused_at_every_length() {
        let packet = udp_v4();
        for kept in 0..packet.len() {
            assert!(Headers::parse(&packet[..kept]).is_err(), "{kept} bytes");
        }
        let packet = v6(0, &[43, 0, 0, 0, 0, 0, 0, 0, 17, 0, 4, 0, 0, 0, 0, 0]);
        for kept in 0..packet.len() {
            assert!(Headers::parse(&packet[..kept]).is_err(), "{kept} bytes");
        }
    }

    #[test]
    fn a_length_below_the_headers_is_refused() {
        let mut packet = udp_v4();
        packet[2..4].copy_from_slice(&19u16.to_be_bytes());
        assert_eq!(Headers::parse(&packet), Err(Malformed::TotalLength));
        assert_eq!(Headers::parse_train(&packet).unwrap().total_len, packet.len());
        packet[0] = 0x44;
        assert_eq!(Headers::parse_train(&packet), Err(Malformed::HeaderLength));
        packet[0] = 0x54;
        assert_eq!(Headers::parse_train(&packet), Err(Malformed::Version));
    }

    #[test]
    fn extension_headers_lead_to_the_transport_header() {
        // Hop-by-hop, routing with nothing left, destination options of 16 bytes, AH of 24, UDP.
        let extensions = [
            [43, 0, 1, 4, 0, 0, 0, 0],
            [60, 0, 4, 0, 0, 0, 0, 0],
            [51, 1, 1, 12, 0, 0, 0, 0],
            [0; 8],
            [17, 4, 0, 0, 0, 0, 0, 0],
            [0; 8],
            [0; 8],
        ];
        let packet = v6(0, extensions.as_flattened());
        let headers = Headers::parse(&packet).unwrap();
        assert_eq!((headers.protocol, headers.l4_offset), (17, 40 + 56));
        assert_eq!(headers.payload_offset(&packet), Some(40 + 56 + 8));
        assert!(!headers.source_routed && headers.fragment == Fragment::Whole);
    }

    #[test]
    fn a_routing_header_with_segments_left_is_noticed() {
        let packet = v6(43, &[17, 0, 0, 1, 0, 0, 0, 0]);
        assert!(Headers::parse(&packet).unwrap().source_routed);
    }

    #[test]
    fn fragments_are_detected_in_both_families() {
        use Fragment::{First, Later, Whole};
        for (offset, more, expected) in [(0, 0, Whole), (0, 1, First), (3, 1, Later), (3, 0, Later)]
        {
            let mut packet = udp_v4();
            packet[6] |= more << 5;
            packet[7] = offset;
            assert_eq!(Headers::parse(&packet).unwrap().fragment, expected);
            let packet = v6(44, &[17, 0, 0, offset << 3 | more, 0, 0, 0, 0]);
            let headers = Headers::parse(&packet).unwrap();
            assert_eq!((headers.fragment, headers.l4_offset), (expected, 48));
            assert_eq!(headers.checksum_offset().is_some(), expected != Later);
        }
        let mut packet = udp_v4();
        packet[6] = 0x40;
        assert_eq!(Headers::parse(&packet).unwrap().fragment, Whole, "don't fragment");
    }

    #[test]
    fn a_later_fragments_payload_is_not_walked() {
        // Its first header would be destination options; the bytes there are anything.
        let packet = v6(44, &[60, 0, 1, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0]);
        let headers = Headers::parse(&packet).unwrap();
        assert_eq!((headers.protocol, headers.l4_offset), (60, 48));
    }

    #[test]
    fn endless_extension_headers_are_refused() {
        let chain = |count| v6(60, [60, 0, 1, 4, 0, 0, 0, 0].repeat(count).as_slice());
        assert_eq!(Headers::parse(&chain(100)), Err(Malformed::ExtensionHeaders));
        let mut packet = chain(8);
        packet[40 + 7 * 8] = 6;
        assert_eq!(Headers::parse(&packet).unwrap().protocol, 6);
    }

    #[test]
    fn tcp_header_with_wrong_length_has_no_payload() {
        let mut packet = v6(6, &[]);
        for (words, expected) in [(4, None), (5, Some(60)), (15, Some(100)), (0, None)] {
            packet[52] = words << 4;
            assert_eq!(Headers::parse(&packet).unwrap().payload_offset(&packet), expected);
        }
        packet.truncate(99);
        packet[52] = 0xf0;
        assert_eq!(Headers::parse_train(&packet).unwrap().payload_offset(&packet), None);
    }

    #[test]
    fn addresses_are_read_where_they_are() {
        let packet = udp_v4();
        let headers = Headers::parse(&packet).unwrap();
        assert_eq!(headers.source(&packet), Some([10, 0, 0, 1].into()));
        assert_eq!(headers.destination(&packet), Some([10, 0, 0, 2].into()));
        assert_eq!(packet[headers.addresses()], [10, 0, 0, 1, 10, 0, 0, 2]);
    }
}
