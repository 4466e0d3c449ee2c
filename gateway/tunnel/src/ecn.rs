//! Explicit congestion notification across the tunnel (RFC 6040).

use crate::checksum::Change;

const MASK: u8 = 3;
const NOT_ECT: u8 = 0;
pub(crate) const CE: u8 = 3;

/// ECN field of an IP packet.
#[inline]
pub(crate) fn of(packet: &[u8]) -> u8 {
    match *packet {
        [first, tos, ..] if first >> 4 == 4 => tos & MASK,
        [_, second, ..] => second >> 4 & MASK,
        _ => NOT_ECT,
    }
}

/// The outer packet was marked "congestion experienced": marks `packet` too. False if its ends are
/// not ECN-capable, and it has to be dropped instead (section 4.2).
#[must_use]
pub(crate) fn mark(packet: &mut [u8]) -> bool {
    if of(packet) == NOT_ECT {
        return false;
    }
    if packet[0] >> 4 == 6 {
        packet[1] |= CE << 4;
        return true;
    }
    let old = u16::from_be_bytes([packet[0], packet[1]]);
    packet[1] |= CE;
    let new = u16::from_be_bytes([packet[0], packet[1]]);
    if let Some(&[high, low]) = packet.get(10..12) {
        let checksum = Change::of_word(old, new).apply(u16::from_be_bytes([high, low]));
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_keeps_header_checksum_right() {
        let builder = etherparse::PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
        let mut packet = Vec::new();
        builder.write(&mut packet, &[1, 2, 3]).unwrap();
        assert!(!mark(&mut packet), "not ECN-capable");
        packet[1] = 2;
        let mut header = etherparse::Ipv4Header::from_slice(&packet).unwrap().0;
        header.header_checksum = header.calc_header_checksum();
        packet[..20].copy_from_slice(&header.to_bytes());
        assert!(mark(&mut packet));
        let header = etherparse::Ipv4Header::from_slice(&packet).unwrap().0;
        assert_eq!(header.ecn.value(), CE);
        assert_eq!(header.header_checksum, header.calc_header_checksum());
        assert!(mark(&mut packet), "once more");
    }

    #[test]
    fn marks_version_6() {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[1] = 0x15;
        assert!(mark(&mut packet));
        assert_eq!(packet[1], 0x35);
        assert!(!mark(&mut []));
    }
}
