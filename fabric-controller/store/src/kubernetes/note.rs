//! Notes, each in a ConfigMap of the program's own namespace. Where a chart has made that, it goes
//! with the chart.

use fabric_kube_client::requests::Part;
use fabric_kube_client::{ApiError, target};
use fabric_objects::{Kind, ObjectRef};
use kube::api::{DeleteParams, DynamicObject};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{Kubernetes, lock};
use crate::error::StoreError;

/// The entry of the ConfigMap's data.
const NOTE: &str = "note";

impl Kubernetes {
    /// Fails if another program has written it since this one read or wrote it.
    pub(crate) async fn put_note(
        &self,
        name: &str,
        note: &impl Serialize,
    ) -> Result<(), StoreError> {
        let text = serde_json::to_string(note)
            .map_err(|source| StoreError::EncodeJson { name: name.to_owned(), source })?;
        let map = self.map_of(name);
        let version = lock(&self.known.notes).get(name).cloned();
        let want = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": map.name, "namespace": map.namespace, "resourceVersion": version},
            "data": {(NOTE): text},
        });
        let (requests, target) = (self.server.requests(), target(&map));
        let written = match version {
            Some(_) => requests.apply(&target, Part::AllButStatus, &want).await,
            None => requests.create(&target, &want).await,
        };
        if matches!(written, Err(ApiError::Refused { code: 409, .. })) {
            return Err(StoreError::NoteChanged(name.to_owned()));
        }
        let written = written.map_err(|source| failed("keep", name, source))?;
        self.know(name, written.metadata.resource_version);
        Ok(())
    }

    pub(crate) async fn note<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        let found = self.found(name).await?;
        let version = found.as_ref().and_then(|found| found.metadata.resource_version.clone());
        self.know(name, version);
        let Some(found) = found else { return Ok(None) };
        let Some(text) = found.data["data"][NOTE].as_str() else { return Ok(None) };
        let note = serde_json::from_str(text);
        Ok(note.inspect_err(|error| tracing::warn!(name, %error, "a note is unreadable")).ok())
    }

    /// Returns whether nobody else has written it since this program read or wrote it.
    pub(crate) async fn is_note_current(&self, name: &str) -> Result<bool, StoreError> {
        let found = self.found(name).await?;
        let version = found.and_then(|found| found.metadata.resource_version);
        Ok(version == lock(&self.known.notes).get(name).cloned())
    }

    async fn found(&self, name: &str) -> Result<Option<DynamicObject>, StoreError> {
        let found = self.server.requests().get(&target(&self.map_of(name))).await;
        found.map_err(|source| failed("read", name, source))
    }

    fn know(&self, name: &str, version: Option<String>) {
        let mut known = lock(&self.known.notes);
        match version {
            Some(version) => _ = known.insert(name.to_owned(), version),
            None => _ = known.remove(name),
        }
    }

    pub(crate) async fn delete_note(&self, name: &str) -> Result<(), StoreError> {
        lock(&self.known.notes).remove(name);
        let target = target(&self.map_of(name));
        let deleted = self.server.requests().delete(&target, None, DeleteParams::default()).await;
        deleted.map(drop).map_err(|source| failed("remove", name, source))
    }

    fn map_of(&self, name: &str) -> ObjectRef {
        ObjectRef::new(Kind::ConfigMap, &self.server.namespace, &format!("weft-{name}"))
    }
}

fn failed(step: &'static str, name: &str, source: ApiError) -> StoreError {
    StoreError::Note { step, name: name.to_owned(), source }
}
