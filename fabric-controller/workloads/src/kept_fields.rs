//! Fields of gateways' Services that no template sets, and that a write leaves as they are: the node port that Kubernetes
//! has chosen, and the replica that is selected (see `active_labels`). A Service that is deleted and made again, or is
//! of another type for a while, gets the port that it had: clients have that as their endpoint.

use std::collections::BTreeMap;

use fabric_api::labels;
use serde_json::Value;

use super::live::{Key, Watched};

#[derive(Clone, Default)]
pub(super) struct KeptFields(BTreeMap<Key, Fields>);

#[derive(Clone, Default)]
struct Fields {
    node_port: Option<Value>,
    replica: Option<Value>,
}

impl KeptFields {
    /// Takes note of those of a Service that is there.
    pub(super) fn note(&mut self, key: &Key, service: &Value) {
        if key.of != Watched::Service {
            return;
        }
        let (port, replica) = (
            &service["spec"]["ports"][0]["nodePort"],
            &service["spec"]["selector"][labels::REPLICA],
        );
        let fields = self.0.entry(key.clone()).or_default();
        if port.is_number() {
            fields.node_port = Some(port.clone());
        }
        fields.replica = Some(replica.clone()).filter(Value::is_string);
    }

    /// The same Service with the fields that it had; `None` if those are its own.
    pub(super) fn with_last(&self, key: &Key, service: &Value) -> Option<Value> {
        let had = self.0.get(key)?;
        let mut same = service.clone();
        // The replica may have been another gateway's, of the same name, if the Service is a new one.
        let is_there = service["metadata"]["uid"].is_string();
        let spec = same.get_mut("spec")?;
        let has_one = ["NodePort", "LoadBalancer"].iter().any(|type_| spec["type"] == *type_)
            && spec["allocateLoadBalancerNodePorts"] != false;
        let is_chosen = has_one && spec["ports"][0]["nodePort"].is_null();
        if let Some(port) = had.node_port.as_ref().filter(|_| is_chosen) {
            spec["ports"][0]["nodePort"] = port.clone();
        }
        let replica = had.replica.clone().filter(|_| is_there);
        if let Some((selector, replica)) =
            spec.get_mut("selector").and_then(Value::as_object_mut).zip(replica)
        {
            selector.insert(labels::REPLICA.to_owned(), replica);
        }
        Some(same).filter(|same| same != service)
    }

    pub(super) fn keep(&mut self, wanted: impl Fn(&Key) -> bool) {
        self.0.retain(|key, _| wanted(key));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn service_made_again_gets_the_port_it_had() {
        let service = |type_: &str, port: Value| json!({"spec": {"type": type_, "ports": [port]}});
        let key = Key::new(Watched::Service, "t", "gw-server");
        let wanted = service("NodePort", json!({"port": 51840}));
        let mut kept = KeptFields::default();
        assert_eq!(kept.with_last(&key, &wanted), None, "there was none yet");
        kept.note(&key, &service("NodePort", json!({"port": 51840, "nodePort": 30742})));
        kept.note(&key, &service("ClusterIP", json!({"port": 51840})));
        let had = service("NodePort", json!({"port": 51840, "nodePort": 30742}));
        assert_eq!(kept.with_last(&key, &wanted), Some(had));
        let mut balanced = service("LoadBalancer", json!({"port": 51840}));
        let same = kept.with_last(&key, &balanced).unwrap();
        assert_eq!(same["spec"]["ports"][0]["nodePort"], 30742);
        balanced["spec"]["allocateLoadBalancerNodePorts"] = json!(false);
        assert_eq!(kept.with_last(&key, &balanced), None);
        let other = service("NodePort", json!({"port": 51840, "nodePort": 30000}));
        assert_eq!(kept.with_last(&key, &other), None, "the user wants that one");
        assert_eq!(kept.with_last(&key, &service("ClusterIP", json!({"port": 51840}))), None);
        kept.keep(|_| false);
        assert_eq!(kept.with_last(&key, &wanted), None);
    }

    #[test]
    fn service_selects_the_replica_it_did() {
        let service = |selector: Value| {
            json!({"metadata": {"uid": "s"},
                "spec": {"type": "ClusterIP", "ports": [{}], "selector": selector}})
        };
        let key = Key::new(Watched::Service, "t", "gw-server");
        let (all, one) = (json!({"a": "b"}), json!({"a": "b", labels::REPLICA: "u"}));
        let mut kept = KeptFields::default();
        kept.note(&key, &service(one.clone()));
        let wanted = service(json!({"a": "c"}));
        let with_replica = service(json!({"a": "c", labels::REPLICA: "u"}));
        assert_eq!(kept.with_last(&key, &wanted), Some(with_replica));
        kept.note(&key, &service(all));
        assert_eq!(kept.with_last(&key, &wanted), None, "it selects all of them by now");
        kept.note(&key, &service(one));
        let without = json!({"metadata": {"uid": "s"}, "spec": {"ports": [{}]}});
        assert_eq!(kept.with_last(&key, &without), None);
        let mut new = wanted;
        new["metadata"] = json!({});
        assert_eq!(kept.with_last(&key, &new), None, "the replica was that of another gateway");
    }
}
