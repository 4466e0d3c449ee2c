use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Changes that are published as they come: a client tries several source ports in a row.
const BURST: u32 = 5;
/// Time after which one more may be.
const INTERVAL: Duration = Duration::from_secs(5);

/// The peer's endpoint as it is published: a token bucket limits how often it changes.
///
/// Each published change costs a pass over the kernel's state, a path search and a status write,
/// but behind some NATs the endpoint changes with every packet. Packets go to the newest endpoint
/// at all times; the last of many changes is published as soon as there is a token. Changes to and
/// from an endpoint that the configuration names and the peer has not answered from need none: they
/// are as rare as changes of the configuration.
#[derive(Debug)]
pub(super) struct PublishedEndpoint {
    endpoint: Option<SocketAddr>,
    tokens: u32,
    refilled_at: Instant,
}

impl PublishedEndpoint {
    pub(super) fn new(now: Instant) -> Self {
        Self { endpoint: None, tokens: BURST, refilled_at: now }
    }

    /// The endpoint to publish at `now`, while packets go to `current`, and the peer has not
    /// answered from `unproven`.
    pub(super) fn update(
        &mut self,
        current: Option<SocketAddr>,
        unproven: Option<SocketAddr>,
        now: Instant,
    ) -> Option<SocketAddr> {
        if self.endpoint == current {
            return current;
        }
        self.refill(now);
        let ends = [self.endpoint, current];
        if ends.contains(&None) || unproven.is_some() && ends.contains(&unproven) {
            self.endpoint = current;
        } else if self.tokens > 0 {
            self.tokens -= 1;
            self.endpoint = current;
        }
        self.endpoint
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.refilled_at).as_nanos();
        let tokens = u32::try_from(passed / INTERVAL.as_nanos()).unwrap_or(BURST).min(BURST);
        self.tokens = (self.tokens + tokens).min(BURST);
        self.refilled_at = match self.tokens {
            BURST => now,
            _ => self.refilled_at + INTERVAL * tokens,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(port: u16) -> Option<SocketAddr> {
        Some(SocketAddr::from(([192, 0, 2, 1], port)))
    }

    #[test]
    fn flipping_endpoint_is_published_at_a_bounded_rate() {
        let start = Instant::now();
        let mut published = PublishedEndpoint::new(start);
        let (mut last, mut changes, mut now) = (None, 0, start);
        for ms in 0..60_000 {
            now = start + Duration::from_millis(ms);
            let next = published.update(endpoint(40_000 + (ms % 2) as u16), None, now);
            changes += u32::from(next != last);
            last = next;
        }
        assert!((BURST..=BURST + 12).contains(&changes), "{changes} in a minute");
        let settled = published.update(endpoint(7), None, now + INTERVAL);
        assert_eq!(settled, endpoint(7), "the last one is published");
    }

    #[test]
    fn single_changes_are_published_at_once() {
        let mut now = Instant::now();
        let mut published = PublishedEndpoint::new(now);
        for port in 1..100 {
            assert_eq!(published.update(endpoint(port), None, now), endpoint(port));
            now += INTERVAL;
        }
    }

    #[test]
    fn configured_endpoints_are_published_at_once() {
        let now = Instant::now();
        let mut published = PublishedEndpoint::new(now);
        for port in 1..100 {
            let unproven = endpoint(port);
            assert_eq!(published.update(unproven, unproven, now), unproven);
            assert_eq!(published.update(endpoint(1_000), unproven, now), endpoint(1_000));
        }
    }
}
