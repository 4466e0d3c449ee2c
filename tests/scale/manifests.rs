//! Manifests of the cluster, its nodes and its peerings.

use std::fmt;
use std::net::Ipv4Addr;

use fabric_api::labels;
use serde_json::{Value, json};

/// Own pod CIDR: a /24 for each of 768 nodes, and the rest for pods outside of these.
const PODS: [u8; 2] = [10, 128];
const PODS_LEN: u8 = 14;
/// Nodes that fit.
pub(crate) const MAX_NODES: usize = 768;
/// Peerings whose prefixes and Services fit.
pub(crate) const MAX_PEERINGS: usize = 400;
/// CIDRs of every peer: the same, so that all but one are remapped.
const PEER_PODS: &str = "10.200.0.0/20";
const PEER_EXTERNAL: &str = "10.70.0.0/20";
/// Namespace of pods that are no gateways.
pub(crate) const SHOP: &str = "shop";

/// A peer cluster by its number. Every second peering has a GatewayClient here, the others a
/// GatewayServer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub usize);

/// Address of a server, as its GatewayClient has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// The only address.
    pub address: String,
    /// UDP port.
    pub port: u16,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer-{}", self.0)
    }
}

impl Peer {
    /// The peer of a tenant namespace.
    pub(crate) fn of_namespace(namespace: &str) -> Option<Self> {
        namespace.strip_prefix("liqo-tenant-peer-")?.parse().ok().map(Self)
    }

    pub fn is_client(self) -> bool {
        self.0.is_multiple_of(2)
    }

    pub fn namespace(self) -> String {
        format!("liqo-tenant-{self}")
    }

    /// Name of the GatewayClient or GatewayServer.
    pub fn gateway(self) -> &'static str {
        if self.is_client() { "client" } else { "server" }
    }

    /// The endpoint that a GatewayClient begins with.
    pub fn endpoint(self) -> Endpoint {
        let [high, low] = u16::try_from(self.0).unwrap_or_default().to_be_bytes();
        Endpoint { address: format!("198.18.{high}.{low}"), port: 30742 }
    }

    fn metadata(self, name: &str) -> Value {
        json!({"name": name, "namespace": self.namespace(),
            "labels": {labels::REMOTE_CLUSTER_ID: self.to_string()}})
    }

    /// Objects that a user applies for the peering, its namespace first.
    pub fn manifests(self) -> Vec<Value> {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": self.namespace(), "labels": {
                labels::REMOTE_CLUSTER_ID: self.to_string(), labels::TENANT_NAMESPACE: "true"}}});
        let mut of_gateways = self.metadata("gw-keys");
        of_gateways["labels"][labels::GATEWAY_RESOURCE] = json!("true");
        let mut public_key = of_gateways.clone();
        public_key["name"] = json!("gw-publickey");
        vec![
            namespace,
            json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
                "metadata": self.metadata(&self.to_string()),
                "spec": {"remote": {"cidr": {"pod": [PEER_PODS], "external": [PEER_EXTERNAL]}}}}),
            json!({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": of_gateways,
                "data": {
                    "privateKey": "YHztEzTrIe/fVxknCVVsPWqDeBmhvLUVHTmT8GgV6ko=",
                    "publicKey": "VQBlodNolSfnUBl5QCtt/y7SPSCRQCQyUQc/jzyrZjE="}}),
            json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "PublicKey",
                "metadata": public_key,
                "spec": {"publicKey": "SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q="}}),
            self.gateway_manifest(),
        ]
    }

    fn gateway_manifest(self) -> Value {
        let (kind, endpoint) = if self.is_client() {
            let Endpoint { address, port } = self.endpoint();
            let endpoint = json!({"addresses": [address], "port": port, "protocol": "UDP"});
            ("GatewayClient", endpoint)
        } else {
            ("GatewayServer", json!({"serviceType": "NodePort", "port": 51840}))
        };
        json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": kind,
            "metadata": self.metadata(self.gateway()),
            "spec": {"secretRef": {"name": "gw-keys"}, "endpoint": endpoint}})
    }
}

pub(crate) fn node_name(node: usize) -> String {
    format!("n{}", node + 1)
}

/// An address of the node's pod CIDR, or for `node` beyond all nodes, one outside of all of these.
pub(crate) fn pod_address(node: usize, host: u8) -> Ipv4Addr {
    let [high, low] = u16::try_from(node).unwrap_or_default().to_be_bytes();
    Ipv4Addr::new(PODS[0], PODS[1] + high, low, host)
}

/// The cluster before any peering, in the order in which the objects need each other. Those with a
/// status have it in a write of its own.
pub(crate) fn cluster(nodes: usize) -> Vec<Value> {
    let network = |name: &str, cidr: &str, own: Value| {
        let mut labels = json!({labels::NETWORK_TYPE: name});
        if own == json!(true) {
            labels[labels::NETWORK_NOT_REMAPPED] = json!("true");
            labels[labels::NETWORK_SHARED] = json!("true");
        }
        json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "namespace": labels::LIQO_NAMESPACE, "labels": labels},
            "spec": {"cidr": cidr}})
    };
    let pods = format!("{}.{}.0.0/{PODS_LEN}", PODS[0], PODS[1]);
    let mut external = network("external-cidr", "10.70.0.0/16", json!(false));
    external["spec"]["preAllocated"] = json!(1);
    let mut objects: Vec<Value> = [labels::LIQO_NAMESPACE, SHOP, "kube-node-lease"]
        .iter()
        .map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))
        .collect();
    objects.extend([
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": SHOP}}),
        // Rights of each program are in the chart, and tested there.
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "scale"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group",
                "name": "system:authenticated"}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                "name": "cluster-admin"}}),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {
                "name": labels::CLUSTER_ID_CONFIGMAP, "namespace": labels::LIQO_NAMESPACE,
                "labels": {labels::APP_NAME: labels::CLUSTER_ID_APP}},
            "data": {labels::CLUSTER_ID_KEY: "rome"}}),
        network("pod-cidr", &pods, json!(true)),
        external,
        network("internal-cidr", "10.80.0.0/16", json!(false)),
    ]);
    objects.extend((0..nodes).map(node));
    objects
}

fn node(node: usize) -> Value {
    let [high, low] = u16::try_from(node + 1).unwrap_or_default().to_be_bytes();
    let pods = format!("{}/24", pod_address(node, 0));
    let name = node_name(node);
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": format!("172.30.{high}.{low}")},
                {"type": "Hostname", "address": name}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}})
}
