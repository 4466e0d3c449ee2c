use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Keeps a program from burning a core when another undoes at once what it does.
#[derive(Debug, Default)]
pub struct ChurnLimiter {
    /// Times of recent changes.
    changes: VecDeque<Instant>,
}

/// So many changes within this time are churn.
const MANY: usize = 50;
const WINDOW: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

impl ChurnLimiter {
    /// Something was changed just now.
    pub fn note(&mut self) {
        let now = Instant::now();
        self.changes.push_back(now);
        while self.changes.front().is_some_and(|at| now - *at > WINDOW) {
            self.changes.pop_front();
        }
    }

    /// Waits a second if there were too many changes: 50 within 10 seconds. Can be cancelled, and
    /// then does not wait the next time.
    pub async fn throttle(&mut self) {
        if self.changes.len() >= MANY {
            tracing::warn!("another program keeps undoing what is done here; waiting a second");
            self.changes.drain(..MANY / 10);
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn churn_is_slowed_to_a_few_changes_a_second() {
        let (mut churn_limiter, start) = (ChurnLimiter::default(), Instant::now());
        for _ in 0..500 {
            churn_limiter.note();
            churn_limiter.throttle().await;
        }
        let took = start.elapsed();
        assert!(took > Duration::from_secs(30), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_now_and_then_waits_for_nothing() {
        let (mut churn_limiter, start) = (ChurnLimiter::default(), Instant::now());
        for _ in 0..500 {
            churn_limiter.note();
            churn_limiter.throttle().await;
            sleep(Duration::from_millis(300)).await;
        }
        assert_eq!(start.elapsed(), Duration::from_millis(300) * 500);
    }
}
