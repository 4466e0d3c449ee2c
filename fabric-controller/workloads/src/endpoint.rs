//! Endpoint of a server for its clients, by its Service.

use fabric_api::networking::EndpointStatus;
use k8s_openapi::api::core::v1::{Node, Service, ServicePort, ServiceSpec};

/// Types of a node's addresses, the one most likely to be reached from outside first.
const PREFERENCE: [&str; 5] =
    ["ExternalDNS", "ExternalIP", "InternalDNS", "InternalIP", "Hostname"];

/// `None` until it is known. `host` is the node of the active pod: a NodePort answers on every node,
/// but only there without another hop.
pub(super) fn endpoint(service: &Service, host: Option<&Node>) -> Option<EndpointStatus> {
    let spec = service.spec.as_ref()?;
    let port = spec.ports.as_ref()?.first()?;
    let (addresses, number) = match spec.type_.as_deref().unwrap_or("ClusterIP") {
        "NodePort" => (vec![address_of(host?)?], port.node_port?),
        "LoadBalancer" => (ingresses(service), port.port),
        "ClusterIP" => (cluster_ips(spec), port.port),
        _ => return None,
    };
    let is_known = !addresses.is_empty();
    is_known.then(|| EndpointStatus {
        addresses,
        port: Some(number),
        ports: Vec::new(),
        protocol: Some(protocol(port)),
    })
}

fn protocol(port: &ServicePort) -> String {
    port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()) // as Kubernetes has it
}

fn cluster_ips(spec: &ServiceSpec) -> Vec<String> {
    let many = spec.cluster_ips.clone().filter(|list| !list.is_empty());
    let all = many.unwrap_or_else(|| spec.cluster_ip.clone().into_iter().collect());
    all.into_iter().filter(|ip| !ip.is_empty() && ip != "None").collect()
}

/// Address of every ingress, then its name.
fn ingresses(service: &Service) -> Vec<String> {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let all = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    let texts = all.flat_map(|ingress| [ingress.ip.clone(), ingress.hostname.clone()]);
    texts.flatten().filter(|text| !text.is_empty()).collect()
}

fn address_of(node: &Node) -> Option<String> {
    let addresses = node.status.as_ref()?.addresses.as_ref()?;
    PREFERENCE.iter().find_map(|wanted| {
        let found = addresses.iter().find(|a| a.type_ == *wanted && !a.address.is_empty());
        found.map(|address| address.address.clone())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: Value, status: Value) -> Service {
        serde_json::from_value(json!({"spec": spec, "status": status})).unwrap()
    }

    fn node(addresses: &[(&str, &str)]) -> Node {
        let list: Vec<_> =
            addresses.iter().map(|(t, a)| json!({"type": t, "address": a})).collect();
        serde_json::from_value(json!({"status": {"addresses": list}})).unwrap()
    }

    fn ports() -> Value {
        json!([{"port": 51840, "nodePort": 30742, "protocol": "UDP"}])
    }

    fn found(service: &Service, host: Option<&Node>) -> Option<(Vec<String>, i32)> {
        let endpoint = endpoint(service, host)?;
        assert_eq!(endpoint.protocol.as_deref(), Some("UDP"));
        Some((endpoint.addresses, endpoint.port.unwrap()))
    }

    #[test]
    fn cluster_ip_endpoint_has_cluster_ips() {
        let spec = json!({"clusterIPs": ["10.96.0.7", "fd00::7"], "clusterIP": "10.96.0.7", "ports": ports()});
        let addresses = vec!["10.96.0.7".to_owned(), "fd00::7".to_owned()];
        assert_eq!(found(&service(spec, json!({})), None), Some((addresses, 51840)));
        let headless = json!({"clusterIPs": ["None"], "clusterIP": "None", "ports": ports()});
        assert_eq!(found(&service(headless, json!({})), None), None);
        let new = service(json!({"type": "ClusterIP", "ports": ports()}), json!({}));
        assert_eq!(found(&new, None), None, "it has no address yet");
    }

    #[test]
    fn node_port_endpoint_is_node_of_active_pod() {
        let service = service(json!({"type": "NodePort", "ports": ports()}), json!({}));
        assert_eq!(found(&service, None), None, "never a list of one empty text");
        let mut addresses = vec![
            ("Hostname", "n1"),
            ("InternalIP", "192.0.2.11"),
            ("InternalDNS", "n1.internal"),
            ("ExternalIP", "198.51.100.1"),
            ("ExternalDNS", "n1.example.com"),
        ];
        while let Some((_, address)) = addresses.last() {
            let expected = Some((vec![(*address).to_owned()], 30742));
            assert_eq!(found(&service, Some(&node(&addresses))), expected);
            addresses.pop();
        }
        assert_eq!(found(&service, Some(&node(&[]))), None);
    }

    #[test]
    fn load_balancer_endpoint_has_all_ingresses() {
        let spec = json!({"type": "LoadBalancer", "ports": ports()});
        let ingress = json!([{"ip": "198.51.100.1", "hostname": "a.example.com"}, {"hostname": "b.example.com"}]);
        let status = json!({"loadBalancer": {"ingress": ingress}});
        let all = ["198.51.100.1", "a.example.com", "b.example.com"].map(str::to_owned).to_vec();
        assert_eq!(found(&service(spec.clone(), status), None), Some((all, 51840)));
        assert_eq!(found(&service(spec, json!({})), None), None);
    }

    #[test]
    fn external_name_has_no_endpoint() {
        let spec = json!({"type": "ExternalName", "ports": ports()});
        assert_eq!(endpoint(&service(spec, json!({})), None), None);
    }
}
