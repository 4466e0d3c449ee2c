//! Decides which replica has the tunnel. No I/O, no clock.
//!
//! Of several that have it the one with the greatest epoch keeps it; each take-over has the next one. A
//! replica takes over when the one that had it leaves, refuses its heartbeats (the process is gone), or
//! is silent. Two that cannot reach each other both have it for a while: then the API server's
//! record decides, by the greatest epoch, too.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_api::fabric::ActiveReplica;
use serde::{Deserialize, Serialize};
use tunnel::Tai64n;

/// Time between two heartbeats, and without one until a replica counts as gone: at least, and on starved
/// processors, three times the longest gap of late, at most.
pub const INTERVAL: Duration = Duration::from_millis(100);
pub const TIMEOUT: Duration = Duration::from_millis(400);
const MAX_TIMEOUT: Duration = Duration::from_secs(2);
/// Heartbeats that a kernel refuses before its replica counts as gone: it may just be starting.
const REFUSALS: u8 = 2;
/// Time between the take-overs of two that stand by.
const STAGGER: Duration = Duration::from_millis(200);
/// Time for which a replica is remembered that is in no config.
const FORGET: Duration = Duration::from_secs(10);
/// Time after which an older incarnation is believed: a clock was set back.
const BELIEVE: Duration = Duration::from_secs(5);
/// Time for which one that the API server's record has deposed, and that reaches no other, takes nothing
/// over: the first one, and the longest.
const HOLD: Duration = Duration::from_secs(3);
const MAX_HOLD: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// It is not known yet whether another one has the tunnel.
    #[default]
    Undecided,
    Standby,
    Active,
    /// It had the tunnel, and ends.
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

/// State of the tunnel, for whoever has it next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tunnel {
    pub connected: bool,
    /// The peer's last authentic endpoint.
    pub peer: Option<SocketAddr>,
    /// UDP port of the replica at which its successor reaches the peer through it.
    pub relay: Option<u16>,
    /// Timestamp of the last initiation.
    pub stamp: Tai64n,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time at which the sender was started, in nanoseconds since 1970, and number of the heartbeat.
    pub incarnation: u64,
    pub sequence: u64,
    pub role: Role,
    /// The greatest that the sender knows of; its own, if it has the tunnel.
    pub epoch: u64,
    /// It has all that a tunnel needs.
    pub ready: bool,
    /// Of one that leaves: the incarnation that is to have the tunnel.
    pub successor: Option<u64>,
    pub tunnel: Tunnel,
}

/// Replica that had the tunnel before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Predecessor {
    pub address: IpAddr,
    pub tunnel: Tunnel,
    /// It still carries packets, until this one is connected.
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

#[derive(Debug, Default)]
struct Other {
    last: Option<(Heartbeat, Instant)>,
    refusals: u8,
    /// The longest time between two heartbeats, less a percent with each since.
    gap: Duration,
    /// It is in the config, and since when.
    is_listed: bool,
    listed_at: Option<Instant>,
}

impl Other {
    /// Its kernel reports that nobody listens. Others can forge that while it is alive.
    fn is_gone(&self, now: Instant) -> bool {
        let beats =
            |(_, at): &(Heartbeat, Instant)| now.saturating_duration_since(*at) < INTERVAL * 2;
        self.refusals >= REFUSALS && !self.last.as_ref().is_some_and(beats)
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
    successor: Option<u64>,
    others: BTreeMap<IpAddr, Other>,
    predecessor: Option<Predecessor>,
    /// Of the last decision; later ones are due then.
    decided_at: Instant,
    begun: Instant,
    beat_at: Instant,
    /// Since when no replica is known to have the tunnel.
    vacant: Option<Instant>,
    held_by: Option<(IpAddr, Instant)>,
    hold: Duration,
    /// A config was read.
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
            successor: None,
            others: BTreeMap::new(),
            predecessor: None,
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

    /// Sets whether this replica has all that a tunnel needs.
    pub fn set_ready(&mut self, ready: bool) {
        self.is_ready = ready;
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

    /// Takes note of the replica that has the tunnel by the API server's record. Of two with one epoch the one
    /// with the lower address keeps it, so that both decide alike.
    pub fn handle_published(&mut self, of: ActiveReplica, own: Option<IpAddr>, now: Instant) {
        let ActiveReplica { address, epoch } = of;
        let is_own = own == Some(address);
        let has_precedence = epoch > self.epoch || epoch == self.epoch && Some(address) < own;
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

    /// Takes note of another replica's heartbeat.
    pub fn handle(&mut self, from: IpAddr, heartbeat: Heartbeat, now: Instant) {
        if heartbeat.incarnation == self.incarnation {
            return;
        }
        let other = self.others.entry(from).or_default();
        let order = |of: &Heartbeat| (of.incarnation, of.sequence);
        let is_old = other.last.as_ref().is_some_and(|(last, at)| {
            order(&heartbeat) <= order(last) && now.saturating_duration_since(*at) < BELIEVE
        });
        if is_old {
            return;
        }
        let gap = other.last.map(|(_, at)| now.saturating_duration_since(at)).unwrap_or_default();
        other.gap = gap.min(MAX_TIMEOUT).max(other.gap * 99 / 100);
        other.last = Some((heartbeat, now));
        other.refusals = 0;
        if self.role != Role::Active && self.role != Role::Leaving {
            self.epoch = self.epoch.max(heartbeat.epoch);
        }
    }

    /// Takes note of a heartbeat that was refused: nobody listens there.
    pub fn handle_refusal(&mut self, from: IpAddr) {
        if let Some(other) = self.others.get_mut(&from) {
            other.refusals = other.refusals.saturating_add(1);
        }
    }

    /// Gives the tunnel up, if another replica can have it.
    pub fn leave(&mut self, now: Instant) {
        let ready = self.living(now).filter(|(of, _)| of.role != Role::Leaving && of.ready);
        // In a rollout the newest ones stay.
        let successor = ready.map(|(of, _)| of.incarnation).max();
        if self.role == Role::Active && successor.is_some() {
            (self.role, self.successor, self.beat_at) = (Role::Leaving, successor, now);
        }
    }

    /// Another replica can have the tunnel, or has it.
    pub fn has_successor(&self, now: Instant) -> bool {
        self.living(now).any(|(of, _)| of.role != Role::Leaving && of.ready)
    }

    /// Others in the config that have sent nothing for long.
    pub fn unheard(&self, now: Instant) -> Vec<IpAddr> {
        let is_silent = |other: &Other| {
            let since = other.last.map_or(other.listed_at, |(_, at)| Some(at));
            other.is_listed
                && since.is_some_and(|since| now.saturating_duration_since(since) > FORGET)
        };
        let silent = self.others.iter().filter(|(_, other)| is_silent(other));
        silent.map(|(address, _)| *address).collect()
    }

    /// True if another one is connected in place of this one, which leaves.
    pub fn is_relieved(&self) -> bool {
        let mut others = self.others.values().filter_map(|other| other.last.as_ref());
        self.role == Role::Leaving
            && others.any(|(last, _)| {
                last.role == Role::Active && last.epoch > self.epoch && last.tunnel.connected
            })
    }

    /// Goes by what is known.
    pub fn decide(&mut self, now: Instant) {
        if !self.is_begun {
            return;
        }
        self.allow_for_pause(now);
        let unlisted = |other: &Other| {
            other.last.is_none_or(|(_, at)| now.saturating_duration_since(at) > FORGET)
        };
        self.others.retain(|_, other| other.is_listed || !unlisted(other));
        self.held_by =
            self.held_by.filter(|(by, until)| *until > now && self.others.contains_key(by));
        let before = self.role;
        let active = self.active(now);
        self.vacant = match active {
            Some(_) => None,
            None => self.vacant.or(Some(now)),
        };
        match self.role {
            Role::Active
                if active.is_some_and(|of| rank(&of) > (self.epoch, Reverse(self.incarnation))) =>
            {
                self.role = Role::Standby;
            }
            Role::Active | Role::Leaving => {}
            Role::Undecided | Role::Standby if active.is_some() => {
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
        let has_known = matches!(role, Role::Active | Role::Leaving);
        let tunnel = if has_known { tunnel } else { Tunnel::default() };
        Heartbeat { incarnation, sequence, role, epoch, ready, successor, tunnel }
    }

    /// While this replica stood still it received nothing: that is no silence of the others.
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
        let is_own_turn = self.vacant.is_some_and(|since| now >= since + STAGGER * turns);
        (all_gone || is_known) && is_own_turn
    }

    fn take_over(&mut self, now: Instant) {
        let lasts =
            self.others.iter().filter_map(|(at, other)| Some((*at, other.last.as_ref()?.0)));
        let had = lasts.filter(|(_, of)| matches!(of.role, Role::Active | Role::Leaving));
        self.predecessor = had.max_by_key(|(_, of)| of.epoch).map(|(address, of)| {
            let mut living = self.living(now);
            let is_alive = of.role == Role::Leaving && living.any(|(living, _)| *living == of);
            Predecessor { address, tunnel: of.tunnel, is_alive }
        });
        let seen =
            self.others.values().filter_map(|other| other.last.map(|(of, _)| of.epoch)).max();
        self.epoch = self.epoch.max(seen.unwrap_or_default()) + 1;
        self.role = Role::Active;
        self.vacant = None;
    }

    /// Others that beat.
    fn living(&self, now: Instant) -> impl Iterator<Item = (&Heartbeat, Instant)> {
        self.others.values().filter_map(move |other| {
            let (last, at) = other.last.as_ref()?;
            let timeout = (other.gap * 3).clamp(TIMEOUT, MAX_TIMEOUT);
            let beats = now.saturating_duration_since(*at) <= timeout && !other.is_gone(now);
            beats.then_some((last, *at))
        })
    }

    /// Another one that has the tunnel; of several, the one that keeps it.
    fn active(&self, now: Instant) -> Option<Heartbeat> {
        let all = self.living(now).map(|(of, _)| *of);
        all.filter(|of| of.role == Role::Active).max_by_key(rank)
    }
}

/// Of two that have the tunnel the greater one keeps it.
fn rank(of: &Heartbeat) -> (u64, Reverse<u64>) {
    (of.epoch, Reverse(of.incarnation))
}

#[cfg(test)]
mod tests;
