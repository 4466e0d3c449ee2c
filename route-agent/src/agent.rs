use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use fabric_api::fabric::{
    ActiveReplica, Diversion, FabricRecord, ForwardingOff, MovedAddress, NodeConfig,
    NodeConfigSpec, NodeConfigStatus, RecordVersion, Records,
};
use fabric_api::{Cidr, overlay_v6};
use fabric_runtime::{Heartbeat, Stop, chain, until};
use fabric_store::{Event, Kind, Object, ObjectRef, Store};
use foreign::foreign_routes;
use foreign::other_firewalls::{Mode, OtherFirewalls, Treatment};
use jiff::Timestamp;
use netlink::{ChurnLimiter, Handle, Settings, nft};
use netplan::{COUNTER, FIREWALL_TABLE, Firewall, REFUSAL_TABLE, Sysctl};
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, timeout};

use crate::apply::{Applied, apply, scope};
use crate::compile::{Compiled, compile};
use crate::config_source::{self, ConfigSource};
use crate::host_state::{self, HostState};
use crate::overlay_probe::{FaultyPaths, OverlayProbes, TakeOvers};
use crate::presence::Presence;
use crate::refusal::Refuser;
use crate::report::Reporter;
use crate::rivals::Rivals;
use crate::table::Table;
use crate::undone::Undone;
use crate::vitals::{DIVERTED, NO_PEERING, NOT_CONNECTED, Vitals};
use crate::{cleanup, liqo_leftovers, moved};

/// Interval between checks without a notification: changes of the old packet filter send none.
const LOOK: Duration = Duration::from_secs(30);
/// Interval between reads of settings: short enough that they heal within half a second.
const SETTINGS: Duration = Duration::from_millis(300);
/// Shortest time between two looks at who sends to refused prefixes.
const MIN_REFUSAL_LOOK: Duration = Duration::from_secs(1);
const LOST: &str = "the published directory is lost, and with it this node's NodeConfig: new \
                    connections to peers are refused until it is back";

pub(crate) struct Agent {
    pub(crate) handle: Handle,
    pub(crate) store: Store,
    pub(crate) node: String,
    /// Put accepts into chains of others that drop what they have no rule for.
    pub(crate) accept: bool,
    /// Liqo's network has left something on the node that is to be removed.
    pub(crate) remove_liqo: bool,
    /// Config of the node as it is published, in whole or only its own part.
    pub(crate) published: Option<NodeConfig>,
    pub(crate) records: Records<FabricRecord>,
    /// Version of the records that was read last, and if the config follows from them, that it is of.
    pub(crate) read: Option<RecordVersion>,
    /// Config in whole.
    pub(crate) config: Option<NodeConfig>,
    pub(crate) table: Table,
    pub(crate) other_firewalls: OtherFirewalls,
    /// Problems of the last reconcile, without those of other firewalls.
    pub(crate) own_problems: BTreeSet<String>,
    /// Declared addresses of the node that another has taken the place of.
    pub(crate) moved: Vec<MovedAddress>,
    pub(crate) homes: moved::Homes,
    /// Devices with the node's addresses, and whether they are up and have a carrier.
    pub(crate) carriers: BTreeMap<String, bool>,
    /// Settings that keep the node from forwarding, since when.
    pub(crate) forwarding_off: Vec<ForwardingOff>,
    /// Rules and routes of others that take packets between pods and peers, since when.
    pub(crate) diversions: Vec<Diversion>,
    /// Rules of other firewalls that let no packets between pods and peers pass, since when.
    pub(crate) filtered: Vec<Diversion>,
    /// All that the status has.
    pub(crate) problems: BTreeSet<String>,
    pub(crate) churn_limiter: ChurnLimiter,
    pub(crate) undone: Undone,
    pub(crate) rivals: Rivals,
    pub(crate) reporter: Reporter,
    pub(crate) vitals: Vitals,
    pub(crate) probes: OverlayProbes,
    pub(crate) take_overs: TakeOvers,
    pub(crate) refuser: Refuser,
    /// Directory that the config is published in, if it is one.
    pub(crate) source: ConfigSource,
    /// Time for which a node that leaves a cluster of Kubernetes refuses packets to peers: then
    /// its agent ends.
    pub(crate) linger: Duration,
    /// SIGUSR1 before the end: no other agent follows, so gateways are not asked to wait for one.
    pub(crate) taken_down: Signal,
    /// The config was there, and cannot be read now.
    pub(crate) lost: bool,
    /// Peers whose prefixes are refused as their gateways do not answer this node.
    pub(crate) lost_gateways: BTreeSet<String>,
    /// Time at which everything was removed, if the config demands it.
    pub(crate) withdrawn: Option<Instant>,
    pub(crate) presence: Presence,
}

impl Agent {
    /// Follows the config and the kernel until stopped.
    pub(crate) async fn run(mut self, mut stop: Stop) -> anyhow::Result<()> {
        let netns = self.handle.netns().clone();
        let own = ObjectRef::new(Kind::NodeConfig, "", &self.node);
        let mut events = config_source::follow(&self.store, own)?;
        let scope = scope(std::iter::empty());
        let mut changes = self.handle.events(&scope).context("cannot watch the kernel's tables")?;
        let mut filters = nft::Events::open(&netns, &[FIREWALL_TABLE, REFUSAL_TABLE])
            .context("cannot watch the packet filter")?;
        let mut settings = Settings::default();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut beats = tokio::time::interval(Heartbeat::INTERVAL);
        let mut looked = Instant::now();
        loop {
            self.vitals.heartbeat.beat();
            self.show_presence();
            let refusal_due = self.refusal_due(looked);
            let due = tokio::select! {
                () = stop.requested() => {
                    if timeout(Duration::ZERO, self.taken_down.recv()).await.is_err() {
                        self.probes.end().await;
                    }
                    return Ok(());
                }
                event = events.recv() => self.take(event.context("cannot watch the store")?),
                changed = changes.changed() => {
                    changed.context("cannot watch the kernel's tables")?;
                    true
                }
                changed = filters.changed() => {
                    changed.context("cannot watch the packet filter")?;
                    true
                }
                () = settings.changed() => true,
                () = self.probes.changed() => {
                    self.report();
                    self.check_take_overs() | self.check_gateways()
                }
                () = self.other_firewalls.changed() => {
                    filters.watched = self.other_firewalls.found().chains;
                    self.report();
                    false
                }
                () = until([self.undone.due(), self.rivals.due()].into_iter().flatten().min()) => {
                    self.report();
                    false
                }
                _ = look.tick() => true,
                _ = beats.tick() => false,
                () = self.source.changed() => self.check_source(),
                () = until(refusal_due) => true,
            };
            if due {
                looked = Instant::now();
                let watched = self.reconcile().await;
                settings = Settings::watch(&netns, watched.iter(), SETTINGS)
                    .context("cannot watch settings")?;
                changes.watch_carriers(self.carriers.clone());
                self.churn_limiter.throttle().await;
            }
        }
    }

    /// True if there is something to do.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Applied(object) => self.take_object(object),
            Event::Deleted(reference) if reference.kind == Kind::FabricRecord => {
                self.records.remove(&reference.name);
                self.join()
            }
            Event::Deleted(reference) if reference.name == self.node => {
                tracing::warn!("{}", self.without_config());
                self.published = None;
                self.check_source()
            }
            Event::Problems(problems) => {
                self.vitals.cannot_read(&problems);
                false
            }
            Event::Deleted(_) | Event::Synced => false,
        }
    }

    fn take_object(&mut self, object: Object) -> bool {
        match NodeConfig::try_from(object) {
            Ok(config) if config.metadata.name.as_ref() == Some(&self.node) => {
                self.published = Some(config);
                self.check_rivals();
            }
            Ok(_) => return false,
            Err(object) => match FabricRecord::try_from(object) {
                Ok(record) => self.records.insert(record),
                Err(_) => return false,
            },
        }
        self.join()
    }

    /// Reports another agent of the same node as soon as it does.
    fn check_rivals(&mut self) {
        let status = self.published.as_ref().and_then(|config| config.status.as_ref());
        let by = status.and_then(|status| status.reported_by.as_ref());
        if self.rivals.read(by, self.reporter.has_written(), Instant::now()) {
            self.report();
        }
    }

    /// Returns true if there is something to do. While records are missing, the node stays as it is.
    fn join(&mut self) -> bool {
        let joined = self.published.as_ref().and_then(|own| own.joined(&self.records));
        let Some(config) = joined else { return false };
        let read = self.records.version().or_else(|| self.read.clone());
        let has_read_more = self.read != read;
        self.read = read;
        let is_new = self.take_config(config);
        // Nothing changes for this node: what it has is made from the newer records, too.
        if has_read_more && !is_new {
            self.report();
        }
        is_new
    }

    fn without_config(&self) -> &'static str {
        let spec = self.config.as_ref().map(|config| &config.spec);
        if spec.is_some_and(|spec| spec.removed && !spec.refused.is_empty()) {
            "this node is no longer one of the fabric; packets to peers stay refused while this agent runs"
        } else {
            "the NodeConfig is gone; keeping what is there"
        }
    }

    /// Returns whether the config was lost or came back. An API server that does not answer is no
    /// loss: it is on nobody's way, and its nodes' gateways report on their own. A published
    /// directory comes from the gateways' host, and nothing else shows that this is gone.
    fn check_source(&mut self) -> bool {
        let lost = self.config.as_ref().is_some_and(|config| !config.spec.removed)
            && self.source.is_lost();
        std::mem::replace(&mut self.lost, lost) != lost
    }

    /// Returns whether a gateway was lost or is back. With `--no-accept-rules` none is lost: a firewall
    /// may drop what this host is answered and nothing of what its pods are.
    fn check_gateways(&mut self) -> bool {
        let lost = if self.accept { self.probes.lost() } else { BTreeSet::new() };
        for peer in lost.difference(&self.lost_gateways) {
            tracing::warn!(peer, "new connections are refused until the peer's gateway answers");
        }
        let before = std::mem::replace(&mut self.lost_gateways, lost);
        before != self.lost_gateways
    }

    /// Returns whether a replica has taken a gateway's tunnel over.
    fn check_take_overs(&mut self) -> bool {
        let before = std::mem::replace(&mut self.take_overs, self.probes.take_overs());
        before != self.take_overs
    }

    /// An agent whose node leaves the fabric makes nothing again.
    fn show_presence(&mut self) {
        let makes = self.config.as_ref().is_some_and(|config| !config.spec.removed);
        self.presence.set(makes);
    }

    /// Time of the next look at who sends to refused prefixes, at the latest when `linger` ends.
    fn refusal_due(&self, looked: Instant) -> Option<Instant> {
        let since = self.withdrawn.filter(|_| self.store.api_server().is_some());
        Some(next_look(looked, self.refuser.period()?, since.map(|since| since + self.linger)))
    }

    /// For one uid a lower generation is an old copy. A new status alone is no news.
    fn take_config(&mut self, config: NodeConfig) -> bool {
        if let Some(current) = &self.config {
            let same = config.metadata.uid == current.metadata.uid;
            let (new, old) = (config.metadata.generation, current.metadata.generation);
            if same && (new < old || (new == old && config.spec == current.spec)) {
                return false;
            }
        }
        tracing::info!(generation = config.metadata.generation, "new config");
        self.vitals.received(config.metadata.generation);
        self.withdrawn = None;
        self.config = Some(config);
        self.source.handle_read();
        self.check_source();
        true
    }

    /// Brings the kernel to the config's state. Problems are in the status, and are retried the
    /// next time.
    ///
    /// Returns the settings to look at again when they change.
    async fn reconcile(&mut self) -> Vec<Sysctl> {
        let Some(mut config) = self.config.clone() else { return Vec::new() };
        follow_take_overs(&mut config.spec, &self.take_overs);
        self.show_presence();
        let began = Instant::now();
        self.count_refused();
        self.probes.retain(&config.spec);
        let mut problems = BTreeSet::new();
        self.moved.clear();
        let settings = if config.spec.removed {
            self.diversions.clear();
            self.forwarding_off.clear();
            self.undone = Undone::default();
            problems.extend(self.other_firewalls.remove().await);
            self.withdraw(&config, &mut problems).await;
            Vec::new()
        } else {
            self.fulfil(&config, &mut problems).await
        };
        self.own_problems = problems;
        self.vitals.reconciled(began.elapsed());
        self.report();
        settings
    }

    /// Takes everything away. What is still sent to peers stays refused: on a host until nobody
    /// sends, or for as long as the config names its prefix; in Kubernetes for `linger`.
    async fn withdraw(&mut self, config: &NodeConfig, problems: &mut BTreeSet<String>) {
        let quiet = config.spec.quiet_after();
        let lingers = self.store.api_server().is_some();
        let kept = if lingers { BTreeSet::new() } else { Refuser::named(&config.spec) };
        let began = Instant::now();
        problems.extend(match self.withdrawn {
            Some(_) => cleanup::dataplane(&self.handle, &mut self.table).await,
            None => cleanup::withdraw(&self.handle, &mut self.table, quiet, &kept).await.problems,
        });
        let since = *self.withdrawn.get_or_insert(began);
        let at_once = lingers && since.elapsed() >= self.linger;
        let looked = self.refuser.look(self.handle.netns(), at_once, &kept);
        let saved = looked.and_then(|()| self.refuser.save_refused());
        problems.extend(saved.err().map(|error| chain(&error)));
        if lingers && !self.refuser.senders().is_empty() {
            let senders: Vec<_> = self.refuser.senders().iter().map(ToString::to_string).collect();
            problems.insert(format!(
                "packets of {} to peers are refused for {} s",
                senders.join(", "),
                self.linger.as_secs()
            ));
        }
    }

    /// Brings the node to a config that it is to have. Returns the settings to look at again.
    async fn fulfil(
        &mut self,
        config: &NodeConfig,
        problems: &mut BTreeSet<String>,
    ) -> Vec<Sysctl> {
        let spec = &config.spec;
        let gathered = HostState::gather(&self.handle).await;
        let Some(host_state) = value_of(gathered, problems) else { return Vec::new() };
        self.carriers = host_state.underlay_carriers(spec);
        self.other_firewalls.request(treatment(spec, &host_state, self.accept));
        self.find_moved(config, &host_state, problems).await;
        let kept = self.refuser.begin(&self.handle, config, &host_state).await;
        let kept = value_of(kept, problems);
        let compiled = self.compile(spec, &host_state, kept.as_ref());
        let applied = self.apply(&compiled).await;
        if let Some(kept) = kept {
            let peers = &compiled.firewall.peers;
            let found = self.refuser.conclude(&self.handle, config, kept, peers, &applied).await;
            problems.extend(found.iter().map(|error| chain(error)));
        }
        // The table drops what is for a gateway and has no route into the overlay.
        if applied.is_guarded || applied.is_whole() {
            self.probes.follow(spec);
        }
        if self.remove_liqo && applied.is_guarded && applied.is_whole() {
            let removed = liqo_leftovers::remove(&self.handle, &compiled.firewall.peers).await;
            self.remove_liqo = value_of(removed, problems).is_none();
        }
        self.find_diversions(&compiled.firewall, &host_state, problems).await;
        self.note_forwarding(&compiled.forwarding);
        problems.extend(compiled.problems.into_iter().chain(applied.problems));
        compiled.state.sysctls.into_keys().chain(compiled.forwarding.into_keys()).collect()
    }

    /// Compares the node's declared addresses with those of its devices.
    async fn find_moved(
        &mut self,
        config: &NodeConfig,
        host_state: &HostState,
        problems: &mut BTreeSet<String>,
    ) {
        if let Some(status) = config.status.as_ref().filter(|_| self.homes.is_empty()) {
            self.homes = moved::homes_of(&status.moved, host_state);
        }
        let (in_kubernetes, homes) = (self.store.api_server().is_some(), &mut self.homes);
        let moved = moved::find(&self.handle, &config.spec, host_state, homes, in_kubernetes).await;
        if let Some(moved) = value_of(moved, problems) {
            problems.extend(moved.iter().filter(|_| in_kubernetes).map(moved::stale));
            self.moved = moved;
        }
    }

    /// Returns the desired state. `kept` are prefixes that stay refused, if these are known.
    fn compile(
        &self,
        spec: &NodeConfigSpec,
        host_state: &HostState,
        kept: Option<&BTreeSet<Cidr>>,
    ) -> Compiled {
        let refused = kept.unwrap_or_else(|| self.refuser.refused());
        let mut compiled = compile(spec, host_state, refused);
        if self.lost {
            compiled.problems.insert(LOST.to_owned());
            compiled.firewall.unconnected.clone_from(&compiled.firewall.peers);
        }
        compiled.refuse(spec, &self.lost_gateways);
        compiled
    }

    /// NAT and refusals come first, so that no packet takes a new route without them.
    async fn apply(&mut self, want: &Compiled) -> Applied {
        let ensured = self.table.ensure(self.handle.netns(), &want.firewall);
        let mut applied = apply(&self.handle, &want.state).await;
        let is_table_new = *ensured.as_ref().unwrap_or(&false);
        let table = is_table_new.then(|| format!("nft add table inet {FIREWALL_TABLE} {{ … }}"));
        let step = applied.first.take().or(table);
        if step.is_some() {
            self.churn_limiter.note();
        }
        self.undone.note((&want.state, &want.firewall), step, Instant::now());
        self.vitals.applied(applied.steps, applied.failures);
        applied.is_guarded = ensured.is_ok();
        applied.problems.extend(ensured.err().map(|error| chain(&error)));
        if !applied.problems.is_empty() {
            self.undone.forget();
        }
        applied
    }

    /// Looks for rules and routes of others that take packets of the firewall's prefixes.
    async fn find_diversions(
        &mut self,
        firewall: &Firewall,
        host_state: &HostState,
        problems: &mut BTreeSet<String>,
    ) {
        let found = foreign_routes::find(&self.handle, firewall, &host_state.routes).await;
        if let Some(found) = value_of(found, problems) {
            foreign_routes::note(&mut self.diversions, &found);
            problems.extend(found.into_iter().map(|foreign| foreign.problem));
        }
    }

    fn note_forwarding(&mut self, settings: &BTreeMap<Sysctl, bool>) {
        let before = std::mem::take(&mut self.forwarding_off);
        for (setting, _) in settings.iter().filter(|(_, is_on)| !**is_on) {
            let known = before.iter().find(|off| off.setting == setting.name());
            let since = known.map(|off| off.since.clone());
            self.forwarding_off.push(ForwardingOff {
                setting: setting.name(),
                ipv6: setting.is_ipv6(),
                since: since.unwrap_or_else(|| format!("{:.3}", Timestamp::now())),
            });
        }
    }

    fn count_refused(&mut self) {
        for (table, counter, reason) in [
            (FIREWALL_TABLE, COUNTER, NOT_CONNECTED),
            (REFUSAL_TABLE, COUNTER, NO_PEERING),
            (FIREWALL_TABLE, netplan::DIVERTED, DIVERTED),
        ] {
            match nft::counted_packets(self.handle.netns(), table, counter) {
                Ok(packets) => self.vitals.count_refused(reason, packets),
                Err(error) => tracing::debug!(table, "{}", chain(&error)),
            }
        }
    }

    fn report(&mut self) {
        let Some(mut config) = self.config.clone() else { return };
        let found = self.other_firewalls.found();
        foreign_routes::note(&mut self.filtered, &found.faults);
        let reporter = self.rivals.reporter(Instant::now());
        let problems = [&self.own_problems, &found.problems, &found.failures];
        let problems = problems.into_iter().flatten().cloned();
        let problems: BTreeSet<_> = problems.chain(self.rivals.problem(&self.node)).collect();
        for problem in problems.difference(&self.problems) {
            tracing::warn!("{problem}");
        }
        for problem in self.problems.difference(&problems) {
            tracing::info!("solved: {problem}");
        }
        self.problems = problems;
        let FaultyPaths { unreachable, lossy, cramped } = self.probes.faulty();
        let undone = self.undone.named(Instant::now());
        let packet_drops =
            [HostState::without_carrier(&self.carriers), found.packet_drops()].concat();
        let paths = unreachable.len() + lossy.len() + cramped.len();
        let faults = paths + usize::from(undone.is_some());
        self.vitals.set_problems(self.problems.len() + faults);
        config.status = Some(NodeConfigStatus {
            applied_generation: config.metadata.generation.unwrap_or_default(),
            records: self.read.clone(),
            problems: self.problems.iter().cloned().collect(),
            moved: self.moved.clone(),
            forwarding_off: self.forwarding_off.clone(),
            diversions: [&*self.diversions, &*self.filtered].concat(),
            packet_drops: if unreachable.is_empty() { Vec::new() } else { packet_drops },
            unreachable_gateways: unreachable,
            lossy_gateways: lossy,
            cramped_gateways: cramped,
            undone,
            refused: Some(self.refuser.report(&config.spec)),
            refuses_recorded: true,
            // A DaemonSet has one agent a node.
            reported_by: self.store.api_server().is_none().then_some(reporter),
        });
        // A former mount point may be an empty folder now.
        if !self.lost {
            self.reporter.report(config);
        }
    }
}

/// Has packets go to the replicas that have taken over since the config was written, which an API server that
/// does not answer cannot report. Only replicas of the config count.
fn follow_take_overs(config: &mut NodeConfigSpec, take_overs: &TakeOvers) {
    let gateways = config.peerings.iter_mut().filter_map(|peering| peering.gateway.as_mut());
    for gateway in gateways {
        let active = gateway.mac.as_ref().and_then(|mac| take_overs.get(mac));
        let is_replica = |active: &&ActiveReplica| gateway.replicas.contains(&active.address);
        let is_later = |active: &&ActiveReplica| Some(active.epoch) > gateway.epoch;
        if let Some(active) = active.filter(is_replica).filter(is_later) {
            (gateway.underlay, gateway.epoch) = (active.address, Some(active.epoch));
        }
    }
}

/// Returns the value, or adds the error to the problems.
fn value_of<T>(result: Result<T, impl Error>, problems: &mut BTreeSet<String>) -> Option<T> {
    result.map_err(|error| problems.insert(chain(&error))).ok()
}

/// Accepts that packets of the overlay need in chains of others, or reports of what they drop.
fn treatment(config: &NodeConfigSpec, host_state: &HostState, accept: bool) -> Treatment {
    let gateways = config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
    let peers = config.peerings.iter().flat_map(|peering| &peering.prefixes);
    let pod_devices = host_state.devices_of_pods(config);
    Treatment {
        mode: if accept { Mode::Accept } else { Mode::Report },
        ways: host_state.ways(config),
        listen_ports: gateways.filter_map(|gateway| gateway.listen_port).collect(),
        peers: peers.filter_map(|prefix| prefix.parse().ok()).collect(),
        pods: host_state::pod_cidrs(config).collect(),
        pod_devices: pod_devices.into_iter().map(str::to_owned).collect(),
        hosts: overlay_hosts(config),
    }
}

/// Addresses of VXLAN packets and of probes.
fn overlay_hosts(config: &NodeConfigSpec) -> BTreeSet<IpAddr> {
    let gateways = config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
    let overlays = gateways.flat_map(|gateway| {
        let (v4, v6) = (gateway.overlay, overlay_v6(gateway.overlay));
        [v4.into(), v6.into(), gateway.underlay].into_iter().chain(gateway.links.clone())
    });
    overlays.chain(config.underlay.iter().copied()).collect()
}

/// `end` is that of the refusal, if it has one.
fn next_look(looked: Instant, period: Duration, end: Option<Instant>) -> Instant {
    let next = looked + period.max(MIN_REFUSAL_LOOK);
    end.filter(|end| *end > looked).map_or(next, |end| next.min(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_that_ends_is_looked_at_then() {
        let (now, period) = (Instant::now(), Duration::from_secs(30));
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(next_look(now, period, None), after(30));
        assert_eq!(next_look(now, period, Some(after(1))), after(1));
        assert_eq!(next_look(now, period, Some(after(60))), after(30));
        assert_eq!(next_look(now, Duration::ZERO, Some(now)), after(1), "it is over");
    }
}
