//! Writes what differs.

use std::collections::BTreeMap;

use fabric_api::{PrivateKey, labels};
use fabric_runtime::Heartbeat;
use fabric_store::{Event, Kind, Object, ObjectRef, Problem, Store, StoreError};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::refusals::Refusals;
use fabric_core::Grant;
use fabric_core::compile::{KeyPair, Published, is_own};
use fabric_core::index::Index;

/// What came of it.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The index is no longer what was compiled.
    pub changed: bool,
    /// Grants of objects that are gone.
    pub lost: Vec<Grant>,
    /// What could not be written. It is tried again.
    pub problems: Vec<Problem>,
    /// The store did not answer: nothing else was tried, or each would wait for its own answer.
    pub unreachable: bool,
}

/// Destination of what is published. Each write that is done is a beat.
#[derive(Debug)]
pub struct Sink<'a> {
    pub store: &'a Store,
    pub heartbeat: &'a Heartbeat,
}

/// Brings the store to what is wanted, and the index with it. What was refused rests for a while.
pub async fn publish(
    sink: Sink<'_>,
    index: &mut Index,
    refusals: &mut Refusals,
    wanted: &Published,
) -> Outcome {
    let outcome = Outcome::default();
    let Sink { store, heartbeat } = sink;
    let mut publisher = Publisher { store, index, refusals, outcome };
    for (reference, object) in &wanted.objects {
        publisher.put(reference, object).await;
        heartbeat.beat();
    }
    for (reference, key_pair) in &wanted.keys {
        publisher.make_key(reference, key_pair).await;
        heartbeat.beat();
    }
    for object in wanted.statuses.values() {
        publisher.put_status(object).await;
        heartbeat.beat();
    }
    for reference in &wanted.deleted {
        publisher.delete(reference).await;
        heartbeat.beat();
    }
    publisher.refusals.keep(|reference| is_wanted(wanted, reference));
    publisher.outcome
}

fn is_wanted(wanted: &Published, reference: &ObjectRef) -> bool {
    wanted.objects.contains_key(reference)
        || wanted.keys.contains_key(reference)
        || wanted.statuses.contains_key(reference)
        || wanted.deleted.contains(reference)
}

struct Publisher<'a> {
    store: &'a Store,
    index: &'a mut Index,
    refusals: &'a mut Refusals,
    outcome: Outcome,
}

impl Publisher<'_> {
    async fn put(&mut self, reference: &ObjectRef, want: &Object) {
        let have = self.index.get(reference);
        if have.is_some_and(|have| is_same(have, want)) {
            return;
        }
        if have.is_some_and(|have| is_in_the_way(have, want)) {
            let message = "weft needs this name for an object of its own; expected another name";
            self.problem(reference, message.to_owned());
            return;
        }
        if self.rests(reference, || want.to_value()) {
            return;
        }
        let mut whole = want.clone();
        whole.copy_status(self.index.get(reference));
        match self.store.put(&whole).await {
            Ok(stored) => {
                let generation = stored.generation();
                if self.apply(stored) {
                    tracing::info!(object = %reference, generation, "published");
                }
            }
            Err(error) => self.failed(reference, &error, want.to_value()),
        }
    }

    async fn make_key(&mut self, reference: &ObjectRef, wanted: &KeyPair) {
        let want = || json!({"peer": wanted.peer, "owner": wanted.owner});
        if self.rests(reference, want) {
            return;
        }
        let private = PrivateKey::generate();
        let public = private.public();
        let data = [
            ("privateKey".to_owned(), ByteString(private.expose().to_vec())),
            ("publicKey".to_owned(), ByteString(public.as_bytes().to_vec())),
        ];
        let labels = [
            (labels::REMOTE_CLUSTER_ID.to_owned(), wanted.peer.clone()),
            (labels::GATEWAY_RESOURCE.to_owned(), "true".to_owned()),
        ];
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(reference.name.clone()),
                namespace: reference.namespace.clone(),
                labels: Some(labels.into()),
                owner_references: wanted.owner.clone().map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            data: Some(data.into()),
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        };
        match self.store.put(&secret.into()).await {
            Ok(stored) => {
                tracing::info!(object = %reference, %public, "made a key pair");
                self.apply(stored);
            }
            Err(error) => self.failed(reference, &error, want()),
        }
    }

    async fn put_status(&mut self, want: &Object) {
        let reference = want.reference();
        let is_there = self.index.get(&reference) == Some(want);
        if is_there || self.rests(&reference, || want.to_value()) {
            return;
        }
        match self.store.put_status(want).await {
            Ok(_) => {
                tracing::debug!(object = %reference, "status written");
                self.apply(want.clone());
            }
            Err(error) => self.failed(&reference, &error, want.to_value()),
        }
    }

    async fn delete(&mut self, reference: &ObjectRef) {
        if self.rests(reference, || Value::Null) {
            return;
        }
        if let Err(error) = self.store.delete(reference).await {
            return self.failed(reference, &error, Value::Null);
        }
        self.refusals.taken(reference);
        tracing::info!(object = %reference, "removed");
        let gone = self.index.apply(Event::Deleted(reference.clone()));
        self.outcome.lost.extend(gone.as_ref().and_then(Grant::of));
        self.outcome.changed = true;
    }

    /// True if that is news. It is not where the store holds something else than was wanted, and
    /// will: a label that others have added, a field that its definition of the kind lacks.
    fn apply(&mut self, object: Object) -> bool {
        self.refusals.taken(&object.reference());
        let news = self.index.get(&object.reference()) != Some(&object);
        self.index.apply(Event::Applied(Box::new(object)));
        self.outcome.changed |= news;
        news
    }

    /// True if it is not to be tried now.
    fn rests(&mut self, reference: &ObjectRef, want: impl FnOnce() -> Value) -> bool {
        let standing = self.refusals.standing(reference, want, Instant::now()).map(str::to_owned);
        if let Some(message) = &standing {
            self.problem(reference, message.clone());
        }
        standing.is_some() || self.outcome.unreachable
    }

    fn failed(&mut self, reference: &ObjectRef, error: &StoreError, want: Value) {
        let cause = std::error::Error::source(error).map(|c| format!(": {c}")).unwrap_or_default();
        let message = format!("{error}{cause}");
        if error.is_unreachable() {
            self.outcome.unreachable = true;
        } else {
            self.refusals.refused(reference, want, &message, Instant::now());
        }
        self.problem(reference, message);
    }

    fn problem(&mut self, reference: &ObjectRef, message: String) {
        let object = Some(reference.clone());
        let problem = Problem { source: String::new(), object, field: None, message };
        self.outcome.problems.push(problem);
    }
}

/// True if the store has the object as wanted, whatever its status.
fn is_same(have: &Object, want: &Object) -> bool {
    let mut labels = want.metadata().labels.clone().unwrap_or_default();
    labels.insert(labels::MANAGED_BY.to_owned(), labels::WEFT.to_owned());
    let (have_meta, want_meta) = (have.metadata(), want.metadata());
    of_ours(have_meta.labels.as_ref()) == of_ours(Some(&labels))
        && of_ours(have_meta.annotations.as_ref()) == of_ours(want_meta.annotations.as_ref())
        && is_owned_alike(have, want)
        && is_same_spec(have, want)
}

/// True if the store's has all owners of the one that is wanted. Others may have added some.
fn is_owned_alike(have: &Object, want: &Object) -> bool {
    let owners = |object: &Object| object.metadata().owner_references.clone().unwrap_or_default();
    let have = owners(have);
    owners(want).iter().all(|owner| have.contains(owner))
}

/// Labels or annotations without those that others hang on objects for their own ends.
fn of_ours(map: Option<&BTreeMap<String, String>>) -> BTreeMap<&str, &str> {
    let ours = |key: &str| {
        key == labels::MANAGED_BY || ["liqo.io/", "weft.dev/"].iter().any(|end| key.contains(end))
    };
    let pairs = map.into_iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
    pairs.filter(|(key, _)| ours(key)).collect()
}

/// Of the kinds that the controller publishes.
fn is_same_spec(have: &Object, want: &Object) -> bool {
    match (have, want) {
        (Object::Network(have), Object::Network(want)) => have.spec == want.spec,
        (Object::Ip(have), Object::Ip(want)) => have.spec == want.spec,
        (Object::GatewayConfig(have), Object::GatewayConfig(want)) => have.spec == want.spec,
        (Object::NodeConfig(have), Object::NodeConfig(want)) => have.spec == want.spec,
        (_, _) => false,
    }
}

/// A manifest of the user has the name of an object of ours.
fn is_in_the_way(have: &Object, want: &Object) -> bool {
    matches!(have.kind(), Kind::Network | Kind::Ip) && is_own(want) && !is_own(have)
}
