use fabric_api::ipam::{IP, IPSpec, IPStatus, Network};
use fabric_api::labels;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::json;
use tokio::sync::watch;

use super::*;

/// Kubeconfig of an API server at a port without a listener.
const AWAY: &str = "\
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: u, user: {}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
";

#[tokio::test]
async fn gateways_are_planned_before_writes_are_done() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    let address = silent.local_addr().unwrap().to_string();
    std::fs::write(&kubeconfig, AWAY.replace("127.0.0.1:1", &address)).unwrap();
    let store = Store::kubernetes(Some(&kubeconfig)).unwrap();
    let ipam = Ipam::new(&"127.0.0.1:1".parse().unwrap(), None).unwrap();
    let (nodes, plan) = (watch::Sender::new(None), watch::Sender::new(None));
    let (_placements, placements) = watch::channel(None);
    let planned = plan.subscribe();
    let controller = Controller::new(store, ipam, Settings::default()).unwrap();
    let (_, liqo_ends) = watch::channel(false);
    let mut controller = controller.with(Exchange { nodes, plan, placements, liqo_ends });

    let metadata = |name: &str| json!({"name": name, "namespace": "liqo", "uid": name});
    let map: ConfigMap = serde_json::from_value(json!({
        "metadata": metadata(labels::CLUSTER_ID_CONFIGMAP), "data": {(labels::CLUSTER_ID_KEY): "rome"}}))
    .unwrap();
    let mut pods = json!({"metadata": metadata("pod-cidr"), "spec": {"cidr": "10.200.0.0/16"}});
    pods["metadata"]["labels"] = json!({(labels::NETWORK_TYPE): "pod-cidr"});
    let pods: Network = serde_json::from_value(pods).unwrap();
    for object in [map.into(), pods.into()] {
        controller.index.apply(Event::Applied(object));
    }
    let settled = tokio::time::timeout(Duration::from_millis(500), controller.settle()).await;
    assert!(settled.is_err(), "its other CIDRs are being written");
    assert!(planned.borrow().is_some());
}

#[tokio::test]
async fn unreachable_api_server_deletes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    std::fs::write(&kubeconfig, AWAY).unwrap();
    let store = Store::kubernetes(Some(&kubeconfig)).unwrap();
    let ipam = Ipam::new(&"127.0.0.1:1".parse().unwrap(), None).unwrap();
    let mut controller = Controller::new(store, ipam, Settings::default()).unwrap();

    let mut address = IP::new("gw-client-overlay", IPSpec::default());
    address.metadata.namespace = Some("liqo-tenant-milan".to_owned());
    let owner = ("fabric.weft.dev/owner", "GatewayClient liqo-tenant-milan/client");
    let owner = (owner.0.to_owned(), owner.1.to_owned());
    address.metadata.annotations = Some([owner].into());
    let reference = Object::from(address.clone()).reference();
    controller.absorb(Event::Applied(address.clone().into())).await;
    assert!(controller.index.get(&reference).is_some(), "its event was applied");

    // It was granted here, and no watch has reported it yet.
    let (ip, cidr) = ("10.80.0.7".to_owned(), "10.80.0.0/16".to_owned());
    address.status = Some(IPStatus { ip: Some(ip), cidr: Some(cidr) });
    controller.index.apply(Event::Applied(address.clone().into()));
    controller.resync().await;
    assert_eq!(controller.index.get(&reference), Some(&address.into()));
    assert_eq!(controller.releases, []);
}
