//! Main loop of the agent: from events of the config, the kernel and the probes to reconciles and reports.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use fabric_api::fabric::{FabricRecord, NodeConfig, NodeConfigStatus};
use fabric_api::{Cidr, overlay_v6};
use fabric_runtime::{Heartbeat, Stop, chain, until};
use fabric_store::{Event, Kind, Object, Store};
use foreign::foreign_routes;
use foreign::other_firewalls::{Mode, OtherFirewalls, Treatment};
use netlink::{Handle, Settings, nft};
use netplan::{COUNTER, FIREWALL_TABLE, REFUSAL_TABLE, Sysctl};
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, timeout};

use crate::apply::{Applied, apply, scope};
use crate::compile::{Compiled, compile};
use crate::config::RunArgs;
use crate::config_source::{self, ConfigSource};
use crate::desired::{Desired, Joined};
use crate::gateway_paths::GatewayPaths;
use crate::host_faults::HostFaults;
use crate::host_state::HostState;
use crate::overlay_probe::{FaultyPaths, OverlayProbes};
use crate::parsed_config::ParsedConfig;
use crate::presence::Presence;
use crate::problems::{Problems, value_of};
use crate::refusal::Refuser;
use crate::report::Reporter;
use crate::rivals::Rivals;
use crate::table::Table;
use crate::undone::Undone;
use crate::vitals::{DIVERTED, NO_PEERING, NOT_CONNECTED, Vitals};
use crate::withdrawal::Withdrawal;
use crate::{liqo_leftovers, node_config};

/// Interval between checks without a notification: changes of the old packet filter send none.
const LOOK: Duration = Duration::from_secs(30);
/// Interval between reads of settings: short enough that they heal within half a second.
const SETTINGS: Duration = Duration::from_millis(300);
/// Shortest time between two looks at who sends to refused prefixes.
const MIN_REFUSAL_LOOK: Duration = Duration::from_secs(1);
/// Problem of a published config that cannot be read any more.
const LOST: &str = "the published directory is lost, and with it this node's NodeConfig: new \
                    connections to peers are refused until it is back";

pub(crate) struct Agent {
    handle: Handle,
    in_kubernetes: bool,
    /// Put accepts into chains of others that drop what they have no rule for.
    accept: bool,
    /// Liqo's network has left something on the node that is to be removed.
    remove_liqo: bool,
    desired: Desired,
    table: Table,
    undone: Undone,
    other_firewalls: OtherFirewalls,
    faults: HostFaults,
    problems: Problems,
    probes: OverlayProbes,
    paths: GatewayPaths,
    refuser: Refuser,
    withdrawal: Withdrawal,
    rivals: Rivals,
    reporter: Reporter,
    vitals: Vitals,
    presence: Presence,
}

impl Agent {
    pub(crate) fn start(
        args: RunArgs,
        handle: Handle,
        store: &Store,
        vitals: Vitals,
    ) -> anyhow::Result<Self> {
        let server = store.api_server();
        let in_kubernetes = server.is_some();
        let source = ConfigSource::watch(store.file_of(&node_config(&args.node)))?;
        let shown = server.map_or_else(|| source.clone(), ConfigSource::of_server);
        let linger = in_kubernetes.then(|| Duration::from_secs(args.linger.into()));
        Ok(Self {
            other_firewalls: OtherFirewalls::start(handle.netns().clone()),
            handle,
            in_kubernetes,
            accept: !args.no_accept_rules,
            remove_liqo: args.remove_liqo,
            probes: OverlayProbes::start(args.node.clone(), shown),
            paths: GatewayPaths::default(),
            desired: Desired::new(args.node, source),
            table: Table::default(),
            undone: Undone::default(),
            faults: HostFaults::default(),
            problems: Problems::default(),
            refuser: Refuser::new(args.refusal_file),
            withdrawal: Withdrawal::new(linger),
            rivals: Rivals::new(Instant::now()),
            reporter: Reporter::start(store)?,
            vitals,
            presence: Presence::default(),
        })
    }

    /// Follows the config and the kernel until stopped. `taken_down` comes before the end if no other
    /// agent follows, so that gateways are not asked to wait for one.
    pub(crate) async fn run(
        mut self,
        store: &Store,
        mut stop: Stop,
        mut taken_down: Signal,
    ) -> anyhow::Result<()> {
        let netns = self.handle.netns().clone();
        let mut events = config_source::follow(store, node_config(self.desired.node()))?;
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
            self.presence.set(self.desired.is_member());
            let period = self.refuser.period();
            let refusal_due = period.map(|of| next_look(looked, of, self.withdrawal.end()));
            let due = tokio::select! {
                () = stop.requested() => {
                    if timeout(Duration::ZERO, taken_down.recv()).await.is_err() {
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
                    self.paths.update(&self.probes, self.accept)
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
                () = self.desired.source_changed() => self.desired.check_source(),
                () = until(refusal_due) => true,
            };
            if due {
                looked = Instant::now();
                let watched = self.reconcile().await;
                settings = Settings::watch(&netns, watched.iter(), SETTINGS)
                    .context("cannot watch settings")?;
                changes.watch_carriers(self.faults.carriers().clone());
                self.undone.throttle().await;
            }
        }
    }

    /// True if there is something to do.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Applied(object) => self.take_object(object),
            Event::Deleted(reference) if reference.kind == Kind::FabricRecord => {
                self.desired.remove_record(&reference.name);
                self.join()
            }
            Event::Deleted(reference) if reference.name == self.desired.node() => {
                self.desired.unpublish()
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
            Ok(config) => {
                let Some(own) = self.desired.publish(config) else { return false };
                let by = own.status.as_ref().and_then(|status| status.reported_by.as_ref());
                // Another agent of the same node is reported as soon as it reports.
                if self.rivals.read(by, self.reporter.has_written(), Instant::now()) {
                    self.report();
                }
            }
            Err(object) => match FabricRecord::try_from(object) {
                Ok(record) => self.desired.insert_record(record),
                Err(_) => return false,
            },
        }
        self.join()
    }

    /// Returns true if there is something to do.
    fn join(&mut self) -> bool {
        match self.desired.join() {
            Joined::Config(generation) => {
                self.vitals.received(generation);
                self.withdrawal.cancel();
                true
            }
            // Nothing changes for this node: what it has is made from the newer records, too.
            Joined::Version => {
                self.report();
                false
            }
            Joined::Unchanged => false,
        }
    }

    /// Brings the kernel to the config's state. Problems are in the status, and are retried the
    /// next time.
    ///
    /// Returns the settings to look at again when they change.
    async fn reconcile(&mut self) -> Vec<Sysctl> {
        let Some(mut config) = self.desired.config().cloned() else { return Vec::new() };
        self.paths.follow_published(&self.probes, &config.spec);
        self.paths.follow_take_overs(&mut config.spec);
        self.presence.set(self.desired.is_member());
        let parsed = ParsedConfig::parse(&config);
        let began = Instant::now();
        self.count_refused();
        self.probes.retain(&config.spec);
        let mut problems = BTreeSet::new();
        self.faults.clear(config.spec.removed);
        let settings = if config.spec.removed {
            self.undone.clear();
            problems.extend(self.other_firewalls.remove().await);
            let (table, refuser) = (&mut self.table, &mut self.refuser);
            let withdrawn = self.withdrawal.enforce(&self.handle, table, refuser, &parsed);
            problems.extend(withdrawn.await);
            Vec::new()
        } else {
            self.fulfil(&parsed, &mut problems).await
        };
        self.problems.set_own(problems);
        self.vitals.reconciled(began.elapsed());
        self.report();
        settings
    }

    /// Brings the node to a config that it is to have. Returns the settings to look at again.
    async fn fulfil(
        &mut self,
        config: &ParsedConfig<'_>,
        problems: &mut BTreeSet<String>,
    ) -> Vec<Sysctl> {
        let gathered = HostState::gather(&self.handle).await;
        let Some(host_state) = value_of(gathered, problems) else { return Vec::new() };
        self.other_firewalls.request(treatment(config, &host_state, self.accept));
        let in_kubernetes = self.in_kubernetes;
        let stale = self.faults.observe(&self.handle, config, &host_state, in_kubernetes).await;
        let stale = value_of(stale, problems).unwrap_or_default();
        problems.extend(stale);
        let kept = self.refuser.begin(&self.handle, config, &host_state).await;
        let kept = value_of(kept, problems);
        let compiled = self.compile(config, &host_state, kept.as_ref());
        let applied = self.apply(&compiled).await;
        if let Some(kept) = kept {
            let firewall = &compiled.firewall;
            let found = self.refuser.conclude(&self.handle, config, kept, firewall, &applied).await;
            problems.extend(found.iter().map(|error| chain(error)));
        }
        // The table drops what is for a gateway and has no route into the overlay.
        if applied.is_guarded || applied.is_whole() {
            self.probes.follow(config.spec, &host_state.addresses);
        }
        if self.remove_liqo && applied.is_guarded && applied.is_whole() {
            let removed = liqo_leftovers::remove(&self.handle, &compiled.firewall.peers).await;
            self.remove_liqo = value_of(removed, problems).is_none();
        }
        self.find_diversions(&compiled, &host_state, problems).await;
        self.faults.note_forwarding(&compiled.forwarding);
        problems.extend(compiled.problems.into_iter().chain(applied.problems));
        compiled.state.sysctls.into_keys().chain(compiled.forwarding.into_keys()).collect()
    }

    /// Returns the desired state. `kept` are prefixes that stay refused, if these are known.
    fn compile(
        &self,
        config: &ParsedConfig<'_>,
        host_state: &HostState,
        kept: Option<&BTreeSet<Cidr>>,
    ) -> Compiled {
        let refused = kept.unwrap_or_else(|| self.refuser.refused());
        let mut compiled = compile(config, host_state, refused);
        if self.desired.is_lost() {
            compiled.problems.insert(LOST.to_owned());
            compiled.firewall.unconnected.clone_from(&compiled.firewall.peers);
        }
        compiled.refuse(config, self.paths.lost());
        compiled
    }

    /// NAT and refusals come first, so that no packet takes a new route without them.
    async fn apply(&mut self, want: &Compiled) -> Applied {
        let ensured = self.table.ensure(self.handle.netns(), &want.firewall);
        let mut applied = apply(&self.handle, &want.state).await;
        let is_table_new = *ensured.as_ref().unwrap_or(&false);
        let table = is_table_new.then(|| format!("nft add table inet {FIREWALL_TABLE} {{ … }}"));
        let step = applied.first.take().or(table);
        self.undone.note((&want.state, &want.firewall), step, Instant::now());
        self.vitals.applied(applied.steps, applied.failures);
        applied.is_guarded = ensured.is_ok();
        applied.problems.extend(ensured.err().map(|error| chain(&error)));
        if !applied.problems.is_empty() {
            self.undone.forget();
        }
        applied
    }

    /// Looks for rules and routes of others, and networks of the node, that take packets of peers' prefixes.
    async fn find_diversions(
        &mut self,
        compiled: &Compiled,
        host_state: &HostState,
        problems: &mut BTreeSet<String>,
    ) {
        let found =
            foreign_routes::find(&self.handle, &compiled.firewall, &host_state.routes).await;
        if let Some(mut found) = value_of(found, problems) {
            found.extend(compiled.conflicts.iter().cloned());
            self.faults.note_diversions(&found);
            problems.extend(found.into_iter().map(|foreign| foreign.problem));
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
        let Some(mut config) = self.desired.config().cloned() else { return };
        let found = self.other_firewalls.found();
        self.faults.note_filtered(&found.faults);
        let reporter = self.rivals.reporter(Instant::now());
        let others = found.problems.iter().chain(&found.failures).cloned();
        let problems = self.problems.update(others.chain(self.rivals.problem(self.desired.node())));
        let FaultyPaths { unreachable, lossy, cramped, cut_off } = self.probes.faulty();
        let undone = self.undone.named(Instant::now());
        let packet_drops = [self.faults.packet_drops(), found.packet_drops()].concat();
        let paths = unreachable.len() + lossy.len() + cramped.len() + cut_off.len();
        let faults = paths + usize::from(undone.is_some());
        self.vitals.set_problems(problems.len() + faults);
        config.status = Some(NodeConfigStatus {
            applied_generation: config.metadata.generation.unwrap_or_default(),
            records: self.desired.version().cloned(),
            problems,
            packet_drops: if unreachable.is_empty() { Vec::new() } else { packet_drops },
            unreachable_gateways: unreachable,
            lossy_gateways: lossy,
            cramped_gateways: cramped,
            cut_off_gateways: cut_off,
            undone,
            refused: Some(self.refuser.report(&ParsedConfig::parse(&config).refused)),
            refuses_recorded: true,
            // A DaemonSet has one agent a node.
            reported_by: (!self.in_kubernetes).then_some(reporter),
            ..self.faults.status()
        });
        // A former mount point may be an empty folder now.
        if !self.desired.is_lost() {
            self.reporter.report(config);
        }
    }
}

/// Treatment of other firewalls that this config needs.
fn treatment(config: &ParsedConfig<'_>, host_state: &HostState, accept: bool) -> Treatment {
    let pod_devices = host_state.devices_of_pods(config);
    let silent = config.spec.peerings.iter().filter(|peering| !peering.connected);
    let silent = silent.filter_map(|peering| peering.gateway.as_ref());
    Treatment {
        mode: if accept { Mode::Accept } else { Mode::Report },
        ways: host_state.ways(config),
        listen_ports: config.gateways().filter_map(|gateway| gateway.listen_port).collect(),
        silent_ports: silent.filter_map(|gateway| gateway.listen_port).collect(),
        peers: config.peers().collect(),
        pods: config.pod_cidrs().collect(),
        pod_devices: pod_devices.into_iter().map(str::to_owned).collect(),
        hosts: overlay_hosts(config),
        links: config.gateways().flat_map(|gateway| gateway.links.clone()).collect(),
    }
}

/// Addresses of VXLAN packets and of probes.
fn overlay_hosts(config: &ParsedConfig<'_>) -> BTreeSet<IpAddr> {
    let overlays = config.gateways().flat_map(|gateway| {
        let (v4, v6) = (gateway.overlay, overlay_v6(gateway.overlay));
        [v4.into(), v6.into(), gateway.underlay].into_iter().chain(gateway.links.clone())
    });
    overlays.chain(config.spec.underlay.iter().copied()).collect()
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
