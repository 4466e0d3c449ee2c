//! Handshakes and data in random order, with what is lost, repeated, late and damaged: between two
//! ends of ours, or one of ours and boringtun. `SCHEDULES=1000000` sets their number, `SCHEDULE=7`
//! tries that one alone.

use std::collections::BTreeSet;

use super::*;

const SCHEDULES: u64 = 500;

/// Steps of a schedule before both ends shake hands undisturbed.
const STEPS: u64 = 24;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as usize % bound
    }
}

/// An end that answers messages, and collects the numbers in packets that it opens.
enum End {
    Ours(Box<Ours>),
    Boringtun(Box<Tunn>),
}

struct Ours {
    handshake: Handshake,
    stamper: Stamper,
    now: Instant,
    /// Keys in the order in which they were agreed on, and whether the peer has them.
    keys: Vec<(u32, Sealer, Opener, bool)>,
}

impl Ours {
    fn new_index(&self) -> u32 {
        random_index(|index| {
            self.handshake.expects(index) || self.keys.iter().any(|(own, ..)| *own == index)
        })
    }

    fn add(&mut self, pair: KeyPair, is_confirmed: bool) {
        let index = pair.local_index();
        let (sealer, opener) = pair.split();
        self.keys.push((index, sealer, opener, is_confirmed));
    }

    fn seal(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let (_, sealer, ..) = self.keys.iter().rev().find(|(.., is_confirmed)| *is_confirmed)?;
        let mut message = vec![0; packet.len() + DATA_OVERHEAD];
        sealer.seal(packet, packet.len(), &mut message)?;
        Some(message)
    }

    fn answer(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, HandshakeError> {
        match Message::parse(message) {
            Some(Message::Initiation(initiation)) => {
                let received = self.handshake.local().open_initiation(initiation)?;
                let (response, pair) =
                    self.handshake.respond(received, self.new_index(), self.now)?;
                self.add(pair, false);
                Ok(Some(response.to_vec()))
            }
            Some(Message::Response(response)) => {
                let pair = self.handshake.complete(response, self.now)?;
                self.add(pair, true);
                Ok(self.seal(&[]))
            }
            Some(Message::CookieReply(_)) | None => Ok(None),
        }
    }

    fn open(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let index = receiver_index(message);
        let (.., opener, is_confirmed) = self.keys.iter_mut().find(|(own, ..)| *own == index)?;
        let mut opened = message.to_vec();
        let len = opener.open(&mut opened, message.len())[0].ok()?;
        *is_confirmed = true;
        Some(opened[DATA_HEADER..][..len].to_vec())
    }
}

impl End {
    fn initiate(&mut self) -> Vec<u8> {
        match self {
            Self::Ours(ours) => {
                let (index, stamp) = (ours.new_index(), ours.stamper.stamp(ours.now));
                ours.handshake.initiate(index, stamp, ours.now).to_vec()
            }
            Self::Boringtun(tunn) => their_initiation(tunn),
        }
    }

    fn seal(&mut self, number: usize) -> Option<Vec<u8>> {
        let packet = packet(number);
        match self {
            Self::Ours(ours) => ours.seal(&packet),
            // Without a session it would initiate.
            Self::Boringtun(tunn) => {
                let sealed = answer(tunn.encapsulate(&packet, &mut [0; 200]));
                sealed.filter(|message| message[0] == DATA)
            }
        }
    }

    /// Returns the answer, and the packet that was opened.
    fn handle(&mut self, message: &[u8]) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
        match self {
            Self::Ours(ours) if message[0] == DATA => (None, ours.open(message)),
            Self::Ours(ours) => (ours.answer(message).unwrap_or_default(), None),
            Self::Boringtun(tunn) => match tunn.decapsulate(None, message, &mut [0; 200]) {
                TunnResult::WriteToTunnelV4(packet, _) => (None, Some(packet.to_vec())),
                result @ (TunnResult::Done
                | TunnResult::Err(_)
                | TunnResult::WriteToNetwork(_)
                | TunnResult::WriteToTunnelV6(..)) => (answer(result), None),
            },
        }
    }
}

fn packet(number: usize) -> Vec<u8> {
    let mut packet = [&PACKET[..], &(number as u64).to_be_bytes()].concat();
    packet[3] = packet.len() as u8;
    packet
}

struct Schedule {
    ends: [End; 2],
    random: Random,
    /// Messages to each end.
    on_the_way: [Vec<Vec<u8>>; 2],
    /// Packets that each end has sealed, and numbers that the other one has opened.
    sent: [usize; 2],
    opened: [BTreeSet<usize>; 2],
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let now = now();
        let ours = |i: usize| {
            let local = Arc::new(LocalKey::new(&keys[i]));
            End::Ours(Box::new(Ours {
                handshake: Handshake::new(local, keys[1 - i].public()),
                stamper: Stamper::new(Duration::ZERO, now, Tai64n::default()),
                now,
                keys: Vec::new(),
            }))
        };
        let other = match seed % 2 {
            0 => End::Boringtun(Box::new(tunn(&keys[1], keys[0].public(), None))),
            _ => ours(1),
        };
        Self {
            ends: [ours(0), other],
            random: Random(seed),
            on_the_way: Default::default(),
            sent: [0; 2],
            opened: Default::default(),
        }
    }

    fn step(&mut self) {
        let end = self.random.below(2);
        let waiting = self.on_the_way[end].len();
        match self.random.below(10) {
            0 => self.initiate(end),
            1..4 => _ = self.seal(end),
            _ if waiting == 0 => {}
            what => {
                let pick = self.random.below(waiting);
                match what {
                    4 => _ = self.on_the_way[end].swap_remove(pick),
                    5 => self.deliver(end, pick, true),
                    6 => {
                        let message = &mut self.on_the_way[end][pick];
                        let bit = self.random.below(message.len() * 8);
                        message[bit / 8] ^= 1 << (bit % 8);
                    }
                    _ => self.deliver(end, pick, false),
                }
            }
        }
    }

    fn initiate(&mut self, end: usize) {
        let message = self.ends[end].initiate();
        self.on_the_way[1 - end].push(message);
    }

    fn seal(&mut self, end: usize) -> bool {
        let sealed = self.ends[end].seal(self.sent[end]);
        self.sent[end] += usize::from(sealed.is_some());
        let is_sealed = sealed.is_some();
        self.on_the_way[1 - end].extend(sealed);
        is_sealed
    }

    /// Delivers a message, of which the network may keep a copy.
    fn deliver(&mut self, to: usize, pick: usize, is_kept: bool) {
        let message = self.on_the_way[to].swap_remove(pick);
        let (answer, opened) = self.ends[to].handle(&message);
        self.on_the_way[1 - to].extend(answer);
        // Kept by boringtun, too, which opens no keepalive as a packet.
        if let Some(opened) = opened.filter(|packet| !packet.is_empty()) {
            let number = opened.last_chunk().copied().map(u64::from_be_bytes);
            let number = number.expect("it ends in a number") as usize;
            assert!(number < self.sent[1 - to], "{number} was never sent");
            assert_eq!(opened, packet(number), "{number} was altered");
            assert!(self.opened[1 - to].insert(number), "{number} was opened twice");
        }
        if is_kept {
            self.on_the_way[to].push(message);
        }
    }

    /// Whatever came before, a handshake without disturbance leads to a session both ways.
    fn recover(&mut self, initiator: usize) {
        self.on_the_way = Default::default();
        self.initiate(initiator);
        for to in [1 - initiator, initiator, 1 - initiator] {
            self.deliver(to, 0, false);
        }
        for from in [initiator, 1 - initiator] {
            let number = self.sent[from];
            assert!(self.seal(from), "end {from} has no session");
            self.deliver(1 - from, 0, false);
            assert!(self.opened[from].contains(&number), "from end {from}");
        }
    }
}

fn variable(name: &str) -> Option<u64> {
    #[expect(clippy::disallowed_methods, reason = "only the crate itself has its settings")]
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_schedules_never_forge_repeat_or_deadlock() {
    let seeds = match variable("SCHEDULE") {
        Some(seed) => seed..seed + 1,
        None => 0..variable("SCHEDULES").unwrap_or(SCHEDULES),
    };
    let mut opened = 0;
    for seed in seeds.clone() {
        let run = std::panic::catch_unwind(|| {
            let mut schedule = Schedule::new(seed);
            (0..STEPS).for_each(|_| schedule.step());
            schedule.recover(seed as usize / 2 % 2);
            schedule.opened.iter().map(BTreeSet::len).sum::<usize>()
        });
        opened += run.unwrap_or_else(|_| panic!("SCHEDULE={seed} shows it again"));
    }
    assert!(opened as u64 >= 2 * (seeds.end - seeds.start), "{opened} packets");
    eprintln!("{} schedules, {opened} packets", seeds.end - seeds.start);
}
