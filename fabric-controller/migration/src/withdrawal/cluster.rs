//! The API server, as far as it is needed here.

use std::time::Duration;

use fabric_kube_client::reflector::Selection;
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer};
use kube::api::{ApiResource, DeleteParams, DynamicObject, PartialObjectMeta};
use kube::{Client, Resource};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::WithdrawError;
use fabric_kube_client::Emitter;

/// Time until a request whose answers are late is given up.
const ANSWERED: Duration = Duration::from_secs(60);
/// Pause before such a request is sent again.
const RETRY: Duration = Duration::from_millis(500);

pub(crate) struct Cluster {
    client: Client,
    requests: Requests,
    pub(super) emitter: Emitter,
}

/// A kind, as it is called in paths.
pub(crate) fn kind<K: Resource<DynamicType = ()>>() -> ApiResource {
    ApiResource::erase::<K>(&())
}

fn failed(verb: &'static str, what: String, source: ApiError) -> WithdrawError {
    WithdrawError::Api { verb, what, source }
}

/// Sends a request until it is answered: a busy API server answers late, or asks for patience.
pub(super) async fn answered<T>(
    mut request: impl AsyncFnMut() -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let until = Instant::now() + ANSWERED;
    loop {
        match request().await {
            Err(error) if is_late(&error) && Instant::now() < until => {
                tracing::warn!(%error, "tried again");
                sleep(RETRY).await;
            }
            answer => return answer,
        }
    }
}

/// True if the same request may be answered later: too many requests, unavailable, timeout.
fn is_late(error: &ApiError) -> bool {
    matches!(error, ApiError::Timeout { .. } | ApiError::Refused { code: 429 | 503 | 504, .. })
}

impl Cluster {
    pub(crate) fn new(server: &ApiServer) -> Self {
        let client = server.client.clone();
        let emitter = Emitter::new(client.clone(), ["withdrawal"; 2], "Withdraw");
        Self { requests: Requests::new(client.clone(), ApiServer::MANAGER), client, emitter }
    }

    /// Lists objects in all namespaces. A kind without a definition has none.
    pub(crate) async fn list(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<DynamicObject>, WithdrawError> {
        let all = Selection::all(kind.clone()).labels(labels);
        answered(async || all.list(&self.client).await).await.or_else(|error| none(kind, error))
    }

    /// The same, but only their metadata.
    pub(super) async fn list_metadata(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<PartialObjectMeta<DynamicObject>>, WithdrawError> {
        let all = Selection::all(kind.clone()).labels(labels);
        let listed = answered(async || all.list_metadata(&self.client, None).await).await;
        listed.or_else(|error| none(kind, error))
    }

    /// An object of a namespace, if it is there.
    pub(crate) async fn get(
        &self,
        kind: &ApiResource,
        (namespace, name): (&str, &str),
    ) -> Result<Option<DynamicObject>, WithdrawError> {
        let target = Target::new(kind.clone(), (namespace.to_owned(), name.to_owned()));
        let found = answered(async || self.requests.get(&target).await).await;
        found.map_err(|error| failed("read", target.to_string(), error))
    }

    /// Deletes that very object, and all that it owns. Its absence is no error.
    pub(super) async fn delete(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
    ) -> Result<(), WithdrawError> {
        self.delete_with(kind, object, DeleteParams::background()).await
    }

    /// Removes it without waiting for whatever it stands for to have ended.
    pub(super) async fn give_up(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
    ) -> Result<(), WithdrawError> {
        self.delete_with(kind, object, DeleteParams::default().grace_period(0)).await
    }

    async fn delete_with(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        how: DeleteParams,
    ) -> Result<(), WithdrawError> {
        let target = Target::of(kind, object.meta());
        let uid = &object.meta().uid;
        let deleted =
            answered(async || self.requests.delete(&target, uid.clone(), how.clone()).await).await;
        past(deleted).map_err(|error| failed("remove", target.to_string(), error))
    }

    /// Deletes all with these labels in a namespace.
    pub(super) async fn delete_all(
        &self,
        kind: &ApiResource,
        namespace: &str,
        labels: &str,
    ) -> Result<(), WithdrawError> {
        let deleted =
            answered(async || self.requests.delete_all(kind, namespace, labels).await).await;
        past(deleted)
            .map_err(|error| failed("remove", format!("{} of {namespace}", kind.plural), error))
    }

    /// Merges that into an object. Not being there is no error.
    pub(super) async fn merge(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        part: Part,
        change: &Value,
    ) -> Result<(), WithdrawError> {
        let target = Target::of(kind, object.meta());
        let merged = answered(async || self.requests.merge(&target, part, change).await).await;
        past(merged).map_err(|error| failed("change", target.to_string(), error))
    }

    /// Applies all fields of a part of an object that weft owns from now on. Its absence is no
    /// error.
    pub(super) async fn apply(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        part: Part,
        all: &Value,
    ) -> Result<(), WithdrawError> {
        let target = Target::of(kind, object.meta());
        let applied = answered(async || self.requests.apply(&target, part, all).await).await;
        past(applied).map_err(|error| failed("change", target.to_string(), error))
    }
}

/// Leaves out that an object is gone, or another has taken its name.
fn past<T>(answer: Result<T, ApiError>) -> Result<(), ApiError> {
    match answer {
        Err(ApiError::Refused { code: 404 | 409, .. }) => Ok(()),
        answer => answer.map(drop),
    }
}

fn none<T>(kind: &ApiResource, error: ApiError) -> Result<Vec<T>, WithdrawError> {
    if matches!(error, ApiError::Refused { code: 404, .. }) {
        return Ok(Vec::new());
    }
    Err(failed("list", kind.plural.clone(), error))
}
