use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::key::Key;

/// Packets may overtake each other by this much. A weft gateway that misses answers takes the session back a
/// little later.
const REORDERING: Duration = Duration::from_millis(500);

/// Validity of an observation, which is a little over twice the time since the one before. A weft
/// gateway without answers sends bursts of probes, and begins within the two seconds between two
/// probes; other WireGuards are slower.
const MIN_VALIDITY: Duration = Duration::from_millis(2500);
const MAX_VALIDITY: Duration = Duration::from_secs(12);

/// Detects a second gateway that uses the peer's private key.
///
/// A peer that has sealed with a key never goes back to an older one. So whatever is sealed with a
/// superseded key, later than packets are reordered, comes from a second gateway with the same
/// private key, whose last handshake was the earlier one. A NAT that changes the endpoint with
/// every packet is no duplicate: all its packets have the same key.
#[derive(Default)]
pub(super) struct DuplicateDetector {
    endpoints: Option<[SocketAddr; 2]>,
    seen: Option<Instant>,
    valid_until: Option<Instant>,
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
        let Some(endpoint) = endpoint.filter(|at| *at != from && is_late) else { return };
        let interval = self.seen.map(|seen| now.saturating_duration_since(seen));
        let validity = interval.unwrap_or_default() * 11 / 5;
        self.endpoints = Some([from.min(endpoint), from.max(endpoint)]);
        self.seen = Some(now);
        self.valid_until = Some(now + validity.clamp(MIN_VALIDITY, MAX_VALIDITY));
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.endpoints = self.endpoints.filter(|_| self.valid_until.is_some_and(|end| now < end));
    }

    /// Deadline of the next [`Self::expire`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.valid_until.filter(|_| self.endpoints.is_some())
    }

    /// Both endpoints in ascending order.
    pub(super) fn endpoints(&self) -> Option<[SocketAddr; 2]> {
        self.endpoints
    }
}
