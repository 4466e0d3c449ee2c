//! The plan that a seed makes of an hour or more.

use crate::random::Random;

pub(crate) const SECOND: u64 = 1_000_000;

/// All times are in microseconds.
pub(crate) struct Plan {
    pub(crate) phases: Vec<Phase>,
    /// Persistent keepalive of each end in seconds.
    pub(crate) keepalives: [Option<u64>; 2],
    /// End 1, too, initiates by itself and knows end 0's first address.
    pub(crate) is_mutual: bool,
}

/// Some minutes in which nothing changes.
#[derive(Clone, Debug)]
pub(crate) struct Phase {
    pub(crate) length: u64,
    /// From end 0 to end 1, and back.
    pub(crate) links: [Link; 2],
    /// Traffic of the hosts behind each end.
    pub(crate) traffic: [Traffic; 2],
    /// The event at the start of the phase.
    pub(crate) event: Option<Event>,
}

/// One way through the network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) delay: u64,
    pub(crate) jitter: u64,
    pub(crate) loss_percent: u64,
    /// Number of datagrams in a row that are lost when one is.
    pub(crate) burst: u64,
    pub(crate) duplicate_percent: u64,
    pub(crate) is_cut: bool,
    /// Largest IP packet in bytes.
    pub(crate) mtu: usize,
}

impl Link {
    /// Returns whether every datagram that fits arrives.
    pub(crate) fn is_good(&self) -> bool {
        self.loss_percent == 0 && !self.is_cut
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Traffic {
    Idle,
    /// A packet after about so many microseconds.
    Steady(u64),
    /// So many packets at once, a burst after about so many microseconds.
    Bursts(u64, u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// An end restarts, with no state but its peer's last endpoint.
    Restart(usize),
    /// End 0 has another address, which no config shows.
    Roam,
    /// End 1 has another address, which is put into end 0's config.
    Move,
    /// An end gets another key; the other's config has it so many microseconds later, or earlier.
    Rotate { end: usize, known_after: i64 },
}

/// Kinds of trouble that a seed may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    /// Delays only.
    Clear,
    /// Reordering and duplicates.
    Gusty,
    /// And loss.
    Rainy,
    /// And cuts, restarts, new addresses.
    Stormy,
}

impl Weather {
    pub(crate) fn of(seed: u64) -> Self {
        [Self::Clear, Self::Gusty, Self::Rainy, Self::Stormy][seed as usize % 4]
    }
}

impl Plan {
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let weather = Weather::of(seed);
        let total = random.between(3600, 5400) * SECOND;
        let mut phases: Vec<Phase> = Vec::new();
        while phases.iter().map(|phase| phase.length).sum::<u64>() < total {
            let is_after_cut = phases.last().is_some_and(|p| p.links.iter().any(|l| l.is_cut));
            phases.push(phase(&mut random, weather, phases.is_empty(), is_after_cut));
        }
        let keepalive = |random: &mut Random| random.pick(&[None, None, Some(25), Some(5)]);
        Self {
            phases,
            keepalives: [keepalive(&mut random), keepalive(&mut random)],
            is_mutual: random.is(50),
        }
    }
}

fn phase(random: &mut Random, weather: Weather, is_first: bool, is_after_cut: bool) -> Phase {
    let is_stormy = weather == Weather::Stormy;
    let is_cut = is_stormy && !is_first && random.is(20);
    let seconds = if is_cut { random.between(1, 300) } else { random.between(20, 700) };
    let is_calm = is_first || is_after_cut || random.is(40);
    let links = [0, 1].map(|_| link(random, if is_calm { Weather::Clear } else { weather }));
    let ways = random.pick(&[[true, true], [true, false], [false, true]]);
    let event = (is_stormy && !is_first && random.is(40)).then(|| event(random));
    Phase {
        length: seconds * SECOND,
        links: [0, 1].map(|way| Link { is_cut: is_cut && ways[way], ..links[way] }),
        traffic: [traffic(random), traffic(random)],
        event,
    }
}

fn link(random: &mut Random, weather: Weather) -> Link {
    let delay = random.between(50, 150_000);
    let is_lossy = matches!(weather, Weather::Rainy | Weather::Stormy) && random.is(70);
    let is_gusty = weather != Weather::Clear;
    Link {
        delay,
        jitter: if is_gusty { random.between(0, 200_000) } else { 0 },
        loss_percent: if is_lossy { random.pick(&[1, 5, 20, 50]) } else { 0 },
        burst: random.pick(&[1, 1, 5, 40]),
        duplicate_percent: if is_gusty { random.pick(&[0, 1, 20]) } else { 0 },
        is_cut: false,
        mtu: if is_lossy && random.is(30) { 1300 } else { 1500 },
    }
}

fn traffic(random: &mut Random) -> Traffic {
    match random.between(0, 3) {
        0 => Traffic::Idle,
        1 => Traffic::Steady(random.between(50_000, 2 * SECOND)),
        2 => Traffic::Steady(random.between(2 * SECOND, 90 * SECOND)),
        _ => Traffic::Bursts(random.between(2, 60), random.between(SECOND, 200 * SECOND)),
    }
}

fn event(random: &mut Random) -> Event {
    match random.between(0, 4) {
        0 => Event::Restart(0),
        1 => Event::Restart(1),
        2 => Event::Roam,
        3 => Event::Move,
        _ => Event::Rotate {
            end: random.next() as usize % 2,
            known_after: random.pick(&[-5, -1, 0, 1, 20, 100]) * SECOND as i64,
        },
    }
}
