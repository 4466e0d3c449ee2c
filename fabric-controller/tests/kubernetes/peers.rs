//! Liqo's ForeignClusters.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, cluster_ip, peering, server, tenant};

const NETWORKING: &str = "/status/modules/networking/enabled";

fn peered(cluster: &Cluster, peer: &str) -> Value {
    cluster.apply_all(&peering(peer));
    cluster.apply(&server(peer, &cluster_ip()));
    cluster.until("it is published with all its conditions", || {
        let found = cluster.get("foreignclusters", "", peer)?;
        let networking = &found["status"]["modules"]["networking"];
        let conditions = networking["conditions"].as_array()?;
        let is_whole = networking["enabled"] == true && conditions.len() == 4;
        // Its prefixes are published once nodes have routes for them.
        let is_configured = |c: &Value| c["reason"] == "NetworkConfigurationPresence";
        (is_whole && conditions.iter().any(is_configured)).then_some(found)
    })
}

fn unpeer(cluster: &Cluster, peer: &str) {
    cluster.delete("gatewayserver", &tenant(peer), "server");
    cluster.delete("configuration", &tenant(peer), peer);
}

#[test]
fn peer_has_foreign_cluster_with_networking() {
    let Some(cluster) = cluster() else { return };
    let found = peered(cluster, "oslo");
    assert_eq!(found["metadata"]["labels"]["liqo.io/remote-cluster-id"], "oslo");
    assert_eq!(found["spec"]["clusterID"], "oslo");
    assert_eq!(found["status"]["role"], "Unknown");
    let modules = &found["status"]["modules"];
    let off = json!({"enabled": false});
    assert_eq!([&modules["authentication"], &modules["offloading"]], [&off, &off]);
    let conditions = modules["networking"]["conditions"].as_array().unwrap();
    let of = |type_: &str| {
        let found = conditions.iter().find(|condition| condition["type"] == type_).unwrap();
        (found["status"].as_str().unwrap().to_owned(), found["reason"].as_str().unwrap().to_owned())
    };
    let pair = |status: &str, reason: &str| (status.to_owned(), reason.to_owned());
    assert_eq!(of("NetworkConfigurationStatus"), pair("Ready", "NetworkConfigurationPresence"));
    assert_eq!(of("NetworkGatewayPresence"), pair("Ready", "GatewayPresence"));
    assert_eq!(of("NetworkGatewayServerStatus"), pair("NotReady", "GatewaysNotReady"));
    assert_eq!(of("NetworkConnectionStatus"), pair("NotReady", "ConnectionMissing"));
    unpeer(cluster, "oslo");
    cluster
        .until("it is gone", || cluster.get("foreignclusters", "", "oslo").is_none().then_some(()));
}

/// Liqo's own controller clears it when its networking is switched off.
#[test]
fn status_cleared_by_liqo_is_rewritten_once() {
    let Some(cluster) = cluster() else { return };
    let found = peered(cluster, "bergen");
    let cleared = json!({"modules": {"networking": {"enabled": false, "conditions": null},
        "authentication": {"enabled": true}}});
    cluster.set_status(&found, &cleared);
    let one = ["foreignclusters", "", "bergen"];
    cluster.until_is(one, NETWORKING, &json!(true));
    let version = || cluster.get(one[0], one[1], one[2]).unwrap()["metadata"].clone();
    sleep(Duration::from_secs(2));
    let before = version();
    sleep(Duration::from_secs(4));
    assert_eq!(version(), before, "nothing is to be done");
    unpeer(cluster, "bergen");
    cluster.until_is(one, NETWORKING, &json!(false));
    let left = cluster.get(one[0], one[1], one[2]).unwrap();
    assert_eq!(left["status"]["modules"]["networking"]["conditions"], json!([]));
    assert_eq!(left["status"]["modules"]["authentication"]["enabled"], true, "Liqo still needs it");
}

#[test]
fn existing_foreign_cluster_is_used_by_any_name() {
    let Some(cluster) = cluster() else { return };
    cluster.apply(&json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
        "metadata": {"name": "of-the-user", "labels": {"liqo.io/remote-cluster-id": "narvik"}},
        "spec": {"clusterID": "narvik"}}));
    cluster.apply_all(&peering("narvik"));
    cluster.until_is(["foreignclusters", "", "of-the-user"], NETWORKING, &json!(true));
    assert_eq!(cluster.get("foreignclusters", "", "narvik"), None);
    cluster.delete("configuration", &tenant("narvik"), "narvik");
    cluster.until_is(["foreignclusters", "", "of-the-user"], NETWORKING, &json!(false));
}

#[test]
fn foreign_cluster_name_conflict_blocks_no_other() {
    let Some(cluster) = cluster() else { return };
    // Before all others, by name; it is labelled for another peer.
    cluster.apply(&json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
        "metadata": {"name": "alta", "labels": {"liqo.io/remote-cluster-id": "elsewhere"}},
        "spec": {"clusterID": "elsewhere"}}));
    cluster.apply_all(&peering("alta"));
    peered(cluster, "voss");
    unpeer(cluster, "voss");
    cluster.delete("configuration", &tenant("alta"), "alta");
    cluster.delete("foreignclusters", "", "alta");
}
