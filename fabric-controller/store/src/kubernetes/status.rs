//! Writes a part of an object that is there: the very one, and no namesake.

use fabric_kube_client::{ApiError, requests, target};
use fabric_objects::{Object, ObjectRef, decode};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::cache::{Part, has_status};
use super::content::{local, part, status};
use super::{Kubernetes, failed, intake};
use crate::error::StoreError;

/// Tries of a write, each of which another writer may precede.
const TRIES: usize = 4;
/// Refusal where Liqo's own definition of gateways is installed, which has no conditions.
const UNDECLARED: &str = ".status.conditions: field not declared in schema";
const WRITE_STATUS: &str = "write the status of";

/// True of a version that is not written over.
pub(crate) type YieldsTo<'a> = &'a (dyn Fn(&Object) -> bool + Sync);

impl Kubernetes {
    /// Writes nothing over what `yields_to` returns true for.
    pub(crate) async fn put_status(
        &self,
        object: &Object,
        yields_to: Option<YieldsTo<'_>>,
    ) -> Result<bool, StoreError> {
        check(object)?;
        let mut wrote = false;
        let local = local(object).filter(|want| !self.cache().has_local(object, want));
        if let Some(want) = local {
            self.put_part((object, Part::Local, want), yields_to).await?;
            wrote = true;
        }
        let want = status(object);
        if !self.cache().has_status(object, &want) {
            self.put_part((object, Part::Status, want), yields_to).await?;
            wrote = true;
        }
        Ok(wrote)
    }

    pub(crate) async fn put_status_if_last(&self, object: &Object) -> Result<bool, StoreError> {
        check(object)?;
        let reference = object.reference();
        let Some(version) = self.cache().version_written(object) else { return Ok(false) };
        let want = status(object);
        match self.apply_part(object, Part::Status, &version, &want).await {
            Err(ApiError::Refused { code: 409, .. }) => Ok(false),
            Err(error) if target(&reference).is_absent(&error) => Err(self.gone(object)),
            Err(source) => Err(failed(WRITE_STATUS, &reference, source)),
            Ok(written) => {
                self.wrote(&reference, Part::Status, want, written);
                Ok(true)
            }
        }
    }

    /// Writes against a version: without one, the API server would take the status for a namesake
    /// as well. After a conflict, the object is looked at again.
    async fn put_part(
        &self,
        (object, what, want): (&Object, Part, Value),
        yields_to: Option<YieldsTo<'_>>,
    ) -> Result<(), StoreError> {
        let reference = object.reference();
        // Another writer's version may have been observed, and not been looked at by who writes this one.
        let mut known = match yields_to {
            None => self.cache().version(object),
            Some(_) => self.cache().version_written(object),
        };
        let mut tries = 0;
        let written = loop {
            let version = match known.take() {
                Some(version) => version,
                None => self.version_of(object, yields_to).await?,
            };
            tries += 1;
            match self.apply_part(object, what, &version, &want).await {
                Err(ApiError::Refused { code: 409, .. }) if tries < TRIES => {}
                Err(error) if target(&reference).is_absent(&error) => return Err(self.gone(object)),
                Err(source) => {
                    let status = what == Part::Status;
                    let step = if status { WRITE_STATUS } else { "fill in" };
                    return Err(failed(step, &reference, source));
                }
                Ok(written) => break written,
            }
        };
        self.wrote(&reference, what, want, written);
        Ok(())
    }

    fn wrote(&self, object: &ObjectRef, what: Part, want: Value, written: DynamicObject) {
        match intake::take(object.kind, written) {
            Ok(mut stored) => self.cache().wrote(&mut stored, what, want),
            // The part was taken; faults elsewhere are reported by the watch.
            Err(_) => self.cache().lost(object),
        }
    }

    async fn apply_part(
        &self,
        object: &Object,
        what: Part,
        version: &str,
        want: &Value,
    ) -> Result<DynamicObject, ApiError> {
        let (requests, target) = (self.server.requests(), target(&object.reference()));
        if what == Part::Local {
            let spec = json!({ (decode::LOCAL): want });
            let body = part(object, version, "spec", spec);
            return requests.apply(&target, requests::Part::AllButStatus, &body).await;
        }
        let body = |status: Value| part(object, version, "status", status);
        let applied = requests.apply(&target, requests::Part::Status, &body(want.clone())).await;
        let lacks_conditions = matches!(&applied,
            Err(ApiError::Refused { message, .. }) if message.contains(UNDECLARED));
        if !lacks_conditions {
            return applied;
        }
        let mut declared = want.clone();
        if let Some(fields) = declared.as_object_mut() {
            fields.remove("conditions");
        }
        requests.apply(&target, requests::Part::Status, &body(declared)).await
    }

    /// The version of the very object, unless it is one to yield to.
    async fn version_of(
        &self,
        object: &Object,
        yields_to: Option<YieldsTo<'_>>,
    ) -> Result<String, StoreError> {
        let reference = object.reference();
        let found = self.server.requests().get(&target(&reference)).await;
        let found = found.map_err(|source| failed("read", &reference, source))?;
        let Some(found) = found else { return Err(self.gone(object)) };
        if found.metadata.uid.as_deref() != Some(object.uid()) {
            return Err(self.gone(object));
        }
        let version = found.resource_version().unwrap_or_default();
        match intake::take(reference.kind, found) {
            Ok(stored) if yields_to.is_some_and(|yields_to| yields_to(&stored.object)) => {
                Err(StoreError::Overtaken { object: reference })
            }
            Ok(_) | Err(_) => Ok(version),
        }
    }

    fn gone(&self, object: &Object) -> StoreError {
        let reference = object.reference();
        if self.cache().uid(&reference).as_deref() == Some(object.uid()) {
            self.cache().lost(&reference);
        }
        StoreError::Gone { object: reference }
    }
}

fn check(object: &Object) -> Result<(), StoreError> {
    let reference = object.reference();
    if !has_status(reference.kind) {
        return Err(StoreError::NoStatus { object: reference });
    }
    if object.uid().is_empty() {
        return Err(StoreError::NoUid { object: reference });
    }
    Ok(())
}
