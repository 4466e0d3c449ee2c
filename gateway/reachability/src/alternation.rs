//! Alternation of probe trains: a server sends its own halfway between two of its client's, so that
//! a fault of the way shows within half an interval, whichever end notices it.

use std::time::{Duration, Instant};

/// Time for the next train of an end that probes every `own`, where one of a peer that probes every
/// `peer` has just arrived. Trains of other intervals cannot alternate.
pub fn alternate(now: Instant, own: Duration, peer: Duration) -> Option<Instant> {
    (own == peer).then(|| now + own / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const INTERVAL: Duration = Duration::from_secs(2);

    /// Times between the client's last train and the server's, after three intervals of both.
    fn offset(client: Duration, first: Duration) -> Duration {
        let start = Instant::now();
        let (mut train, mut next, mut is_final) = (start, start + first, false);
        for millis in 0..6_000 {
            let now = start + millis * MS;
            if now >= next {
                (next, is_final) = (now + INTERVAL, false);
            }
            if now >= train {
                train = now + client;
                if !std::mem::replace(&mut is_final, true) {
                    next = alternate(now, INTERVAL, client).unwrap_or(next);
                }
            }
        }
        next.max(train) - next.min(train)
    }

    #[test]
    fn trains_of_two_ends_alternate_at_once() {
        for first in (0..2000).step_by(50) {
            assert_eq!(offset(INTERVAL, first * MS), INTERVAL / 2, "from {first} ms");
        }
    }

    #[test]
    fn interval_stays_with_a_peer_that_has_another() {
        assert_eq!(alternate(Instant::now(), INTERVAL, INTERVAL / 2), None);
    }
}
