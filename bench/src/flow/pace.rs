//! Pauses of a sender that holds a rate.

use std::time::{Duration, Instant};

/// Time that a sender which was late makes up for at most.
const MAX_BACKLOG: Duration = Duration::from_millis(5);
/// Longest pause, after which the sender looks at its switch.
const MAX_PAUSE: Duration = Duration::from_millis(20);

pub(super) struct Pace {
    /// Bits per second; 0 for as many as possible.
    rate: u64,
    /// Time at which what was sent so far should have been.
    due: Instant,
}

impl Pace {
    pub(super) fn new(rate: u64, now: Instant) -> Self {
        Self { rate, due: now }
    }

    /// Time until the next bytes are due; `None` if they are.
    pub(super) fn pause(&mut self, now: Instant) -> Option<Duration> {
        if self.rate == 0 {
            return None;
        }
        self.due = now.checked_sub(MAX_BACKLOG).map_or(self.due, |oldest| self.due.max(oldest));
        let pause = self.due.saturating_duration_since(now).min(MAX_PAUSE);
        (!pause.is_zero()).then_some(pause)
    }

    pub(super) fn record(&mut self, bytes: usize) {
        if self.rate > 0 {
            self.due += Duration::from_secs_f64(bytes as f64 * 8.0 / self.rate as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pause_is_as_long_as_the_bytes_take() {
        let start = Instant::now();
        let mut pace = Pace::new(8_000_000, start);
        assert_eq!(pace.pause(start), None);
        pace.record(3000);
        assert_eq!(pace.pause(start + MS), Some(2 * MS));
        assert_eq!(pace.pause(start + 3 * MS), None);
        assert_eq!(Pace::new(0, start).pause(start), None);
    }

    #[test]
    fn late_sender_makes_up_for_a_bounded_time() {
        let start = Instant::now();
        let mut pace = Pace::new(8_000_000, start);
        let late = start + 100 * MS;
        let mut burst = 0;
        while pace.pause(late).is_none() && burst < 100 {
            pace.record(1000);
            burst += 1;
        }
        // Bytes of the last 5 ms, and those that are due now.
        assert_eq!(burst, 6);
    }
}
