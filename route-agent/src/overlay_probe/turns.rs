//! Loss that is too small or too rare for a burst of probes, as of a link that fails again and again: it shows
//! in the results of many turns. Knows no socket and no clock.

use std::collections::VecDeque;
use std::time::Instant;

/// Probes of a turn: so many that loss of 40 % shows in 87 % of turns, and in 98 % of two.
pub(super) const TRAIN: u64 = 4;
/// Turns that a share is computed of.
const WINDOW: usize = 30;
/// Separate gaps, and lost probes of the window in percent, that make a loss.
const MIN_GAPS: usize = 3;
const MIN_LOSS: u64 = 7;
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
    /// Nonce of the first of [`TRAIN`] probes.
    first: u64,
    sent: Instant,
    answered: u64,
}

impl Turns {
    /// Share of lost probes in percent, and the time at which the first of them was sent.
    pub(super) fn loss(&self) -> Option<(u8, Instant)> {
        self.loss
    }

    /// The next [`TRAIN`] probes, from this nonce on, are those of a turn; the answers to those of the turn
    /// before had their time.
    pub(super) fn begin(&mut self, first: u64, now: Instant) {
        self.measure();
        if self.turns.len() == WINDOW {
            self.turns.pop_front();
        }
        self.turns.push_back(Turn { first, sent: now, answered: 0 });
    }

    pub(super) fn handle_reply(&mut self, nonce: u64) {
        let is_of = |turn: &&mut Turn| (turn.first..turn.first + TRAIN).contains(&nonce);
        if let Some(turn) = self.turns.iter_mut().find(is_of) {
            turn.answered = (turn.answered + 1).min(TRAIN);
        }
    }

    /// Loss up to now is over.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    fn measure(&mut self) {
        let has_lost = |turn: &Turn| turn.answered < TRAIN;
        if self.loss.is_some() {
            if !self.turns.iter().rev().take(CLEAN).any(has_lost) {
                self.forget();
            }
            return;
        }
        let pairs = self.turns.iter().zip(self.turns.iter().skip(1));
        let gaps = pairs.filter(|(before, turn)| !has_lost(before) && has_lost(turn)).count();
        let lost: u64 = self.turns.iter().map(|turn| TRAIN - turn.answered).sum();
        let percent = lost * 100 / (TRAIN * WINDOW as u64);
        let since = self.turns.iter().find(|turn| has_lost(turn)).map(|turn| turn.sent);
        if let (true, Some(since)) = (gaps >= MIN_GAPS && percent >= MIN_LOSS, since) {
            let percent = u8::try_from((percent + 5) / 10 * 10).unwrap_or(100);
            self.loss = Some((percent.max(10), since));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Turns of a second, each with so many probes lost.
    fn turns(lost: impl IntoIterator<Item = u64>) -> Turns {
        let (mut turns, start) = (Turns::default(), Instant::now());
        let mut end = |number: u64, lost: u64| {
            turns.begin(number * TRAIN, start + SECOND * u32::try_from(number).unwrap());
            (lost..TRAIN).for_each(|probe| turns.handle_reply(number * TRAIN + probe));
        };
        let mut number = 0;
        for lost in lost {
            end(number, lost);
            number += 1;
        }
        end(number, 0);
        turns
    }

    fn percent(lost: impl IntoIterator<Item = u64>) -> Option<u8> {
        turns(lost).loss().map(|(percent, _)| percent)
    }

    #[test]
    fn link_that_fails_every_few_seconds_is_lossy() {
        let flaps = [0, 0, 0, 4, 0, 0, 0];
        assert_eq!(percent(flaps.repeat(4)), Some(10));
        assert_eq!(percent(flaps.repeat(2)), None, "two are no pattern");
        assert_eq!(percent([flaps.repeat(4), vec![0; 5]].concat()), None, "8 turns are clean");
    }

    #[test]
    fn tenth_of_probes_lost_shows() {
        assert_eq!(percent([0, 1, 0, 0, 1].repeat(6)), Some(10));
        assert_eq!(percent([0, 1, 0, 0, 0, 0, 0, 0, 0, 0].repeat(3)), None, "a fortieth");
    }

    #[test]
    fn single_outage_is_no_loss() {
        assert_eq!(percent([vec![0; 10], vec![4; 10], vec![0; 10]].concat()), None);
        let mut late = turns([0, 4, 0, 4, 0, 4, 0]);
        (0..40).for_each(|nonce| late.handle_reply(nonce));
        late.begin(100, Instant::now());
        assert_eq!(late.loss(), None, "all was answered in the end");
    }
}
