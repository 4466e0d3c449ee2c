//! Node ports that Kubernetes has chosen for Services of gateways. One that is deleted and made again, or is of another
//! type for a while, gets the port that it had: clients have that as their endpoint.

use std::collections::BTreeMap;

use serde_json::Value;

use super::live::{Key, Watched};

#[derive(Clone, Default)]
pub(super) struct NodePorts(BTreeMap<Key, Value>);

impl NodePorts {
    /// Takes note of the port of a Service that is there.
    pub(super) fn note(&mut self, key: &Key, service: &Value) {
        let port = &service["spec"]["ports"][0]["nodePort"];
        if key.of == Watched::Service && port.is_number() {
            self.0.insert(key.clone(), port.clone());
        }
    }

    /// The same Service with the port that it had; `None` unless it has none of its own.
    pub(super) fn with_last(&self, key: &Key, service: &Value) -> Option<Value> {
        let is_chosen = service["spec"]["type"] == "NodePort"
            && service["spec"]["ports"][0]["nodePort"].is_null();
        let port = self.0.get(key).filter(|_| is_chosen)?;
        let mut same = service.clone();
        same["spec"]["ports"][0]["nodePort"] = port.clone();
        Some(same)
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
        let mut ports = NodePorts::default();
        assert_eq!(ports.with_last(&key, &wanted), None, "there was none yet");
        ports.note(&key, &service("NodePort", json!({"port": 51840, "nodePort": 30742})));
        ports.note(&key, &service("ClusterIP", json!({"port": 51840})));
        let had = service("NodePort", json!({"port": 51840, "nodePort": 30742}));
        assert_eq!(ports.with_last(&key, &wanted), Some(had));
        let other = service("NodePort", json!({"port": 51840, "nodePort": 30000}));
        assert_eq!(ports.with_last(&key, &other), None, "the user wants that one");
        assert_eq!(ports.with_last(&key, &service("ClusterIP", json!({"port": 51840}))), None);
        ports.keep(|_| false);
        assert_eq!(ports.with_last(&key, &wanted), None);
    }
}
