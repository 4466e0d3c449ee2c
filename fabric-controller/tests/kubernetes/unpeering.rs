//! Deleted in any order, a peering leaves nothing.

use serde_json::json;

use crate::cluster::{Cluster, cluster, cluster_ip, peering, server, tenant};

/// Kinds that weft makes, and those that would hold up the namespace.
const LEFT: [&str; 9] = [
    "gatewayconfigs",
    "deployments",
    "poddisruptionbudgets",
    "services",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "networks.ipam.liqo.io",
    "ips.ipam.liqo.io",
];

fn left(cluster: &Cluster, namespace: &str) -> Vec<String> {
    LEFT.iter().flat_map(|kind| cluster.names(kind, namespace)).collect()
}

fn peered(cluster: &Cluster, peer: &str) {
    let namespace = &tenant(peer);
    cluster.apply_all(&peering(peer));
    cluster.apply(&server(peer, &cluster_ip()));
    for kind in ["gatewayconfig", "deployment"] {
        let name = if kind == "deployment" { "gw-server" } else { "server" };
        cluster.until(kind, || cluster.get(kind, namespace, name));
    }
    let ready = ["configuration", namespace.as_str(), peer];
    cluster.until_is(ready, "/status/conditions/0/status", &json!("True"));
    assert_eq!(cluster.names("networks.ipam.liqo.io", namespace).len(), 2);
    for kind in ["networks.ipam.liqo.io", "ips.ipam.liqo.io", "gatewayconfigs"] {
        for name in cluster.names(kind, namespace) {
            let object = cluster.get(kind, namespace, &name).unwrap();
            let owner = &object["metadata"]["ownerReferences"][0];
            assert_eq!(owner["controller"], true, "{kind} {name} goes even without weft");
            assert_eq!(object["metadata"].get("finalizers"), None, "{kind} {name}");
        }
    }
}

fn unpeered(peer: &str, order: [(&str, &str); 3]) {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant(peer);
    peered(cluster, peer);
    for (kind, name) in order {
        cluster.delete(kind, namespace, name);
    }
    let mut last = Vec::new();
    cluster.until("nothing is left", || {
        last = left(cluster, namespace);
        last.is_empty().then_some(())
    });
    let nodes = cluster.names("nodeconfigs", "");
    cluster.until("no node has the peering", || {
        let is_gone = |node: &String| {
            let config = cluster.get("nodeconfig", "", node).unwrap();
            !config["spec"]["peerings"].to_string().contains(&format!("\"{peer}\""))
        };
        nodes.iter().all(is_gone).then_some(())
    });
}

#[test]
fn gateway_first() {
    let order =
        [("gatewayserver", "server"), ("publickey", "gw-publickey"), ("configuration", "turin")];
    unpeered("turin", order);
}

#[test]
fn configuration_first() {
    let order = [("configuration", "genoa"), ("secret", "gw-keys"), ("gatewayserver", "server")];
    unpeered("genoa", order);
}
