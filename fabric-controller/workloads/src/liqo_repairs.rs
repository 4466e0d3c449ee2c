//! Repairs of what Liqo's other modules have stored while a ForeignCluster had networking off, such as
//! when neither webhook nor controller ran: they map no addresses then, and do not look again.
//!
//! A ShadowEndpointSlice with an unmapped EndpointSlice is annotated, upon which Liqo writes that anew.
//! Pods of a virtual kubelet that maps no addresses are deleted: Liqo reverts any change of their
//! Deployment.

mod unmapped;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_kube_client::ApiError;
use fabric_kube_client::Emitter;
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_runtime::{Backoff, Heartbeat, chain};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::api::DeleteParams;
use serde_json::json;
use tokio::time::Instant;

use super::live::{Key, Objects};
use super::writer::MANAGER;
use unmapped::{Repair, Unmapped, unmapped};

/// Time for which Liqo's controllers may be about to repair it by themselves.
const SETTLE: Duration = Duration::from_secs(3);
/// Time between two repairs of one object, which doubles up to its maximum.
const PACE: Duration = Duration::from_secs(60);
const PACE_MAX: Duration = Duration::from_secs(600);
/// Time until something that was not repaired yet is looked at again.
const CHECK: Duration = Duration::from_secs(1);
/// Maximum number of repairs per check, and of lines in `weft status`.
const BURST: usize = 10;
/// Annotation of a ShadowEndpointSlice. The cluster that reflects it removes it with its next write.
const REPAIRED_AT: &str = "fabric.weft.dev/repaired-at";

pub(super) struct LiqoRepairs {
    requests: Requests,
    emitter: Emitter,
    known: BTreeMap<Key, Known>,
    due: Option<Instant>,
}

/// Object that has stored unmapped addresses, or did within the last [`PACE`].
struct Known {
    /// Start of the time for which it has been so; absent if it is repaired.
    since: Option<Instant>,
    note: Option<String>,
    next: Instant,
    backoff: Backoff,
    refusal: Option<String>,
}

impl LiqoRepairs {
    pub(super) fn new(client: Client, identity: &str) -> Self {
        let emitter = Emitter::new(client.clone(), [MANAGER, identity], "Repair");
        let requests = Requests::new(client, MANAGER);
        Self { requests, emitter, known: BTreeMap::new(), due: None }
    }

    /// Time of the next check, if nothing happens before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// One line for each object that is being repaired, or was within the last minute.
    pub(super) fn notes(&self) -> BTreeSet<String> {
        self.known.values().filter_map(|known| known.note.clone()).take(BURST).collect()
    }

    /// Liqo is gone, or has its own networking.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.due = None;
    }

    /// Reports and repairs what is wrong, each object at most once a minute.
    pub(super) async fn reconcile(&mut self, objects: &Objects, heartbeat: &Heartbeat) {
        let found = unmapped(objects, Timestamp::now());
        for (key, unmapped) in self.take_due(&found, Instant::now()).into_iter().take(BURST) {
            heartbeat.beat();
            self.report(key, unmapped).await;
            if let Some(repair) = &unmapped.repair {
                let answer = self.repair(key, repair).await;
                self.repaired(key, answer);
            }
        }
        let next = self.known.values().map(|known| known.next).min();
        let check = (!found.is_empty()).then(|| Instant::now() + CHECK);
        self.due = check.or(next);
    }

    /// Objects whose repair, or first report, is due.
    fn take_due<'a>(
        &mut self,
        found: &'a BTreeMap<Key, Unmapped>,
        now: Instant,
    ) -> Vec<(&'a Key, &'a Unmapped)> {
        self.known.retain(|key, known| {
            let is_there = found.contains_key(key);
            known.since = known.since.filter(|_| is_there);
            is_there || known.note.is_some() && known.next > now
        });
        let mut due = Vec::new();
        for (key, unmapped) in found {
            let known = self.known.entry(key.clone()).or_insert_with(|| Known::new(now));
            let has_settled = *known.since.get_or_insert(now) + SETTLE <= now;
            let is_new = known.note.is_none() || unmapped.repair.is_some();
            if has_settled && is_new && known.next <= now {
                due.push((key, unmapped));
            }
        }
        due
    }

    async fn report(&mut self, key: &Key, unmapped: &Unmapped) {
        let Some(known) = self.known.get_mut(key) else { return };
        let (note, resource) = (unmapped.to_string(), key.of.resource());
        let object = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            namespace: Some(key.namespace.clone()),
            name: Some(unmapped.object.0.clone()),
            uid: Some(unmapped.object.1.clone()),
            ..ObjectReference::default()
        };
        let count = i32::try_from(known.backoff.failures()).unwrap_or(i32::MAX).saturating_add(1);
        let name = &unmapped.object.0;
        tracing::warn!(namespace = key.namespace, name, "{note}");
        self.emitter.warn(object, "Unmapped", note.clone(), count).await;
        let (kind, namespace) = (key.of.resource().kind, &key.namespace);
        known.note = Some(format!("{kind} {namespace}/{name}: {note}"));
    }

    async fn repair(&self, key: &Key, repair: &Repair) -> Result<(), ApiError> {
        match repair {
            Repair::Annotate { uid } => {
                let resource = key.of.resource();
                let annotations = json!({REPAIRED_AT: Timestamp::now().to_string()});
                let object = json!({
                    "apiVersion": resource.api_version,
                    "kind": resource.kind,
                    "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid,
                        "annotations": annotations},
                });
                let target = key.target();
                self.requests.apply(&target, Part::AllButStatus, &object).await.map(drop)
            }
            Repair::Delete { pods } => {
                for (name, uid) in pods {
                    let name = (key.namespace.clone(), name.clone());
                    let target = Target::new(key.of.resource(), name);
                    let how = DeleteParams::default();
                    self.requests.delete(&target, Some(uid.clone()), how).await?;
                }
                Ok(())
            }
        }
    }

    fn repaired(&mut self, key: &Key, answer: Result<(), ApiError>) {
        let Some(known) = self.known.get_mut(key) else { return };
        known.next = Instant::now() + known.backoff.failed();
        match answer {
            Ok(()) => known.refusal = None,
            Err(ApiError::Refused { message, .. }) => {
                if known.refusal.as_ref() != Some(&message) {
                    tracing::warn!(%key, reason = message, "cannot be repaired; tried again");
                }
                known.note = known.note.take().map(|note| format!("{note}; refused: {message}"));
                known.refusal = Some(message);
            }
            Err(error) => tracing::debug!(%key, error = chain(&error), "not repaired; tried again"),
        }
    }
}

impl Known {
    fn new(now: Instant) -> Self {
        let backoff = Backoff::new(PACE, PACE_MAX);
        Self { since: None, note: None, next: now, backoff, refusal: None }
    }
}

#[cfg(test)]
mod tests;
