//! Watches whether packets get through: sends probes, answers the peer's, and keeps the
//! [`View`] of the connection that everything else goes by.

mod departure;
mod diagnosis;
mod log;
mod path;
mod search;
mod socket;
mod ways;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fabric_api::fabric::{PROBE_PORT, PathFault, Role};
use fabric_api::networking::ConnectionValue;
use gateway_config::desired::Desired;
use gateway_config::input::{Input, Remembered};
use gateway_health::canonical;
use jiff::Timestamp;
use lane::PeerState;
use reachability::alternation::alternate;
use reachability::connection::{Machine, PeerReport};
use reachability::nodes::NodePaths;
use reachability::probe::{
    Departure, MAX_DATAGRAM, Message, MessageType, NodeCount, Pending, WeftField,
};
use reachability::probe_log::{ProbeLog, TRAIN};
use tokio::sync::watch;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

use crate::replicas::Standing;
use crate::state::{Plane, ProbeCounts, Running, View};
use diagnosis::Diagnosis;
use path::PathProber;
pub use path::TRAINS_VANISH;
use search::{Search, Step};
use socket::ProbeSocket;
use ways::{Signs, Ways};

/// Longest time between two probes while there is no connection, so that one is noticed at once.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);
/// Minimum time between two probes, whatever requests them.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// Interval of the check whether a client should try another way.
const TICK: Duration = Duration::from_secs(1);
/// Datagrams read before an answer counts as missing: many wait after a pause of this process.
const LATE_DATAGRAMS: usize = 64;

/// Settings of the monitor.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    /// Paths to this cluster's nodes, which the peer's gateway is sent a count of.
    pub paths: watch::Receiver<Option<NodePaths>>,
    /// Faults of those paths with which packets pass.
    pub passable: &'static [PathFault],
    /// Reason for the end of this gateway, set before it.
    pub departure: Arc<OnceLock<Departure>>,
    pub standings: watch::Receiver<Standing>,
}

/// Keeps `views` up to date until `stop`.
pub async fn run(
    sources: Sources,
    views: watch::Sender<View>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let Sources { mut inputs, mut planes, mut paths, passable, departure, mut standings } = sources;
    let mut peering: Option<Peering> = None;
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        let running = planes.borrow_and_update().running.clone();
        peering = Peering::adopt(peering, running, &inputs.borrow().remembered);
        let Some(current) = &mut peering else {
            views.send_if_modified(View::forget);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = planes.changed() => changed?,
            }
            continue;
        };
        current.count_nodes(paths.borrow_and_update().as_ref(), passable, Instant::now());
        current.follow_standing(&standings.borrow_and_update(), Instant::now());
        current.publish(&views, &inputs);
        tokio::select! {
            biased;
            () = stop.cancelled() => {
                let removed = inputs.borrow().is_removed().then_some(Departure::Removed);
                let departure = removed.or_else(|| departure.get().copied());
                current.announce_end(departure.unwrap_or(Departure::Restarting)).await;
                return Ok(());
            }
            changed = inputs.changed() => {
                changed?;
                let desired = inputs.borrow_and_update().desired.clone();
                // The lane is about to forget the sessions: nothing else would show the peer why.
                if desired.is_some_and(|desired| desired.peer_key.is_none()) {
                    current.announce_end(Departure::Removed).await;
                }
            }
            changed = planes.changed() => changed?,
            changed = paths.changed() => changed?,
            changed = standings.changed() => changed?,
            () = sleep_until(current.deadline().into()) => {
                current.drain(&mut buffer);
                current.handle_timeouts(Instant::now());
            }
            () = current.path.large_packet(), if !current.is_deaf => current.look_at_path(),
            changed = current.changes.changed(), if !current.lane_ended => {
                // When the lane has ended, the dataplane will publish what comes next.
                current.lane_ended = changed.is_err();
                current.handle_session(Instant::now());
            }
            // Last, so that no number of datagrams keeps time from passing.
            (from, length) = current.socket.receive(&mut buffer) => {
                current.handle_datagram(&buffer[..length], from, Instant::now());
                // Probes come in trains: one result for all of one.
                current.drain(&mut buffer);
            }
        }
    }
}

/// All that belongs to one peer.
struct Peering {
    running: Running,
    machine: Machine,
    pending: Pending,
    socket: ProbeSocket,
    changes: watch::Receiver<PeerState>,
    /// The newest of `changes`.
    session: PeerState,
    ping_at: Instant,
    /// The next train is urgent, or has been moved away from the peer's already.
    is_ping_fixed: bool,
    tick_at: Instant,
    last_ping: Option<Instant>,
    last_handshake: Option<Instant>,
    /// No probe has come back through the newest session yet.
    unproven: bool,
    /// This cluster's nodes, unless there are some and all of them reach this gateway.
    nodes: Option<NodeCount>,
    path: PathProber,
    diagnosis: Diagnosis,
    latency_at: Option<Timestamp>,
    /// Since when the probes are unanswered.
    unanswered: Option<Instant>,
    ways: Ways,
    /// This gateway receives nothing, and has replicas: what it sends would lead the peer away from a successor.
    is_deaf: bool,
    /// For the successor of a server that has announced its end.
    search: Option<Search>,
    probes: ProbeCounts,
    lane_ended: bool,
}

impl Peering {
    /// Goes on with what is known if the peer is still the same.
    fn adopt(
        current: Option<Self>,
        running: Option<Running>,
        remembered: &Remembered,
    ) -> Option<Self> {
        let running = running.filter(|running| running.desired.peer_key.is_some())?;
        let now = Instant::now();
        // With other keys, too: the lane goes from one session to the next without a gap.
        let same = |c: &Self| c.desired().peer == running.desired.peer;
        match current.filter(same) {
            None => {
                let mut peering = Self::new(running, now);
                let endpoint = peering.desired().endpoint.as_ref();
                peering.diagnosis.is_endpoint_edited =
                    endpoint.is_some_and(|endpoint| remembered.is_edited(endpoint));
                Some(peering)
            }
            Some(mut peering) => {
                if peering.desired().probe != running.desired.probe {
                    peering.machine.handle_settings(running.desired.probe, now);
                    // Those sent so far prove nothing once no more are sent.
                    (peering.diagnosis.log, peering.unanswered) = (ProbeLog::default(), None);
                    peering.ping_at = now;
                    peering.tick_at = now;
                }
                if !Arc::ptr_eq(&peering.running.lane, &running.lane) {
                    peering.socket = ProbeSocket::new(running.inner.clone());
                    peering.changes = running.lane.changes();
                    peering.lane_ended = false;
                    peering.is_deaf = false;
                }
                if peering.desired().endpoint != running.desired.endpoint {
                    peering.diagnosis.is_endpoint_edited = true;
                    peering.hurry(now);
                }
                // A route that is gone for a while, or not known yet, is no move.
                let before = peering.running.source;
                let source = running.source.or(before);
                peering.path.follow(&running, now);
                peering.running = Running { source, ..running };
                if before.is_some() && source != before {
                    peering.show_source(now);
                }
                Some(peering)
            }
        }
    }

    fn new(running: Running, now: Instant) -> Self {
        let mut machine = Machine::new(running.desired.probe);
        machine.handle_traffic(running.traffic(), now);
        Self {
            machine,
            pending: Pending::new(running.desired.peer.clone()),
            socket: ProbeSocket::new(running.inner.clone()),
            changes: running.lane.changes(),
            session: PeerState::default(),
            ping_at: now,
            is_ping_fixed: false,
            tick_at: now,
            last_ping: None,
            last_handshake: None,
            unproven: false,
            nodes: None,
            path: PathProber::new(&running, now),
            diagnosis: Diagnosis::new(now),
            latency_at: None,
            unanswered: None,
            ways: Ways::new(now),
            is_deaf: false,
            search: None,
            probes: ProbeCounts::default(),
            lane_ended: false,
            running,
        }
    }

    fn desired(&self) -> &Desired {
        &self.running.desired
    }

    /// Deadline of the next [`Self::handle_timeouts`].
    fn deadline(&self) -> Instant {
        self.ping_at.min(self.burst_due()).min(self.due()).min(self.path_due())
    }

    fn handle_timeouts(&mut self, now: Instant) {
        self.diagnosis.log.set_busy(self.machine.is_full(now));
        if now >= self.ping_at {
            self.send_ping(now);
        }
        if now >= self.burst_due() {
            self.handle_burst(now);
        }
        if now >= self.due() {
            self.handle_tick(now);
        }
        if now >= self.path_due() {
            self.look_at_path();
        }
    }

    /// Returns when the state has to be checked. While the peer answers, only its deadline counts.
    fn due(&self) -> Instant {
        let is_answered = self.unanswered.is_none_or(|since| since.elapsed() < TICK);
        let tick = (!(self.machine.is_connected() && is_answered)).then_some(self.tick_at);
        let search = self.search.as_ref().map(Search::due);
        let due = self.machine.deadline().into_iter().chain(self.diagnosis.due());
        due.chain(tick).chain(search).min().unwrap_or_else(never)
    }

    /// Time at which an answer is overdue, or the next probe of a burst is due.
    fn burst_due(&self) -> Instant {
        let probes = self.machine.is_connected() && self.desired().probe.enabled;
        self.diagnosis.log.deadline().filter(|_| probes).unwrap_or_else(never)
    }

    fn handle_burst(&mut self, now: Instant) {
        let was_lossy = self.diagnosis.log.lost_percent().is_some();
        let is_due = self.diagnosis.log.handle_tick(now) && !self.is_deaf;
        if is_due && self.changes.borrow().has_session {
            self.send_one(0, now);
        }
        // The peer reports a loss, too, until it learns that it is over.
        if was_lossy && self.diagnosis.log.lost_percent().is_none() {
            self.hurry(now);
        }
        self.renew_session(now);
    }

    /// A server that falls silent may have another gateway's session, which has the same key, or none any more.
    fn renew_session(&mut self, now: Instant) {
        let was_there = self.machine.value() != ConnectionValue::Connecting;
        let is_silent = was_there && !self.is_deaf && self.diagnosis.is_peer_silent(now);
        let is_client = self.desired().role == Role::Client;
        if is_silent && is_client && self.ways.renew(now) {
            self.running.lane.initiate();
        }
    }

    /// Deadline of the next look at the path's MTU.
    fn path_due(&self) -> Instant {
        self.path.deadline().filter(|_| !self.is_deaf).unwrap_or_else(never)
    }

    fn look_at_path(&mut self) {
        self.path.send(self.running.desired.peer.as_str(), Instant::now());
    }

    /// Takes what has arrived already.
    fn drain(&mut self, buffer: &mut [u8]) {
        for _ in 0..LATE_DATAGRAMS {
            let Some((from, length)) = self.socket.received(buffer) else { return };
            self.handle_datagram(&buffer[..length], from, Instant::now());
        }
    }

    fn handle_datagram(&mut self, datagram: &[u8], from: SocketAddr, now: Instant) {
        self.machine.handle_traffic(self.running.traffic(), now);
        if from.ip() != self.desired().peer_tunnel_address {
            return;
        }
        let message = match Message::parse(datagram) {
            Ok(message) => message,
            Err(error) => return tracing::debug!(%error, "not a probe"),
        };
        if let Some(departure) = message.departure() {
            return self.handle_departure(departure, now);
        }
        let nonce = message.weft.and_then(|weft| weft.size_probe);
        if nonce.is_none() {
            self.handle_ordinary(&message, now);
        }
        match (message.msg_type, nonce) {
            (MessageType::Ping, None) => self.handle_ping(message, from, now),
            (MessageType::Pong, None) => self.handle_pong(&message, now),
            (MessageType::Ping, Some(nonce)) => {
                let answer = message.pong(WeftField::size_probe(nonce));
                self.socket.send(&answer.encode(), from);
            }
            (MessageType::Pong, Some(nonce)) => self.path.handle_answer(nonce, now),
        }
    }

    fn handle_ordinary(&mut self, message: &Message, now: Instant) {
        self.diagnosis.handle_message(message, now);
        if self.diagnosis.owes_cidrs(&self.running.desired) {
            self.hurry(now);
        }
    }

    fn handle_ping(&mut self, ping: Message, from: SocketAddr, now: Instant) {
        let report = ping.report();
        self.diagnosis.handle_ping(&ping, &self.running.desired);
        self.machine.handle_ping(report, now);
        self.path.handle_life(&ping, None, now);
        let pong = ping.pong(self.weft_field(now));
        self.socket.send(&pong.encode(), from);
        // A sender that reaches us can be reached, too: no need to wait for the next turn. A probe
        // sent as soon as the session was made may have gone out through the one before.
        if self.unproven || !self.machine.is_connected() {
            self.hurry(now);
        }
        self.align(report, now);
    }

    /// Moves the next train away from the peer's, of which a probe has arrived.
    fn align(&mut self, peer: Option<PeerReport>, now: Instant) {
        let log = &self.diagnosis.log;
        let is_calm = self.machine.is_connected() && !log.is_bursting();
        if !is_calm || self.desired().role != Role::Server || self.is_ping_fixed {
            return;
        }
        let own = log.pace(self.desired().probe_interval(), now);
        if let Some(at) = peer.and_then(|of| alternate(now, own, log.pace(of.interval, now))) {
            (self.ping_at, self.is_ping_fixed) = (at, true);
        }
    }

    fn handle_pong(&mut self, pong: &Message, now: Instant) {
        let Some(latency) = self.pending.take_pong(pong, now) else {
            return self.diagnosis.handle_overtaken(pong);
        };
        self.diagnosis.handle_answer(pong, latency, now);
        self.unanswered = None;
        self.unproven = false;
        self.probes.answered += 1;
        self.latency_at = Some(Timestamp::now());
        self.machine.handle_pong(latency, pong.report(), now);
        self.path.handle_life(pong, Some(latency), now);
    }

    /// A client looks for the successor of its server; a server is found by its client's.
    fn handle_departure(&mut self, departure: Departure, now: Instant) {
        self.diagnosis.handle_departure(departure, now);
        let is_replaced = matches!(departure, Departure::Restarting | Departure::Unknown);
        if is_replaced && self.desired().role == Role::Client && self.search.is_none() {
            tracing::info!("the peer's gateway ends, looking for its successor");
            self.search = Some(Search::new(now));
        }
    }

    /// The engine's session came, was renewed, or went.
    fn handle_session(&mut self, now: Instant) {
        let state = *self.changes.borrow_and_update();
        let way = |state: &PeerState| (state.endpoint, state.has_session, state.last_handshake);
        if way(&state) != way(&self.session) {
            self.path.handle_session(now);
        }
        // The peer cannot see it: it shows at both ends soon if the next probe reports it now.
        let is_shared = |state: &PeerState| state.duplicate.is_some();
        if is_shared(&state) != is_shared(&self.session) {
            self.hurry(now);
        }
        self.session = state;
        self.diagnosis.handle_session(state, now);
        // A new session may be that of a peer that has started again, and waits for our probe.
        let is_new = state.last_handshake != self.last_handshake;
        self.last_handshake = state.last_handshake;
        self.unproven |= is_new;
        self.search.take_if(|search| is_new && search.ends_with(now));
        if state.has_session && (is_new || !self.machine.is_connected()) {
            self.hurry(now);
        }
        self.handle_tick(now);
    }

    fn handle_tick(&mut self, now: Instant) {
        self.machine.handle_traffic(self.running.traffic(), now);
        self.tick_at = now + TICK;
        match self.search.as_mut().and_then(|search| search.step(now)) {
            Some(Step::Ask) => self.running.lane.initiate(),
            Some(Step::GoElsewhere) => self.retry(now),
            Some(Step::GiveUp) => self.search = None,
            None if self.is_retry_due(now) => self.retry(now),
            None => {}
        }
    }

    /// A server is found by its client.
    fn is_retry_due(&self, now: Instant) -> bool {
        self.desired().role == Role::Client && self.ways.is_due(self.signs(), now)
    }

    fn retry(&mut self, now: Instant) {
        tracing::info!("the peer does not answer, trying another way");
        self.ways.change(self.signs(), now);
        self.running.lane.go_back();
    }

    fn signs(&self) -> Signs {
        Signs {
            interval: self.desired().probe_interval(),
            peer_has_replicas: self.diagnosis.peer_has_replicas,
            is_connected: self.machine.is_connected(),
            unanswered: self.unanswered,
            is_probing: self.desired().probe.enabled,
            last_authentic: self.running.traffic().last_authentic,
            is_cut: self.diagnosis.log.is_cut(),
            is_deaf: self.is_deaf,
            endpoint: self.session.endpoint.map(canonical),
        }
    }

    fn send_ping(&mut self, now: Instant) {
        let interval = self.desired().probe_interval();
        if interval.is_zero() {
            self.ping_at = never();
            return;
        }
        let pace = self.diagnosis.log.pace(interval, now);
        let most = if self.machine.is_connected() { pace } else { SEARCH_INTERVAL };
        self.ping_at = now + pace.min(most);
        self.unanswered.get_or_insert(now);
        // It would only wait in the engine; the session's coming is a reason for another one.
        if self.is_deaf || !self.changes.borrow().has_session {
            return self.renew_session(now);
        }
        self.last_ping = Some(now);
        self.is_ping_fixed = false;
        let log = &self.diagnosis.log;
        // Queues behind data would drop most of a train.
        let is_calm = self.machine.is_connected() && !log.is_bursting();
        let is_train = is_calm && self.diagnosis.is_weft() && !self.machine.is_full(now);
        (0..if is_train { TRAIN } else { 1 }).for_each(|place| self.send_one(place, now));
        self.renew_session(now);
    }

    fn send_one(&mut self, place: usize, now: Instant) {
        self.probes.sent += 1;
        let ping = self.pending.ping(Timestamp::now(), now, self.weft_field(now));
        if let Some(stamp) = ping.stamp() {
            self.diagnosis.log.handle_sent(stamp, now);
        }
        let ping = self.diagnosis.complete(ping, &self.running.desired);
        self.socket.send(&ping.encode_in_train(place), self.peer_socket());
    }

    fn peer_socket(&self) -> SocketAddr {
        SocketAddr::from((self.desired().peer_tunnel_address, PROBE_PORT))
    }

    /// The peer sends to where our last packet came from: shows it another address of this host. One
    /// that has just started has no session, so it takes an initiation.
    fn show_source(&mut self, now: Instant) {
        self.hurry(now);
        if self.changes.borrow().has_session {
            self.running.lane.reroute();
        }
    }

    /// The next ping now, unless there was one just before.
    fn hurry(&mut self, now: Instant) {
        let earliest = self.last_ping.map_or(now, |last| last + MIN_INTERVAL);
        self.ping_at = self.ping_at.min(earliest.max(now));
        self.is_ping_fixed = true;
    }

    fn weft_field(&self, now: Instant) -> WeftField {
        let received = self.running.traffic().last_authentic;
        let received_ago = received.map(|at| now.saturating_duration_since(at));
        WeftField {
            duplicate: self.diagnosis.duplicate().is_some(),
            handed_over: Diagnosis::is_handed_over(&self.running, now),
            has_replicas: self.running.has_replicas,
            suspects: self.diagnosis.log.is_suspicious(),
            cidrs_differ: self.diagnosis.differs(),
            id_differs: self.diagnosis.own_id_at_peer.is_some(),
            loss_percent: self.diagnosis.log.lost_percent(),
            nodes: self.nodes,
            refuses_ipv6: self.diagnosis.refuses_ipv6(),
            ..WeftField::new(self.desired().probe_interval(), received_ago)
        }
    }

    /// Sends no probes and few handshakes while this gateway is deaf, and the next probe at once when it no longer is.
    fn follow_standing(&mut self, standing: &Standing, now: Instant) {
        if std::mem::replace(&mut self.is_deaf, standing.is_deaf) == standing.is_deaf {
            return;
        }
        self.running.lane.set_slow(standing.is_deaf);
        if standing.has_tunnel() && !standing.is_deaf {
            self.hurry(now);
        }
    }

    /// The next probe reports a change, and is sent at once.
    fn count_nodes(&mut self, paths: Option<&NodePaths>, passable: &[PathFault], now: Instant) {
        let (nodes, faulty) = (self.desired().nodes.len(), self.desired().faulty_nodes);
        let counted = paths.and_then(|paths| paths.count(nodes, faulty, passable));
        if std::mem::replace(&mut self.nodes, counted) != counted {
            self.hurry(now);
        }
    }

    fn publish(&mut self, views: &watch::Sender<View>, inputs: &watch::Receiver<Input>) {
        let now = Instant::now();
        if self.diagnosis.wants_own_key() {
            self.diagnosis.own_key = inputs.borrow().key.as_ref().map(|key| key.public());
        }
        let traffic = self.running.traffic();
        let current = (self.machine.value(), traffic);
        let shown = self.diagnosis.shown_to_peer();
        let faults = self.diagnosis.update(&self.running, current, now).to_vec();
        if self.diagnosis.shown_to_peer() != shown {
            self.hurry(now);
        }
        self.latency_at = self.diagnosis.renewed(self.latency_at, now);
        let loss_percent = self.diagnosis.loss_percent();
        let (retries, ports) = self.ways.take_counts();
        let latency = self.machine.latency();
        views.send_if_modified(|view| {
            view.probes = self.probes;
            let new = View {
                probes: self.probes,
                value: self.machine.value(),
                latency,
                latency_at: self.latency_at.filter(|_| latency.is_some()),
                retries: view.retries + retries,
                ports: view.ports + ports,
                left: self.ways.left(),
                path_mtu: self.path.found(),
                trains_vanish: !self.path.may_segment(),
                faults,
                loss_percent,
            };
            log::changes(&self.running.desired.peer, view, &new);
            std::mem::replace(view, new.clone()) != new
        });
    }
}

fn never() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
