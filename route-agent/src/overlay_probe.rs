//! Probes of gateways through the overlay, by the same device, routes and translation as any
//! packet of this node takes to a peer.

mod full_size;
mod losses;
mod outages;
mod prober;
mod sockets;

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_api::fabric::{
    ActiveReplica, CrampedGateway, CutOffGateway, LossyGateway, NodeConfigSpec, OverlayProbe,
    UnreachableGateway,
};
use fabric_api::overlay_v6;
use fabric_runtime::until;
use jiff::Timestamp;
use netplan::Address;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use losses::Loss;
use prober::{Probe, Prober, Target};
use sockets::Sockets;

use crate::config_source::ConfigSource;

/// Bytes of IP and UDP headers.
const HEADERS_V4: usize = 28;
const HEADERS_V6: usize = 48;
/// Longest time for the last probes.
const END: Duration = Duration::from_secs(1);
/// Time that an agent that ends may be away before gateways report it.
const AWAY: Duration = Duration::from_secs(60);
/// Longest time from the end of an outage that this node had a part in until gateways have reported.
const OUTAGE_END: Duration = Duration::from_secs(12);
/// Time without a reply after which a gateway is lost. A gateway that restarts is back before.
const LOST: Duration = Duration::from_secs(3);

/// Replicas that have taken a gateway's tunnel over, as they notify this node, by the gateway's MAC address.
pub(crate) type TakeOvers = BTreeMap<String, ActiveReplica>;

/// Gateways with a fault of the path to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FaultyPaths {
    pub(crate) unreachable: Vec<UnreachableGateway>,
    pub(crate) lossy: Vec<LossyGateway>,
    pub(crate) cramped: Vec<CrampedGateway>,
    pub(crate) cut_off: Vec<CutOffGateway>,
}

/// Probes of this node's gateways, until it is dropped.
pub(crate) struct OverlayProbes {
    targets: watch::Sender<Option<Vec<Target>>>,
    faulty: watch::Receiver<FaultyPaths>,
    lost: watch::Receiver<BTreeSet<String>>,
    notices: watch::Sender<TakeOvers>,
    take_overs: watch::Receiver<TakeOvers>,
    task: JoinHandle<()>,
}

impl OverlayProbes {
    /// Gateways are notified while `config` is lost.
    pub(crate) fn start(node: String, config: ConfigSource) -> Self {
        let (targets, wanted) = watch::channel(Some(Vec::new()));
        let (reports, faulty) = watch::channel(FaultyPaths::default());
        let (losses, lost) = watch::channel(BTreeSet::new());
        let (notices, take_overs) = watch::channel(TakeOvers::new());
        // Room for all that follow.
        let seed = RandomState::new().hash_one(&node) >> 1;
        let prober = Prober::new(seed);
        let sender = notices.clone();
        let task = Task { node, prober, reports, losses, notices, ..Task::default() };
        let task = tokio::spawn(task.run(wanted, config));
        Self { targets, faulty, lost, notices: sender, take_overs, task }
    }

    /// Probes the gateways of this config from now on, from a node with these addresses. Their routes have to be
    /// there: a probe would leave by another one.
    pub(crate) fn follow(&self, config: &NodeConfigSpec, own: &[Address]) {
        let family = family(config, own);
        self.set(family.map(|v4| targets(config, v4)).unwrap_or_default());
    }

    /// Probes none but those of this config from now on, before the routes of others go.
    pub(crate) fn retain(&self, config: &NodeConfigSpec) {
        let mut known = self.targets.borrow().clone().unwrap_or_default();
        let mut wanted = Vec::new();
        if !config.removed {
            wanted.extend([true, false].into_iter().flat_map(|v4| targets(config, v4)));
        }
        known.retain(|target| wanted.contains(target));
        self.set(known);
    }

    fn set(&self, wanted: Vec<Target>) {
        let wanted = Some(wanted);
        self.targets.send_if_modified(|before| {
            let changed = *before != wanted;
            *before = wanted;
            changed
        });
    }

    /// Returns when [`Self::faulty`], [`Self::lost`] or [`Self::take_overs`] is another.
    pub(crate) async fn changed(&mut self) {
        let changed = tokio::select! {
            changed = self.faulty.changed() => changed,
            changed = self.lost.changed() => changed,
            changed = self.take_overs.changed() => changed,
        };
        if changed.is_err() {
            pending().await
        }
    }

    /// The last take-over of each gateway that this node was notified of.
    pub(crate) fn take_overs(&self) -> TakeOvers {
        self.take_overs.borrow().clone()
    }

    /// Takes the next notice of this gateway, whatever its epoch.
    pub(crate) fn forget_take_overs(&self, mac: &str) {
        self.notices.send_if_modified(|take_overs| take_overs.remove(mac).is_some());
    }

    /// Peers whose gateways have not answered for [`LOST`].
    pub(crate) fn lost(&self) -> BTreeSet<String> {
        self.lost.borrow().clone()
    }

    pub(crate) fn faulty(&self) -> FaultyPaths {
        self.faulty.borrow().clone()
    }

    /// Announces to all gateways that an agent will be away for a while.
    pub(crate) async fn end(self) {
        self.targets.send_replace(None);
        _ = timeout(END, self.task).await;
    }
}

/// Family of the probes, true for IPv4. A packet of the node itself has the node's external address at gateways, and
/// needs an address of the same family to leave: one that other nodes reach it at, or else of whatever device.
fn family(config: &NodeConfigSpec, own: &[Address]) -> Option<bool> {
    let has_external = |v4: &bool| config.external.iter().any(|of| of.is_ipv4() == *v4);
    let is_source = |address: &&IpAddr| match address {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let sources = own.iter().map(|of| &of.address).filter(is_source);
    let others = sources.map(IpAddr::is_ipv4).collect::<BTreeSet<_>>();
    let of_underlay = config.underlay.iter().map(IpAddr::is_ipv4);
    of_underlay.chain(others.into_iter().rev()).find(has_external)
}

/// The gateways that answer probes, at their addresses of one family.
fn targets(config: &NodeConfigSpec, v4: bool) -> Vec<Target> {
    if config.overlay.is_none() {
        return Vec::new();
    }
    let target = |peering: &fabric_api::fabric::NodePeering| {
        let gateway = peering.gateway.as_ref()?;
        let probe = gateway.probe.as_ref()?;
        let overlay = gateway.overlay;
        let ip = if v4 { IpAddr::V4(overlay) } else { IpAddr::V6(overlay_v6(overlay)) };
        let address = SocketAddr::new(ip, probe.port);
        let peer = peering.peer_cluster_id.clone();
        let (mac, underlay) = (gateway.mac.clone(), gateway.underlay);
        let (host, mtu) = (probe.node.clone(), peering.mtu);
        Some(Target { peer, address, mac, underlay, host, mtu })
    };
    config.peerings.iter().filter_map(target).collect()
}

#[derive(Default)]
struct Task {
    node: String,
    prober: Prober,
    reports: watch::Sender<FaultyPaths>,
    losses: watch::Sender<BTreeSet<String>>,
    notices: watch::Sender<TakeOvers>,
    sockets: Sockets,
    cut_off: bool,
    /// Time from which on gateways that cannot report are a fault of their own.
    believes_at: Option<Instant>,
    /// Room for a datagram.
    buffer: Vec<u8>,
}

impl Task {
    async fn run(
        mut self,
        mut wanted: watch::Receiver<Option<Vec<Target>>>,
        mut config: ConfigSource,
    ) {
        loop {
            let due = self.prober.deadline();
            tokio::select! {
                biased;
                changed = wanted.changed() => {
                    let targets = wanted.borrow_and_update().clone();
                    let (Ok(()), Some(targets)) = (changed, targets) else { break };
                    self.prober.follow(&targets, Instant::now());
                }
                () = config.changed() => {
                    let was_cut_off = std::mem::replace(&mut self.cut_off, config.is_lost());
                    if was_cut_off && !self.cut_off {
                        self.believes_at = Some(Instant::now() + OUTAGE_END);
                    }
                    self.prober.hurry(Instant::now());
                }
                () = self.sockets.readable() => self.receive(),
                () = until(due) => {
                    let probes = self.prober.poll(Instant::now());
                    self.send(probes);
                }
            }
            self.report();
            self.report_lost();
        }
        let end_notice = self.prober.end_notice();
        let end_notice =
            end_notice.into_iter().map(|probe| Probe { next: AWAY, ..probe }).collect();
        self.send(end_notice);
    }

    fn receive(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(OverlayProbe::MAX_DATAGRAM, 0);
        for socket in self.sockets.all() {
            // An error is one of an earlier probe: that stays unanswered.
            while let Ok((length, from)) = socket.try_recv_from(&mut buffer) {
                let message = OverlayProbe::parse(&buffer[..length]);
                let Some(message) = message.filter(|message| message.node == self.node) else {
                    continue;
                };
                if let Some(active) = message.active {
                    self.handle_take_over(from, active);
                } else if message.reply {
                    let full = self.prober.target(from).map(|target| payload(from, target.mtu));
                    let is_full = full.is_some_and(|full| length >= full);
                    self.prober.handle_size(
                        from,
                        message.nonce,
                        message.in_size.then_some(is_full),
                    );
                    let now = Instant::now();
                    if self.prober.handle_reply(from, message.nonce, now) {
                        // Cut off with this node, it needs a moment more.
                        let believes = !self.cut_off && self.believes_at.is_none_or(|at| now >= at);
                        self.prober.handle_cut_off(from, message.cut_off && believes, now);
                    }
                }
            }
        }
        self.buffer = buffer;
    }

    fn handle_take_over(&self, from: SocketAddr, active: ActiveReplica) {
        let Some(mac) = self.prober.target(from).and_then(|target| target.mac.clone()) else {
            return;
        };
        self.notices.send_if_modified(|take_overs| {
            let is_later = take_overs.get(&mac).is_none_or(|of| of.epoch < active.epoch);
            if is_later {
                take_overs.insert(mac, active);
            }
            is_later
        });
    }

    fn send(&mut self, probes: Vec<Probe>) {
        for Probe { to, nonce, next, unanswered, size } in probes {
            let next_ms = u32::try_from(next.as_millis()).unwrap_or(u32::MAX);
            let (node, cut_off) = (self.node.clone(), self.cut_off);
            let probe =
                OverlayProbe { node, nonce, next_ms, unanswered, cut_off, ..Default::default() };
            let datagram = probe.encode_in(size.map(|size| payload(to, size)).unwrap_or_default());
            let sent = self.sockets.open(to, unanswered).and_then(|s| s.try_send_to(&datagram, to));
            if let Err(error) = sent {
                tracing::debug!(%error, %to, "cannot send a probe");
            }
        }
    }

    fn report_lost(&self) {
        let now = Instant::now();
        let lost = self.prober.lost().filter(|(_, since)| now - *since >= LOST);
        let lost: BTreeSet<String> = lost.map(|(target, _)| target.peer.clone()).collect();
        self.losses.send_if_modified(|before| {
            let changed = *before != lost;
            *before = lost;
            changed
        });
    }

    fn report(&self) {
        let now = (Instant::now(), Timestamp::now());
        let wall = |at: Instant| format!("{:.3}", now.1 - (now.0 - at));
        let before = self.reports.borrow().clone();
        let unreachable = |(target, since): (&Target, Instant)| {
            let mut known = before.unreachable.iter();
            let known = known.find(|known| known.peer_cluster_id == target.peer);
            known.cloned().unwrap_or_else(|| UnreachableGateway {
                peer_cluster_id: target.peer.clone(),
                since: wall(since),
            })
        };
        let lossy = |(target, loss): (&Target, Loss)| {
            let known = before.lossy.iter().find(|known| known.peer_cluster_id == target.peer);
            let since = known.map_or_else(|| wall(loss.since), |known| known.since.clone());
            let (peer_cluster_id, lost_percent) = (target.peer.clone(), loss.percent);
            LossyGateway { peer_cluster_id, lost_percent, since }
        };
        let cramped = |(target, since): (&Target, Instant)| {
            let known = before.cramped.iter().find(|known| known.peer_cluster_id == target.peer);
            let since = known.map_or_else(|| wall(since), |known| known.since.clone());
            CrampedGateway { peer_cluster_id: target.peer.clone(), bytes: target.mtu, since }
        };
        let cut_off = |(target, since): (&Target, Instant)| {
            let known = before.cut_off.iter().find(|known| known.peer_cluster_id == target.peer);
            let since = known.map_or_else(|| wall(since), |known| known.since.clone());
            CutOffGateway { peer_cluster_id: target.peer.clone(), since }
        };
        let faulty = FaultyPaths {
            unreachable: self.prober.unreachable().map(unreachable).collect(),
            lossy: self.prober.lossy().map(lossy).collect(),
            cramped: self.prober.cramped().map(cramped).collect(),
            cut_off: self.prober.cut_off().map(cut_off).collect(),
        };
        if faulty != before {
            log_changes(&before, &faulty);
            self.reports.send_replace(faulty);
        }
    }
}

/// Length of the UDP datagram in a packet of so many bytes, as far as probes go.
fn payload(to: SocketAddr, packet: u32) -> usize {
    let headers = if to.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
    let length = usize::try_from(packet).unwrap_or_default().saturating_sub(headers);
    length.min(OverlayProbe::MAX_DATAGRAM)
}

fn log_changes(before: &FaultyPaths, now: &FaultyPaths) {
    let (before, now) = (faults(before), faults(now));
    for ((peer, fault), since) in now.iter().filter(|(fault, _)| !before.contains_key(*fault)) {
        tracing::warn!(peer, since, "the peer's gateway {fault} over VXLAN");
    }
    for (peer, fault) in before.keys().filter(|fault| !now.contains_key(*fault)) {
        tracing::info!(peer, "solved: the peer's gateway {fault} over VXLAN");
    }
}

/// Faults by peer and words, each with the time at which it began.
fn faults(paths: &FaultyPaths) -> BTreeMap<(&str, &'static str), &str> {
    let unreachable = paths.unreachable.iter();
    let unreachable = unreachable.map(|of| ((&*of.peer_cluster_id, "does not answer"), &*of.since));
    let lossy = paths.lossy.iter();
    let lossy = lossy.map(|of| ((&*of.peer_cluster_id, "does not answer all probes"), &*of.since));
    let cramped = paths.cramped.iter();
    let cramped = cramped.map(|of| ((&*of.peer_cluster_id, "answers no large probes"), &*of.since));
    let cut_off = paths.cut_off.iter();
    let cut_off =
        cut_off.map(|of| ((&*of.peer_cluster_id, "answers, but cannot report"), &*of.since));
    unreachable.chain(lossy).chain(cramped).chain(cut_off).collect()
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::{GatewayProbe, NodeGateway, NodePeering};

    use super::*;

    fn config(external: &[&str], probe: Option<GatewayProbe>) -> NodeConfigSpec {
        let gateway = NodeGateway {
            overlay: [10, 80, 0, 7].into(),
            mac: None,
            underlay: [192, 0, 2, 7].into(),
            links: Vec::new(),
            listen_port: None,
            probe,
            replicas: Vec::new(),
            epoch: None,
        };
        NodeConfigSpec {
            cluster_id: "rome".to_owned(),
            overlay: Some([10, 80, 0, 1].into()),
            mac: None,
            underlay: vec![[192, 0, 2, 1].into(), "2001:db8::1".parse().unwrap()],
            declared: Vec::new(),
            local_pods: Vec::new(),
            overlapping_pods: Vec::new(),
            outside_pods: Vec::new(),
            pod_cidrs: Vec::new(),
            external: external.iter().map(|ip| ip.parse().unwrap()).collect(),
            peerings: vec![NodePeering {
                peer_cluster_id: "milan".to_owned(),
                prefixes: Vec::new(),
                connected: true,
                mtu: 1340,
                gateway: Some(gateway),
            }],
            ips: Vec::new(),
            internal_cidr: None,
            vxlan_sources: Vec::new(),
            full_masquerade: false,
            from_records: false,
            removed: false,
            refused: Vec::new(),
            refuse_seconds: None,
        }
    }

    fn addresses(config: &NodeConfigSpec) -> Vec<String> {
        let all = family(config, &[]).map(|v4| targets(config, v4)).unwrap_or_default();
        all.iter().map(|target| target.address.to_string()).collect()
    }

    #[test]
    fn only_gateways_that_answer_are_probed() {
        let probe = GatewayProbe { port: 12346, node: Some("n1".to_owned()) };
        assert_eq!(addresses(&config(&["10.70.0.5"], None)), [""; 0], "an older gateway");
        assert_eq!(addresses(&config(&["10.70.0.5"], Some(probe))), ["10.80.0.7:12346"]);
    }

    #[test]
    fn probes_have_the_family_of_the_external_address() {
        let probe = Some(GatewayProbe { port: 12346, node: None });
        let v6 = config(&["fd00:70::5"], probe.clone());
        assert_eq!(addresses(&v6), ["[fd77:6566:7400::a50:7]:12346"]);
        let both = config(&["fd00:70::5", "10.70.0.5"], probe.clone());
        assert_eq!(addresses(&both), ["10.80.0.7:12346"]);
        assert_eq!(addresses(&config(&[], probe)), [""; 0], "replies would find no way back");
    }

    #[test]
    fn probes_leave_by_addresses_of_any_device() {
        let mut config = config(&["10.70.0.5"], None);
        config.underlay = vec!["2001:db8::1".parse().unwrap()];
        let address = |address: &str| Address {
            dev: "cni0".to_owned(),
            address: address.parse().unwrap(),
            len: 24,
        };
        assert_eq!(family(&config, &[address("fd00::1"), address("127.0.0.1")]), None);
        assert_eq!(
            family(&config, &[address("169.254.7.1")]),
            None,
            "it leaves by one device only"
        );
        let pods = [address("10.200.1.1")];
        assert_eq!(family(&config, &pods), Some(true));
        config.external.push("fd00:70::5".parse().unwrap());
        assert_eq!(family(&config, &pods), Some(false), "others reach the node by IPv6");
    }
}
