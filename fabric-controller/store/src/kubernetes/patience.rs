//! Backoff before a watch that failed is tried again.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

const SHORTEST: Duration = Duration::from_millis(100);
/// Longest wait for an API server that is away: it may be back any moment.
const LONGEST: Duration = Duration::from_secs(2);
/// Longest wait for one that refuses: a user has to change something.
const LONGEST_REFUSED: Duration = Duration::from_secs(10);
/// Time without a failure after which earlier failures no longer count.
const FORGET: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct Patience {
    failures: u32,
    last: Option<Instant>,
    until: Option<Instant>,
}

impl Patience {
    /// Returns when the next try is due.
    pub(super) async fn rest(&mut self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
            self.until = None;
        }
    }

    /// Gives how often it failed in a row.
    pub(super) fn failed(&mut self, refused: bool) -> u32 {
        let now = Instant::now();
        if self.last.replace(now).is_some_and(|last| now.duration_since(last) > FORGET) {
            self.failures = 0;
        }
        let longest = if refused { LONGEST_REFUSED } else { LONGEST };
        let wait = longest.min(SHORTEST * 2_u32.saturating_pow(self.failures.min(16)));
        self.failures += 1;
        // Those that were cut off together do not come back together.
        self.until = Some(now + wait.mul_f64(0.5 + fastrand::f64() / 2.0));
        self.failures
    }

    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_grow_to_their_bound_and_begin_anew_after_a_success() {
        let mut patience = Patience::default();
        for (refused, longest) in [(false, LONGEST), (true, LONGEST_REFUSED)] {
            patience.succeeded();
            let mut waits = Vec::new();
            for _ in 0..12 {
                let began = Instant::now();
                patience.failed(refused);
                patience.rest().await;
                waits.push(began.elapsed());
            }
            assert!(waits[0] <= SHORTEST && waits[0] >= SHORTEST / 2, "{waits:?}");
            assert!(waits[11] <= longest && waits[11] >= longest / 2, "{waits:?}");
        }
        patience.succeeded();
        assert_eq!(patience.failed(false), 1);
    }
}
