//! Evidence about the peer, collected from probes, sessions and reports, and the faults it shows.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_api::networking::ConnectionValue;
use fabric_api::{ClusterId, PublicKey};
use gateway_config::desired::Desired;
use gateway_health::{Evidence, Fault, Reason, RefusedSend};
use jiff::{SignedDuration, Timestamp};
use lane::PeerState;
use reachability::connection::Traffic;
use reachability::probe::{Departure, Families, Message, NodeCount, PeerCidrs};
use reachability::probe_log::ProbeLog;
use tunnel::DropReason;

use crate::state::{Running, TimedFault};

/// Time in which answers sent before a departure may still arrive behind it.
const REORDERED: Duration = Duration::from_millis(250);

/// Validity of the peer's report of a second gateway, which has the session meanwhile.
const KEY_SHARED_RETENTION: Duration = Duration::from_secs(30);

/// Time for which a replica that has handed the tunnel over carries packets, at most.
const HAND_OVER: Duration = Duration::from_secs(10);
/// Time for replicas to find out which has the tunnel.
const CONTEST: Duration = Duration::from_secs(3);

/// Time after which a peer is silent. A gateway whose session another one with the same key has taken sends
/// probes for so long that the peer notices both (`tunnel`, half a second).
const SILENCE: Duration = Duration::from_millis(600);

/// Validity of the peer's report of loss, during which it probes every 100 ms.
const LOSS_RETENTION: Duration = Duration::from_secs(3);

/// Age of a report of the peer up to which it counts.
const IS_REPORTED: Duration = Duration::from_secs(1);
/// Age of a latency that is renewed, and of the last packet of a peer that is there.
const IS_OLD: Duration = Duration::from_secs(5);

pub(super) struct Diagnosis {
    pub(super) log: ProbeLog,
    pub(super) own_key: Option<PublicKey>,
    /// spec.endpoint was edited since the peer was found by it. Else the gateway itself tries one after the
    /// other of its addresses.
    pub(super) is_endpoint_edited: bool,
    started: Instant,
    session: PeerState,
    last_received: Option<Instant>,
    /// First and last report of the peer that it has received none of the unanswered probes.
    unreceived: Option<(Instant, Instant)>,
    superseded_since: Option<Instant>,
    /// Refused sends of each kind so far, and the last one.
    refused_sends: [u64; 2],
    refused_send: Option<(RefusedSend, Instant)>,
    departure: Option<(Departure, Instant)>,
    is_weft: bool,
    peer_cidrs: Option<PeerCidrs>,
    /// Time of the peer's last report of a second gateway with our key.
    key_shared: Option<Instant>,
    /// Time of the peer's last report that its tunnel is handed over.
    peer_handed_over: Option<Instant>,
    pub(super) peer_has_replicas: bool,
    /// Time since which packets come from two gateways of the peer, and whether that is no contest of replicas.
    duplicate_since: Option<Instant>,
    is_certain: bool,
    peer_differs: bool,
    /// This cluster's ID in the peer's pings, if that is not its own.
    pub(super) own_id_at_peer: Option<String>,
    /// The peer reports that pings from here have another ID than its own.
    peer_id_differs: bool,
    /// Loss in percent as the peer last reported it.
    peer_loss: Option<(u8, Instant)>,
    /// Nodes of the peer as it last reported them, unless all of them reach its gateway.
    peer_nodes: Option<NodeCount>,
    peer_refuses_ipv6: bool,
    differs: bool,
    /// This cluster's CIDRs as the peer has them, and as they are on their way in a ping.
    delivered: Option<PeerCidrs>,
    on_the_way: Option<(i128, PeerCidrs)>,
    faults: Vec<TimedFault>,
}

impl Diagnosis {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            log: ProbeLog::default(),
            own_key: None,
            is_endpoint_edited: false,
            started: now,
            session: PeerState::default(),
            last_received: None,
            unreceived: None,
            superseded_since: None,
            refused_sends: [0; 2],
            refused_send: None,
            departure: None,
            is_weft: false,
            peer_cidrs: None,
            key_shared: None,
            peer_handed_over: None,
            peer_has_replicas: false,
            duplicate_since: None,
            is_certain: false,
            peer_differs: false,
            own_id_at_peer: None,
            peer_id_differs: false,
            peer_loss: None,
            peer_nodes: None,
            peer_refuses_ipv6: false,
            differs: false,
            delivered: None,
            on_the_way: None,
            faults: Vec::new(),
        }
    }

    /// True if the peer is a weft gateway.
    pub(super) fn is_weft(&self) -> bool {
        self.is_weft
    }

    /// True if the peer's CIDRs are not those that are configured here.
    pub(super) fn differs(&self) -> bool {
        self.differs
    }

    /// True if the tunnel is too small for IPv6, which is refused.
    pub(super) fn refuses_ipv6(&self) -> bool {
        self.faults.iter().any(|of| of.fault.reason == Reason::TooSmallForIpv6)
    }

    /// Part of a probe that the next one shows at once if it changes.
    pub(super) fn shown_to_peer(&self) -> (bool, bool) {
        (self.refuses_ipv6(), self.duplicate().is_some())
    }

    /// True while another replica may carry packets, too: two gateways have one key.
    pub(super) fn is_handed_over(running: &Running, now: Instant) -> bool {
        running.contested_at.is_some_and(|at| now < at + HAND_OVER)
    }

    /// Endpoints of two gateways of the peer, unless they are replicas that contend for the tunnel.
    pub(super) fn duplicate(&self) -> Option<[SocketAddr; 2]> {
        let is_certain = self.is_certain && self.peer_handed_over.is_none();
        self.session.duplicate.filter(|_| is_certain)
    }

    /// A replica whose node was cut off sends until it observes the others.
    fn note_duplicate(&mut self, now: Instant) {
        let since = self.session.duplicate.map(|_| self.duplicate_since.unwrap_or(now));
        self.duplicate_since = since;
        self.is_certain =
            since.is_some_and(|since| !self.peer_has_replicas || now >= since + CONTEST);
    }

    /// Faults name this cluster's own public key if initiations are for another one.
    pub(super) fn wants_own_key(&self) -> bool {
        self.superseded_since.is_some() || self.session.rejections.wrong_responder.is_some()
    }

    /// Share of lost probes in percent, of either end: what it observes is the way there and back.
    pub(super) fn loss_percent(&self) -> Option<u8> {
        self.log.loss_percent().or_else(|| self.peer_loss.map(|(percent, _)| percent))
    }

    /// Time of the latency, renewed while packets of the peer arrive and hardly a probe is answered: by its age readers
    /// know a gateway that does not report.
    pub(super) fn renewed(&self, latency_at: Option<Timestamp>, now: Instant) -> Option<Timestamp> {
        let is_there = self.last_received.is_some_and(|at| now < at + IS_OLD);
        let is_due = is_there && self.log.loss_percent().is_some();
        let is_old = |at: Timestamp| Timestamp::now().duration_since(at).unsigned_abs() >= IS_OLD;
        latency_at.map(|at| if is_due && is_old(at) { Timestamp::now() } else { at })
    }

    /// Takes note of an ordinary probe or answer of the peer.
    pub(super) fn handle_message(&mut self, message: &Message, now: Instant) {
        self.departure.take_if(|(_, at)| now > *at + REORDERED);
        if let Some(cidrs) = &message.cidrs {
            self.peer_cidrs = Some(cidrs.clone());
        }
        let Some(weft) = message.weft else {
            // Another program has taken the peer's place: what weft reported there is not of now.
            (self.is_weft, self.peer_differs, self.peer_cidrs) = (false, false, None);
            (self.unreceived, self.delivered, self.peer_loss) = (None, None, None);
            (self.peer_id_differs, self.peer_nodes, self.peer_refuses_ipv6) = (false, None, false);
            self.peer_has_replicas = false;
            return;
        };
        self.is_weft = true;
        (self.peer_differs, self.peer_id_differs) = (weft.cidrs_differ, weft.id_differs);
        let lacks_some = |nodes: &NodeCount| nodes.of == 0 || nodes.reachable < nodes.of;
        self.peer_nodes = weft.nodes.filter(lacks_some);
        self.peer_refuses_ipv6 = weft.refuses_ipv6;
        let percent = weft.loss_percent.filter(|percent| (1..=100).contains(percent));
        self.peer_loss = percent.map(|percent| (percent, now));
        self.key_shared = weft.duplicate.then_some(now);
        self.peer_has_replicas = weft.has_replicas;
        self.peer_handed_over = weft.handed_over.then_some(now).or(self.peer_handed_over);
        let received = message.report().and_then(|report| now.checked_sub(report.received_ago?));
        let first = self.log.unanswered().map(|probes| probes.first).filter(|first| now > *first);
        let is_unreceived =
            first.is_some_and(|first| received.is_none_or(|at| at < first + self.log.round_trip()));
        let since = self.unreceived.map_or(now, |(since, _)| since);
        self.unreceived = is_unreceived.then_some((since, now));
        if weft.suspects {
            self.log.handle_request(now);
        }
    }

    /// Pings have the receiver's ID, as the sender has it.
    pub(super) fn handle_ping(&mut self, ping: &Message, desired: &Desired) {
        let differs = ping.cluster_id != desired.cluster.as_str();
        // A hostile peer may write anything.
        let id = || {
            ping.cluster_id
                .parse()
                .map_or_else(|_| "another cluster".to_owned(), |id: ClusterId| id.to_string())
        };
        self.own_id_at_peer = differs.then(id);
    }

    pub(super) fn handle_answer(&mut self, pong: &Message, round_trip: Duration, now: Instant) {
        let Some(stamp) = pong.stamp() else { return };
        self.log.handle_answer(stamp, round_trip, now);
        self.unreceived = None;
        if let Some((_, cidrs)) = self.on_the_way.take_if(|(sent, _)| *sent == stamp) {
            self.delivered = Some(cidrs);
        }
    }

    /// An answer that a later one has overtaken: its probe was not lost.
    pub(super) fn handle_overtaken(&mut self, pong: &Message) {
        pong.stamp().into_iter().for_each(|stamp| self.log.handle_overtaken(stamp));
    }

    pub(super) fn handle_departure(&mut self, departure: Departure, now: Instant) {
        self.departure = Some((departure, now));
        self.log.handle_departure(now);
    }

    pub(super) fn handle_session(&mut self, session: PeerState, now: Instant) {
        if session.last_handshake != self.session.last_handshake {
            // The peer may be another process, which has not received anything yet.
            self.delivered = None;
        }
        self.superseded_since = match session.on_superseded_keys {
            true => self.superseded_since.or(Some(now)),
            false => None,
        };
        self.session = session;
    }

    fn count_refused_sends(&mut self, running: &Running, now: Instant) {
        const KINDS: [(DropReason, RefusedSend); 2] = [
            (DropReason::SendUnreachable, RefusedSend::Unreachable),
            (DropReason::SendNotPermitted, RefusedSend::NotPermitted),
        ];
        let counts = running.lane.snapshot().counters.dropped_outbound;
        for ((reason, kind), before) in KINDS.into_iter().zip(&mut self.refused_sends) {
            let count = counts[reason.index()];
            if count > std::mem::replace(before, count) {
                self.refused_send = Some((kind, now));
            }
        }
        self.refused_send.take_if(|(_, at)| now >= *at + gateway_health::REFUSAL_TIME);
    }

    /// Returns true if neither answers nor data have arrived for [`SILENCE`].
    pub(super) fn is_peer_silent(&self, now: Instant) -> bool {
        let is_past = |at: Instant| now >= at + SILENCE;
        self.log.unanswered().is_some_and(|probes| is_past(probes.first) && probes.is_silence())
            && self.last_received.is_none_or(is_past)
    }

    /// True while the peer is still to be sent this cluster's CIDRs.
    pub(super) fn owes_cidrs(&self, desired: &Desired) -> bool {
        self.is_weft && self.delivered.as_ref() != Some(&own_cidrs(desired))
    }

    /// Adds this cluster's CIDRs to a ping if the peer does not have them.
    pub(super) fn complete(&mut self, ping: Message, desired: &Desired) -> Message {
        if !self.owes_cidrs(desired) {
            return ping;
        }
        let own = own_cidrs(desired);
        self.on_the_way = ping.stamp().map(|stamp| (stamp, own.clone()));
        ping.with_cidrs(own)
    }

    /// Time at which a fault begins without any event.
    pub(super) fn due(&self) -> Option<Instant> {
        let is_known = self.faults.iter().any(|of| of.fault.reason == Reason::SupersededKeys);
        let superseded = self.superseded_since.filter(|_| !is_known);
        let superseded = superseded.map(|since| since + gateway_health::ROTATION_TIME);
        let duplicate = self.duplicate_since.filter(|_| !self.is_certain);
        superseded.into_iter().chain(duplicate.map(|since| since + CONTEST)).min()
    }

    /// The faults as of now.
    pub(super) fn update(
        &mut self,
        running: &Running,
        (value, traffic): (ConnectionValue, Traffic),
        now: Instant,
    ) -> &[TimedFault] {
        self.last_received = traffic.last_authentic;
        let is_cut = self.unreceived.is_some_and(|(_, last)| now < last + IS_REPORTED);
        self.log.set_received(traffic.last_authentic, is_cut);
        if value != ConnectionValue::Connected {
            self.log.pause();
            self.peer_loss = None;
        }
        self.peer_loss.take_if(|(_, at)| now >= *at + LOSS_RETENTION);
        self.key_shared.take_if(|at| now >= *at + KEY_SHARED_RETENTION);
        self.peer_handed_over.take_if(|at| now >= *at + HAND_OVER);
        self.count_refused_sends(running, now);
        if Self::is_handed_over(running, now) {
            self.key_shared = None;
        }
        self.note_duplicate(now);
        let evidence = self.evidence(running, value);
        let differs = evidence.cidrs_differ();
        let faults = gateway_health::diagnose(&evidence, now);
        self.faults = faults.into_iter().map(|fault| self.timed(fault, now)).collect();
        self.differs = differs;
        &self.faults
    }

    fn evidence<'a>(&'a self, running: &'a Running, value: ConnectionValue) -> Evidence<'a> {
        Evidence {
            desired: &running.desired,
            mtu: running.mtu,
            mtu_bound: running.mtu_bound,
            own_key: self.own_key,
            value,
            started: self.started,
            peer: PeerState {
                unproven_endpoint: self.session.unproven_endpoint.filter(|at| {
                    let configured = running.desired.endpoint.as_ref();
                    self.is_endpoint_edited && configured.is_some_and(|of| of.may_be(*at))
                }),
                duplicate: self.duplicate(),
                ..self.session
            },
            last_received: self.last_received,
            last_answer: self.log.last_answer(),
            unanswered: self.log.unanswered().filter(|_| running.desired.probe.enabled),
            refused_send: self.refused_send.map(|(kind, _)| kind),
            unreceived: self.unreceived,
            superseded_since: self.superseded_since,
            loss_percent: self.loss_percent(),
            departure: self.departure.map(|(departure, _)| departure),
            is_key_shared: self.key_shared.is_some(),
            peer_cidrs: self.peer_cidrs.as_ref(),
            peer_differs: self.peer_differs,
            own_id_at_peer: self.own_id_at_peer.as_deref(),
            peer_id_differs: self.peer_id_differs,
            peer_nodes: self.peer_nodes,
            peer_refuses_ipv6: self.peer_refuses_ipv6,
        }
    }

    /// The fault with the time at which it was first observed.
    fn timed(&self, fault: Fault, now: Instant) -> TimedFault {
        let known = self.faults.iter().find(|known| known.fault.reason == fault.reason);
        let since = known.map_or_else(|| self.began(fault.reason, now), |known| known.since);
        TimedFault { fault, since }
    }

    fn began(&self, reason: Reason, now: Instant) -> Timestamp {
        let at = match reason {
            Reason::NoAnswer => self.log.last_answer().max(self.last_received),
            Reason::NotReceived => self.log.last_answer(),
            Reason::NoHandshake => Some(self.started),
            Reason::NameNotResolved
            | Reason::EndpointIsOwn
            | Reason::EndpointUnanswered
            | Reason::PeeringRemoved
            | Reason::PeerTakenDown
            | Reason::PeerKeyShared
            | Reason::KeyShared
            | Reason::UnknownKey
            | Reason::WrongResponder
            | Reason::SupersededKeys
            | Reason::SendRefused
            | Reason::NoProbeAnswer
            | Reason::ProbeLoss
            | Reason::CidrMismatch
            | Reason::PeerCidrMismatch
            | Reason::IdMismatch
            | Reason::PeerIdMismatch
            | Reason::TooSmallForIpv6
            | Reason::PeerTooSmallForIpv6
            | Reason::PeerNodesUnreachable => None,
        };
        let ago = at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let ago = SignedDuration::try_from(ago).unwrap_or_default();
        Timestamp::now().checked_sub(ago).unwrap_or_default()
    }
}

fn own_cidrs(desired: &Desired) -> PeerCidrs {
    let joins = |ipv4| desired.remaps.iter().any(|remap| remap.remote.is_ipv4() == ipv4);
    PeerCidrs {
        pod: desired.pod_cidrs.clone(),
        external: desired.external_cidrs.clone(),
        joined: Families { v4: joins(true), v6: joins(false) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reachability::probe::{MessageType, WeftField};

    fn reporting(loss_percent: Option<u8>) -> Message {
        let weft = WeftField { loss_percent, ..WeftField::new(Duration::from_secs(2), None) };
        Message {
            cluster_id: "rome".into(),
            msg_type: MessageType::Ping,
            time_stamp: "2026-11-23T12:00:00.000000000Z".into(),
            weft: Some(weft),
            cidrs: None,
        }
    }

    #[test]
    fn replica_that_hands_over_is_no_duplicate() {
        let now = Instant::now();
        let mut diagnosis = Diagnosis::new(now);
        let endpoints = [5, 6].map(|port| SocketAddr::from(([192, 0, 2, 33], port)));
        diagnosis.session.duplicate = Some(endpoints);
        diagnosis.handle_message(&reporting(None), now);
        diagnosis.note_duplicate(now);
        assert_eq!(diagnosis.duplicate(), Some(endpoints));
        let mut of_replica = reporting(None);
        of_replica.weft.as_mut().unwrap().has_replicas = true;
        diagnosis.handle_message(&of_replica, now);
        diagnosis.note_duplicate(now);
        assert_eq!(diagnosis.due(), Some(now + Duration::from_secs(3)));
        for (later, expected) in [(0, None), (2, None), (3, Some(endpoints))] {
            diagnosis.note_duplicate(now + Duration::from_secs(later));
            assert_eq!(diagnosis.duplicate(), expected, "after {later} s");
        }
        let mut message = reporting(None);
        message.weft.as_mut().unwrap().handed_over = true;
        diagnosis.handle_message(&message, now);
        diagnosis.handle_message(&reporting(None), now);
        assert_eq!(diagnosis.duplicate(), None);
    }

    #[test]
    fn probes_are_unreceived_while_every_report_has_it() {
        const SECOND: Duration = Duration::from_secs(1);
        let start = Instant::now();
        let mut diagnosis = Diagnosis::new(start);
        let mut reports = |sent: Option<Instant>, ago: Duration, at: Instant| {
            sent.into_iter().for_each(|sent| diagnosis.log.handle_sent(1, sent));
            let weft = WeftField::new(SECOND, Some(ago));
            diagnosis.handle_message(&Message { weft: Some(weft), ..reporting(None) }, at);
            diagnosis.unreceived
        };
        let at = |tenths: u32| start + SECOND + SECOND / 10 * tenths;
        assert_eq!(reports(None, SECOND, at(0)), None, "nothing is unanswered");
        let first = reports(Some(at(1)), 3 * SECOND, at(20));
        assert_eq!(first, Some((at(20), at(20))));
        assert_eq!(reports(None, 3 * SECOND, at(23)), Some((at(20), at(23))));
        assert_eq!(reports(None, SECOND / 10, at(24)), None, "it has received one");
    }

    #[test]
    fn nodes_that_the_peer_lacks_are_known() {
        let now = Instant::now();
        let mut diagnosis = Diagnosis::new(now);
        let mut known = |nodes: Option<NodeCount>| {
            let mut message = reporting(None);
            message.weft.as_mut().unwrap().nodes = nodes;
            diagnosis.handle_message(&message, now);
            diagnosis.peer_nodes
        };
        let count = |reachable, of| Some(NodeCount { reachable, of });
        for lacking in [count(0, 0), count(0, 2), count(1, 2)] {
            assert_eq!(known(lacking), lacking);
        }
        assert_eq!([known(count(2, 2)), known(None)], [None, None]);
    }

    #[test]
    fn loss_that_the_peer_reports_shows_until_it_ends() {
        let now = Instant::now();
        let mut diagnosis = Diagnosis::new(now);
        diagnosis.handle_message(&reporting(Some(40)), now);
        assert_eq!(diagnosis.loss_percent(), Some(40));
        for percent in [None, Some(0), Some(200)] {
            diagnosis.handle_message(&reporting(percent), now);
            assert_eq!(diagnosis.loss_percent(), None, "{percent:?}");
        }
    }
}
