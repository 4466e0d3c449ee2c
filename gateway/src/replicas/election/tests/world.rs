//! Simulation of replicas, their network and the API server.

use std::collections::BTreeMap;

use super::*;

/// A pseudo-random number of that seed and position (SplitMix64).
fn random(seed: u64, at: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Replicas whose heartbeats take up to 20 ms.
pub(super) struct World {
    pub(super) now: Instant,
    start: Instant,
    pub(super) replicas: BTreeMap<u8, Election>,
    /// Stood still until then.
    pub(super) paused: BTreeMap<u8, Instant>,
    /// Pairs that cannot reach each other.
    pub(super) cut: BTreeSet<(u8, u8)>,
    /// Receive nothing.
    pub(super) deaf: BTreeSet<u8>,
    /// Share of what a replica receives that gets lost, in percent.
    pub(super) losses: BTreeMap<u8, u64>,
    pub(super) on_way: Vec<(Instant, u8, u8, Option<Heartbeat>)>,
    /// The API server's record, and whether it can be reached.
    pub(super) record: Option<(u8, u64)>,
    pub(super) has_api: bool,
    pub(super) has_api_at: Instant,
    seed: u64,
    draws: u64,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let now = Instant::now();
        Self {
            now,
            start: now,
            replicas: BTreeMap::new(),
            paused: BTreeMap::new(),
            cut: BTreeSet::new(),
            deaf: BTreeSet::new(),
            losses: BTreeMap::new(),
            on_way: Vec::new(),
            record: None,
            has_api: true,
            has_api_at: now,
            seed,
            draws: 0,
        }
    }

    /// 1 has the tunnel, 2 stands by. Each seed has another time since the last heartbeat.
    pub(super) fn with_standby(seed: u64) -> Self {
        let mut world = Self::new(seed);
        world.start(1);
        world.run(1000);
        world.start(2);
        world.run(1000 + u32::try_from(seed).unwrap() * 3);
        world
    }

    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        random(self.seed, self.draws) % below
    }

    pub(super) fn start(&mut self, i: u8) {
        let incarnation = u64::try_from((self.now - self.start).as_nanos()).unwrap() + u64::from(i);
        let mut replica = Election::new(incarnation + 1, self.now);
        replica.set_ready(true);
        replica.set_probe_interval(MS * 1000);
        replica.set_others((1..=3).filter(|other| *other != i).map(address).collect(), self.now);
        self.replicas.insert(i, replica);
    }

    fn is_cut(&self, a: u8, b: u8) -> bool {
        self.cut.contains(&(a.min(b), a.max(b)))
    }

    /// One step of the time. Every replica lists all others: 1 to 3.
    pub(super) fn step(&mut self) {
        self.now += MS * STEP;
        let now = self.now;
        let (arrived, on_way) = self.on_way.drain(..).partition(|(at, ..)| *at <= now);
        self.on_way = on_way;
        let arrived: Vec<(Instant, u8, u8, Option<Heartbeat>)> = arrived;
        for (_, from, to, heartbeat) in arrived {
            let percent = self.losses.get(&to).copied().unwrap_or_default();
            let is_lost = percent > 0 && self.draw(100) < percent;
            if self.is_cut(from, to) || self.deaf.contains(&to) || is_lost {
                continue;
            }
            match (self.replicas.get_mut(&to), heartbeat) {
                (Some(replica), Some(heartbeat)) => replica.handle(address(from), heartbeat, now),
                (Some(replica), None) => replica.handle_refusal(address(from), now),
                // Nobody listens there.
                (None, Some(_)) => self.on_way.push((now + MS, to, from, None)),
                (None, None) => {}
            }
        }
        for i in self.replicas.keys().copied().collect::<Vec<_>>() {
            if self.paused.get(&i).is_some_and(|until| *until > now) {
                continue;
            }
            let Some(replica) = self.replicas.get_mut(&i) else { continue };
            let has_api = self.has_api && !self.deaf.contains(&i);
            if let Some((named, epoch)) = self.record.filter(|_| has_api) {
                replica.handle_published(record(named, epoch), Some(address(i)), now);
            }
            replica.decide(now);
            // One that is stuck reads first.
            let has_api = has_api && (!replica.is_stuck(now) || now > self.has_api_at + MS * 500);
            if replica.role() == Role::Active
                && has_api
                && self.record.is_none_or(|(_, epoch)| replica.epoch() > epoch)
            {
                self.record = Some((i, replica.epoch()));
            }
            let Some(replica) = self.replicas.get_mut(&i) else { continue };
            if replica.beat_due().is_some_and(|due| due <= now) {
                let heartbeat = replica.beat(connected(), now);
                for other in (1..=3).filter(|other| *other != i) {
                    let delay = MS * u32::try_from(self.draw(20)).unwrap();
                    self.on_way.push((now + delay, i, other, Some(heartbeat)));
                }
            }
        }
    }

    /// The peer answers a replica.
    pub(super) fn heard(&mut self, replica: u8) {
        let now = self.now;
        self.replicas.get_mut(&replica).unwrap().set_heard(now);
    }

    pub(super) fn run(&mut self, millis: u32) {
        (0..millis.div_ceil(STEP)).for_each(|_| self.step());
    }

    pub(super) fn active(&self) -> Vec<u8> {
        let all = self.replicas.iter();
        all.filter(|(_, of)| of.role() == Role::Active).map(|(i, _)| *i).collect()
    }

    /// Milliseconds until exactly these have the tunnel.
    pub(super) fn until_active(&mut self, expected: &[u8]) -> u32 {
        for steps in 0..2000 {
            if self.active() == expected {
                return steps * STEP;
            }
            self.step();
        }
        panic!("seed {}: {:?} have the tunnel; expected {expected:?}", self.seed, self.active());
    }
}
