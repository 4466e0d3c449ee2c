use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result};
use socket2::SockFilter;
use weft_tests::{Capture, Netns};

/// First bytes of WireGuard's messages (whitepaper section 5.4).
pub(crate) const INITIATION: u8 = 1;
pub(crate) const RESPONSE: u8 = 2;
const DATA: u8 = 4;
/// Bytes of a data message around the packet: header and tag.
const AROUND: usize = 32;
const PADDING: usize = 16;

/// WireGuard traffic that a machine sends and receives, as the underlay sees it.
pub(crate) struct Wire {
    seen: Arc<Mutex<BTreeMap<Direction, Seen>>>,
    _capture: Capture,
}

/// The machine's peer, and whether the machine is the sender.
type Direction = (IpAddr, bool);

/// Messages of one direction. Packets are only counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Time and first byte of each handshake message.
    handshakes: Vec<(Instant, u8)>,
    pub(crate) keepalives: Vec<Instant>,
    pub(crate) packets: u64,
    /// Packets whose length is no multiple of 16.
    pub(crate) unpadded: u64,
    pub(crate) last_packet: Option<Instant>,
}

impl Seen {
    pub(crate) fn times_of(&self, kind: u8) -> Vec<Instant> {
        self.handshakes.iter().filter(|(_, k)| *k == kind).map(|(at, _)| *at).collect()
    }

    /// Everything that shows the peer that somebody is there, packets apart.
    pub(crate) fn signs_of_life(&self) -> Vec<Instant> {
        let handshakes = self.handshakes.iter().map(|(at, _)| *at);
        let mut all: Vec<_> = self.keepalives.iter().copied().chain(handshakes).collect();
        all.sort_unstable();
        all
    }
}

impl Wire {
    /// Listens on the switch to a machine that has these addresses.
    pub(crate) fn tap(switch: &Netns, own: Vec<IpAddr>) -> Result<Self> {
        let seen = Arc::new(Mutex::new(BTreeMap::<Direction, Seen>::new()));
        let log = Arc::clone(&seen);
        let look = move |frame: &[u8]| {
            let Some((from, to, message)) = message(frame) else { return };
            let (is_out, is_in) = (own.contains(&from), own.contains(&to));
            if is_out == is_in {
                return;
            }
            let direction = if is_out { (to, true) } else { (from, false) };
            let mut log = log.lock().expect("nobody panics while holding it");
            log.entry(direction).or_default().note(message);
        };
        Ok(Self { seen, _capture: Capture::filtered(switch, &wireguard_only(), look)? })
    }

    /// From the machine to `peer`.
    pub(crate) fn sent_to(&self, peer: IpAddr) -> Seen {
        self.get((peer, true))
    }

    pub(crate) fn received_from(&self, peer: IpAddr) -> Seen {
        self.get((peer, false))
    }

    /// Times at which both ends had a new session: the responses of either end.
    pub(crate) fn sessions_with(&self, peer: IpAddr) -> Vec<Instant> {
        let mut times = self.sent_to(peer).times_of(RESPONSE);
        times.extend(self.received_from(peer).times_of(RESPONSE));
        times.sort_unstable();
        times
    }

    fn get(&self, direction: Direction) -> Seen {
        let seen = self.seen.lock().expect("nobody panics while holding it");
        seen.get(&direction).cloned().unwrap_or_default()
    }
}

impl Seen {
    fn note(&mut self, message: &[u8]) {
        let now = Instant::now();
        match message {
            [DATA, ..] if message.len() == AROUND => self.keepalives.push(now),
            [DATA, ..] => {
                self.packets += 1;
                self.unpadded += u64::from(!message.len().is_multiple_of(PADDING));
                self.last_packet = Some(now);
            }
            [kind, ..] => self.handshakes.push((now, *kind)),
            [] => {}
        }
    }
}

/// Addresses and payload of an Ethernet frame that carries WireGuard.
fn message(frame: &[u8]) -> Option<(IpAddr, IpAddr, &[u8])> {
    let (ethernet, packet) = frame.split_at_checked(14)?;
    let (from, to, datagram): (IpAddr, IpAddr, _) = match ethernet[12..] {
        [0x08, 0x00] if *packet.get(9)? == 17 => {
            let address = |at: usize| packet.get(at..)?.first_chunk::<4>().copied();
            let header = usize::from(packet[0] & 15) * 4;
            (address(12)?.into(), address(16)?.into(), packet.get(header..)?)
        }
        [0x86, 0xdd] if *packet.get(6)? == 17 => {
            let address = |at: usize| packet.get(at..)?.first_chunk::<16>().copied();
            let address = |at| address(at).map(Ipv6Addr::from);
            (address(8)?.into(), address(24)?.into(), packet.get(40..)?)
        }
        _ => return None,
    };
    let length = usize::from(u16::from_be_bytes([*datagram.get(4)?, *datagram.get(5)?]));
    let payload = datagram.get(8..length)?;
    matches!(payload, [1..=DATA, 0, 0, 0, ..]).then_some((from, to, payload))
}

/// Ethernet frames with IPv4 (without options) or IPv6, UDP, and one of the four messages.
fn wireguard_only() -> [SockFilter; 13] {
    let load =
        |width: u32, at| SockFilter::new((libc::BPF_LD | width | libc::BPF_ABS) as u16, 0, 0, at);
    let jump = |test: u32, value, yes, no| {
        SockFilter::new((libc::BPF_JMP | test | libc::BPF_K) as u16, yes, no, value)
    };
    let end = |bytes| SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, bytes);
    [
        load(libc::BPF_H, 12),
        jump(libc::BPF_JEQ, 0x0800, 0, 4),
        load(libc::BPF_B, 23),
        jump(libc::BPF_JEQ, 17, 0, 8),
        load(libc::BPF_W, 42),
        SockFilter::new((libc::BPF_JMP | libc::BPF_JA) as u16, 0, 0, 3),
        load(libc::BPF_B, 20),
        jump(libc::BPF_JEQ, 17, 0, 4),
        load(libc::BPF_W, 62),
        // The type, and three bytes that are zero.
        jump(libc::BPF_JSET, 0x00ff_ffff, 2, 0),
        jump(libc::BPF_JGT, u32::from(DATA) << 24, 1, 0),
        end(u32::MAX),
        end(0),
    ]
}

/// Times between neighbours, in seconds.
pub(crate) fn gaps(times: &[Instant]) -> Vec<f64> {
    times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
}

/// Fails unless all of these lie in a range; `what` names them.
pub(crate) fn all_within(what: &str, seconds: &[f64], low: f64, high: f64) -> Result<()> {
    let outside = seconds.iter().find(|s| !(low..=high).contains(*s));
    match outside {
        None => Ok(()),
        Some(found) => Err(anyhow::anyhow!("{found:.2} s")),
    }
    .with_context(|| format!("{what}: expected {low} to {high} s, found {seconds:.2?}"))
}
