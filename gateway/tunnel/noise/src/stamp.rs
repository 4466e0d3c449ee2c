use std::time::{Duration, Instant};

/// Start of TAI64N labels (<https://cr.yp.to/libtai/tai64.html>): 1970 in UTC, and the seconds by
/// which TAI is ahead of it. boringtun counts the same 37, Linux 10.
const UNIX_EPOCH: u64 = (1 << 62) + 37;

const NANOS: u32 = 1_000_000_000;

/// A TAI64N timestamp. A responder believes an initiation only if its timestamp is later than that
/// of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tai64n {
    seconds: u64,
    nanos: u32,
}

impl Tai64n {
    /// Length of its encoding in bytes.
    pub const LEN: usize = 12;

    /// `unix` is the time since 1970, leap seconds not counted.
    pub fn from_unix(unix: Duration) -> Self {
        Self { seconds: UNIX_EPOCH.saturating_add(unix.as_secs()), nanos: unix.subsec_nanos() }
    }

    /// Time since 1970, zero if it is earlier.
    pub fn to_unix(self) -> Duration {
        Duration::new(self.seconds.saturating_sub(UNIX_EPOCH), self.nanos.min(NANOS - 1))
    }

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.seconds.to_be_bytes());
        bytes[8..].copy_from_slice(&self.nanos.to_be_bytes());
        bytes
    }

    /// Any bytes are a timestamp: only the order of them counts.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [a, b, c, d, e, f, g, h, nanos @ ..] = bytes;
        let seconds = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        Self { seconds, nanos: u32::from_be_bytes(nanos) }
    }

    fn next(self) -> Self {
        match self.nanos + 1 < NANOS {
            true => Self { nanos: self.nanos + 1, ..self },
            false => Self { seconds: self.seconds.saturating_add(1), nanos: 0 },
        }
    }
}

/// Source of the timestamps of our initiations, each later than the one before.
#[derive(Clone, Debug)]
pub struct Stamper {
    /// The wall clock at `at`, as time since 1970.
    unix: Duration,
    at: Instant,
    last: Tai64n,
}

impl Stamper {
    /// `unix` is what the wall clock shows at `now`, as time since 1970. All timestamps will be later
    /// than `floor`: the last one of whoever had the same private key before, if that is known.
    pub fn new(unix: Duration, now: Instant, floor: Tai64n) -> Self {
        Self { unix, at: now, last: floor }
    }

    /// Returns the timestamp of an initiation that is sent at `now`: the clock's, unless that is not
    /// after the last one.
    pub fn stamp(&mut self, now: Instant) -> Tai64n {
        let unix = self.unix.saturating_add(now.saturating_duration_since(self.at));
        self.last = Tai64n::from_unix(unix).max(self.last.next());
        self.last
    }

    /// Returns the last timestamp, which is the floor of a successor with the same private key.
    pub fn last(&self) -> Tai64n {
        self.last
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
mod tests {
    use super::*;

    #[test]
    fn stamps_follow_the_clock() {
        let now = Instant::now();
        let mut stamper = Stamper::new(Duration::from_secs(5), now, Tai64n::default());
        let stamp = stamper.stamp(now + Duration::from_millis(1500));
        assert_eq!(stamp, Tai64n::from_unix(Duration::from_millis(6500)));
        let bytes = stamp.to_bytes();
        assert_eq!(bytes[..8], (0x4000_0000_0000_0000_u64 + 37 + 6).to_be_bytes());
        assert_eq!(bytes[8..], 500_000_000_u32.to_be_bytes());
        assert_eq!(Tai64n::from_bytes(bytes), stamp);
        assert_eq!(stamp.to_unix(), Duration::from_millis(6500));
        assert_eq!(Tai64n::default().to_unix(), Duration::ZERO);
    }

    #[test]
    fn stamps_rise_while_the_clock_stands_still() {
        let now = Instant::now();
        let mut stamper = Stamper::new(Duration::from_nanos(999_999_998), now, Tai64n::default());
        let stamps = [0; 4].map(|_| stamper.stamp(now).to_bytes());
        assert!(stamps.is_sorted_by(|a, b| a < b), "{stamps:?}");
        let earlier = now.checked_sub(Duration::from_secs(1)).unwrap();
        assert!(stamper.stamp(earlier).to_bytes() > stamps[3]);
    }

    #[test]
    fn clock_behind_the_floor_stamps_after_it() {
        let now = Instant::now();
        let floor = Tai64n::from_unix(Duration::from_secs(1000));
        let mut stamper = Stamper::new(Duration::from_secs(400), now, floor);
        let (first, second) = (stamper.stamp(now), stamper.stamp(now + Duration::from_secs(9)));
        assert!(first > floor && second > first);
        assert_eq!(stamper.last(), second);
        let caught_up = stamper.stamp(now + Duration::from_secs(601));
        assert_eq!(caught_up, Tai64n::from_unix(Duration::from_secs(1001)));
    }
}
