use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context, Result};
use blake2::digest::{FixedOutput, KeyInit, Update};
use blake2::{Blake2s256, Blake2sMac, Digest};
use fabric_api::PublicKey;
use fabric_api::fabric::{VNI, VXLAN_PORT};

use crate::Host;

/// MTU of the underlay, in bytes.
const MTU: usize = 1500;
/// Addresses for benchmarks (RFC 2544), which no host has.
const UNUSED: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);

/// Forgeries of an attacker who has a gateway's public key and receives nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgery {
    /// Handshake initiations whose `mac1` is right, from anywhere but the peer's address: each costs
    /// a Diffie-Hellman.
    Initiations,
    /// The same from the peer's address.
    Impersonations,
    Responses,
    CookieReplies,
    /// Bytes at random, up to a full packet.
    Garbage,
    /// Messages that are too long for their type, and datagrams of up to 65,507 bytes.
    Oversized,
    /// Up to 31 bytes.
    Tiny,
}

impl Forgery {
    pub const ALL: [Self; 7] = [
        Self::Initiations,
        Self::Impersonations,
        Self::Responses,
        Self::CookieReplies,
        Self::Garbage,
        Self::Oversized,
        Self::Tiny,
    ];
}

/// Makes Ethernet frames with UDP datagrams for one gateway on a machine, from its peer's address,
/// from its peer's with another port, from one of no host, and from the switch's own.
pub struct Forger {
    to_mac: [u8; 6],
    peer: SocketAddrV4,
    to: SocketAddrV4,
    mac1_key: [u8; 32],
    random: u64,
}

/// A packet in VXLAN.
#[derive(Clone, Debug)]
pub struct Vxlan {
    /// Source of the outer packet.
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    /// MAC address of the device that is to take the inner frame.
    pub inner_mac: [u8; 6],
    /// UDP inside.
    pub inner: (SocketAddrV4, SocketAddrV4),
    pub payload: Vec<u8>,
}

impl Forger {
    /// `peer` and `to` are the two ends of the tunnel that is flooded, `key` is the public key of
    /// `to`.
    pub fn new(
        machine: &Host,
        (peer, to): (SocketAddrV4, SocketAddrV4),
        key: &PublicKey,
    ) -> Result<Self> {
        let mut cat = std::process::Command::new("cat");
        let text = machine.command(cat.arg("/sys/class/net/eth0/address"), "")?;
        let bytes = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16));
        let bytes = bytes.collect::<Result<Vec<_>, _>>().context("a MAC address")?;
        let mac1_key = Blake2s256::new().chain(b"mac1----").chain(key.as_bytes()).finalize();
        Ok(Self {
            to_mac: bytes.try_into().ok().context("a MAC address has six bytes")?,
            peer,
            to,
            mac1_key: mac1_key.into(),
            random: 1,
        })
    }

    /// Frames with `count` datagrams of a kind, all different.
    pub fn frames(&mut self, kind: Forgery, count: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for i in 0..count {
            let payload = self.payload(kind, i);
            let source = match kind {
                Forgery::Initiations => 2 + i % 2,
                Forgery::Impersonations => i % 2,
                Forgery::Responses
                | Forgery::CookieReplies
                | Forgery::Garbage
                | Forgery::Oversized
                | Forgery::Tiny => i % 4,
            };
            self.push_frames(&mut frames, source, &payload);
        }
        frames
    }

    /// Payloads that were seen on the wire, from other addresses and from where they came from.
    pub fn replays(&mut self, payloads: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for (i, payload) in payloads.iter().enumerate() {
            self.push_frames(&mut frames, i % 4, payload);
        }
        frames
    }

    /// A frame for the forger's machine.
    pub fn vxlan(&mut self, packet: &Vxlan) -> Vec<u8> {
        let bytes = in_vxlan(packet.inner_mac, packet.inner, &packet.payload);
        let from = SocketAddrV4::new(packet.from, 49_152 + self.number(1000) as u16);
        let outer = udp(from, SocketAddrV4::new(packet.to, VXLAN_PORT), &bytes);
        self.ethernet(&ip((&packet.from, &packet.to), &outer, (0, 0)))
    }

    fn payload(&mut self, kind: Forgery, i: usize) -> Vec<u8> {
        match kind {
            Forgery::Initiations | Forgery::Impersonations => self.with_mac1(1, 148),
            Forgery::Responses => self.with_mac1(2, 92),
            Forgery::CookieReplies => self.message(3, 64),
            Forgery::Garbage => {
                let length = 32 + self.number(1400);
                self.bytes(length)
            }
            Forgery::Oversized => {
                let length = [149, 93, 65, 1472, 9000, 65_507][i % 6];
                self.message(1 + (i % 4) as u8, length)
            }
            Forgery::Tiny => {
                let length = self.number(32);
                self.message(1 + (i % 4) as u8, length.max(4))[..length].to_vec()
            }
        }
    }

    /// A message with a right type and nothing else.
    fn message(&mut self, kind: u8, length: usize) -> Vec<u8> {
        let mut bytes = self.bytes(length);
        bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
        bytes
    }

    /// Whitepaper section 5.4.4.
    fn with_mac1(&mut self, kind: u8, length: usize) -> Vec<u8> {
        let mut bytes = self.message(kind, length);
        let at = length - 32;
        let mut mac = Blake2sMac::new_from_slice(&self.mac1_key).expect("32 bytes are a key");
        mac.update(&bytes[..at]);
        let mac1: [u8; 16] = mac.finalize_fixed().into();
        bytes[at..at + 16].copy_from_slice(&mac1);
        // Half of them as if they had a cookie.
        if self.number(2) == 0 {
            bytes[at + 16..].fill(0);
        }
        bytes
    }

    fn push_frames(&mut self, frames: &mut Vec<Vec<u8>>, source: usize, payload: &[u8]) {
        let port = 1024 + self.number(60_000) as u16;
        let from = match source {
            0 => self.peer,
            1 => SocketAddrV4::new(*self.peer.ip(), port),
            2 => {
                let unused = UNUSED.to_bits() + self.number(1 << 17) as u32;
                SocketAddrV4::new(unused.into(), port)
            }
            _ => SocketAddrV4::new(crate::SWITCH_V4, port),
        };
        let datagram = udp(from, self.to, payload);
        let (id, to) = (self.number(1 << 16) as u16, *self.to.ip());
        // Payload of a packet, in units of fragment offsets.
        let room = (MTU - 20) / 8 * 8;
        for (number, part) in datagram.chunks(room).enumerate() {
            let is_last = (number + 1) * room >= datagram.len();
            let offset = (number * room / 8) as u16 | if is_last { 0 } else { 0x2000 };
            frames.push(self.ethernet(&ip((from.ip(), &to), part, (id, offset))));
        }
    }

    fn ethernet(&self, packet: &[u8]) -> Vec<u8> {
        let from = [0x0e, 0x77, 9, 9, 9, 9];
        [&self.to_mac[..], &from, &[8, 0], packet].concat()
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.number(256) as u8).collect()
    }

    /// Below `limit`, by xorshift (Marsaglia 2003).
    fn number(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % limit
    }
}

/// Content of a VXLAN datagram (RFC 7348 section 5): a frame for a device, with a UDP datagram.
pub fn in_vxlan(mac: [u8; 6], (from, to): (SocketAddrV4, SocketAddrV4), payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x08, 0, 0, 0];
    bytes.extend((VNI << 8).to_be_bytes());
    bytes.extend(mac);
    bytes.extend([0x0e, 0x77, 1, 2, 3, 4, 8, 0]);
    bytes.extend(ip((from.ip(), to.ip()), &udp(from, to, payload), (0, 0)));
    bytes
}

/// UDP datagram without a checksum, which IPv4 allows.
fn udp(from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [from.port(), to.port(), 8 + payload.len() as u16, 0]
        .map(u16::to_be_bytes)
        .as_flattened()
        .to_vec();
    bytes.extend(payload);
    bytes
}

/// `fragment` is the ID, and flags and offset.
fn ip((from, to): (&Ipv4Addr, &Ipv4Addr), payload: &[u8], (id, fragment): (u16, u16)) -> Vec<u8> {
    let mut bytes = vec![0x45, 0];
    bytes.extend((20 + payload.len() as u16).to_be_bytes());
    bytes.extend(id.to_be_bytes());
    bytes.extend(fragment.to_be_bytes());
    bytes.extend([64, 17, 0, 0]);
    bytes.extend(from.octets());
    bytes.extend(to.octets());
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
    bytes.extend(payload);
    bytes
}
