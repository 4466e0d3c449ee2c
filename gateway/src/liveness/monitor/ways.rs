//! Ways by which a client tries to reach its server: addresses of it, and source ports of its own.
//!
//! Connection tracking on the way may pin the client's packets to a server that is gone, so a way that is
//! given up is followed by one from another source port. A client that has just started, and one of a server with
//! replicas, stays at its port for the first two: a server whose address has changed, or another replica,
//! initiates there.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Number of probes a client leaves unanswered before it tries another way, and the time it then
/// gives that way.
const RETRY_PROBES: u32 = 3;
/// The number of a server with replicas: another one may answer elsewhere.
const RETRY_PROBES_OF_REPLICAS: u32 = 1;
const RETRY_PAUSE: Duration = Duration::from_secs(15);
/// The same for so many ways after one that worked: some lead to where the server was followed to, some to
/// its configured endpoint.
const SOON_PAUSE: Duration = Duration::from_secs(5);
const SOON_WAYS: u32 = 4;
/// Time that a client which has just started gives each of its first ways: two initiations. They may be
/// those that an earlier gateway had.
const FIRST_TRY: Duration = Duration::from_secs(2);
const FIRST_WAYS: u32 = 2;
/// Minimum time between two initiations to a silent peer.
const RENEWAL_INTERVAL: Duration = Duration::from_millis(1200);

pub(super) struct Ways {
    /// Time of the last change of the way, or of the start.
    changed: Instant,
    /// Number of first ways left to try.
    first_left: u32,
    renewed: Option<Instant>,
    /// Number of ways given up since one worked.
    in_vain: u32,
    /// Endpoint that was given up last.
    left: Option<SocketAddr>,
    /// Counts that are not yet published.
    retries: u64,
    ports: u64,
}

/// State of the connection as the next way depends on it.
#[derive(Clone, Copy)]
pub(super) struct Signs {
    pub(super) interval: Duration,
    pub(super) peer_has_replicas: bool,
    pub(super) is_connected: bool,
    /// Time since which probes are unanswered; none if there are no probes.
    pub(super) unanswered: Option<Instant>,
    pub(super) is_probing: bool,
    /// Since the start.
    pub(super) last_authentic: Option<Instant>,
    /// The peer reports that it receives nothing.
    pub(super) is_cut: bool,
    /// This gateway receives nothing, and a replica of it may have taken over.
    pub(super) is_deaf: bool,
    /// Endpoint that packets go to.
    pub(super) endpoint: Option<SocketAddr>,
}

impl Ways {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            changed: now,
            first_left: FIRST_WAYS,
            renewed: None,
            in_vain: 0,
            left: None,
            retries: 0,
            ports: 0,
        }
    }

    /// Returns whether a peer that is silent now is to be sent an initiation, and takes note of that.
    pub(super) fn renew(&mut self, now: Instant) -> bool {
        let is_due = self.renewed.is_none_or(|at| now >= at + RENEWAL_INTERVAL);
        if is_due {
            self.renewed = Some(now);
        }
        is_due
    }

    /// Returns whether another way is to be tried.
    pub(super) fn is_due(&self, signs: Signs, now: Instant) -> bool {
        let older = |at: Instant, than: Duration| now.saturating_duration_since(at) > than;
        let is_first = self.is_first(signs);
        let probes = if signs.peer_has_replicas { RETRY_PROBES_OF_REPLICAS } else { RETRY_PROBES };
        let patience = signs.interval.max(Duration::from_secs(1));
        let timeout = match is_first {
            true => FIRST_TRY,
            false => patience * probes,
        };
        let lost = match signs.is_probing {
            true => signs.unanswered.is_some_and(|since| older(since, timeout)),
            false => !signs.is_connected,
        };
        // A replica that receives nothing may go on to send beside one that has taken over.
        let is_quiet = signs.last_authentic.is_none_or(|at| older(at, timeout))
            || signs.is_cut && signs.peer_has_replicas;
        let is_soon = is_first || signs.peer_has_replicas && self.in_vain == 1;
        let pause = match signs.last_authentic {
            _ if signs.is_deaf => RETRY_PAUSE,
            _ if is_soon => timeout,
            _ if signs.is_connected => patience * RETRY_PROBES,
            Some(at) if at > self.changed || self.in_vain < SOON_WAYS => SOON_PAUSE,
            Some(_) | None => RETRY_PAUSE,
        };
        lost && is_quiet && older(self.changed, pause)
    }

    /// Gives the present way up.
    pub(super) fn change(&mut self, signs: Signs, now: Instant) {
        // Packets of one that receives nothing prove no way to it.
        let is_proof = |at: Instant| at > self.changed && !(signs.is_cut && self.in_vain > 0);
        let has_worked = signs.last_authentic.is_some_and(is_proof);
        let is_early = self.is_first(signs) && self.first_left > 1;
        self.first_left = if is_early { self.first_left - 1 } else { 0 };
        let keeps_port = is_early || signs.peer_has_replicas && has_worked;
        self.in_vain = if has_worked { 1 } else { self.in_vain.saturating_add(1) };
        (self.changed, self.left) = (now, signs.endpoint);
        self.retries += 1;
        self.ports += u64::from(!keeps_port);
    }

    pub(super) fn left(&self) -> Option<SocketAddr> {
        self.left
    }

    /// Returns the numbers of ways and of source ports given up since the last call.
    pub(super) fn take_counts(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.retries), std::mem::take(&mut self.ports))
    }

    /// Nothing has been received since the start.
    fn is_first(&self, signs: Signs) -> bool {
        self.first_left > 0 && signs.last_authentic.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Signs of a client that last received a packet at that time.
    fn signs(last_authentic: Option<Instant>, unanswered: Option<Instant>) -> Signs {
        Signs {
            interval: 2 * SECOND,
            peer_has_replicas: false,
            is_connected: last_authentic.is_some(),
            unanswered,
            is_probing: true,
            last_authentic,
            is_cut: false,
            is_deaf: false,
            endpoint: None,
        }
    }

    /// Seconds at which another way is tried, each with the number of source ports given up by then.
    fn changes(
        ways: &mut Ways,
        signs: Signs,
        start: Instant,
        seconds: RangeInclusive<u32>,
    ) -> Vec<(u32, u64)> {
        let mut changes = Vec::new();
        for second in seconds {
            let now = start + second * SECOND;
            if ways.is_due(signs, now) {
                ways.change(signs, now);
                changes.push((second, ways.ports));
            }
        }
        changes
    }

    /// The only other replica may be gone, and the server elsewhere.
    #[test]
    fn deaf_client_tries_other_ways_seldom() {
        let start = Instant::now();
        let lost = Some(start + 10 * SECOND);
        let signs = Signs { is_deaf: true, peer_has_replicas: true, ..signs(lost, lost) };
        let mut ways = Ways::new(start);
        let changes = changes(&mut ways, signs, start, 10..=60);
        let seconds: Vec<_> = changes.into_iter().map(|(second, _)| second).collect();
        assert_eq!(seconds, [16, 32, 48]);
    }

    #[test]
    fn client_that_starts_keeps_its_port_for_a_second_try() {
        let start = Instant::now();
        let signs = signs(None, Some(start));
        let changes = changes(&mut Ways::new(start), signs, start, 1..=24);
        assert_eq!(changes, [(3, 0), (6, 1), (22, 2)]);
    }

    #[test]
    fn client_that_was_connected_changes_its_port_at_once() {
        let start = Instant::now();
        let lost = Some(start + 10 * SECOND);
        let signs = signs(lost, lost);
        let mut ways = Ways::new(start);
        assert!(!ways.is_due(signs, start + 16 * SECOND));
        assert!(ways.is_due(signs, start + 17 * SECOND));
        ways.change(signs, start + 17 * SECOND);
        assert_eq!((ways.retries, ways.ports), (1, 1));
        let signs = Signs { is_connected: false, ..signs };
        let changes = changes(&mut ways, signs, start, 18..=90);
        let seconds: Vec<_> = changes.into_iter().map(|(second, _)| second).collect();
        assert_eq!(seconds, [23, 29, 35, 51, 67, 83]);
    }

    #[test]
    fn client_of_replicas_keeps_its_port_for_one_try() {
        let start = Instant::now();
        let lost = Some(start + 10 * SECOND);
        let mut signs = Signs { peer_has_replicas: true, ..signs(lost, lost) };
        let mut ways = Ways::new(start);
        let mut changes = Vec::new();
        for second in 11..=40 {
            let now = start + second * Duration::from_millis(1001);
            if ways.is_due(signs, now) {
                ways.change(signs, now);
                changes.push((second, ways.ports));
            }
            signs.is_connected = second < 20;
        }
        assert_eq!(changes, [(12, 0), (14, 1), (20, 2), (25, 3), (40, 4)]);
    }
    /// Its packets arrive, and it receives none.
    #[test]
    fn client_leaves_a_replica_that_receives_nothing() {
        let start = Instant::now();
        let lost = Some(start + 10 * SECOND);
        let now = start + Duration::from_millis(12_100);
        let ways = Ways::new(start);
        for (peer_has_replicas, is_cut) in
            [(false, false), (false, true), (true, false), (true, true)]
        {
            let signs = Signs { peer_has_replicas, is_cut, ..signs(Some(now), lost) };
            assert_eq!(ways.is_due(signs, now), peer_has_replicas && is_cut);
        }
    }

    /// A flow that connection tracking leads to it would go on to do so.
    #[test]
    fn deaf_replica_is_left_with_its_port() {
        let start = Instant::now();
        let (lost, mut ways) = (Some(start + SECOND), Ways::new(start));
        let ports = (10..14).map(|after| {
            let now = start + after * 10 * SECOND;
            let signs = Signs { peer_has_replicas: true, is_cut: true, ..signs(Some(now), lost) };
            assert!(ways.is_due(signs, now + SECOND), "after {after}");
            ways.change(signs, now);
            ways.take_counts().1
        });
        assert_eq!(ports.collect::<Vec<_>>(), [0, 1, 1, 1]);
    }
}
