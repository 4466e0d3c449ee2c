use crate::checksum::Change;
use crate::packet::{Headers, L4Checksum, Version};

const SYN: u8 = 2;
const END_OF_OPTIONS: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;

/// Linux takes a smaller MSS for this one (TCP_MIN_MSS).
const MIN_MSS: usize = 88;

/// The largest MSS whose segments fit the tunnel (RFC 9293 section 3.7.1): headers without options.
pub(super) fn bound(mtu: usize, version: Version) -> u16 {
    let headers = match version {
        Version::V4 => 40,
        Version::V6 => 60,
    };
    mtu.saturating_sub(headers).max(MIN_MSS).try_into().unwrap_or(u16::MAX)
}

/// Returns whether these are a SYN's or SYN-ACK's headers. `packet` is TCP, and no later fragment.
#[inline]
pub(super) fn is_syn(packet: &[u8], headers: &Headers) -> bool {
    packet.get(headers.l4_offset + 13).is_some_and(|flags| flags & SYN != 0)
}

/// Lowers the MSS option of a SYN or SYN-ACK to `max`. A partial checksum does not cover it yet.
#[cold]
pub(super) fn clamp(packet: &mut [u8], headers: &Headers, checksum: L4Checksum, max: u16) {
    let Some(tcp) = packet.get_mut(headers.l4_offset..) else { return };
    let Some(offset) = option_value(tcp) else { return };
    let mss = u16::from_be_bytes([tcp[offset], tcp[offset + 1]]);
    if mss <= max {
        return;
    }
    tcp[offset..offset + 2].copy_from_slice(&max.to_be_bytes());
    if checksum == L4Checksum::Complete {
        let change = Change::of_word(mss, max);
        let change = if offset % 2 == 1 { change.at_odd_offset() } else { change };
        let old = u16::from_be_bytes([tcp[16], tcp[17]]);
        tcp[16..18].copy_from_slice(&change.apply(old).to_be_bytes());
    }
}

/// Returns the offset of the MSS option's value in a TCP header, if that is whole and has one.
fn option_value(tcp: &[u8]) -> Option<usize> {
    let end = usize::from(tcp.get(12)? >> 4) * 4;
    let header = tcp.get(..end)?;
    let mut at = 20;
    loop {
        match *header.get(at)? {
            END_OF_OPTIONS => return None,
            NO_OPERATION => at += 1,
            kind => {
                let length = usize::from(*header.get(at + 1)?);
                if kind == MAXIMUM_SEGMENT_SIZE && length == 4 && at + 4 <= end {
                    return Some(at + 2);
                }
                if length < 2 {
                    return None;
                }
                at += length;
            }
        }
    }
}
