//! Record of replicas that have the tunnel at the same time.

use std::time::{Duration, Instant};

/// Replicas that had the tunnel beside the one that keeps it, as one does whose node was cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contest {
    /// Time of the last sign of one, to a second: the peer may have packets under one key from two gateways.
    pub at: Option<Instant>,
    /// Number of beginnings, ends, outbiddings and returns: each time the peer, or nodes, may have followed the other
    /// one.
    pub turns: u64,
    pub(super) is_on: bool,
}

impl Contest {
    const STEP: Duration = Duration::from_secs(1);

    pub(super) fn note(&mut self, is_on: bool, is_outbid: bool, now: Instant) {
        if is_outbid || is_on != self.is_on {
            self.turn(now);
        } else if is_on && self.at.is_none_or(|at| now >= at + Self::STEP) {
            self.at = Some(now);
        }
        self.is_on = is_on;
    }

    pub(super) fn turn(&mut self, now: Instant) {
        self.at = Some(now);
        self.turns += 1;
    }
}
