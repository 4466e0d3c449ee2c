//! Conversion of the API server's objects into those that weft works with.

use std::collections::BTreeSet;

use fabric_kube_client::ApiServer;
use fabric_objects::{Kind, Object, ObjectRef, Problem, decode};
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use serde_json::Value;

/// An object as the API server holds it.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// The object without what changes with every write, by any writer.
    pub(super) object: Object,
    /// Higher after each change, of the same object.
    pub(super) version: u64,
    /// Keys of the labels and annotations that weft has set.
    pub(super) owned: BTreeSet<String>,
}

pub(super) fn reference(kind: Kind, metadata: &ObjectMeta) -> ObjectRef {
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    ObjectRef::new(kind, namespace, metadata.name.as_deref().unwrap_or_default())
}

/// Reads an object, or returns which field cannot be read. Fields unknown to weft are those
/// of a newer version, and are ignored.
pub(super) fn take(kind: Kind, mut from: DynamicObject) -> Result<Stored, Box<Problem>> {
    let reference = reference(kind, &from.metadata);
    let version = from.metadata.resource_version.take();
    let version = version.and_then(|version| version.parse().ok()).unwrap_or_default();
    let owned = owned(&from.metadata);
    from.metadata.managed_fields = None;
    let problem = |field: &str, message: String| {
        let field = Some(field.to_owned()).filter(|field| !field.is_empty());
        let object = Some(reference.clone());
        Box::new(Problem { source: String::new(), object, field, message })
    };
    if let Some(found) = from.types.as_ref().map(|types| &types.api_version)
        && found != kind.api_version()
    {
        let expected = kind.api_version();
        return Err(problem("apiVersion", format!("found {found:?}; expected {expected:?}")));
    }
    let value = serde_json::to_value(from).map_err(|error| problem("", error.to_string()))?;
    let (object, unknown) = decode::object(kind, value).map_err(|error| {
        // The message of a wrong value may quote it.
        let hidden = || "not as expected: data holds base64".to_owned();
        let message = if kind == Kind::Secret { hidden() } else { error.message };
        problem(&error.path, message)
    })?;
    if !unknown.is_empty() {
        tracing::trace!(object = %reference, ?unknown, "fields of another version");
    }
    Ok(Stored { object: without_reports(object), version, owned })
}

/// Leaves out of a Node what its kubelet reports every few seconds and the names of its images: nothing
/// follows from them, and there may be thousands of nodes.
fn without_reports(object: Object) -> Object {
    let mut node = match Node::try_from(object) {
        Ok(node) => node,
        Err(other) => return other,
    };
    if let Some(status) = &mut node.status {
        let addresses = status.addresses.take();
        *status = NodeStatus { addresses, ..NodeStatus::default() };
    }
    if let Some(annotations) = &mut node.metadata.annotations {
        annotations.retain(|key, _| key.contains("weft.dev/") || key.contains("liqo.io/"));
    }
    node.into()
}

/// Returns the faults of an object that could be read.
pub(super) fn faults(object: &Object) -> Vec<Problem> {
    let reference = object.reference();
    let faults = object.faults().into_iter().map(|fault| Problem {
        source: String::new(),
        object: Some(reference.clone()),
        field: Some(fault.field),
        message: fault.message,
    });
    faults.collect()
}

fn owned(metadata: &ObjectMeta) -> BTreeSet<String> {
    let entries = metadata.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| {
        let is_apply = entry.operation.as_deref() == Some("Apply");
        is_apply
            && entry.manager.as_deref() == Some(ApiServer::MANAGER)
            && entry.subresource.is_none()
    });
    let fields = ours.filter_map(|entry| entry.fields_v1.as_ref()?.0.get("f:metadata"));
    fields
        .flat_map(|fields| [fields.get("f:labels"), fields.get("f:annotations")])
        .filter_map(|map| map.and_then(Value::as_object))
        .flat_map(|map| map.keys())
        .filter_map(|key| key.strip_prefix("f:").map(str::to_owned))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(kind: Kind, value: Value) -> Result<Stored, Box<Problem>> {
        take(kind, serde_json::from_value(value).unwrap())
    }

    fn configuration(spec: Value) -> Value {
        json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
            "metadata": {"name": "milan", "namespace": "t", "uid": "u", "resourceVersion": "17",
                "managedFields": [
                    {"manager": "kubectl", "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
                     "fieldsV1": {"f:metadata": {"f:labels": {"f:theirs": {}}}}},
                    {"manager": "weft", "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
                     "fieldsV1": {"f:metadata": {"f:labels": {".": {}, "f:ours": {}}}}}]},
            "spec": spec,
        })
    }

    #[test]
    fn volatile_metadata_is_dropped() {
        let spec = json!({"remote": {"cidr": {"pod": "10.1.0.0/16"}}, "of": "a newer version"});
        let stored = taken(Kind::Configuration, configuration(spec)).unwrap();
        assert_eq!(stored.version, 17);
        assert_eq!(stored.owned, ["ours".to_owned()].into());
        assert_eq!(stored.object.uid(), "u");
        assert_eq!(stored.object.metadata().resource_version, None);
        assert_eq!(stored.object.metadata().managed_fields, None);
        let Object::Configuration(configuration) = stored.object else { panic!() };
        assert_eq!(
            configuration.spec.remote.cidr.pod.0,
            ["10.1.0.0/16"],
            "both spellings are read"
        );
    }

    #[test]
    fn heartbeat_of_a_kubelet_is_no_change() {
        let node = |heartbeat: &str| {
            json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": "n1", "uid": "u", "annotations": {"other.example/time": heartbeat,
                    "fabric.weft.dev/pin-addresses": "true"}},
                "spec": {"podCIDRs": ["10.1.0.0/24"]},
                "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
                    "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat}],
                    "images": [{"names": ["a"]}]},
            })
        };
        let first = taken(Kind::Node, node("2026-01-01T00:00:00Z")).unwrap().object;
        assert_eq!(first, taken(Kind::Node, node("2026-01-01T00:00:10Z")).unwrap().object);
        let Object::Node(node) = first else { panic!() };
        assert_eq!(
            node.status.as_ref().unwrap().addresses.as_ref().unwrap()[0].address,
            "192.0.2.1"
        );
        assert_eq!(node.metadata.annotations.as_ref().unwrap().len(), 1);
    }

    #[test]
    fn unreadable_object_is_reported_with_field() {
        let spec = json!({"remote": {"cidr": {"pod": [7]}}});
        let problem = taken(Kind::Configuration, configuration(spec)).unwrap_err();
        assert_eq!(problem.object.as_ref().unwrap().to_string(), "Configuration t/milan");
        assert!(problem.to_string().contains("spec.remote.cidr.pod"), "{problem}");

        let mut foreign = configuration(json!({"remote": {}}));
        foreign["apiVersion"] = json!("networking.liqo.io/v1alpha9");
        let problem = taken(Kind::Configuration, foreign).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("apiVersion"));
        assert!(problem.message.ends_with("expected \"networking.liqo.io/v1beta1\""), "{problem}");
    }

    #[test]
    fn secret_fault_never_quotes_content() {
        let secret =
            json!({"metadata": {"name": "s", "namespace": "t"}, "data": {"privateKey": "hush!"}});
        let problem = taken(Kind::Secret, secret).unwrap_err();
        assert!(!problem.to_string().contains("hush"), "{problem}");
        let good = json!({"metadata": {"name": "s", "namespace": "t"}, "data": {"privateKey": "aHVzaA=="}});
        let stored = taken(Kind::Secret, good).unwrap();
        assert_eq!(format!("{:?}", stored.object), "Secret t/s <redacted>");
    }

    #[test]
    fn fault_names_field() {
        let spec =
            json!({"remote": {"cidr": {"pod": ["10.1.0.1/16"], "external": ["10.2.0.0/16"]}}});
        let stored = taken(Kind::Configuration, configuration(spec)).unwrap();
        let fields: Vec<_> = faults(&stored.object).into_iter().filter_map(|p| p.field).collect();
        assert!(fields.contains(&"spec.remote.cidr.pod[0]".to_owned()), "{fields:?}");
    }
}
