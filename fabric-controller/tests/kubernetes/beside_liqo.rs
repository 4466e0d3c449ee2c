//! IPs that Liqo's other modules read, and repairs of what they have stored, while Liqo's
//! controller-manager runs without networking.

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster_alone, events, liqo_definitions, peering, server, tenant};
use crate::status::{has_problem, observed};

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

/// Without it the API server takes no pod.
fn account(cluster: &Cluster) {
    let metadata = json!({"name": "default", "namespace": "default"});
    cluster.apply(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}));
}

/// Removes Liqo, and the IPs that were made for it, which stay for a minute else.
fn remove_liqo(cluster: &Cluster) {
    cluster.delete("deployment", "liqo", "liqo-controller-manager");
    let ips = ["delete", IPS, "-n", "liqo", "-l", "fabric.weft.dev/for-liqo=true"];
    std::thread::sleep(std::time::Duration::from_secs(1));
    cluster.kubectl(&ips, "");
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
    account(cluster);
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
    remove_liqo(cluster);
}

/// As Liqo's uninstaller and helm do it.
#[test]
fn uninstallation_of_liqo_loses_no_shared_object() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    cluster.apply_all(&liqo(false));
    let metadata = json!({"name": "users", "namespace": "default", "labels": {"a": "b"}});
    cluster.apply(&json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
        "metadata": metadata, "spec": {"ip": "192.0.2.7"}}));
    cluster.until("the proxy has an IP", || cluster.get(IPS, "liqo", "api-server-proxy"));
    let names = || {
        let networks = cluster.names("networks.ipam.liqo.io", "liqo");
        [networks, cluster.names(IPS, "default"), cluster.names("configmaps", "liqo")].concat()
    };
    let before = names();
    assert!(before.contains(&"liqo-clusterid-configmap".to_owned()), "{before:?}");

    let uninstalling = json!({"metadata": {"annotations": {"liqo.io/uninstalling": "true"}}});
    cluster.merge("deployment", "liqo", "liqo-controller-manager", &uninstalling);
    for kind in [IPS, "networks.ipam.liqo.io"] {
        cluster.kubectl(&["delete", kind, "--all", "--all-namespaces"], "");
    }
    std::thread::sleep(std::time::Duration::from_secs(3));
    let left = cluster.kubectl(&["get", "ips,networks", "-A", "-o", "name"], "");
    assert_eq!(left, "", "Liqo's uninstaller waits until there is none");
    cluster.delete("deployment", "liqo", "liqo-controller-manager");
    cluster.delete("configmap", "liqo", "liqo-clusterid-configmap");
    cluster.until("all is there again", || (names() == before).then_some(()));
    let users = cluster.get(IPS, "default", "users").unwrap();
    assert_eq!(users["spec"], json!({"ip": "192.0.2.7"}));
    assert_eq!(users["metadata"]["labels"], json!({"a": "b"}));
    cluster.apply_all(&liqo(true));
    std::thread::sleep(std::time::Duration::from_secs(1));
    cluster.delete(IPS, "default", "users");
    remove_liqo(cluster);
}

/// With weft's `ipam.podCIDRs` and then Liqo's `ipam.podCIDR`.
#[test]
fn pod_cidr_of_both_charts_is_listed_once() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let of_chart = |name: &str, chart: &str| {
        json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "namespace": "liqo", "labels": {
                "app.kubernetes.io/part-of": chart, "ipam.liqo.io/network-type": "pod-cidr",
                "ipam.liqo.io/network-not-remapped": "true", "ipam.liqo.io/network-shared": "true"}},
            "spec": {"cidr": "10.200.0.0/16"}})
    };
    cluster.apply_all(&peering("horten"));
    cluster.apply_all(&[of_chart("pod-cidr-10-200-0-0-16", "weft"), of_chart("pod-cidr", "liqo")]);
    let networks = || cluster.names("networks", "liqo");
    assert_eq!(networks().iter().filter(|name| name.starts_with("pod-cidr")).count(), 2);
    cluster.apply_all(&liqo(false));
    cluster.until("weft's is gone", || {
        (!networks().contains(&"pod-cidr-10-200-0-0-16".to_owned())).then_some(())
    });
    assert!(networks().contains(&"pod-cidr".to_owned()));
    let local = cluster.until("the peering has the prefix", || {
        let of = cluster.get("configuration", &tenant("horten"), "horten")?;
        of.pointer("/spec/local/cidr/pod").cloned()
    });
    assert_eq!(local, json!(["10.200.0.0/16"]));
    cluster.delete("configuration", &tenant("horten"), "horten");
    let no_chart = json!({"metadata": {"labels": {"app.kubernetes.io/part-of": null}}});
    cluster.merge("network", "liqo", "pod-cidr", &no_chart);
    remove_liqo(cluster);
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

/// EndpointSlice of skien, and what Liqo has made of it.
fn slice(cluster: &Cluster, name: &str, address: &str, stored: &str) {
    let endpoints = |address: &str| json!([{"addresses": [address]}]);
    let origin = json!({"offloading.liqo.io/origin": "skien"});
    let shadow = json!({"apiVersion": "offloading.liqo.io/v1beta1", "kind": "ShadowEndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": origin},
        "spec": {"template": {"addressType": "IPv4", "endpoints": endpoints(address)}}});
    cluster.apply(&shadow);
    let uid =
        cluster.get("shadowendpointslices", "default", name).unwrap()["metadata"]["uid"].clone();
    let owner = json!({"apiVersion": "offloading.liqo.io/v1beta1", "kind": "ShadowEndpointSlice",
        "name": name, "uid": uid, "controller": true});
    let mut labels = origin;
    labels["liqo.io/managed-by"] = json!("shadowendpointslice");
    cluster.apply(&json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": labels,
            "ownerReferences": [owner]},
        "addressType": "IPv4", "endpoints": endpoints(stored), "ports": []}));
}

fn virtual_kubelet(cluster: &Cluster) {
    let labels = json!({"offloading.liqo.io/component": "virtual-kubelet",
        "liqo.io/virtual-node": "milan", "liqo.io/remote-cluster-id": "skien"});
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "vk-milan", "namespace": "default", "labels": labels},
        "spec": {"nodeName": "n1", "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "a", "image": "a"}]}});
    cluster.apply(&pod);
    cluster.set_status(&pod, &json!({"phase": "Running"}));
}

/// Note of the Event about an object.
fn note(cluster: &Cluster, name: &str) -> String {
    let what = format!("an Event about {name}");
    let event = cluster.until(&what, || {
        let mut all = events(cluster, "default").into_iter();
        all.find(|event| event["regarding"]["name"] == name && event["reason"] == "Unmapped")
    });
    event["note"].as_str().unwrap().to_owned()
}

#[test]
fn unmapped_slice_is_named_and_annotated_once() {
    let Some(definition) = liqo_definitions("offloading", &["shadowendpointslices"]) else {
        return;
    };
    let Some((_turn, cluster)) = cluster_alone() else { return };
    account(cluster);
    cluster.define_all(&definition);
    cluster.apply_all(&peering("skien"));
    cluster.apply(&server("skien", &json!({"serviceType": "ClusterIP", "port": 51840})));
    cluster.apply_all(&liqo(false));
    let networking = "/status/modules/networking/enabled";
    cluster.until_is(["foreignclusters", "", "skien"], networking, &json!(true));
    let configuration = cluster.get("configuration", &tenant("skien"), "skien").unwrap();
    let seen = configuration["status"]["remote"]["cidr"]["pod"][0].as_str().unwrap();
    assert_ne!(seen, "10.200.0.0/16", "that is this cluster's own");
    let mapped = |host: &str| seen.replace(".0.0/16", host);

    slice(cluster, "right", "10.200.1.6", &mapped(".1.6"));
    slice(cluster, "wrong", "10.200.1.7", "10.200.1.7");
    let repaired_at = "/metadata/annotations/fabric.weft.dev~1repaired-at";
    let repaired = || {
        let wrong = cluster.get("shadowendpointslices", "default", "wrong")?;
        wrong.pointer(repaired_at)?.as_str().map(str::to_owned)
    };
    let first = cluster.until("it is annotated", repaired);
    let expected = format!("had 10.200.1.7 of skien, expected {}", mapped(".1.7"));
    let noted = note(cluster, "wrong");
    assert!(noted.contains(&expected), "{noted}");
    cluster.until("weft status names it", || {
        has_problem(&observed(cluster), &["default/wrong", &expected]).then_some(())
    });
    slice(cluster, "wrong", "10.200.1.7", &mapped(".1.7"));

    virtual_kubelet(cluster);
    shadow_pod(cluster, "10.200.1.8");
    let noted = note(cluster, "vk-milan");
    let expected = format!("default/far had 10.200.1.8 of skien, expected {}", mapped(".1.8"));
    assert!(noted.contains(&expected) && noted.contains("60 s old"), "{noted}");
    cluster.until_peace("default");
    assert_eq!(repaired(), Some(first), "once a minute at most");
    let right = cluster.get("shadowendpointslices", "default", "right").unwrap();
    assert_eq!(right.pointer(repaired_at), None, "{right}");
    assert!(cluster.get("pod", "default", "vk-milan").is_some(), "it is too young");
    for (kind, name) in [
        ("shadowendpointslice", "wrong"),
        ("shadowendpointslice", "right"),
        ("pod", "vk-milan"),
        ("pod", "far"),
    ] {
        cluster.delete(kind, "default", name);
    }
    cluster.delete("gatewayserver", &tenant("skien"), "server");
    cluster.delete("configuration", &tenant("skien"), "skien");
    remove_liqo(cluster);
}
