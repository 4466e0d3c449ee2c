//! Notes, each in a ConfigMap of the program's own namespace. Where a chart has made that, it goes
//! with the chart.

use kube::api::DeleteParams;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::access::answer;
use super::{Kubernetes, is_absent, lock};
use crate::{ApiError, Kind, ObjectRef, StoreError};

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
        let written = self.apply(&map, &want).await;
        written.map_err(|source| failed("keep", name, source))?;
        lock(&self.known.notes).insert(name.to_owned(), text);
        Ok(true)
    }

    pub(crate) async fn note<T: DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Option<T>, StoreError> {
        let map = self.map_of(name);
        let found = match answer(map.kind.as_str(), self.access.around(&map).get(&map.name)).await {
            Err(error) if is_absent(&error, &map) => return Ok(None),
            found => found.map_err(|source| failed("read", name, source))?,
        };
        let Some(text) = found.data["data"][NOTE].as_str() else { return Ok(None) };
        let note = serde_json::from_str(text);
        Ok(note.inspect_err(|error| tracing::warn!(name, %error, "a note is unreadable")).ok())
    }

    pub(crate) async fn delete_note(&self, name: &str) -> Result<(), StoreError> {
        lock(&self.known.notes).remove(name);
        let map = self.map_of(name);
        let request = async {
            let api = self.access.around(&map);
            api.delete(&map.name, &DeleteParams::default()).await
        };
        match answer(map.kind.as_str(), request).await {
            Err(error) if !is_absent(&error, &map) => Err(failed("remove", name, error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn map_of(&self, name: &str) -> ObjectRef {
        ObjectRef::new(Kind::ConfigMap, &self.access.namespace, &format!("weft-{name}"))
    }
}

fn failed(step: &'static str, name: &str, source: ApiError) -> StoreError {
    StoreError::Note { step, name: name.to_owned(), source }
}
