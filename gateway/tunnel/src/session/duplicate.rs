use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::key::Key;

/// Packets may overtake each other by this much.
const REORDERING: Duration = Duration::from_secs(1);

/// How long one observation stands for a duplicate. Each of the two sends probes, which come every
/// two seconds at default settings.
const RETENTION: Duration = Duration::from_secs(10);

/// Detects a second gateway that uses the peer's private key.
///
/// A peer that has sealed with a key never goes back to an older one. So whatever is sealed with a
/// superseded key, later than packets are reordered, comes from a second gateway with the same
/// private key, whose last handshake was the earlier one. A NAT that changes the endpoint with
/// every packet is no duplicate: all its packets have the same key.
#[derive(Default)]
pub(super) struct DuplicateDetector {
    seen: Option<([SocketAddr; 2], Instant)>,
}

impl DuplicateDetector {
    /// Takes note of a packet sealed with a key that `current` has superseded. It came from the
    /// first endpoint, those with the current key come from the second.
    pub(super) fn note(
        &mut self,
        current: &Key,
        (from, endpoint): (SocketAddr, Option<SocketAddr>),
        now: Instant,
    ) {
        let is_late = current.used.is_some_and(|used| now >= used + REORDERING);
        if let Some(endpoint) = endpoint.filter(|at| *at != from && is_late) {
            self.seen = Some(([from.min(endpoint), from.max(endpoint)], now));
        }
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.seen = self.seen.filter(|(_, at)| now < *at + RETENTION);
    }

    /// Both endpoints in ascending order.
    pub(super) fn endpoints(&self) -> Option<[SocketAddr; 2]> {
        self.seen.map(|(endpoints, _)| endpoints)
    }
}
