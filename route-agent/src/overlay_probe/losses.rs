//! Share of probes that a gateway leaves unanswered, of the latest ones. Knows no socket and no clock.
//!
//! ```text
//!   Calm --a probe is overdue, one not older answered--> Burst --many lost--> Lossy
//!     ^------------------- few lost ----------------------+ ^---- none lost ----+
//! ```
//!
//! Without any answer it stays calm: that gateway is unreachable, which the prober itself notices. `outages`
//! finds loss that a burst is too short for.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time after which an unanswered probe begins a burst, from the first answer on to one that was sent no earlier.
const OVERDUE: Duration = Duration::from_millis(100);
/// Time after which an unanswered probe of a burst is lost: three times that of the slowest answer of late, within
/// these bounds.
const MIN_ANSWER_TIME: Duration = Duration::from_millis(300);
const MAX_ANSWER_TIME: Duration = Duration::from_secs(2);
/// Between two probes of a burst, and while probes are lost.
const BURST_INTERVAL: Duration = Duration::from_millis(25);
const LOSSY_INTERVAL: Duration = Duration::from_millis(50);
/// The same after some time, until so many answers in a row may be the end of the loss: an overloaded link or
/// gateway gets no better by probes.
const SETTLED_INTERVAL: Duration = Duration::from_millis(200);
const SETTLED: Duration = Duration::from_secs(10);
const PROMISING: usize = 4;
/// Probes of a burst, and those that a share is computed of.
const WINDOW: usize = 20;
const LONG_WINDOW: usize = 60;
/// Probes in a row that end a loss, if none is lost.
const UNBROKEN: usize = 30;
/// Separate gaps that make a loss: a single one is a pause, as of a gateway that restarts.
const MIN_GAPS: usize = 2;
/// Lost probes of a burst that make one. Where two of a hundred packets are lost, one burst of 1,600 has so many.
const MIN_LOST: usize = 4;
/// Shortest time between two changes of a reported share.
const STEADY: Duration = Duration::from_secs(10);

/// Results of the latest probes.
#[derive(Debug, Default)]
pub(super) struct Losses {
    samples: VecDeque<Sample>,
    burst: Option<Burst>,
    loss: Option<Loss>,
    /// Time that the slowest answer took, halved with each turn.
    slowest: Duration,
}

/// A share that is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    /// In steps of ten.
    pub(super) percent: u8,
    /// Time at which the first of the probes was lost.
    pub(super) since: Instant,
    pub(super) changed: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    nonce: u64,
    sent: Instant,
    answered: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    /// Time at which the probe that began it was sent.
    since: Instant,
    sent: usize,
    next_at: Instant,
}

impl Sample {
    fn is_answered(&self) -> bool {
        self.answered.is_some()
    }
}

impl Losses {
    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss
    }

    /// The next probe is that of a turn.
    pub(super) fn begin_turn(&mut self) {
        self.slowest /= 2;
    }

    pub(super) fn handle_sent(&mut self, nonce: u64, now: Instant) {
        if self.samples.len() == LONG_WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { nonce, sent: now, answered: None });
    }

    pub(super) fn handle_reply(&mut self, nonce: u64, now: Instant) {
        if let Some(sample) = self.samples.iter_mut().find(|sample| sample.nonce == nonce) {
            sample.answered = Some(now);
            self.slowest = self.slowest.max(now - sample.sent);
        }
    }

    /// Deadline of the next [`Self::poll`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.burst {
            Some(burst) => Some(burst.next_at),
            None => self.gap().map(|(_, due)| due),
        }
    }

    /// Time at which what is measured now began.
    pub(super) fn measured_since(&self) -> Option<Instant> {
        self.burst.map(|burst| burst.since)
    }

    /// Another gateway measures the same.
    pub(super) fn forget(&mut self) {
        (self.burst, self.loss) = (None, None);
        self.samples.clear();
    }

    /// Time passed. Returns whether a probe of a burst is due.
    pub(super) fn poll(&mut self, now: Instant) -> bool {
        let Some(mut burst) = self.burst else {
            let gap = self.gap().filter(|(_, due)| *due <= now);
            let Some((since, _)) = gap else { return false };
            // Earlier losses may be those of a pause.
            self.samples.clear();
            self.burst = Some(Burst { since, sent: 1, next_at: now + BURST_INTERVAL });
            return true;
        };
        if now < burst.next_at {
            return false;
        }
        self.measure(burst.since, now);
        if self.loss.is_none() && burst.sent >= WINDOW && !self.is_undecided(now) {
            self.burst = None;
            self.samples.clear();
            return false;
        }
        let is_due = self.loss.is_some() || burst.sent < WINDOW;
        burst.sent += usize::from(is_due);
        let interval = match self.loss {
            None => BURST_INTERVAL,
            Some(loss) if now - loss.since > SETTLED && !self.is_promising(now) => SETTLED_INTERVAL,
            Some(_) => LOSSY_INTERVAL,
        };
        self.burst = Some(Burst { next_at: now + interval, ..burst });
        is_due
    }

    /// Time at which the first unanswered probe was sent, of those sent no later than an answered one, and at which it
    /// is overdue.
    fn gap(&self) -> Option<(Instant, Instant)> {
        let last = self.samples.iter().rfind(|sample| sample.is_answered())?;
        let is_gap = |sample: &&Sample| !sample.is_answered() && sample.sent <= last.sent;
        let sent = self.samples.iter().find(is_gap)?.sent;
        let not_older = self.samples.iter().filter(|sample| sample.sent >= sent);
        let first_answer = not_older.filter_map(|sample| sample.answered).min()?;
        Some((sent, first_answer + OVERDUE))
    }

    /// The latest probes are answered, but for those of the last moment.
    fn is_promising(&self, now: Instant) -> bool {
        let is_open = |of: &&Sample| !of.is_answered() && now < of.sent + self.answer_time();
        let decided = self.samples.iter().rev().skip_while(is_open);
        decided.take(PROMISING).all(|sample| sample.is_answered())
    }

    fn is_undecided(&self, now: Instant) -> bool {
        let answer_time = self.answer_time();
        self.samples.iter().any(|sample| !sample.is_answered() && now < sample.sent + answer_time)
    }

    /// Longest time that an answer takes, by those of late.
    pub(super) fn answer_time(&self) -> Duration {
        (3 * self.slowest).clamp(MIN_ANSWER_TIME, MAX_ANSWER_TIME)
    }

    fn measure(&mut self, began: Instant, now: Instant) {
        let answer_time = self.answer_time();
        let is_decided =
            |sample: &&Sample| sample.is_answered() || now >= sample.sent + answer_time;
        let answers: Vec<bool> =
            self.samples.iter().filter(is_decided).map(|sample| sample.is_answered()).collect();
        let latest = |count: usize| &answers[answers.len().saturating_sub(count)..];
        let recent = latest(WINDOW);
        let lost = |of: &[bool]| of.iter().filter(|is_answered| !**is_answered).count();
        let gaps = recent.windows(2).filter(|pair| pair[0] && !pair[1]).count();
        let is_lossy = match self.loss {
            // An outage by itself is no loss, and ends none.
            before if lost(recent) == recent.len() => before.is_some(),
            Some(_) => lost(latest(UNBROKEN)) > 0,
            None => lost(recent) >= MIN_LOST && gaps >= MIN_GAPS,
        };
        let share = lost(&answers) * 100 / answers.len().max(1);
        let percent = u8::try_from((share + 5) / 10 * 10).unwrap_or(100).max(10);
        self.loss = match self.loss {
            _ if !is_lossy => None,
            Some(loss) if loss.percent.abs_diff(percent) < 20 => Some(loss),
            Some(loss) if now < loss.changed + STEADY => Some(loss),
            before => {
                let since = before.map_or(began, |loss| loss.since);
                Some(Loss { percent, since, changed: now })
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);
    const TURN: Duration = Duration::from_secs(1);
    /// Probes of a turn.
    const TRAIN: usize = crate::overlay_probe::prober::TRAIN;

    /// A clock, turns of a second, and a gateway that answers at once.
    struct World {
        start: Instant,
        now: Instant,
        turn_at: Instant,
        losses: Losses,
        nonce: u64,
        random: u64,
        sent: usize,
    }

    impl World {
        fn new(seed: u64) -> Self {
            let start = Instant::now();
            let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let losses = Losses::default();
            Self { start, now: start, turn_at: start, losses, nonce: 0, random, sent: 0 }
        }

        /// Lets time pass, in which so many of 100 probes are lost.
        fn pass(&mut self, millis: u32, percent: u64) {
            let end = self.now + millis * MILLI;
            loop {
                let due = self.losses.deadline().map_or(self.turn_at, |at| at.min(self.turn_at));
                if due > end {
                    break;
                }
                self.now = self.now.max(due);
                let is_turn = self.turn_at <= self.now;
                if is_turn {
                    self.turn_at += TURN;
                }
                let count = if is_turn { TRAIN } else { usize::from(self.losses.poll(self.now)) };
                (0..count).for_each(|_| self.send(percent));
            }
            self.now = end;
        }

        fn send(&mut self, percent: u64) {
            (self.nonce, self.sent) = (self.nonce + 1, self.sent + 1);
            self.losses.handle_sent(self.nonce, self.now);
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            if self.random % 100 >= percent {
                self.losses.handle_reply(self.nonce, self.now);
            }
        }

        fn percent(&self) -> Option<u8> {
            self.losses.loss().map(|loss| loss.percent)
        }
    }

    #[test]
    fn reported_share_is_near_the_real_one_and_steady() {
        for seed in 0..50 {
            let mut world = World::new(seed);
            world.pass(10_000, 40);
            let mut shares = Vec::new();
            for _ in 0..600 {
                world.pass(100, 40);
                shares.push(world.percent());
            }
            let named: Vec<u8> = shares.iter().flatten().copied().collect();
            assert_eq!(named.len(), shares.len(), "seed {seed}");
            assert!(named.iter().all(|percent| (20..=70).contains(percent)), "{named:?}");
            let changes = named.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(changes <= 6, "seed {seed}: {changes} changes in a minute");
        }
    }

    #[test]
    fn loss_that_ends_is_solved_in_two_seconds() {
        for seed in 0..100 {
            let mut world = World::new(seed);
            world.pass(10_000, 40);
            world.pass(2200, 0);
            assert_eq!(world.percent(), None, "seed {seed}");
            world.pass(1000, 0);
            world.sent = 0;
            world.pass(10_000, 0);
            assert_eq!(world.sent, 10 * TRAIN, "seed {seed}: only turns");
        }
    }

    #[test]
    fn loss_that_lasts_is_probed_less_often() {
        for seed in 0..100 {
            let mut world = World::new(seed);
            world.pass(20_000, 40);
            world.sent = 0;
            world.pass(60_000, 40);
            assert!((600..900).contains(&world.sent), "seed {seed}: {} in a minute", world.sent);
            world.pass(3000, 0);
            assert_eq!(world.percent(), None, "seed {seed}");
        }
    }

    #[test]
    fn probes_lost_now_and_then_are_no_fault() {
        let mut world = World::new(1);
        for _ in 0..3600 {
            world.pass(1000, 1);
            assert_eq!(world.percent(), None, "{:?}", world.now - world.start);
        }
    }

    #[test]
    fn pauses_are_no_loss() {
        for pause in [10, 100, 300, 700, 1500] {
            let mut world = World::new(1);
            for _ in 0..30 {
                world.pass(2001, 0);
                world.pass(pause, 100);
                assert_eq!(world.percent(), None, "{pause} ms");
            }
        }
    }

    /// Steps of a minute at which a loss is reported, and probes, with answers after `delay` and up to so many
    /// milliseconds more.
    fn delayed(delay: u64, jitter: u64) -> (usize, usize) {
        let mut world = World::new(1);
        let (mut due, mut reported) = (Vec::new(), 0);
        for step in 0..60_000_u64 {
            world.now += MILLI;
            let is_turn = step % 1000 == 0;
            if is_turn {
                world.losses.begin_turn();
            }
            let is_burst = world.losses.poll(world.now);
            let count = if is_turn { TRAIN } else { usize::from(is_burst) };
            for _ in 0..count {
                world.send(100);
                due.push((step + delay + world.random % jitter, world.nonce));
            }
            for (_, nonce) in due.extract_if(.., |(at, _)| *at <= step) {
                world.losses.handle_reply(nonce, world.now);
            }
            reported += usize::from(world.percent().is_some());
        }
        (reported, world.sent)
    }

    #[test]
    fn answers_of_any_delay_up_to_a_second_are_no_loss() {
        assert_eq!(delayed(50, 850).0, 0, "of 60,000");
    }

    #[test]
    fn answers_that_are_late_together_begin_no_burst() {
        assert_eq!(delayed(110, 30), (0, 60 * TRAIN));
    }

    #[test]
    fn late_answer_is_no_loss() {
        let mut world = World::new(1);
        world.pass(500, 0);
        for _ in 0..100 {
            let first = world.nonce + 1;
            for _ in 0..4 {
                world.send(100);
            }
            world.losses.handle_reply(first + 3, world.now);
            world.now += 150 * MILLI;
            assert!(world.losses.poll(world.now), "a burst begins");
            for _ in 0..WINDOW {
                world.send(100);
                let nonce = world.nonce;
                world.now += BURST_INTERVAL;
                world.losses.poll(world.now);
                world.losses.handle_reply(nonce, world.now);
            }
            world.pass(1000, 0);
            assert_eq!(world.percent(), None);
        }
    }
}
