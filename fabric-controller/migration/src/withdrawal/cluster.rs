//! The API server, as far as it is needed here.

use fabric_kube_client::reflector::Selection;
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer};
use kube::api::{ApiResource, DeleteParams, DynamicObject, PartialObjectMeta};
use kube::{Client, Resource};
use serde_json::Value;

use super::WithdrawError;
use gateway_workloads::Emitter;

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
        Selection::all(kind.clone())
            .labels(labels)
            .list(&self.client)
            .await
            .or_else(|error| none(kind, error))
    }

    /// The same, but only their metadata.
    pub(super) async fn list_metadata(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<PartialObjectMeta<DynamicObject>>, WithdrawError> {
        let all = Selection::all(kind.clone()).labels(labels);
        all.list_metadata(&self.client, None).await.or_else(|error| none(kind, error))
    }

    /// An object of a namespace, if it is there.
    pub(crate) async fn get(
        &self,
        kind: &ApiResource,
        (namespace, name): (&str, &str),
    ) -> Result<Option<DynamicObject>, WithdrawError> {
        let target = Target::new(kind.clone(), (namespace.to_owned(), name.to_owned()));
        let found = self.requests.get(&target).await;
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
        let deleted = self.requests.delete(&target, object.meta().uid.clone(), how).await;
        past(deleted).map_err(|error| failed("remove", target.to_string(), error))
    }

    /// Deletes all with these labels in a namespace.
    pub(super) async fn delete_all(
        &self,
        kind: &ApiResource,
        namespace: &str,
        labels: &str,
    ) -> Result<(), WithdrawError> {
        let deleted = self.requests.delete_all(kind, namespace, labels).await;
        past(deleted)
            .map_err(|error| failed("remove", format!("{} of {namespace}", kind.plural), error))
    }

    /// Merges that into an object. Not being there is no error.
    pub(super) async fn merge(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        change: &Value,
    ) -> Result<(), WithdrawError> {
        self.merge_part(kind, object, Part::AllButStatus, change).await
    }

    pub(super) async fn merge_part(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        part: Part,
        change: &Value,
    ) -> Result<(), WithdrawError> {
        let target = Target::of(kind, object.meta());
        let merged = self.requests.merge(&target, part, change).await;
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
        let applied = self.requests.apply(&target, part, all).await;
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
