//! IPs that Liqo's other modules read, made while Liqo's controller-manager runs without networking.

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster_alone, peering, server, tenant};

const IPS: &str = "ips.ipam.liqo.io";

/// Liqo's controller-manager, and the Service of its proxy.
fn liqo(networking: bool) -> Vec<Value> {
    let labels =
        |name: &str| json!({"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "liqo"});
    let manager = labels("controller-manager");
    let args = [format!("--networking-enabled={networking}")];
    let pod = json!({"metadata": {"labels": manager},
        "spec": {"containers": [{"name": "manager", "image": "liqo", "args": args}]}});
    vec![
        json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "liqo-controller-manager", "namespace": "liqo", "labels": manager},
            "spec": {"selector": {"matchLabels": manager}, "template": pod}}),
        json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "liqo-proxy", "namespace": "liqo", "labels": labels("proxy")},
            "spec": {"ports": [{"port": 8118}]}}),
    ]
}

fn shadow_pod(cluster: &Cluster, address: &str) {
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "far", "namespace": "default", "labels": {"liqo.io/shadowPod": "true"}},
        "spec": {"nodeName": "milan", "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "a", "image": "a"}]}});
    cluster.apply(&pod);
    let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]});
    cluster.set_status(&pod, &status);
}

fn service_address(cluster: &Cluster, namespace: &str, name: &str) -> Value {
    cluster.get("service", namespace, name).unwrap()["spec"]["clusterIP"].clone()
}

#[test]
fn liqos_modules_have_ips_while_its_networking_is_off() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    cluster.kubectl(&["create", "serviceaccount", "default", "-n", "default"], "");
    cluster.apply_all(&peering("hamar"));
    cluster.apply(&server("hamar", &json!({"serviceType": "ClusterIP", "port": 51840})));
    cluster.apply_all(&liqo(true));
    shadow_pod(cluster, "10.64.0.9");
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(cluster.get(IPS, "liqo", "api-server"), None, "Liqo makes them itself");

    cluster.apply_all(&liqo(false));
    for (name, address) in [
        ("api-server", service_address(cluster, "default", "kubernetes")),
        ("api-server-proxy", service_address(cluster, "liqo", "liqo-proxy")),
    ] {
        cluster.until_is([IPS, "liqo", name], "/spec/ip", &address);
        cluster.until(&format!("{name} is granted an address"), || {
            cluster.get(IPS, "liqo", name)?["status"]["ip"].as_str().map(str::to_owned)
        });
    }
    let unknown_source = [IPS, &tenant("hamar"), "hamar-unknown-source"];
    let labels = "/metadata/labels/liqo.io~1remote-cluster-id";
    cluster.until_is(unknown_source, labels, &json!("hamar"));
    follows_its_pod(cluster);
    cluster.until_peace("default");

    cluster.delete("gatewayserver", &tenant("hamar"), "server");
    cluster.delete("configuration", &tenant("hamar"), "hamar");
    let [kind, namespace, name] = unknown_source;
    cluster.until("it is gone", || cluster.get(kind, namespace, name).is_none().then_some(()));
    cluster.delete("deployment", "liqo", "liqo-controller-manager");
}

fn follows_its_pod(cluster: &Cluster) {
    let far = [IPS, "default", "far"];
    cluster.until_is(far, "/spec/ip", &json!("10.64.0.9"));
    let uid = |of: &str| cluster.get(of, "default", "far").unwrap()["metadata"]["uid"].clone();
    cluster.until_is(far, "/metadata/ownerReferences/0/uid", &uid("pod"));
    let first = uid(IPS);
    shadow_pod(cluster, "10.64.0.10");
    cluster.until_is(far, "/spec/ip", &json!("10.64.0.10"));
    assert_ne!(uid(IPS), first, "an address of an IP cannot change");
    cluster.delete("pod", "default", "far");
    cluster.until("it is gone", || cluster.get(IPS, "default", "far").is_none().then_some(()));
}
