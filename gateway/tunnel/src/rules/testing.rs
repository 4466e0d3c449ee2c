//! Packets built by etherparse, and a checker that shares no code with the crate.

use std::net::IpAddr;

use etherparse::{PacketBuilder, TcpOptionElement};

use super::{Remap, RulesConfig};

pub(super) fn config(own: &[&str], remaps: &[[&str; 2]]) -> RulesConfig {
    RulesConfig {
        own: own.iter().map(|net| net.parse().unwrap()).collect(),
        remaps: remaps
            .iter()
            .map(|[remote, local]| Remap {
                remote: remote.parse().unwrap(),
                local: local.parse().unwrap(),
            })
            .collect(),
        tunnel_address: [169, 254, 18, 1].into(),
        peer_tunnel_address: [169, 254, 18, 2].into(),
        addresses: Vec::new(),
        icmp_sources: Vec::new(),
        mtu: 1420,
    }
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

macro_rules! build {
    ($source:expr, $destination:expr, $payload:expr, |$builder:ident| $transport:expr) => {{
        let mut packet = Vec::new();
        match ($source, $destination) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                let $builder = PacketBuilder::ipv4(s.octets(), d.octets(), 64);
                $transport.write(&mut packet, $payload).unwrap();
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                let $builder = PacketBuilder::ipv6(s.octets(), d.octets(), 64);
                $transport.write(&mut packet, $payload).unwrap();
            }
            _ => panic!("addresses of two families"),
        }
        packet
    }};
}

pub(super) fn tcp(source: IpAddr, destination: IpAddr, payload: &[u8]) -> Vec<u8> {
    build!(source, destination, payload, |ip| ip.tcp(40_000, 443, 7, 500).ack(9))
}

pub(super) fn syn(source: IpAddr, destination: IpAddr, is_ack: bool, mss: u16) -> Vec<u8> {
    let options = [TcpOptionElement::MaximumSegmentSize(mss), TcpOptionElement::WindowScale(7)];
    if is_ack {
        build!(source, destination, &[], |ip| ip
            .tcp(443, 40_000, 7, 500)
            .syn()
            .ack(9)
            .options(&options)
            .unwrap())
    } else {
        build!(source, destination, &[], |ip| ip
            .tcp(40_000, 443, 7, 500)
            .syn()
            .options(&options)
            .unwrap())
    }
}

pub(super) fn udp(source: IpAddr, destination: IpAddr, payload: &[u8]) -> Vec<u8> {
    build!(source, destination, payload, |ip| ip.udp(5353, 53))
}

pub(super) fn udp_without_checksum(source: IpAddr, destination: IpAddr, payload: &[u8]) -> Vec<u8> {
    let mut packet = udp(source, destination, payload);
    let at = transport(&packet) + 6;
    packet[at..at + 2].fill(0);
    packet
}

pub(super) fn echo(source: IpAddr, destination: IpAddr, payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    match (source, destination) {
        (IpAddr::V4(s), IpAddr::V4(d)) => PacketBuilder::ipv4(s.octets(), d.octets(), 64)
            .icmpv4_echo_request(3, 4)
            .write(&mut packet, payload)
            .unwrap(),
        (IpAddr::V6(s), IpAddr::V6(d)) => PacketBuilder::ipv6(s.octets(), d.octets(), 64)
            .icmpv6_echo_request(3, 4)
            .write(&mut packet, payload)
            .unwrap(),
        _ => panic!("addresses of two families"),
    }
    packet
}

/// "Too big", about the packet whose start is `about`.
pub(super) fn too_big(source: IpAddr, destination: IpAddr, about: &[u8]) -> Vec<u8> {
    let kind = if source.is_ipv4() { [3, 4] } else { [2, 0] };
    icmp(kind, source, destination, about)
}

/// ICMP message of that type and code. `body` lies behind its first eight bytes.
pub(super) fn icmp(
    [kind, code]: [u8; 2],
    source: IpAddr,
    destination: IpAddr,
    body: &[u8],
) -> Vec<u8> {
    let mut packet = Vec::new();
    let rest = [0, 0, 5, 20];
    match (source, destination) {
        (IpAddr::V4(s), IpAddr::V4(d)) => PacketBuilder::ipv4(s.octets(), d.octets(), 64)
            .icmpv4_raw(kind, code, rest)
            .write(&mut packet, body)
            .unwrap(),
        (IpAddr::V6(s), IpAddr::V6(d)) => PacketBuilder::ipv6(s.octets(), d.octets(), 64)
            .icmpv6_raw(kind, code, rest)
            .write(&mut packet, body)
            .unwrap(),
        _ => panic!("addresses of two families"),
    }
    packet
}

/// The same packet with a partial transport checksum, as the kernel leaves it for a device.
pub(super) fn make_partial(packet: &mut [u8]) {
    let field = checksum_field(packet).unwrap();
    let sum = pseudo_header(packet);
    packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
}

/// Cuts the payload behind the IP header at `at` (a multiple of 8) into two fragments.
pub(super) fn cut(packet: &[u8], at: usize) -> [Vec<u8>; 2] {
    let start = transport(packet);
    [(0, &packet[start..start + at]), (at, &packet[start + at..])].map(|(offset, payload)| {
        let is_first = offset == 0;
        let mut piece = packet[..start].to_vec();
        if packet[0] >> 4 == 4 {
            let length = (start + payload.len()) as u16;
            let word = (offset / 8) as u16 | if is_first { 0x2000 } else { 0 };
            piece[2..4].copy_from_slice(&length.to_be_bytes());
            piece[6..8].copy_from_slice(&word.to_be_bytes());
            set_ip_checksum(&mut piece);
        } else {
            let next = std::mem::replace(&mut piece[6], 44);
            piece[4..6].copy_from_slice(&(8 + payload.len() as u16).to_be_bytes());
            let [high, low] = (offset as u16 | u16::from(is_first)).to_be_bytes();
            piece.extend([next, 0, high, low, 1, 2, 3, 4]);
        }
        piece.extend(payload);
        piece
    })
}

/// Puts extension headers between an IPv6 header and what follows: hop-by-hop, then destination options.
pub(super) fn with_extensions(packet: &[u8]) -> Vec<u8> {
    let mut longer = packet[..40].to_vec();
    let next = std::mem::replace(&mut longer[6], 0);
    longer.extend([60, 0, 1, 4, 0, 0, 0, 0]);
    longer.extend([next, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    longer.extend(&packet[40..]);
    let length = (longer.len() - 40) as u16;
    longer[4..6].copy_from_slice(&length.to_be_bytes());
    longer
}

/// Puts an IPv4 option (no-operations) into the header, which stays valid.
pub(super) fn with_options(packet: &[u8], options: [u8; 4]) -> Vec<u8> {
    let mut longer = packet[..20].to_vec();
    longer[0] = 0x46;
    longer.extend(options);
    longer.extend(&packet[20..]);
    let length = longer.len() as u16;
    longer[2..4].copy_from_slice(&length.to_be_bytes());
    set_ip_checksum(&mut longer);
    longer
}

pub(super) fn source(packet: &[u8]) -> IpAddr {
    addresses(packet)[0]
}

pub(super) fn destination(packet: &[u8]) -> IpAddr {
    addresses(packet)[1]
}

fn addresses(packet: &[u8]) -> [IpAddr; 2] {
    if packet[0] >> 4 == 4 {
        [12, 16].map(|at| <[u8; 4]>::try_from(&packet[at..at + 4]).unwrap().into())
    } else {
        [8, 24].map(|at| <[u8; 16]>::try_from(&packet[at..at + 16]).unwrap().into())
    }
}

/// Returns the packet embedded in an ICMP error.
pub(super) fn embedded(packet: &[u8]) -> &[u8] {
    &packet[transport(packet) + 8..]
}

/// Checks every checksum that can be checked: IP header, transport, and those of the packet in an
/// ICMP error as far as it goes.
#[track_caller]
pub(super) fn assert_valid(packet: &[u8]) {
    if packet[0] >> 4 == 4 {
        assert_eq!(sum(&packet[..transport(packet)]), 0xffff, "IPv4 header checksum");
    }
    if is_cut_short(packet) {
        return;
    }
    let start = transport(packet);
    let protocol = protocol(packet);
    if protocol == 1 {
        assert_eq!(sum(&packet[start..]), 0xffff, "ICMP checksum");
    } else if let Some(field) = checksum_field(packet) {
        let has_none = protocol == 17 && packet[field..field + 2] == [0, 0];
        let total = add(pseudo_header(packet), sum(&packet[start..]));
        assert!(has_none || total == 0xffff, "transport checksum is off by {:#x}", !total);
    }
    let is_error = matches!((protocol, packet[start]), (1, 3 | 4 | 5 | 11 | 12) | (58, ..128));
    if is_error {
        assert_valid(&packet[start + 8..]);
    }
}

fn is_cut_short(packet: &[u8]) -> bool {
    let is_v4 = packet[0] >> 4 == 4;
    let (at, base) = if is_v4 { (2, 0) } else { (4, 40) };
    let length = base + usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
    let is_fragment = match is_v4 {
        true => u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff != 0,
        false => packet[6] == 44,
    };
    length > packet.len() || is_fragment
}

/// Returns the offset of the transport header. Knows the headers that this module makes.
pub(super) fn transport(packet: &[u8]) -> usize {
    match (packet[0] >> 4, packet[6]) {
        (4, _) => usize::from(packet[0] & 15) * 4,
        (_, 0) => 64,
        (_, 44) => 48,
        _ => 40,
    }
}

fn protocol(packet: &[u8]) -> u8 {
    match (packet[0] >> 4, packet[6]) {
        (4, _) => packet[9],
        (_, 0) => packet[48],
        (_, 44) => packet[40],
        (_, next) => next,
    }
}

fn checksum_field(packet: &[u8]) -> Option<usize> {
    let within = match protocol(packet) {
        6 => 16,
        17 => 6,
        58 => 2,
        _ => return None,
    };
    Some(transport(packet) + within)
}

fn pseudo_header(packet: &[u8]) -> u16 {
    let addresses = if packet[0] >> 4 == 4 { &packet[12..20] } else { &packet[8..40] };
    let length = (packet.len() - transport(packet)) as u16;
    add(sum(addresses), add(u16::from(protocol(packet)), length))
}

fn set_ip_checksum(packet: &mut [u8]) {
    packet[10..12].fill(0);
    let value = !sum(&packet[..transport(packet)]);
    packet[10..12].copy_from_slice(&value.to_be_bytes());
}

fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0, |total, pair| {
        add(total, u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))
    })
}

fn add(a: u16, b: u16) -> u16 {
    let sum = u32::from(a) + u32::from(b);
    (sum % 0x1_0000 + sum / 0x1_0000) as u16
}
