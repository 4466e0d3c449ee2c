//! Pods whose addresses lie outside of their node's pod CIDR.

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, cluster_ip, peering, server};

const NAMESPACE: &str = "shop";

fn run(cluster: &Cluster, name: &str, (node, ip): (&str, &str), change: impl Fn(&mut Value)) {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "shop"}},
        "spec": {"nodeName": node, "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "shop", "image": "shop"}]}});
    change(&mut pod);
    cluster.apply(&pod);
    set_status(cluster, &pod, "Running", ip);
}

fn set_status(cluster: &Cluster, pod: &Value, phase: &str, ip: &str) {
    cluster.set_status(pod, &json!({"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}]}));
}

#[test]
fn outside_pod_has_route_while_it_runs() {
    let Some(cluster) = cluster() else { return };
    for (kind, name) in [("Namespace", NAMESPACE), ("ServiceAccount", "default")] {
        cluster.apply(&json!({"apiVersion": "v1", "kind": kind,
            "metadata": {"name": name, "namespace": NAMESPACE}}));
    }
    cluster.apply_all(&peering("nantes"));
    cluster.apply(&server("nantes", &cluster_ip()));
    run(cluster, "inside", ("n1", "10.200.1.9"), |_| {});
    run(cluster, "shadow", ("n1", "10.200.7.1"), |pod| {
        pod["metadata"]["labels"]["liqo.io/shadowPod"] = json!("true");
    });
    run(cluster, "host", ("n1", "10.200.7.2"), |pod| pod["spec"]["hostNetwork"] = json!(true));
    run(cluster, "virtual", ("milan", "10.200.7.3"), |_| {});
    run(cluster, "elsewhere", ("n1", "198.51.100.9"), |_| {});
    run(cluster, "outside", ("n1", "10.200.7.9"), |_| {});
    let both = json!(["10.200.1.0/24", "10.200.7.9/32"]);
    cluster.until_is(["nodeconfig", "", "n1"], "/spec/localPods", &both);
    let is_routed = |at: &str| {
        let record = cluster.get("gatewayrecord", "", &format!("node-{at}")).unwrap_or_default();
        let prefixes = record["spec"]["node"]["prefixes"].to_string();
        assert!(!prefixes.contains("10.200.7.1/"), "{prefixes}");
        prefixes.contains("10.200.7.9/32")
    };
    cluster.until("gateways have the route", || is_routed("n1").then_some(()));
    assert!(!is_routed("n2"));

    // Another has taken its address, on another node.
    cluster.delete("pod", NAMESPACE, "outside");
    run(cluster, "moved", ("n2", "10.200.7.9"), |_| {});
    cluster.until("the route leads there", || (is_routed("n2") && !is_routed("n1")).then_some(()));
    let moved = cluster.get("pod", NAMESPACE, "moved").unwrap();
    set_status(cluster, &moved, "Succeeded", "10.200.7.9");
    cluster.until_is(["nodeconfig", "", "n2"], "/spec/localPods", &json!(["10.200.2.0/24"]));
    for name in ["inside", "shadow", "host", "virtual", "elsewhere", "moved"] {
        cluster.delete("pod", NAMESPACE, name);
    }
}
