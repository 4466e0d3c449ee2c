//! Search for the successor of a server that has announced its end.
//!
//! In Kubernetes a Service leads to it, as soon as the nodes know, and connection tracking on the
//! way may lead to the old one for longer: hence another source port each second. WireGuard itself
//! would retry after 15 s (KEEPALIVE_TIMEOUT and REKEY_TIMEOUT, whitepaper section 6.5).

use std::time::{Duration, Instant};

/// The old one might still answer before.
const FIRST: Duration = Duration::from_millis(250);
const NEXT: Duration = Duration::from_secs(1);
const SEARCH_TIMEOUT: Duration = Duration::from_secs(15);

pub(super) struct Search {
    began: Instant,
    due: Instant,
    asked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Begin a handshake.
    Ask,
    /// Begin one from another source port.
    GoElsewhere,
    GiveUp,
}

impl Search {
    pub(super) fn new(now: Instant) -> Self {
        Self { began: now, due: now + FIRST, asked: false }
    }

    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Returns the step that is due at `now`.
    pub(super) fn step(&mut self, now: Instant) -> Option<Step> {
        if now < self.due {
            return None;
        }
        self.due = now + NEXT;
        let asked = std::mem::replace(&mut self.asked, true);
        Some(match now.saturating_duration_since(self.began) {
            long if long >= SEARCH_TIMEOUT => Step::GiveUp,
            _ if asked => Step::GoElsewhere,
            _ => Step::Ask,
        })
    }

    /// Returns whether a handshake that was completed at `now` was the successor's.
    pub(super) fn ends_with(&self, now: Instant) -> bool {
        now >= self.began + FIRST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successor_is_searched_at_old_endpoint_first() {
        let began = Instant::now();
        let mut search = Search::new(began);
        assert_eq!(search.step(began), None);
        assert!(!search.ends_with(began + FIRST / 2), "the old one's answer");
        assert_eq!(search.step(search.due()), Some(Step::Ask));
        assert!(search.ends_with(began + FIRST));
        let mut steps = Vec::new();
        while steps.last() != Some(&Step::GiveUp) {
            assert_eq!(search.step(search.due() - NEXT / 2), None);
            steps.extend(search.step(search.due()));
        }
        assert_eq!(steps.len(), 15);
        assert!(steps[..14].iter().all(|step| *step == Step::GoElsewhere));
    }
}
