//! Writes objects by server-side apply, and only what differs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer, Grant, StoreMetrics, WriteOutcome};
use fabric_runtime::{Heartbeat, WRITE_RETRY, WriteBackoff, chain};
use futures::stream::{self, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{ApiResource, DeleteParams, DynamicObject};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::kept_fields::KeptFields;
use super::live::{ContentDigest, Key, Objects, Watched, content};
use super::place;

/// Field manager of weft in an object's managedFields.
pub(super) const MANAGER: &str = labels::CONTROLLER_MANAGER;
/// Wait after a deletion that makes room: mostly that is done at once.
const ROOM: Duration = Duration::from_millis(100);
/// Wait after a right was regained.
const REGAINED: Duration = Duration::from_secs(1);
/// Writes under way at a time.
pub(super) const MAX_WRITES: usize = 16;

pub(super) struct Writer {
    client: Client,
    /// The namespace of weft itself.
    installation: String,
    requests: Requests,
    metrics: StoreMetrics,
    written: BTreeMap<Key, Written>,
    refused: WriteBackoff<Key, Attempt>,
    kept: KeptFields,
}

/// Object that is to be there.
pub(super) struct Desired {
    pub(super) key: Key,
    /// Its place and its owners.
    metadata: ObjectMeta,
    /// The object in JSON.
    body: Box<str>,
    digest: ContentDigest,
}

/// Requested object, and what the API server made of it. It fills in more, and writes some of it
/// another way.
struct Written {
    want: ContentDigest,
    got: ContentDigest,
}

/// Request that was refused.
#[derive(PartialEq)]
enum Attempt {
    Write(ContentDigest),
    /// Replaces an object that could not be changed into this and was removed.
    MakeAnew(ContentDigest),
    Delete,
}

/// Action that is due for an object.
enum Step {
    None,
    /// Write of the object with that uid; without one, of an object that is not observed.
    Apply(Option<String>),
    /// Deletion of the object with that uid.
    Delete(Option<String>),
}

/// Answer to a [`Step`].
enum Answer {
    None,
    Applied(Result<Box<DynamicObject>, ApiError>),
    /// Reason why an object of another owner is not changed.
    Foreign(&'static str),
    Deleted(Result<bool, ApiError>),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// Retried once something changes, or after a while.
    #[error("{name} cannot be written: {message}")]
    Refused { name: String, message: String },
    /// Error that holds for all other requests, too.
    #[error("the API server cannot be reached")]
    Unreachable(#[source] ApiError),
}

impl Desired {
    pub(super) fn of(object: &DynamicObject) -> serde_json::Result<Self> {
        let kind = object.types.as_ref().and_then(|types| Watched::of_kind(&types.kind));
        let kind =
            kind.ok_or_else(|| serde::de::Error::custom("expected a kind that is watched"))?;
        let metadata = ObjectMeta {
            namespace: object.metadata.namespace.clone(),
            owner_references: object.metadata.owner_references.clone(),
            ..ObjectMeta::default()
        };
        let body = serde_json::to_string(object)?;
        let digest = Sha256::digest(&body).into();
        Ok(Self { key: Key::of(kind, object), metadata, body: body.into(), digest })
    }

    /// Writes the object with that uid, and no other; without one, an object that is not there.
    async fn apply(
        &self,
        requests: &Requests,
        uid: Option<&str>,
        kept: &KeptFields,
    ) -> Result<DynamicObject, ApiError> {
        let mut object: Value = serde_json::from_str(&self.body).map_err(ApiError::Answer)?;
        if let Some(uid) = uid {
            object["metadata"]["uid"] = uid.into();
        }
        let target = self.key.target();
        let apply = async |object: &Value| match uid {
            Some(_) => requests.apply(&target, Part::AllButStatus, object).await,
            None => requests.apply_new(&target, object).await,
        };
        if let Some(same) = kept.with_last(&self.key, &object) {
            match apply(&same).await {
                // Another Service has it by now.
                Err(ApiError::Refused { code: 422, .. }) => {}
                applied => return applied,
            }
        }
        apply(&object).await
    }

    /// Writes an object that is not observed: watches report none of others.
    async fn claim(&self, requests: &Requests, kept: &KeptFields) -> Answer {
        let applied = match requests.get(&self.key.target()).await {
            Ok(Some(there)) if !is_owned_alike(&there.metadata, &self.metadata) => {
                return Answer::Foreign(match there.metadata.deletion_timestamp {
                    None => "there is one of another owner; expected another name",
                    Some(_) => "there is another one that has not ended yet",
                });
            }
            Ok(there) => {
                let uid = there.and_then(|there| there.metadata.uid);
                self.apply(requests, uid.as_deref(), kept).await
            }
            Err(error) => Err(error),
        };
        Answer::Applied(applied.map(Box::new))
    }
}

impl Writer {
    pub(super) fn new(server: &ApiServer) -> Self {
        let requests = Requests::new(server.client.clone(), MANAGER);
        let (written, refused) = (BTreeMap::new(), WriteBackoff::default());
        let (metrics, kept) = (server.metrics.clone(), KeptFields::default());
        let (client, installation) = (server.client.clone(), server.namespace.clone());
        Self { client, installation, requests, metrics, written, refused, kept }
    }

    /// Time of the next retry of something that was refused.
    pub(super) fn again(&self) -> Option<Instant> {
        self.refused.next_try()
    }

    /// Removes the refusals of objects that are no longer desired.
    pub(super) fn keep(&mut self, wanted: impl Fn(&Key) -> bool) {
        self.refused.keep(&wanted);
        self.kept.keep(&wanted);
        self.written.retain(|key, _| wanted(key));
    }

    pub(super) async fn write(
        &mut self,
        live: &mut Objects,
        want: &Desired,
    ) -> Result<(), WriteError> {
        if self.is_there(live, want) {
            return Ok(());
        }
        self.may_apply(live, want)?;
        let uid = live.get(&want.key).and_then(|there| there.metadata.uid.clone());
        let applied = want.apply(&self.requests, uid.as_deref(), &self.kept).await;
        self.applied(live, want, applied).await
    }

    /// Writes gateways' own objects side by side, until the API server does not answer. Returns the
    /// results in their order.
    pub(super) async fn write_side_by_side(
        &mut self,
        live: &mut Objects,
        writes: &[&Desired],
        heartbeat: &Heartbeat,
    ) -> Vec<Result<(), WriteError>> {
        for key in writes.iter().map(|want| &want.key) {
            live.get(key).into_iter().for_each(|there| self.kept.note(key, &there.data));
        }
        let steps = writes.iter().map(|want| self.step(live, want));
        let steps: Vec<_> = steps.collect();
        let (requests, kept) = (self.requests.clone(), self.kept.clone());
        let answers = writes.iter().zip(&steps).map(|(want, step)| {
            let (requests, kept) = (&requests, &kept);
            async move {
                match step {
                    Ok(Step::Apply(None)) => want.claim(requests, kept).await,
                    Ok(Step::Apply(uid)) => {
                        let applied = want.apply(requests, uid.as_deref(), kept).await;
                        Answer::Applied(applied.map(Box::new))
                    }
                    Ok(Step::Delete(uid)) => {
                        let (target, how) = (want.key.target(), DeleteParams::background());
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
        while let (Some(answer), Some((result, want))) = (answers.next().await, next.next()) {
            heartbeat.beat();
            *result = match answer {
                Answer::Applied(applied) => {
                    let applied = applied.map(|object| *object);
                    self.applied(live, want, applied).await
                }
                Answer::Foreign(why) => Err(self.refuse_foreign(want, why)),
                Answer::Deleted(deleted) => self.deleted(&want.key, deleted),
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
    fn step(&self, live: &Objects, want: &Desired) -> Result<Step, WriteError> {
        let is_other =
            |there: &&DynamicObject| place::is_of_a_namesake(&there.metadata, &want.metadata);
        let there = live.get(&want.key);
        match there.filter(is_other) {
            None if self.is_there(live, want) => Ok(Step::None),
            None => {
                let uid = there.and_then(|there| there.metadata.uid.clone());
                self.may_apply(live, want).map(|()| Step::Apply(uid))
            }
            // Its watch reports when it is gone.
            Some(there) if there.metadata.deletion_timestamp.is_some() => Ok(Step::None),
            Some(there) => {
                self.pending(&want.key, |tried| *tried == Attempt::Delete)?;
                Ok(Step::Delete(there.metadata.uid.clone()))
            }
        }
    }

    /// Fails if it was refused a moment ago.
    fn may_apply(&self, live: &Objects, want: &Desired) -> Result<(), WriteError> {
        let has_room = live.get(&want.key).is_none();
        self.pending(&want.key, |tried| match tried {
            Attempt::Write(tried) => *tried == want.digest,
            Attempt::MakeAnew(tried) => *tried == want.digest && !has_room,
            Attempt::Delete => false,
        })
    }

    async fn applied(
        &mut self,
        live: &mut Objects,
        want: &Desired,
        applied: Result<DynamicObject, ApiError>,
    ) -> Result<(), WriteError> {
        let key = &want.key;
        self.count(key, &applied);
        match applied {
            Ok(got) => {
                tracing::info!(kind = key.of.resource().kind, %key, "applied");
                self.refused.clear(key);
                self.kept.note(key, &got.data);
                let written = Written { want: want.digest, got: content(&got) };
                self.written.insert(key.clone(), written);
                live.put(key.of, got);
                Ok(())
            }
            Err(error) => Err(self.failed(live.get(key), want, error).await),
        }
    }

    /// Writes an object whose name another owner may have taken: what is theirs stays.
    pub(super) async fn write_own(
        &mut self,
        live: &mut Objects,
        want: &Desired,
    ) -> Result<(), WriteError> {
        let key = &want.key;
        let ours = |there: &DynamicObject| is_owned_alike(&there.metadata, &want.metadata);
        self.pending(key, |tried| *tried == Attempt::Write(want.digest))?;
        if live.get(key).is_some_and(ours) {
            return self.write(live, want).await;
        }
        match want.claim(&self.requests, &self.kept).await {
            Answer::Foreign(why) => Err(self.refuse_foreign(want, why)),
            Answer::Applied(applied) => {
                self.applied(live, want, applied.map(|object| *object)).await
            }
            Answer::Deleted(_) | Answer::None => Ok(()),
        }
    }

    fn refuse_foreign(&mut self, want: &Desired, why: &str) -> WriteError {
        self.refuse(&want.key, Attempt::Write(want.digest), why.to_owned())
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

    pub(super) fn is_there(&self, live: &Objects, want: &Desired) -> bool {
        let known = live.content(&want.key).zip(self.written.get(&want.key));
        known.is_some_and(|(live, written)| written.want == want.digest && written.got == live)
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
        want: &Desired,
        error: ApiError,
    ) -> WriteError {
        let key = &want.key;
        let ApiError::Refused { code, message } = error else {
            return WriteError::Unreachable(error);
        };
        if code == 403 && matches!(key.of, Watched::Role | Watched::Binding) {
            let pause = if self.regain(want).await { REGAINED } else { WRITE_RETRY };
            let tried = Attempt::Write(want.digest);
            self.refused.refused(key, tried, &message, pause);
            return WriteError::of(key, message);
        }
        let fixed = code == 422 && message.contains("immutable");
        let fixed = fixed && matches!(key.of, Watched::Deployment | Watched::Binding);
        let uid = live.and_then(|there| there.metadata.uid.clone()).filter(|_| fixed);
        let Some(uid) = uid else {
            return self.refuse(key, Attempt::Write(want.digest), message);
        };
        tracing::warn!(%key, reason = message, "cannot be changed; it is made anew");
        let uid = Some(uid);
        let removed = self.requests.delete(&key.target(), uid, DeleteParams::background()).await;
        self.count(key, &removed);
        let (message, pause) = match removed {
            Ok(_) => ("it is being made anew".to_owned(), ROOM),
            Err(error) => (chain(&error), WRITE_RETRY),
        };
        self.written.remove(key);
        let tried = Attempt::MakeAnew(want.digest);
        self.refused.refused(key, tried, &message, pause);
        WriteError::of(key, message)
    }

    /// Binds the right to read keys to the controller again, which it can only grant to a gateway while it has it: its own
    /// binding may have been deleted. True if it has it now.
    async fn regain(&self, want: &Desired) -> bool {
        let gateway = want.metadata.owner_references.iter().flatten().next().cloned();
        let Some((gateway, namespace)) = gateway.zip(want.metadata.namespace.as_deref()) else {
            return false;
        };
        let grant = Grant::of_gateway_keys(gateway, namespace, &self.installation);
        grant.acquire(&self.client, &ApiResource::erase::<Secret>(&())).await.is_ok()
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
fn is_owned_alike(there: &ObjectMeta, want: &ObjectMeta) -> bool {
    let uids = |object: &ObjectMeta| {
        let owners = object.owner_references.iter().flatten();
        owners.map(|owner| owner.uid.clone()).collect::<BTreeSet<_>>()
    };
    uids(there).is_superset(&uids(want))
}
