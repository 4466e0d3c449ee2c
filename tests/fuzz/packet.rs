//! Properties of a packet, found without the code that is tested, but for where its headers end.

use std::net::IpAddr;

use ipnet::IpNet;
use tunnel::packet::{Fragment, Gso, Headers, Offload, Version, protocol};

/// A checksum of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Covered {
    /// Offset of its field, in bytes from the start of the packet.
    pub(crate) field: usize,
    /// Sum modulo 0xffff of all that it covers and that is there, itself included.
    pub(crate) sum: u64,
}

/// Sum of big-endian words modulo 0xffff: of longer words it is the same, as 0x10000 is 1.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain([&last]).map(|word| u128::from(u64::from_be_bytes(*word)));
    (words.sum::<u128>() % 0xffff) as u64
}

pub(crate) fn addresses(packet: &[u8]) -> Option<[IpAddr; 2]> {
    let headers = Headers::parse_train(packet).ok()?;
    Some([headers.source(packet)?, headers.destination(packet)?])
}

/// Returns whether `packet` is an ICMP error, whose payload begins with another packet.
pub(crate) fn is_icmp_error(packet: &[u8], headers: &Headers) -> bool {
    let kind = packet.get(headers.l4_offset);
    match (headers.version, headers.protocol, kind) {
        (_, _, _) if headers.fragment == Fragment::Later => false,
        (Version::V4, protocol::ICMP, Some(kind)) => [3, 4, 5, 11, 12].contains(kind),
        (Version::V6, protocol::ICMPV6, Some(kind)) => *kind < 128,
        _ => false,
    }
}

/// Every checksum of a packet, and of the packet in an ICMP error, that a change of addresses has
/// to mend. `None` in the second place stands for a UDP checksum that was left out.
pub(crate) fn checksums(packet: &[u8]) -> Vec<Covered> {
    let Ok(headers) = Headers::parse_train(packet) else { return Vec::new() };
    let mut all = Vec::new();
    if headers.version == Version::V4 {
        all.push(Covered { field: 10, sum: sum(&packet[..headers.l4_offset]) });
    }
    if headers.fragment == Fragment::Later {
        return all;
    }
    let is_udp = [protocol::UDP, protocol::UDP_LITE].contains(&headers.protocol);
    let is_icmp = headers.version == Version::V4 && headers.protocol == protocol::ICMP;
    let field = match headers.checksum_offset() {
        None if is_icmp && is_icmp_error(packet, &headers) => Some(headers.l4_offset + 2),
        other => other,
    };
    if let Some(field) = field
        && let Some(value) = packet.get(field..field + 2)
        && !(is_udp && value == [0, 0])
    {
        let pseudo = if is_icmp { 0 } else { sum(&packet[headers.addresses()]) };
        all.push(Covered { field, sum: (pseudo + sum(&packet[headers.l4_offset..])) % 0xffff });
    }
    if is_icmp_error(packet, &headers) {
        let start = headers.l4_offset + 8;
        let inner = checksums(packet.get(start..).unwrap_or_default());
        all.extend(inner.into_iter().map(|c| Covered { field: c.field + start, ..c }));
    }
    all
}

/// Checks that `packet` is one whole packet between the given prefixes.
#[track_caller]
pub(crate) fn assert_within(packet: &[u8], from: &[IpNet], to: &[IpNet]) {
    let headers = Headers::parse(packet).unwrap();
    assert_eq!(headers.total_len, packet.len());
    assert!(!headers.source_routed);
    let [source, destination] = addresses(packet).unwrap();
    assert!(super::world::is_in(source, from), "from {source}");
    assert!(super::world::is_in(destination, to), "to {destination}");
}

/// The transport checksum counted out: 0 if it is right. `None` if there is none.
pub(crate) fn transport_error(packet: &[u8]) -> Option<u64> {
    let headers = Headers::parse(packet).ok()?;
    let field = headers.checksum_offset()?;
    let value = packet.get(field..field + 2)?;
    if headers.protocol == protocol::UDP && value == [0, 0] {
        return None;
    }
    let length = (packet.len() - headers.l4_offset) as u64;
    let pseudo = sum(&packet[headers.addresses()]) + u64::from(headers.protocol) + length;
    Some((pseudo + sum(&packet[headers.l4_offset..])) % 0xffff)
}

/// The packets that a kernel would make of a frame: those of a train one by one, with complete
/// checksums.
pub(crate) fn cut(frame: &[u8]) -> Vec<Vec<u8>> {
    let (header, packet) = frame.split_first_chunk().unwrap();
    let offload = Offload::parse(header).unwrap();
    let headers = Headers::parse_train(packet).unwrap();
    if offload.gso == Gso::None {
        let mut packet = packet.to_vec();
        if offload.needs_checksum {
            complete(&mut packet, &headers, offload.checksum_offset);
        }
        return vec![packet];
    }
    offload.check(packet, &headers).unwrap();
    let (head, payload) = packet.split_at(headers.payload_offset(packet).unwrap());
    let mut pieces: Vec<&[u8]> = payload.chunks(usize::from(offload.gso_size)).collect();
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let last = pieces.len() - 1;
    let mut start = 0u32;
    pieces
        .into_iter()
        .enumerate()
        .map(|(i, piece)| {
            let mut packet = [head, piece].concat();
            renumber(&mut packet, &headers, i, start, i == last);
            complete(&mut packet, &headers, offload.checksum_offset);
            start += piece.len() as u32;
            packet
        })
        .collect()
}

/// Writes lengths, identification, sequence number and flags of the `index`th segment.
fn renumber(packet: &mut [u8], headers: &Headers, index: usize, start: u32, is_last: bool) {
    let (total, l4) = (packet.len(), headers.l4_offset);
    match headers.version {
        Version::V4 => {
            let id = u16::from_be_bytes([packet[4], packet[5]]).wrapping_add(index as u16);
            packet[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            packet[4..6].copy_from_slice(&id.to_be_bytes());
            packet[10..12].fill(0);
            let value = complement(sum(&packet[..l4]));
            packet[10..12].copy_from_slice(&value.to_be_bytes());
        }
        Version::V6 => packet[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes()),
    }
    if headers.protocol == protocol::UDP {
        packet[l4 + 4..l4 + 6].copy_from_slice(&((total - l4) as u16).to_be_bytes());
        return;
    }
    let sequence: [u8; 4] = packet[l4 + 4..l4 + 8].try_into().unwrap();
    let sequence = u32::from_be_bytes(sequence).wrapping_add(start);
    packet[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
    packet[l4 + 13] &= if is_last { 0xff } else { !0x09 } & if index == 0 { 0xff } else { !0x80 };
}

/// Computes the transport checksum from scratch.
fn complete(packet: &mut [u8], headers: &Headers, within: u16) {
    let field = headers.l4_offset + usize::from(within);
    packet[field..field + 2].fill(0);
    let length = (packet.len() - headers.l4_offset) as u64;
    let pseudo = sum(&packet[headers.addresses()]) + u64::from(headers.protocol) + length;
    let value = match complement((pseudo + sum(&packet[headers.l4_offset..])) % 0xffff) {
        0 if headers.protocol == protocol::UDP => 0xffff,
        value => value,
    };
    packet[field..field + 2].copy_from_slice(&value.to_be_bytes());
}

/// The checksum that goes with a sum modulo 0xffff over something that is not all zeros.
fn complement(sum: u64) -> u16 {
    if sum == 0 { 0 } else { !(sum as u16) }
}

/// The same packet with a TCP checksum of 0 where 0xffff means the same, and without an identification
/// that means nothing, as the packet may not be cut (RFC 6864 section 4.1).
pub(crate) fn canonical(mut packet: Vec<u8>) -> Vec<u8> {
    if packet[0] >> 4 == 4 && packet[6] & 0x40 != 0 {
        let header = usize::from(packet[0] & 0x0f) * 4;
        assert_eq!(sum(&packet[..header]), 0, "checksum of the IP header");
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    if let Ok(headers) = Headers::parse(&packet)
        && headers.protocol == protocol::TCP
        && let Some(at) = headers.checksum_offset()
        && let Some(field) = packet.get_mut(at..at + 2)
        && field == [0xff, 0xff]
    {
        field.fill(0);
    }
    packet
}
