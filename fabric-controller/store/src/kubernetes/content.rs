//! Parts of an object that are sent, and whether they are there already.

use fabric_objects::{Object, decode};
use serde_json::{Map, Value, json};

use super::intake::Stored;

/// Fields of the metadata that weft writes.
const METADATA: [&str; 6] =
    ["name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"];

/// All but the status and what the API server writes.
pub(super) fn content(object: &Object) -> Value {
    let mut value = object.to_value();
    if let Some(map) = value.as_object_mut() {
        map.remove("status");
    }
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.retain(|key, _| METADATA.contains(&key.as_str()));
    }
    value
}

pub(super) fn status(object: &Object) -> Value {
    let status = object.to_value().get_mut("status").map(Value::take);
    status.filter(|status| !status.is_null()).unwrap_or_else(|| json!({}))
}

/// The part of a Configuration's spec that weft fills in.
pub(super) fn local(object: &Object) -> Option<Value> {
    decode::local(object)
}

/// Names an object, of that version and nothing else of that name, with one part of it.
pub(super) fn part(object: &Object, version: &str, key: &str, part: Value) -> Value {
    let kind = object.kind();
    let mut metadata =
        json!({"name": object.name(), "uid": object.uid(), "resourceVersion": version});
    if let Some(namespace) = object.namespace() {
        metadata["namespace"] = json!(namespace);
    }
    json!({
        "apiVersion": kind.api_version(), "kind": kind.as_str(), "metadata": metadata, key: part,
    })
}

/// True if the API server holds the result of [`content`]. Metadata that others have added stays;
/// metadata that weft has added and no longer sets does not.
pub(super) fn is_held(stored: &Stored, want: &Value) -> bool {
    let have = content(&stored.object);
    let rest = |value: &Value| {
        let mut rest = value.as_object().cloned().unwrap_or_default();
        rest.remove("metadata");
        rest
    };
    let wanted = |key: &str| want["metadata"][key].as_object();
    let keys = || ["labels", "annotations"].into_iter().filter_map(wanted).flat_map(Map::keys);
    let maps = ["labels", "annotations"].iter().all(|key| {
        let none = Map::new();
        let have = have["metadata"][key].as_object().unwrap_or(&none);
        wanted(key).into_iter().flatten().all(|(key, value)| have.get(key) == Some(value))
    });
    let lists = ["ownerReferences", "finalizers"].iter().all(|key| {
        let list = |value: &Value| value["metadata"][key].as_array().cloned().unwrap_or_default();
        let have = list(&have);
        list(want).iter().all(|item| have.contains(item))
    });
    let stale = stored.owned.iter().any(|owned| !keys().any(|key| key == owned));
    rest(&have) == rest(want) && maps && lists && !stale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(value: Value) -> Object {
        let mut network = json!({
            "apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": "n", "namespace": "t"}, "spec": {"cidr": "10.1.0.0/16"},
        });
        for (key, value) in value.as_object().into_iter().flatten() {
            network[key] = value.clone();
        }
        decode::object(crate::Kind::Network, network).unwrap().0
    }

    fn stored(value: Value) -> Stored {
        let owned = ["a".to_owned()].into();
        Stored { object: network(value), version: 1, owned }
    }

    fn labelled(labels: Value) -> Value {
        json!({"metadata": {"name": "n", "namespace": "t", "labels": labels, "uid": "u"}})
    }

    #[test]
    fn status_and_server_fields_are_not_sent() {
        let object = network(json!({
            "metadata": {"name": "n", "namespace": "t", "uid": "u", "generation": 3,
                "creationTimestamp": "2026-01-31T12:00:00Z"},
            "status": {"cidr": "10.2.0.0/16"},
        }));
        let content = content(&object);
        assert_eq!(content["metadata"], json!({"name": "n", "namespace": "t"}));
        assert_eq!(content.get("status"), None);
        assert_eq!(content["spec"]["cidr"], "10.1.0.0/16");
        assert_eq!(status(&object), json!({"cidr": "10.2.0.0/16"}));
        assert_eq!(status(&network(json!({}))), json!({}));
        let part = part(&object, "17", "status", json!({}));
        let metadata = json!({"name": "n", "namespace": "t", "uid": "u", "resourceVersion": "17"});
        assert_eq!(part["metadata"], metadata);
    }

    #[test]
    fn only_owned_fields_are_compared() {
        let want = content(&network(labelled(json!({"a": "1"}))));
        assert!(is_held(&stored(labelled(json!({"a": "1", "theirs": "2"}))), &want));
        assert!(!is_held(&stored(labelled(json!({"a": "2"}))), &want), "another value");
        assert!(!is_held(&stored(labelled(json!({"theirs": "2"}))), &want), "missing");
        let none = content(&network(json!({})));
        assert!(!is_held(&stored(labelled(json!({"a": "1"}))), &none), "no longer wanted");
        let other = content(&network(json!({"spec": {"cidr": "10.9.0.0/16"}})));
        assert!(!is_held(&stored(json!({})), &other), "another spec");
    }
}
