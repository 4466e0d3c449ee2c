//! Two engines, a network that may be bad, and a manual clock.

mod duplicate;
mod endpoints;
mod flow;
mod handshakes;
mod packets;
mod rotation;
mod sources;
mod speed;
mod succession;
mod timers;

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use fabric_primitives::{PrivateKey, PublicKey};

use crate::packet::Offload;
use crate::random::Random;
use crate::{
    Config, Datagrams, DropReason, Engine, PeerState, Received, Rules, RulesConfig, Stamper,
    Tai64n, UdpPath, Wire,
};

const HANDSHAKE_TOS: u8 = 0x88;

/// Output of one engine.
#[derive(Default)]
struct Made {
    sent: VecDeque<Sent>,
    frames: Vec<Vec<u8>>,
}

#[derive(Clone)]
struct Sent {
    to: SocketAddr,
    source: Option<IpAddr>,
    bytes: Vec<u8>,
    tos: u8,
}

impl Wire for Made {
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        assert!(train.bytes.len() <= 65_507 && train.bytes.len() <= 64 * train.segment_size);
        for datagram in train.bytes.chunks(train.segment_size) {
            self.sent.push_back(Sent {
                to: train.path.remote,
                source: train.path.source,
                bytes: datagram.to_vec(),
                tos: train.tos,
            });
        }
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        self.frames.push(frame.to_vec());
        Ok(())
    }
}

/// An engine whose wall clock is right: each is made a little later than the one before.
fn engine(config: Config, seed: u64, now: Instant) -> Engine {
    #[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    static MADE: AtomicU64 = AtomicU64::new(0);
    let later = Duration::from_micros(MADE.fetch_add(1, Ordering::Relaxed));
    let unix = now.saturating_duration_since(*START) + later;
    Engine::new(config, seed, Stamper::new(unix, now, Tai64n::default()), now)
}

struct Pair {
    engines: [Engine; 2],
    made: [Made; 2],
    addresses: [SocketAddr; 2],
    configs: [Config; 2],
    now: Instant,
}

impl Pair {
    /// A client, number 0, that knows where its server is.
    fn new() -> Self {
        #[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
        let now = Instant::now();
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let addresses = [1, 2].map(|host| SocketAddr::from(([192, 0, 2, host], 51820)));
        let config = |i: usize| Config {
            private_key: keys[i].clone(),
            peer_key: Some(keys[1 - i].public()),
            endpoint: (i == 0).then_some(addresses[1]),
            initiate: i == 0,
            unproven: None,
            calls_back: false,
            relay: None,
            keepalive: None,
            mtu: 1420,
            rules: Rules::new(&RulesConfig::transparent(1420)).unwrap(),
        };
        let configs = [config(0), config(1)];
        let mut engines = [0, 1].map(|i| engine(configs[i].clone(), i as u64, now));
        engines.iter_mut().for_each(|engine| engine.set_joins_udp(true));
        Self { engines, made: Default::default(), addresses, configs, now }
    }

    fn connected() -> Self {
        let mut pair = Self::new();
        pair.run(|_, _| true);
        assert!(pair.engines.iter().all(|engine| engine.peer_state().has_session));
        pair
    }

    /// Delivers what `passes` lets through, until nothing is on its way any more.
    fn run(&mut self, mut passes: impl FnMut(usize, &Sent) -> bool) {
        self.tick();
        while let Some((from, sent)) = self.next_sent() {
            if passes(from, &sent) && sent.to == self.addresses[1 - from] {
                self.deliver(1 - from, self.addresses[from], &sent.bytes);
            }
        }
    }

    fn tick(&mut self) {
        for i in 0..2 {
            self.engines[i].handle_timeout(self.now, &mut self.made[i]);
        }
    }

    fn next_sent(&mut self) -> Option<(usize, Sent)> {
        (0..2).find_map(|i| self.made[i].sent.pop_front().map(|sent| (i, sent)))
    }

    fn deliver(&mut self, to: usize, from: impl Into<UdpPath>, bytes: &[u8]) {
        let (segment_size, bytes) = (bytes.len().max(1), &mut bytes.to_vec());
        let train = Received { path: from.into(), bytes, segment_size, tos: 0 };
        self.engines[to].handle_datagrams(train, self.now, &mut self.made[to]);
        self.engines[to].flush(self.now, &mut self.made[to]);
    }

    /// A packet comes from engine `from`'s TUN.
    fn feed(&mut self, from: usize, packet: &[u8]) {
        let mut frame = [&Offload::NONE.write()[..], packet].concat();
        self.engines[from].handle_frame(&mut frame, self.now, &mut self.made[from]);
        self.engines[from].flush(self.now, &mut self.made[from]);
    }

    /// Returns whether a packet gets from one TUN to the other.
    fn passes(&mut self, from: usize) -> bool {
        let packet = udp(&self.made[1 - from].frames.len().to_be_bytes());
        self.feed(from, &packet);
        self.run(|_, _| true);
        self.made[1 - from].frames.last().is_some_and(|frame| frame[Offload::LEN..] == packet)
    }

    fn dropped(&self, by: usize, reason: DropReason) -> u64 {
        self.engines[by].counters().dropped_inbound[reason.index()]
    }
}

fn udp(payload: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 1, 0, 1], 64).udp(1000, 2000);
    builder.write(&mut packet, payload).unwrap();
    packet
}

#[test]
fn client_initiates_and_packets_pass_both_ways() {
    let mut pair = Pair::new();
    pair.tick();
    let first = pair.made[0].sent.front().unwrap();
    assert_eq!((first.bytes.len(), first.bytes[0], first.tos), (148, 1, HANDSHAKE_TOS));
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    for engine in &pair.engines {
        assert_eq!(engine.counters().handshakes, 1);
        assert!(engine.counters().tx_packets > 0 && engine.counters().rx_packets > 0);
    }
    assert_eq!(pair.engines[0].counters().handshake_attempts, 1);
}

#[test]
fn early_packets_wait_for_session_up_to_bound() {
    let mut pair = Pair::new();
    for i in 0..100u8 {
        pair.feed(0, &udp(&[i]));
    }
    let refused = pair.engines[0].counters().dropped_outbound[DropReason::NoSession.index()];
    assert_eq!(refused, 36);
    pair.run(|_, _| true);
    let first: Vec<u8> = pair.made[1].frames.iter().map(|f| *f.last().unwrap()).collect();
    assert_eq!(first, (0..64).collect::<Vec<u8>>());
}

#[test]
fn unanswered_initiation_repeats_every_second() {
    let mut pair = Pair::new();
    let start = pair.now;
    let mut sent_at = Vec::new();
    while pair.now < start + Duration::from_secs(300) {
        pair.run(|_, _| false);
        let attempts = pair.engines[0].counters().handshake_attempts;
        sent_at.resize(attempts as usize, pair.now - start);
        pair.now = pair.engines[0].deadline().max(pair.now + Duration::from_millis(1));
    }
    assert!(sent_at[0] < Duration::from_millis(10));
    let gaps: Vec<_> = sent_at.windows(2).map(|pair| (pair[1] - pair[0]).as_millis()).collect();
    assert!(gaps.iter().all(|gap| (1000..1400).contains(gap)), "{gaps:?}");
    pair.run(|_, _| true);
    pair.now += Duration::from_secs(2);
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn garbage_of_any_length_never_stops_reception() {
    let mut pair = Pair::connected();
    let mut random = Random::new(11);
    for round in 0..2000 {
        let length = [0, 1, 3, 4, 15, 16, 31, 32, 33, 1500, 65_000][random.next() as usize % 11];
        let mut garbage: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
        if let Some(kind) = garbage.first_mut().filter(|_| round % 2 == 0) {
            *kind = (random.next() % 5) as u8;
        }
        if length > 4 && round % 3 == 0 {
            garbage[1..4].fill(0);
        }
        let from = pair.addresses[0];
        let segment_size = 1 + random.next() as usize % 2000;
        let bytes = &mut garbage.clone();
        let train = Received { path: from.into(), bytes, segment_size, tos: 3 };
        pair.engines[1].handle_datagrams(train, pair.now, &mut pair.made[1]);
        let mut frame = garbage;
        pair.engines[1].handle_frame(&mut frame, pair.now, &mut pair.made[1]);
        pair.engines[1].flush(pair.now, &mut pair.made[1]);
        pair.made[1].sent.clear();
    }
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn spoofed_response_keeps_pending_handshake() {
    let mut pair = Pair::new();
    pair.tick();
    let initiation = pair.made[0].sent.front().unwrap().clone();
    let mut forged = vec![7; 92];
    forged[..4].copy_from_slice(&[2, 0, 0, 0]);
    forged[8..12].copy_from_slice(&initiation.bytes[4..8]);
    pair.deliver(0, pair.addresses[1], &forged);
    pair.run(|_, _| true);
    assert_eq!(pair.engines[0].counters().handshake_attempts, 1);
    assert!(pair.passes(0));
}

#[test]
fn initiation_flood_is_bounded_and_session_stays() {
    let mut pair = Pair::connected();
    let answers = flood(&mut pair, SocketAddr::from(([203, 0, 113, 66], 5)), 3000);
    assert!(answers <= 10, "{answers} answers to one address in a second");
    assert!(pair.dropped(1, DropReason::HandshakeRejected) >= 2900);
    assert_eq!(pair.engines[1].peer_state().endpoint, Some(pair.addresses[0]));
    assert!(pair.passes(0) && pair.passes(1));
}

/// Even where the flood has the peer's own address.
#[test]
fn restart_in_flood_succeeds_with_cookie() {
    let mut pair = Pair::connected();
    let forged = pair.addresses[0];
    let answers = flood(&mut pair, forged, 3000);
    assert!((900..1200).contains(&answers), "{answers} cookies for the peer's address at once");
    pair.now += Duration::from_millis(5);
    pair.engines[0] = engine(pair.configs[0].clone(), 77, pair.now);
    let mut sent = Vec::new();
    pair.run(|_, message| {
        sent.push(message.bytes.len());
        true
    });
    assert_eq!(sent, [148, 64], "an initiation, a cookie");
    pair.now += Duration::from_millis(100);
    assert!(pair.passes(0) && pair.passes(1));
}

/// So many initiations to engine 1 from someone who knows its public key, but is not its peer.
/// Returns how many answers there were.
fn flood(pair: &mut Pair, from: SocketAddr, initiations: usize) -> usize {
    let mut flooder = foreign_key_for(pair.configs[1].private_key.public(), pair);
    let (mut answers, mut made) = (0, Made::default());
    for _ in 0..initiations {
        flooder.initiate(pair.now);
        flooder.handle_timeout(pair.now, &mut made);
        let Some(initiation) = made.sent.pop_back() else { continue };
        pair.deliver(1, from, &initiation.bytes);
        answers += pair.made[1].sent.drain(..).count();
    }
    answers
}

fn foreign_key_for(server: PublicKey, pair: &Pair) -> Engine {
    let config = Config {
        private_key: PrivateKey::generate(),
        peer_key: Some(server),
        ..pair.configs[0].clone()
    };
    engine(config, 99, pair.now)
}

#[test]
fn without_the_peers_key_nothing_is_sent() {
    let mut pair = Pair::new();
    let silent = Config { peer_key: None, ..pair.configs[0].clone() };
    pair.engines[0].configure(silent, pair.now);
    pair.feed(0, &udp(b"too early"));
    pair.deliver(0, pair.addresses[1], &[1; 148]);
    pair.tick();
    assert!(pair.made[0].sent.is_empty());
    assert!(pair.engines[0].deadline() > pair.now + Duration::from_secs(3600));
}

#[test]
fn keepalive_follows_unanswered_data_only() {
    let mut pair = Pair::connected();
    let config = Config { keepalive: Some(Duration::from_secs(5)), ..pair.configs[0].clone() };
    pair.engines[0].configure(config, pair.now);
    let mut sent = 0;
    for second in 0..60 {
        pair.now += Duration::from_secs(1);
        if second < 20 {
            pair.feed(0, &udp(b"busy"));
        }
        pair.run(|from, message| {
            sent += usize::from(from == 0 && message.bytes.len() == 32);
            true
        });
    }
    assert!((7..=8).contains(&sent), "{sent} keepalives in 40 s of silence");
}

/// Loss, duplicates and reordering by a seed: what arrives was sent, and arrives once.
#[test]
fn bad_network_neither_forges_nor_replays() {
    for seed in 0..20 {
        let mut pair = Pair::connected();
        let mut random = Random::new(seed);
        let mut on_the_way: Vec<(usize, Vec<u8>)> = Vec::new();
        for number in 0..400u32 {
            let from = random.next() as usize % 2;
            pair.feed(from, &udp(&[&number.to_be_bytes()[..], &[from as u8]].concat()));
            while let Some((from, sent)) = pair.next_sent() {
                for _ in 0..[0, 1, 1, 1, 1, 2][random.next() as usize % 6] {
                    on_the_way.push((from, sent.bytes.clone()));
                }
            }
            while on_the_way.len() > 20 {
                let pick = random.next() as usize % on_the_way.len();
                let (from, bytes) = on_the_way.swap_remove(pick);
                pair.deliver(1 - from, pair.addresses[from], &bytes);
            }
        }
        for to in 0..2 {
            let mut got: Vec<&[u8]> = pair.made[to].frames.iter().map(|f| &f[38..]).collect();
            let count = got.len();
            got.sort_unstable();
            got.dedup();
            assert_eq!(got.len(), count, "seed {seed}: something came twice");
            assert!(got.iter().all(|payload| usize::from(payload[4]) == 1 - to));
            assert!(count > 100, "seed {seed}: {count} arrived");
        }
        assert!(pair.passes(0) && pair.passes(1), "seed {seed}");
    }
}

#[test]
fn packets_late_by_8191_are_taken_and_only_once() {
    let mut pair = Pair::connected();
    (0..8192u32).for_each(|number| pair.feed(0, &udp(&number.to_be_bytes())));
    let sent: Vec<Sent> = pair.made[0].sent.drain(..).collect();
    for message in sent.iter().skip(1).chain(&sent).chain(&sent) {
        pair.deliver(1, pair.addresses[0], &message.bytes);
    }
    assert_eq!(pair.made[1].frames.len(), 8192);
    assert_eq!(pair.dropped(1, DropReason::Replay), 8191 + 8192);
}

/// Bug class: after a restart nothing flows until the side that runs on happens to rekey.
#[test]
fn restarted_end_recovers_with_first_handshake() {
    for restarted in 0..2 {
        let mut pair = Pair::connected();
        let config = Config {
            endpoint: Some(pair.addresses[1 - restarted]),
            initiate: true,
            ..pair.configs[restarted].clone()
        };
        pair.engines[restarted] = engine(config, 77, pair.now);
        pair.run(|_, _| true);
        assert!(pair.passes(0) && pair.passes(1));
        assert_eq!(pair.engines[restarted].counters().handshake_attempts, 1);
    }
}

/// Both ends initiate at the same moment, and both handshakes succeed.
#[test]
fn two_ends_that_initiate_at_once_agree_on_a_session() {
    let mut pair = Pair::connected();
    for round in 0..20 {
        pair.engines[0].initiate(pair.now);
        pair.engines[1].initiate(pair.now);
        pair.run(|_, _| true);
        assert!(pair.passes(0) && pair.passes(1), "round {round}");
    }
}
