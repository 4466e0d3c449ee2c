use super::{Headers, Malformed, Version, protocol};

const NEEDS_CHECKSUM: u8 = 1;
const CHECKSUM_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// Content of the transport checksum field of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L4Checksum {
    /// A checksum.
    Complete,
    /// The folded sum of the pseudo-header, not complemented; someone further on completes it.
    Partial,
}

/// Kind of train in a frame of the tunnel device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gso {
    /// A single packet.
    None,
    TcpV4,
    TcpV6,
    /// UDP datagrams over IPv4 or IPv6 (VIRTIO_NET_HDR_GSO_UDP_L4).
    UdpL4,
}

/// The header in front of every frame of a tunnel device that was opened with IFF_VNET_HDR
/// (`struct virtio_net_hdr` of linux/virtio_net.h), decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// The checksum at `checksum_start + checksum_offset` is partial.
    pub needs_checksum: bool,
    /// Someone verified the checksum already.
    pub checksum_valid: bool,
    pub gso: Gso,
    /// The train's first segment alone carries TCP's CWR flag.
    pub ecn: bool,
    /// Bytes of headers; only a hint when read: for forwarded trains Linux puts in more than that.
    pub header_len: u16,
    /// Bytes of payload in every segment of a train but the last.
    pub gso_size: u16,
    /// Start of the sum, in bytes from the start of the packet: the transport header.
    pub checksum_start: u16,
    /// Offset of the checksum, in bytes from `checksum_start`.
    pub checksum_offset: u16,
}

impl Offload {
    /// Length of the encoded header in bytes.
    pub const LEN: usize = 10;

    /// A single packet with a complete checksum.
    pub const NONE: Self = Self {
        needs_checksum: false,
        checksum_valid: false,
        gso: Gso::None,
        ecn: false,
        header_len: 0,
        gso_size: 0,
        checksum_start: 0,
        checksum_offset: 0,
    };

    /// Decodes a header, whose fields are in the machine's byte order (tun's default). Fails for
    /// kinds of trains that weft never enables on its device.
    #[inline]
    pub fn parse(header: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let [flags, gso, rest @ ..] = header;
        let field = |i: usize| u16::from_ne_bytes([rest[2 * i], rest[2 * i + 1]]);
        Ok(Self {
            needs_checksum: flags & NEEDS_CHECKSUM != 0,
            checksum_valid: flags & CHECKSUM_VALID != 0,
            gso: match gso & !GSO_ECN {
                0 => Gso::None,
                GSO_TCPV4 => Gso::TcpV4,
                GSO_TCPV6 => Gso::TcpV6,
                GSO_UDP_L4 => Gso::UdpL4,
                _ => return Err(Malformed::OffloadKind),
            },
            ecn: gso & GSO_ECN != 0,
            header_len: field(0),
            gso_size: field(1),
            checksum_start: field(2),
            checksum_offset: field(3),
        })
    }

    /// Encodes the header, the reverse of [`Offload::parse`].
    #[inline]
    pub fn write(&self) -> [u8; Self::LEN] {
        let mut header = [0; Self::LEN];
        header[0] = if self.needs_checksum { NEEDS_CHECKSUM } else { 0 }
            | if self.checksum_valid { CHECKSUM_VALID } else { 0 };
        header[1] = match self.gso {
            Gso::None => 0,
            Gso::TcpV4 => GSO_TCPV4,
            Gso::TcpV6 => GSO_TCPV6,
            Gso::UdpL4 => GSO_UDP_L4,
        } | if self.ecn { GSO_ECN } else { 0 };
        header[2..4].copy_from_slice(&self.header_len.to_ne_bytes());
        header[4..6].copy_from_slice(&self.gso_size.to_ne_bytes());
        header[6..8].copy_from_slice(&self.checksum_start.to_ne_bytes());
        header[8..10].copy_from_slice(&self.checksum_offset.to_ne_bytes());
        header
    }

    /// Checks that the header fits the packet behind it: the checksum field lies inside, behind the
    /// IP header, whose addresses are checked before checksums are written; a train has segments,
    /// the version and protocol of its kind, whole headers, and its partial checksum where the
    /// transport protocol has it.
    #[inline]
    pub fn check(&self, packet: &[u8], headers: &Headers) -> Result<(), Malformed> {
        let (start, offset) = (usize::from(self.checksum_start), usize::from(self.checksum_offset));
        let is_inside = start >= headers.l4_offset && start + offset + 2 <= packet.len();
        if self.needs_checksum && !is_inside {
            return Err(Malformed::OffloadRange);
        }
        let is_kind = match self.gso {
            Gso::None => return Ok(()),
            Gso::TcpV4 => headers.version == Version::V4 && headers.protocol == protocol::TCP,
            Gso::TcpV6 => headers.version == Version::V6 && headers.protocol == protocol::TCP,
            Gso::UdpL4 => headers.protocol == protocol::UDP,
        };
        let fits = is_kind
            && self.needs_checksum
            && self.gso_size > 0
            && headers.fragment == super::Fragment::Whole
            && headers.l4_offset == start
            && headers.checksum_offset() == Some(start + offset)
            && headers.payload_offset(packet).is_some();
        if fits { Ok(()) } else { Err(Malformed::OffloadRange) }
    }

    /// Returns the content of the packet's transport checksum field. A partial checksum further
    /// inside (of a packet that is carried in this one's payload) leaves the outer field complete.
    #[inline]
    pub fn l4_checksum(&self, headers: &Headers) -> L4Checksum {
        if self.needs_checksum && usize::from(self.checksum_start) == headers.l4_offset {
            L4Checksum::Partial
        } else {
            L4Checksum::Complete
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train() -> (Offload, Vec<u8>) {
        let mut packet = vec![0; 3000];
        etherparse::PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .tcp(1, 2, 3, 4)
            .write(&mut packet.as_mut_slice(), &[0; 2960])
            .unwrap();
        let offload = Offload {
            needs_checksum: true,
            gso: Gso::TcpV4,
            // Linux puts the length of the first piece of a forwarded train here.
            header_len: 1440,
            gso_size: 1380,
            checksum_start: 20,
            checksum_offset: 16,
            ..Offload::NONE
        };
        (offload, packet)
    }

    fn check(offload: Offload, packet: &[u8]) -> Result<(), Malformed> {
        offload.check(packet, &Headers::parse_train(packet)?)
    }

    #[test]
    fn a_written_header_reads_back() {
        for gso in [Gso::None, Gso::TcpV4, Gso::TcpV6, Gso::UdpL4] {
            for ecn in [false, true] {
                let offload = Offload { gso, ecn, checksum_valid: ecn, ..train().0 };
                assert_eq!(Offload::parse(&offload.write()), Ok(offload));
            }
        }
        assert_eq!(Offload::NONE.write(), [0; Offload::LEN]);
    }

    #[test]
    fn a_header_is_laid_out_as_linux_has_it() {
        let mut expected = vec![1, 0x81];
        for field in [54u16, 1380, 34, 16] {
            expected.extend(field.to_ne_bytes());
        }
        let offload = Offload { ecn: true, header_len: 54, checksum_start: 34, ..train().0 };
        assert_eq!(offload.write(), *expected);
    }

    #[test]
    fn kinds_that_were_not_asked_for_are_refused() {
        for kind in [2, 3, 6, 0x40, 0x83] {
            let header = [0, kind, 0, 0, 0, 0, 0, 0, 0, 0];
            assert_eq!(Offload::parse(&header), Err(Malformed::OffloadKind));
        }
    }

    #[test]
    fn a_train_must_fit_its_header() {
        let (good, packet) = train();
        assert_eq!(check(good, &packet), Ok(()));
        assert_eq!(check(Offload::NONE, &packet), Ok(()));
        for bad in [
            Offload { gso: Gso::TcpV6, ..good },
            Offload { gso: Gso::UdpL4, ..good },
            Offload { gso_size: 0, ..good },
            Offload { needs_checksum: false, ..good },
            Offload { checksum_start: 24, ..good },
            Offload { checksum_offset: 6, ..good },
            Offload { checksum_start: u16::MAX, checksum_offset: u16::MAX, ..good },
        ] {
            assert_eq!(check(bad, &packet), Err(Malformed::OffloadRange), "{bad:?}");
        }
        assert_eq!(check(good, &packet[..39]), Err(Malformed::OffloadRange));
    }

    #[test]
    fn a_checksum_is_never_written_into_the_ip_header() {
        let (train, packet) = train();
        let single = Offload { gso: Gso::None, ..train };
        assert_eq!(check(single, &packet), Ok(()));
        for start in [0, 12, 18] {
            let bad = Offload { checksum_start: start, checksum_offset: 0, ..single };
            assert_eq!(check(bad, &packet), Err(Malformed::OffloadRange));
        }
    }

    #[test]
    fn inner_partial_checksum_completes_outer_one() {
        let (offload, packet) = train();
        let headers = Headers::parse_train(&packet).unwrap();
        assert_eq!(offload.l4_checksum(&headers), L4Checksum::Partial);
        let inner = Offload { checksum_start: 70, ..offload };
        assert_eq!(inner.l4_checksum(&headers), L4Checksum::Complete);
        assert_eq!(Offload::NONE.l4_checksum(&headers), L4Checksum::Complete);
    }
}
