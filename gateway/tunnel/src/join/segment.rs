use std::ops::Range;

use crate::checksum;
use crate::packet::{Version, protocol};

/// Longest headers of a segment that is joined: IPv6 and TCP with 40 bytes of options.
pub(super) const MAX_HEADERS: usize = 100;

const UDP_HEADER: usize = 8;

/// Datagrams of a train at most, as Linux' own GRO has it (UDP_GRO_CNT_MAX): senders, too, may use no more.
const MAX_UDP_SEGMENTS: usize = 64;

/// UDP ports of tunnels, which Linux does not join either: VXLAN (also the one that Linux began with, and
/// weft's own), Geneve. What they carry has trains of its own.
const TUNNEL_PORTS: [u16; 4] = [4789, 8472, 4879, 6081];

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const ECE: u8 = 0x40;

/// Transport protocol of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    pub(super) fn protocol(self) -> u8 {
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
        }
    }

    /// Offset of the checksum in the transport header.
    pub(super) fn checksum_offset(self) -> usize {
        match self {
            Self::Tcp => 16,
            Self::Udp => 6,
        }
    }
}

/// A TCP segment or UDP datagram that may become part of a train: IPv4 without options or IPv6 without
/// extension headers, whole, with payload; of TCP with no flag that stands for a change of the
/// connection, of UDP with a checksum and not of a tunnel.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) version: Version,
    pub(super) transport: Transport,
    /// Offset of the transport header.
    pub(super) l4: usize,
    /// Bytes of headers.
    pub(super) headers: usize,
    pub(super) len: usize,
    /// TCP's sequence number.
    sequence: u32,
    /// TCP's flags.
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
        let next = match version {
            // Not a fragment; don't-fragment may be set.
            Version::V4 if packet.len() > l4 && packet[6] & !0x40 == 0 && packet[7] == 0 => {
                packet[9]
            }
            Version::V6 if packet.len() > l4 => packet[6],
            Version::V4 | Version::V6 => return None,
        };
        match next {
            protocol::TCP => Self::parse_tcp(packet, version, l4),
            protocol::UDP => Self::parse_udp(packet, version, l4),
            _ => None,
        }
    }

    /// The length is the packet's: the session cut the padding off.
    #[inline]
    fn parse_tcp(packet: &[u8], version: Version, l4: usize) -> Option<Self> {
        let tcp: &[u8; 20] = packet.get(l4..)?.first_chunk()?;
        let headers = l4 + usize::from(tcp[12] >> 4) * 4;
        let flags = tcp[13];
        let joins = headers >= l4 + 20
            && packet.len() > headers
            && flags & ACK != 0
            && flags & !(ACK | PSH | FIN | ECE) == 0;
        joins.then_some(Self {
            version,
            transport: Transport::Tcp,
            l4,
            headers,
            len: packet.len(),
            sequence: u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]),
            flags,
        })
    }

    #[inline]
    fn parse_udp(packet: &[u8], version: Version, l4: usize) -> Option<Self> {
        let udp: &[u8; UDP_HEADER] = packet.get(l4..)?.first_chunk()?;
        let field = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
        let joins = packet.len() > l4 + UDP_HEADER
            && usize::from(field(4)) == packet.len() - l4
            && field(6) != 0
            && !TUNNEL_PORTS.contains(&field(2));
        joins.then_some(Self {
            version,
            transport: Transport::Udp,
            l4,
            headers: l4 + UDP_HEADER,
            len: packet.len(),
            sequence: 0,
            flags: 0,
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

    /// The sequence number of what carries on after this segment; datagrams have none.
    #[inline]
    pub(super) fn next_sequence(&self) -> u32 {
        match self.transport {
            Transport::Tcp => self.sequence.wrapping_add(self.payload() as u32),
            Transport::Udp => self.sequence,
        }
    }

    #[inline]
    pub(super) fn is_at(&self, sequence: u32) -> bool {
        self.sequence == sequence
    }

    /// Returns whether a train of `packets` segments may take one more.
    #[inline]
    pub(super) fn may_follow(&self, packets: usize) -> bool {
        self.transport == Transport::Tcp || packets < MAX_UDP_SEGMENTS
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
        if self.transport == Transport::Udp {
            return ip_is_like;
        }
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
        let l4 = &packet[self.l4..self.len];
        let pseudo = checksum::pseudo_header(addresses, self.transport.protocol(), l4.len());
        checksum::fold(pseudo + checksum::sum(l4)) == 0xffff
    }

    /// Returns whether `packet`, which is no [`Segment`], may belong to this one's flow, whose
    /// headers are `header`. Where ports cannot be read easily (fragments, extension headers),
    /// equal addresses are enough.
    pub(super) fn may_share_flow(&self, header: &[u8], packet: &[u8]) -> bool {
        let ours = self.transport.protocol();
        let (addresses, is_other, ports_are_plain) = match (self.version, packet) {
            (Version::V4, [first, ..]) if first >> 4 == 4 && packet.len() >= 20 => {
                let is_whole = packet[6] & 0x3f == 0 && packet[7] == 0;
                (12..20, packet[9] != ours, *first == 0x45 && is_whole)
            }
            (Version::V6, [first, ..]) if first >> 4 == 6 && packet.len() >= 40 => {
                let is_other =
                    matches!(packet[6], protocol::TCP | protocol::UDP | protocol::ICMPV6);
                (8..40, is_other && packet[6] != ours, packet[6] == ours)
            }
            (Version::V4 | Version::V6, _) => return false,
        };
        if is_other || packet[addresses.clone()] != header[addresses] {
            return false;
        }
        let flow = self.flow();
        !ports_are_plain || packet.len() < flow.end || packet[flow.clone()] == header[flow]
    }
}

fn id(packet: &[u8]) -> u16 {
    u16::from_be_bytes([packet[4], packet[5]])
}
