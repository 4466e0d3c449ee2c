//! Properties for any prefixes: a translation can be undone bit for bit, and no checksum breaks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use proptest::prelude::*;

use super::testing::*;
use super::{AddressMap, L4Checksum, Remap, Rules, RulesConfig};
use crate::DropReason;
use crate::packet::{Gso, Headers, Offload};

type Translate = fn(&Rules, &mut [u8], L4Checksum) -> Result<(), DropReason>;

/// Rules, those that take their translations back, and addresses that packets may have.
#[derive(Clone, Debug)]
struct Case {
    rules: Rules,
    back: Rules,
    /// Outbound or inbound.
    translate: Translate,
    /// Allowed before and after the translation.
    source: [IpAddr; 2],
    destination: [IpAddr; 2],
}

impl Case {
    fn forth(&self, packet: &[u8], checksum: L4Checksum) -> Vec<u8> {
        let mut packet = packet.to_vec();
        assert_eq!((self.translate)(&self.rules, &mut packet, checksum), Ok(()));
        packet
    }

    fn back(&self, packet: &[u8], checksum: L4Checksum) -> Vec<u8> {
        let mut packet = packet.to_vec();
        assert_eq!((self.translate)(&self.back, &mut packet, checksum), Ok(()));
        packet
    }

    #[track_caller]
    fn check(&self, packet: &[u8]) {
        assert_valid(packet);
        let there = self.forth(packet, L4Checksum::Complete);
        assert_eq!((source(&there), destination(&there)), (self.source[1], self.destination[1]));
        assert_valid(&there);
        assert_eq!(self.back(&there, L4Checksum::Complete), packet);
    }
}

fn address(bits: u128, is_v4: bool) -> IpAddr {
    if is_v4 { Ipv4Addr::from_bits(bits as u32).into() } else { Ipv6Addr::from_bits(bits).into() }
}

fn prefix(bits: u128, length: u8, is_v4: bool) -> IpNet {
    IpNet::new(address(bits, is_v4), length).unwrap().trunc()
}

/// The address of `net` whose host bits are those of `bits`, worked out bit by bit.
fn within(net: IpNet, bits: u128) -> IpAddr {
    let width = u32::from(net.max_prefix_len());
    let network = match net.addr() {
        IpAddr::V4(a) => u128::from(a.to_bits()),
        IpAddr::V6(a) => a.to_bits(),
    };
    let address_bits = (0..width).fold(0, |sum, bit| {
        let is_host = bit < width - u32::from(net.prefix_len());
        sum | (if is_host { bits } else { network }) & (1 << bit)
    });
    address(address_bits, width == 32)
}

/// Bits for prefixes and hosts, from which a case is made for a family and prefix lengths.
#[derive(Clone, Debug)]
struct Seed {
    bits: [u128; 6],
    is_outbound: bool,
    is_resource: bool,
}

fn seed() -> impl Strategy<Value = Seed> {
    (any::<[u128; 6]>(), any::<bool>(), any::<bool>())
        .prop_map(|(bits, is_outbound, is_resource)| Seed { bits, is_outbound, is_resource })
}

fn case(seed: &Seed, is_v4: bool, own_length: u8, remap_length: u8) -> Case {
    let [a, b, c, d, e, f] = seed.bits;
    let own = prefix(a, own_length, is_v4);
    let remap =
        Remap { remote: prefix(b, remap_length, is_v4), local: prefix(c, remap_length, is_v4) };
    // The peer, seen from here and as it is; this side, as it is and as the peer sees it.
    let (local, remote) = (within(remap.local, d), within(remap.remote, d));
    let external = within(own, e);
    let target = if seed.is_resource { address(f, is_v4) } else { external };
    let addresses = match seed.is_resource {
        true => vec![AddressMap { external, target }],
        false => vec![],
    };
    let mut config =
        RulesConfig { own: vec![own], remaps: vec![remap], addresses, ..config(&[], &[]) };
    let rules = Rules::new(&config).unwrap();
    config.remaps = vec![Remap { remote: remap.local, local: remap.remote }];
    config.addresses = config
        .addresses
        .iter()
        .map(|map| AddressMap { external: map.target, target: map.external })
        .collect();
    let back = Rules::new(&config).unwrap();
    if seed.is_outbound {
        let (source, destination) = ([target, external], [local, remote]);
        Case { rules, back, translate: Rules::outbound, source, destination }
    } else {
        let (source, destination) = ([remote, local], [external, target]);
        Case { rules, back, translate: Rules::inbound, source, destination }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    (seed(), any::<bool>(), 1u8..=128, 1u8..=128).prop_map(|(seed, is_v4, own, remap)| {
        let most = if is_v4 { 32 } else { 128 };
        case(&seed, is_v4, (own - 1) % most + 1, (remap - 1) % most + 1)
    })
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..300)
}

proptest! {
    #[test]
    fn tcp_udp_and_echo_come_back_as_they_were(case in any_case(), payload in payload()) {
        let (from, to) = (case.source[0], case.destination[0]);
        case.check(&tcp(from, to, &payload));
        case.check(&udp(from, to, &payload));
        case.check(&udp_without_checksum(from, to, &payload));
        case.check(&echo(from, to, &payload));
    }

    #[test]
    fn headers_in_between_change_nothing(case in any_case(), payload in payload()) {
        let (from, to) = (case.source[0], case.destination[0]);
        for packet in [tcp(from, to, &payload), udp(from, to, &payload), echo(from, to, &payload)] {
            match from {
                IpAddr::V4(_) => case.check(&with_options(&packet, [1, 1, 1, 0])),
                IpAddr::V6(_) => case.check(&with_extensions(&packet)),
            }
        }
    }

    #[test]
    fn icmp_errors_are_translated_inside_too(
        case in any_case(),
        payload in payload(),
        kept in 0usize..400,
        kind in 0usize..5,
    ) {
        let (from, to) = (case.source, case.destination);
        let build = [tcp, udp, udp_without_checksum, echo, |s: IpAddr, d: IpAddr, p: &[u8]| {
            match s {
                IpAddr::V4(_) => with_options(&tcp(s, d, p), [1, 1, 1, 0]),
                IpAddr::V6(_) => with_extensions(&udp(s, d, p)),
            }
        }][kind];
        let whole = build(to[0], from[0], &payload);
        let least = if from[0].is_ipv4() { 28 } else { 40 };
        let start = &whole[..kept.max(least).min(whole.len())];
        let error = too_big(from[0], to[0], start);
        case.check(&error);

        let there = case.forth(&error, L4Checksum::Complete);
        prop_assert_eq!((source(embedded(&there)), destination(embedded(&there))), (to[1], from[1]));
        // The embedded packet must read as the receiver sent it. Half a checksum can't be mended.
        let sent = build(to[1], from[1], &payload);
        let words = start.len() & !1;
        prop_assert_eq!(&embedded(&there)[..words], &sent[..words]);
    }

    #[test]
    fn fragments_are_those_of_the_translated_packet(case in any_case(), payload in payload(), at in 3usize..20) {
        let (from, to) = (case.source[0], case.destination[0]);
        for packet in [tcp(from, to, &payload), udp(from, to, &payload), echo(from, to, &payload)] {
            let at = at * 8;
            if transport(&packet) + at >= packet.len() {
                continue;
            }
            let whole = cut(&case.forth(&packet, L4Checksum::Complete), at);
            let pieces = cut(&packet, at);
            for (piece, expected) in pieces.iter().zip(whole) {
                prop_assert_eq!(&case.forth(piece, L4Checksum::Complete), &expected);
                case.check(piece);
            }
        }
    }

    #[test]
    fn trains_keep_a_partial_checksum_that_completes(case in any_case(), size in 1000usize..60_000) {
        let payload: Vec<u8> = (0..size).map(|i| ((i * i) >> 4) as u8).collect();
        let (from, to) = (case.source[0], case.destination[0]);
        for (mut train, offset) in [(tcp(from, to, &payload), 16), (udp(from, to, &payload), 6)] {
            make_partial(&mut train);
            // Longer than a length field can hold, as a jumbo train is.
            let length = if from.is_ipv4() { 2..4 } else { 4..6 };
            train[length].fill(0);

            let mut there = case.forth(&train, L4Checksum::Partial);
            prop_assert_eq!(&case.back(&there, L4Checksum::Partial), &train);
            let start = transport(&there);
            prop_assert!(crate::checksum::complete(&mut there, start, offset));
            let same = if offset == 16 { tcp } else { udp };
            let mut expected = same(case.source[1], case.destination[1], &payload);
            let field = start + offset..start + offset + 2;
            if expected[field.clone()] == [0, 0] {
                expected[field].fill(0xff);
            }
            prop_assert_eq!(&there[start..], &expected[start..]);
        }
    }

    #[test]
    fn mss_is_never_raised(case in any_case(), mss in any::<u16>(), is_ack: bool, mtu in 0usize..70_000) {
        let mut case = case;
        case.rules.set_mtu(mtu);
        let packet = syn(case.source[0], case.destination[0], is_ack, mss);
        let there = case.forth(&packet, L4Checksum::Complete);
        assert_valid(&there);
        let at = transport(&there) + 22;
        let headers = if case.source[0].is_ipv4() { 40 } else { 60 };
        let most = mtu.saturating_sub(headers).max(88);
        prop_assert_eq!(usize::from(u16::from_be_bytes([there[at], there[at + 1]])), most.min(mss.into()));
    }

    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), version in 0u8..16) {
        if let Some(first) = bytes.first_mut() {
            *first = version << 4 | *first & 15;
        }
        survive(&bytes);
    }

    #[test]
    fn damaged_packets_never_panic(
        case in any_case(),
        payload in payload(),
        kind in 0usize..6,
        damage in prop::collection::vec((0usize..120, any::<u8>()), 0..4),
        kept in 0usize..500,
    ) {
        let (from, to) = (case.source[0], case.destination[0]);
        let mut packet = match kind {
            0 => syn(from, to, true, 9000),
            1 => udp(from, to, &payload),
            2 => too_big(from, to, &tcp(to, from, &payload)),
            3 => too_big(from, to, &echo(to, from, &payload)),
            4 if from.is_ipv6() => with_extensions(&tcp(from, to, &payload)),
            4 => with_options(&tcp(from, to, &payload), [7, 4, 4, 0]),
            _ => echo(from, to, &payload),
        };
        for (at, value) in damage {
            let at = at % packet.len();
            packet[at] = value;
        }
        packet.truncate(kept);
        survive(&packet);
        for checksum in [L4Checksum::Complete, L4Checksum::Partial] {
            let mut copy = packet.clone();
            if (case.translate)(&case.rules, &mut copy, checksum).is_err() {
                prop_assert_eq!(&copy, &packet, "a refused packet was changed");
            }
        }
    }
}

/// Gives `bytes` to everything that parses.
fn survive(bytes: &[u8]) {
    let everything =
        config(&["0.0.0.0/0", "::/0"], &[["0.0.0.0/0", "0.0.0.0/0"], ["::/0", "::/0"]]);
    let rules = Rules::new(&everything).unwrap();
    for checksum in [L4Checksum::Complete, L4Checksum::Partial] {
        let _ = rules.outbound(&mut bytes.to_vec(), checksum);
        let _ = rules.inbound(&mut bytes.to_vec(), checksum);
    }
    if let Ok(headers) = Headers::parse(bytes) {
        assert!(headers.l4_offset <= headers.total_len && headers.total_len <= bytes.len());
        assert!(headers.payload_offset(bytes).is_none_or(|at| at <= headers.total_len));
    }
    if let Some(Ok(offload)) = bytes.last_chunk().map(Offload::parse)
        && let Ok(headers) = Headers::parse_train(bytes)
        && offload.check(bytes, &headers).is_ok()
        && offload.gso != Gso::None
    {
        assert!(headers.payload_offset(bytes).is_some());
    }
}

#[test]
fn prefixes_of_every_length_translate_and_come_back() {
    let bits = [
        0x2001_0db8_5a5a_a5a5_0f0f_f0f0_3c3c_c3c3,
        0xfd00_1234_5678_9abc_def0_1357_9bdf_0246,
        0x7f7f_8080_aaaa_5555_cccc_3333_6666_9999,
        0xa5c3_0ff0_9669_1248_8421_7bde_edb7_c33c,
        0x1357_9bdf_0246_8ace_fdb9_7531_eca8_6420,
        0xdead_beef_cafe_f00d_0bad_c0de_feed_face,
    ];
    for (is_v4, most) in [(true, 32), (false, 128)] {
        for length in 1..=most {
            for is_outbound in [true, false] {
                let seed = Seed { bits, is_outbound, is_resource: length % 2 == 0 };
                let case = case(&seed, is_v4, most + 1 - length, length);
                let (from, to) = (case.source[0], case.destination[0]);
                case.check(&tcp(from, to, b"payload"));
                case.check(&too_big(from, to, &udp(to, from, b"payload")));
            }
        }
    }
}
