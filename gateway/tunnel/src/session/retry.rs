use std::time::{Duration, Instant};

use crate::random::Random;

/// Between two attempts: a deviation from WireGuard's REKEY_TIMEOUT of 5 s, so that a way that is
/// back is used within two seconds, however long it was cut. It costs 148 bytes a second until then.
const ATTEMPTS: Duration = Duration::from_secs(1);
/// WireGuard's REKEY_TIMEOUT.
const INTERVAL: Duration = Duration::from_secs(5);

/// With a cookie just got, the next attempt comes sooner, but not before an answer to the last one
/// that was merely slow. Once in [`INTERVAL`], so that nobody makes us talk by sending cookies.
const WITH_COOKIE: Duration = Duration::from_millis(100);

/// WireGuard's jitter (whitepaper section 6.1), so that two ends do not initiate in step.
const MAX_JITTER_MS: u64 = 333;

/// When to initiate the next handshake.
pub(super) struct Retry {
    due: Option<Instant>,
    interval: Duration,
    hurried: Option<Instant>,
    /// An answer came too late since the last attempt.
    was_late: bool,
    random: Random,
}

impl Retry {
    pub(super) fn new(seed: u64) -> Self {
        let random = Random::new(seed);
        Self { due: None, interval: ATTEMPTS, hurried: None, was_late: false, random }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The first attempt of a row is due at once.
    pub(super) fn start(&mut self, now: Instant) {
        self.due = Some(now);
        self.interval = ATTEMPTS;
    }

    /// The same for a reason that anybody may have made up.
    pub(super) fn start_slowly(&mut self, now: Instant) {
        self.due = Some(now);
        self.interval = INTERVAL;
    }

    pub(super) fn stop(&mut self) {
        self.due = None;
    }

    pub(super) fn note_attempt(&mut self, now: Instant) {
        self.due = Some(now + self.interval + self.jitter());
        self.was_late = false;
    }

    /// Records an answer to an attempt so long ago that it is of no use any more. Those to the last
    /// ones are on their way and will be, if nothing is added to them. Once an attempt, so that a
    /// sender of forged answers does not keep us from trying.
    pub(super) fn note_late(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.was_late, true) {
            self.hold_off(now);
        }
    }

    /// The next attempt will be listened to.
    pub(super) fn hurry(&mut self, now: Instant) {
        let may = self.hurried.is_none_or(|last| now >= last + INTERVAL);
        if let Some(due) = self.due.filter(|_| may) {
            self.due = Some(due.min(now + WITH_COOKIE));
            self.hurried = Some(now);
        }
    }

    /// The other side's handshake is on its way: ours waits for it to fail.
    pub(super) fn hold_off(&mut self, now: Instant) {
        if self.due.is_some() {
            self.postpone(now);
        }
    }

    /// There is a session. What boringtun still waits for is likely to come.
    pub(super) fn postpone(&mut self, now: Instant) {
        self.due = Some(now + INTERVAL + self.jitter());
    }

    fn jitter(&mut self) -> Duration {
        Duration::from_millis(self.random.next() % (MAX_JITTER_MS + 1))
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
mod tests {
    use super::*;

    #[test]
    fn attempts_come_every_second_with_jitter_for_as_long_as_it_takes() {
        let mut now = Instant::now();
        let mut retry = Retry::new(7);
        retry.start(now);
        assert_eq!(retry.due(), Some(now));
        let mut gaps = Vec::new();
        for _ in 0..20 {
            retry.note_attempt(now);
            let due = retry.due().unwrap();
            gaps.push(due - now);
            now = due;
        }
        assert!(gaps.iter().all(|gap| (1000..=1333).contains(&gap.as_millis())), "{gaps:?}");
        assert!(gaps.windows(2).any(|pair| pair[0] != pair[1]), "no jitter");
    }

    #[test]
    fn answers_that_are_too_late_give_the_next_ones_time_but_once_an_attempt() {
        let mut now = Instant::now();
        let mut retry = Retry::new(8);
        retry.note_late(now);
        assert_eq!(retry.due(), None, "nothing is tried");
        retry.start(now);
        for _ in 0..3 {
            retry.note_attempt(now);
            now += ATTEMPTS / 2;
            retry.note_late(now);
            let due = retry.due().unwrap();
            assert!((5000..=5333).contains(&(due - now).as_millis()));
            retry.note_late(now + INTERVAL / 2);
            assert_eq!(retry.due(), Some(due), "made up to keep us from trying");
            now = due;
        }
    }
}
