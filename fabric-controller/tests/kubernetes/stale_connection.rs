//! Status of a gateway that cannot report itself.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, cluster_ip, metadata, peering, server, tenant};

/// Connection as a gateway makes it.
fn connection(cluster: &Cluster) -> Value {
    let gateway = cluster.get("gatewayserver", &tenant("brno"), "server").unwrap();
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": metadata("gw-server", "brno"),
        "spec": {"type": "Server", "gatewayRef": {"kind": "WgGatewayServer", "name": "server",
            "namespace": tenant("brno"), "uid": gateway["metadata"]["uid"]}}})
}

fn until_reported(cluster: &Cluster, value: &str) {
    let namespace = tenant("brno");
    cluster.until_is(["connection", &namespace, "gw-server"], "/status/value", &json!(value));
    cluster.until("the nodes have its state", || {
        let config = cluster.get("nodeconfig", "", "n2")?;
        let peerings = config["spec"]["peerings"].as_array()?.clone();
        let peering = peerings.into_iter().find(|peering| peering["peerClusterId"] == "brno")?;
        (peering["connected"] == json!(value == "Connected")).then_some(())
    });
}

#[test]
fn gateway_of_dead_node_is_error_until_it_reports() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("brno"));
    cluster.apply(&server("brno", &cluster_ip()));
    cluster.until("its config", || cluster.get("gatewayconfig", &tenant("brno"), "server"));
    cluster.run_pod("brno", "a", "n1", "10.200.1.21");
    let connection = connection(cluster);
    cluster.apply(&connection);
    let latency = json!({"value": "1ms", "timestamp": "2026-01-31T12:00:00Z"});
    let connected = json!({"value": "Connected", "latency": latency});
    cluster.set_status(&connection, &connected);
    until_reported(cluster, "Connected");

    cluster.set_ready("brno", "a", false);
    until_reported(cluster, "Error");

    // It was only the kubelet that was gone.
    cluster.set_status(&connection, &connected);
    until_reported(cluster, "Connected");
    sleep(Duration::from_secs(3));
    until_reported(cluster, "Connected");

    // Whether it was seen to be ready before it was killed or not.
    cluster.set_ready("brno", "a", true);
    cluster.kill_pod("brno", "a");
    until_reported(cluster, "Error");
}
