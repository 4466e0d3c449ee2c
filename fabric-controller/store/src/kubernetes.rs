//! The API server of a Kubernetes cluster.
//!
//! Watches report what is there; what weft writes, it applies on the server's side as field manager
//! [`ApiServer::MANAGER`], each part with all its desired fields, and sends nothing that is there already.

mod cache;
mod content;
mod intake;
mod keys;
mod note;
mod source;
mod status;
mod watch;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fabric_kube_client::{ApiError, ApiServer, StoreMetrics, requests, target};
use fabric_objects::{Kind, Object, ObjectRef, Problem, Snapshot, decode};
use futures::future::{join_all, try_join_all};
use kube::api::{DeleteParams, DynamicObject};

pub(crate) use self::status::YieldsTo;
pub(crate) use self::watch::Watch;

use self::cache::{Cache, Part, is_ours};
use self::content::content;
use self::intake::Stored;
use self::source::Source;
use crate::error::StoreError;

/// Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Kubernetes {
    server: ApiServer,
    known: Arc<Known>,
}

/// State that all clones share.
#[derive(Debug, Default)]
struct Known {
    cache: Mutex<Cache>,
    problems: Mutex<Vec<Problem>>,
    /// Versions of the notes as they were last written or read.
    notes: Mutex<BTreeMap<String, String>>,
}

impl Kubernetes {
    pub(crate) fn open(
        kubeconfig: Option<&Path>,
        context: Option<&str>,
        namespace: Option<String>,
    ) -> Result<Self, StoreError> {
        let server = ApiServer::open(kubeconfig, context, namespace)?;
        Ok(Self { server, known: Arc::default() })
    }

    pub(crate) fn api_server(&self) -> ApiServer {
        self.server.clone()
    }

    pub(crate) fn metrics(&self) -> &StoreMetrics {
        &self.server.metrics
    }

    pub(crate) fn set_metrics(&mut self, metrics: StoreMetrics) {
        self.server.metrics = metrics;
    }

    pub(crate) fn watch(&self, kinds: &[Kind]) -> Watch {
        Watch::start(self.clone(), kinds)
    }

    pub(crate) fn follow(&self, object: &ObjectRef, with: &[Kind]) -> Watch {
        let mut watch = Watch::start(self.clone(), with);
        watch.also(object);
        watch
    }

    pub(crate) async fn read(&self, kinds: &[Kind]) -> Result<Snapshot, StoreError> {
        let lists = kinds.iter().map(|kind| self.list(*kind));
        let mut snapshot = Snapshot::default();
        for (kind, objects) in kinds.iter().zip(try_join_all(lists).await?) {
            for object in objects {
                match intake::take(*kind, object) {
                    Ok(stored) => {
                        snapshot.problems.extend(intake::faults(&stored.object));
                        snapshot.objects.insert(stored.object.reference(), stored.object);
                    }
                    Err(problem) => snapshot.problems.push(*problem),
                }
            }
        }
        snapshot.problems.sort();
        Ok(snapshot)
    }

    pub(crate) async fn check(&self, kinds: &[Kind]) -> Vec<Problem> {
        let by_gateways = keys::are_read_by_gateways(kinds);
        let kinds = kinds.iter().filter(|kind| !by_gateways || **kind != Kind::Secret);
        let sources = kinds.map(|kind| Source::of(*kind, &self.server.namespace));
        let checks = sources
            .map(|source| async move { source.selection().check(&self.server.client).await.err() });
        join_all(checks).await.into_iter().flatten().collect()
    }

    async fn list(&self, kind: Kind) -> Result<Vec<DynamicObject>, StoreError> {
        let selection = Source::of(kind, &self.server.namespace).selection();
        let listed = selection.list(&self.server.client).await;
        listed.map_err(|source| StoreError::List { kind, source })
    }

    pub(crate) async fn get(&self, object: &ObjectRef) -> Result<Option<Object>, StoreError> {
        let found = self.server.requests().get(&target(object)).await;
        match found.map_err(|source| failed("read", object, source))? {
            Some(found) => match intake::take(object.kind, found) {
                Ok(stored) => Ok(Some(stored.object)),
                Err(problem) => Err(StoreError::Foreign(problem)),
            },
            None => Ok(None),
        }
    }

    pub(crate) async fn put(&self, object: &Object) -> Result<Object, StoreError> {
        let reference = object.reference();
        if !is_ours(reference.kind) {
            return Err(StoreError::NotOurs { object: reference });
        }
        let mut object = object.clone();
        decode::mark_ours(&mut object);
        let want = content(&object);
        if let Some(stored) = self.cache().holding(&reference, &want) {
            return Ok(stored);
        }
        // A key that is there, but not cached here, must not be lost: the peer has its public half.
        let is_new_key = reference.kind == Kind::Secret && object.uid().is_empty();
        let (requests, target) = (self.server.requests(), target(&reference));
        let written = if is_new_key {
            requests.create(&target, &want).await
        } else {
            requests.apply(&target, requests::Part::AllButStatus, &want).await
        };
        let written = written.map_err(|source| failed("write", &reference, source))?;
        let mut stored = intake::take(reference.kind, written).map_err(StoreError::Foreign)?;
        self.cache().wrote(&mut stored, Part::Content, want);
        Ok(stored.object)
    }

    pub(crate) async fn delete(&self, object: &ObjectRef) -> Result<(), StoreError> {
        if !is_ours(object.kind) {
            return Err(StoreError::NotOurs { object: object.clone() });
        }
        // A namesake that took its place meanwhile stays.
        let (uid, how) = (self.cache().uid(object), DeleteParams::default());
        let deleted = self.server.requests().delete(&target(object), uid, how).await;
        deleted.map_err(|error| failed("remove", object, error))?;
        self.cache().lost(object);
        Ok(())
    }

    pub(crate) fn put_problems(&self, problems: &[Problem]) -> bool {
        let mut known = lock(&self.known.problems);
        let changed = *known != problems;
        known.clear();
        known.extend_from_slice(problems);
        changed
    }

    pub(crate) fn problems(&self) -> Vec<Problem> {
        lock(&self.known.problems).clone()
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        lock(&self.known.cache)
    }

    fn saw(&self, stored: &mut Stored) {
        self.cache().saw(stored);
    }

    fn lost(&self, object: &ObjectRef) {
        self.cache().lost(object);
    }
}

/// Locks it even after a panic: nothing under these locks can leave it half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(step: &'static str, object: &ObjectRef, source: ApiError) -> StoreError {
    StoreError::Request { step, object: object.clone(), source }
}
