//! Place of this replica in the config. No I/O, no clock.

use std::time::{Duration, Instant};

/// Time from the publication of a replica until all nodes take packets from it, also those whose route-agent
/// is being replaced. For each node, as long as the controller may wait with a version.
const ADMISSION: Duration = Duration::from_secs(10);
const NODE_ADMISSION: Duration = Duration::from_millis(25);

/// Presence of this replica in the config.
#[derive(Debug)]
pub(super) struct Listing {
    started: Instant,
    /// Time since which it is listed.
    since: Option<Instant>,
    was_listed: bool,
    /// Other replicas are listed, and this one is not.
    is_unlisted: bool,
    nodes: u32,
}

impl Listing {
    pub(super) fn new(now: Instant) -> Self {
        Self { started: now, since: None, was_listed: false, is_unlisted: false, nodes: 0 }
    }

    /// Takes in a config of a cluster of so many nodes.
    pub(super) fn follow(&mut self, is_listed: bool, has_others: bool, nodes: usize, now: Instant) {
        self.is_unlisted = has_others && !is_listed;
        self.was_listed |= is_listed;
        if is_listed {
            self.since.get_or_insert(now);
        } else if has_others {
            self.since = None;
        }
        self.nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
    }

    /// True if all nodes take this replica's packets.
    pub(super) fn is_admitted(&self, now: Instant) -> bool {
        let time = ADMISSION + NODE_ADMISSION * self.nodes;
        self.since.is_some_and(|since| now >= since + time)
    }

    /// True if other replicas are to have the tunnel before this one, which is in no config, or not yet.
    pub(super) fn is_unlisted(&self) -> bool {
        self.is_unlisted
    }

    /// True if the config has left this replica out: one that has just started may only be in no config yet.
    pub(super) fn is_left_out(&self, now: Instant) -> bool {
        self.is_unlisted && (self.was_listed || now >= self.started + ADMISSION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_is_admitted_anew_once_it_is_listed_again() {
        let now = Instant::now();
        let mut listing = Listing::new(now);
        listing.follow(true, true, 40, now);
        assert!(!listing.is_admitted(now + ADMISSION) && !listing.is_left_out(now));
        let later = now + ADMISSION + Duration::from_secs(1);
        assert!(listing.is_admitted(later));
        listing.follow(false, true, 40, later);
        assert!(!listing.is_admitted(later) && listing.is_unlisted());
        assert!(listing.is_left_out(later));
        listing.follow(true, true, 40, later);
        assert!(!listing.is_admitted(later) && !listing.is_left_out(later));
    }

    #[test]
    fn unlisted_replica_is_left_out_after_a_while() {
        let now = Instant::now();
        let mut listing = Listing::new(now);
        listing.follow(false, true, 1, now);
        assert!(listing.is_unlisted() && !listing.is_left_out(now + ADMISSION / 2));
        assert!(listing.is_left_out(now + ADMISSION), "restarted since");
        listing.follow(false, false, 1, now);
        assert!(
            !listing.is_unlisted() && !listing.is_left_out(now + ADMISSION),
            "nobody is listed"
        );
    }
}
