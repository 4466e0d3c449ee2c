//! The loop: observe changes, compile, publish, send requests to ipam.

mod events;

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use fabric_runtime::{Backoff, Heartbeat, chain, return_unused_memory, until};
use fabric_store::{Event, Kind, Object, Problem, Store, StoreError, Watch};
use futures::stream::{self, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::grants::{Ipam, Round};
use crate::kinds::READ;
use crate::metrics::IpamOutcome;
use crate::publish::{MAX_WRITES, Schedule, Sink, publish};
use crate::stale_connections::StaleConnections;
use crate::vitals::{COMPILED, Vitals};
use fabric_core::{Allocation, IpamRequest, Published, compile, unreadable, unshown_faults};
use fabric_index::placement::{Placements, Plan};
use fabric_index::{Grant, Holders, Index, LaggingNodes, Settings};
use fabric_kube_client::findings::Reader;
use gateway_workloads::Exchange;

/// Backoff after ipam could not be reached.
const IPAM_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
/// Backoff after ipam refused, or the store did not answer.
const RETRY_REFUSED: Duration = Duration::from_secs(5);
/// Maximum wait of acknowledgements that no peering waits for: most lead to nothing else.
const ACKNOWLEDGEMENTS: Duration = Duration::from_secs(1);
/// Minimum time between two returns of unused memory.
const MEMORY_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of resyncs, which find files removed before the watch saw them.
const RESYNC: Duration = Duration::from_secs(30);
/// Maximum rounds of one reconciliation. Published objects lead to more, three times at most; the
/// rest is a reserve.
const MAX_ROUNDS: usize = 16;

pub struct Controller {
    store: Store,
    watch: Watch,
    index: Index,
    ipam: Ipam,
    /// The one round of requests to ipam at a time; files are watched meanwhile.
    round: Option<JoinHandle<Round>>,
    releases: Vec<Grant>,
    /// Grants that could not be written, which are given back with the next round.
    undone: Vec<Grant>,
    /// Requests last sent to ipam.
    requested: Vec<IpamRequest>,
    unreachable: Option<String>,
    /// Time of the next requests after that, whatever else waits.
    ipam_again: Option<Instant>,
    ipam_backoff: Backoff,
    retry: Option<Instant>,
    /// Problems published last; `None` before the first time.
    published_problems: Option<BTreeSet<Problem>>,
    /// Channels to what makes gateways run, in Kubernetes.
    workloads: Option<Exchange>,
    stale_connections: StaleConnections,
    lagging: LaggingNodes,
    schedule: Schedule,
    /// Time of the next compilation if there is news: compiling shall not take more than a third of a core.
    rested: Instant,
    /// Time of the next compilation in any case.
    compile_by: Option<Instant>,
    /// A peering waits for the last acknowledgement of a version.
    awaits_nodes: bool,
    memory_returned: Instant,
    vitals: Vitals,
}

impl Controller {
    /// Must be called within a tokio runtime.
    pub fn new(store: Store, ipam: Ipam, settings: Settings) -> Result<Self, StoreError> {
        let watch = store.watch(&READ)?.remembering();
        Ok(Self {
            store,
            watch,
            index: Index::new(settings),
            ipam,
            round: None,
            releases: Vec::new(),
            undone: Vec::new(),
            requested: Vec::new(),
            unreachable: None,
            ipam_again: None,
            ipam_backoff: IPAM_BACKOFF,
            retry: None,
            published_problems: None,
            workloads: None,
            stale_connections: StaleConnections::default(),
            lagging: LaggingNodes::default(),
            schedule: Schedule::default(),
            rested: Instant::now(),
            compile_by: None,
            awaits_nodes: false,
            memory_returned: Instant::now(),
            vitals: Vitals::default(),
        })
    }

    pub fn with(self, workloads: Exchange) -> Self {
        Self { workloads: Some(workloads), ..self }
    }

    /// Reports to these from now on; not ready until it has compiled.
    pub fn reporting_to(self, vitals: Vitals) -> Self {
        vitals.readiness.missing(COMPILED, "nothing is compiled yet");
        Self { vitals, ..self }
    }

    /// Runs until `stop` is ready. Nothing but that ends it.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        tokio::select! {
            () = &mut stop => return,
            () = self.start() => {}
        }
        let mut resync = tokio::time::interval_at(Instant::now() + RESYNC, RESYNC);
        let mut beats = tokio::time::interval(Heartbeat::INTERVAL);
        let mut is_dirty = true;
        loop {
            // A store that does not answer must not delay the end.
            if is_dirty && Instant::now() >= self.rested {
                tokio::select! {
                    () = &mut stop => return,
                    () = self.settle() => is_dirty = false,
                }
                self.return_memory();
            }
            self.vitals.heartbeat.beat();
            let lag_check = self.next_lag_check();
            is_dirty |= tokio::select! {
                () = &mut stop => return,
                event = self.watch.next() => self.absorb_all(event).await,
                _ = beats.tick() => false,
                () = until(Some(self.rested)), if is_dirty => true,
                _ = resync.tick() => {
                    self.resync().await;
                    true
                }
                placements = news(&mut self.workloads) => {
                    self.index.place(placements);
                    true
                }
                round = finished(&mut self.round) => {
                    self.conclude(round).await;
                    true
                }
                () = until(self.retry) => {
                    self.retry = None;
                    self.requested.clear();
                    true
                }
                () = until(self.ipam_again) => {
                    self.ipam_again = None;
                    self.requested.clear();
                    true
                }
                () = until(self.stale_connections.next_check()), if !is_dirty => true,
                () = until(lag_check), if !is_dirty => true,
                () = until(self.compile_by), if !is_dirty => true,
                () = until(self.schedule.pacing.due()), if !is_dirty => true,
            };
        }
    }

    async fn start(&mut self) {
        self.read().await;
        // Objects removed while no controller ran; ipam has released theirs by itself.
        match self.store.orphaned_statuses().await {
            Ok(orphans) => {
                for orphan in &orphans {
                    self.forget_status(orphan).await;
                }
            }
            Err(error) => tracing::warn!(error = %error, "cannot look for statuses left behind"),
        }
    }

    /// Reads all that is there, and reports why it cannot.
    async fn read(&mut self) {
        let mut obstacles = self.vitals.findings.changes();
        let mut beats = tokio::time::interval(Heartbeat::INTERVAL);
        let mut synced = false;
        loop {
            tokio::select! {
                event = self.watch.next(), if !synced => match event {
                    Event::Synced => {
                        synced = true;
                        self.report_nodes();
                    }
                    Event::Problems(problems) => {
                        self.report_obstacles(&problems);
                        self.index.apply(Event::Problems(problems));
                    }
                    event @ (Event::Applied(_) | Event::Deleted(_)) => drop(self.index.apply(event)),
                },
                // Gateways that run shall not be taken for new ones.
                placements = news(&mut self.workloads), if synced => {
                    self.index.place(placements);
                    return;
                }
                Ok(()) = obstacles.changed() => self.mark_unreadable().await,
                // Objects that are listed later want the condition, too.
                _ = beats.tick() => {
                    self.vitals.heartbeat.beat();
                    self.mark_unreadable().await;
                }
            }
            if synced && self.workloads.is_none() {
                return;
            }
        }
    }

    /// Obstacles are what is wrong with no object, but with all of a kind.
    fn report_obstacles(&self, problems: &[Problem]) {
        let of_kinds = problems.iter().filter(|p| p.object.is_none() && p.source.is_empty());
        self.vitals.findings.set(Reader::Store, of_kinds.cloned().collect());
    }

    /// Writes into conditions why nothing is compiled; the first compilation corrects them.
    async fn mark_unreadable(&mut self) {
        let Some(why) = self.vitals.findings.text() else { return };
        self.vitals.readiness.missing(COMPILED, why.as_str());
        for object in unreadable(&self.index, &why, Timestamp::now()) {
            let reference = object.reference();
            if self.index.get(&reference) == Some(&object) {
                continue;
            }
            match self.store.put_status(&object).await {
                Ok(_) => drop(self.index.apply(Event::Applied(object))),
                Err(error) if error.is_unreachable() => return,
                Err(error) => tracing::debug!(object = %reference, %error, "no condition"),
            }
            self.vitals.heartbeat.beat();
        }
    }

    /// Watches the user's key pairs that lack the label which distinguishes Secrets from all
    /// others. Returns false if the store did not answer.
    async fn watch_unlabelled_secrets(&mut self) -> bool {
        let named = self.index.unlabelled_secrets();
        if !self.watch.name(&named) {
            return true;
        }
        for secret in named {
            if self.index.get(&secret).is_some() {
                continue;
            }
            match self.store.get(&secret).await {
                Ok(Some(object)) => drop(self.index.apply(Event::Applied(object))),
                Ok(None) => {}
                Err(error) if error.is_unreachable() => return false,
                Err(error) => {
                    tracing::warn!(%secret, %error, "cannot read it; waiting for its watch")
                }
            }
        }
        true
    }

    /// Compiles and publishes until nothing changes, then requests from ipam what is missing.
    async fn settle(&mut self) {
        let mut is_done = self.watch_unlabelled_secrets().await;
        if self.workloads.is_some() {
            is_done &= self.stale_connections.reconcile(&self.store, &mut self.index).await;
        }
        self.retry_at((!is_done).then(|| Instant::now() + RETRY_REFUSED));
        let mut wanted = Published::default();
        for _ in 0..MAX_ROUNDS {
            self.lagging.observe(&mut self.index, Instant::now().into_std());
            // Compiled objects are most of the memory: those of the round before are freed first.
            drop(std::mem::take(&mut wanted));
            wanted = self.compile();
            if self.workloads.as_ref().is_some_and(|workloads| *workloads.liqo_ends.borrow()) {
                let is_deleted = |kind| matches!(kind, Kind::Network | Kind::Ip);
                wanted.objects.retain(|reference, _| !is_deleted(reference.kind));
            }
            // Gateways start while their configs are written.
            self.instruct(&wanted, None);
            let (index, schedule) = (&mut self.index, &mut self.schedule);
            let sink = Sink { store: &self.store, heartbeat: &self.vitals.heartbeat };
            let outcome = publish(sink, index, schedule, &mut wanted).await;
            self.releases.extend(outcome.lost);
            wanted.problems.extend(outcome.problems);
            let now = Instant::now();
            self.retry_at(outcome.unreachable.then(|| now + RETRY_REFUSED));
            self.retry_at(self.schedule.refusals.next_try());
            let configured = outcome.configured.then(|| now + ACKNOWLEDGEMENTS);
            let due = configured.into_iter().chain(self.schedule.statuses.due());
            self.compile_by = self.compile_by.into_iter().chain(due).min();
            if !outcome.changed {
                break;
            }
        }
        self.report_nodes();
        let problems = self.with_uids(&wanted.problems);
        self.instruct(&wanted, Some(problems));
        self.vitals.findings.set_faults(unshown_faults(&wanted.statuses, &wanted.problems));
        let needs_ipam = !wanted.ipam_requests.is_empty()
            || !self.releases.is_empty()
            || !self.undone.is_empty();
        if !needs_ipam && self.round.is_none() {
            self.unreachable = None;
        }
        self.publish_problems(wanted.problems).await;
        self.request_grants(wanted.ipam_requests);
    }

    /// Compilations leave most of the heap unused.
    fn return_memory(&mut self) {
        let now = Instant::now();
        if now >= self.memory_returned + MEMORY_INTERVAL {
            self.memory_returned = now;
            return_unused_memory();
        }
    }

    fn compile(&mut self) -> Published {
        let began = Instant::now();
        let wanted = compile(&self.index, Timestamp::now());
        let took = began.elapsed();
        self.rested = Instant::now() + 2 * took;
        (self.compile_by, self.awaits_nodes) = (None, wanted.awaits_nodes);
        self.vitals.metrics.compiled(took);
        self.vitals.readiness.fulfilled(COMPILED);
        wanted
    }

    /// Time at which a node that has not applied its config begins to lag.
    fn next_lag_check(&self) -> Option<Instant> {
        self.lagging.next_check().map(Instant::from_std)
    }

    fn retry_at(&mut self, at: Option<Instant>) {
        self.retry = self.retry.into_iter().chain(at).min();
    }

    fn with_uids(&self, problems: &[Problem]) -> BTreeMap<Problem, String> {
        let known = problems.iter().filter_map(|problem| {
            let object = self.index.get(problem.object.as_ref()?)?;
            Some((problem.clone(), object.uid().to_owned()))
        });
        known.collect()
    }

    /// Publishes the nodes for what is placed on them.
    fn report_nodes(&self) {
        let Some(workloads) = &self.workloads else { return };
        let nodes = || self.index.all::<Node>(Kind::Node);
        workloads.nodes.send_if_modified(|before| {
            let known = before.iter().flat_map(|known| known.values());
            if before.is_some() && known.eq(nodes().map(|(_, node)| node)) {
                return false;
            }
            let named = nodes().map(|(reference, node)| (reference.name.clone(), node.clone()));
            *before = Some(Arc::new(named.collect()));
            true
        });
    }

    /// Publishes the plan for everything outside of the store; without problems, those that are published
    /// stay.
    fn instruct(&self, wanted: &Published, problems: Option<BTreeMap<Problem, String>>) {
        let Some(workloads) = &self.workloads else { return };
        workloads.plan.send_if_modified(|before| {
            let known = || before.as_ref().map(|plan| plan.problems.clone()).unwrap_or_default();
            let plan = Plan {
                whole: self.index.is_whole(),
                gateways: wanted.gateways.clone(),
                services: wanted.services.clone(),
                secrets: wanted.secrets.clone(),
                problems: problems.unwrap_or_else(known),
                peers: wanted.peers.clone(),
            };
            let news = before.as_ref() != Some(&plan);
            *before = Some(plan);
            news
        });
    }

    fn request_grants(&mut self, ipam_requests: Vec<IpamRequest>) {
        // A prefix that a Network has passed on to another is not free.
        let index = &self.index;
        self.releases.retain(|grant| !index.holds(*grant));
        self.undone.retain(|grant| !index.holds(*grant));
        let news = !self.releases.is_empty()
            || (!ipam_requests.is_empty() && ipam_requests != self.requested);
        if self.round.is_some() || self.ipam_again.is_some() || !news {
            return;
        }
        self.requested.clone_from(&ipam_requests);
        let mut releases = std::mem::take(&mut self.releases);
        releases.append(&mut self.undone);
        self.round = Some(tokio::spawn(self.ipam.clone().round(releases, ipam_requests)));
    }

    async fn conclude(&mut self, round: Result<Round, JoinError>) {
        self.round = None;
        let round = round.unwrap_or_else(|error| Round {
            unreachable: Some(error.to_string()),
            ..Round::default()
        });
        let metrics = &self.vitals.metrics;
        metrics.count_ipam(IpamOutcome::Granted, round.granted.len());
        metrics.count_ipam(IpamOutcome::Refused, round.denied.len());
        metrics.count_ipam(IpamOutcome::Unanswered, round.unreachable.iter().count());
        let has_forgotten = self.take_all(round.granted).await;
        for (ipam_request, reason) in round.denied {
            self.index.deny(ipam_request.object, reason);
            self.retry_at(Some(Instant::now() + RETRY_REFUSED));
        }
        self.releases.splice(..0, round.unreleased);
        self.ipam_again = match &round.unreachable {
            Some(reason) => {
                tracing::debug!(reason, "ipam cannot be reached");
                Some(Instant::now() + self.ipam_backoff.failed())
            }
            None => {
                self.ipam_backoff.reset();
                has_forgotten.then(Instant::now)
            }
        };
        self.unreachable = round.unreachable;
    }

    /// Writes grants into the statuses of the objects they are for, or gives them back. Returns true for an ipam that
    /// has lost what it granted before, and grants it again: that stays taken there, and the next request gets another.
    async fn take_all(&mut self, granted: Vec<(IpamRequest, Grant)>) -> bool {
        let store = self.store.clone();
        let (mut writes, mut has_forgotten) = (Vec::new(), false);
        let holders = Holders::of(&self.index);
        for (ipam_request, grant) in granted {
            let object = self.index.get(&ipam_request.object);
            let Some(mut object) = object.filter(|o| o.uid() == ipam_request.uid).cloned() else {
                self.releases.push(grant);
                continue;
            };
            let is_fixed =
                matches!(ipam_request.allocation, Allocation::Network { immutable: true, .. });
            let holder = holders.other(&object, grant).filter(|_| !is_fixed);
            if let Some(holder) = holder {
                let object = &ipam_request.object;
                tracing::warn!(%object, ?grant, %holder, "ipam has granted what another has; asking again");
                has_forgotten = true;
                continue;
            }
            let before = Grant::of(&object);
            grant.write_to(&mut object);
            let store = &store;
            writes.push(async move {
                (store.put_status(&object).await.map(drop), object, (before, grant))
            });
        }
        let mut written = stream::iter(writes).buffer_unordered(MAX_WRITES);
        while let Some((result, object, grants)) = written.next().await {
            self.take(result, object, grants);
            self.vitals.heartbeat.beat();
        }
        has_forgotten
    }

    /// Gives back what the object had before, or what could not be written into it.
    fn take(
        &mut self,
        written: Result<(), StoreError>,
        object: Object,
        (before, grant): (Option<Grant>, Grant),
    ) {
        let reference = object.reference();
        match written {
            Ok(()) => {
                self.releases.extend(before);
                tracing::info!(object = %reference, ?grant, "granted");
                self.index.granted(&reference);
                self.index.apply(Event::Applied(object));
            }
            Err(error) => {
                self.index.deny(reference, format!("granted, but {}", chain(&error)));
                self.undone.push(grant);
                self.retry_at(Some(Instant::now() + RETRY_REFUSED));
            }
        }
    }

    /// Publishes what is wrong, with file and line where they are known.
    async fn publish_problems(&mut self, mut problems: Vec<Problem>) {
        if let Some(reason) = &self.unreachable {
            problems.push(Problem {
                source: String::new(),
                object: None,
                field: None,
                message: format!("ipam cannot be reached, what is published stays: {reason}"),
            });
        }
        self.report_obstacles(&problems);
        for problem in &mut problems {
            if let (true, Some(object)) = (problem.source.is_empty(), &problem.object) {
                let field = problem.field.as_deref().unwrap_or_default();
                problem.source = self.watch.locate(object, field).unwrap_or_default();
            }
        }
        let now: BTreeSet<Problem> = problems.into_iter().collect();
        self.vitals.metrics.set_problems(now.len());
        let before = self.published_problems.replace(now.clone());
        if before.as_ref() == Some(&now) {
            return;
        }
        let before = before.unwrap_or_default();
        for problem in now.difference(&before) {
            tracing::warn!("{problem}");
        }
        for problem in before.difference(&now) {
            tracing::info!(%problem, "solved");
        }
        let list: Vec<_> = now.into_iter().collect();
        if let Err(error) = self.store.put_problems(&list).await {
            tracing::warn!(error = %error, "cannot publish what is wrong");
        }
    }
}

/// Placements of the gateways, whenever they have changed.
async fn news(workloads: &mut Option<Exchange>) -> Placements {
    let Some(workloads) = workloads else { return pending().await };
    loop {
        if workloads.placements.changed().await.is_err() {
            return pending().await;
        }
        if let Some(placements) = workloads.placements.borrow_and_update().clone() {
            return placements;
        }
    }
}

async fn finished(round: &mut Option<JoinHandle<Round>>) -> Result<Round, JoinError> {
    match round {
        Some(round) => round.await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests;
