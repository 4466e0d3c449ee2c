//! Faults of keys: those that two gateways share, that the peer does not know, and that are superseded.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_api::fabric::Role;
use tunnel::RejectedInitiation;

use crate::{Evidence, Fault, ROTATION_TIME, Reason, canonical};

/// Validity of a rejected initiation: weft repeats them every 1.0 to 1.33 s, WireGuard every 5 s.
const MIN_REJECTION_TIME: Duration = Duration::from_millis(2700);
const MAX_REJECTION_TIME: Duration = Duration::from_secs(12);

/// Shortest time between two initiations of one gateway.
const MIN_PACE: Duration = Duration::from_millis(700);

/// Anything more frequent is a flood.
fn has_pace_of_a_gateway(rejected: RejectedInitiation) -> bool {
    let since = |previous| rejected.at.saturating_duration_since(previous);
    rejected.previous.is_some_and(|previous| since(previous) >= MIN_PACE)
}

impl Evidence<'_> {
    /// The text stays the same while the two change their ports.
    pub(super) fn peer_key_shared(&self) -> Option<Fault> {
        let [a, b] = self.peer.duplicate?.map(canonical);
        let (a, b) = match a.ip() == b.ip() {
            true => (a.to_string(), b.to_string()),
            false => (a.ip().to_string(), b.ip().to_string()),
        };
        let peer = self.peer_name();
        Some(Fault {
            reason: Reason::PeerKeyShared,
            message: format!(
                "{peer}'s key is used from two endpoints, {a} and {b}, in turn: expected one gateway"
            ),
            remedy: format!("stop one of the two in {peer}, or give it a key of its own"),
        })
    }

    pub(super) fn key_shared(&self) -> Option<Fault> {
        self.is_key_shared.then(|| Fault {
            reason: Reason::KeyShared,
            message: format!(
                "{} receives packets with this gateway's key from another endpoint, too: expected \
                 one gateway",
                self.peer_name()
            ),
            remedy: "stop the other gateway, or give it a key of its own (`weft keys`)".to_owned(),
        })
    }

    /// The first is of a gateway that may be the peer's, the second of one that hardly is.
    pub(super) fn unknown_key(&self, now: Instant) -> (Option<Fault>, Option<Fault>) {
        let rejected = self.peer.rejections.unknown_key;
        let Some(rejected) = rejected.filter(|rejected| self.is_current(*rejected, now)) else {
            return (None, None);
        };
        let fault = self.unknown_key_of(rejected);
        match self.may_be_peer(rejected) {
            true => (Some(fault), None),
            false => (None, Some(fault).filter(|_| !self.is_connected())),
        }
    }

    /// Anybody may send initiations. Those of a peer that was received before come from where it was, or
    /// through a node of this cluster, whose NodePort masquerades them.
    fn may_be_peer(&self, rejected: RejectedInitiation) -> bool {
        let at = |address: SocketAddr| address.ip().to_canonical();
        self.last_received.is_none()
            || self.peer.on_superseded_keys
            || self.peer.endpoint.is_some_and(|peer| at(peer) == at(rejected.from))
            || !self.is_connected() && self.owner_of(at(rejected.from)).is_some()
    }

    fn unknown_key_of(&self, rejected: RejectedInitiation) -> Fault {
        let peer = self.peer_name();
        let found = rejected.key.map_or_else(String::new, |key| format!(" {key}"));
        let expected = self.desired.peer_key.map_or_else(String::new, |key| format!(" ({key})"));
        let remedy = match rejected.key {
            Some(key) => format!(
                "if that is {peer}'s key (`weft keys` there), set spec.publicKey of its PublicKey \
                 in this namespace to {key}"
            ),
            None => format!("copy the PublicKey that `weft keys` prints in {peer} to here"),
        };
        Fault {
            reason: Reason::UnknownKey,
            message: format!(
                "initiations arrive from {} with the key{found}, which is not in {peer}'s \
                 PublicKey{expected}",
                canonical(rejected.from)
            ),
            remedy,
        }
    }

    pub(super) fn wrong_responder(&self, now: Instant) -> Option<Fault> {
        let rejected = self.peer.rejections.wrong_responder?;
        // A client's own ones, if it looks for its server in its own cluster.
        let at = |address: SocketAddr| address.ip().to_canonical();
        let is_own =
            self.desired.role == Role::Client && self.owner_of(at(rejected.from)).is_some();
        if is_own || !self.may_be_peer(rejected) || !self.is_current(rejected, now) {
            return None;
        }
        let peer = self.peer_name();
        let own = self.own_key.map_or_else(String::new, |key| format!(" {key}"));
        // A NodePort of this cluster may change the port of the peer's own ones.
        let is_gateway = self.peer.endpoint.map(canonical) == Some(canonical(rejected.from))
            || self.owner_of(at(rejected.from)).is_some();
        let is_there = self.is_connected() && self.departure.is_none();
        if is_there && !self.peer.on_superseded_keys && !is_gateway {
            let stray = self.stray_client(canonical(rejected.from));
            return has_pace_of_a_gateway(rejected).then_some(stray);
        }
        Some(Fault {
            reason: Reason::WrongResponder,
            message: format!(
                "initiations arrive from {} that are not for this gateway's key{own}",
                canonical(rejected.from)
            ),
            remedy: format!("in {peer}, set spec.publicKey of {}'s PublicKey to{own}", self.own()),
        })
    }

    fn stray_client(&self, from: SocketAddr) -> Fault {
        let peer = self.peer_name();
        Fault {
            reason: Reason::WrongResponder,
            message: format!(
                "another gateway than {peer}'s, which is connected, sends initiations from {from} that \
                 are for another key than this gateway's"
            ),
            remedy: format!(
                "on {}, correct spec.endpoint of the GatewayClient for another cluster that leads here, \
                 or stop a second gateway for {}",
                from.ip(),
                self.own()
            ),
        }
    }

    pub(super) fn own(&self) -> &str {
        self.desired.cluster.as_str()
    }

    /// No handshake has been completed since, and the next one like it is not overdue.
    fn is_current(&self, rejected: RejectedInitiation, now: Instant) -> bool {
        let is_over = !self.peer.on_superseded_keys
            && self.peer.last_handshake.is_some_and(|at| at >= rejected.at);
        let interval = rejected.previous.map(|previous| rejected.at - previous);
        let valid = interval.unwrap_or_default() * 11 / 5;
        let valid = valid.clamp(MIN_REJECTION_TIME, MAX_REJECTION_TIME);
        !is_over && now.saturating_duration_since(rejected.at) < valid
    }

    pub(super) fn superseded_keys(&self, now: Instant) -> Option<Fault> {
        let since = self.superseded_since?;
        if now.saturating_duration_since(since) < ROTATION_TIME {
            return None;
        }
        let peer = self.peer_name();
        let own = self.own_key.map_or_else(String::new, |key| format!(" {key}"));
        Some(Fault {
            reason: Reason::SupersededKeys,
            message: format!(
                "{peer} does not answer handshakes with the new keys; the superseded ones carry \
                 on for up to 180 s"
            ),
            remedy: format!(
                "make sure that {peer} has this cluster's PublicKey{own}, and that {peer}'s \
                 PublicKey here is its own"
            ),
        })
    }
}
