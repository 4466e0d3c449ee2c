//! The API server, as far as it is needed here.

use fabric_store::ApiServer;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, ListParams, PartialObjectMeta, Patch, PatchParams,
    PostParams, Preconditions,
};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::WithdrawError;
use crate::writer::answer;

pub(super) struct Cluster {
    client: Client,
}

/// A kind, as it is called in paths.
pub(super) fn kind<K: Resource<DynamicType = ()>>() -> ApiResource {
    ApiResource::erase::<K>(&())
}

pub(super) fn failed(verb: &'static str, what: &str, source: kube::Error) -> WithdrawError {
    WithdrawError::Api { verb, what: what.to_owned(), source: Box::new(source) }
}

/// Kind and name for messages.
pub(super) fn name(kind: &ApiResource, object: &impl Resource) -> String {
    let (kind, name) = (&kind.kind, object.name_any());
    match object.namespace() {
        Some(inside) => format!("{kind} {inside}/{name}"),
        None => format!("{kind} {name}"),
    }
}

impl Cluster {
    pub(super) fn new(server: &ApiServer) -> Self {
        Self { client: server.client.clone() }
    }

    /// Lists objects in all namespaces. A kind without a definition has none.
    pub(super) async fn list(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<DynamicObject>, WithdrawError> {
        let parameters = ListParams::default().labels(labels);
        let listed = answer(self.all(kind).list(&parameters)).await;
        listed.map(|list| list.items).or_else(|error| none(kind, error))
    }

    /// The same, but only their metadata.
    pub(super) async fn list_metadata(
        &self,
        kind: &ApiResource,
        labels: &str,
    ) -> Result<Vec<PartialObjectMeta<DynamicObject>>, WithdrawError> {
        let parameters = ListParams::default().labels(labels);
        let listed = answer(self.all(kind).list_metadata(&parameters)).await;
        listed.map(|list| list.items).or_else(|error| none(kind, error))
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
        parameters: DeleteParams,
    ) -> Result<(), WithdrawError> {
        let preconditions = Preconditions { uid: object.uid(), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..parameters };
        let api = self.around(kind, object);
        match answer(api.delete(&object.name_any(), &parameters)).await {
            Err(error) if !is_past(&error) => Err(failed("remove", &name(kind, object), error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Merges that into an object. Not being there is no error.
    pub(super) async fn merge(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        change: &Value,
    ) -> Result<(), WithdrawError> {
        let api = self.around(kind, object);
        let (to, change) = (object.name_any(), Patch::Merge(change));
        let merged = answer(api.patch(&to, &PatchParams::default(), &change)).await;
        changed(kind, object, merged)
    }

    /// Applies all fields of an object, or of its status, that weft owns from now on. Its absence
    /// is no error.
    pub(super) async fn apply(
        &self,
        kind: &ApiResource,
        object: &impl Resource,
        all: &Value,
        is_status: bool,
    ) -> Result<(), WithdrawError> {
        let parameters = PatchParams::apply(ApiServer::MANAGER).force();
        let api = self.around(kind, object);
        let (to, all) = (object.name_any(), Patch::Apply(all));
        let applied = if is_status {
            answer(api.patch_status(&to, &parameters, &all)).await
        } else {
            answer(api.patch(&to, &parameters, &all)).await
        };
        changed(kind, object, applied)
    }

    pub(super) async fn create<K>(&self, namespace: &str, object: &K) -> kube::Result<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
    {
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        answer(api.create(&PostParams::default(), object)).await
    }

    fn all(&self, kind: &ApiResource) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), kind)
    }

    fn around(&self, kind: &ApiResource, object: &impl Resource) -> Api<DynamicObject> {
        match object.namespace() {
            Some(inside) => Api::namespaced_with(self.client.clone(), &inside, kind),
            None => self.all(kind),
        }
    }
}

fn changed<T>(
    kind: &ApiResource,
    object: &impl Resource,
    result: kube::Result<T>,
) -> Result<(), WithdrawError> {
    match result {
        Err(error) if !is_past(&error) => Err(failed("change", &name(kind, object), error)),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// True if it is gone, or another has taken its name.
fn is_past(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 404 | 409))
}

fn none<T>(kind: &ApiResource, error: kube::Error) -> Result<Vec<T>, WithdrawError> {
    if matches!(&error, kube::Error::Api(status) if status.code == 404) {
        return Ok(Vec::new());
    }
    Err(failed("list", &kind.plural, error))
}
