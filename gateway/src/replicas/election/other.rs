//! Another replica, as its heartbeats show it.

use std::time::{Duration, Instant};

use super::{Heartbeat, INTERVAL, MAX_TIMEOUT, TIMEOUT};

/// Heartbeats that a kernel refuses before its replica counts as gone: it may just be starting.
const REFUSALS: u8 = 2;

#[derive(Debug, Default)]
pub(super) struct Other {
    pub(super) last: Option<(Heartbeat, Instant)>,
    /// The last one of a process that has or had the tunnel, also after that has started anew.
    pub(super) with_tunnel: Option<Heartbeat>,
    pub(super) refusals: u8,
    /// The longest time that the other one took between two heartbeats, less a percent with each since.
    pub(super) gap: Duration,
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

    pub(super) fn beats(&self, now: Instant) -> bool {
        self.last.is_some_and(|(_, at)| now.saturating_duration_since(at) <= self.timeout())
    }

    /// Time without a heartbeat after which it is taken for lost.
    pub(super) fn timeout(&self) -> Duration {
        (self.gap * 3).clamp(TIMEOUT, MAX_TIMEOUT)
    }
}

/// Time from one heartbeat to the next. Those that got lost on the way, as while a node is cut off, make no longer
/// gap, and neither does a restart.
pub(super) fn pace(last: &Heartbeat, next: &Heartbeat, elapsed: Duration) -> Duration {
    let beats = u32::try_from(next.sequence.saturating_sub(last.sequence)).unwrap_or(u32::MAX);
    if last.incarnation == next.incarnation { elapsed / beats.max(1) } else { Duration::ZERO }
}
