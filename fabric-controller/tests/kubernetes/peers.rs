//! Liqo's ForeignClusters, where there are such.

use serde_json::json;

use crate::cluster::{cluster, cluster_ip, peering, server};

#[test]
fn a_foreign_cluster_says_how_the_networking_is() {
    let Some((_turn, cluster)) = cluster() else { return };
    let mut anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let mut modules = anything.clone();
    modules["required"] = json!(["authentication", "networking", "offloading"]);
    let mut status = anything.clone();
    status["properties"] = json!({"modules": modules});
    anything["properties"] = json!({"status": status});
    let version = json!({"name": "v1beta1", "served": true, "storage": true,
        "subresources": {"status": {}}, "schema": {"openAPIV3Schema": anything}});
    cluster.apply(&json!({"apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "foreignclusters.core.liqo.io"},
        "spec": {"group": "core.liqo.io", "scope": "Cluster", "versions": [version],
            "names": {"kind": "ForeignCluster", "plural": "foreignclusters"}}}));
    let peer = json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
        "metadata": {"name": "oslo"}});
    cluster.until("it is served", || {
        cluster.server.kubectl(&["apply", "-f", "-"], &peer.to_string()).ok()
    });
    cluster.apply_all(&peering("oslo"));
    cluster.apply(&server("oslo", &cluster_ip()));
    let conditions = cluster.until("its conditions", || {
        let found = cluster.get("foreignclusters", "", "oslo")?;
        let networking = &found["status"]["modules"]["networking"];
        let all = networking["conditions"].as_array()?.clone();
        (networking["enabled"] == true && all.len() == 4).then_some(all)
    });
    let of = |type_: &str| {
        let found = conditions.iter().find(|condition| condition["type"] == type_).unwrap();
        (found["status"].as_str().unwrap().to_owned(), found["reason"].as_str().unwrap().to_owned())
    };
    let pair = |status: &str, reason: &str| (status.to_owned(), reason.to_owned());
    assert_eq!(of("NetworkConfigurationStatus"), pair("Ready", "NetworkConfigurationPresence"));
    assert_eq!(of("NetworkGatewayPresence"), pair("Ready", "GatewayPresence"));
    assert_eq!(of("NetworkGatewayServerStatus"), pair("NotReady", "GatewaysNotReady"));
    assert_eq!(of("NetworkConnectionStatus"), pair("NotReady", "ConnectionMissing"));
}
