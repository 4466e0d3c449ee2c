//! Any packet through any rules.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use tunnel::packet::{Headers, protocol};
use tunnel::rules::L4Checksum;
use tunnel::{AddressMap, DropReason, Remap, Rules, RulesConfig};

use crate::input::Input;
use crate::packet::{checksums, is_icmp_error};

type Translate = fn(&Rules, &mut [u8], L4Checksum) -> Result<(), DropReason>;

/// First the rules, then the packet, whose addresses are moved into the prefixes, depending on
/// the first byte.
#[test]
fn remap() {
    bolero::check!().with_max_len(2048).for_each(|bytes: &[u8]| {
        let mut input = Input::new(bytes);
        let case = Case::read(&mut input);
        let packet = case.packet(&mut input);
        case.check(&packet);
    });
}

struct Case {
    is_v4: bool,
    is_outbound: bool,
    checksum: L4Checksum,
    /// Packets are made to have allowed addresses.
    is_placed: bool,
    own: IpNet,
    remap: Remap,
    resource: Option<AddressMap>,
}

impl Case {
    fn read(input: &mut Input<'_>) -> Self {
        let flags = input.byte();
        let is_v4 = flags & 1 == 0;
        let most = if is_v4 { 32 } else { 128 };
        let mut net = |length: u8| {
            // The input defines where it differs from an address of its own.
            let bits = input.word();
            IpNet::new(address(is_v4, bits), length % most + 1).unwrap().trunc()
        };
        let (own_length, length) = (flags >> 4 | 8, 15 + (flags >> 5));
        let own = net(own_length);
        let remap = Remap { remote: net(length), local: net(length) };
        let resource = (flags & 8 != 0)
            .then(|| AddressMap { external: own.addr(), target: address(is_v4, 0xc0a8) });
        Self {
            is_v4,
            is_outbound: flags & 2 == 0,
            checksum: if flags & 4 == 0 { L4Checksum::Complete } else { L4Checksum::Partial },
            is_placed: input.byte() & 1 == 0,
            own,
            remap,
            resource,
        }
    }

    fn rules(&self, remap: Remap, resource: Option<AddressMap>) -> Option<Rules> {
        let rules = RulesConfig {
            own: vec![self.own],
            remaps: vec![remap],
            tunnel_address: [169, 254, 18, 1].into(),
            peer_tunnel_address: [169, 254, 18, 2].into(),
            addresses: resource.into_iter().collect(),
            icmp_sources: Vec::new(),
            mtu: 65_535,
        };
        Rules::new(&rules).ok()
    }

    /// Rules of the inverse translation.
    fn reversed(&self) -> Option<Rules> {
        let remap = Remap { remote: self.remap.local, local: self.remap.remote };
        let resource =
            self.resource.map(|map| AddressMap { external: map.target, target: map.external });
        self.rules(remap, resource)
    }

    /// The rest of the input, with allowed addresses, also in the packet of an ICMP error.
    fn packet(&self, input: &mut Input<'_>) -> Vec<u8> {
        let mut packet = input.rest().to_vec();
        if !self.is_placed {
            return packet;
        }
        let [own, peer] = match self.is_outbound {
            true => [self.own, self.remap.local],
            false => [self.own, self.remap.remote],
        };
        let (from, to) = if self.is_outbound { (own, peer) } else { (peer, own) };
        place(&mut packet, from, to);
        if let Ok(headers) = Headers::parse_train(&packet)
            && is_icmp_error(&packet, &headers)
            && let Some(inner) = packet.get_mut(headers.l4_offset + 8..)
        {
            place(inner, to, from);
        }
        packet
    }

    fn check(&self, packet: &[u8]) {
        let Some(rules) = self.rules(self.remap, self.resource) else { return };
        let translate: Translate = if self.is_outbound { Rules::outbound } else { Rules::inbound };
        let mut there = packet.to_vec();
        if translate(&rules, &mut there, self.checksum).is_err() {
            assert_eq!(there, packet, "a refused packet was changed");
            return;
        }
        self.check_bytes(packet, &there);
        if self.checksum == L4Checksum::Complete {
            check_sums(packet, &there);
        }
        // With an IP resource two addresses become one, and the MSS of a SYN was lowered for good.
        if self.resource.is_none() && !may_be_syn(packet) {
            let mut back = there.clone();
            let reversed = self.reversed().unwrap();
            assert_eq!(translate(&reversed, &mut back, self.checksum), Ok(()));
            assert_same(packet, &back);
        }
    }

    /// Only addresses, checksums and the MSS of a SYN may differ.
    fn check_bytes(&self, packet: &[u8], there: &[u8]) {
        let mut plain = [packet.to_vec(), there.to_vec()];
        for copy in &mut plain {
            wipe(copy);
        }
        if !may_be_syn(packet) {
            assert_eq!(plain[0], plain[1]);
        }
        assert_eq!(packet.len(), there.len());
        assert!(self.is_v4 == (packet[0] >> 4 == 4) || !self.is_placed || is_tunnels(packet));
    }
}

/// Between the tunnel's own addresses, which is allowed whatever the prefixes are.
fn is_tunnels(packet: &[u8]) -> bool {
    packet.get(12..14) == Some(&[169, 254])
}

fn address(is_v4: bool, bits: u16) -> IpAddr {
    match is_v4 {
        true => Ipv4Addr::from_bits(u32::from(bits) << 16 | 0x0a0b).into(),
        false => Ipv6Addr::from_bits(u128::from(bits) << 112 | 0xfd00_1234 << 80 | 7).into(),
    }
}

/// Moves the addresses of `packet` into prefixes, host bits kept.
fn place(packet: &mut [u8], from: IpNet, to: IpNet) {
    let (at, width) = match packet.first().map(|first| first >> 4) {
        Some(4) if packet.len() >= 20 => (12, 4),
        Some(6) if packet.len() >= 40 => (8, 16),
        _ => return,
    };
    for (at, net) in [(at, from), (at + width, to)] {
        let (bytes, mask) = match (net.network(), net.netmask()) {
            (IpAddr::V4(n), IpAddr::V4(m)) => (n.octets().to_vec(), m.octets().to_vec()),
            (IpAddr::V6(n), IpAddr::V6(m)) => (n.octets().to_vec(), m.octets().to_vec()),
            _ => return,
        };
        if bytes.len() == width {
            for (i, (net, mask)) in bytes.iter().zip(mask).enumerate() {
                packet[at + i] = net | packet[at + i] & !mask;
            }
        }
    }
}

fn may_be_syn(packet: &[u8]) -> bool {
    let Ok(headers) = Headers::parse_train(packet) else { return false };
    headers.protocol == protocol::TCP
        && packet.get(headers.l4_offset + 13).is_some_and(|flags| flags & 2 != 0)
}

/// Every checksum is as right or as wrong as it was.
fn check_sums(packet: &[u8], there: &[u8]) {
    let (before, after) = (checksums(packet), checksums(there));
    // A sum that came to 0 looks like a checksum that was left out, and the other way round it
    // never may.
    if before.len() == after.len() && !may_be_syn(packet) {
        assert_eq!(before, after);
    }
    assert!(after.len() >= before.len(), "a checksum became none");
}

/// Blanks addresses and checksums, also those of the packet in an ICMP error.
fn wipe(packet: &mut [u8]) {
    let Ok(headers) = Headers::parse_train(packet) else { return };
    let field = headers.checksum_offset();
    let inner = is_icmp_error(packet, &headers).then_some(headers.l4_offset + 8);
    let icmp = inner.map(|at| at - 6);
    let is_v4 = headers.version == tunnel::packet::Version::V4;
    packet[headers.addresses()].fill(0);
    for at in [is_v4.then_some(10), field, icmp].into_iter().flatten() {
        if let Some(field) = packet.get_mut(at..at + 2) {
            field.fill(0);
        }
    }
    if let Some(inner) = inner.and_then(|at| packet.get_mut(at..)) {
        wipe_embedded(inner);
    }
}

fn wipe_embedded(packet: &mut [u8]) {
    let Ok(headers) = Headers::parse_train(packet) else {
        // Headers that were cut off: the addresses may be there nevertheless.
        let (addresses, checksum) = match packet.first().map(|first| first >> 4) {
            Some(4) => (12..20, Some(10..12)),
            Some(6) => (8..40, None),
            _ => return,
        };
        for range in [Some(addresses), checksum].into_iter().flatten() {
            if let Some(bytes) = packet.get_mut(range) {
                bytes.fill(0);
            }
        }
        return;
    };
    packet[headers.addresses()].fill(0);
    let is_v4 = headers.version == tunnel::packet::Version::V4;
    for at in [is_v4.then_some(10), headers.checksum_offset()].into_iter().flatten() {
        if let Some(field) = packet.get_mut(at..at + 2) {
            field.fill(0);
        }
    }
}

/// The same, except that a checksum of 0 may have become 0xffff, which sums to the same.
fn assert_same(packet: &[u8], back: &[u8]) {
    let mut copies = [packet.to_vec(), back.to_vec()];
    for copy in &mut copies {
        copy.chunks_mut(2).filter(|word| *word == [0xff, 0xff]).for_each(|word| word.fill(0));
    }
    assert_eq!(copies[0], copies[1]);
}
