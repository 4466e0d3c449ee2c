//! Another replica, as its heartbeats show it.

use std::time::{Duration, Instant};

use super::{Heartbeat, INTERVAL, MAX_TIMEOUT, MISS, TIMEOUT};

/// Heartbeats that a kernel refuses before its replica counts as gone: it may just be starting.
const REFUSALS: u8 = 2;

/// Heartbeats that the share of lost ones is computed from.
const LOSS_WINDOW: f64 = 100.0;
/// Most heartbeats from one that arrives to the next: those of a longer cut are no share of anything.
const MAX_STEP: u64 = 6;
/// Least share of lost ones that counts.
const MIN_SHARE: f64 = 0.015;
/// Chance that as many in a row get lost as a timeout has room for.
const ROW_OF_LOSSES: f64 = 1e-8;

#[derive(Debug, Default)]
pub(super) struct Other {
    pub(super) last: Option<(Heartbeat, Instant)>,
    /// The last one of a process that has or had the tunnel, also after that has started anew.
    pub(super) with_tunnel: Option<Heartbeat>,
    pub(super) refusals: u8,
    pub(super) refused_at: Option<Instant>,
    /// The longest time that the other one took between two heartbeats, less a percent with each since.
    pub(super) gap: Duration,
    pub(super) losses: Losses,
    /// Presence in the config, and the time at which that was first observed.
    pub(super) is_listed: bool,
    pub(super) listed_at: Option<Instant>,
}

impl Other {
    /// Returns whether its kernel refuses heartbeats. That can be forged while the replica is alive, and counts
    /// once its own heartbeats stay away.
    pub(super) fn is_gone(&self, now: Instant) -> bool {
        let beats =
            |(_, at): &(Heartbeat, Instant)| now.saturating_duration_since(*at) < INTERVAL * 2;
        self.refusals >= REFUSALS && !self.last.as_ref().is_some_and(beats)
    }

    /// Returns whether its kernel still refuses heartbeats, so that this replica receives something. Linux sends one
    /// such error a second.
    pub(super) fn answers(&self, now: Instant) -> bool {
        self.is_gone(now) && self.refused_at.is_some_and(|at| now <= at + MISS)
    }

    pub(super) fn beats(&self, now: Instant) -> bool {
        self.last.is_some_and(|(_, at)| now.saturating_duration_since(at) <= self.timeout())
    }

    /// Time without a heartbeat after which it is taken for lost.
    pub(super) fn timeout(&self) -> Duration {
        self.losses.timeout().max(self.gap * 3).clamp(TIMEOUT, MAX_TIMEOUT)
    }
}

/// Share of the heartbeats that get lost on the way.
#[derive(Debug, Default)]
pub(super) struct Losses {
    share: f64,
    count: f64,
}

impl Losses {
    /// A heartbeat arrived, so many after the one before.
    pub(super) fn note(&mut self, beats: u64) {
        if beats > MAX_STEP {
            return;
        }
        for i in (0..beats).rev() {
            self.count = LOSS_WINDOW.min(self.count + 1.0);
            let lost = if i > 0 { 1.0 } else { 0.0 };
            self.share += (lost - self.share) / self.count;
        }
    }

    /// Time in which hardly ever all get lost: a replica whose node loses some of what it receives had better not have
    /// the tunnel.
    fn timeout(&self) -> Duration {
        if self.share < MIN_SHARE {
            return Duration::ZERO;
        }
        let beats = (ROW_OF_LOSSES.ln() / self.share.ln()).clamp(0.0, 100.0);
        INTERVAL.mul_f64(beats + 1.0)
    }
}

/// Time from one heartbeat to the next. Those that got lost on the way, as while a node is cut off, make no longer
/// gap, and neither does a restart.
pub(super) fn pace(last: &Heartbeat, next: &Heartbeat, elapsed: Duration) -> Duration {
    let beats = u32::try_from(next.sequence.saturating_sub(last.sequence)).unwrap_or(u32::MAX);
    if last.incarnation == next.incarnation { elapsed / beats.max(1) } else { Duration::ZERO }
}
