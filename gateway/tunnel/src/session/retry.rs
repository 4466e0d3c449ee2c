use std::time::{Duration, Instant};

use crate::UdpPath;
use crate::random::Random;

/// Between two attempts: a deviation from WireGuard's REKEY_TIMEOUT of 5 s, so that a way that is
/// back is used within two seconds, however long it was cut. It costs 148 bytes a second until then.
const ATTEMPTS: Duration = Duration::from_secs(1);
/// WireGuard's REKEY_TIMEOUT.
const INTERVAL: Duration = Duration::from_secs(5);

/// WireGuard's REKEY_ATTEMPT_TIME, after which packets have waited for long enough.
const ATTEMPT_TIME: Duration = Duration::from_secs(90);

/// With a cookie just got, the next attempt comes sooner, but not before an answer to the last one
/// that was merely slow. Once in [`INTERVAL`], so that nobody makes us talk by sending cookies.
const WITH_COOKIE: Duration = Duration::from_millis(100);

/// WireGuard's jitter (whitepaper section 6.1), so that two ends do not initiate in step.
const MAX_JITTER_MS: u64 = 333;

/// Schedule of handshake attempts.
pub(super) struct Retry {
    due: Option<Instant>,
    interval: Duration,
    /// No row has shorter intervals than [`INTERVAL`].
    is_slow: bool,
    hurried: Option<Instant>,
    /// An attempt of this row has waited for a handshake of the other side.
    held_off: bool,
    /// Start of the present row of attempts, or of its last [`ATTEMPT_TIME`].
    began: Option<Instant>,
    /// The next attempt leaves from the address that the kernel chooses. Every other one does: the source of
    /// packets so far may be the cause of no answer.
    pub(super) is_rerouted: bool,
    /// The last attempt did.
    was_rerouted: bool,
    random: Random,
}

impl Retry {
    pub(super) fn new(seed: u64) -> Self {
        let random = Random::new(seed);
        Self {
            due: None,
            interval: ATTEMPTS,
            is_slow: false,
            hurried: None,
            held_off: false,
            began: None,
            is_rerouted: false,
            was_rerouted: false,
            random,
        }
    }

    /// Returns the path of the next attempt.
    pub(super) fn path(&self, path: UdpPath) -> UdpPath {
        if self.is_rerouted { path.rerouted() } else { path }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The first attempt of a row is due at once.
    pub(super) fn start(&mut self, now: Instant) {
        self.begin_row(now, ATTEMPTS);
    }

    /// The same for a reason that anybody may have made up.
    pub(super) fn start_slowly(&mut self, now: Instant) {
        self.begin_row(now, INTERVAL);
    }

    /// Sets whether all attempts are made at WireGuard's own pace, those of the present row included.
    pub(super) fn set_slow(&mut self, is_slow: bool, now: Instant) {
        self.is_slow = is_slow;
        self.interval = if is_slow { INTERVAL } else { ATTEMPTS };
        let delayed = |due: Instant| match is_slow {
            true => now + INTERVAL,
            false => due.min(now + ATTEMPTS),
        };
        self.due = self.due.map(delayed);
    }

    fn begin_row(&mut self, now: Instant, interval: Duration) {
        let interval = if self.is_slow { INTERVAL } else { interval };
        (self.due, self.interval, self.held_off) = (Some(now), interval, false);
    }

    pub(super) fn stop(&mut self) {
        self.due = None;
        self.began = None;
        self.is_rerouted = false;
    }

    /// Returns whether attempts have been made in vain for [`ATTEMPT_TIME`], and begins to count anew.
    pub(super) fn has_failed(&mut self, now: Instant) -> bool {
        let has_failed = self.fails_at().is_some_and(|at| now >= at);
        if has_failed {
            self.began = Some(now);
        }
        has_failed
    }

    /// Time at which something is due: an attempt, or to give up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.fails_at()).min()
    }

    fn fails_at(&self) -> Option<Instant> {
        self.began.map(|since| since + ATTEMPT_TIME)
    }

    pub(super) fn note_attempt(&mut self, now: Instant) {
        self.due = Some(now + self.interval + self.jitter());
        self.began.get_or_insert(now);
        self.was_rerouted = self.is_rerouted;
        self.is_rerouted = !self.was_rerouted;
    }

    /// The next attempt will be listened to, from the same source.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.is_rerouted = self.was_rerouted;
        let may = self.hurried.is_none_or(|last| now >= last + INTERVAL);
        if let Some(due) = self.due.filter(|_| may) {
            self.due = Some(due.min(now + WITH_COOKIE));
            self.hurried = Some(now);
        }
    }

    /// The other side's handshake is on its way: ours waits for it to fail. Once in a row of attempts,
    /// since its initiation may be a recorded one.
    pub(super) fn hold_off(&mut self, now: Instant) {
        if self.due.is_some() && !std::mem::replace(&mut self.held_off, true) {
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
    fn attempts_come_every_second_with_jitter() {
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
    fn slow_attempts_come_every_five_seconds() {
        let mut now = Instant::now();
        let mut retry = Retry::new(7);
        retry.start(now);
        retry.note_attempt(now);
        retry.set_slow(true, now);
        assert_eq!(retry.due(), Some(now + INTERVAL), "the row that runs");
        retry.stop();
        retry.set_slow(true, now);
        assert_eq!(retry.due(), None);
        retry.start(now);
        for _ in 0..5 {
            retry.note_attempt(now);
            let gap = retry.due().unwrap() - now;
            assert!((5000..=5333).contains(&gap.as_millis()), "{gap:?}");
            now += gap;
        }
        retry.note_attempt(now);
        retry.set_slow(false, now);
        assert_eq!(retry.due(), Some(now + ATTEMPTS));
        retry.note_attempt(now);
        assert!(retry.due().unwrap() - now < INTERVAL);
    }

    #[test]
    fn row_of_attempts_is_held_off_once() {
        let now = Instant::now();
        let mut retry = Retry::new(9);
        retry.start(now);
        retry.hold_off(now);
        let held = retry.due();
        assert!(held >= Some(now + INTERVAL));
        retry.hold_off(now + INTERVAL / 2);
        assert_eq!(retry.due(), held);
        retry.start(now);
        retry.hold_off(now);
        assert!(retry.due() >= Some(now + INTERVAL));
    }

    #[test]
    fn attempt_with_cookie_keeps_its_source() {
        let now = Instant::now();
        let mut retry = Retry::new(6);
        retry.start(now);
        for is_rerouted in [true, false] {
            retry.note_attempt(now);
            assert_eq!(retry.is_rerouted, is_rerouted);
            // The reply may come twice.
            (0..2).for_each(|_| retry.hurry(now));
            assert_eq!(retry.is_rerouted, !is_rerouted);
            retry.note_attempt(now);
        }
    }

    #[test]
    fn attempts_fail_every_ninety_seconds() {
        let start = Instant::now();
        let mut retry = Retry::new(8);
        retry.start(start);
        assert!(!retry.has_failed(start + ATTEMPT_TIME), "nothing was tried");
        retry.note_attempt(start);
        let mut now = start;
        for _ in 0..3 {
            retry.note_attempt(now + ATTEMPT_TIME / 2);
            now += ATTEMPT_TIME;
            assert!(!retry.has_failed(now - Duration::from_nanos(1)));
            assert!(retry.has_failed(now));
        }
        retry.stop();
        assert!(!retry.has_failed(now + ATTEMPT_TIME));
        assert_eq!(retry.deadline(), None);
    }
}
