//! Schedule of the probes of gateways, and those that do not answer. Knows no socket and no clock.
//!
//! ```text
//!   Answering --no reply--> burst of probes --none answered--> Unreachable
//!       ^------------------------ any reply ----------------------+
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::full_size::FullSize;
use super::losses::{Loss, Losses};
use super::outages::Outages;

/// Time between two turns of the gateways of one node.
const INTERVAL: Duration = Duration::from_secs(1);
/// Times between two turns of a gateway, in percent of an interval, where it is the only one of its node: outages of a
/// steady rhythm may escape turns of another one.
const STEPS: [u32; 10] = [100, 100, 100, 70, 80, 110, 110, 110, 110, 110];
/// Most turns that a gateway waits for its next probe.
const MAX_TURNS: u32 = 10;
/// Small probes of a turn, sent at once: with 40 % of packets lost, 19 of 20 turns lack an answer, where with one
/// probe two of five would.
pub(super) const TRAIN: usize = 6;
/// Time until a probe counts as unanswered, and between the probes of a burst.
const TIMEOUT: Duration = Duration::from_millis(100);
const BURST_INTERVAL: Duration = Duration::from_millis(200);
/// Unanswered probes in a row, the first included, that make a gateway unreachable.
const MAX_UNANSWERED: u32 = 7;
/// The same that let others of its node be probed at once.
const SUSPECT: u32 = 3;
/// Time for which an unreachable gateway is probed often, so that its return is noticed at once.
const SEARCH: Duration = Duration::from_secs(30);
const SEARCH_INTERVAL: Duration = Duration::from_millis(300);
/// Time between two probes of a lost gateway afterwards: what is sent to its peer is refused.
const RETRY: Duration = Duration::from_secs(2);

/// A gateway that answers probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The other cluster of its peering.
    pub(crate) peer: String,
    /// Address at which it answers, within the overlay.
    pub(crate) address: SocketAddr,
    pub(crate) mac: Option<String>,
    /// Destination of VXLAN to it.
    pub(crate) underlay: IpAddr,
    /// Name of the node that it runs on.
    pub(crate) host: Option<String>,
    /// Largest packet for the peer, in bytes.
    pub(crate) mtu: u32,
}

impl Target {
    /// Other end of its VXLAN, which several gateways may have.
    fn way(&self) -> (Option<&str>, IpAddr) {
        (self.host.as_deref(), self.underlay)
    }
}

/// A probe to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) to: SocketAddr,
    pub(super) nonce: u64,
    /// Time until the next one.
    pub(super) next: Duration,
    /// The gateway is unreachable.
    pub(super) unanswered: bool,
    /// Size of the packet, in bytes, if it is to be more than needed.
    pub(super) size: Option<u32>,
}

/// All gateways that are probed, by overlay address.
#[derive(Debug, Default)]
pub(super) struct Prober {
    gateways: BTreeMap<IpAddr, Gateway>,
    nonce: u64,
    /// Part of an interval by which the first turn comes earlier.
    ahead: Duration,
}

#[derive(Debug)]
struct Gateway {
    target: Target,
    /// Gateways of its node, each of which has its turn.
    turns: u32,
    /// Time of its next turn, and number of those before.
    turn_at: Instant,
    turn: usize,
    next_at: Instant,
    pending: Option<Pending>,
    losses: Losses,
    outages: Outages,
    full_size: FullSize,
    /// Its replies are as large as the probes.
    answers_in_size: bool,
    /// It has answered since this agent follows it.
    has_answered: bool,
    /// Time since which it is cut off, by its replies.
    cut_off: Option<Instant>,
}

/// Probes since the last reply.
#[derive(Clone, Copy, Debug)]
struct Pending {
    first: Instant,
    nonce: u64,
    count: u32,
}

impl Prober {
    /// `seed` is any random number: nonces differ from those of the agent before, and turns come at another time than
    /// those of other nodes, which all begin with one version of the config.
    pub(super) fn new(seed: u64) -> Self {
        let ahead = INTERVAL.mul_f64((seed % 1000) as f64 / 1000.0);
        Self { gateways: BTreeMap::new(), nonce: seed, ahead }
    }

    /// Probes these gateways from now on. What is known of those that stay is kept.
    pub(super) fn follow(&mut self, targets: &[Target], now: Instant) {
        let mut hosts: BTreeMap<Option<&str>, u32> = BTreeMap::new();
        let mut before = std::mem::take(&mut self.gateways);
        for target in targets {
            let turn = hosts.entry(target.host.as_deref()).or_default();
            *turn += 1;
            let mut gateway = match before.remove(&target.address.ip()) {
                Some(gateway) if gateway.target.address == target.address => gateway,
                Some(_) | None => Gateway::new(target, now),
            };
            // Gateways of one node have their turns one after another.
            gateway.turn_at = now + INTERVAL * ((*turn - 1) % MAX_TURNS + 1) - self.ahead;
            if gateway.target.way() != target.way() {
                gateway.next_at = now;
                gateway.losses.forget();
                gateway.outages = Outages::default();
            }
            gateway.target = target.clone();
            self.gateways.insert(target.address.ip(), gateway);
        }
        for gateway in self.gateways.values_mut() {
            let count = hosts.get(&gateway.target.host.as_deref()).copied().unwrap_or(1);
            gateway.turns = count.clamp(1, MAX_TURNS);
        }
    }

    /// Returns the probes that are due.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<Probe> {
        let mut probes = Vec::new();
        let mut suspects = Vec::new();
        let measured = self.measured_by_others();
        for (ip, gateway) in &mut self.gateways {
            if measured.contains(ip) {
                gateway.losses.forget();
            }
            let was_faulty = gateway.is_faulty();
            let is_burst_due = gateway.losses.poll(now);
            gateway.outages.poll(gateway.losses.answer_time(), now);
            if gateway.is_unreachable() {
                gateway.full_size = FullSize::default();
            }
            let is_full_due = gateway.full_size.poll(gateway.pending.is_none(), now);
            let is_due = gateway.next_at <= now;
            let is_turn = is_due && gateway.turn_at <= now && gateway.pending.is_none();
            if is_turn {
                gateway.losses.begin_turn();
            }
            if is_due {
                gateway.begin_wait(self.nonce + 1, now);
            }
            let count = if is_turn { TRAIN } else { usize::from(is_due || is_burst_due) };
            probes.extend((0..count).map(|_| gateway.probe(&mut self.nonce, now)));
            if is_full_due || is_turn && gateway.answers_in_size {
                probes.push(gateway.full_probe(&mut self.nonce, now));
            }
            let is_newly_faulty = !was_faulty && gateway.is_faulty();
            if is_newly_faulty
                || is_due && gateway.pending.is_some_and(|pending| pending.count == SUSPECT)
            {
                suspects.push(gateway.target.host.clone());
            }
        }
        // The cause that cuts one gateway off most often cuts off all of its node.
        for gateway in self.gateways.values_mut() {
            if gateway.pending.is_none() && suspects.contains(&gateway.target.host) {
                gateway.next_at = now;
            }
        }
        probes
    }

    /// Gateways at the end of a way whose loss another one measures.
    fn measured_by_others(&self) -> BTreeSet<IpAddr> {
        let mut measuring = BTreeMap::new();
        for (ip, gateway) in self.gateways.iter().filter(|(_, of)| !of.is_unreachable()) {
            if let Some(since) = gateway.losses.measured_since() {
                let first = measuring.entry(gateway.target.way()).or_insert((since, *ip));
                *first = (*first).min((since, *ip));
            }
        }
        let by_others = self.gateways.iter().filter(|(ip, gateway)| {
            measuring.get(&gateway.target.way()).is_some_and(|(_, by)| by != *ip)
        });
        by_others.map(|(ip, _)| *ip).collect()
    }

    /// Deadline of the next [`Self::poll`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        let of = |gateway: &Gateway| {
            let Gateway { losses, outages, full_size, .. } = gateway;
            let others = [losses.deadline(), outages.deadline(), full_size.deadline()];
            others.into_iter().flatten().fold(gateway.next_at, Instant::min)
        };
        self.gateways.values().map(of).min()
    }

    /// Takes in whether a reply has full size; `None` of a gateway whose replies do not have the size of the probe.
    pub(super) fn handle_size(&mut self, from: SocketAddr, nonce: u64, is_full: Option<bool>) {
        let gateway = self.gateways.get_mut(&from.ip());
        let Some(gateway) = gateway.filter(|gateway| gateway.target.address == from) else {
            return;
        };
        gateway.answers_in_size = is_full.is_some();
        match is_full {
            None => gateway.full_size = FullSize::default(),
            Some(true) => gateway.full_size.handle_reply(nonce),
            Some(false) => {}
        }
    }

    /// Returns whether it is the reply to a probe that still counts.
    pub(super) fn handle_reply(&mut self, from: SocketAddr, nonce: u64, now: Instant) -> bool {
        let gateway = self.gateways.get_mut(&from.ip());
        let Some(gateway) = gateway.filter(|gateway| gateway.target.address == from) else {
            return false;
        };
        gateway.losses.handle_reply(nonce, now);
        gateway.outages.handle_reply(nonce, now);
        let Some(pending) = gateway.pending else { return false };
        if !(pending.nonce..=self.nonce).contains(&nonce) {
            return false;
        }
        // One that was unreachable is notified at once that its replies arrive.
        gateway.next_at = if gateway.is_unreachable() { now } else { gateway.turn_at.max(now) };
        gateway.pending = None;
        gateway.has_answered = true;
        true
    }

    /// Takes note of whether a gateway can report, by its reply.
    pub(super) fn handle_cut_off(&mut self, from: SocketAddr, cut_off: bool, now: Instant) {
        let gateway = self.gateways.get_mut(&from.ip());
        if let Some(gateway) = gateway.filter(|gateway| gateway.target.address == from) {
            gateway.cut_off = cut_off.then(|| gateway.cut_off.unwrap_or(now));
        }
    }

    /// The gateway that answers probes at this address.
    pub(super) fn target(&self, address: SocketAddr) -> Option<&Target> {
        let target = &self.gateways.get(&address.ip())?.target;
        (target.address == address).then_some(target)
    }

    /// Makes all gateways' next probes due.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.gateways.values_mut().for_each(|gateway| gateway.next_at = now);
    }

    /// The last probe of an agent that ends, for each gateway.
    pub(super) fn end_notice(&mut self) -> Vec<Probe> {
        let mut end_notice = Vec::new();
        for gateway in self.gateways.values() {
            self.nonce += 1;
            let (to, nonce) = (gateway.target.address, self.nonce);
            let next = Duration::ZERO;
            end_notice.push(Probe { to, nonce, next, unanswered: false, size: None });
        }
        end_notice
    }

    /// Unreachable gateways, and when the first probe that stayed unanswered was sent.
    pub(super) fn unreachable(&self) -> impl Iterator<Item = (&Target, Instant)> {
        let gone = self.gateways.values().filter(|gateway| gateway.is_unreachable());
        gone.filter_map(|gateway| Some((&gateway.target, gateway.pending?.first)))
    }

    /// Gateways that answer some of the probes, and others at the end of the same way: what is lost there does not
    /// depend on the gateway.
    pub(super) fn lossy(&self) -> impl Iterator<Item = (&Target, Loss)> {
        let mut ways = BTreeMap::new();
        for gateway in self.gateways.values().filter(|gateway| !gateway.is_unreachable()) {
            if let Some(loss) = gateway.loss() {
                let first = ways.entry(gateway.target.way()).or_insert(loss);
                if loss.since < first.since {
                    *first = loss;
                }
            }
        }
        let answering = self.gateways.values().filter(|gateway| !gateway.is_unreachable());
        answering.filter_map(move |gateway| {
            let loss = ways.get(&gateway.target.way())?;
            Some((&gateway.target, *loss))
        })
    }

    /// Gateways that answer none but smaller probes.
    pub(super) fn cramped(&self) -> impl Iterator<Item = (&Target, Instant)> {
        let answering = self.gateways.values().filter(|gateway| !gateway.is_unreachable());
        answering.filter_map(|gateway| Some((&gateway.target, gateway.full_size.lost_since()?)))
    }

    /// Gateways that answer, but cannot report.
    pub(super) fn cut_off(&self) -> impl Iterator<Item = (&Target, Instant)> {
        let answering = self.gateways.values().filter(|gateway| !gateway.is_unreachable());
        answering.filter_map(|gateway| Some((&gateway.target, gateway.cut_off?)))
    }

    /// Those of the unreachable ones that have answered before. Of any other, only its probes may be dropped.
    pub(super) fn lost(&self) -> impl Iterator<Item = (&Target, Instant)> {
        let has_answered = |target: &Target| {
            self.gateways.get(&target.address.ip()).is_some_and(|gateway| gateway.has_answered)
        };
        self.unreachable().filter(move |(target, _)| has_answered(target))
    }
}

impl Gateway {
    fn new(target: &Target, now: Instant) -> Self {
        let target = target.clone();
        Self {
            target,
            turns: 1,
            turn_at: now,
            turn: 0,
            next_at: now,
            pending: None,
            losses: Losses::default(),
            outages: Outages::default(),
            full_size: FullSize::default(),
            answers_in_size: false,
            has_answered: false,
            cut_off: None,
        }
    }

    /// A whole burst was sent, and the time to answer the last of it has passed.
    fn is_unreachable(&self) -> bool {
        self.pending.is_some_and(|pending| pending.count > MAX_UNANSWERED)
    }

    fn loss(&self) -> Option<Loss> {
        self.losses.loss().or_else(|| self.outages.loss())
    }

    /// It answers some of the probes only.
    fn is_faulty(&self) -> bool {
        self.loss().is_some() || self.full_size.lost_since().is_some()
    }

    /// Waits for the answer to this probe, and those after it.
    fn begin_wait(&mut self, nonce: u64, now: Instant) {
        let before = self.pending.unwrap_or(Pending { first: now, nonce, count: 0 });
        let pending = Pending { count: before.count.saturating_add(1), ..before };
        let was_unreachable = self.is_unreachable();
        self.pending = Some(pending);
        if self.is_unreachable() && !was_unreachable {
            self.outages.handle_outage();
        }
        let period = INTERVAL * self.turns;
        if self.turn_at <= now {
            let step = INTERVAL * STEPS[self.turn % STEPS.len()] / 100;
            let often = if self.outages.is_alert(now) { 2 } else { 1 };
            let next = self.turn_at + (period - INTERVAL + step) / often;
            self.turn_at = next.max(now + INTERVAL / 2);
            self.turn += 1;
        }
        let wait = match pending.count {
            1 => TIMEOUT,
            2..=MAX_UNANSWERED => BURST_INTERVAL,
            _ if now - pending.first < SEARCH => SEARCH_INTERVAL,
            _ if self.has_answered => period.min(RETRY),
            _ => period,
        };
        self.next_at = now + wait;
    }

    fn probe(&mut self, last: &mut u64, now: Instant) -> Probe {
        *last += 1;
        self.losses.handle_sent(*last, now);
        self.outages.handle_sent(*last, now);
        self.numbered(*last, None, now)
    }

    fn full_probe(&mut self, last: &mut u64, now: Instant) -> Probe {
        *last += 1;
        self.full_size.handle_sent(*last, now);
        self.numbered(*last, Some(self.target.mtu), now)
    }

    fn numbered(&self, nonce: u64, size: Option<u32>, now: Instant) -> Probe {
        let next = self.turn_at.max(self.next_at) - now;
        let unanswered = self.is_unreachable();
        Probe { to: self.target.address, nonce, next, unanswered, size }
    }
}

#[cfg(test)]
mod tests;
