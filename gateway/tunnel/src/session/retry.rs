use std::time::{Duration, Instant};

use crate::random::Random;

/// The first attempts after a loss, one a second: a deviation from WireGuard's REKEY_TIMEOUT of 5 s
/// that ends a short outage sooner.
const EARLY_ATTEMPTS: u32 = 10;
const EARLY_INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_secs(5);

/// WireGuard's jitter (whitepaper section 6.1), so that two ends do not initiate in step.
const MAX_JITTER_MS: u64 = 333;

/// When to initiate the next handshake, and how often that was done in vain.
pub(super) struct Retry {
    attempts: u32,
    due: Option<Instant>,
    random: Random,
}

impl Retry {
    pub(super) fn new(seed: u64) -> Self {
        Self { attempts: 0, due: None, random: Random::new(seed) }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The first attempt of a row is due at once.
    pub(super) fn start(&mut self, now: Instant) {
        self.attempts = 0;
        self.due = Some(now);
    }

    pub(super) fn stop(&mut self) {
        self.attempts = 0;
        self.due = None;
    }

    pub(super) fn note_attempt(&mut self, now: Instant) {
        self.attempts += 1;
        let interval = if self.attempts < EARLY_ATTEMPTS { EARLY_INTERVAL } else { INTERVAL };
        self.due = Some(now + interval + self.jitter());
    }

    /// The other side's handshake is on its way: ours waits for it to fail.
    pub(super) fn hold_off(&mut self, now: Instant) {
        if self.due.is_some() {
            self.due = Some(now + INTERVAL + self.jitter());
        }
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
    fn ten_attempts_come_every_second_and_later_ones_every_five_with_jitter() {
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
        let (early, late) = gaps.split_at(EARLY_ATTEMPTS as usize - 1);
        assert!(early.iter().all(|g| (1000..=1333).contains(&g.as_millis())), "{early:?}");
        assert!(late.iter().all(|g| (5000..=5333).contains(&g.as_millis())), "{late:?}");
        assert!(late.windows(2).any(|pair| pair[0] != pair[1]), "no jitter");
    }
}
