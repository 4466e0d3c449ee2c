//! Detection of a path on which trains vanish: segmented sends (`UDP_SEGMENT`) that the kernel
//! takes, and that never arrive, while single datagrams of the same size do.
//!
//! A round is one train of two datagrams and one single datagram behind it. A round whose train is
//! answered clears the path; one of which only the single datagram is answered counts against it;
//! one without any answer proves nothing, so that a cut is not taken for this.

use std::time::{Duration, Instant};

/// Time between two rounds while large packets are sent and trains arrive: 900 B/s.
const INTERVAL: Duration = Duration::from_secs(5);
/// Time for the answers of a round.
const WAIT: Duration = Duration::from_secs(1);
/// Rounds in a row whose trains vanish before segmentation is switched off.
const MAX_LOST: u32 = 5;
/// Time until trains are tried again, doubled by each failure.
const MIN_PAUSE: Duration = Duration::from_secs(60);
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// First nonce of trains; those of sizes are below.
const NONCES: u32 = 1 << 31;

/// Nonces of the datagrams of one round, all of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    pub train: [u32; 2],
    pub single: u32,
}

/// Trains on the path to one peer.
#[derive(Debug)]
pub struct TrainCheck {
    state: State,
    nonce: u32,
    /// Rounds in a row whose trains vanished.
    lost: u32,
    /// Large packets sent before the last round.
    large: u64,
    next: Instant,
    /// Pause before the next try while segmentation is off.
    pause: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Waiting,
    Sent { round: Round, until: Instant, single_arrived: bool },
}

impl TrainCheck {
    pub fn new(now: Instant) -> Self {
        Self { state: State::Waiting, nonce: 0, lost: 0, large: 0, next: now, pause: None }
    }

    /// True if segmented sends may be used.
    pub fn may_segment(&self) -> bool {
        self.pause.is_none()
    }

    pub fn is_nonce(nonce: u32) -> bool {
        nonce >= NONCES
    }

    /// Deadline of the next [`Self::poll`] without new large packets.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Sent { until, .. } => Some(until),
            State::Waiting => (self.lost > 0 || self.pause.is_some()).then_some(self.next),
        }
    }

    /// Ends a round that is over and begins one that is due. `large` counts large packets sent.
    pub fn poll(&mut self, large: u64, now: Instant) -> Option<Round> {
        if let State::Sent { until, single_arrived, .. } = self.state {
            if now < until {
                return None;
            }
            self.end_round(single_arrived, now);
        }
        let is_wanted = large != self.large || self.lost > 0 || self.pause.is_some();
        if now < self.next || !is_wanted {
            return None;
        }
        self.large = large;
        let round = Round { train: [self.nonce(), self.nonce()], single: self.nonce() };
        self.state = State::Sent { round, until: now + WAIT, single_arrived: false };
        Some(round)
    }

    /// A datagram of a round came back.
    pub fn handle_answer(&mut self, nonce: u32, now: Instant) {
        let State::Sent { round, single_arrived, .. } = &mut self.state else { return };
        *single_arrived |= nonce == round.single;
        if round.train.contains(&nonce) {
            *self = Self { nonce: self.nonce, large: self.large, ..Self::new(now + INTERVAL) };
        }
    }

    fn end_round(&mut self, single_arrived: bool, now: Instant) {
        self.state = State::Waiting;
        self.lost += u32::from(single_arrived);
        self.next = now;
        if self.lost >= MAX_LOST || self.pause.is_some() {
            let pause = self.pause.map_or(MIN_PAUSE, |pause| (pause * 2).min(MAX_PAUSE));
            (self.lost, self.pause, self.next) = (0, Some(pause), now + pause);
        }
    }

    fn nonce(&mut self) -> u32 {
        self.nonce = (self.nonce + 1) % NONCES;
        NONCES + self.nonce
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sim {
        check: TrainCheck,
        now: Instant,
        large: u64,
        rounds: u32,
    }

    impl Sim {
        fn new() -> Self {
            let now = Instant::now();
            Self { check: TrainCheck::new(now), now, large: 0, rounds: 0 }
        }

        /// Large packets all the time; whether trains and single datagrams arrive.
        fn run(&mut self, time: Duration, (trains, singles): (bool, bool)) {
            let end = self.now + time;
            while self.now < end {
                self.large += 1;
                if let Some(round) = self.check.poll(self.large, self.now) {
                    self.rounds += 1;
                    if singles {
                        self.check.handle_answer(round.single, self.now);
                    }
                    if trains {
                        self.check.handle_answer(round.train[1], self.now);
                    }
                }
                self.now += Duration::from_millis(100);
            }
        }
    }

    #[test]
    fn trains_that_vanish_switch_segmentation_off() {
        let mut sim = Sim::new();
        sim.run(Duration::from_secs(60), (true, true));
        assert!(sim.check.may_segment());
        assert!((12..=13).contains(&sim.rounds), "{} rounds a minute", sim.rounds);
        sim.run(Duration::from_secs(12), (false, true));
        assert!(!sim.check.may_segment());
    }

    #[test]
    fn cut_is_not_taken_for_vanishing_trains() {
        let mut sim = Sim::new();
        sim.run(Duration::from_secs(600), (false, false));
        assert!(sim.check.may_segment());
    }

    #[test]
    fn segmentation_is_tried_again_less_and_less_often() {
        let mut sim = Sim::new();
        sim.run(Duration::from_secs(10), (false, true));
        sim.rounds = 0;
        sim.run(Duration::from_secs(4 * 3600), (false, true));
        assert!((6..=10).contains(&sim.rounds), "{} tries in four hours", sim.rounds);
        sim.run(Duration::from_secs(3700), (true, true));
        assert!(sim.check.may_segment(), "on again once trains arrive");
    }

    #[test]
    fn idle_path_is_not_checked() {
        let mut check = TrainCheck::new(Instant::now());
        assert_eq!(check.deadline(), None);
        assert_eq!(check.poll(0, Instant::now() + INTERVAL), None);
    }
}
