use std::time::{Duration, Instant};

/// Messages a second from the peer's own address. A peer that is lost sends one.
const FROM_KNOWN: u32 = 50;

/// Messages a second from all other addresses together: answers with cookies cost some 4 us each,
/// so this is half a percent of a core.
const FROM_OTHERS: u32 = 1000;

/// Bounds the handshake messages that are worked on each second.
///
/// The peer's address has a share of its own, so that a flood from elsewhere never takes its
/// place.
pub(super) struct HandshakeLimiter {
    window_start: Instant,
    known: u32,
    others: u32,
}

impl HandshakeLimiter {
    pub(super) fn new(now: Instant) -> Self {
        Self { window_start: now, known: 0, others: 0 }
    }

    pub(super) fn admits(&mut self, is_known: bool, now: Instant) -> bool {
        if now.saturating_duration_since(self.window_start) >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        let (count, limit) = match is_known {
            true => (&mut self.known, FROM_KNOWN),
            false => (&mut self.others, FROM_OTHERS),
        };
        let admits = *count < limit;
        *count += u32::from(admits);
        admits
    }

    /// The message that was just admitted cost next to nothing.
    pub(super) fn give_back(&mut self, is_known: bool) {
        let count = if is_known { &mut self.known } else { &mut self.others };
        *count = count.saturating_sub(1);
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
mod tests {
    use super::*;

    #[test]
    fn a_flood_from_elsewhere_leaves_the_peers_share_alone() {
        let start = Instant::now();
        let mut limiter = HandshakeLimiter::new(start);
        let admitted = (0..100_000).filter(|_| limiter.admits(false, start)).count();
        assert_eq!(admitted, FROM_OTHERS as usize);
        assert!(limiter.admits(true, start));
        assert!(limiter.admits(false, start + Duration::from_secs(1)));
    }
}
