//! Foreign labels and annotations on weft's own objects.

use serde_json::json;

use crate::cluster::{cluster, cluster_ip, peering, server, tenant};

#[test]
fn foreign_labels_on_own_objects_are_tolerated() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("metz");
    cluster.apply_all(&peering("metz"));
    cluster.apply(&server("metz", &cluster_ip()));
    cluster.until("its config", || cluster.get("gatewayconfig", namespace, "server"));
    let address = cluster.until("its address", || cluster.names("ips", namespace).pop());
    let label = json!({"metadata": {"labels": {"liqo.io/theirs": "too"}}});
    cluster.merge("ip", namespace, &address, &label);
    let note = json!({"metadata": {"annotations": {"weft.dev/theirs": "too"}}});
    cluster.merge("gatewayconfig", namespace, "server", &note);

    cluster.apply_all(&peering("nancy"));
    cluster.apply(&server("nancy", &cluster_ip()));
    cluster.until("another gateway", || cluster.get("deployment", &tenant("nancy"), "gw-server"));
    let ip = cluster.get("ip", namespace, &address).unwrap();
    assert_eq!(ip["metadata"]["labels"]["liqo.io/theirs"], "too");
}
