use std::time::{Duration, Instant};

/// Time that the queue may stay long before a drop: longer than the bursts that a round trip inside
/// a datacentre makes.
const INTERVAL: Duration = Duration::from_millis(10);

/// Decides when to drop a datagram before the socket's buffer overflows.
///
/// Two gateways send each other no backpressure: where the sender's is the faster, the receiver's
/// socket fills up, and then loses whole trains of 45 packets, of all flows at once. One packet at
/// a time, dropped early, slows TCP just as well and costs one retransmission. The time of the next
/// drop follows CoDel's control law (RFC 8289 section 3.3), with the length of the queue in place
/// of the time spent in it, which the socket does not report.
#[derive(Debug, Default)]
pub(super) struct EarlyDrop {
    long_since: Option<Instant>,
    next: Option<Instant>,
    /// Drops since the queue became long.
    count: u32,
}

impl EarlyDrop {
    /// The queue is long at `now`, or is not. Returns whether to drop one datagram.
    pub(super) fn decide(&mut self, is_long: bool, now: Instant) -> bool {
        if !is_long {
            *self = Self::default();
            return false;
        }
        let first = *self.long_since.get_or_insert(now) + INTERVAL;
        if now < self.next.unwrap_or(first) {
            return false;
        }
        self.count += 1;
        self.next = Some(now + INTERVAL.div_f64(f64::from(self.count).sqrt()));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drops(queue: impl Fn(u64) -> bool, ms: u64) -> Vec<u64> {
        let (start, mut early) = (Instant::now(), EarlyDrop::default());
        (0..ms).filter(|&ms| early.decide(queue(ms), start + Duration::from_millis(ms))).collect()
    }

    #[test]
    fn a_burst_is_let_through() {
        assert!(drops(|ms| ms % 20 < 9, 1000).is_empty());
    }

    #[test]
    fn long_queue_is_dropped_from_increasingly() {
        let at = drops(|_| true, 200);
        assert_eq!(at[..3], [10, 20, 28]);
        let gaps: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.is_sorted_by(|a, b| a >= b), "{gaps:?}");
        assert!(gaps.last().unwrap() <= &3, "{gaps:?}");
    }

    #[test]
    fn queue_that_was_short_starts_over() {
        // Long for 100 ms, short for one, long again.
        let at = drops(|ms| ms != 100, 200);
        let again: Vec<u64> = at.into_iter().filter(|ms| *ms >= 100).collect();
        assert_eq!(again[..3], [111, 121, 129]);
    }
}
