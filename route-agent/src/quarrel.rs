use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Keeps the agent from burning a core when another program undoes at once what it does.
#[derive(Debug, Default)]
pub(crate) struct Quarrel {
    /// When something was changed, lately.
    changes: VecDeque<Instant>,
}

/// So many changes within this time are a quarrel.
const MANY: usize = 50;
const WINDOW: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);

impl Quarrel {
    /// Something was changed just now.
    pub(crate) fn note(&mut self) {
        let now = Instant::now();
        self.changes.push_back(now);
        while self.changes.front().is_some_and(|at| now - *at > WINDOW) {
            self.changes.pop_front();
        }
    }

    /// Waits a while if there were too many changes.
    pub(crate) async fn calm_down(&mut self) {
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
    async fn a_quarrel_is_slowed_to_a_few_changes_a_second() {
        let (mut quarrel, start) = (Quarrel::default(), Instant::now());
        for _ in 0..500 {
            quarrel.note();
            quarrel.calm_down().await;
        }
        let took = start.elapsed();
        assert!(took > Duration::from_secs(30), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_now_and_then_waits_for_nothing() {
        let (mut quarrel, start) = (Quarrel::default(), Instant::now());
        for _ in 0..500 {
            quarrel.note();
            quarrel.calm_down().await;
            sleep(Duration::from_millis(300)).await;
        }
        assert_eq!(start.elapsed(), Duration::from_millis(300) * 500);
    }
}
