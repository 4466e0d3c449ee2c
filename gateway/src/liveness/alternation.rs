//! Alternation of probe trains: a server sends its own halfway between two of its client's, so that
//! a fault of the way shows within half an interval, whichever end notices it.

use std::time::{Duration, Instant};

/// Time for the next train of this end, where the peer's has just arrived: at most an eighth of the
/// interval from `next`, as the peer's interval may be another one.
pub fn alternate(next: Instant, now: Instant, interval: Duration) -> Instant {
    let step = interval / 8;
    (now + interval / 2).min(next + step).max(next - step).max(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const INTERVAL: Duration = Duration::from_secs(2);

    /// Times between the client's last train and the server's, after some seconds of both.
    fn offset(client: Duration, first: Duration) -> Duration {
        let start = Instant::now();
        let (mut train, mut next, mut aligned) = (start, start + first, false);
        for millis in 0..20_000 {
            let now = start + millis * MS;
            if now >= next {
                (next, aligned) = (now + INTERVAL, false);
            }
            if now >= train {
                train = now + client;
                if !std::mem::replace(&mut aligned, true) {
                    next = alternate(next, now, INTERVAL);
                }
            }
        }
        next.max(train) - next.min(train)
    }

    #[test]
    fn trains_of_two_ends_alternate() {
        for first in (0..2000).step_by(50) {
            assert_eq!(offset(INTERVAL, first * MS), INTERVAL / 2, "from {first} ms");
        }
    }

    #[test]
    fn interval_stays_with_a_peer_that_has_another() {
        let now = Instant::now();
        for (next, least) in [(0, 0), (50, 0), (200, 0), (1000, 750), (2000, 1750)] {
            let aligned = alternate(now + next * MS, now, INTERVAL);
            assert!(aligned >= now + least * MS && aligned <= now + (next + 250) * MS);
        }
    }
}
