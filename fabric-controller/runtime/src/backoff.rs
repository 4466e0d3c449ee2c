use std::future::pending;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Exponential backoff: each failure in a row doubles the wait, up to a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    pub const fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, failures: 0 }
    }

    /// Counts a failure and returns the time to wait before the next try.
    pub fn failed(&mut self) -> Duration {
        let wait = self.max.min(self.min * 2_u32.saturating_pow(self.failures.min(16)));
        self.failures = self.failures.saturating_add(1);
        wait
    }

    /// Failures since the last success.
    pub fn failures(self) -> u32 {
        self.failures
    }

    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Returns a random time between half of `wait` and all of it, so that what failed together is not tried
/// together again.
pub fn jittered(wait: Duration) -> Duration {
    wait.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Sleeps until then; without a time, for ever.
pub async fn until(at: Option<impl Into<Instant>>) {
    match at {
        Some(at) => sleep_until(at.into()).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_their_bound_until_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
        let waits: Vec<_> = (0..7).map(|_| backoff.failed().as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(backoff.failures(), 7);
        backoff.reset();
        assert_eq!((backoff.failures(), backoff.failed().as_millis()), (0, 100));
    }

    #[test]
    fn jitter_shortens_by_half_at_most() {
        let wait = Duration::from_secs(1);
        assert!((0..100).map(|_| jittered(wait)).all(|some| some <= wait && some >= wait / 2));
    }
}
