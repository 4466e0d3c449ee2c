//! Probes sent and answered lately: which are overdue, when to send a burst of them, and how many
//! are lost. Pure: time is a parameter.
//!
//! ```text
//!   Calm --a probe is overdue, or the peer misses some--> Burst --enough came back--> Calm
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Probes of one turn while nothing is suspected: so many that loss of 40 % shows in 95 % of turns, and in
/// 99.8 % of two. The next is the other end's, half an interval later.
pub const TRAIN: usize = 6;
/// Probes that a share of lost ones is computed from, and the fewest that it may be reported of.
const WINDOW: usize = 20;
const LONG_WINDOW: usize = 60;
const MIN_DECIDED: usize = 10;
/// Separate gaps that make a loss: a single one is a pause, as of a gateway that restarts.
const MIN_GAPS: usize = 2;
/// Least share of lost probes that is reported, in percent: of an idle tunnel, and of a busy one,
/// whose queues drop probes, too.
const MIN_LOSS: usize = 20;
const MIN_BUSY_LOSS: usize = 30;
/// Least time for an answer, beyond the round trip, too, and the most unless that alone takes longer.
const MIN_GRACE: Duration = Duration::from_millis(100);
const MAX_GRACE: Duration = Duration::from_secs(1);
/// Between two probes of a burst: its first, the following, and those to a peer that answers none.
const FIRST_INTERVAL: Duration = Duration::from_millis(50);
const INTERVAL: Duration = Duration::from_millis(100);
const UNANSWERED_INTERVAL: Duration = Duration::from_millis(250);
/// Unanswered turns of probes that make a fault, and the time between the first and the last of them: a
/// peer that had to wait for a processor answers them together.
const MIN_UNANSWERED: u32 = 4;
pub const MIN_UNANSWERED_TIME: Duration = Duration::from_millis(250);
/// The same without any answer, while packets of the peer arrive: most get lost, but not all.
const MIN_LOSS_TIME: Duration = Duration::from_millis(900);
/// Time since a packet of the peer within which it is there.
const IS_THERE: Duration = Duration::from_secs(1);
/// Time without a packet of the peer, beyond the round trip, that makes an outage: both ends send a train a second.
const QUIET: Duration = Duration::from_millis(1400);
/// The same for packets that may be noticed late: monitors wake at least every two seconds.
const WAS_AWAY: Duration = Duration::from_millis(2500);
/// Outages within that time, of at least that share in percent of the time since the first one, which make a loss: a
/// single one is none.
const MIN_OUTAGES: usize = 3;
const OUTAGES_TIME: Duration = Duration::from_secs(20);
const MIN_OUTAGE_PERCENT: usize = 20;
/// Outages within the same time whose probes do not count as lost: without a limit, heavy loss might never show.
const MAX_FORGOTTEN: usize = 2 * MIN_OUTAGES;
/// Most that an outage may have begun before the first probe that shows it.
const MAX_UNNOTICED: Duration = Duration::from_millis(250);
/// Time for which outages that are a loss show after the last one: what is solved is gone within three seconds, also
/// of a peer that needs two of them to be back.
const OUTAGES_SHOWN: Duration = Duration::from_secs(1);
/// Probes that are closer together are of one turn.
const MIN_TURN: Duration = Duration::from_millis(40);
/// Delay of this program itself after which answers may be waiting to be read.
const LATE: Duration = Duration::from_millis(300);
/// Time after a burst in which trains are sent twice as often: what began it may come back, and neither end has its
/// turn halfway between the other's.
const AFTER_BURST: Duration = Duration::from_secs(10);
/// Minimum time between two bursts that the peer requests.
const ASKED_INTERVAL: Duration = Duration::from_secs(5);

/// Unanswered probes since the last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// Turns, each of one probe or of several at once.
    pub turns: u32,
    pub first: Instant,
    pub last: Instant,
}

impl Unanswered {
    /// Returns true if they are so many, for so long, that waiting for a processor is no explanation.
    pub fn is_silence(&self) -> bool {
        let time = self.last.saturating_duration_since(self.first);
        self.turns >= MIN_UNANSWERED && time >= MIN_UNANSWERED_TIME
    }
}

/// Results of the latest probes.
#[derive(Clone, Debug)]
pub struct ProbeLog {
    samples: VecDeque<Sample>,
    round_trip: Duration,
    busy: bool,
    burst: Option<Burst>,
    burst_ended: Option<Instant>,
    unanswered: Option<Unanswered>,
    last_answer: Option<Instant>,
    last_received: Option<Instant>,
    /// Since when packets of the peer arrive while probes are unanswered, and whether that was the end of an outage.
    heard: Option<(Instant, bool)>,
    /// The peer reports that it has received none of the unanswered probes.
    is_cut: bool,
    /// Time at which the peer announced its end, until it answers a later probe.
    announced: Option<Instant>,
    /// Time at which the first probe was sent that was answered after an outage.
    returned: Option<Instant>,
    /// Those of late.
    outages: VecDeque<Outage>,
    /// Share of the time that they last, in percent, if the link fails again and again.
    outage_percent: Option<u8>,
    asked: Option<Instant>,
    /// As reported last, and when.
    loss: Option<(u8, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    stamp: i128,
    sent: Instant,
    answered: bool,
}

/// Time in which no probe was answered.
#[derive(Clone, Copy, Debug)]
struct Outage {
    begun: Instant,
    ended: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    sent: usize,
    next: Instant,
    /// The peer misses answers, not this end.
    is_asked: bool,
}

impl Default for ProbeLog {
    fn default() -> Self {
        Self {
            samples: VecDeque::new(),
            round_trip: Duration::ZERO,
            busy: false,
            burst: None,
            burst_ended: None,
            unanswered: None,
            last_answer: None,
            last_received: None,
            heard: None,
            is_cut: false,
            announced: None,
            returned: None,
            outages: VecDeque::new(),
            outage_percent: None,
            asked: None,
            loss: None,
        }
    }
}

impl ProbeLog {
    pub fn is_bursting(&self) -> bool {
        self.burst.is_some()
    }

    pub fn unanswered(&self) -> Option<Unanswered> {
        self.unanswered
    }

    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    pub fn last_answer(&self) -> Option<Instant> {
        self.last_answer
    }

    /// The peer reports that it has received none of the unanswered probes.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// The share of lost probes, or of the time in outages, in percent, if that is worth showing.
    pub fn loss_percent(&self) -> Option<u8> {
        self.lost_percent().or(self.outage_percent)
    }

    /// The share of lost probes, which the peer may not notice. Outages show at both ends, if both send probes.
    pub fn lost_percent(&self) -> Option<u8> {
        self.loss.map(|(percent, _)| percent)
    }

    /// Time between two trains, of those that are sent every `interval`.
    pub fn pace(&self, interval: Duration, now: Instant) -> Duration {
        let is_recent = self.burst_ended.is_some_and(|at| now < at + AFTER_BURST);
        if is_recent { interval / 2 } else { interval }
    }

    /// True while data keeps the tunnel busy, so that probes wait longer and are dropped sooner.
    pub fn set_busy(&mut self, busy: bool) {
        self.busy = busy;
    }

    /// The latest packet of the peer, of any kind: while some arrive, probes that are all unanswered are lost ones,
    /// unless the peer reports that none arrives.
    pub fn set_received(&mut self, last: Option<Instant>, is_cut: bool) {
        let is_back = self.last_received.zip(last).is_some_and(|(was, at)| at >= was + WAS_AWAY);
        if self.unanswered.is_none() || is_cut || is_back {
            self.heard = None;
        }
        let begins = self.unanswered.map(|probes| probes.first + self.round_trip + MIN_GRACE);
        let is_meanwhile = |at: &Instant| !is_cut && begins.is_some_and(|begin| *at >= begin);
        let heard = last.filter(is_meanwhile).map(|at| (at, self.is_cut || self.is_quiet(at)));
        self.heard = self.heard.or(heard);
        (self.last_received, self.is_cut) = (last, is_cut);
    }

    fn is_quiet(&self, now: Instant) -> bool {
        let last = self.last_received.max(self.last_answer);
        last.is_some_and(|at| now >= at + QUIET + self.round_trip)
    }

    pub fn handle_sent(&mut self, stamp: i128, now: Instant) {
        if self.samples.len() == LONG_WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample { stamp, sent: now, answered: false });
        let unanswered =
            self.unanswered.get_or_insert(Unanswered { turns: 1, first: now, last: now });
        if now >= unanswered.last + MIN_TURN {
            unanswered.turns += 1;
            unanswered.last = now;
        }
        if let Some(burst) = &mut self.burst {
            burst.sent += 1;
        }
    }

    pub fn handle_answer(&mut self, stamp: i128, round_trip: Duration, now: Instant) {
        self.round_trip = round_trip;
        self.handle_overtaken(stamp);
        let sent = now.checked_sub(round_trip);
        let silence = self.unanswered.filter(Unanswered::is_silence);
        if let Some(silence) = silence.filter(|_| self.loss.is_none()) {
            let counted = sent.filter(|_| self.announced.is_none());
            self.outages.extend(counted.and_then(|sent| self.outage(silence, sent)));
            let is_outage = self.is_outage(now) && self.outages.len() <= MAX_FORGOTTEN;
            self.returned = sent.filter(|_| is_outage);
        } else if let Some(sent) = sent {
            self.forget_outage(sent);
        }
        (self.unanswered, self.heard) = (None, None);
        self.announced.take_if(|at| now >= *at + round_trip);
        self.last_answer = Some(now);
        self.count_outages(now);
    }

    /// True if no packet of the peer arrived for long until a moment ago, or none of these there. The answer may be the
    /// first packet.
    fn is_outage(&self, now: Instant) -> bool {
        match self.heard {
            Some((at, is_end)) => is_end && now < at + self.time_to_answer(),
            None => self.is_cut || self.is_quiet(now),
        }
    }

    /// Time that the peer has for its first answer after it was away: the next probe may be the first that it receives.
    fn time_to_answer(&self) -> Duration {
        2 * UNANSWERED_INTERVAL + self.grace()
    }

    /// Drops what was unanswered in an outage, which is no loss unless many follow each other, once the probes of the
    /// next turn are answered as well: of a link that loses most of them, they are not.
    fn forget_outage(&mut self, sent: Instant) {
        let Some(end) = self.returned.take_if(|end| sent >= *end + MIN_TURN) else { return };
        let mut since = self.samples.iter().filter(|of| (end..sent).contains(&of.sent));
        if since.all(|sample| sample.answered) {
            self.samples.retain(|sample| sample.answered || sample.sent >= end);
            self.burst = self.burst.map(|burst| Burst { sent: 0, ..burst });
        }
    }

    /// Outage in which these were unanswered, of probes sent before that time. It begins between the last answer and
    /// the first of them, and ends after the last.
    fn outage(&self, silence: Unanswered, sent: Instant) -> Option<Outage> {
        let mut samples = self.samples.iter().rev();
        let last = samples.find(|sample| !sample.answered && sample.sent < sent)?.sent;
        let half = |time: Duration| (time / 2).min(MAX_UNNOTICED);
        let up = self.last_answer.map_or(Duration::ZERO, |at| silence.first.duration_since(at));
        let begun = silence.first.checked_sub(half(up))?;
        let ended = last + half(sent - last);
        (ended >= begun + MIN_UNANSWERED_TIME).then_some(Outage { begun, ended })
    }

    /// The present outage, unless it is a loss that is known.
    fn present_outage(&self, now: Instant) -> Option<Outage> {
        let silence = self.unanswered.filter(|_| self.loss.is_none() && self.announced.is_none());
        let sent = now.checked_sub(self.round_trip + MIN_GRACE)?;
        self.outage(silence.filter(Unanswered::is_silence)?, sent)
    }

    /// Recomputes the share of outages.
    fn count_outages(&mut self, now: Instant) {
        self.outages.retain(|outage| now < outage.ended + OUTAGES_TIME);
        let present = self.present_outage(now);
        let all = || self.outages.iter().chain(&present);
        // Whole periods, so without the first.
        let lasted: Duration = all().skip(1).map(|of| of.ended - of.begun).sum();
        let time = all().next().map_or(Duration::ZERO, |first| now.duration_since(first.ended));
        let percent = lasted.as_millis() * 100 / time.as_millis().max(1);
        let percent = usize::try_from(percent).unwrap_or(usize::MAX);
        let is_shown = self.outage_percent.is_some();
        let least = if is_shown { MIN_OUTAGE_PERCENT / 2 } else { MIN_OUTAGE_PERCENT };
        let is_recent = all().last().is_some_and(|last| now < last.ended + self.outages_shown());
        let is_loss = is_recent && all().count() >= MIN_OUTAGES && percent >= least;
        self.outage_percent = is_loss.then(|| rounded(percent, self.outage_percent));
    }

    /// Time at which outages that are shown are over, unless another one begins.
    fn outages_due(&self) -> Option<Instant> {
        let last = self.outages.back().filter(|_| self.outage_percent.is_some())?;
        self.unanswered.is_none().then(|| last.ended + self.outages_shown())
    }

    /// The end of an outage is known a round trip later.
    fn outages_shown(&self) -> Duration {
        OUTAGES_SHOWN + self.round_trip.min(OUTAGES_SHOWN)
    }

    /// An answer arrived behind a later one: its probe was not lost.
    pub fn handle_overtaken(&mut self, stamp: i128) {
        if let Some(sample) = self.samples.iter_mut().find(|sample| sample.stamp == stamp) {
            sample.answered = true;
        }
    }

    /// The peer announced its end: that it does not answer until it is back is no fault of the link.
    pub fn handle_departure(&mut self, now: Instant) {
        self.announced = Some(now);
    }

    /// The peer misses answers.
    pub fn handle_request(&mut self, now: Instant) {
        let is_new = self.asked.is_none_or(|at| now >= at + ASKED_INTERVAL);
        if is_new && self.burst.is_none() {
            self.asked = Some(now);
            self.begin(now, true);
        }
    }

    /// Ends a burst: there is no connection to measure.
    pub fn pause(&mut self) {
        (self.burst, self.loss, self.outage_percent) = (None, None, None);
        self.samples.clear();
        self.outages.clear();
    }

    /// Returns true if this end itself misses answers.
    pub fn is_suspicious(&self) -> bool {
        self.burst.is_some_and(|burst| !burst.is_asked)
    }

    /// Deadline of the next [`Self::handle_tick`].
    pub fn deadline(&self) -> Option<Instant> {
        self.probe_due().into_iter().chain(self.outages_due()).min()
    }

    /// Time at which the next probe of a burst, or the first one, is due.
    fn probe_due(&self) -> Option<Instant> {
        match self.burst {
            Some(burst) => Some(burst.next),
            None => self.oldest_pending().map(|sample| sample.sent + self.grace()),
        }
    }

    /// Time passed. Returns whether a probe of a burst is due.
    pub fn handle_tick(&mut self, now: Instant) -> bool {
        if self.probe_due().is_some_and(|due| now >= due + LATE) {
            self.forgive(now);
        }
        self.measure(now);
        self.count_outages(now);
        let Some(burst) = self.burst else {
            let is_overdue = self.probe_due().is_some_and(|due| now >= due);
            if is_overdue {
                self.begin(now, false);
            }
            return is_overdue;
        };
        if now < burst.next {
            return false;
        }
        if self.is_over(burst, now) {
            (self.burst, self.burst_ended) = (None, Some(now));
            self.samples.clear();
            return false;
        }
        self.burst = Some(Burst { next: now + self.interval(burst), ..burst });
        true
    }

    /// The probes before a burst prove nothing about current loss, but for those that began it.
    fn begin(&mut self, now: Instant, is_asked: bool) {
        let grace = self.grace();
        self.samples.retain(|sample| now <= sample.sent + grace + LATE);
        self.burst = Some(Burst { sent: 0, next: now + FIRST_INTERVAL, is_asked });
    }

    /// This host stood still: probes unanswered because of that do not count, and others take their place at once.
    fn forgive(&mut self, now: Instant) {
        match self.loss {
            // It is measured anew, and named meanwhile.
            Some(_) => self.samples.clear(),
            None => self.samples.retain(|sample| sample.answered),
        }
        self.unanswered = None;
        match &mut self.burst {
            Some(burst) => (burst.sent, burst.next) = (0, now),
            None => self.begin(now, false),
        }
    }

    fn is_over(&self, burst: Burst, now: Instant) -> bool {
        let decided = self.decided(now);
        let recent = &decided[decided.len().saturating_sub(WINDOW)..];
        let lost = recent.iter().filter(|answered| !**answered).count();
        burst.sent >= WINDOW
            && recent.len() == WINDOW
            && self.unanswered.is_none_or(|probes| probes.turns < 3)
            && self.loss.is_none()
            && lost * 100 < WINDOW * MIN_LOSS
    }

    fn interval(&self, burst: Burst) -> Duration {
        let is_silent = self.unanswered.is_some_and(|probes| probes.turns as usize >= WINDOW);
        match is_silent {
            true => UNANSWERED_INTERVAL,
            false if burst.sent < WINDOW => FIRST_INTERVAL,
            false => INTERVAL,
        }
    }

    fn grace(&self) -> Duration {
        let min = if self.busy { MAX_GRACE } else { MIN_GRACE };
        (self.round_trip * 3).clamp(min, MAX_GRACE.max(self.round_trip + MIN_GRACE))
    }

    fn oldest_pending(&self) -> Option<&Sample> {
        self.samples.iter().find(|sample| !sample.answered)
    }

    /// The samples that were answered, or not in time: true if they were.
    fn decided(&self, now: Instant) -> Vec<bool> {
        let grace = self.grace();
        let is_decided = |sample: &&Sample| {
            sample.answered || now.saturating_duration_since(sample.sent) >= grace
        };
        self.samples.iter().filter(is_decided).map(|sample| sample.answered).collect()
    }

    /// Recomputes the share of lost probes.
    fn measure(&mut self, now: Instant) {
        let decided = self.decided(now);
        let recent = &decided[decided.len().saturating_sub(WINDOW)..];
        let is_lossy = self.burst.is_some() && self.is_lossy(recent, now);
        self.loss = match self.loss {
            _ if !is_lossy => None,
            // As before until there is enough to measure.
            Some((percent, at)) if recent.len() < MIN_DECIDED => Some((percent, at)),
            // Often enough for somebody who watches it.
            Some((percent, at)) if now < at + Duration::from_secs(1) => Some((percent, at)),
            before => {
                Some((rounded(lost_percent(&decided), before.map(|(percent, _)| percent)), now))
            }
        };
    }

    fn is_lossy(&self, recent: &[bool], now: Instant) -> bool {
        let lost = recent.iter().filter(|answered| !**answered).count();
        // Each begins behind an answer; the first sample may lie in the midst of one.
        let gaps = recent.windows(2).filter(|pair| pair[0] && !pair[1]).count()
            + usize::from(recent.first() == Some(&false));
        let least = if self.busy { MIN_BUSY_LOSS } else { MIN_LOSS };
        // Chance alone does not end it.
        let least = if self.loss.is_some() { least / 2 } else { least };
        // It lasts until enough are answered, whatever comes meanwhile.
        let is_loss = self.loss.is_some()
            || lost < recent.len() && gaps >= MIN_GAPS
            || self.is_mostly_lost(now);
        match recent.len() {
            0..MIN_DECIDED => self.loss.is_some(),
            of => is_loss && lost * 100 >= of * least,
        }
    }

    /// Nothing is answered, and packets of the peer arrive meanwhile: not those of one that has just returned,
    /// whose first answer is on its way.
    fn is_mostly_lost(&self, now: Instant) -> bool {
        let is_past = |at: Instant, time| now.saturating_duration_since(at) >= time;
        self.unanswered.is_some_and(|probes| is_past(probes.first, MIN_LOSS_TIME))
            && self.last_received.is_some_and(|at| !is_past(at, IS_THERE))
            && self.heard.is_some_and(|(at, _)| is_past(at, self.time_to_answer()))
    }
}

fn lost_percent(decided: &[bool]) -> usize {
    let lost = decided.iter().filter(|answered| !**answered).count();
    lost * 100 / decided.len().max(1)
}

/// In steps of ten percent, and no step back and forth for chance alone.
fn rounded(percent: usize, before: Option<u8>) -> u8 {
    // Rounded up to a hundred, it would be an outage.
    let percent = u8::try_from(percent).unwrap_or(100).min(94);
    match before {
        Some(before) if percent.abs_diff(before) < 10 => before,
        Some(_) | None => ((percent + 5) / 10 * 10).max(10),
    }
}

#[cfg(test)]
mod tests;
