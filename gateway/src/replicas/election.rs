//! Election of the replica that has the tunnel. No I/O, no clock.
//!
//! ```text
//! Undecided --> Standby      an active replica sends heartbeats
//! Undecided, Standby --> Active     the active one leaves, is deaf, its process is gone, or no heartbeat comes
//! Active --> Standby         another one is active with a greater epoch, by heartbeat or API server
//! Active --> Leaving         the process ends
//! ```
//!
//! Each take-over has the next epoch, and the greatest one wins, but for a replica that the peer has not answered
//! since: one that was cut off from everything. Two replicas that cannot reach each other are both active for a while:
//! then `status.active` of the GatewayConfig decides.

mod contest;
mod other;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

pub use contest::Contest;
use fabric_api::fabric::ActiveReplica;
use other::{Other, pace};
use serde::{Deserialize, Serialize};
use tunnel::Tai64n;

/// Time between two heartbeats, and without one until a replica counts as gone: at least, and at most. It is longer on
/// starved processors, three times the longest gap of late, and where heartbeats get lost.
pub const INTERVAL: Duration = Duration::from_millis(100);
pub const TIMEOUT: Duration = Duration::from_millis(400);
const MAX_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between the take-overs of two replicas on standby.
const STAGGER: Duration = Duration::from_millis(200);
/// Time after a take-over without a packet of the peer after which another replica with the tunnel goes before.
const STUCK: Duration = Duration::from_millis(500);
/// Time beyond that between two packets of the peer, without any and without a heartbeat of any replica, after which
/// one with the tunnel is deaf: what its node receives gets lost.
const DEAF: Duration = Duration::from_millis(300);
/// Time that one which nodes take no packets from leaves to the others: their processes are back within it.
const UNLISTED_WAIT: Duration = Duration::from_secs(2);
/// Time without a heartbeat after which a replica in no config is removed, and one in the config that has sent none
/// is reported: a container may have to be fetched first.
const FORGET: Duration = Duration::from_secs(10);
/// Time without a heartbeat after which one that has sent some is reported.
const MISS: Duration = Duration::from_millis(2500);
/// Heartbeats lost after which one that is back may have taken the tunnel meanwhile.
const AWAY: u64 = 10;
/// Time without a heartbeat after which an older incarnation is accepted: a clock was set back.
const ACCEPT_OLDER: Duration = Duration::from_secs(5);
/// Time without take-overs of a replica that `status.active` has deposed, and that receives no heartbeat: the
/// first one, and the longest. The other one most likely lives, and each take-over cuts the peer off for a moment.
const HOLD: Duration = Duration::from_secs(60);
const MAX_HOLD: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// No decision yet: another replica may have the tunnel.
    #[default]
    Undecided,
    Standby,
    Active,
    /// The process with the tunnel ends.
    Leaving,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Undecided => "undecided",
            Self::Standby => "standby",
            Self::Active => "active",
            Self::Leaving => "leaving",
        };
        f.write_str(text)
    }
}

/// State of the tunnel, for the next replica that has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tunnel {
    pub connected: bool,
    /// The peer's last authentic endpoint.
    pub peer: Option<SocketAddr>,
    /// A configured endpoint from which the peer has not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unproven: Option<SocketAddr>,
    /// UDP port of the replica at which its successor reaches the peer through it.
    pub relay: Option<u16>,
    /// Timestamp of the last initiation.
    #[serde(with = "tai64n")]
    pub stamp: Tai64n,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Time at which the sender was started, in nanoseconds since 1970, and number of the heartbeat.
    pub incarnation: u64,
    pub sequence: u64,
    pub role: Role,
    /// Greatest epoch observed by the sender; its own, if it has the tunnel.
    pub epoch: u64,
    /// The sender has all that a tunnel needs.
    pub ready: bool,
    /// The sender has had the tunnel for a while, and the peer has not answered it.
    #[serde(default)]
    pub stuck: bool,
    /// The sender has the tunnel, and receives neither the peer nor a replica any more.
    #[serde(default)]
    pub deaf: bool,
    /// Incarnation that is to have the tunnel, if the sender leaves.
    pub successor: Option<u64>,
    pub tunnel: Tunnel,
}

/// Replica that had the tunnel before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Predecessor {
    pub address: IpAddr,
    pub tunnel: Tunnel,
    /// The predecessor still carries packets, until this replica is connected.
    pub is_alive: bool,
}

impl Predecessor {
    /// Returns where the peer is reached: as it was there, or through the predecessor, to which connection
    /// tracking may still lead what the peer sends.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.relay().or(self.tunnel.peer)
    }

    /// Returns where the predecessor passes packets on.
    pub fn relay(&self) -> Option<SocketAddr> {
        let port = self.tunnel.relay.filter(|_| self.is_alive);
        port.map(|port| SocketAddr::new(self.address, port))
    }
}

impl Heartbeat {
    /// True of one that may have the tunnel after this replica.
    fn may_succeed(&self) -> bool {
        self.role != Role::Leaving && self.ready && !self.deaf
    }
}

/// State of one replica.
#[derive(Debug)]
pub struct Election {
    incarnation: u64,
    sequence: u64,
    role: Role,
    epoch: u64,
    is_ready: bool,
    is_unlisted: bool,
    /// Longest time between two packets of a peer, if it is probed.
    peer_interval: Option<Duration>,
    /// Time of the last packet of the peer since the take-over.
    heard_at: Option<Instant>,
    took_over_at: Instant,
    successor: Option<u64>,
    others: BTreeMap<IpAddr, Other>,
    predecessor: Option<Predecessor>,
    contest: Contest,
    /// Time of the last decision.
    decided_at: Instant,
    begun: Instant,
    beat_at: Instant,
    /// Time since which no replica has the tunnel, as far as observed.
    vacant: Option<Instant>,
    /// Replica that has deposed this one, and the end of the time without take-overs.
    held_by: Option<(IpAddr, Instant)>,
    hold: Duration,
    /// A config has been read.
    is_begun: bool,
}

impl Election {
    pub fn new(incarnation: u64, now: Instant) -> Self {
        Self {
            incarnation,
            sequence: 0,
            role: Role::Undecided,
            epoch: 0,
            is_ready: false,
            is_unlisted: false,
            peer_interval: None,
            heard_at: None,
            took_over_at: now,
            successor: None,
            others: BTreeMap::new(),
            predecessor: None,
            contest: Contest::default(),
            decided_at: now,
            begun: now,
            beat_at: now,
            vacant: None,
            held_by: None,
            hold: HOLD,
            is_begun: false,
        }
    }

    pub fn role(&self) -> Role {
        self.role
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn predecessor(&self) -> Option<Predecessor> {
        self.predecessor
    }

    pub fn contest(&self) -> Contest {
        self.contest
    }

    /// Sets whether this replica has all that a tunnel needs.
    pub fn set_ready(&mut self, ready: bool) {
        self.is_ready = ready;
    }

    /// Sets whether the config has other replicas, and not this one.
    pub fn set_unlisted(&mut self, unlisted: bool) {
        self.is_unlisted = unlisted;
    }

    /// Sets the time between two probes, which a peer answers; zero if it is sent none.
    pub fn set_probe_interval(&mut self, interval: Duration) {
        self.peer_interval = Some(interval).filter(|interval| !interval.is_zero());
    }

    /// The last packet of the peer came then, perhaps through a lane before the present one.
    pub fn set_heard(&mut self, last: Instant) {
        self.heard_at = self.heard_at.max(Some(last).filter(|at| *at >= self.took_over_at));
    }

    /// Returns whether it has the tunnel, and the peer has not answered for a while.
    pub fn is_stuck(&self, now: Instant) -> bool {
        self.role == Role::Active && self.heard_at.is_none() && now >= self.took_over_at + STUCK
    }

    /// Returns whether it has the tunnel, and receives neither peer nor replicas, which fell silent at once: their
    /// packets get lost, while its own may arrive. One that took the tunnel over for that reason never received any.
    fn is_deaf(&self, now: Instant) -> bool {
        let others = self.others.values().filter(|other| !other.answers(now));
        let beats = others.filter_map(|other| Some((other.last?.1, other.timeout())));
        let last = beats.max().filter(|_| self.living(now).next().is_none());
        let Some((beat, timeout)) = last else { return false };
        let Some(heard) = self.heard_at else {
            return beat < self.took_over_at && self.is_stuck(now);
        };
        let is_silent = self.peer_interval.is_some_and(|interval| {
            let is_one_cause = heard < beat + timeout && beat < heard + interval + timeout;
            is_one_cause && now >= heard.max(beat) + interval + DEAF
        });
        self.role == Role::Active && is_silent
    }

    /// Returns whether it is deaf, and was not when it took the tunnel over.
    pub fn has_become_deaf(&self, now: Instant) -> bool {
        self.heard_at.is_some() && self.is_deaf(now)
    }

    /// Replicas that are sent heartbeats.
    pub fn others(&self) -> impl Iterator<Item = IpAddr> {
        self.others.keys().copied()
    }

    /// Sets the other replicas in the config. Another one that beats counts as well.
    pub fn set_others(&mut self, listed: BTreeSet<IpAddr>, now: Instant) {
        if !self.is_begun {
            (self.is_begun, self.begun, self.decided_at) = (true, now, now);
        }
        for (address, other) in &mut self.others {
            other.is_listed = listed.contains(address);
        }
        for address in listed {
            let other = self.others.entry(address).or_default();
            other.is_listed = true;
            other.listed_at.get_or_insert(now);
        }
    }

    /// Records the published `status.active`. Of two replicas with one epoch the lower address wins, so that
    /// both decide alike.
    pub fn handle_published(&mut self, of: ActiveReplica, own: Option<IpAddr>, now: Instant) {
        let ActiveReplica { address, epoch } = of;
        let is_own = own == Some(address);
        let last = self.others.get(&address).and_then(|other| other.last.as_ref());
        let beats = |at: &Instant| now.saturating_duration_since(*at) <= TIMEOUT;
        let is_outbid = last.is_some_and(|(of, at)| of.stuck && beats(at)) && !self.is_stuck(now);
        let has_precedence =
            !is_outbid && (epoch > self.epoch || epoch == self.epoch && Some(address) < own);
        if self.role == Role::Active && is_own {
            self.epoch = self.epoch.max(epoch);
        } else if self.role == Role::Active && has_precedence {
            self.role = Role::Standby;
            self.held_by = Some((address, now + self.hold));
            self.hold = MAX_HOLD.min(self.hold * 2);
        }
        if matches!(self.role, Role::Active | Role::Leaving) {
            return;
        }
        // One that was active when its process ended goes on with its epoch.
        let is_restart = is_own && self.role == Role::Undecided;
        self.epoch = self.epoch.max(if is_restart { epoch.saturating_sub(1) } else { epoch });
    }

    /// Records another replica's heartbeat.
    pub fn handle(&mut self, from: IpAddr, heartbeat: Heartbeat, now: Instant) {
        if heartbeat.incarnation == self.incarnation {
            return;
        }
        let other = self.others.entry(from).or_default();
        let order = |of: &Heartbeat| (of.incarnation, of.sequence);
        let is_old = other.last.as_ref().is_some_and(|(last, at)| {
            order(&heartbeat) <= order(last) && now.saturating_duration_since(*at) < ACCEPT_OLDER
        });
        if is_old {
            return;
        }
        let gap =
            other.last.map(|(last, at)| pace(&last, &heartbeat, now - at)).unwrap_or_default();
        other.gap = gap.min(MAX_TIMEOUT).max(other.gap * 99 / 100);
        // Others of its heartbeats were lost: it may have had the tunnel, and have given way before it was heard. One
        // that stood still sent none.
        let of_same = other.last.filter(|(last, _)| last.incarnation == heartbeat.incarnation);
        let beats = of_same.map_or(0, |(last, _)| heartbeat.sequence.saturating_sub(last.sequence));
        other.losses.note(beats);
        if self.role == Role::Active && beats > AWAY {
            self.contest.turn(now);
        }
        other.last = Some((heartbeat, now));
        let has_tunnel = matches!(heartbeat.role, Role::Active | Role::Leaving);
        let is_same = |of: Heartbeat| of.incarnation == heartbeat.incarnation;
        if has_tunnel || other.with_tunnel.is_some_and(is_same) {
            other.with_tunnel = has_tunnel.then_some(heartbeat);
        }
        other.refusals = 0;
        if self.role != Role::Active && self.role != Role::Leaving {
            self.epoch = self.epoch.max(heartbeat.epoch);
        }
    }

    /// Records an ICMP error in answer to a heartbeat: no process listens there.
    pub fn handle_refusal(&mut self, from: IpAddr, now: Instant) {
        if let Some(other) = self.others.get_mut(&from) {
            other.refusals = other.refusals.saturating_add(1);
            other.refused_at = Some(now);
        }
    }

    /// Begins the hand-over, if another replica is ready for the tunnel.
    pub fn leave(&mut self, now: Instant) {
        let ready = self.living(now).filter(|(of, _)| of.may_succeed());
        // In a rollout the newest ones stay.
        let successor = ready.map(|(of, _)| of.incarnation).max();
        if self.role == Role::Active && successor.is_some() {
            (self.role, self.successor, self.beat_at) = (Role::Leaving, successor, now);
        }
    }

    /// Address of the other replica that has the tunnel.
    pub fn active_address(&self, now: Instant) -> Option<IpAddr> {
        let active = self.active(now)?;
        let of = |other: &Other| other.last.map(|(last, _)| last.incarnation);
        let mut others = self.others.iter();
        others.find(|(_, other)| of(other) == Some(active.incarnation)).map(|(address, _)| *address)
    }

    /// Returns whether another replica is ready for the tunnel, or has it.
    pub fn has_successor(&self, now: Instant) -> bool {
        self.living(now).any(|(of, _)| of.may_succeed())
    }

    /// Returns the replicas that receive nothing.
    pub fn deaf(&self, now: Instant) -> Vec<IpAddr> {
        let is_deaf = |other: &Other| other.beats(now) && other.last.is_some_and(|(of, _)| of.deaf);
        self.others.iter().filter(|(_, of)| is_deaf(of)).map(|(address, _)| *address).collect()
    }

    /// Returns the replicas in the config without a heartbeat.
    pub fn missing(&self, now: Instant) -> Vec<IpAddr> {
        let is_missing = |other: &Other| {
            let never = other.listed_at.map(|at| (at, FORGET));
            let since = other.last.map_or(never, |(_, at)| Some((at, MISS)));
            let is_over = |(at, time)| now.saturating_duration_since(at) > time;
            other.is_listed && since.is_some_and(is_over)
        };
        let missing = self.others.iter().filter(|(_, other)| is_missing(other));
        missing.map(|(address, _)| *address).collect()
    }

    /// Returns whether this replica leaves, and another one is connected in its place.
    pub fn is_relieved(&self) -> bool {
        let mut others = self.others.values().filter_map(|other| other.last.as_ref());
        self.role == Role::Leaving
            && others.any(|(last, _)| {
                last.role == Role::Active && last.epoch > self.epoch && last.tunnel.connected
            })
    }

    /// Decides on the role by the heartbeats and records so far.
    pub fn decide(&mut self, now: Instant) {
        if !self.is_begun {
            return;
        }
        self.allow_for_pause(now);
        let is_expired = |other: &Other| {
            other.last.is_none_or(|(_, at)| now.saturating_duration_since(at) > FORGET)
        };
        self.others.retain(|_, other| other.is_listed || !is_expired(other));
        self.held_by =
            self.held_by.filter(|(by, until)| *until > now && self.others.contains_key(by));
        let before = self.role;
        let active = self.active(now);
        // A deaf one keeps the tunnel: it receives no heartbeat of a greater epoch.
        let has_active = active.is_some_and(|of| !of.deaf);
        self.vacant = self.vacant.or(Some(now)).filter(|_| !has_active);
        match self.role {
            Role::Active => {
                let is_stuck = self.is_stuck(now);
                let own = (!is_stuck, self.epoch, Reverse(self.incarnation));
                if active.is_some_and(|of| rank(&of) > own) {
                    self.role = Role::Standby;
                } else {
                    let outbid = self.outbid_epoch(now).filter(|_| !is_stuck);
                    self.epoch = outbid.map_or(self.epoch, |epoch| epoch + 1);
                    self.contest.note(active.is_some(), outbid.is_some(), now);
                }
            }
            Role::Leaving => {}
            Role::Undecided | Role::Standby if has_active => {
                (self.role, self.hold, self.held_by) = (Role::Standby, HOLD, None);
            }
            Role::Undecided | Role::Standby => {
                if self.is_due(now) {
                    self.take_over(now);
                }
            }
        }
        if self.role != before {
            self.beat_at = now;
        }
    }

    /// Time of the next decision or heartbeat.
    pub fn deadline(&self) -> Option<Instant> {
        let held = self.held_by.map(|(_, until)| until);
        self.beat_due().into_iter().chain(held).min()
    }

    pub fn beat_due(&self) -> Option<Instant> {
        (!self.others.is_empty()).then_some(self.beat_at)
    }

    /// The heartbeat to send now.
    pub fn beat(&mut self, tunnel: Tunnel, now: Instant) -> Heartbeat {
        self.beat_at = now + INTERVAL;
        self.sequence += 1;
        let Self { incarnation, sequence, role, epoch, is_ready: ready, successor, .. } = *self;
        let deaf = self.is_deaf(now);
        let stuck = self.is_stuck(now) || deaf;
        let has_known = matches!(role, Role::Active | Role::Leaving);
        let tunnel = if has_known { tunnel } else { Tunnel::default() };
        Heartbeat { incarnation, sequence, role, epoch, ready, stuck, deaf, successor, tunnel }
    }

    /// Adds a pause of this process to the times of the last heartbeats: it may not have read others yet.
    fn allow_for_pause(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.decided_at);
        self.decided_at = now;
        if pause > INTERVAL * 2 {
            let lasts = self.others.values_mut().filter_map(|other| other.last.as_mut());
            lasts.for_each(|(_, at)| *at = (*at + pause).min(now));
            self.begun += pause;
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        if let Some((by, until)) = self.held_by {
            let other = self.others.get(&by);
            let has_no_tunnel = |(last, at): &(Heartbeat, Instant)| {
                last.role != Role::Active && now.saturating_duration_since(*at) <= TIMEOUT
            };
            let is_over = other.is_none_or(|other| {
                other.is_gone(now) || other.last.as_ref().is_some_and(has_no_tunnel)
            });
            if now < until && !is_over {
                return false;
            }
        }
        let leaving = self.living(now).filter(|(of, _)| of.role == Role::Leaving);
        if let Some((last, _)) = leaving.max_by_key(|(of, _)| of.epoch) {
            let is_own_turn = last.successor == Some(self.incarnation);
            return is_own_turn || self.vacant.is_some_and(|since| now >= since + TIMEOUT * 2);
        }
        let all_gone = self.others.values().all(|other| other.is_gone(now));
        // One that has just started does not know of an active one that was silent before.
        let is_known = self.role == Role::Standby || now >= self.begun + TIMEOUT;
        let own = (self.is_ready, self.incarnation);
        let before = self.living(now).filter(|(of, _)| {
            matches!(of.role, Role::Standby | Role::Undecided) && (of.ready, of.incarnation) > own
        });
        let turns = u32::try_from(before.count()).unwrap_or(u32::MAX);
        let wait = if self.is_unlisted { UNLISTED_WAIT } else { Duration::ZERO };
        let is_own_turn = self.vacant.is_some_and(|since| now >= since + STAGGER * turns + wait);
        (all_gone || is_known) && is_own_turn
    }

    fn take_over(&mut self, now: Instant) {
        let had = self.others.iter().filter_map(|(at, other)| Some((*at, other.with_tunnel?)));
        self.predecessor = had.max_by_key(|(_, of)| of.epoch).map(|(address, of)| {
            let mut living = self.living(now);
            let is_alive = of.role == Role::Leaving && living.any(|(living, _)| *living == of);
            Predecessor { address, tunnel: of.tunnel, is_alive }
        });
        let seen =
            self.others.values().filter_map(|other| other.last.map(|(of, _)| of.epoch)).max();
        self.epoch = self.epoch.max(seen.unwrap_or_default()) + 1;
        self.role = Role::Active;
        (self.heard_at, self.took_over_at) = (None, now);
        // One that hands over carries packets for a while.
        let at = self.predecessor.filter(|of| of.is_alive).map(|_| now);
        self.contest = Contest { at, is_on: false, ..self.contest };
        self.vacant = None;
    }

    /// Other replicas whose heartbeats come.
    fn living(&self, now: Instant) -> impl Iterator<Item = (&Heartbeat, Instant)> {
        self.others.values().filter_map(move |other| {
            let (last, at) = other.last.as_ref()?;
            (other.beats(now) && !other.is_gone(now)).then_some((last, *at))
        })
    }

    /// Greatest epoch that nodes may have followed, of a replica that is or was stuck.
    fn outbid_epoch(&self, now: Instant) -> Option<u64> {
        let is_outbid = |of: &Heartbeat| match of.role {
            // A greater one only if that is stuck, or this replica would have given way.
            Role::Active => of.epoch >= self.epoch,
            Role::Undecided | Role::Standby => of.epoch > self.epoch,
            Role::Leaving => false,
        };
        self.living(now).filter(|(of, _)| is_outbid(of)).map(|(of, _)| of.epoch).max()
    }

    /// Other replica that has the tunnel; the greatest one, if several have.
    fn active(&self, now: Instant) -> Option<Heartbeat> {
        let all = self.living(now).map(|(of, _)| *of);
        all.filter(|of| of.role == Role::Active).max_by_key(rank)
    }
}

/// Order of replicas that have the tunnel: the greatest one wins.
fn rank(of: &Heartbeat) -> (bool, u64, Reverse<u64>) {
    (!of.stuck, of.epoch, Reverse(of.incarnation))
}

/// Timestamps as their 12 bytes.
mod tai64n {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
    use tunnel::Tai64n;

    pub(super) fn serialize<S: Serializer>(stamp: &Tai64n, to: S) -> Result<S::Ok, S::Error> {
        stamp.to_bytes().serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Tai64n, D::Error> {
        <[u8; Tai64n::LEN]>::deserialize(from).map(Tai64n::from_bytes)
    }
}

#[cfg(test)]
mod tests;
