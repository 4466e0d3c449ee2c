//! Causes for a peering not being, or soon not being, connected: what the two gateways observe of
//! each other, turned into reasons and remedies. Pure: time is a parameter.
//!
//! [`reachability::connection`] alone decides whether packets are refused. This crate explains, earlier
//! and in more detail.

mod keys;
mod reason;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_api::fabric::{MtuBound, RemapKind, Role};
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::ConnectionValue;
use fabric_api::{Cidr, PublicKey};
use gateway_config::desired::{Desired, IPV6_MTU};
use reachability::probe::{Departure, NodeCount, PeerCidrs};
use reachability::probe_log::{MIN_UNANSWERED_TIME, Unanswered};
use tunnel::{PeerState, Unconfirmed};

pub use reason::Reason;

/// Time without any sign of life after which a peer that leaves probes unanswered is reported: as
/// long as leaves time to show it before 3 s are over.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a first handshake.
const HANDSHAKE_TIME: Duration = Duration::from_millis(1500);
/// Time for the peer to take over new keys.
pub const ROTATION_TIME: Duration = Duration::from_millis(1500);
/// Time for an answer at an endpoint that should not be one.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Validity of responses that the peer does not confirm: it initiates again before, if after 5 s and
/// jitter, as Linux does.
const RESPONSE_TIME: Duration = Duration::from_secs(7);

/// Validity of a send that failed: the next probe is due before.
pub const REFUSAL_TIME: Duration = Duration::from_millis(1500);

/// A cause, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub reason: Reason,
    pub message: String,
    pub remedy: String,
}

/// Cause in this host for which the kernel sends no datagram to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedSend {
    NotPermitted,
    Unreachable,
}

/// All that is known of one peering.
#[derive(Clone, Debug)]
pub struct Evidence<'a> {
    pub desired: &'a Desired,
    pub own_key: Option<PublicKey>,
    pub value: ConnectionValue,
    /// Since when the gateway has been looking for the peer.
    pub started: Instant,
    pub peer: PeerState,
    /// The last authentic packet and the last answered probe.
    pub last_received: Option<Instant>,
    pub last_answer: Option<Instant>,
    pub unanswered: Option<Unanswered>,
    pub refused_send: Option<RefusedSend>,
    /// Times of the first and the last report of the peer that it has received none of the unanswered probes.
    pub unreceived: Option<(Instant, Instant)>,
    /// Since when packets have been sealed with superseded keys.
    pub superseded_since: Option<Instant>,
    /// Share of lost probes in percent, if that is worth reporting.
    pub loss_percent: Option<u8>,
    pub departure: Option<Departure>,
    /// The peer reports that another gateway uses this one's key.
    pub is_key_shared: bool,
    pub peer_cidrs: Option<&'a PeerCidrs>,
    /// The peer's configuration does not fit this cluster's CIDRs.
    pub peer_differs: bool,
    /// This cluster's ID as the peer has it, if that is another one.
    pub own_id_at_peer: Option<&'a str>,
    /// The peer's ID is not the one configured for it, as it reports.
    pub peer_id_differs: bool,
    /// The peer reports that not all of its nodes reach its gateway.
    pub peer_nodes: Option<NodeCount>,
    /// The peer reports that its tunnel is too small for IPv6.
    pub peer_refuses_ipv6: bool,
    /// MTU of the tunnel in bytes, and what keeps it from being larger.
    pub mtu: u32,
    pub mtu_bound: MtuBound,
}

/// Returns the causes, the most conclusive first.
pub fn diagnose(evidence: &Evidence<'_>, now: Instant) -> Vec<Fault> {
    let mut faults = Vec::new();
    faults.extend(evidence.own_endpoint(now));
    faults.extend(evidence.departure());
    faults.extend(evidence.peer_key_shared());
    faults.extend(evidence.key_shared());
    let (of_peer, of_stranger) = evidence.unknown_key(now);
    faults.extend(of_peer);
    faults.extend(evidence.wrong_responder(now));
    faults.extend(evidence.superseded_keys(now));
    faults.extend(evidence.send_refused());
    // Each of the above explains why the peer does not answer.
    if faults.is_empty() {
        faults.extend(evidence.missing_answer(now));
        faults.extend(of_stranger);
    }
    if faults.is_empty() {
        faults.extend(evidence.loss());
    }
    if evidence.own_endpoint(now).is_none() {
        faults.extend(evidence.endpoint_unanswered());
    }
    faults.extend(evidence.cidr_mismatch());
    faults.extend(evidence.id_mismatch());
    faults.extend(evidence.too_small_for_ipv6().or_else(|| evidence.peer_too_small_for_ipv6()));
    faults.extend(evidence.peer_nodes_unreachable());
    faults
}

impl Evidence<'_> {
    /// Returns true if the CIDRs that the peer reports are not those configured for it.
    pub fn cidrs_differ(&self) -> bool {
        self.peer_cidrs.is_some_and(|cidrs| {
            [RemapKind::Pod, RemapKind::External].iter().any(|kind| !self.fits(*kind, cidrs))
        })
    }

    /// Returns true if the CIDRs of one kind that are configured for the peer are its own. A family
    /// that neither side has configured for the other is not meant to be joined.
    fn fits(&self, kind: RemapKind, peer: &PeerCidrs) -> bool {
        let (configured, own) = (self.configured(kind), peer.of(kind));
        let is_joined = |ipv4: bool| {
            configured.iter().any(|cidr| cidr.is_ipv4() == ipv4)
                || peer.joins(ipv4) && self.desired.pod_cidrs.iter().any(|c| c.is_ipv4() == ipv4)
        };
        configured.iter().all(|cidr| own.contains(cidr))
            && own.iter().all(|cidr| !is_joined(cidr.is_ipv4()) || configured.contains(cidr))
    }

    /// The peer's CIDRs of one kind, as configured.
    fn configured(&self, kind: RemapKind) -> Vec<Cidr> {
        let of_kind = self.desired.remaps.iter().filter(|remap| remap.kind == kind);
        of_kind.map(|remap| remap.remote).collect()
    }

    fn is_connected(&self) -> bool {
        self.value == ConnectionValue::Connected
    }

    fn peer_name(&self) -> &str {
        self.desired.peer.as_str()
    }

    /// A client that looks for its server in its own cluster.
    fn own_endpoint(&self, now: Instant) -> Option<Fault> {
        let endpoint = self.desired.endpoint.as_ref()?;
        let tried = self.peer.endpoint.map(|at| at.ip().to_canonical());
        let configured = endpoint.hosts.iter().filter_map(|host| host.parse::<IpAddr>().ok());
        let own = configured.chain(tried).find_map(|ip| Some((ip, self.owner_of(ip)?)))?;
        // Two clusters may share a host; then the tunnel works.
        let is_answered = self.unanswered.is_none_or(|probes| now < probes.first + ANSWER_TIME);
        if self.is_connected() && is_answered && tried == Some(own.0) {
            return None;
        }
        Some(Fault {
            reason: Reason::EndpointIsOwn,
            message: format!(
                "spec.endpoint of the GatewayClient leads to {}, which is {}",
                SocketAddr::new(own.0, endpoint.port),
                own.1
            ),
            remedy: format!(
                "set spec.endpoint to the address and port of {}'s GatewayServer",
                self.peer_name()
            ),
        })
    }

    /// An endpoint that was changed while the tunnel was up: the peer's packets keep the session where
    /// it was, and nothing else would show that the next one is looked for in the wrong place.
    fn endpoint_unanswered(&self) -> Option<Fault> {
        let configured = canonical(self.peer.unproven_endpoint?);
        let found = canonical(self.peer.endpoint?);
        if self.desired.role != Role::Client || !self.is_connected() || found == configured {
            return None;
        }
        let peer = self.peer_name();
        Some(Fault {
            reason: Reason::EndpointUnanswered,
            message: format!(
                "spec.endpoint of the GatewayClient leads to {configured}, from where {peer} has \
                 never answered: the session goes on with {found}"
            ),
            remedy: format!(
                "correct spec.endpoint to the address and port of {peer}'s GatewayServer"
            ),
        })
    }

    fn owner_of(&self, ip: IpAddr) -> Option<String> {
        if ip.is_loopback() || ip.is_unspecified() {
            return Some("this host itself".to_owned());
        }
        let node = self.desired.nodes.iter().find(|node| node.underlay == ip)?;
        Some(format!("node {} of this cluster itself", node.name))
    }

    fn departure(&self) -> Option<Fault> {
        let peer = self.peer_name();
        let (reason, message, remedy) = match self.departure? {
            Departure::Removed => (
                Reason::PeeringRemoved,
                format!(
                    "{peer} has removed its side of this peering, or its PublicKey of {}",
                    self.own()
                ),
                format!(
                    "remove this side, too, or apply the manifests, this cluster's PublicKey among \
                     them, or install weft, in {peer} again; if it has other keys since, copy its \
                     PublicKey to here"
                ),
            ),
            Departure::TakenDown => (
                Reason::PeerTakenDown,
                format!(
                    "{peer} has been taken down (`weft down`), and nothing has come from it since"
                ),
                format!(
                    "run `weft up` in {peer}, or remove this peering; if {peer} is up again, see \
                     whether UDP {way} passes, and whether {peer} still knows where to send it",
                    way = self.way()
                ),
            ),
            Departure::Restarting | Departure::Unknown => return None,
        };
        Some(Fault { reason, message, remedy })
    }

    fn send_refused(&self) -> Option<Fault> {
        let is_refused = self.refused_send == Some(RefusedSend::NotPermitted);
        let way = self.way();
        // The source port of a client that finds nobody changes every few seconds.
        let own = match self.desired.role {
            Role::Client => way.clone(),
            Role::Server => format!("from port {}", self.desired.listen_port.unwrap_or_default()),
        };
        (is_refused && (self.has_unanswered() || !self.is_connected())).then(|| Fault {
            reason: Reason::SendRefused,
            message: format!("this host itself refuses UDP {way} (operation not permitted)"),
            remedy: format!(
                "accept UDP {own} in the output chain that drops it (`nft list ruleset`, \
                 `iptables-save`); or its connection tracking is full (`dmesg`)"
            ),
        })
    }

    fn missing_answer(&self, now: Instant) -> Option<Fault> {
        if self.value == ConnectionValue::Connecting {
            let cause = self.no_probe_answer(now).or_else(|| self.responses_not_received(now));
            return cause.or_else(|| self.no_handshake(now));
        }
        let last = self.last_answer.max(self.last_received);
        let is_unanswered =
            last.is_none_or(|at| now.saturating_duration_since(at) >= ANSWER_TIMEOUT);
        // Without a session nothing is sent that could be unanswered; without probes none is needed until data comes.
        let is_expired =
            self.is_connected() && !self.peer.has_session && self.desired.probe.enabled;
        if is_unanswered && (!self.is_connected() || is_expired || self.has_unanswered()) {
            return self.responses_not_received(now).or_else(|| Some(self.no_answer()));
        }
        if self.is_not_received(now) {
            return Some(self.not_received());
        }
        self.no_probe_answer(now)
    }

    /// The peer is there, and answers no probes: another WireGuard never does.
    fn no_probe_answer(&self, now: Instant) -> Option<Fault> {
        let is_past = |at: Instant, time| now.saturating_duration_since(at) >= time;
        let probes = self.unanswered.filter(|_| self.has_unanswered())?;
        let handshake = self.peer.last_handshake.filter(|_| self.peer.has_session)?;
        let is_there = match self.value {
            ConnectionValue::Connecting => true,
            // The peer that is back answers in a moment.
            ConnectionValue::Error => is_past(handshake, ANSWER_TIME),
            ConnectionValue::Connected => false,
        };
        let is_unanswered = is_past(probes.first, ANSWER_TIMEOUT)
            && self.last_answer.is_none_or(|answered| is_past(answered, ANSWER_TIMEOUT));
        let peer = self.peer_name();
        (is_there && is_unanswered).then(|| Fault {
            reason: Reason::NoProbeAnswer,
            message: format!("{peer} completes handshakes, and answers no probes"),
            remedy: format!(
                "if {peer} has another WireGuard, which answers none, switch probes off (`weft up \
                 --ping-enabled=false`, in Kubernetes the same option of fabric-controller); else \
                 check its gateway (`weft status` there)"
            ),
        })
    }

    fn has_unanswered(&self) -> bool {
        self.unanswered.is_some_and(|probes| probes.is_silence())
    }

    /// Packets arrive, and the peer reports that it receives none. Its first report may be older than the end of
    /// an outage of both directions.
    fn is_not_received(&self, now: Instant) -> bool {
        let answered = self.last_answer.is_some_and(|at| now < at + ANSWER_TIMEOUT);
        let is_reported =
            self.unreceived.is_some_and(|(first, last)| last >= first + MIN_UNANSWERED_TIME);
        is_reported && self.has_unanswered() && !answered
    }

    /// Initiations arrive, and the peer starts again and again.
    fn responses_not_received(&self, now: Instant) -> Option<Fault> {
        let Unconfirmed { path, last, .. } = self.peer.unconfirmed?;
        let (peer, remote) = (self.peer_name(), canonical(path.remote));
        let from = path.source.map(|source| format!("from {source} ")).unwrap_or_default();
        (now < last + RESPONSE_TIME).then(|| Fault {
            reason: Reason::NotReceived,
            message: format!(
                "{peer} initiates again and again: the responses, UDP {from}to {remote}, do not \
                 arrive there"
            ),
            remedy: self.missing_route().unwrap_or_else(|| {
                format!(
                    "let UDP {from}to {remote} pass: check firewalls and NAT in front of {peer}, and \
                     where this host sends it (`ip route get {from}to {}`)",
                    remote.ip()
                )
            }),
        })
    }

    fn no_handshake(&self, now: Instant) -> Option<Fault> {
        let is_early = now.saturating_duration_since(self.started) < HANDSHAKE_TIME;
        let is_probed = self.peer.has_session && self.unanswered.is_some();
        if is_early || is_probed {
            return None;
        }
        let peer = self.peer_name();
        let (message, remedy) = match (self.desired.role, self.peer.endpoint) {
            (Role::Client, Some(endpoint)) => (
                format!("no answer from {peer} to handshakes at {}", canonical(endpoint)),
                format!(
                    "check spec.endpoint, that {peer}'s gateway runs (`weft status` there), that \
                     firewalls let UDP pass, and that each side has the other's PublicKey"
                ),
            ),
            // The endpoint is what is missing, and named as such.
            (Role::Client, None) => return None,
            (Role::Server, _) => (
                format!(
                    "no initiation from {peer} on UDP port {}",
                    self.desired.listen_port.unwrap_or_default()
                ),
                format!(
                    "check in {peer} that it has this cluster's PublicKey, that spec.endpoint of its \
                     GatewayClient leads here (`weft status` there), and that firewalls let that \
                     port pass"
                ),
            ),
        };
        Some(Fault { reason: Reason::NoHandshake, message, remedy })
    }

    fn no_answer(&self) -> Fault {
        let peer = self.peer_name();
        let restarts = match self.departure {
            Some(Departure::Restarting) => ", whose gateway ended to be restarted",
            Some(Departure::Removed | Departure::TakenDown | Departure::Unknown) | None => "",
        };
        let message = match self.desired.probe.enabled {
            true => format!("no answer from {peer}{restarts}"),
            false => format!("no packet from {peer}{restarts}, which is not probed"),
        };
        let moved = match self.desired.role {
            Role::Client => {
                let mut hosts = self.desired.endpoint.iter().flat_map(|endpoint| &endpoint.hosts);
                let name = hosts.find(|host| host.parse::<IpAddr>().is_err());
                let set = name.map_or_else(
                    || {
                        "set spec.endpoint of the GatewayClient to its new address, or to a DNS name"
                            .to_owned()
                    },
                    |name| format!("see whether {name}, of spec.endpoint, leads to its new address"),
                );
                format!(
                    "; if {peer}'s gateway has moved, which a client behind a NAT, or one that moved at \
                     the same time, cannot follow, {set}"
                )
            }
            Role::Server => String::new(),
        };
        let remedy = self.missing_route().unwrap_or_else(|| {
            format!(
                "check that {peer}'s gateway runs and still has this cluster's PublicKey (`weft \
                 status` there), and that UDP {} passes both ways{moved}",
                self.way()
            )
        });
        Fault { reason: Reason::NoAnswer, message, remedy }
    }

    /// Remedy if it is this host that has no route to the peer.
    fn missing_route(&self) -> Option<String> {
        let is_unreachable = self.refused_send == Some(RefusedSend::Unreachable);
        let remedy =
            || format!("this host has no route {}: check its routes and links", self.way());
        is_unreachable.then(remedy)
    }

    fn not_received(&self) -> Fault {
        let peer = self.peer_name();
        Fault {
            reason: Reason::NotReceived,
            message: format!("{peer} is received, and receives nothing from here"),
            remedy: self.missing_route().unwrap_or_else(|| {
                format!(
                    "something on the way drops UDP {}: check routes and firewalls in that direction",
                    self.way()
                )
            }),
        }
    }

    fn way(&self) -> String {
        let endpoint = self.peer.endpoint.map(|at| format!("to {}", canonical(at)));
        endpoint.unwrap_or_else(|| format!("to {}", self.peer_name()))
    }

    fn loss(&self) -> Option<Fault> {
        let percent = self.loss_percent?;
        Some(Fault {
            reason: Reason::ProbeLoss,
            message: format!("{percent} % of probes to or from {} are lost", self.peer_name()),
            remedy: format!(
                "the underlay loses packets {} or back: check its links both ways",
                self.way()
            ),
        })
    }

    /// The tunnel works, but what goes by IDs (labels, metrics, other modules of Liqo) finds another cluster.
    fn id_mismatch(&self) -> Vec<Fault> {
        let (peer, own) = (self.peer_name(), self.own());
        let here = self.peer_id_differs.then(|| Fault {
            reason: Reason::IdMismatch,
            message: format!("the cluster that is {peer} here has another ID"),
            remedy: format!(
                "`weft status` there shows its ID: use that instead of {peer} in the labels \
                 {REMOTE_CLUSTER_ID} of this peering's resources"
            ),
        });
        let there = self.own_id_at_peer.map(|id| Fault {
            reason: Reason::PeerIdMismatch,
            message: format!("{peer} has this cluster as {id}; its ID is {own}"),
            remedy: format!(
                "in {peer}, use {own} instead of {id} in the labels {REMOTE_CLUSTER_ID} of the \
                 peering's resources"
            ),
        });
        here.into_iter().chain(there).collect()
    }

    /// Linux carries no IPv6 over a device whose MTU is below 1,280 bytes (RFC 8200 section 5).
    fn too_small_for_ipv6(&self) -> Option<Fault> {
        let mtu = self.mtu;
        let Desired { remaps, pod_cidrs, external_cidrs, .. } = self.desired;
        let own = pod_cidrs.iter().chain(external_cidrs).any(|cidr| !cidr.is_ipv4());
        let has_ipv6 = own && remaps.iter().any(|remap| !remap.local.is_ipv4());
        (has_ipv6 && mtu < IPV6_MTU).then(|| Fault {
            reason: Reason::TooSmallForIpv6,
            message: format!(
                "the tunnel's MTU is {mtu} bytes, less than the {IPV6_MTU} that IPv6 needs: IPv6 \
                 to {} is refused",
                self.peer_name()
            ),
            remedy: self.larger_mtu(),
        })
    }

    fn peer_too_small_for_ipv6(&self) -> Option<Fault> {
        let peer = self.peer_name();
        (self.peer_refuses_ipv6 && self.is_connected()).then(|| Fault {
            reason: Reason::PeerTooSmallForIpv6,
            message: format!(
                "the tunnel's MTU in {peer} is less than the {IPV6_MTU} bytes that IPv6 needs: \
                 {peer} refuses IPv6 to this cluster"
            ),
            remedy: format!("`weft status` in {peer} shows the MTU and what to raise"),
        })
    }

    /// Remedy for what keeps the tunnel's MTU below that of IPv6.
    fn larger_mtu(&self) -> String {
        let over_ipv4 = self.peer.endpoint.is_none_or(|at| at.ip().to_canonical().is_ipv4());
        let (packet, way) = (IPV6_MTU + if over_ipv4 { 60 } else { 80 }, self.way());
        match self.mtu_bound {
            MtuBound::Spec => format!("set spec.mtu of the gateway to {IPV6_MTU} or more"),
            MtuBound::Device => format!(
                "raise the MTU of this host's device or route {way} to {packet} bytes or more"
            ),
            MtuBound::Path => format!("let the way {way} pass packets of {packet} bytes"),
            MtuBound::Overlay => format!(
                "raise the MTU between this gateway and its nodes by {} bytes or more",
                IPV6_MTU - self.mtu
            ),
        }
    }

    /// Own nodes with a fault are none here, so that it does not come back from the peer as its own.
    fn peer_nodes_unreachable(&self) -> Option<Fault> {
        let NodeCount { reachable, of } = self.peer_nodes.filter(|_| self.is_connected())?;
        let peer = self.peer_name();
        let (message, remedy) = match of {
            0 => (
                format!("peer {peer}: its cluster has no node, so none of its pods is reached"),
                format!("in {peer}, add its Nodes"),
            ),
            1.. => (
                format!(
                    "peer {peer}: {reachable} of {of} of its nodes reach its gateway without a fault"
                ),
                format!("`weft status` in {peer} names the others, with cause and remedy"),
            ),
        };
        Some(Fault { reason: Reason::PeerNodesUnreachable, message, remedy })
    }

    fn cidr_mismatch(&self) -> Vec<Fault> {
        let peer = self.peer_name();
        let mut faults = Vec::new();
        for (kind, field) in [(RemapKind::Pod, "pod"), (RemapKind::External, "external")] {
            let Some(cidrs) = self.peer_cidrs.filter(|cidrs| !self.fits(kind, cidrs)) else {
                continue;
            };
            let (found, expected) = (list(&self.configured(kind)), list(cidrs.of(kind)));
            let found = if found.is_empty() { "nothing".to_owned() } else { found };
            faults.push(Fault {
                reason: Reason::CidrMismatch,
                message: format!(
                    "spec.remote.cidr.{field} of {peer}'s Configuration: found {found}; expected \
                     {expected}, which {peer}'s gateway reports as its own: what is missing is \
                     dropped"
                ),
                remedy: format!("set spec.remote.cidr.{field} to [{expected}]"),
            });
        }
        if self.peer_differs {
            faults.push(Fault {
                reason: Reason::PeerCidrMismatch,
                message: format!(
                    "{peer} has other CIDRs configured for {} than its own",
                    self.own()
                ),
                remedy: format!(
                    "in {peer}, correct spec.remote.cidr of {}'s Configuration to pod [{}], \
                     external [{}]",
                    self.own(),
                    list(&self.desired.pod_cidrs),
                    list(&self.desired.external_cidrs)
                ),
            });
        }
        faults
    }
}

fn list(cidrs: &[Cidr]) -> String {
    cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The same address, if it is one of IPv4 that a socket of both families shows as IPv6.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
#[path = "../../config/src/test_config.rs"]
mod test_config;
#[cfg(test)]
mod tests;
