//! Writes objects by server-side apply, and only what differs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_store::{ApiServer, StoreMetrics, WriteOutcome};
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::live::{Key, Objects, Watched};
use super::place;

/// Field manager of weft in an object's managedFields.
pub(super) const MANAGER: &str = "weft-fabric-controller";
/// Timeout of one request.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// Backoff after a refusal: a change by others is needed.
const RETRY: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Wait after a deletion that makes room: mostly that is done at once.
const ROOM: Duration = Duration::from_millis(100);

pub(super) struct Writer {
    client: Client,
    metrics: StoreMetrics,
    written: BTreeMap<Key, Written>,
    refused: BTreeMap<Key, Refused>,
}

/// Requested object, and what the API server made of it. It fills in more, and writes some of it
/// another way.
struct Written {
    want: DynamicObject,
    got: Value,
    version: u64,
}

struct Refused {
    /// None if it was to go.
    want: Option<DynamicObject>,
    message: String,
    again: Instant,
    wait: Duration,
    /// Its time has come.
    due: bool,
    /// Refused because of a present object that is to go.
    is_in_the_way: bool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// Retried once something changes, or after a while.
    #[error("{name} cannot be written: {message}")]
    Refused { name: String, message: String },
    /// Nothing else will be answered either.
    #[error("the API server cannot be reached")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Writer {
    pub(super) fn new(server: &ApiServer) -> Self {
        let (client, metrics) = (server.client.clone(), server.metrics.clone());
        Self { client, metrics, written: BTreeMap::new(), refused: BTreeMap::new() }
    }

    /// Time of the next retry of something that was refused.
    pub(super) fn again(&self) -> Option<Instant> {
        self.refused.values().filter(|refused| !refused.due).map(|refused| refused.again).min()
    }

    /// Marks the due retries to be tried now, or never again if no longer desired.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        for refused in self.refused.values_mut().filter(|refused| refused.again <= now) {
            refused.due = true;
        }
    }

    /// Removes the refusals of objects that are no longer desired.
    pub(super) fn keep(&mut self, wanted: impl Fn(&Key) -> bool) {
        self.refused.retain(|key, _| wanted(key));
        self.written.retain(|key, _| wanted(key));
    }

    pub(super) async fn write(
        &mut self,
        live: &Objects,
        key: &Key,
        want: &DynamicObject,
    ) -> Result<(), WriteError> {
        if self.is_there(live.get(key), key, want) {
            return Ok(());
        }
        let in_the_way = |refused: &Refused| refused.is_in_the_way;
        let has_room = live.get(key).is_none() && self.refused.get(key).is_some_and(in_the_way);
        if let Some(message) = self.standing(key, Some(want)).filter(|_| !has_room) {
            return Err(WriteError::of(key, message.to_owned()));
        }
        match self.apply(key, want).await {
            Ok(got) => {
                tracing::info!(kind = key.of.resource().kind, %key, "applied");
                self.refused.remove(key);
                self.written.insert(key.clone(), Written::new(want, &got));
                Ok(())
            }
            Err(error) => Err(self.failed(key, want, error).await),
        }
    }

    /// The same of a gateway's own object. One of a gateway of the same name that is gone is removed
    /// first, whether Kubernetes collects it, too, or not. To change it into another's meanwhile would
    /// leave a mixture of both, such as a pod whose ServiceAccount is another one, and an API server that
    /// loses track of a node port that it gives to a Service while that is removed.
    pub(super) async fn write_anew(
        &mut self,
        live: &Objects,
        key: &Key,
        want: &DynamicObject,
    ) -> Result<(), WriteError> {
        match live.get(key).filter(|there| place::is_of_a_namesake(there, want)) {
            None => self.write(live, key, want).await,
            // Its watch reports when it is gone.
            Some(there) if there.metadata.deletion_timestamp.is_some() => Ok(()),
            Some(there) => self.delete(key, there.metadata.uid.as_deref()).await,
        }
    }

    /// The same of a name that somebody else may have taken: what is theirs stays.
    pub(super) async fn write_own(
        &mut self,
        live: &Objects,
        key: &Key,
        want: &DynamicObject,
    ) -> Result<(), WriteError> {
        let ours = |there: &DynamicObject| is_owned_alike(there, want);
        let waits = self.standing(key, Some(want)).is_some();
        if waits || live.get(key).is_some_and(ours) {
            return self.write(live, key, want).await;
        }
        // Objects that others have made are not watched.
        match answer(self.api(key).get_opt(&key.name)).await {
            Ok(Some(there)) if !ours(&there) => {
                let message = match there.metadata.deletion_timestamp {
                    None => "there is one of somebody else; expected another name",
                    Some(_) => "there is another one that has not ended yet",
                };
                Err(self.refuse(key, Some(want), message.to_owned()))
            }
            Ok(_) => self.write(live, key, want).await,
            Err(error) => Err(self.failed(key, want, error).await),
        }
    }

    pub(super) async fn delete(&mut self, key: &Key, uid: Option<&str>) -> Result<(), WriteError> {
        if let Some(message) = self.standing(key, None) {
            return Err(WriteError::of(key, message.to_owned()));
        }
        let uid = uid.map(str::to_owned);
        let preconditions = Preconditions { uid, resource_version: None };
        let parameters =
            DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        let deleted = answer(self.api(key).delete(&key.name, &parameters)).await;
        self.count(key, &deleted);
        match deleted {
            Ok(_) => tracing::info!(kind = key.of.resource().kind, %key, "removed"),
            // Gone, or there is another in its place.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(kube::Error::Api(status)) => return Err(self.stays(key, status.message)),
            Err(error) => return Err(WriteError::Unreachable(error.into())),
        }
        self.written.remove(key);
        self.refused.remove(key);
        Ok(())
    }

    fn is_there(&self, live: Option<&DynamicObject>, key: &Key, want: &DynamicObject) -> bool {
        let Some((live, written)) = live.zip(self.written.get(key)) else { return false };
        // A report from before the last write is stale.
        written.want == *want && (version(live) < written.version || content(live) == written.got)
    }

    async fn apply(&self, key: &Key, want: &DynamicObject) -> kube::Result<DynamicObject> {
        let parameters = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(want);
        let applied = answer(self.api(key).patch(&key.name, &parameters, &patch)).await;
        self.count(key, &applied);
        applied
    }

    fn count<T>(&self, key: &Key, answer: &kube::Result<T>) {
        let outcome = match answer {
            Ok(_) => WriteOutcome::Written,
            Err(kube::Error::Api(_)) => WriteOutcome::Refused,
            Err(_) => WriteOutcome::Unanswered,
        };
        self.metrics.count_write(&key.of.resource().kind, outcome);
    }

    async fn failed(&mut self, key: &Key, want: &DynamicObject, error: kube::Error) -> WriteError {
        let kube::Error::Api(status) = error else { return WriteError::Unreachable(error.into()) };
        let fixed = status.code == 422 && status.message.contains("immutable");
        let made_new = fixed && matches!(key.of, Watched::Deployment | Watched::Binding);
        if !made_new {
            return self.refuse(key, Some(want), status.message);
        }
        tracing::warn!(%key, reason = status.message, "cannot be changed; it is made anew");
        let wait = self.wait(key, Some(want), true);
        let removed = self.delete(key, None).await;
        let message =
            removed.map_or_else(|error| error.to_string(), |()| "it is being made anew".to_owned());
        let error = self.refuse(key, Some(want), message);
        if let Some(refused) = self.refused.get_mut(key) {
            (refused.is_in_the_way, refused.wait) = (true, wait);
            refused.again = Instant::now() + wait;
        }
        error
    }

    /// Reason why this need not be tried now.
    fn standing(&self, key: &Key, want: Option<&DynamicObject>) -> Option<&str> {
        let refused = self.refused.get(key).filter(|refused| !refused.due)?;
        (refused.want.as_ref() == want).then_some(&refused.message)
    }

    fn stays(&mut self, key: &Key, message: String) -> WriteError {
        let known = self.refused.get(key).is_some_and(|before| before.message == message);
        if !known {
            tracing::warn!(%key, reason = message, "cannot be removed; tried again");
        }
        self.refuse(key, None, message)
    }

    /// Records a refusal, with growing backoff.
    fn refuse(&mut self, key: &Key, want: Option<&DynamicObject>, message: String) -> WriteError {
        let wait = self.wait(key, want, false);
        let refused = Refused {
            want: want.cloned(),
            message: message.clone(),
            again: Instant::now() + wait,
            wait,
            due: false,
            is_in_the_way: false,
        };
        self.refused.insert(key.clone(), refused);
        WriteError::of(key, message)
    }

    /// Twice as long as the last time that the same was refused for the same sake.
    fn wait(&self, key: &Key, want: Option<&DynamicObject>, is_in_the_way: bool) -> Duration {
        let least = if is_in_the_way { ROOM } else { RETRY };
        let same = |b: &&Refused| b.want.as_ref() == want && b.is_in_the_way == is_in_the_way;
        let before = self.refused.get(key).filter(same);
        before.map_or(least, |before| (before.wait * 2).min(RETRY_MAX))
    }

    fn api(&self, key: &Key) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &key.namespace, &key.of.resource())
    }
}

impl WriteError {
    fn of(key: &Key, message: String) -> Self {
        Self::Refused { name: key.to_string(), message }
    }
}

impl Written {
    fn new(want: &DynamicObject, got: &DynamicObject) -> Self {
        Self { want: want.clone(), got: content(got), version: version(got) }
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}/{}", self.of.resource().kind, self.namespace, self.name)
    }
}

/// True if it has all owners of the one that is wanted.
fn is_owned_alike(there: &DynamicObject, want: &DynamicObject) -> bool {
    let uids = |object: &DynamicObject| {
        let owners = object.metadata.owner_references.iter().flatten();
        owners.map(|owner| owner.uid.clone()).collect::<BTreeSet<_>>()
    };
    uids(there).is_superset(&uids(want))
}

/// The answer to a request, within bounds.
pub(super) async fn answer<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    within(TIMEOUT, request).await
}

pub(super) async fn within<T>(
    bound: Duration,
    request: impl Future<Output = kube::Result<T>>,
) -> kube::Result<T> {
    let late = |_| {
        let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
        kube::Error::Service(error.into())
    };
    timeout(bound, request).await.map_err(late).flatten()
}

/// Higher after each change of the same object.
fn version(of: &DynamicObject) -> u64 {
    let version = of.metadata.resource_version.as_deref();
    version.and_then(|version| version.parse().ok()).unwrap_or_default()
}

/// All but the status and what changes by itself.
fn content(of: &DynamicObject) -> Value {
    let metadata = &of.metadata;
    let mut data = of.data.clone();
    if let Some(map) = data.as_object_mut() {
        map.remove("status");
    }
    json!({
        "labels": metadata.labels, "annotations": metadata.annotations, "uid": metadata.uid,
        "owners": metadata.owner_references, "data": data,
    })
}
