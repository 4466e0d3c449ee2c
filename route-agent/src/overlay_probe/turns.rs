//! Loss that is too small or too rare for a burst of probes, as of a link that fails again and again: it shows
//! in the results of many turns. Knows no socket and no clock.

use std::collections::VecDeque;
use std::time::Instant;

/// Turns that a share is computed of.
const WINDOW: usize = 30;
/// Separate gaps, and turns in all, that make a loss.
const MIN_GAPS: usize = 3;
const MIN_LOST: usize = 4;
/// Turns without loss that end it.
const CLEAN: usize = 8;

/// Results of the latest turns.
#[derive(Debug, Default)]
pub(super) struct Turns {
    turns: VecDeque<Turn>,
    loss: Option<(u8, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    nonce: u64,
    sent: Instant,
    is_answered: bool,
}

impl Turns {
    /// Share of lost probes in percent, and the time at which the first of them was sent.
    pub(super) fn loss(&self) -> Option<(u8, Instant)> {
        self.loss
    }

    /// The next probe, of this nonce, is that of a turn; the answer to that of the turn before had its time.
    pub(super) fn begin(&mut self, nonce: u64, now: Instant) {
        self.measure();
        if self.turns.len() == WINDOW {
            self.turns.pop_front();
        }
        self.turns.push_back(Turn { nonce, sent: now, is_answered: false });
    }

    pub(super) fn handle_reply(&mut self, nonce: u64) {
        if let Some(turn) = self.turns.iter_mut().find(|turn| turn.nonce == nonce) {
            turn.is_answered = true;
        }
    }

    /// The probe of the last turn began an outage, which is reported by itself.
    pub(super) fn handle_outage(&mut self) {
        if self.turns.back().is_some_and(|turn| !turn.is_answered) {
            self.turns.pop_back();
        }
    }

    /// Loss up to now is over.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    fn measure(&mut self) {
        let is_lost = |turn: &&Turn| !turn.is_answered;
        if self.loss.is_some() {
            if !self.turns.iter().rev().take(CLEAN).any(|turn| is_lost(&turn)) {
                self.forget();
            }
            return;
        }
        let pairs = self.turns.iter().zip(self.turns.iter().skip(1));
        let gaps = pairs.filter(|(before, turn)| before.is_answered && !turn.is_answered).count();
        let lost = self.turns.iter().filter(is_lost).count();
        let since = self.turns.iter().find(is_lost).map(|turn| turn.sent);
        if let (true, Some(since)) = (gaps >= MIN_GAPS && lost >= MIN_LOST, since) {
            let share = lost * 100 / self.turns.len();
            let percent = u8::try_from((share + 5) / 10 * 10).unwrap_or(100);
            self.loss = Some((percent, since));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Turns of a second, those answered that are not lost.
    fn turns(lost: &[u8]) -> Turns {
        let (mut turns, start) = (Turns::default(), Instant::now());
        for (nonce, lost) in (0..).zip(lost.iter().chain(&[0])) {
            turns.begin(nonce, start + SECOND * u32::try_from(nonce).unwrap());
            if *lost == 0 {
                turns.handle_reply(nonce);
            }
        }
        turns
    }

    fn percent(lost: &[u8]) -> Option<u8> {
        turns(lost).loss().map(|(percent, _)| percent)
    }

    #[test]
    fn link_that_fails_every_few_seconds_is_lossy() {
        let flaps = [0, 0, 0, 1, 0, 0, 0];
        assert_eq!(percent(&flaps.repeat(4)), Some(20), "16 % once it is noticed");
        assert_eq!(percent(&flaps.repeat(3)), None, "three are no pattern");
        assert_eq!(percent(&[0, 1].repeat(4)), Some(50));
        assert_eq!(percent(&[flaps.repeat(4), vec![0; 5]].concat()), None, "8 turns are clean");
    }

    #[test]
    fn outages_that_are_reported_are_no_loss() {
        let (mut turns, start) = (Turns::default(), Instant::now());
        for nonce in 0..60 {
            turns.begin(nonce, start + SECOND * u32::try_from(nonce).unwrap());
            if nonce % 3 == 0 {
                turns.handle_outage();
            } else {
                turns.handle_reply(nonce);
                turns.handle_outage();
            }
            assert_eq!(turns.loss(), None);
        }
    }

    #[test]
    fn turn_lost_now_and_then_is_no_loss() {
        assert_eq!(percent(&[0, 0, 0, 0, 0, 1, 0, 0, 0, 0].repeat(30)), None, "a tenth");
        assert_eq!(percent(&[vec![0; 10], vec![1; 10], vec![0; 10]].concat()), None, "an outage");
        let mut late = turns(&[0, 1, 0, 1, 0, 1, 0, 1]);
        (0..10).for_each(|nonce| late.handle_reply(nonce));
        late.begin(100, Instant::now());
        assert_eq!(late.loss(), None, "all was answered in the end");
    }
}
