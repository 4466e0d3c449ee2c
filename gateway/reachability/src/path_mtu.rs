//! Search for the path MTU to the peer, as a state machine driven by answers and time.
//!
//! Packetization layer path MTU discovery in the sense of RFC 8899: what is answered got through,
//! whatever becomes of ICMP. All sizes are those of outer IP packets, in bytes. The bounds of the
//! search close in from both sides by many probes at once instead of one after the other, so that
//! a path that changed is known again within four waits: after the first, which is to notice it.
//!
//! Loss must not look like a smaller path. Nothing is concluded from missing answers alone: a size
//! counts as too large only if it was sent at least twice, and as often as it took until all smaller ones
//! of the round were answered, which are sent after it; where those are few, another round has to agree. The
//! size in force is tried again in every round, and any single answer keeps it.

pub mod trains;

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// The smallest path that is followed: what every IPv4 host takes (RFC 791).
pub const MIN_PATH_MTU: u32 = 576;
/// Paths are rarely smaller: every path of IPv6 takes this much (RFC 8200 section 5).
pub const USUAL_MIN: u32 = 1280;

/// Sizes tried at once. Three rounds of twenty distinguish all sizes between 1,280 and 9,000, two
/// those up to 1,500. Three sizes below 1,280 in the first round are enough for three to distinguish
/// those, too.
const CANDIDATES: u32 = 20;
/// Interval at which the size in force is tried while it matters: while packets are sent that would
/// not fit the least path. A probe in 300 ms is 5 kB/s at 1,500 bytes.
const CHECK: Duration = Duration::from_millis(300);
/// Interval at which a larger one is tried meanwhile: with every second check.
const GROW: Duration = Duration::from_millis(500);
/// Interval at which both are tried otherwise, so that the status is right and the next flow need
/// not find out: 300 B/s at 1,500 bytes.
const REST: Duration = Duration::from_secs(10);
/// A result of this time need not be checked again when a path comes to rest.
const RECENT: Duration = Duration::from_secs(5);
/// An answer is waited for three round trips, within these bounds. The lower one is for the time
/// that a busy machine takes, the upper one keeps the whole search within two seconds.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_millis(400);
/// Times that the sizes of a round are sent: then nothing can be concluded.
const MAX_TRIES: u32 = 5;
/// Pause after that.
const LOSSY_PAUSE: Duration = Duration::from_secs(3);
/// Answers that show a bound by one round: fewer may have come through a path that loses nearly all, in order by
/// chance.
const MIN_ANSWERS: usize = 3;
/// Longest pause after searches that nothing came of, although the peer answers other probes.
const MAX_PAUSE: Duration = Duration::from_secs(64);
/// Probes whose answers are still of use: those of a round, and most of another.
const MAX_SENT: usize = 8 * (CANDIDATES as usize + 7);

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Comes back in the answer.
    pub nonce: u32,
    pub size: u32,
}

/// The path to one peer.
#[derive(Debug)]
pub struct PathMtu {
    limit: u32,
    found: Option<u32>,
    rtt: Option<Duration>,
    phase: Phase,
    sent: VecDeque<(Probe, Instant)>,
    nonce: u32,
    /// Searches in a row that nothing came of.
    fruitless: u32,
    /// The last one ended since smaller sizes were lost, too.
    is_lossy: bool,
}

#[derive(Debug)]
enum Phase {
    /// Nothing larger than any path takes is wanted.
    Idle,
    /// Nothing comes back, so nothing is sent. A sign of life from then on begins a search.
    Silent {
        until: Instant,
    },
    Search(Search),
    Settled(Settled),
}

/// The path's MTU is at least `low`, and less than the least size that was not answered.
#[derive(Debug)]
struct Search {
    low: u32,
    high: u32,
    /// The largest of interest: tried in every round.
    top: u32,
    /// Sizes of this round, in descending order: on a path that keeps the order, whatever is
    /// answered was sent after all that is larger.
    sizes: BTreeSet<u32>,
    step: Step,
    /// Those of them that were answered.
    answered: BTreeSet<u32>,
    /// Times that those were sent which were not.
    tries: u32,
    /// A round had few answers, and the next one is to agree; or what is in force is known to pass.
    is_doubted: bool,
}

/// The next step, and its time.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(Instant),
    SendAgain(Instant),
    Decide(Instant),
}

#[derive(Debug)]
struct Settled {
    check_at: Instant,
    /// The size in force is on its way.
    check: Option<Step>,
    confirmed: Instant,
    grew: Instant,
    /// Large packets sent so far, at the last look.
    large: u64,
    /// None were sent between the last two looks.
    rests: bool,
}

impl PathMtu {
    /// Nothing larger than `limit` is of interest. `found` is what an earlier gateway found out.
    pub fn new(limit: u32, found: Option<u32>, now: Instant) -> Self {
        let mut path = Self {
            limit,
            found: found.filter(|found| *found >= MIN_PATH_MTU).map(|found| found.min(limit)),
            rtt: None,
            phase: Phase::Silent { until: now },
            sent: VecDeque::new(),
            nonce: 0,
            fruitless: 0,
            is_lossy: false,
        };
        path.rest_if_small();
        path
    }

    /// The largest size known to get through; `None` while none is.
    pub fn found(&self) -> Option<u32> {
        self.found
    }

    pub fn set_limit(&mut self, limit: u32, now: Instant) {
        if limit != self.limit {
            self.limit = limit;
            self.found = self.found.map(|found| found.min(limit));
            self.search(now);
        }
    }

    /// The way to the peer is another one: all sizes are tried again.
    pub fn search(&mut self, now: Instant) {
        self.fruitless = 0;
        self.begin(MIN_PATH_MTU - 1, self.limit, now);
        self.rest_if_small();
    }

    /// The peer no longer answers probes. What was found stands.
    pub fn pause(&mut self, now: Instant) {
        self.phase = Phase::Silent { until: now };
        self.sent.clear();
        self.rest_if_small();
    }

    /// A packet of no particular size came back after `rtt`, or came from the peer.
    pub fn handle_life(&mut self, rtt: Option<Duration>, now: Instant) {
        if let Some(rtt) = rtt {
            self.note_rtt(rtt);
        }
        if matches!(self.phase, Phase::Silent { until } if now >= until) {
            self.begin(MIN_PATH_MTU - 1, self.limit, now);
        }
    }

    /// A probe came back, however late.
    pub fn handle_answer(&mut self, nonce: u32, now: Instant) {
        let Some(at) = self.sent.iter().position(|(probe, _)| probe.nonce == nonce) else { return };
        let Some((Probe { size, .. }, sent_at)) = self.sent.remove(at) else { return };
        self.note_rtt(now.saturating_duration_since(sent_at));
        let found = self.found.unwrap_or_default();
        match &mut self.phase {
            Phase::Idle => {}
            Phase::Silent { until } if self.is_lossy && now < *until && size <= found => {}
            Phase::Silent { .. } => self.begin(size, self.limit, now),
            Phase::Search(search) => {
                search.answered.insert(size);
                search.low = search.low.max(size);
                if search.low > search.high {
                    search.high = search.top;
                }
                if search.low >= search.top {
                    let low = search.low;
                    self.settle(low, now);
                }
            }
            Phase::Settled(_) if size > found => self.begin(size, self.limit, now),
            Phase::Settled(settled) => {
                if size == found {
                    settled.check = None;
                    settled.confirmed = now;
                }
            }
        }
    }

    /// Deadline of the next [`Self::poll`]; `None` if not before something else happens.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Idle | Phase::Silent { .. } => None,
            Phase::Search(search) => Some(search.step.due()),
            Phase::Settled(settled) => Some(
                settled.check.map_or(settled.check_at, |check| check.due().min(settled.check_at)),
            ),
        }
    }

    /// Returns the count of large packets that the path has come to rest at, if it has: another one
    /// is to be passed at once to [`Self::poll`].
    pub fn rests_at(&self) -> Option<u64> {
        match &self.phase {
            Phase::Settled(settled) => Some(settled.large).filter(|_| settled.rests),
            Phase::Idle | Phase::Silent { .. } | Phase::Search(_) => None,
        }
    }

    /// Returns the probes to send. `large` counts packets so far that the least path may not take.
    pub fn poll(&mut self, large: u64, now: Instant) -> Vec<Probe> {
        let mut sizes = Vec::new();
        self.poll_settled(large, now, &mut sizes);
        // After the other, since a check that failed becomes a search.
        self.poll_search(now, &mut sizes);
        sizes.into_iter().map(|size| self.probe(size, now)).collect()
    }

    fn poll_settled(&mut self, large: u64, now: Instant, sizes: &mut Vec<u32>) {
        let (wait, limit) = (self.wait(), self.limit);
        let (Phase::Settled(settled), Some(found)) = (&mut self.phase, self.found) else { return };
        match settled.check {
            Some(Step::SendAgain(at)) if now >= at => {
                sizes.push(found);
                settled.check = Some(Step::Decide(now + wait / 2));
            }
            Some(Step::Decide(at)) if now >= at => return self.begin(MIN_PATH_MTU - 1, found, now),
            Some(_) | None => {}
        }
        let busy = large != settled.large;
        if now < settled.check_at && !(busy && settled.rests) {
            return;
        }
        settled.large = large;
        settled.rests = !busy;
        settled.check_at = now + if busy { CHECK } else { REST };
        let since = |at| now.saturating_duration_since(at);
        if found < limit && since(settled.grew) >= if busy { GROW } else { RECENT } {
            // If any larger one passes, this one does.
            sizes.push(found + 1);
            settled.grew = now;
        }
        if settled.check.is_none() && (busy || since(settled.confirmed) >= RECENT) {
            sizes.push(found);
            settled.check = Some(Step::SendAgain(now + wait / 2));
        }
    }

    fn poll_search(&mut self, now: Instant, sizes: &mut Vec<u32>) {
        let (half, found) = (self.wait() / 2, self.found);
        let Phase::Search(search) = &mut self.phase else { return };
        match search.step {
            Step::SendAgain(at) if now >= at => {
                let missing = |size: &&u32| !search.answered.contains(size);
                sizes.extend(search.sizes.iter().rev().filter(missing));
                search.tries += 1;
                search.step = Step::Decide(now + half);
                return;
            }
            Step::Decide(at) if now >= at => {
                let low = search.low;
                let has_gaps =
                    search.sizes.range(..=low).any(|size| !search.answered.contains(size));
                if search.answered.is_empty() {
                    return self.give_up(now);
                }
                if has_gaps && search.tries >= MAX_TRIES {
                    self.is_lossy = true;
                    self.phase = Phase::Silent { until: now + LOSSY_PAUSE };
                    return;
                }
                if has_gaps {
                    search.step = Step::SendAgain(now);
                    return self.poll_search(now, sizes);
                }
                let answers = search.answered.intersection(&search.sizes).count();
                if search.is_doubted || answers >= MIN_ANSWERS {
                    let too_large = search.sizes.iter().find(|size| **size > low);
                    search.high = too_large.map_or(low, |size| search.high.min(size - 1));
                }
                search.is_doubted = true;
                if search.high == low {
                    return self.settle(low, now);
                }
            }
            Step::Send(_) => {}
            Step::SendAgain(_) | Step::Decide(_) => return,
        }
        search.answered.clear();
        search.tries = 1;
        search.sizes = candidates(search.low, search.high);
        search.sizes.insert(search.top);
        search.sizes.extend(found.filter(|found| (search.low..=search.top).contains(found)));
        // If even what is known to pass is not answered, nothing can be concluded.
        search.sizes.insert(search.low.max(MIN_PATH_MTU));
        sizes.extend(search.sizes.iter().rev());
        search.step = Step::SendAgain(now + half);
    }

    fn begin(&mut self, low: u32, top: u32, now: Instant) {
        if low >= top {
            return self.settle(top, now);
        }
        self.is_lossy = false;
        self.phase = Phase::Search(Search {
            low,
            high: top,
            top,
            sizes: BTreeSet::new(),
            step: Step::Send(now),
            answered: BTreeSet::new(),
            tries: 0,
            is_doubted: self.found.is_some_and(|found| low >= found),
        });
    }

    fn settle(&mut self, size: u32, now: Instant) {
        self.found = Some(size);
        self.fruitless = 0;
        let check_at = now + CHECK;
        self.phase = Phase::Settled(Settled {
            check_at,
            check: None,
            confirmed: now,
            grew: now,
            large: 0,
            rests: false,
        });
    }

    /// Nothing at all came back: that is no question of size.
    fn give_up(&mut self, now: Instant) {
        let pause = Duration::from_secs(1) * (1 << self.fruitless.min(6));
        self.fruitless += 1;
        self.phase = Phase::Silent { until: now + pause.min(MAX_PAUSE) };
    }

    fn rest_if_small(&mut self) {
        if self.limit <= MIN_PATH_MTU {
            self.phase = Phase::Idle;
            self.found = None;
        }
    }

    fn probe(&mut self, size: u32, now: Instant) -> Probe {
        self.nonce = self.nonce.wrapping_add(1);
        let probe = Probe { nonce: self.nonce, size };
        if self.sent.len() == MAX_SENT {
            self.sent.pop_front();
        }
        self.sent.push_back((probe, now));
        probe
    }

    /// Rises at once and falls slowly: a queue that was full will be full again.
    fn note_rtt(&mut self, sample: Duration) {
        let known = self.rtt.unwrap_or(sample);
        self.rtt = Some(sample.max(known - known.saturating_sub(sample) / 8));
    }

    fn wait(&self) -> Duration {
        let Some(rtt) = self.rtt else { return MAX_WAIT };
        (rtt * 3).clamp(MIN_WAIT, MAX_WAIT).max(rtt * 3 / 2)
    }
}

impl Step {
    fn due(self) -> Instant {
        match self {
            Self::Send(at) | Self::SendAgain(at) | Self::Decide(at) => at,
        }
    }
}

/// Sizes above `low` up to and with `high`, evenly spread on either side of the usual minimum.
fn candidates(low: u32, high: u32) -> BTreeSet<u32> {
    if low + 1 < USUAL_MIN && USUAL_MIN < high {
        let middle = low.midpoint(USUAL_MIN);
        let below = [low.midpoint(middle), middle, middle.midpoint(USUAL_MIN), USUAL_MIN];
        return below.into_iter().chain(candidates(USUAL_MIN, high)).collect();
    }
    (1..=CANDIDATES).map(|i| low + ((high - low) * i).div_ceil(CANDIDATES)).collect()
}

#[cfg(test)]
mod tests;
