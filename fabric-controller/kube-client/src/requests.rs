//! Requests about objects of any kind. Each has a time limit, none quotes what a Secret holds, and
//! what is removed is the very object that was meant.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams,
};
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::answer::answer;
use crate::error::ApiError;

/// Namespace, empty for an object without one, and name.
pub type Name = (String, String);

pub fn name(metadata: &ObjectMeta) -> Name {
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

/// Requests of one writer.
#[derive(Clone)]
pub struct Requests {
    client: Client,
    /// Owner of what is created or applied, in `metadata.managedFields`.
    manager: &'static str,
}

/// Names an object of a kind. Prints as `kind namespace/name`.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    resource: ApiResource,
    namespace: String,
    name: String,
}

/// Part of an object that one request writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    AllButStatus,
    Status,
}

impl Target {
    /// The namespace is empty for an object without one.
    pub fn new(resource: ApiResource, (namespace, name): Name) -> Self {
        Self { resource, namespace, name }
    }

    pub fn of(resource: &ApiResource, metadata: &ObjectMeta) -> Self {
        Self::new(resource.clone(), name(metadata))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &str {
        &self.resource.kind
    }

    /// True if there is no such object; an absent kind is reported with the same code.
    pub fn is_absent(&self, error: &ApiError) -> bool {
        let name = format!("{:?}", self.name);
        matches!(error, ApiError::Refused { code: 404, message } if message.contains(&name))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = if self.namespace.is_empty() { "" } else { "/" };
        write!(f, "{} {}{inside}{}", self.resource.kind, self.namespace, self.name)
    }
}

impl Requests {
    pub fn new(client: Client, manager: &'static str) -> Self {
        Self { client, manager }
    }

    /// `None` if there is no such object.
    pub async fn get(&self, target: &Target) -> Result<Option<DynamicObject>, ApiError> {
        found(target, answer(target.kind(), self.api(target).get(&target.name)).await)
    }

    /// The same as an object of its type.
    pub async fn read<T: DeserializeOwned>(&self, target: &Target) -> Result<Option<T>, ApiError> {
        self.get(target).await?.map(|object| converted(&object)).transpose()
    }

    pub async fn create(
        &self,
        target: &Target,
        object: &impl Serialize,
    ) -> Result<DynamicObject, ApiError> {
        let object = converted(object)?;
        answer(target.kind(), self.api(target).create(&self.parameters(), &object)).await
    }

    /// Replaces an object in the version that was read.
    pub async fn replace(
        &self,
        target: &Target,
        object: &impl Serialize,
    ) -> Result<DynamicObject, ApiError> {
        let (api, parameters, object) = (self.api(target), self.parameters(), converted(object)?);
        answer(target.kind(), api.replace(&target.name, &parameters, &object)).await
    }

    fn parameters(&self) -> PostParams {
        let field_manager = Some(self.manager.to_owned());
        PostParams { field_manager, ..PostParams::default() }
    }

    /// Applies all fields that this writer owns from now on.
    pub async fn apply(
        &self,
        target: &Target,
        part: Part,
        object: &(impl Serialize + fmt::Debug),
    ) -> Result<DynamicObject, ApiError> {
        let parameters = PatchParams::apply(self.manager).force();
        self.patch(target, part, &parameters, &Patch::Apply(object)).await
    }

    /// Applies an object that is not there yet. One of another writer that has its name by now stays.
    pub async fn apply_new(
        &self,
        target: &Target,
        object: &(impl Serialize + fmt::Debug),
    ) -> Result<DynamicObject, ApiError> {
        let parameters = PatchParams::apply(self.manager);
        self.patch(target, Part::AllButStatus, &parameters, &Patch::Apply(object)).await
    }

    /// Merges a change into an object that is there.
    pub async fn merge(
        &self,
        target: &Target,
        part: Part,
        change: &(impl Serialize + fmt::Debug),
    ) -> Result<DynamicObject, ApiError> {
        let parameters =
            PatchParams { field_manager: Some(self.manager.to_owned()), ..PatchParams::default() };
        self.patch(target, part, &parameters, &Patch::Merge(change)).await
    }

    /// Merges a change into an object whose content is not even read.
    pub async fn merge_unread(
        &self,
        target: &Target,
        change: &(impl Serialize + fmt::Debug),
    ) -> Result<(), ApiError> {
        let (api, patch) = (self.api(target), Patch::Merge(change));
        let parameters = PatchParams::default();
        let merged = api.patch_metadata(&target.name, &parameters, &patch);
        answer(target.kind(), merged).await.map(drop)
    }

    async fn patch(
        &self,
        target: &Target,
        part: Part,
        parameters: &PatchParams,
        patch: &Patch<impl Serialize + fmt::Debug>,
    ) -> Result<DynamicObject, ApiError> {
        let (api, name) = (self.api(target), &target.name);
        match part {
            Part::AllButStatus => answer(target.kind(), api.patch(name, parameters, patch)).await,
            Part::Status => answer(target.kind(), api.patch_status(name, parameters, patch)).await,
        }
    }

    /// Removes the object of that uid and of the version in `how`; without a uid, the one that is
    /// there now. Returns false if it is gone, or another one has its name.
    pub async fn delete(
        &self,
        target: &Target,
        uid: Option<String>,
        mut how: DeleteParams,
    ) -> Result<bool, ApiError> {
        let api = self.api(target);
        let mut uid = uid.filter(|uid| !uid.is_empty());
        // A caller with nothing to remove may lack the right to.
        if uid.is_none() {
            let there = answer(target.kind(), api.get_metadata(&target.name)).await;
            let Some(there) = found(target, there)? else { return Ok(false) };
            uid = there.metadata.uid;
        }
        how.preconditions.get_or_insert_default().uid = uid;
        match answer(target.kind(), api.delete(&target.name, &how)).await {
            Err(error) if target.is_absent(&error) || is_another(&error) => Ok(false),
            deleted => deleted.map(|_| true),
        }
    }

    /// Removes the objects of a namespace that have these labels.
    pub async fn delete_all(
        &self,
        resource: &ApiResource,
        namespace: &str,
        labels: &str,
    ) -> Result<(), ApiError> {
        let api = Api::<DynamicObject>::namespaced_with(self.client.clone(), namespace, resource);
        let (how, which) = (DeleteParams::background(), ListParams::default().labels(labels));
        answer(&resource.kind, api.delete_collection(&how, &which)).await.map(drop)
    }

    fn api(&self, target: &Target) -> Api<DynamicObject> {
        match target.namespace.as_str() {
            "" => Api::all_with(self.client.clone(), &target.resource),
            inside => Api::namespaced_with(self.client.clone(), inside, &target.resource),
        }
    }
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests").field("manager", &self.manager).finish_non_exhaustive()
    }
}

/// The same object as another type.
fn converted<T: DeserializeOwned>(object: &impl Serialize) -> Result<T, ApiError> {
    serde_json::to_value(object).and_then(serde_json::from_value).map_err(ApiError::Answer)
}

fn found<T>(target: &Target, answer: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match answer {
        Err(error) if target.is_absent(&error) => Ok(None),
        answer => answer.map(Some),
    }
}

/// True if the object has another uid than the one that was meant.
fn is_another(error: &ApiError) -> bool {
    matches!(error, ApiError::Refused { code: 409, message } if message.to_lowercase().contains("uid"))
}
