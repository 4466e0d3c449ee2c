use std::ops::Range;

use crate::checksum;
use crate::packet::{Version, protocol};

/// Longest headers of a segment that is joined: IPv6 and TCP with 40 bytes of options.
pub(super) const MAX_HEADERS: usize = 100;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;

/// A TCP segment that may become part of a train: IPv4 without options or IPv6 without extension
/// headers, whole, with payload, and with no flag that stands for a change of the connection.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) version: Version,
    /// Offset of the TCP header.
    pub(super) l4: usize,
    /// Bytes of headers.
    pub(super) headers: usize,
    pub(super) len: usize,
    pub(super) sequence: u32,
    flags: u8,
}

impl Segment {
    #[inline]
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let (version, l4) = match packet.first()? {
            0x45 => (Version::V4, 20),
            0x60..=0x6f => (Version::V6, 40),
            _ => return None,
        };
        let tcp: &[u8; 20] = packet.get(l4..)?.first_chunk()?;
        let is_plain = match version {
            // Not a fragment; don't-fragment may be set. The length is the packet's, without
            // padding.
            Version::V4 => packet[9] == protocol::TCP && packet[6] & !0x40 == 0 && packet[7] == 0,
            Version::V6 => packet[6] == protocol::TCP,
        };
        let headers = l4 + usize::from(tcp[12] >> 4) * 4;
        let flags = tcp[13];
        let joins = is_plain
            && headers >= l4 + 20
            && packet.len() > headers
            && flags & ACK != 0
            && flags & !(ACK | PSH | FIN | ECE) == 0;
        joins.then_some(Self {
            version,
            l4,
            headers,
            len: packet.len(),
            sequence: u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]),
            flags,
        })
    }

    #[inline]
    pub(super) fn payload(&self) -> usize {
        self.len - self.headers
    }

    /// Addresses and ports, which lie side by side.
    #[inline]
    pub(super) fn flow(&self) -> Range<usize> {
        match self.version {
            Version::V4 => 12..24,
            Version::V6 => 8..44,
        }
    }

    /// Nothing may follow a segment that was pushed or ends the connection.
    #[inline]
    pub(super) fn ends_train(&self) -> bool {
        self.flags & (PSH | FIN) != 0
    }

    pub(super) fn end_flags(&self) -> u8 {
        self.flags & (PSH | FIN)
    }

    /// Returns whether this segment, of the same flow, has the headers that the one number `index`
    /// of a train would have that `first` begins.
    #[inline]
    pub(super) fn is_like(&self, packet: &[u8], first: &Self, header: &[u8], index: usize) -> bool {
        let is_same = |range: Range<usize>| packet[range.clone()] == header[range];
        let ip_is_like = match self.version {
            // Service and lifetime. An identification means something only where fragmenting is
            // allowed (RFC 6864); there it has to count up, as it will again when the train is cut.
            Version::V4 => {
                packet[1] == header[1]
                    && is_same(6..9)
                    && (packet[6] & 0x40 != 0
                        || id(packet) == id(header).wrapping_add(index as u16))
            }
            // Traffic class, flow label, hop limit.
            Version::V6 => is_same(0..4) && packet[7] == header[7],
        };
        let l4 = self.l4;
        // Acknowledgement number, window, urgent pointer and options.
        ip_is_like
            && self.headers == first.headers
            && self.flags & !(PSH | FIN) == first.flags & !(PSH | FIN)
            && is_same(l4 + 8..l4 + 12)
            && is_same(l4 + 14..l4 + 16)
            && is_same(l4 + 18..self.headers)
    }

    #[inline]
    pub(super) fn has_valid_checksum(&self, packet: &[u8]) -> bool {
        let addresses = match self.version {
            Version::V4 => &packet[12..20],
            Version::V6 => &packet[8..40],
        };
        let tcp = &packet[self.l4..self.len];
        let pseudo = checksum::pseudo_header(addresses, protocol::TCP, tcp.len());
        checksum::fold(pseudo + checksum::sum(tcp)) == 0xffff
    }

    /// Returns whether `packet`, which is no [`Segment`], may belong to this one's flow, whose
    /// headers are `header`. Where ports cannot be read easily (fragments, extension headers),
    /// equal addresses are enough.
    pub(super) fn may_share_flow(&self, header: &[u8], packet: &[u8]) -> bool {
        let (addresses, proto, ports_are_plain) = match (self.version, packet) {
            (Version::V4, [first, ..]) if first >> 4 == 4 && packet.len() >= 20 => {
                let is_whole = packet[6] & 0x3f == 0 && packet[7] == 0;
                (12..20, packet[9], *first == 0x45 && is_whole)
            }
            (Version::V6, [first, ..]) if first >> 4 == 6 && packet.len() >= 40 => {
                (8..40, packet[6], packet[6] == protocol::TCP)
            }
            (Version::V4 | Version::V6, _) => return false,
        };
        if matches!(proto, protocol::UDP | protocol::ICMP | protocol::ICMPV6)
            || packet[addresses.clone()] != header[addresses]
        {
            return false;
        }
        let flow = self.flow();
        !ports_are_plain || packet.len() < flow.end || packet[flow.clone()] == header[flow]
    }
}

fn id(packet: &[u8]) -> u16 {
    u16::from_be_bytes([packet[4], packet[5]])
}
