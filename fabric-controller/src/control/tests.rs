use fabric_api::ipam::{IP, IPSpec, IPStatus};

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
