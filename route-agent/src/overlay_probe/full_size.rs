//! Probes as large as the packets that pods send: a way may carry small ones only. Knows no socket and no clock.
//!
//! Each turn has one beside the small ones. While the gateway answers small ones, further tries follow at once;
//! each turn tries again until one is answered.

use std::time::{Duration, Instant};

/// Time after which an unanswered probe is lost.
const ANSWER_TIME: Duration = Duration::from_millis(200);
/// Time after which it is looked at again if small ones are unanswered, too.
const LOOK: Duration = Duration::from_millis(100);
/// Lost ones in a row that make a fault: with 20 % of all probes lost, it is one of 15,000 turns by chance.
const MAX_LOST: u32 = 6;

/// Probes of full size since the last one that was answered.
#[derive(Debug, Default)]
pub(super) struct FullSize {
    /// Nonce and time of the first one.
    first: Option<(u64, Instant)>,
    /// Time at which the last one is lost.
    due: Option<Instant>,
    lost: u32,
}

impl FullSize {
    pub(super) fn handle_sent(&mut self, nonce: u64, now: Instant) {
        self.first.get_or_insert((nonce, now));
        self.due = Some(now + ANSWER_TIME);
    }

    /// Takes in a reply of full size.
    pub(super) fn handle_reply(&mut self, nonce: u64) {
        if self.first.is_some_and(|(first, _)| nonce >= first) {
            *self = Self::default();
        }
    }

    /// Deadline of the next [`Self::poll`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Time passed, and small probes are answered or not. Returns whether another one is due.
    pub(super) fn poll(&mut self, is_answering: bool, now: Instant) -> bool {
        if self.due.is_none_or(|due| now < due) {
            return false;
        }
        self.due = (!is_answering).then_some(now + LOOK);
        self.lost = self.lost.saturating_add(u32::from(is_answering));
        is_answering && self.lost < MAX_LOST
    }

    /// Time of the first one, if so many are lost that it is no chance.
    pub(super) fn lost_since(&self) -> Option<Instant> {
        self.first.map(|(_, sent)| sent).filter(|_| self.lost >= MAX_LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends so many probes that stay unanswered. Returns the time after.
    fn lose(full_size: &mut FullSize, count: u64, is_answering: bool) -> Instant {
        let mut now = Instant::now();
        for nonce in 0..count {
            full_size.handle_sent(nonce, now);
            assert!(!full_size.poll(is_answering, now));
            now += ANSWER_TIME;
            let is_next_due = full_size.poll(is_answering, now);
            assert_eq!(is_next_due, is_answering && nonce + 1 < MAX_LOST.into(), "{nonce}");
        }
        now
    }

    #[test]
    fn six_lost_in_a_row_are_a_fault_until_one_passes() {
        let mut full_size = FullSize::default();
        let began = lose(&mut full_size, 6, true) - 6 * ANSWER_TIME;
        assert_eq!(full_size.lost_since(), Some(began));
        full_size.handle_reply(3);
        assert_eq!(full_size.lost_since(), None);
        lose(&mut full_size, 5, true);
        assert_eq!(full_size.lost_since(), None);
    }

    #[test]
    fn gateway_without_any_answer_has_no_fault_of_size() {
        let mut full_size = FullSize::default();
        let mut now = lose(&mut full_size, 20, false);
        assert_eq!(full_size.lost_since(), None);
        now += LOOK;
        assert!(full_size.poll(true, now), "small ones are answered again");
    }
}
