//! Endpoint at which clients find a server.

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, cluster_alone, cluster_ip, peering, server, tenant};

fn endpoint(addresses: &Value, port: &Value) -> Value {
    json!({"addresses": addresses, "port": port, "protocol": "UDP"})
}

fn until(cluster: &Cluster, peer: &str, field: &str, is: &Value) {
    cluster.until_is(["gatewayserver", &tenant(peer), "server"], field, is);
}

#[test]
fn node_port_endpoint_follows_pod_and_node() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let namespace = &tenant("bonn");
    cluster.apply_all(&peering("bonn"));
    let spec = json!({"serviceType": "NodePort", "port": 51840, "nodePort": 30042});
    cluster.apply(&server("bonn", &spec));
    until(cluster, "bonn", "/status/serverRef/name", &json!("gw-server"));
    let gateway = cluster.get("gatewayserver", namespace, "server").unwrap();
    assert_eq!(gateway["status"].get("endpoint"), None, "it has no pod yet");
    let deployment = cluster.get("deployment", namespace, "gw-server").unwrap();
    assert_eq!(gateway["status"]["serverRef"]["uid"], deployment["metadata"]["uid"]);

    cluster.run_pod("bonn", "a", "n1", "10.200.1.7");
    until(cluster, "bonn", "/status/endpoint", &endpoint(&json!(["192.0.2.1"]), &json!(30042)));
    let internal = json!({"ip": "10.200.1.7", "node": "n1"});
    until(cluster, "bonn", "/status/internalEndpoint", &internal);
    let config = ["gatewayconfig", namespace.as_str(), "server"];
    cluster.until_is(config, "/spec/overlay/node", &json!("n1"));
    let peering = |node: &str| {
        let config = cluster.get("nodeconfig", "", node)?;
        let peerings = config["spec"]["peerings"].as_array()?.clone();
        peerings.into_iter().find(|peering| peering["peerClusterId"] == "bonn")
    };
    let underlay = |node: &str| peering(node).map(|peering| peering["gateway"]["underlay"].clone());
    cluster.until("n2 has the pod's address", || underlay("n2").filter(|u| *u == "10.200.1.7"));

    cluster.run_pod("bonn", "b", "n2", "10.200.2.8");
    cluster.kill_pod("bonn", "a");
    until(cluster, "bonn", "/status/endpoint", &endpoint(&json!(["192.0.2.2"]), &json!(30042)));
    cluster.until("n1 has the pod's address", || underlay("n1").filter(|u| *u == "10.200.2.8"));

    let addresses = json!([
        {"type": "InternalIP", "address": "192.0.2.2"},
        {"type": "ExternalIP", "address": "198.51.100.2"},
    ]);
    let node = cluster.get("node", "", "n2").unwrap();
    cluster.set_status(&node, &json!({"addresses": addresses}));
    until(cluster, "bonn", "/status/endpoint/addresses", &json!(["198.51.100.2"]));
    cluster.kill_pod("bonn", "b");
    std::thread::sleep(std::time::Duration::from_secs(1));
    until(cluster, "bonn", "/status/endpoint/addresses", &json!(["198.51.100.2"]));
    let back = json!([{"type": "InternalIP", "address": "192.0.2.2"}]);
    cluster.set_status(&node, &json!({"addresses": back}));
}

#[test]
fn service_made_again_has_the_port_it_had() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("trier");
    cluster.apply_all(&peering("trier"));
    cluster.apply(&server("trier", &json!({"serviceType": "NodePort", "port": 51840})));
    let service = || cluster.get("service", namespace, "gw-server");
    let first = cluster.until("its Service", service);
    let port = |of: &Value| of["spec"]["ports"][0]["nodePort"].clone();
    assert!(port(&first).is_number(), "{first}");
    cluster.delete("service", namespace, "gw-server");
    let again = cluster.until("another", || {
        service().filter(|again| again["metadata"]["uid"] != first["metadata"]["uid"])
    });
    assert_eq!(port(&again), port(&first));
    cluster.apply(&server("trier", &cluster_ip()));
    cluster.until("one without a node port", || service().filter(|of| port(of).is_null()));
    cluster.apply(&server("trier", &json!({"serviceType": "NodePort", "port": 51840})));
    let back = cluster.until("a node port", || service().filter(|of| port(of).is_number()));
    assert_eq!(port(&back), port(&first));
}

#[test]
fn services_of_every_type_are_found() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("koeln");
    cluster.apply_all(&peering("koeln"));
    cluster.apply(&server("koeln", &cluster_ip()));
    let service = cluster.until("its Service", || cluster.get("service", namespace, "gw-server"));
    let expected = endpoint(&service["spec"]["clusterIPs"], &json!(51840));
    until(cluster, "koeln", "/status/endpoint", &expected);
    until(cluster, "koeln", "/status/secretRef/namespace", &json!(namespace));

    cluster.run_pod("koeln", "a", "n1", "10.200.1.9");
    cluster.apply(&server("koeln", &json!({"serviceType": "LoadBalancer", "port": 51841})));
    let balanced = ["service", namespace.as_str(), "gw-server"];
    cluster.until_is(balanced, "/spec/type", &json!("LoadBalancer"));
    cluster.until("the old address is gone", || {
        let gateway = cluster.get("gatewayserver", namespace, "server")?;
        gateway["status"].get("endpoint").is_none().then_some(())
    });
    let ingress = json!([{"ip": "198.51.100.7"}, {"hostname": "lb.example.com"}]);
    cluster.set_status(&service, &json!({"loadBalancer": {"ingress": ingress}}));
    let addresses = json!(["198.51.100.7", "lb.example.com"]);
    until(cluster, "koeln", "/status/endpoint", &endpoint(&addresses, &json!(51841)));
    cluster.kill_pod("koeln", "a");
}
