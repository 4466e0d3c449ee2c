//! Two ends, a network, a plan, and what must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tunnel::{PeerState, Received};

use crate::end::{self, End, SURELY_VALID};
use crate::network::{Datagram, Network};
use crate::plan::{Event, Phase, Plan, SECOND, Traffic, Weather};
use crate::random::Random;

/// After the network is good again and a restarted end is back, packets pass after this long.
const RECOVERY: u64 = 7 * SECOND;

/// Longest wait of an end that has no key and a stale endpoint of its peer: until the peer, sending in
/// vain for 15 s, initiates (whitepaper section 6.5).
const UNANSWERED: u64 = 15 * SECOND;

/// The longest that a packet is on its way.
const TRANSIT: u64 = SECOND;

/// Result of a seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) seconds: u64,
    pub(crate) packets: u64,
    pub(crate) lost: u64,
    pub(crate) handshakes: u64,
    pub(crate) attempts: u64,
    /// Hash of the time, kind and length of every datagram.
    pub(crate) trace: u64,
}

pub(crate) struct World {
    weather: Weather,
    plan: Plan,
    /// The engines' clock at time 0.
    start: Instant,
    now: u64,
    ends: [End; 2],
    network: Network,
    random: Random,
    phase: Phase,
    /// Since when the network has been good and nobody restarted.
    good_since: Option<u64>,
    /// An end restarted while the peer's config did not yet have its key.
    is_estranged: bool,
    /// Since when each end sends to a peer that cannot read it or find it.
    lost_since: [Option<u64>; 2],
    /// Packets that must arrive, with the time they were sent.
    owed: [Vec<(usize, u64)>; 2],
    /// Datagrams with packets that were delivered, to distinguish copies from them.
    delivered: BTreeSet<u64>,
    /// Since when nothing was sent either way, and the datagrams since.
    idle_since: Option<u64>,
    sent_while_idle: u64,
    /// Config changes to come: the time, the end that is changed, and the key it gets.
    news: BTreeMap<(u64, usize), fabric_primitives::PublicKey>,
    /// Every datagram is printed.
    is_watched: bool,
    outcome: Outcome,
}

type Check = Result<(), String>;

impl World {
    pub(crate) fn new(seed: u64, is_watched: bool) -> Self {
        let plan = Plan::of(seed);
        let mut random = Random::new(seed ^ 0xabcd_ef01_2345_6789);
        #[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
        let start = Instant::now();
        let keys = [end::key(&mut random), end::key(&mut random)];
        let addresses = [1, 2].map(|host| SocketAddr::from(([192, 0, 2, host], 51820)));
        let ends = [0, 1].map(|i| {
            let peer = (i == 0 || plan.is_mutual).then_some(addresses[1 - i]);
            let config = end::config(i, &keys, peer, plan.keepalives[i]);
            End::new(config, addresses[i], random.next(), start)
        });
        let phase = plan.phases[0].clone();
        let network = Network::new(phase.links, Random::new(random.next()));
        Self {
            weather: Weather::of(seed),
            plan,
            start,
            now: 0,
            ends,
            network,
            random,
            phase,
            good_since: Some(0),
            is_estranged: false,
            lost_since: [None; 2],
            owed: [Vec::new(), Vec::new()],
            delivered: BTreeSet::new(),
            idle_since: None,
            sent_while_idle: 0,
            news: BTreeMap::new(),
            is_watched,
            outcome: Outcome { trace: 0xcbf2_9ce4_8422_2325, ..Outcome::default() },
        }
    }

    /// Lives through the whole plan.
    pub(crate) fn run(mut self) -> Result<Outcome, String> {
        let phases = self.plan.phases.clone();
        let mut start = 0;
        for phase in phases {
            let context = format!("{phase:?}");
            let end = start + phase.length;
            let result = self.enter(phase, start).and_then(|()| self.run_until(end));
            result.map_err(|error| {
                let at = self.now as f64 / SECOND as f64;
                format!("{error}\n  at {at:.6} s, in {context}\n  ends {:?}", self.states())
            })?;
            start = end;
        }
        self.finish()
    }

    fn states(&self) -> [PeerState; 2] {
        [0, 1].map(|i| self.ends[i].engine.peer_state())
    }

    fn enter(&mut self, phase: Phase, at: u64) -> Check {
        self.advance(at);
        self.settle_debts()?;
        self.check_idle()?;
        let is_good = phase.links.iter().all(|link| link.is_good());
        let was_good = self.good_since.is_some();
        let mtu_shrank = [0, 1].iter().any(|&i| phase.links[i].mtu < self.network.links[i].mtu);
        self.network.links = phase.links;
        if !is_good {
            self.good_since = None;
        } else if !was_good || phase.event.is_some() || mtu_shrank {
            // A rotation costs nothing.
            let is_free = was_good && matches!(phase.event, None | Some(Event::Rotate { .. }));
            self.good_since = if is_free { self.good_since } else { Some(at) };
        }
        for (end, traffic) in self.ends.iter_mut().zip(phase.traffic) {
            end.schedule(traffic, at, &mut self.random);
        }
        let is_silent = phase.traffic.iter().all(|t| matches!(t, Traffic::Idle));
        // The last packets may be answered by keepalives.
        self.idle_since =
            (is_silent && is_good && phase.event.is_none()).then_some(at + 20 * SECOND);
        self.sent_while_idle = 0;
        let event = phase.event;
        self.phase = phase;
        if let Some(event) = event {
            self.happen(event);
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) {
        if self.is_watched {
            eprintln!("{:12.6} {event:?}", self.now as f64 / SECOND as f64);
        }
        let now = self.instant();
        match event {
            Event::Restart(i) => {
                let seed = self.random.next();
                self.is_estranged |= !self.news.is_empty();
                self.ends[i].restart(seed, self.now, now);
            }
            Event::Roam => self.ends[0].address = self.fresh_address(),
            Event::Move => {
                self.ends[1].address = self.fresh_address();
                self.ends[0].config.endpoint = Some(self.ends[1].address);
                self.ends[0].configure(now);
            }
            Event::Rotate { end, known_after } => {
                let key = end::key(&mut self.random);
                let public = key.public();
                let (own, other) = match known_after {
                    0.. => (self.now, self.now + known_after.unsigned_abs()),
                    _ => (self.now + known_after.unsigned_abs(), self.now),
                };
                self.ends[end].config.private_key = key;
                // Its own end gets its key by the same means.
                self.news.insert((own, end), public);
                self.news.insert((other, 1 - end), public);
            }
        }
    }

    fn fresh_address(&mut self) -> SocketAddr {
        let [a, b, ..] = self.random.next().to_be_bytes();
        let port = self.random.between(1024, 65_535) as u16;
        SocketAddr::from(([198, 51, a, b], port))
    }

    /// Until nothing more happens before `end`.
    fn run_until(&mut self, until: u64) -> Check {
        loop {
            let arrival = self.network.next_arrival();
            let dues = [0, 1].map(|i| self.ends[i].due);
            let news = self.news.keys().next().map(|(at, _)| *at);
            let timers = [0, 1].map(|i| Some(self.deadline(i)));
            let times = [arrival, dues[0], dues[1], news, timers[0], timers[1]];
            let next = times.into_iter().flatten().min().unwrap_or(until).max(self.now);
            if next >= until {
                self.advance(until);
                return Ok(());
            }
            self.advance(next);
            if news == Some(next) {
                self.take_news();
            } else if arrival == Some(next) {
                self.deliver()?;
            } else if let Some(i) = (0..2).find(|&i| dues[i] == Some(next)) {
                self.feed(i);
            }
            let now = self.instant();
            for i in 0..2 {
                if self.deadline(i) <= self.now {
                    let end = &mut self.ends[i];
                    end.engine.handle_timeout(now, &mut end.made);
                    self.transmit(i);
                    if self.deadline(i) <= self.now {
                        return Err(format!("end {i} never stops being due"));
                    }
                }
            }
        }
    }

    fn advance(&mut self, to: u64) {
        self.now = to.max(self.now);
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn deadline(&self, i: usize) -> u64 {
        let wait = self.ends[i].engine.deadline().saturating_duration_since(self.start);
        // A driver that rounded down would ask again and again.
        wait.as_nanos().div_ceil(1000) as u64
    }

    fn take_news(&mut self) {
        let now = self.instant();
        let Some(((_, i), key)) = self.news.pop_first() else { return };
        if self.ends[i].config.private_key.public() != key {
            self.ends[i].config.peer_key = Some(key);
        }
        self.ends[i].configure(now);
        self.transmit(i);
        if self.is_estranged && self.news.is_empty() {
            self.is_estranged = false;
            self.good_since = self.good_since.map(|_| self.now);
        }
    }

    /// Hosts behind end `i` send what they have to.
    fn feed(&mut self, i: usize) {
        let traffic = self.phase.traffic[i];
        let count = if let Traffic::Bursts(count, _) = traffic { count } else { 1 };
        let now = self.instant();
        let is_owed = self.can_arrive(i);
        for _ in 0..count {
            let number = self.ends[i].feed(i, now);
            if is_owed && end::packet(i, number).len() + 32 + 15 + 28 <= self.network.links[i].mtu {
                self.owed[i].push((number, self.now));
            }
        }
        let end = &mut self.ends[i];
        end.engine.flush(now, &mut end.made);
        end.schedule(traffic, self.now, &mut self.random);
        self.transmit(i);
    }

    /// Returns whether nothing excuses the loss of a packet which end `i` sends now.
    fn can_arrive(&mut self, i: usize) -> bool {
        let [from, to] = [&self.ends[i], &self.ends[1 - i]];
        let [here, there] = [from, to].map(|end| end.engine.peer_state());
        let can_find = there.has_session || there.endpoint == Some(from.address);
        let lost_since = (!can_find).then(|| self.lost_since[i].unwrap_or(self.now));
        self.lost_since[i] = lost_since;
        // An end that moved and sends nothing is not found.
        let is_found = here.endpoint == Some(to.address);
        let is_good = self.good_since.is_some_and(|since| {
            self.now >= since + if since == 0 { 2 * SECOND } else { RECOVERY }
        });
        let is_lost = lost_since.is_some_and(|since| self.now < since + UNANSWERED + RECOVERY);
        is_found && is_good && !is_lost && !self.is_estranged
    }

    /// Hands what end `i` sent to the network.
    fn transmit(&mut self, i: usize) {
        let keys_made = self.keys_made(i).unwrap_or(0);
        for (to, bytes, tos) in std::mem::take(&mut self.ends[i].made.sent) {
            for value in [self.now, i as u64, bytes[0].into(), bytes.len() as u64] {
                self.outcome.trace = (self.outcome.trace ^ value).wrapping_mul(0x0100_0000_01b3);
            }
            if self.is_watched {
                let (at, kind) = (self.now as f64 / SECOND as f64, bytes[0]);
                eprintln!("{at:12.6} end {i} sends {} bytes of type {kind} to {to}", bytes.len());
            }
            if self.idle_since.is_some_and(|since| self.now >= since) {
                self.sent_while_idle += 1;
            }
            let from = self.ends[i].address;
            self.network.send(Datagram {
                from,
                to,
                bytes,
                tos,
                sender: i,
                sent: self.now,
                keys_made,
                number: 0,
            });
        }
    }

    fn deliver(&mut self) -> Check {
        let Some(datagram) = self.network.arrive() else { return Ok(()) };
        let receiver = 1 - datagram.sender;
        if self.ends[receiver].address != datagram.to {
            return Ok(());
        }
        let now = self.instant();
        let end = &mut self.ends[receiver];
        let train = Received {
            path: datagram.from.into(),
            bytes: &mut datagram.bytes.clone(),
            segment_size: datagram.bytes.len(),
            tos: datagram.tos,
        };
        end.engine.handle_datagrams(train, now, &mut end.made);
        end.engine.flush(now, &mut end.made);
        let frames = std::mem::take(&mut self.ends[receiver].made.frames);
        self.transmit(receiver);
        self.check_delivery(&datagram, &frames)
    }

    /// Checks that a packet delivered for the first time is written once, as it was sent.
    fn check_delivery(&mut self, datagram: &Datagram, frames: &[Vec<u8>]) -> Check {
        let holds_packet = datagram.bytes[0] == 4 && datagram.bytes.len() > 32;
        let is_first = holds_packet && self.delivered.insert(datagram.number);
        if frames.len() > usize::from(is_first) {
            return Err(format!("{} packets out of a datagram", frames.len()));
        }
        let receiver = 1 - datagram.sender;
        let Some(frame) = frames.first() else { return self.check_refusal(datagram, is_first) };
        let number = end::number(frame).ok_or("a packet without a number")?;
        let arrived = self.ends[datagram.sender].arrived.get_mut(number).ok_or("never sent")?;
        if std::mem::replace(arrived, true) {
            return Err(format!("packet {number} arrived twice"));
        }
        if end::written(frame) != end::packet(datagram.sender, number) {
            return Err(format!("packet {number} was altered"));
        }
        let endpoint = self.ends[receiver].engine.peer_state().endpoint;
        if endpoint != Some(datagram.from) {
            return Err(format!("endpoint {endpoint:?} after a packet from {}", datagram.from));
        }
        Ok(())
    }

    /// A packet that was delivered and not written.
    fn check_refusal(&self, datagram: &Datagram, is_first: bool) -> Check {
        let receiver = &self.ends[1 - datagram.sender];
        let made = datagram.keys_made;
        let is_excused = !is_first
            || receiver.begun + 2 * TRANSIT + SECOND >= made.min(datagram.sent)
            || datagram.sent >= made + SURELY_VALID;
        match is_excused || self.weather == Weather::Stormy {
            true => Ok(()),
            false => Err(format!(
                "a packet of end {} was delivered and refused, sent at {} with keys of {made}: {:?}",
                datagram.sender,
                datagram.sent,
                receiver.engine.counters()
            )),
        }
    }

    /// Time at which end `i` last completed a handshake.
    fn keys_made(&self, i: usize) -> Option<u64> {
        let last = self.ends[i].engine.peer_state().last_handshake?;
        Some(last.saturating_duration_since(self.start).as_micros() as u64)
    }

    /// Everything owed that had the time to arrive must have arrived.
    fn settle_debts(&mut self) -> Check {
        for i in 0..2 {
            for (number, sent) in std::mem::take(&mut self.owed[i]) {
                if sent + TRANSIT <= self.now && !self.ends[i].arrived[number] {
                    let at = sent as f64 / SECOND as f64;
                    return Err(format!("packet {number} of end {i}, sent at {at:.6} s, is lost"));
                }
            }
        }
        Ok(())
    }

    /// Without traffic there are the keepalives that were asked for, and now and then a handshake.
    fn check_idle(&self) -> Check {
        let Some(since) = self.idle_since.filter(|since| *since < self.now) else {
            return Ok(());
        };
        let seconds = (self.now - since) / SECOND;
        let asked: u64 =
            self.plan.keepalives.iter().flatten().map(|every| seconds / every + 1).sum();
        let handshakes = 2 * (seconds / 110 + 2);
        // Three messages make a handshake, and a keepalive may answer each of the last two.
        let most = asked * 2 + handshakes * 5;
        match self.sent_while_idle <= most {
            true => Ok(()),
            false => Err(format!("{} datagrams in {seconds} s of silence", self.sent_while_idle)),
        }
    }

    fn finish(mut self) -> Result<Outcome, String> {
        self.settle_debts()?;
        self.check_idle()?;
        for i in 0..2 {
            self.outcome.packets += self.ends[i].arrived.len() as u64;
            self.outcome.lost += self.ends[i].arrived.iter().filter(|a| !**a).count() as u64;
            self.outcome.attempts += self.ends[i].attempts();
            self.outcome.handshakes += self.ends[i].engine.counters().handshakes;
        }
        self.outcome.seconds = self.now / SECOND;
        self.check_handshakes()?;
        Ok(self.outcome)
    }

    /// One in 120 s at most, in bad times one a second from each end. The first ones, and those that
    /// are sent by both ends at once, are few.
    fn check_handshakes(&self) -> Check {
        let bad: u64 = self
            .plan
            .phases
            .iter()
            .filter(|phase| phase.event.is_some() || phase.links.iter().any(|link| !link.is_good()))
            .map(|phase| phase.length / SECOND)
            .sum();
        let most = self.outcome.seconds / 110 + 10 + 2 * bad;
        match self.outcome.attempts <= most {
            true => Ok(()),
            false => Err(format!("{} initiations, and {most} is a lot", self.outcome.attempts)),
        }
    }
}
