//! Trains from one tunnel device to the other: cut, sealed, opened, joined.

use std::cell::RefCell;
use std::time::Instant;

use tunnel::packet::{Gso, Headers, Offload, Version};
use tunnel::{Config, Engine, Received, RulesConfig};

use crate::input::Input;
use crate::packet::{addresses, canonical, cut};
use crate::world::{Made, config, engine, engine_key, nets, peer_address, peer_key, remap};

const INPUTS: u32 = 4096;

/// Two engines that let everything pass.
struct Line {
    engines: [Engine; 2],
    now: Instant,
    inputs: u32,
}

impl Line {
    fn new() -> Self {
        let now = Instant::now();
        let rules = RulesConfig {
            own: nets(&["0.0.0.0/0", "::/0"]),
            remaps: vec![remap("0.0.0.0/0", "0.0.0.0/0"), remap("::/0", "::/0")],
            tunnel_address: [169, 254, 18, 1].into(),
            peer_tunnel_address: [169, 254, 18, 2].into(),
            addresses: Vec::new(),
            icmp_sources: Vec::new(),
            mtu: 65_475,
        };
        let (one, other) = (engine_key(), peer_key());
        let sender = engine(config(&rules, &one, other.public()), 1, now);
        let passive = Config { initiate: false, ..config(&rules, &other, one.public()) };
        let mut line = Self { engines: [sender, engine(passive, 2, now)], now, inputs: 0 };
        let mut made = Made::default();
        line.engines[0].handle_timeout(now, &mut made);
        for to in [1, 0, 1] {
            let (_, message) = made.sent.pop().unwrap();
            line.receive(to, &message, &mut made);
        }
        line
    }

    fn receive(&mut self, to: usize, bytes: &[u8], made: &mut Made) {
        let (segment_size, bytes) = (bytes.len(), &mut bytes.to_vec());
        let train = Received { path: peer_address().into(), bytes, segment_size, tos: 0 };
        self.engines[to].handle_datagrams(train, self.now, made);
    }

    fn with(test: impl FnOnce(&mut Self)) {
        thread_local! {
            static LINE: RefCell<Option<Line>> = const { RefCell::new(None) };
        }
        LINE.with_borrow_mut(|line| {
            let mut used = line.take().filter(|l| l.inputs < INPUTS).unwrap_or_else(Self::new);
            used.inputs += 1;
            test(&mut used);
            *line = Some(used);
        });
    }
}

/// Up to four frames, described by some bytes each: what comes out, cut again by other code, is
/// what went in, and every flow in its order.
#[test]
fn train() {
    bolero::check!().with_max_len(512).for_each(|bytes: &[u8]| {
        let mut input = Input::new(bytes);
        let mut frames = Vec::new();
        while !input.is_empty() && frames.len() < 4 {
            frames.push(Frame::read(&mut input).build());
        }
        Line::with(|line| check(line, &frames));
    });
}

fn check(line: &mut Line, frames: &[Vec<u8>]) {
    let mut sent = Made::default();
    for frame in frames {
        line.engines[0].handle_frame(&mut frame.clone(), line.now, &mut sent);
    }
    line.engines[0].flush(line.now, &mut sent);
    let mut written = Made::default();
    for (_, datagram) in &sent.sent {
        line.receive(1, datagram, &mut written);
    }
    line.engines[1].flush(line.now, &mut written);
    let packets = |frames: &[Vec<u8>]| -> Vec<Vec<u8>> {
        frames.iter().flat_map(|frame| cut(frame)).map(canonical).collect()
    };
    let (mut fed, mut got) = (packets(frames), packets(&written.frames));
    // Stable: the order within a flow stays.
    fed.sort_by_cached_key(|packet| flow(packet));
    got.sort_by_cached_key(|packet| flow(packet));
    assert_eq!(fed.len(), got.len());
    for (i, (fed, got)) in fed.iter().zip(&got).enumerate() {
        assert_eq!(fed, got, "packet {i}");
    }
}

/// Protocol, addresses and ports.
fn flow(packet: &[u8]) -> (u8, [std::net::IpAddr; 2], Vec<u8>) {
    let headers = Headers::parse(packet).unwrap();
    let ports = packet[headers.l4_offset..headers.l4_offset + 4].to_vec();
    (headers.protocol, addresses(packet).unwrap(), ports)
}

/// A frame, as an input describes it.
struct Frame {
    is_v6: bool,
    is_udp: bool,
    has_timestamp: bool,
    /// Its checksum is the engine's to complete, as it always is in trains.
    is_partial: bool,
    flow: u8,
    flags: u8,
    tos: u8,
    id: u16,
    sequence: u32,
    /// Payload bytes of a segment; 0 for a packet that is no train.
    gso_size: u16,
    payload: usize,
    fill: u8,
}

impl Frame {
    fn read(input: &mut Input<'_>) -> Self {
        let (kind, flags) = (input.byte(), input.byte());
        let is_udp = kind & 2 != 0;
        let gso_size = input.word() % 1461;
        let (payload, fill) = (usize::from(input.word()) % 60_001, input.byte());
        // A kernel makes no UDP train of more, and a datagram must fit one; for TCP more of the same
        // would only take longer, and so would always taking all.
        let most = match gso_size {
            0 => 60_000,
            size => usize::from(size) * 64,
        };
        let payload = payload.min(most) >> (fill % 8);
        Self {
            is_v6: kind & 1 != 0,
            is_udp,
            has_timestamp: kind & 4 != 0,
            is_partial: kind & 8 != 0 || gso_size != 0,
            flow: kind >> 6,
            flags: flags & !0x06,
            tos: kind >> 4 & 3,
            id: input.word(),
            sequence: u32::from(input.word()) << 8,
            gso_size,
            payload,
            fill,
        }
    }

    fn build(&self) -> Vec<u8> {
        let l4 = if self.is_v6 { 40 } else { 20 };
        let mut packet = self.ip();
        let port = 40_000 + u16::from(self.flow);
        packet.extend([port.to_be_bytes(), 443u16.to_be_bytes()].as_flattened());
        if self.is_udp {
            packet.extend((8 + self.payload as u16).to_be_bytes());
            packet.extend([0, 0]);
        } else {
            packet.extend(self.sequence.to_be_bytes());
            packet.extend([0, 0, 0, 99]);
            packet.extend([if self.has_timestamp { 0x80 } else { 0x50 }, self.flags]);
            packet.extend([1, 0xf4, 0, 0, 0, 0]);
            if self.has_timestamp {
                packet.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
            }
        }
        packet
            .extend((0..self.payload).map(|i| (i as u8).wrapping_mul(self.fill) ^ (i >> 8) as u8));
        self.checksums(&mut packet, l4);
        let offset: u16 = if self.is_udp { 6 } else { 16 };
        let offload = Offload {
            needs_checksum: self.is_partial,
            gso: match (self.gso_size, self.is_udp, self.is_v6) {
                (0, _, _) => Gso::None,
                (_, true, _) => Gso::UdpL4,
                (_, false, false) => Gso::TcpV4,
                (_, false, true) => Gso::TcpV6,
            },
            gso_size: self.gso_size,
            checksum_start: l4 as u16,
            checksum_offset: offset,
            ..Offload::NONE
        };
        let offload = if self.is_partial { offload } else { Offload::NONE };
        [&offload.write()[..], &packet].concat()
    }

    fn ip(&self) -> Vec<u8> {
        let protocol = if self.is_udp { 17 } else { 6 };
        let header = match (self.is_udp, self.has_timestamp) {
            (true, _) => 8,
            (false, true) => 32,
            (false, false) => 20,
        };
        let length = header + self.payload;
        if self.is_v6 {
            let mut ip = vec![0x60, self.tos << 4, 0, 0];
            ip.extend((length as u16).to_be_bytes());
            ip.extend([protocol, 64]);
            ip.extend([[0xfd; 16], [0xfe; 16]].as_flattened());
            return ip;
        }
        let mut ip = vec![0x45, self.tos];
        ip.extend((20 + length as u16).to_be_bytes());
        ip.extend(self.id.to_be_bytes());
        ip.extend([if self.fill & 1 == 0 { 0x40 } else { 0 }, 0, 64, protocol, 0, 0]);
        ip.extend([10, 0, 0, 1, 10, 1, 0, 2]);
        ip
    }

    /// The IP header's, and the transport's as far as the kernel does it.
    fn checksums(&self, packet: &mut [u8], l4: usize) {
        use tunnel::checksum::{complete, fold, pseudo_header, sum};
        let version = if self.is_v6 { Version::V6 } else { Version::V4 };
        let (protocol, field) = if self.is_udp { (17, 6) } else { (6, 16) };
        let addresses = match version {
            Version::V4 => {
                let value = !fold(sum(&packet[..l4]));
                packet[10..12].copy_from_slice(&value.to_be_bytes());
                12..20
            }
            Version::V6 => 8..40,
        };
        let partial = fold(pseudo_header(&packet[addresses], protocol, packet.len() - l4));
        packet[l4 + field..l4 + field + 2].copy_from_slice(&partial.to_be_bytes());
        if !self.is_partial {
            assert!(complete(packet, l4, field));
        }
    }
}
