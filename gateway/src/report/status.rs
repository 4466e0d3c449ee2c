//! Reports of the gateway: its Connection, as Liqo has it, and the status of its GatewayConfig.

mod connection;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fabric_api::PrivateKey;
use fabric_api::fabric::{
    ActiveReplica, GatewayConfig, GatewayConfigStatus, OVERLAY_PROBE_PORT, PeerEndpoint,
    PeeringFault,
};
use fabric_runtime::{Backoff, until};
use fabric_store::{Object, ObjectRef, Store};
use gateway_config::input::Input;
use gateway_config::restart_cache::RestartCache;
use gateway_health::{Reason, canonical};
use jiff::{SignedDuration, Timestamp};
use lane::{PeerState, Stats};
use reachability::nodes::NodePaths;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::connection::OwnConnection;
use crate::liveness::monitor::TRAINS_VANISH;
use crate::replicas::election::Role;
use crate::replicas::{REPLICA_PORT, Standing};
use crate::state::{Plane, Running};
use crate::state::{TimedFault, View};

/// Intervals at which counters are written while nothing else changes: to a file, and to an API
/// server, where every write wakes the controller. Metrics have the newest.
const COUNTERS: Duration = Duration::from_secs(20);
const COUNTERS_SENT: Duration = Duration::from_secs(60);
/// Longest time for which a replica that was handed the tunnel reports nothing before it is connected.
const HAND_OVER: Duration = Duration::from_secs(2);
/// Time for heartbeats after the API server has answered one that may have been cut off.
const RETURN: Duration = Duration::from_millis(500);
/// Least interval between checks whether the last write still stands, and the longest: results of probes
/// are most often a reason to report before.
const LOOK: Duration = Duration::from_secs(2);
const LONGEST_LOOK: Duration = Duration::from_secs(5);
/// First wait before a report that could not be written is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// Inputs of the reports.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub views: watch::Receiver<View>,
    pub lookups: watch::Receiver<Option<TimedFault>>,
    /// Absent until probes are answered.
    pub paths: watch::Receiver<Option<NodePaths>>,
    pub standings: watch::Receiver<Standing>,
}

/// Destinations of the reports.
pub struct Report {
    pub store: Store,
    /// In a pod: for the next start of the container.
    pub keep: Option<RestartCache>,
    /// Name of the GatewayConfig.
    pub name: ObjectRef,
}

/// Reports until `stop`; then reports that the connection is no longer there. `unreported` is the time since
/// which the store lacks a change of that, or a fault.
pub async fn run(
    report: Report,
    mut sources: Sources,
    unreported: watch::Sender<Option<Instant>>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let (lookups, standings) = (sources.lookups.clone(), sources.standings.clone());
    let mut reporter = Reporter::new(report, lookups, standings)?;
    let mut known = None;
    let mut backoff = Backoff::new(RETRY, LONGEST_LOOK);
    loop {
        let (input, plane, view) = sources.take();
        reporter.paths = sources.paths.borrow_and_update().clone();
        reporter.follow(sources.standings.borrow_and_update().clone());
        let mut session = plane.running.as_ref().map(|running| running.lane.changes());
        session.iter_mut().for_each(watch::Receiver::mark_unchanged);
        let state = (view.is_connected(), reasons(&view));
        let is_news = known.as_ref().is_some_and(|known| *known != state);
        unreported
            .send_modify(|since| *since = is_news.then(|| since.unwrap_or_else(Instant::now)));
        let reported = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            reported = reporter.report(&input, &plane, &view, Timestamp::now()) => reported,
        };
        let next = match reported {
            Ok(()) => {
                known = Some(state);
                unreported.send_replace(None);
                backoff.reset();
                LONGEST_LOOK
            }
            Err(error) => {
                tracing::warn!("cannot report: {error:#}");
                backoff.failed()
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            changed = sources.changed() => changed?,
            () = until(reporter.settled_at) => reporter.settled_at = None,
            // The peer's present endpoint is where a successor will look for it.
            () = changed(&mut session) => {}
            () = reporter.connection.changed() => {}
            () = sleep(next) => {}
        }
    }
    // By now this task no longer holds the lane, which would go on answering the peer meanwhile.
    let input = sources.inputs.borrow().clone();
    reporter.follow(sources.standings.borrow().clone());
    reporter.report_end(&input).await
}

fn reasons(view: &View) -> Vec<Reason> {
    view.faults.iter().map(|of| of.fault.reason).collect()
}

impl Sources {
    fn take(&mut self) -> (Input, Plane, View) {
        let input = self.inputs.borrow_and_update().clone();
        let mut plane = self.planes.borrow_and_update().clone();
        let view = self.views.borrow_and_update().clone();
        plane.problems.extend(view.trains_vanish.then(|| TRAINS_VANISH.to_owned()));
        (input, plane, view)
    }

    async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.inputs.changed() => changed,
            changed = self.planes.changed() => changed,
            changed = self.views.changed() => changed,
            changed = self.lookups.changed() => changed,
            changed = self.paths.changed() => changed,
            changed = self.standings.changed() => changed,
        }
    }
}

/// Returns when the peer moved, or there was a handshake.
async fn changed(session: &mut Option<watch::Receiver<PeerState>>) {
    let ended = match session {
        Some(session) => session.changed().await.is_err(),
        None => true,
    };
    if ended {
        std::future::pending().await
    }
}

struct Reporter {
    name: ObjectRef,
    standing: Standing,
    standings: watch::Receiver<Standing>,
    /// Time until which another replica carries packets, unless this one is connected before.
    settled_at: Option<Instant>,
    store: Store,
    lookups: watch::Receiver<Option<TimedFault>>,
    keep: Option<RestartCache>,
    /// The state cached last.
    kept: Option<Kept>,
    connection: OwnConnection,
    written: Option<(String, GatewayConfigStatus)>,
    paths: Option<NodePaths>,
    counters_at: Instant,
    counters_every: Duration,
}

impl Reporter {
    fn new(
        report: Report,
        lookups: watch::Receiver<Option<TimedFault>>,
        standings: watch::Receiver<Standing>,
    ) -> anyhow::Result<Self> {
        let Report { store, keep, name } = report;
        let connection = OwnConnection::new(store.clone(), name.clone())?;
        let counters_every = if store.api_server().is_some() { COUNTERS_SENT } else { COUNTERS };
        let (kept, written, paths, counters_at) = (None, None, None, Instant::now());
        Ok(Self {
            name,
            standing: Standing::default(),
            standings,
            settled_at: None,
            store,
            lookups,
            keep,
            kept,
            connection,
            written,
            paths,
            counters_at,
            counters_every,
        })
    }

    async fn report(
        &mut self,
        input: &Input,
        plane: &Plane,
        view: &View,
        now: Timestamp,
    ) -> anyhow::Result<()> {
        // A replica that stands by has nothing to report. Nodes follow what one reports that has the tunnel:
        // while its predecessor carries packets it is connected first.
        let awaits_session = self.settled_at.is_some() && !view.is_connected();
        if !self.standing.has_tunnel() || awaits_session {
            return Ok(());
        }
        if let Some(own) = self.standing.active() {
            if input.named.is_some_and(|named| named.epoch > own.epoch) {
                return Ok(());
            }
            // It may have been cut off until now: another one that has the tunnel, too, goes before.
            if self.standing.is_stuck && input.named.is_some_and(|named| named.epoch < own.epoch) {
                self.store.get(&self.name).await.context("cannot read the GatewayConfig")?;
                let lost = self.standings.wait_for(|standing| !standing.has_tunnel());
                if timeout(RETURN, lost).await.is_ok() {
                    return Ok(());
                }
            }
            // Another replica, or an older version, has written over it.
            if input.named != Some(own) && self.counters_at.elapsed() >= LOOK {
                self.written = None;
            }
        }
        if let Some(config) = &input.config {
            self.report_config(config, (input, plane, view), now).await?;
        }
        match input.desired.as_ref().filter(|desired| desired.peer_key.is_some()) {
            // A reader of Connected shall not find packets refused for a moment more, and a reader
            // of its loss shall find them refused.
            Some(_) if view.is_connected() != is_open(plane) => Ok(()),
            Some(desired) => self.connection.report(desired, view).await,
            // As in Liqo: no key of the peer, no Connection.
            None if input.synced => self.remove_connection().await,
            None => Ok(()),
        }
    }

    async fn report_config(
        &mut self,
        config: &Arc<GatewayConfig>,
        (input, plane, view): (&Input, &Plane, &View),
        now: Timestamp,
    ) -> anyhow::Result<()> {
        let uid = config.metadata.uid.clone().unwrap_or_default();
        let before = match &self.written {
            Some((of, status)) if *of == uid => status.clone(),
            // The status that an earlier gateway wrote, above all the peer's last endpoint.
            Some(_) | None => config.status.clone().unwrap_or_default(),
        };
        let missing = self.standing.missing.iter().map(|replica| {
            format!(
                "no heartbeat from the replica at {replica}: its process or node may be lost, or a \
                 NetworkPolicy drop UDP {REPLICA_PORT} between pods of gateways"
            )
        });
        let problems = input.problems().chain(plane.problems.iter().cloned());
        let deaf = self.standing.deaf.iter().map(|replica| {
            format!(
                "the replica at {replica} receives neither the peer nor other replicas: what is sent to its node \
                 may be lost, or a NetworkPolicy drop UDP to its pod"
            )
        });
        let problems = problems.chain(missing).chain(deaf).collect();
        let stats = plane.running.as_ref().map(|running| running.lane.snapshot());
        let mut status =
            gateway_status(&before, problems, plane.running.as_ref().zip(stats.as_ref()), now);
        // Absent until this gateway has read some: what one before it acknowledged stays.
        if is_applied(input, plane) {
            status.records = input.records.clone().or(status.records);
        }
        status.active = self.standing.active();
        status.faults = self.faults(&view.faults);
        let is_authentic = stats.is_some_and(|stats| stats.peer.is_endpoint_authentic);
        if view.is_connected() && is_authentic {
            status.configured_endpoint = proven_endpoint(plane, view);
        }
        if let Some(paths) = &self.paths {
            status.overlay_probe_port = Some(OVERLAY_PROBE_PORT);
            status.probing_nodes = paths.probing;
            status.unreachable_nodes.clone_from(&paths.unreachable);
        }
        self.remember(config, &status, input);
        let first = self.written.as_ref().is_none_or(|(of, _)| *of != uid);
        let counted =
            self.counters_at.elapsed() >= self.counters_every && is_counted(&before, &status);
        if !(first || counted || differs(&before, &status, input.is_from_records)) {
            return Ok(());
        }
        let mut object = GatewayConfig::clone(config);
        object.status = Some(status.clone());
        // It may have been cut off until now, while another replica took the tunnel over.
        let own = status.active;
        let yields_to = move |stored: &Object| is_later(stored, own);
        let put = self.store.put_status_unless(&object.into(), yields_to).await;
        put.context("cannot write the GatewayConfig's status")?;
        self.written = Some((uid, status));
        self.counters_at = Instant::now();
        Ok(())
    }

    /// A name that does not resolve, and what the monitor finds.
    fn faults(&self, found: &[TimedFault]) -> Vec<PeeringFault> {
        let lookup = self.lookups.borrow().clone();
        let published = |of: &TimedFault| PeeringFault {
            reason: of.fault.reason.as_str().to_owned(),
            message: of.fault.message.clone(),
            remedy: of.fault.remedy.clone(),
            since: format!("{:.3}", of.since),
        };
        lookup.iter().chain(found).map(published).collect()
    }

    /// Caches config and status: the store may be unavailable when the container starts again.
    fn remember(
        &mut self,
        config: &Arc<GatewayConfig>,
        status: &GatewayConfigStatus,
        input: &Input,
    ) {
        let Some((keep, key)) = self.keep.as_ref().zip(input.key.as_ref()) else { return };
        let now = Kept::new(config, status, key);
        if !input.is_good() || self.kept.as_ref() == Some(&now) {
            return;
        }
        let mut config = GatewayConfig::clone(config);
        config.status = Some(status.clone());
        match keep.put(&config, key) {
            Ok(()) => self.kept = Some(now),
            Err(error) => tracing::warn!(%error, "cannot keep the config for a restart"),
        }
    }

    fn follow(&mut self, standing: Standing) {
        let is_after_hand_over = standing.predecessor.is_some_and(|of| of.is_alive);
        if standing.has_tunnel() && !self.standing.has_tunnel() && is_after_hand_over {
            self.settled_at = Some(Instant::now() + HAND_OVER);
        }
        if standing.role == Role::Standby {
            self.written = None;
        }
        self.standing = standing;
    }

    /// If the config is gone, too, the peering is, and its Connection goes with it.
    async fn report_end(&mut self, input: &Input) -> anyhow::Result<()> {
        if input.synced && input.config.is_none() {
            return self.remove_connection().await;
        }
        let is_relieved = self.standing.role != Role::Leaving || self.standing.is_relieved;
        if !self.standing.has_tunnel() && is_relieved {
            return Ok(());
        }
        let reported = self.connection.report_end().await;
        self.withdraw_acknowledgement(input).await?;
        reported
    }

    /// A successor of a version that reads no records would show nothing of that: it gets its config in
    /// whole. One that runs already has acknowledged for itself.
    async fn withdraw_acknowledgement(&self, input: &Input) -> anyhow::Result<()> {
        let written = self.written.as_ref().filter(|(_, status)| status.records.is_some());
        let Some((config, (_, status))) = input.config.as_ref().zip(written) else {
            return Ok(());
        };
        let status = Some(GatewayConfigStatus { records: None, ..status.clone() });
        let object = GatewayConfig { status, ..GatewayConfig::clone(config) };
        let put = self.store.put_status_if_last(&object.into()).await;
        put.map(drop).context("cannot write the GatewayConfig's status")
    }

    /// Removes the Connection, unless this gateway never had a config.
    async fn remove_connection(&mut self) -> anyhow::Result<()> {
        match &self.written {
            Some(_) => self.connection.remove().await,
            None => Ok(()),
        }
    }
}

/// Returns whether a replica that took the tunnel over later has written a GatewayConfig's status.
fn is_later(stored: &Object, own: Option<ActiveReplica>) -> bool {
    let Object::GatewayConfig(stored) = stored else { return false };
    let active = stored.status.as_ref().and_then(|status| status.active);
    own.zip(active).is_some_and(|(own, active)| active.epoch > own.epoch)
}

/// Values whose change makes a new write to the cache worthwhile.
#[derive(PartialEq)]
struct Kept {
    /// In whole: of one generation there are many while records change.
    config: Arc<GatewayConfig>,
    status: GatewayConfigStatus,
    key: PrivateKey,
}

impl Kept {
    fn new(config: &Arc<GatewayConfig>, status: &GatewayConfigStatus, key: &PrivateKey) -> Self {
        let status = GatewayConfigStatus { records: None, ..without_counters(status) };
        Self { config: Arc::clone(config), status, key: key.clone() }
    }
}

/// The dataplane runs on the newest config.
fn is_applied(input: &Input, plane: &Plane) -> bool {
    let desired = input.desired.as_ref().filter(|_| input.is_good());
    desired.zip(plane.applied.as_ref()).is_some_and(|(newest, of)| Arc::ptr_eq(newest, of))
}

fn is_open(plane: &Plane) -> bool {
    plane.running.as_ref().is_some_and(|running| running.open)
}

/// The status after `before`. What is no longer known stays as it was: a gateway that starts anew
/// goes by it.
fn gateway_status(
    before: &GatewayConfigStatus,
    problems: Vec<String>,
    running: Option<(&Running, &Stats)>,
    now: Timestamp,
) -> GatewayConfigStatus {
    let mut status = GatewayConfigStatus { problems, ..before.clone() };
    let Some((running, stats)) = running else { return status };
    status.applied_generation = running.desired.generation;
    status.mtu = running.mtu;
    status.mtu_bound = Some(running.mtu_bound).filter(|_| running.mtu > 0);
    status.path_mtu = running.path_mtu;
    status.listen_port = running.port;
    status.received_bytes = stats.counters.rx_bytes;
    status.transmitted_bytes = stats.counters.tx_bytes;
    let initiated = SignedDuration::try_from(stats.last_stamp.to_unix());
    let initiated = initiated.and_then(Timestamp::from_duration).ok();
    if let Some(at) = initiated.filter(|at| *at > Timestamp::UNIX_EPOCH) {
        status.last_initiation = Some(format!("{at:.9}"));
    }
    if stats.peer.is_endpoint_authentic {
        status.peer_endpoint = stats.peer.endpoint.map(|peer| canonical(peer).to_string());
    }
    if let Some(unix) = stats.last_handshake_unix() {
        let unix = i64::try_from(unix).unwrap_or(i64::MAX);
        status.last_handshake =
            Timestamp::from_second(unix).ok().filter(|at| *at <= now).map(|at| format!("{at:.0}"));
    }
    status
}

/// The configured endpoint, unless the peer was found by another one.
fn proven_endpoint(plane: &Plane, view: &View) -> Option<PeerEndpoint> {
    let is_unproven = |of: &TimedFault| of.fault.reason == Reason::EndpointUnanswered;
    let endpoint = plane.running.as_ref()?.desired.endpoint.as_ref()?;
    let is_proven = !view.faults.iter().any(is_unproven);
    is_proven.then(|| PeerEndpoint { addresses: endpoint.hosts.clone(), port: endpoint.port })
}

/// Returns whether two statuses differ in more than their counters. Once a config follows from records,
/// the controller waits for no version of them, and every one of all gateways would be a write.
fn differs(a: &GatewayConfigStatus, b: &GatewayConfigStatus, is_from_records: bool) -> bool {
    let of = |status: &GatewayConfigStatus| {
        let mut status = without_counters(status);
        if let (Some(version), true) = (&mut status.records, is_from_records) {
            version.generation = 0;
        }
        status
    };
    of(a) != of(b)
}

/// Returns whether two statuses differ in more than initiations, which a silent peer gets every second.
fn is_counted(a: &GatewayConfigStatus, b: &GatewayConfigStatus) -> bool {
    *a != GatewayConfigStatus { last_initiation: a.last_initiation.clone(), ..b.clone() }
}

fn without_counters(status: &GatewayConfigStatus) -> GatewayConfigStatus {
    let (received_bytes, transmitted_bytes, last_initiation) = (0, 0, None);
    GatewayConfigStatus { received_bytes, transmitted_bytes, last_initiation, ..status.clone() }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fabric_store::StoreArgs;
    use gateway_health::Fault;
    use tokio::time::timeout;

    use super::*;
    use crate::test_config::config;

    #[tokio::test]
    async fn failed_report_is_tried_again_and_known_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, aside) = (dir.path().join("run"), dir.path().join("aside"));
        let store = Store::open(&StoreArgs::directories(None, run_dir.clone(), None)).unwrap();
        let config = store.put(&config().into()).await.unwrap();
        let name = config.reference();
        let config = GatewayConfig::try_from(config).unwrap();
        let input = Input { config: Some(config.into()), ..Input::default() };
        let standing = Standing { role: Role::Active, ..Standing::default() };
        let senders = (
            watch::Sender::new(input),
            watch::Sender::new(Plane::default()),
            watch::Sender::new(View::start()),
            (watch::Sender::new(None), watch::Sender::new(None)),
            watch::Sender::new(standing),
        );
        let sources = Sources {
            inputs: senders.0.subscribe(),
            planes: senders.1.subscribe(),
            views: senders.2.subscribe(),
            lookups: senders.3.0.subscribe(),
            paths: senders.3.1.subscribe(),
            standings: senders.4.subscribe(),
        };
        let (unreported, mut since) = watch::channel(None);
        let stop = CancellationToken::new();
        let report = Report { store: store.clone(), keep: None, name: name.clone() };
        let reports = tokio::spawn(run(report, sources, unreported, stop.clone()));
        let is_written = async |faults: usize| {
            let status = async || {
                let stored = store.get(&name).await.unwrap().unwrap();
                GatewayConfig::try_from(stored).unwrap().status
            };
            while status().await.is_none_or(|status| status.faults.len() != faults) {
                sleep(RETRY / 10).await;
            }
        };
        timeout(LONGEST_LOOK, is_written(0)).await.expect("there is a status");
        fs::rename(&run_dir, &aside).unwrap();
        fs::write(&run_dir, "in the way").unwrap();
        let (reason, message, remedy) = (Reason::NoAnswer, String::new(), String::new());
        let fault = Fault { reason, message, remedy };
        let fault = TimedFault { fault, since: Timestamp::now() };
        senders.2.send_modify(|view| view.faults.push(fault));
        let known = timeout(LONGEST_LOOK, since.wait_for(Option::is_some)).await;
        known.expect("the fault is unreported").unwrap();
        sleep(RETRY / 2).await;
        assert!(since.borrow().is_some());
        fs::remove_file(&run_dir).unwrap();
        fs::rename(&aside, &run_dir).unwrap();
        timeout(LONGEST_LOOK / 2, is_written(1)).await.expect("tried again");
        timeout(LONGEST_LOOK, since.wait_for(Option::is_none)).await.expect("reported").unwrap();
        stop.cancel();
        reports.await.unwrap().unwrap();
    }

    #[test]
    fn earlier_status_is_kept_until_first_result() {
        let before = GatewayConfigStatus {
            applied_generation: 4,
            peer_endpoint: Some("192.0.2.7:1000".to_owned()),
            ..GatewayConfigStatus::default()
        };
        let status = gateway_status(&before, vec!["p".to_owned()], None, Timestamp::UNIX_EPOCH);
        assert_eq!(status.peer_endpoint.as_deref(), Some("192.0.2.7:1000"));
        assert_eq!((status.applied_generation, status.problems.len()), (4, 1));
        assert!(differs(&before, &status, false));
        let last_initiation = Some("1970-01-01T00:00:09Z".to_owned());
        let initiated = GatewayConfigStatus { last_initiation, ..before.clone() };
        assert!(!is_counted(&before, &initiated), "the peer may be silent for long");
        let counted = GatewayConfigStatus { received_bytes: 9, ..initiated };
        assert!(!differs(&before, &counted, false) && is_counted(&before, &counted));
    }
}
