//! Pods of a gateway that do not start, beside one that is ready.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster_alone, cluster_ip, metadata, peering, server, tenant};
use crate::status::{has_problem, observed};

/// Time until a fault is named.
const NAMED: Duration = Duration::from_secs(5);

fn condition(cluster: &Cluster, peer: &str) -> Value {
    let gateway = cluster.get("gatewayserver", &tenant(peer), "server").unwrap_or_default();
    let all = gateway["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|condition| condition["type"] == "PodsStarted").unwrap_or_default()
}

/// A pod as a ReplicaSet makes it, and perhaps a scheduler has placed it.
fn add_pod(cluster: &Cluster, peer: &str, name: &str, node: Option<&str>) -> Value {
    let mut metadata = metadata(name, peer);
    metadata["labels"]["networking.liqo.io/component"] = json!("gateway");
    metadata["labels"]["networking.liqo.io/gateway-name"] = json!("server");
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
        "spec": {"serviceAccountName": "gw-server", "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "gateway", "image": "gateway"}]}});
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
    }
    cluster.apply(&pod);
    pod
}

fn set_waiting(cluster: &Cluster, pod: &Value, reason: &str, message: &str) {
    let state = json!({"waiting": {"reason": reason, "message": message}});
    let container = json!({"name": "gateway", "image": "gateway", "imageID": "", "ready": false,
        "restartCount": 0, "state": state});
    let unready = json!([{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]);
    let status =
        json!({"phase": "Pending", "conditions": unready, "containerStatuses": [container]});
    cluster.set_status(pod, &status);
}

/// Waits until condition and `weft status` name a pod with a cause, and checks that both do so in time.
fn is_named(cluster: &Cluster, peer: &str, (pod, reason, cause): (&str, &str, &str)) {
    let since = Instant::now();
    let mut late = Vec::new();
    let shown = format!("gateway {}/server: pod {pod} is not ready ({cause}", tenant(peer));
    cluster.until("the condition", || {
        let condition = condition(cluster, peer);
        let message = condition["message"].as_str().unwrap_or_default();
        let is_its = message.contains(&format!("pod {pod} ")) && message.contains(cause);
        (condition["reason"] == reason && is_its && condition["status"] == "False").then_some(())
    });
    late.push(since.elapsed());
    cluster.until("weft status", || {
        let parts = [shown.as_str(), "; the one that is ready has no successor"];
        has_problem(&observed(cluster), &parts).then_some(())
    });
    late.push(since.elapsed());
    assert!(late.iter().all(|time| *time < NAMED), "{late:?}");
}

#[test]
fn pod_that_does_not_start_is_named_at_once() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let peer = "trier";
    cluster.apply_all(&peering(peer));
    cluster.apply(&server(peer, &cluster_ip()));
    cluster.run_pod(peer, "ready", "n1", "10.200.1.41");
    let internal = ["gatewayserver", &tenant(peer), "server"];
    cluster.until_is(internal, "/status/internalEndpoint/ip", &json!("10.200.1.41"));

    let pod = add_pod(cluster, peer, "pulling", Some("n2"));
    let created = Instant::now();
    set_waiting(cluster, &pod, "ContainerCreating", "");
    let its = "gateway liqo-tenant-trier/server: pod pulling";
    while created.elapsed() < Duration::from_secs(7) {
        assert_eq!(condition(cluster, peer), Value::Null, "it is just starting");
        assert!(!has_problem(&observed(cluster), &[its]), "it is just starting");
        sleep(Duration::from_millis(250));
    }
    set_waiting(cluster, &pod, "ErrImagePull", "no such image");
    is_named(cluster, peer, ("pulling", "ErrImagePull", "ErrImagePull: no such image"));
    set_waiting(cluster, &pod, "CrashLoopBackOff", "back-off 10s");
    is_named(cluster, peer, ("pulling", "CrashLoopBackOff", "CrashLoopBackOff: back-off 10s"));
    cluster.kill_pod(peer, "pulling");
    let is_gone = || condition(cluster, peer).is_null().then_some(());
    cluster.until("the condition is gone", is_gone);

    let pod = add_pod(cluster, peer, "unplaced", None);
    let unplaced = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "no node fits"});
    cluster.set_status(&pod, &json!({"phase": "Pending", "conditions": [unplaced]}));
    is_named(cluster, peer, ("unplaced", "Unschedulable", "no node fits"));
    cluster.kill_pod(peer, "unplaced");
    cluster.until("the condition is gone", is_gone);

    let pod = add_pod(cluster, peer, "slow", Some("n2"));
    let created = Instant::now();
    set_waiting(cluster, &pod, "ContainerCreating", "");
    cluster.until("a slow start is named", || {
        (condition(cluster, peer)["reason"] == "ContainerCreating").then_some(())
    });
    let named = created.elapsed();
    assert!((8..15).contains(&named.as_secs()), "after {named:?}");
    assert!(has_problem(&observed(cluster), &["trier/server: pod slow is not ready"]));
    cluster.until_is(internal, "/status/internalEndpoint/ip", &json!("10.200.1.41"));
    cluster.kill_pod(peer, "slow");
    cluster.kill_pod(peer, "ready");
}
