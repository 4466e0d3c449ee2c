//! Writes objects by server-side apply, and only what differs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_runtime::Heartbeat;
use fabric_store::requests::{Part, Requests, Target};
use fabric_store::{
    ApiError, ApiServer, StoreMetrics, WRITE_RETRY, WriteBackoff, WriteOutcome, chain,
};
use futures::stream::{self, StreamExt as _};
use kube::api::{DeleteParams, DynamicObject};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::live::{Key, Objects, Watched};
use super::place;

/// Field manager of weft in an object's managedFields.
pub(super) const MANAGER: &str = "weft-fabric-controller";
/// Wait after a deletion that makes room: mostly that is done at once.
const ROOM: Duration = Duration::from_millis(100);
/// Writes under way at a time.
const MAX_WRITES: usize = 16;

pub(super) struct Writer {
    requests: Requests,
    metrics: StoreMetrics,
    written: BTreeMap<Key, Written>,
    refused: WriteBackoff<Key, Attempt>,
}

/// Requested object, and what the API server made of it. It fills in more, and writes some of it
/// another way.
struct Written {
    want: DynamicObject,
    got: Value,
}

/// Request that was refused.
#[derive(PartialEq)]
enum Attempt {
    Write(DynamicObject),
    /// Replaces an object that could not be changed into this and was removed.
    MakeAnew(DynamicObject),
    Delete,
}

/// What is due for an object.
enum Step {
    None,
    Apply,
    /// With that uid.
    Delete(Option<String>),
}

/// Answer to a [`Step`].
enum Answer {
    None,
    Applied(Result<Box<DynamicObject>, ApiError>),
    Deleted(Result<bool, ApiError>),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// Retried once something changes, or after a while.
    #[error("{name} cannot be written: {message}")]
    Refused { name: String, message: String },
    /// Nothing else will be answered either.
    #[error("the API server cannot be reached")]
    Unreachable(#[source] ApiError),
}

impl Writer {
    pub(super) fn new(server: &ApiServer) -> Self {
        let requests = Requests::new(server.client.clone(), MANAGER);
        let (written, refused) = (BTreeMap::new(), WriteBackoff::default());
        Self { requests, metrics: server.metrics.clone(), written, refused }
    }

    /// Time of the next retry of something that was refused.
    pub(super) fn again(&self) -> Option<Instant> {
        self.refused.next_try()
    }

    /// Removes the refusals of objects that are no longer desired.
    pub(super) fn keep(&mut self, wanted: impl Fn(&Key) -> bool) {
        self.refused.keep(&wanted);
        self.written.retain(|key, _| wanted(key));
    }

    pub(super) async fn write(
        &mut self,
        live: &mut Objects,
        key: &Key,
        want: &DynamicObject,
    ) -> Result<(), WriteError> {
        if self.is_there(live.get(key), key, want) {
            return Ok(());
        }
        self.may_apply(live, key, want)?;
        let applied = self.requests.apply(&key.target(), Part::AllButStatus, want).await;
        self.applied(live, key, want, applied).await
    }

    /// Writes gateways' own objects side by side, until the API server does not answer. Returns the
    /// results in their order.
    pub(super) async fn write_side_by_side(
        &mut self,
        live: &mut Objects,
        writes: &[(Key, &DynamicObject)],
        heartbeat: &Heartbeat,
    ) -> Vec<Result<(), WriteError>> {
        let steps = writes.iter().map(|(key, want)| self.step(live, key, want));
        let steps: Vec<_> = steps.collect();
        let requests = self.requests.clone();
        let answers = writes.iter().zip(&steps).map(|((key, want), step)| {
            let (requests, target) = (&requests, key.target());
            async move {
                match step {
                    Ok(Step::Apply) => {
                        let applied = requests.apply(&target, Part::AllButStatus, want).await;
                        Answer::Applied(applied.map(Box::new))
                    }
                    Ok(Step::Delete(uid)) => {
                        let how = DeleteParams::background();
                        Answer::Deleted(requests.delete(&target, uid.clone(), how).await)
                    }
                    Ok(Step::None) | Err(_) => Answer::None,
                }
            }
        });
        let answers = answers.collect::<Vec<_>>();
        let mut answers = stream::iter(answers).buffered(MAX_WRITES);
        let mut results: Vec<_> = steps.iter().map(|_| Ok(())).collect();
        let mut next = results.iter_mut().zip(writes);
        while let (Some(answer), Some((result, (key, want)))) = (answers.next().await, next.next())
        {
            heartbeat.beat();
            *result = match answer {
                Answer::Applied(applied) => {
                    let applied = applied.map(|object| *object);
                    self.applied(live, key, want, applied).await
                }
                Answer::Deleted(deleted) => self.deleted(key, deleted),
                Answer::None => Ok(()),
            };
            if matches!(result, Err(WriteError::Unreachable(_))) {
                break;
            }
        }
        drop(answers);
        let results = results.into_iter().zip(steps);
        results.map(|(result, step)| step.and(result)).collect()
    }

    /// A gateway of the same name that is gone may have left its object, whether Kubernetes collects it,
    /// too, or not: that is removed first. To change it into another's meanwhile would leave a mixture of
    /// both, such as a pod whose ServiceAccount is another one, and an API server that loses track of a
    /// node port that it gives to a Service while that is removed.
    fn step(&self, live: &Objects, key: &Key, want: &DynamicObject) -> Result<Step, WriteError> {
        match live.get(key).filter(|there| place::is_of_a_namesake(there, want)) {
            None if self.is_there(live.get(key), key, want) => Ok(Step::None),
            None => self.may_apply(live, key, want).map(|()| Step::Apply),
            // Its watch reports when it is gone.
            Some(there) if there.metadata.deletion_timestamp.is_some() => Ok(Step::None),
            Some(there) => {
                self.pending(key, |tried| *tried == Attempt::Delete)?;
                Ok(Step::Delete(there.metadata.uid.clone()))
            }
        }
    }

    /// Fails if it was refused a moment ago.
    fn may_apply(&self, live: &Objects, key: &Key, want: &DynamicObject) -> Result<(), WriteError> {
        let has_room = live.get(key).is_none();
        self.pending(key, |tried| match tried {
            Attempt::Write(tried) => tried == want,
            Attempt::MakeAnew(tried) => tried == want && !has_room,
            Attempt::Delete => false,
        })
    }

    async fn applied(
        &mut self,
        live: &mut Objects,
        key: &Key,
        want: &DynamicObject,
        applied: Result<DynamicObject, ApiError>,
    ) -> Result<(), WriteError> {
        self.count(key, &applied);
        match applied {
            Ok(got) => {
                tracing::info!(kind = key.of.resource().kind, %key, "applied");
                self.refused.clear(key);
                let written = Written { want: want.clone(), got: content(&got) };
                self.written.insert(key.clone(), written);
                live.put(key.of, got);
                Ok(())
            }
            Err(error) => Err(self.failed(live.get(key), key, want, error).await),
        }
    }

    /// Writes an object whose name somebody else may have taken: what is theirs stays.
    pub(super) async fn write_own(
        &mut self,
        live: &mut Objects,
        key: &Key,
        want: &DynamicObject,
    ) -> Result<(), WriteError> {
        let ours = |there: &DynamicObject| is_owned_alike(there, want);
        self.pending(key, |tried| matches!(tried, Attempt::Write(tried) if tried == want))?;
        if live.get(key).is_some_and(ours) {
            return self.write(live, key, want).await;
        }
        // Objects that others have made are not watched.
        match self.requests.get(&key.target()).await {
            Ok(Some(there)) if !ours(&there) => {
                let message = match there.metadata.deletion_timestamp {
                    None => "there is one of somebody else; expected another name",
                    Some(_) => "there is another one that has not ended yet",
                };
                Err(self.refuse(key, Attempt::Write(want.clone()), message.to_owned()))
            }
            Ok(_) => self.write(live, key, want).await,
            Err(error) => Err(self.failed(live.get(key), key, want, error).await),
        }
    }

    pub(super) async fn delete(&mut self, key: &Key, uid: Option<&str>) -> Result<(), WriteError> {
        self.pending(key, |tried| *tried == Attempt::Delete)?;
        let (uid, how) = (uid.map(str::to_owned), DeleteParams::background());
        let deleted = self.requests.delete(&key.target(), uid, how).await;
        self.deleted(key, deleted)
    }

    fn deleted(&mut self, key: &Key, deleted: Result<bool, ApiError>) -> Result<(), WriteError> {
        self.count(key, &deleted);
        match deleted {
            Ok(true) => tracing::info!(kind = key.of.resource().kind, %key, "removed"),
            // Gone, or there is another in its place.
            Ok(false) => {}
            Err(ApiError::Refused { message, .. }) => {
                let was = |tried: &Attempt| *tried == Attempt::Delete;
                if self.refused.message(key, was) != Some(message.as_str()) {
                    tracing::warn!(%key, reason = message, "cannot be removed; tried again");
                }
                return Err(self.refuse(key, Attempt::Delete, message));
            }
            Err(error) => return Err(WriteError::Unreachable(error)),
        }
        self.written.remove(key);
        self.refused.clear(key);
        Ok(())
    }

    fn is_there(&self, live: Option<&DynamicObject>, key: &Key, want: &DynamicObject) -> bool {
        let known = live.zip(self.written.get(key));
        known.is_some_and(|(live, written)| written.want == *want && content(live) == written.got)
    }

    fn count<T>(&self, key: &Key, answer: &Result<T, ApiError>) {
        let outcome = match answer {
            Ok(_) => WriteOutcome::Written,
            Err(ApiError::Refused { .. }) => WriteOutcome::Refused,
            Err(_) => WriteOutcome::Unanswered,
        };
        self.metrics.count_write(&key.of.resource().kind, outcome);
    }

    async fn failed(
        &mut self,
        live: Option<&DynamicObject>,
        key: &Key,
        want: &DynamicObject,
        error: ApiError,
    ) -> WriteError {
        let ApiError::Refused { code, message } = error else {
            return WriteError::Unreachable(error);
        };
        let fixed = code == 422 && message.contains("immutable");
        if !fixed || !matches!(key.of, Watched::Deployment | Watched::Binding) {
            return self.refuse(key, Attempt::Write(want.clone()), message);
        }
        tracing::warn!(%key, reason = message, "cannot be changed; it is made anew");
        let uid = live.and_then(|there| there.metadata.uid.clone());
        let removed = self.requests.delete(&key.target(), uid, DeleteParams::background()).await;
        self.count(key, &removed);
        let message = match removed {
            Ok(_) => "it is being made anew".to_owned(),
            Err(error) => chain(&error),
        };
        self.written.remove(key);
        let tried = Attempt::MakeAnew(want.clone());
        self.refused.refused(key, tried, &message, ROOM);
        WriteError::of(key, message)
    }

    /// Fails if a request need not be tried now.
    fn pending(&self, key: &Key, is_same: impl Fn(&Attempt) -> bool) -> Result<(), WriteError> {
        match self.refused.pending(key, is_same) {
            Some(message) => Err(WriteError::of(key, message.to_owned())),
            None => Ok(()),
        }
    }

    fn refuse(&mut self, key: &Key, tried: Attempt, message: String) -> WriteError {
        self.refused.refused(key, tried, &message, WRITE_RETRY);
        WriteError::of(key, message)
    }
}

impl WriteError {
    fn of(key: &Key, message: String) -> Self {
        Self::Refused { name: key.to_string(), message }
    }
}

impl Key {
    pub(super) fn target(&self) -> Target {
        Target::new(self.of.resource(), (self.namespace.clone(), self.name.clone()))
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
