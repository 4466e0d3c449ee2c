//! Objects with one fault each.

use fabric_api::networking::{GatewayClient, GatewayServer};
use fabric_objects::Object;
use serde_json::{Value, json};

use crate::compile::tests::world::{cluster_id, configuration, network, of, public_key, server};

fn broken_server(spec: Value) -> Object {
    of!(GatewayServer, GatewayServer, {
        "metadata": {"name": "server", "namespace": "liqo-tenant-rome", "labels": {"liqo.io/remote-cluster-id": "rome"}},
        "spec": spec
    })
}

fn broken_client(endpoint: Value) -> Object {
    of!(GatewayClient, GatewayClient, {
        "metadata": {"name": "server", "namespace": "liqo-tenant-rome", "labels": {"liqo.io/remote-cluster-id": "rome"}},
        "spec": {"secretRef": {"name": "gw-keys"}, "endpoint": endpoint}
    })
}

pub(super) fn without_label(mut object: Object) -> Object {
    object.metadata_mut().labels = None;
    object
}

fn labelled(mut object: Object, id: &str) -> Object {
    let label = ("liqo.io/remote-cluster-id".to_owned(), id.to_owned());
    object.metadata_mut().labels = Some([label].into());
    object
}

pub(super) fn rome(pod: Value, external: Value) -> Object {
    configuration("rome", pod, external)
}

/// Faulty objects, each with a part of the problem that it must make.
pub(super) fn cases() -> Vec<(Object, &'static str)> {
    let key = |key: &str| public_key("gw-publickey", "rome", key);
    let port =
        |spec: Value| broken_server(json!({"secretRef": {"name": "gw-keys"}, "endpoint": spec}));
    let low_order = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    vec![
        (
            without_label(rome(json!("10.1.0.0/16"), json!([]))),
            "Configuration liqo-tenant-rome/rome: metadata.labels.liqo.io/remote-cluster-id: missing; expected",
        ),
        (
            labelled(rome(json!("10.1.0.0/16"), json!([])), "Rome!"),
            "\"Rome!\" is not a cluster ID; expected",
        ),
        (
            labelled(rome(json!("10.1.0.0/16"), json!([])), "milan"),
            "found milan, which is this cluster; expected",
        ),
        (
            rome(json!("10.1.0.0/33"), json!([])),
            "spec.remote.cidr.pod[0]: \"10.1.0.0/33\" is not a network prefix; expected",
        ),
        (
            rome(json!(["10.1.0.0/16", "10.2.0.1/16"]), json!([])),
            "spec.remote.cidr.pod[1]: 10.2.0.1/16 has host bits set; did you mean 10.2.0.0/16?",
        ),
        (rome(json!("0.0.0.0/0"), json!([])), "spec.remote.cidr.pod[0]: found 0.0.0.0/0; expected"),
        (rome(json!("224.0.0.0/8"), json!([])), "found 224.0.0.0/8; expected"),
        (rome(json!("169.254.18.0/24"), json!([])), "found 169.254.18.0/24; expected"),
        (rome(json!([]), json!("10.1.0.0/16")), "spec.remote.cidr.pod: missing; expected"),
        (
            rome(json!("10.1.0.0/16"), json!("10.1.2.0/24")),
            "spec.remote.cidr.external[0]: 10.1.2.0/24 overlaps spec.remote.cidr.pod[0], 10.1.0.0/16; expected",
        ),
        (
            key("not base64!"),
            "PublicKey liqo-tenant-rome/gw-publickey: spec.publicKey: the key is not base64; expected",
        ),
        (key("c2hvcnQ="), "spec.publicKey: the key is 5 bytes long; expected 32"),
        (key(low_order), "spec.publicKey: the key is a point of low order"),
        (
            key("VQBlodNolSfnUBl5QCtt/y7SPSCRQCQyUQc/jzyrZjE="),
            "spec.publicKey: this is this cluster's own public key; expected the peer's",
        ),
        (
            without_label(key(low_order)),
            "PublicKey liqo-tenant-rome/gw-publickey: metadata.labels.liqo.io/remote-cluster-id: missing",
        ),
        (
            port(json!({"port": 0})),
            "GatewayServer liqo-tenant-rome/server: spec.endpoint.port: found 0; expected a port, 1 to 65535",
        ),
        (port(json!({"port": 65536})), "spec.endpoint.port: found 65536; expected"),
        (port(json!({"port": -1})), "spec.endpoint.port: found -1; expected"),
        (port(json!({})), "spec.endpoint.port: missing; expected"),
        (
            port(json!({"serviceType": "NodePort", "port": 70000, "nodePort": 30742})),
            "spec.endpoint.port: found 70000; expected",
        ),
        (
            port(json!({"serviceType": "NodePort", "port": 1, "nodePort": 0})),
            "spec.endpoint.nodePort: found 0; expected",
        ),
        (
            port(json!({"serviceType": "ExternalName", "port": 1})),
            "spec.endpoint.serviceType: found ExternalName; expected",
        ),
        (
            broken_server(json!({"mtu": 575, "endpoint": {"port": 1}})),
            "spec.mtu: found 575; expected 576 to 65535",
        ),
        (
            broken_server(json!({"mtu": -1, "endpoint": {"port": 1}})),
            "spec.mtu: found -1; expected",
        ),
        (
            without_label(server("rome", 1)),
            "GatewayServer liqo-tenant-rome/server: metadata.labels",
        ),
        (
            broken_client(json!({"addresses": ["192.0.2.1"], "port": 0})),
            "GatewayClient liqo-tenant-rome/server: spec.endpoint.port: found 0",
        ),
        (broken_client(json!({"port": 1})), "spec.endpoint.addresses: missing; expected"),
        (
            broken_client(json!({"addresses": ["a.example", "300.1.2.3"], "port": 1})),
            "spec.endpoint.addresses[1]: found \"300.1.2.3\"; expected",
        ),
        (
            broken_client(json!({"addresses": ["ff02::1"], "port": 1})),
            "spec.endpoint.addresses[0]: found \"ff02::1\"; expected an IP address of one host",
        ),
        (
            broken_client(json!({"addresses": ["192.0.2.1", "::"], "port": 1})),
            "spec.endpoint.addresses[1]: found \"::\"; expected an IP address of one host",
        ),
        (
            broken_client(json!({"addresses": ["240.0.0.1"], "port": 1})),
            "spec.endpoint.addresses[0]: found \"240.0.0.1\"; expected an IP address of one host",
        ),
        (
            broken_client(json!({"addresses": ["$(reboot)"], "port": 1})),
            "spec.endpoint.addresses[0]: found \"$(reboot)\"; expected",
        ),
        (
            broken_client(json!({"addresses": ["a.example"], "port": 1, "protocol": "TCP"})),
            "spec.endpoint.protocol: found \"TCP\"; expected UDP",
        ),
        (
            secret_with(json!({})),
            "Secret liqo-tenant-rome/gw-keys: data.privateKey: missing; expected",
        ),
        (
            secret_with(json!({"privateKey": "c2hvcnQ="})),
            "data.privateKey: the key is 5 bytes long; expected 32",
        ),
        (
            secret_with(json!({"privateKey": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="})),
            "Secret liqo-tenant-rome/gw-keys: data.privateKey: the key is all zero",
        ),
        (
            secret_with(
                json!({"privateKey": "YHztEzTrIe/fVxknCVVsPWqDeBmhvLUVHTmT8GgV6ko=", "publicKey": low_order}),
            ),
            "data.publicKey: does not belong to the private key; expected VQBl",
        ),
        (
            network("pod-cidr-2", "pods", "10.9.0.0/16"),
            "Network liqo/pod-cidr-2: metadata.labels.ipam.liqo.io/network-type: found \"pods\"; expected pod-cidr",
        ),
        (
            network("pod-cidr-2", "pod-cidr", "10.9.0.0"),
            "Network liqo/pod-cidr-2: spec.cidr: \"10.9.0.0\" is not a network prefix",
        ),
        (bad_node(json!([])), "Node n9: status.addresses: no address of type InternalIP; expected"),
        (
            bad_node(json!([{"type": "InternalIP", "address": "x"}])),
            "Node n9: status.addresses[0].address: found \"x\"; expected",
        ),
        (
            of!(Ip, fabric_api::ipam::IP, {"metadata": {"name": "i", "namespace": "t"}, "spec": {"ip": "x"}}),
            "IP t/i: spec.ip: found \"x\"; expected",
        ),
        (
            of!(Ip, fabric_api::ipam::IP, {"metadata": {"name": "i", "namespace": "t"}, "spec": {"ip": "1.2.3.4", "networkRef": {"name": "none"}}}),
            "IP t/i: spec.networkRef: waits for Network t/none",
        ),
        (
            of!(Ip, fabric_api::ipam::IP, {"metadata": {"name": "i", "namespace": "t"}, "spec": {"ip": "fd00::5"}}),
            "IP t/i: spec.ip: found fd00::5; the cluster has no IPv6 external CIDR",
        ),
        (
            of!(Ip, fabric_api::ipam::IP, {"metadata": {"name": "i", "namespace": "t"}, "spec": {"ip": "10.80.0.1"}}),
            "IP t/i: spec.ip: found 10.80.0.1, which is in weft's own overlay (10.80.0.0/16); expected",
        ),
        (
            of!(Ip, fabric_api::ipam::IP, {"metadata": {"name": "i", "namespace": "t"}, "spec": {"ip": "10.70.9.1"}}),
            "IP t/i: spec.ip: found 10.70.9.1, which is in this cluster's own external CIDR (10.70.0.0/16), of which",
        ),
        (
            bad_node(json!([{"type": "InternalIP", "address": "fe80::9"}])),
            "Node n9: status.addresses[0].address: found fe80::9; expected an address other nodes can reach",
        ),
        (
            bad_node(json!([{"type": "InternalIP", "address": "255.255.255.255"}])),
            "Node n9: status.addresses[0].address: found 255.255.255.255; expected an address other nodes can reach",
        ),
        (
            second_cluster_id(),
            "ConfigMap default/liqo-clusterid-configmap: data.CLUSTER_ID: found a second cluster ID, rome; expected \
             ConfigMap liqo/liqo-clusterid-configmap alone",
        ),
        (
            labelled_cluster_id(),
            "ConfigMap liqo/second-id: data.CLUSTER_ID: found a second cluster ID, rome; expected ConfigMap \
             liqo/liqo-clusterid-configmap alone",
        ),
    ]
}

pub(super) fn secret_with(data: Value) -> Object {
    of!(Secret, k8s_openapi::api::core::v1::Secret, {
        "metadata": {"name": "gw-keys", "namespace": "liqo-tenant-rome"}, "data": data
    })
}

fn second_cluster_id() -> Object {
    let mut object = cluster_id("rome");
    object.metadata_mut().namespace = Some("default".to_owned());
    object
}

fn labelled_cluster_id() -> Object {
    let mut object = cluster_id("rome");
    let metadata = object.metadata_mut();
    metadata.name = Some("second-id".to_owned());
    let label = ("app.kubernetes.io/name".to_owned(), "clusterid-configmap".to_owned());
    metadata.labels = Some([label].into());
    object
}

fn bad_node(addresses: Value) -> Object {
    of!(Node, k8s_openapi::api::core::v1::Node, {
        "metadata": {"name": "n9"}, "status": {"addresses": addresses}
    })
}
