//! Outages that follow each other, as of a link that fails again and again, each too short to be reported by itself.
//! Knows no socket and no clock.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::losses::Loss;

/// Outages within that time, of at least that share in percent of the time since the first one, which make a loss: a
/// gateway that restarts once or twice is none.
const MIN_OUTAGES: usize = 3;
const OUTAGES_TIME: Duration = Duration::from_secs(20);
const MIN_PERCENT: u128 = 20;
/// Least time between two unanswered probes that make an outage: a full queue drops all that are sent at once. The
/// present one has to be overdue, too.
const MIN_TIME: Duration = Duration::from_millis(100);
/// Most that an outage may have begun before the first probe that shows it.
const MAX_UNNOTICED: Duration = Duration::from_millis(250);
/// Time for which a loss shows after the last outage.
const SHOWN: Duration = Duration::from_secs(2);
/// Time after an outage in which turns come more often: what failed may fail again.
const ALERT: Duration = Duration::from_secs(10);

/// Outages of late.
#[derive(Debug, Default)]
pub(super) struct Outages {
    outages: VecDeque<Outage>,
    silence: Option<Silence>,
    last_answer: Option<Instant>,
    loss: Option<Loss>,
}

#[derive(Clone, Debug)]
struct Outage {
    /// Probes that stayed unanswered.
    nonces: Range<u64>,
    begun: Instant,
    ended: Instant,
}

/// Probes since the last answer.
#[derive(Clone, Debug)]
struct Silence {
    /// Those that were sent first, at once.
    nonces: Range<u64>,
    first: Instant,
    /// The first one that was sent that much later.
    later: Option<(u64, Instant)>,
    is_reported: bool,
}

impl Outages {
    /// Share of the time that they last, since the first of them.
    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss
    }

    pub(super) fn is_alert(&self, now: Instant) -> bool {
        self.outages.back().is_some_and(|last| now < last.ended + ALERT)
    }

    pub(super) fn handle_sent(&mut self, nonce: u64, now: Instant) {
        let first = Silence { nonces: nonce..nonce, first: now, later: None, is_reported: false };
        let silence = self.silence.get_or_insert(first);
        if silence.first == now {
            silence.nonces.end = nonce + 1;
        }
        if silence.later.is_none() && now >= silence.first + MIN_TIME {
            silence.later = Some((nonce, now));
        }
    }

    pub(super) fn handle_reply(&mut self, nonce: u64, now: Instant) {
        // One that arrives late was not lost.
        self.outages.retain(|outage| !outage.nonces.contains(&nonce));
        if self.silence.as_ref().is_none_or(|silence| nonce < silence.nonces.start) {
            return;
        }
        self.outages.extend(self.outage(nonce, now));
        (self.silence, self.last_answer) = (None, Some(now));
    }

    /// The gateway has become unreachable, which is reported by itself.
    pub(super) fn handle_outage(&mut self) {
        if let Some(silence) = &mut self.silence {
            silence.is_reported = true;
        }
    }

    /// Deadline of the next [`Self::poll`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        let last = self.outages.back().filter(|_| self.loss.is_some() && self.silence.is_none());
        last.map(|last| last.ended + SHOWN)
    }

    /// Time passed. Answers take so long at most.
    pub(super) fn poll(&mut self, answer_time: Duration, now: Instant) {
        self.outages.retain(|outage| now < outage.ended + OUTAGES_TIME);
        let later = self.silence.as_ref().and_then(|silence| silence.later);
        let overdue = later.filter(|(_, sent)| now >= *sent + MIN_TIME);
        let present = overdue.and_then(|(nonce, _)| self.outage(nonce + 1, now));
        let all = || self.outages.iter().chain(&present);
        let all = || all().filter(|outage| now >= outage.begun + answer_time);
        // Whole periods, so without the first.
        let lasted: Duration = all().skip(1).map(|outage| outage.ended - outage.begun).sum();
        let time = all().next().map_or(Duration::ZERO, |first| now - first.ended);
        let percent = lasted.as_millis() * 100 / time.as_millis().max(1);
        let least = if self.loss.is_some() { MIN_PERCENT / 2 } else { MIN_PERCENT };
        let is_recent = all().next_back().is_some_and(|last| now < last.ended + SHOWN);
        let is_loss = is_recent && all().count() >= MIN_OUTAGES && percent >= least;
        let first = all().next().filter(|_| is_loss);
        let rounded = u8::try_from((percent + 5) / 10 * 10).unwrap_or(90).clamp(10, 90);
        self.loss = first.map(|first| match self.loss {
            Some(loss) if loss.percent.abs_diff(rounded) < 20 => loss,
            before => {
                let since = before.map_or(first.begun, |loss| loss.since);
                Loss { percent: rounded, since, changed: now }
            }
        });
    }

    /// The outage in which all probes before this one stay unanswered. It began between the last answer and the first
    /// of them.
    fn outage(&self, nonce: u64, now: Instant) -> Option<Outage> {
        let silence = self.silence.as_ref().filter(|silence| !silence.is_reported)?;
        silence.later.filter(|(later, _)| *later < nonce)?;
        let before = self.last_answer?;
        let begun = silence.first - ((silence.first - before) / 2).min(MAX_UNNOTICED);
        Some(Outage { nonces: silence.nonces.start..nonce, begun, ended: now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    /// Outages of so many milliseconds, of a gateway that is probed every 100 ms, at the end of the last.
    fn outages(lengths: &[u32], up: u32, late: Option<u32>) -> Outages {
        let (mut outages, mut now, mut nonce) = (Outages::default(), Instant::now(), 0);
        for length in lengths {
            for time in (0..up + length).step_by(100) {
                now += 100 * MILLI;
                nonce += 1;
                outages.handle_sent(nonce, now);
                if time < up {
                    outages.handle_reply(nonce, now);
                }
                outages.poll(300 * MILLI, now);
            }
            now += MILLI;
            outages.handle_sent(nonce + 1, now);
            outages.handle_reply(nonce + 1, now);
            for of in 0..late.unwrap_or(0) {
                outages.handle_reply(nonce - u64::from(of), now);
            }
            nonce += 1;
        }
        outages.poll(300 * MILLI, now);
        outages
    }

    fn percent(lengths: &[u32], up: u32) -> Option<u8> {
        outages(lengths, up, None).loss().map(|loss| loss.percent)
    }

    #[test]
    fn three_outages_of_a_fifth_of_the_time_are_a_loss() {
        assert_eq!(percent(&[700, 700, 700], 1300), Some(30));
        assert_eq!(percent(&[1000, 1000, 1000], 2000), Some(20), "once it is noticed");
        assert_eq!(percent(&[500, 500, 500], 4000), None, "a ninth");
        for length in [300, 700, 1000, 3000] {
            assert_eq!(percent(&[length; 2], 1300), None, "restarted twice, {length} ms");
        }
    }

    #[test]
    fn outages_that_are_reported_are_no_loss() {
        let (mut outages, mut now) = (Outages::default(), Instant::now());
        for nonce in 0..600 {
            now += 100 * MILLI;
            outages.handle_sent(nonce, now);
            match nonce % 30 {
                0..15 => outages.handle_reply(nonce, now),
                29 => outages.handle_outage(),
                _ => {}
            }
            outages.poll(2000 * MILLI, now);
            assert_eq!(outages.loss(), None);
        }
    }

    #[test]
    fn outage_whose_probes_are_answered_late_is_none() {
        assert_eq!(outages(&[700; 9], 1300, Some(1)).loss(), None, "answered in the end");
    }
}
