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
use fabric_kube_client::{ApiError, StoreMetrics};
use fabric_runtime::Heartbeat;
use jiff::Timestamp;
use kube::api::{DeleteParams, DynamicObject, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::live::{Key, Live, Watched};
use super::writer::MANAGER;
use fabric_index::placement::{Peers, Plan};
use module::{Step, peer_of, step};

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
        Self { requests, live, written: BTreeMap::new(), refused: BTreeMap::new(), due: None }
    }

    /// Waits for something to happen; true if anything is different now. Cancel safe.
    pub(super) async fn next(&mut self) -> bool {
        self.live.next().await
    }

    /// Time of the next check, if nothing happens before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Makes, changes and removes ForeignClusters. Failures are retried.
    pub(super) async fn reconcile(&mut self, plan: &Plan, heartbeat: &Heartbeat) {
        self.due = None;
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
        for peer in peers.keys().filter(|peer| !there.contains(peer.as_str())) {
            heartbeat.beat();
            let made = self.make_one(peer).await;
            self.tolerate(("make", peer.to_string()), made)?;
        }
        Ok(())
    }

    async fn make_one(&mut self, peer: &ClusterId) -> Result<(), ApiError> {
        let made = self.requests.create(&target(peer.as_str()), &new(peer)).await?;
        tracing::info!(%peer, "made a ForeignCluster");
        self.live.objects_mut().put(Watched::ForeignCluster, made);
        Ok(())
    }

    /// Writes the peer's state into each; removes those that weft made and no peer needs.
    async fn write(&mut self, plan: &Plan, heartbeat: &Heartbeat) -> Result<(), ApiError> {
        let all = self.live.objects().all(Watched::ForeignCluster);
        let all: Vec<DynamicObject> = all.map(|(_, object)| object.clone()).collect();
        for object in all.iter().filter(|object| object.metadata.deletion_timestamp.is_none()) {
            heartbeat.beat();
            let name = object.name_any();
            match step(object, plan, Timestamp::now()) {
                Some(Step::Remove) => {
                    let removed = self.remove(object).await;
                    self.tolerate(("remove", name), removed)?;
                }
                Some(Step::Write(modules)) => {
                    let written = self.write_status(object, modules).await;
                    self.tolerate(("change", name), written)?;
                }
                None => {}
            }
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

    async fn write_status(
        &mut self,
        object: &DynamicObject,
        modules: Value,
    ) -> Result<(), ApiError> {
        let name = &object.name_any();
        if let Some(last) = self.written.get(name)
            && last.modules == modules
            && last.at.elapsed() < PACE
        {
            self.due_in(PACE);
            return Ok(());
        }
        // Only this version is changed: a module that others have enabled meanwhile must stay so.
        let version = &object.metadata.resource_version;
        let patch =
            json!({"metadata": {"resourceVersion": version}, "status": {"modules": modules}});
        let written = match self.requests.merge(&target(name), Part::Status, &patch).await {
            Err(ApiError::Refused { code: 409, .. }) => {
                self.due_in(PACE);
                return Ok(());
            }
            written => written?,
        };
        tracing::debug!(name, "ForeignCluster status written");
        self.live.objects_mut().put(Watched::ForeignCluster, written);
        self.written.insert(name.to_owned(), Written { modules, at: Instant::now() });
        Ok(())
    }

    async fn remove(&mut self, object: &DynamicObject) -> Result<(), ApiError> {
        let name = object.name_any();
        let preconditions = Preconditions {
            resource_version: object.metadata.resource_version.clone(),
            ..Preconditions::default()
        };
        let how = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let uid = object.metadata.uid.clone();
        if self.requests.delete(&target(&name), uid, how).await? {
            tracing::info!(name, "removed a ForeignCluster");
        }
        self.live.forget(&Key::of(Watched::ForeignCluster, object));
        self.written.remove(&name);
        Ok(())
    }

    fn due_in(&mut self, wait: Duration) {
        let at = Instant::now() + wait;
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
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
