//! Reachability of the peer, as a state machine driven by events and their times.
//!
//! Connected means: our probes come back **now**, and the peer's reach us, unless it is a stock
//! Liqo that never pings. Under load probes may drown among data, so any authentic packet counts as
//! a sign of life too, as long as no report shows that the other direction is dead.

use std::time::{Duration, Instant};

use fabric_api::fabric::ProbeSettings;
use fabric_api::networking::ConnectionValue;

/// Interval of a stock Liqo, which does not report its own.
const LIQO_INTERVAL: Duration = Duration::from_secs(2);
/// Longest interval assumed of a peer's probes: a longer one that it reports is cut to this.
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);
/// Without probes: time for which the last packet proves a working tunnel. Sessions last 180 s
/// (WireGuard's REJECT_AFTER_TIME), so a live peer has sent a packet by then.
const SESSION_LIFETIME: Duration = Duration::from_secs(180);
/// Authentic packets per second above which a peer that does not report what it receives is taken
/// to be busy rather than cut off: a half-dead tunnel still delivers only probes and retries.
const BUSY_RATE: u64 = 100;
/// Packets per second from which on queues of the tunnel and of its path may hold probes up, or drop them.
const FULL_RATE: u64 = 5_000;
/// A rate is that of at least so long.
const BUSY_TIME: Duration = Duration::from_millis(100);

/// Report of a weft gateway about itself in its probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerReport {
    /// Interval of its probes; zero if it does not probe.
    pub interval: Duration,
    /// Time since it last got an authentic packet of ours; `None` if never.
    pub received_ago: Option<Duration>,
}

/// The newest signs of life that the engine saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub last_authentic: Option<Instant>,
    pub last_handshake: Option<Instant>,
    /// Packets received so far.
    pub packets: u64,
}

/// The state of one peering's tunnel.
#[derive(Clone, Debug)]
pub struct Machine {
    settings: ProbeSettings,
    value: ConnectionValue,
    latency: Option<Duration>,
    last_pong: Option<Instant>,
    pings: Pings,
    traffic: Traffic,
    /// Packets at some time in the past, and when there last were [`BUSY_RATE`] more a second.
    counted: Option<(u64, Instant)>,
    busy_at: Option<Instant>,
    /// When there last were [`FULL_RATE`] more a second.
    full_at: Option<Instant>,
}

/// State of the probes that the peer sends.
#[derive(Clone, Copy, Debug, Default)]
struct Pings {
    /// Interval of its probes; `None` while nothing shows that the peer sends any.
    interval: Option<Duration>,
    last: Option<Instant>,
    /// Our last authentic packet that the peer reported, and the time of the report.
    peer_received: Option<(Option<Instant>, Instant)>,
}

impl Machine {
    pub fn new(settings: ProbeSettings) -> Self {
        Self {
            settings,
            value: ConnectionValue::Connecting,
            latency: None,
            last_pong: None,
            pings: Pings::default(),
            traffic: Traffic::default(),
            counted: None,
            busy_at: None,
            full_at: None,
        }
    }

    pub fn value(&self) -> ConnectionValue {
        self.value
    }

    pub fn is_connected(&self) -> bool {
        self.value == ConnectionValue::Connected
    }

    /// True if data arrives at a rate at which queues may delay and drop probes.
    pub fn is_full(&self, now: Instant) -> bool {
        self.full_at.is_some_and(|at| now < at + Duration::from_secs(1))
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Round trip of the last probe that came back; `None` unless connected.
    pub fn latency(&self) -> Option<Duration> {
        self.latency.filter(|_| self.is_connected())
    }

    /// Our own probes' settings changed; what was learnt so far stands.
    pub fn handle_settings(&mut self, settings: ProbeSettings, now: Instant) {
        self.settings = settings;
        self.handle_tick(now);
    }

    /// One of our probes came back. `report` is what a weft gateway added to it.
    pub fn handle_pong(&mut self, latency: Duration, report: Option<PeerReport>, now: Instant) {
        self.last_pong = Some(now);
        self.latency = Some(latency);
        self.take_report(report, now);
        self.handle_tick(now);
    }

    /// A probe of the peer reached us.
    pub fn handle_ping(&mut self, report: Option<PeerReport>, now: Instant) {
        if report.is_none() {
            let gap = self.pings.last.map_or(Duration::ZERO, |last| now.duration_since(last));
            self.pings.interval = Some(gap.clamp(LIQO_INTERVAL, LONGEST_INTERVAL));
        }
        self.pings.last = Some(now);
        self.take_report(report, now);
        self.handle_tick(now);
    }

    /// The engine's counters were read.
    pub fn handle_traffic(&mut self, traffic: Traffic, now: Instant) {
        let (before, since) = *self.counted.get_or_insert((traffic.packets, now));
        let time = now.saturating_duration_since(since);
        if time >= BUSY_TIME {
            let packets = traffic.packets.saturating_sub(before);
            let exceeds =
                |rate: u64| u128::from(packets) * 1000 >= time.as_millis() * u128::from(rate);
            for (rate, at) in [(BUSY_RATE, &mut self.busy_at), (FULL_RATE, &mut self.full_at)] {
                if exceeds(rate) {
                    *at = Some(now);
                }
            }
            self.counted = Some((traffic.packets, now));
        }
        self.traffic = traffic;
        self.handle_tick(now);
    }

    /// Time passed. Returns whether the value changed; to be called at [`Self::deadline`].
    pub fn handle_tick(&mut self, now: Instant) -> bool {
        let before = self.value;
        let is_alive = self.alive_until().is_some_and(|until| now < until);
        self.value = match (self.value, is_alive) {
            (_, true) => ConnectionValue::Connected,
            (ConnectionValue::Connecting, false) => ConnectionValue::Connecting,
            (ConnectionValue::Connected | ConnectionValue::Error, false) => ConnectionValue::Error,
        };
        if self.value == ConnectionValue::Error && before != self.value {
            // The next answer may come from another program on the other side.
            self.pings = Pings::default();
            self.last_pong = None;
            self.latency = None;
        }
        before != self.value
    }

    /// Returns when the connection is lost unless something is received before; `None` while there
    /// is none. Newer [`Self::handle_traffic`] may put it off.
    pub fn deadline(&self) -> Option<Instant> {
        self.alive_until().filter(|_| self.is_connected())
    }

    /// Returns until when the packets received so far prove a connection.
    fn alive_until(&self) -> Option<Instant> {
        let after = |event: Option<Instant>, time: Duration| event.map(|at| at + time);
        let Traffic { last_authentic, last_handshake, .. } = self.traffic;
        if !self.settings.enabled {
            return after(last_authentic.max(last_handshake), SESSION_LIFETIME);
        }
        // In the order of options, nothing comes before everything else.
        let comes_back = after(self.last_pong, self.window());
        let reaches_us = match self.pings.interval {
            Some(interval) => after(self.pings.last, self.window().max(self.window_of(interval))),
            None => comes_back,
        };
        // Packets keep a connection, they do not make one.
        let packets = self.packets_flow_until().filter(|_| self.is_connected());
        comes_back.min(reaches_us).max(packets)
    }

    /// Returns until when authentic packets prove a connection, unless ours are reported missing.
    fn packets_flow_until(&self) -> Option<Instant> {
        let window = self.window();
        let silent = self.traffic.last_authentic? + window;
        match self.pings.peer_received {
            // The report may be old: the probes that would renew it drown in the same load.
            Some((received, reported_at)) => {
                (reported_at.saturating_duration_since(received?) <= window).then_some(silent)
            }
            // A completed handshake went both ways.
            None => {
                let handshake = self.traffic.last_handshake? + SESSION_LIFETIME;
                Some(silent.min(self.busy_at? + window).min(handshake))
            }
        }
    }

    fn take_report(&mut self, report: Option<PeerReport>, now: Instant) {
        let Some(report) = report else { return };
        let probes = !report.interval.is_zero();
        self.pings.interval = probes.then(|| report.interval.min(LONGEST_INTERVAL));
        let received = report.received_ago.and_then(|ago| now.checked_sub(ago));
        self.pings.peer_received = Some((received, now));
    }

    /// Returns how long our probes may stay away before they count as lost.
    fn window(&self) -> Duration {
        self.window_of(Duration::from_millis(self.settings.interval_ms.into()))
    }

    /// Returns how long nothing may come if one is due every `interval`. Liqo's time is half an
    /// interval longer and ends just as one more probe may come back, which makes the outcome a race.
    fn window_of(&self, interval: Duration) -> Duration {
        // One lost probe must show before the next one does.
        interval * self.settings.loss_threshold.max(2) - interval / 2
    }
}

/// A latency as Liqo writes it: `<n>ms`, `<n>μs` (U+03BC) below one millisecond, `N/A` if unknown.
///
/// Liqo's metrics read it back as a Go duration, so there is no fraction.
pub fn latency_text(latency: Option<Duration>) -> String {
    match latency {
        None => "N/A".to_owned(),
        Some(l) if l < Duration::from_millis(1) => format!("{}\u{3bc}s", l.as_micros()),
        Some(l) => format!("{}ms", l.as_millis()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(3);
    const WEFT: PeerReport =
        PeerReport { interval: Duration::from_secs(2), received_ago: Some(Duration::ZERO) };

    #[test]
    fn pongs_alone_connect_a_stock_liqo_that_never_pings() {
        let mut sim = Sim::new();
        assert_eq!(sim.value(), ConnectionValue::Connecting);
        sim.machine.handle_pong(RTT, None, sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connected);
        assert_eq!(sim.machine.latency(), Some(RTT));
    }

    #[test]
    fn a_weft_peer_must_reach_us_too() {
        let mut sim = Sim::new();
        sim.machine.handle_pong(RTT, Some(WEFT), sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connecting);
        sim.machine.handle_ping(Some(WEFT), sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connected);
    }

    #[test]
    fn a_weft_peer_without_probing_need_not_ping() {
        let mut sim = Sim::new();
        let silent = PeerReport { interval: Duration::ZERO, ..WEFT };
        sim.machine.handle_pong(RTT, Some(silent), sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connected);
    }

    #[test]
    fn loss_window_ends_in_error_and_recovers() {
        let mut sim = Sim::connected();
        let deadline = sim.machine.deadline().unwrap();
        assert_eq!(deadline - sim.now, Duration::from_secs(9), "4.5 of 2 s, before the fifth");
        sim.pass(Duration::from_millis(8999));
        assert_eq!(sim.value(), ConnectionValue::Connected);
        sim.pass(Duration::from_millis(1));
        assert_eq!(sim.value(), ConnectionValue::Error);
        assert_eq!((sim.machine.latency(), sim.machine.deadline()), (None, None));
        sim.machine.handle_pong(RTT, None, sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connected);
    }

    #[test]
    fn loss_at_100_ms_interval_shows_within_500_ms() {
        let fastest = ProbeSettings { interval_ms: 100, loss_threshold: 5, ..Default::default() };
        let mut sim = Sim::connected();
        sim.machine.handle_settings(fastest, sim.now);
        // Also in the midst of traffic.
        sim.traffic(1000);
        assert_eq!(sim.machine.deadline().unwrap() - sim.now, Duration::from_millis(450));
        let one = ProbeSettings { loss_threshold: 1, ..fastest };
        sim.machine.handle_settings(one, sim.now);
        assert_eq!(sim.machine.deadline().unwrap() - sim.now, Duration::from_millis(150));
    }

    #[test]
    fn a_peer_that_was_never_there_is_connecting_not_lost() {
        let mut sim = Sim::new();
        sim.pass(Duration::from_secs(3600));
        assert_eq!(sim.value(), ConnectionValue::Connecting);
    }

    #[test]
    fn load_does_not_cut_off_weft_peer() {
        let mut sim = Sim::connected();
        for second in 1..=600 {
            sim.pass(Duration::from_secs(1));
            sim.traffic(3);
            assert_eq!(sim.value(), ConnectionValue::Connected, "after {second} s");
        }
    }

    #[test]
    fn peer_that_receives_nothing_is_lost() {
        let mut sim = Sim::connected();
        for second in 1..=20 {
            sim.pass(Duration::from_secs(1));
            sim.traffic(1);
            let report = PeerReport { received_ago: Some(Duration::from_secs(second)), ..WEFT };
            sim.machine.handle_ping(Some(report), sim.now);
        }
        assert_eq!(sim.value(), ConnectionValue::Error);
    }

    #[test]
    fn load_keeps_a_stock_peer_and_a_trickle_does_not() {
        for (rate, expected) in [(1000, ConnectionValue::Connected), (1, ConnectionValue::Error)] {
            let mut sim = Sim::new();
            sim.machine.handle_pong(RTT, None, sim.now);
            sim.traffic(0);
            for _ in 0..60 {
                sim.pass(Duration::from_secs(1));
                sim.traffic(rate);
            }
            assert_eq!(sim.value(), expected, "{rate} packets/s");
        }
    }

    /// Ordinary traffic between pods fills no queue.
    #[test]
    fn thousand_packets_a_second_are_no_full_load() {
        for (rate, is_full) in [(1_000, false), (100_000, true)] {
            let mut sim = Sim::connected();
            sim.traffic(0);
            sim.pass(Duration::from_secs(1));
            sim.traffic(rate);
            assert_eq!(sim.machine.is_full(sim.now), is_full, "{rate} packets/s");
            sim.pass(Duration::from_secs(2));
            assert!(!sim.machine.is_full(sim.now), "not for long");
        }
    }

    #[test]
    fn load_without_handshake_expires_stock_peer() {
        let mut sim = Sim::new();
        sim.machine.handle_pong(RTT, None, sim.now);
        for _ in 0..200 {
            sim.pass(Duration::from_secs(1));
            sim.traffic(1000);
        }
        assert_eq!(sim.value(), ConnectionValue::Error);
    }

    #[test]
    fn packets_alone_do_not_bring_a_lost_peer_back() {
        let mut sim = Sim::connected();
        sim.pass(Duration::from_secs(11));
        sim.traffic(1);
        assert_eq!(sim.value(), ConnectionValue::Error);
    }

    #[test]
    fn peer_that_stops_pinging_is_lost() {
        let mut sim = Sim::connected();
        for _ in 0..12 {
            sim.pass(Duration::from_secs(1));
            sim.machine.handle_pong(RTT, Some(WEFT), sim.now);
        }
        assert_eq!(sim.value(), ConnectionValue::Error);
    }

    #[test]
    fn absurd_interval_of_a_peer_is_bounded() {
        let mut sim = Sim::connected();
        let absurd = PeerReport { interval: Duration::from_millis(u32::MAX.into()), ..WEFT };
        sim.machine.handle_ping(Some(absurd), sim.now);
        for _ in 0..46 {
            sim.pass(Duration::from_secs(1));
            sim.machine.handle_pong(RTT, Some(absurd), sim.now);
        }
        assert_eq!(sim.value(), ConnectionValue::Error, "it has not pinged for 46 s");
    }

    /// A peer's interval may lengthen our own window, never shorten it.
    #[test]
    fn tiny_interval_of_a_peer_loses_no_connection() {
        let mut sim = Sim::connected();
        let tiny = PeerReport { interval: Duration::from_millis(1), ..WEFT };
        sim.machine.handle_ping(Some(tiny), sim.now);
        for second in 1..=8 {
            sim.pass(Duration::from_secs(1));
            sim.machine.handle_pong(RTT, Some(tiny), sim.now);
            assert_eq!(sim.value(), ConnectionValue::Connected, "{second} s after its last probe");
        }
        sim.pass(Duration::from_secs(1));
        assert_eq!(sim.value(), ConnectionValue::Error, "9 s are 4.5 of our own intervals");
    }

    #[test]
    fn without_probing_the_age_of_the_last_packet_decides() {
        let mut sim = Sim::new();
        sim.machine
            .handle_settings(ProbeSettings { enabled: false, ..ProbeSettings::default() }, sim.now);
        assert_eq!(sim.value(), ConnectionValue::Connecting);
        sim.traffic(1);
        assert_eq!(sim.value(), ConnectionValue::Connected);
        sim.pass(Duration::from_secs(179));
        assert_eq!(sim.value(), ConnectionValue::Connected);
        sim.pass(Duration::from_secs(2));
        assert_eq!(sim.value(), ConnectionValue::Error);
    }

    #[test]
    fn latency_is_written_as_liqo_writes_it() {
        let text = |us| latency_text(Some(Duration::from_micros(us)));
        assert_eq!(
            [text(0), text(999), text(1000), text(1999), text(250_000)],
            ["0μs", "999μs", "1ms", "1ms", "250ms"]
        );
        assert_eq!(latency_text(None), "N/A");
    }

    /// A machine and a manual clock.
    struct Sim {
        machine: Machine,
        start: Instant,
        now: Instant,
    }

    impl Sim {
        fn new() -> Self {
            let now = Instant::now() + Duration::from_secs(3600);
            Self { machine: Machine::new(ProbeSettings::default()), start: now, now }
        }

        fn connected() -> Self {
            let mut sim = Self::new();
            sim.machine.handle_ping(Some(WEFT), sim.now);
            sim.machine.handle_pong(RTT, Some(WEFT), sim.now);
            assert_eq!(sim.value(), ConnectionValue::Connected);
            sim
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
            self.machine.handle_tick(self.now);
        }

        /// As many packets since the last call; the only handshake was at the start.
        fn traffic(&mut self, packets: u64) {
            let traffic = Traffic {
                last_authentic: Some(self.now),
                last_handshake: Some(self.start),
                packets: self.machine.traffic.packets + packets,
            };
            self.machine.handle_traffic(traffic, self.now);
        }

        fn value(&self) -> ConnectionValue {
            self.machine.value()
        }
    }
}
