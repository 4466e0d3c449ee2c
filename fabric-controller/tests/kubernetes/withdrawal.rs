//! weft is taken away, for good.

use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, client, cluster_alone, peering, tenant};

const LEASE: [&str; 3] = ["lease", "liqo", "weft-fabric-controller"];
/// Kinds that weft makes, but for a namespace's own.
const MADE: &str = "deployments,poddisruptionbudgets,services,serviceaccounts,roles,rolebindings,secrets,networks,ips,\
    gatewayconfigs,nodeconfigs,connections";
const OURS: &str = "app.kubernetes.io/managed-by=weft";

/// One node's agent answers, the other's has been there once.
#[test]
fn withdrawal_removes_own_objects_and_conditions() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let tenant = tenant("lucca");
    cluster.apply_all(&peering("lucca"));
    cluster.apply(&client("lucca"));
    cluster.until("a gateway", || cluster.get("deployment", &tenant, "gw-client"));
    cluster.until("prefixes", || {
        let configuration = cluster.get("configuration", &tenant, "lucca")?;
        let has_local = configuration["spec"]["local"].is_object();
        (has_local && configuration["status"]["remote"].is_object()).then_some(())
    });
    connect(cluster, &tenant);
    for node in ["n1", "n2"] {
        cluster.until("its agent has answered", || {
            let config = cluster.get("nodeconfig", "", node)?;
            config.pointer("/status/appliedGeneration").cloned()
        });
    }

    // A Network as it is after a withdrawal that keeps prefixes.
    let kept = json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
        "metadata": {"name": "kept", "namespace": tenant}, "spec": {"cidr": "10.91.0.0/16"}});
    cluster
        .kubectl(&["apply", "--server-side", "--field-manager=weft", "-f", "-"], &kept.to_string());

    // All tests share the controllers.
    let _lock = Unlocked(cluster);
    let printed = thread::scope(|scope| {
        // Longer than a request lasts, while nodes are waited for.
        scope.spawn(|| {
            thread::sleep(Duration::from_secs(3));
            cluster.server.freeze(true);
            thread::sleep(Duration::from_millis(5500));
            cluster.server.freeze(false);
        });
        withdraw(cluster)
    });
    assert!(printed.contains("did not answer within 5 s"), "{printed}");
    assert!(printed.contains("waiting node=\"n2\""), "{printed}");
    // A gateway that ends without its config announces to the peer that this side is removed.
    let removal = |kind: &str| printed.find(&format!("removed {kind} {tenant}/"));
    let [config, deployment] = ["GatewayConfig", "Deployment"].map(removal);
    assert!(config.is_some() && config < deployment, "{printed}");
    let holder = || cluster.get(LEASE[0], LEASE[1], LEASE[2]).unwrap()["spec"].clone();
    assert_eq!(holder()["holderIdentity"], "withdrawal");
    nothing_is_made_again(cluster);
    assert_nothing_of_weft(cluster, &tenant);
    let events = cluster.kubectl(&["get", "events", "-n", "default", "-o", "json"], "");
    assert!(events.contains("WeftLeftBehind") && events.contains("\"n2\""), "{events} {printed}");

    let still = cluster.get("network", &tenant, "kept").unwrap();
    assert_eq!(still["spec"]["cidr"], "10.91.0.0/16");
    cluster.kubectl(&["delete", "network", "kept", "-n", &tenant], "");

    // A second time, there is nothing to do. If it does not end well, controllers go on.
    assert!(!withdraw(cluster).contains("removed"));
    drop(Unlocked(cluster));
    cluster.until("a gateway again", || cluster.get("deployment", &tenant, "gw-client"));
    for node in ["n1", "n2"] {
        cluster.until_is(["nodeconfig", "", node], "/spec/removed", &json!(false));
    }
}

/// Lets controllers work in the end.
struct Unlocked<'a>(&'a Cluster);

impl Drop for Unlocked<'_> {
    fn drop(&mut self) {
        let [kind, namespace, name] = LEASE;
        drop(self.0.server.kubectl(&["delete", kind, name, "-n", namespace], ""));
    }
}

/// Runs the withdrawal; returns its messages.
fn withdraw(cluster: &Cluster) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_fabric-controller"));
    program.args(["withdraw", "--patience", "8s", "--kubeconfig"]).arg(cluster.server.admin());
    let output = program.output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{printed}");
    printed
}

/// Makes the Connection as a gateway's pod does.
fn connect(cluster: &Cluster, tenant: &str) {
    let metadata = json!({"name": "gw-client", "namespace": tenant,
        "labels": {"app.kubernetes.io/managed-by": "weft"}});
    let gateway = json!({"kind": "GatewayClient", "name": "client", "namespace": tenant});
    let connection = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": metadata, "spec": {"type": "Client", "gatewayRef": gateway}});
    cluster.apply(&connection);
}

/// The controller stands by, and its webhook goes on.
fn nothing_is_made_again(cluster: &Cluster) {
    let all = || {
        let arguments = ["get", MADE, "-A", "-l", OURS, "-o", "name", "--ignore-not-found"];
        cluster.kubectl(&arguments, "").replace("secret/weft-webhook-certificate\n", "")
    };
    assert_eq!(all(), "");
    thread::sleep(Duration::from_secs(6));
    assert_eq!(all(), "");
}

/// Objects that users have made are there, with nothing of weft's in them any more.
fn assert_nothing_of_weft(cluster: &Cluster, tenant: &str) {
    let kinds = [("configuration", "lucca"), ("gatewayclient", "client")];
    for (kind, name) in kinds {
        let object = cluster.get(kind, tenant, name).unwrap();
        let status = object["status"].as_object().cloned().unwrap_or_default();
        assert!(status.values().all(|v| *v == json!([]) || *v == json!({})), "{kind}: {object}");
        assert_eq!(object["spec"]["local"], Value::Null, "{kind}");
        assert_eq!(object["metadata"]["finalizers"], Value::Null, "{kind}");
    }
    assert!(cluster.get("publickey", tenant, "gw-publickey").is_some());
    assert!(cluster.get("secret", tenant, "gw-keys").is_some());
    let network = cluster.get("network", "liqo", "pod-cidr").unwrap();
    assert_eq!(network["status"].as_object().cloned().unwrap_or_default().len(), 0, "{network}");
}
