//! Notes, each in a ConfigMap of the program's own namespace. Where a chart has made that, it goes
//! with the chart.

use fabric_kube_client::requests::Part;
use fabric_kube_client::{ApiError, target};
use fabric_objects::{Kind, ObjectRef};
use kube::api::DeleteParams;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{Kubernetes, lock};
use crate::error::StoreError;

/// The entry of the ConfigMap's data.
const NOTE: &str = "note";

impl Kubernetes {
    pub(crate) async fn put_note(
        &self,
        name: &str,
        note: &impl Serialize,
    ) -> Result<bool, StoreError> {
        let text = serde_json::to_string(note)
            .map_err(|source| StoreError::EncodeJson { name: name.to_owned(), source })?;
        if lock(&self.known.notes).get(name) == Some(&text) {
            return Ok(false);
        }
        let map = self.map_of(name);
        let want = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": map.name, "namespace": map.namespace},
            "data": {(NOTE): text},
        });
        let requests = self.server.requests();
        let written = requests.apply(&target(&map), Part::AllButStatus, &want).await;
        written.map_err(|source| failed("keep", name, source))?;
        lock(&self.known.notes).insert(name.to_owned(), text);
        Ok(true)
    }

    pub(crate) async fn note<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        let map = self.map_of(name);
        let found = self.server.requests().get(&target(&map)).await;
        let Some(found) = found.map_err(|source| failed("read", name, source))? else {
            return Ok(None);
        };
        let Some(text) = found.data["data"][NOTE].as_str() else { return Ok(None) };
        let note = serde_json::from_str(text);
        Ok(note.inspect_err(|error| tracing::warn!(name, %error, "a note is unreadable")).ok())
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
