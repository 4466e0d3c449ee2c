//! Liqo's ForeignClusters: one for each peer, with the state of the networking with it. Where their
//! definition is not installed, there are none.
//!
//! Liqo's own controller, if it runs beside, makes them as well, and clears the part about networking
//! whenever it writes. The webhook puts that back; while no replica of it answers, it is written again
//! here.

mod module;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::{ClusterId, labels, liqo_core};
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer, StoreMetrics};
use fabric_runtime::{Heartbeat, until};
use futures::stream::{self, StreamExt as _};
use jiff::Timestamp;
use kube::api::{DeleteParams, DynamicObject, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::live::{Key, Live, Watched};
use super::writer::{MANAGER, MAX_WRITES};
use fabric_index::placement::{Peers, Plan};
pub(super) use module::peer_of;
use module::{Step, step};

/// Time to collect changes, and more of it for each write of the round before: a new peering makes several, and
/// each node's acknowledgement is more urgent.
const COLLECT: Duration = Duration::from_millis(200);
const COLLECT_MORE: Duration = Duration::from_millis(40);
/// Minimum time between two equal writes, if the first is undone.
const PACE: Duration = Duration::from_secs(1);
/// Retry interval after something was refused.
const RETRY: Duration = Duration::from_secs(5);

pub(super) struct ForeignClusters {
    requests: Requests,
    live: Live,
    written: BTreeMap<String, Written>,
    /// Reason why something was refused, by its step and name.
    refused: BTreeMap<Try, String>,
    /// Number of writes of the last round.
    writes: u32,
    due: Option<Instant>,
}

type Try = (&'static str, String);

/// Content written last.
struct Written {
    modules: Value,
    at: Instant,
}

impl ForeignClusters {
    /// Must be called within a tokio runtime; nothing is sent yet.
    pub(super) fn new(client: Client, metrics: &StoreMetrics) -> Self {
        let live = Live::watch(&client, metrics, &[Watched::ForeignCluster]);
        let requests = Requests::new(client, MANAGER);
        Self {
            requests,
            live,
            written: BTreeMap::new(),
            refused: BTreeMap::new(),
            writes: 0,
            due: None,
        }
    }

    /// Waits for something to happen; true if anything is different now. Cancel safe.
    pub(super) async fn next(&mut self) -> bool {
        self.live.next().await
    }

    /// Time of the next check, if nothing happens before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Runs until the controller is gone.
    pub(super) async fn run(
        mut self,
        mut plan: watch::Receiver<Option<Plan>>,
        heartbeat: &Heartbeat,
    ) {
        while heartbeat.while_waiting(self.changed(&mut plan)).await {
            let now = plan.borrow_and_update().clone();
            if let Some(now) = now {
                self.reconcile(&now, heartbeat).await;
            }
        }
    }

    /// Waits until there is something to do, and a moment more for other changes; false if the
    /// controller is gone.
    async fn changed(&mut self, plan: &mut watch::Receiver<Option<Plan>>) -> bool {
        let due = self.due;
        loop {
            tokio::select! {
                news = self.live.next() => if news { break },
                changed = plan.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return false,
                },
                () = until(due) => break,
            }
        }
        sleep(COLLECT + COLLECT_MORE * self.writes).await;
        true
    }

    /// Makes, changes and removes ForeignClusters. Failures are retried.
    pub(super) async fn reconcile(&mut self, plan: &Plan, heartbeat: &Heartbeat) {
        (self.due, self.writes) = (None, 0);
        if !self.live.is_whole() {
            return;
        }
        let result = self.make(&plan.peers, heartbeat).await;
        let result = if result.is_ok() { self.write(plan, heartbeat).await } else { result };
        if let Err(error) = result {
            tracing::debug!(%error, "ForeignClusters are not as they should be");
            self.due_in(RETRY);
        }
    }

    /// True while their definition is not installed.
    pub(super) fn are_undefined(&self) -> bool {
        self.live.is_missing(Watched::ForeignCluster)
    }

    /// True if all of them are as they were last written.
    pub(super) fn is_settled(&self) -> bool {
        self.live.is_whole() && self.due.is_none()
    }

    /// One for each peer that has none.
    async fn make(&mut self, peers: &Peers, heartbeat: &Heartbeat) -> Result<(), ApiError> {
        let all = self.live.objects().all(Watched::ForeignCluster);
        let there: BTreeSet<String> = all.map(|(_, object)| peer_of(object)).collect();
        let missing = peers.keys().filter(|peer| !there.contains(peer.as_str()));
        let requests = &self.requests.clone();
        let made = missing.map(|peer| async move {
            (peer, requests.create(&target(peer.as_str()), &new(peer)).await)
        });
        let mut made = stream::iter(made.collect::<Vec<_>>()).buffer_unordered(MAX_WRITES);
        while let Some((peer, made)) = made.next().await {
            heartbeat.beat();
            self.writes += 1;
            let made = made.map(|object| {
                tracing::info!(%peer, "made a ForeignCluster");
                self.live.objects_mut().put(Watched::ForeignCluster, object);
            });
            self.tolerate(("make", peer.to_string()), made)?;
        }
        Ok(())
    }

    /// Writes the peer's state into each; removes those that weft made and no peer needs.
    async fn write(&mut self, plan: &Plan, heartbeat: &Heartbeat) -> Result<(), ApiError> {
        let all = self.live.objects().all(Watched::ForeignCluster);
        let all = all.filter(|(_, object)| object.metadata.deletion_timestamp.is_none());
        let now = Timestamp::now();
        let steps = all.filter_map(|(_, object)| Some((object.clone(), step(object, plan, now)?)));
        let mut steps: Vec<_> = steps.collect();
        steps.retain(|(object, step)| !self.is_early(object, step));
        let requests = &self.requests.clone();
        let runs = steps.into_iter().map(|(object, step)| async move {
            let answer = change(requests, &object, &step).await;
            (object, step, answer)
        });
        let mut runs = stream::iter(runs.collect::<Vec<_>>()).buffer_unordered(MAX_WRITES);
        while let Some((object, step, answer)) = runs.next().await {
            heartbeat.beat();
            self.writes += 1;
            let verb = if step == Step::Remove { "remove" } else { "change" };
            let name = object.name_any();
            let changed = answer.map(|written| self.changed_by(&object, step, written));
            self.tolerate((verb, name), changed)?;
        }
        Ok(())
    }

    /// Records a refused write, which does not delay the others.
    fn tolerate(&mut self, what: Try, result: Result<(), ApiError>) -> Result<(), ApiError> {
        let Err(ApiError::Refused { message, .. }) = result else {
            self.refused.remove(&what);
            return result;
        };
        self.due_in(RETRY);
        if self.refused.get(&what) != Some(&message) {
            let (verb, name) = &what;
            tracing::warn!(name, reason = message, "cannot {verb} a ForeignCluster; tried again");
            self.refused.insert(what, message);
        }
        Ok(())
    }

    /// True if the same was written a moment ago and is undone.
    fn is_early(&mut self, object: &DynamicObject, step: &Step) -> bool {
        let last = self.written.get(&object.name_any());
        let is_early = last.is_some_and(|last| {
            matches!(step, Step::Write(modules) if *modules == last.modules)
                && last.at.elapsed() < PACE
        });
        if is_early {
            self.due_in(PACE);
        }
        is_early
    }

    fn changed_by(&mut self, object: &DynamicObject, step: Step, written: Option<DynamicObject>) {
        let name = object.name_any();
        match (step, written) {
            (Step::Remove, _) => {
                tracing::info!(name, "removed a ForeignCluster");
                self.live.forget(&Key::of(Watched::ForeignCluster, object));
                self.written.remove(&name);
            }
            (Step::Write(modules), Some(written)) => {
                tracing::debug!(name, "ForeignCluster status written");
                self.live.objects_mut().put(Watched::ForeignCluster, written);
                self.written.insert(name, Written { modules, at: Instant::now() });
            }
            (Step::Write(_), None) => self.due_in(PACE),
        }
    }

    fn due_in(&mut self, wait: Duration) {
        let at = Instant::now() + wait;
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}

/// Removes the ForeignClusters that weft made, and weft's part of the others.
pub async fn clear(server: &ApiServer) {
    let mut clusters = ForeignClusters::new(server.client.clone(), &server.metrics);
    let no_peers = Plan { whole: true, ..Plan::default() };
    while !clusters.is_settled() && !clusters.are_undefined() {
        let due = clusters.due();
        tokio::select! {
            _ = clusters.next() => {}
            () = until(due) => {}
        }
        clusters.reconcile(&no_peers, &Heartbeat::default()).await;
    }
}

/// Returns the object as it was written; none if it was removed, or another has changed it meanwhile.
async fn change(
    requests: &Requests,
    object: &DynamicObject,
    step: &Step,
) -> Result<Option<DynamicObject>, ApiError> {
    let (target, version) = (target(&object.name_any()), object.resource_version());
    let Step::Write(modules) = step else {
        let preconditions =
            Some(Preconditions { resource_version: version, ..Preconditions::default() });
        let how = DeleteParams { preconditions, ..DeleteParams::default() };
        return requests.delete(&target, object.uid(), how).await.map(|_| None);
    };
    // Only this version is changed: a module that others have enabled meanwhile must stay so.
    let patch = json!({"metadata": {"resourceVersion": version}, "status": {"modules": modules}});
    match requests.merge(&target, Part::Status, &patch).await {
        Err(ApiError::Refused { code: 409, .. }) => Ok(None),
        written => written.map(Some),
    }
}

fn target(name: &str) -> Target {
    Target::new(Watched::ForeignCluster.resource(), (String::new(), name.to_owned()))
}

/// New ForeignCluster as Liqo's own controller makes it, but for the label of its maker.
fn new(peer: &ClusterId) -> liqo_core::ForeignCluster {
    let spec = liqo_core::ForeignClusterSpec { cluster_id: peer.to_string() };
    let mut object = liqo_core::ForeignCluster::new(peer.as_str(), spec);
    object.metadata.labels = Some(
        [(labels::REMOTE_CLUSTER_ID, peer.as_str()), (labels::MANAGED_BY, labels::WEFT)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    );
    object
}

#[cfg(test)]
mod tests {
    use fabric_index::placement::Peer;

    use super::*;
    use crate::slow_server::slow_server;

    #[tokio::test(start_paused = true)]
    async fn changes_are_collected_longer_after_many_writes() {
        let server = slow_server();
        let mut clusters = ForeignClusters::new(server.client, &server.metrics);
        clusters.writes = 20;
        let (plans, mut plan) = watch::channel(Some(Plan::default()));
        let began = Instant::now();
        let published = async {
            for _ in 0..10 {
                plans.send_replace(Some(Plan::default()));
                sleep(Duration::from_millis(90)).await;
            }
        };
        let (is_there, ()) = tokio::join!(clusters.changed(&mut plan), published);
        plan.borrow_and_update();
        assert!(is_there && !plan.has_changed().unwrap(), "all of them are seen");
        assert_eq!(began.elapsed(), COLLECT + COLLECT_MORE * 20);
    }

    #[tokio::test(start_paused = true)]
    async fn foreign_clusters_are_written_side_by_side() {
        let server = slow_server();
        let mut clusters = ForeignClusters::new(server.client, &server.metrics);
        while !clusters.live.is_whole() {
            clusters.next().await;
        }
        let peer = |n: usize| format!("peer-{n}").parse().unwrap();
        let peers = (0..10).map(|n| (peer(n), Peer { enabled: true, conditions: Vec::new() }));
        let plan = Plan { whole: true, peers: peers.collect(), ..Plan::default() };
        let began = Instant::now();
        clusters.reconcile(&plan, &Heartbeat::default()).await;
        assert_eq!(began.elapsed().as_secs(), 2, "all are made, then all are written");
        assert!(clusters.is_settled());
    }
}
