//! Liqo's own command-line tool writes what weft reads, and deletes it again. The definitions are
//! there, weft itself is not.
//!
//! ```text
//!   liqoctl on rome-1 --+--[ switch ]--+-- milan-1
//! ```

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Object, deploy, require_liqoctl};
use weft_tests::{Kubernetes, Lab, skip};

use crate::stage::{play, rome_and_milan_of, step};
use crate::tool::KEY;

/// The namespace of the peering in rome.
const TENANT: &str = "liqo-tenant-milan";

#[test]
fn liqoctl_objects_match_definitions() -> Result<()> {
    if let Err(why) = require_liqoctl() {
        skip(&format!("{why:#}"));
        return Ok(());
    }
    play(|| {
        let lab = Lab::new("weft-kubernetes-liqoctl")?;
        let clusters = step("two clusters come up", || rome_and_milan_of(&lab, 1))?;
        let [rome, milan] = &clusters;
        step("liqoctl finds no installation", || finds_no_installation(rome))?;
        step("the clusters are described", || describe(&clusters))?;
        step("a Configuration is created, changed, deleted", || configuration(rome))?;
        step("a GatewayServer is created and deleted", || server(rome))?;
        step("a GatewayClient is created and deleted", || client(rome))?;
        step("a PublicKey is created and deleted", || public_key(rome))?;
        step("two clusters are disconnected", || disconnect(rome, milan))?;
        step("two clusters are reset", || reset(rome, milan))?;
        step("info shows what is there", || info(rome))
    })
}

/// Output of liqoctl, once the command has succeeded.
pub(crate) fn liqoctl(cluster: &Kubernetes, args: &[&str]) -> Result<String> {
    let answer = cluster.liqoctl(None, args)?;
    ensure!(answer.success, "liqoctl {}: {}{}", args.join(" "), answer.stdout, answer.stderr);
    Ok(answer.stdout)
}

/// The same for both clusters.
pub(crate) fn on_both(local: &Kubernetes, remote: &Kubernetes, args: &[&str]) -> Result<()> {
    let answer = local.liqoctl(Some(remote), args)?;
    ensure!(answer.success, "liqoctl {}: {}{}", args.join(" "), answer.stdout, answer.stderr);
    Ok(())
}

fn finds_no_installation(cluster: &Kubernetes) -> Result<()> {
    let answer = cluster.liqoctl(None, &["info"])?;
    ensure!(!answer.success && answer.stderr.contains("not installed"), "{answer:?}");
    Ok(())
}

/// Definitions, the cluster's own name, and the namespace of the peering.
fn describe(clusters: &[Kubernetes; 2]) -> Result<()> {
    let definitions = deploy()?.join("chart/crds-liqo");
    let definitions = definitions.to_str().context("a path is text")?;
    for (cluster, peer) in clusters.iter().zip(clusters.iter().rev()) {
        cluster.kubectl(&["apply", "--server-side", "--filename", definitions])?;
        cluster.kubectl(&["wait", "--for=condition=Established", "crd", "--all"])?;
        let (id, peer) = (&cluster.spec.id, &peer.spec.id);
        let name = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"CLUSTER_ID": id},
            "metadata": {
                "name": "liqo-clusterid-configmap", "namespace": "liqo",
                "labels": {"app.kubernetes.io/name": "clusterid-configmap"},
            },
        });
        let tenant = json!({"liqo.io/tenant-namespace": "true", "liqo.io/remote-cluster-id": peer});
        let items = [
            namespace("liqo", &json!({})),
            namespace(&format!("liqo-tenant-{peer}"), &tenant),
            name,
        ];
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        cluster.apply(&list.to_string())?;
    }
    Ok(())
}

fn namespace(name: &str, labels: &Value) -> Value {
    let metadata = json!({"name": name, "labels": labels});
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
}

/// Creates an object by liqoctl, sees that it is what liqoctl prints when it is only to print it,
/// and that its spec is as expected.
fn create(cluster: &Kubernetes, kind: &str, flags: &str, spec: &Value) -> Result<Value> {
    let line =
        format!("create {kind} milan --namespace {TENANT} --remote-cluster-id milan {flags}");
    let mut args: Vec<_> = line.split_whitespace().collect();
    liqoctl(cluster, &args)?;
    let stored = cluster.get(Object::new(resource(kind), TENANT, "milan"))?;
    args.push("--output=json");
    let mut printed: Value = serde_json::from_str(&liqoctl(cluster, &args)?)?;
    if let Some(secret) = printed["spec"].get_mut("secretRef") {
        secret["name"] = json!(""); // the definition's default
    }
    ensure!(stored["spec"] == *spec, "stored {}, not {spec}", stored["spec"]);
    ensure!(printed["spec"] == *spec, "printed {}, not {spec}", printed["spec"]);
    let peer = &stored["metadata"]["labels"]["liqo.io/remote-cluster-id"];
    ensure!(peer == "milan", "the label is {peer}");
    Ok(stored)
}

/// The plural, for kubectl.
fn resource(kind: &str) -> &str {
    if kind == "publickey" { "publickeies" } else { kind }
}

fn delete(cluster: &Kubernetes, kind: &str) -> Result<()> {
    liqoctl(cluster, &["delete", kind, "milan", "--namespace", TENANT, "--skip-confirm"])?;
    gone(cluster, kind)
}

fn gone(cluster: &Kubernetes, kind: &str) -> Result<()> {
    let args = ["get", resource(kind), "--all-namespaces", "--output=name"];
    let left = cluster.kubectl(&args)?;
    ensure!(left.is_empty(), "{} still has {left}", cluster.spec.id);
    Ok(())
}

fn configuration(cluster: &Kubernetes) -> Result<()> {
    for pod in ["10.200.0.0/16", "10.201.0.0/16"] {
        let flags = format!("--pod-cidr {pod} --external-cidr 10.70.0.0/16");
        let spec = json!({"remote": {"cidr": {"pod": [pod], "external": ["10.70.0.0/16"]}}});
        create(cluster, "configuration", &flags, &spec)?;
    }
    delete(cluster, "configuration")
}

fn server(cluster: &Kubernetes) -> Result<()> {
    let spec = |endpoint: Value| {
        json!({
            "endpoint": endpoint, "mtu": 1340, "secretRef": {"name": ""},
            "serverTemplateRef": template("WgGatewayServerTemplate", "wireguard-server"),
        })
    };
    let cases = [
        ("", json!({"port": 51840, "serviceType": "LoadBalancer"})),
        (
            "--load-balancer-ip 192.0.2.99",
            json!({"port": 51840, "serviceType": "LoadBalancer", "loadBalancerIP": "192.0.2.99"}),
        ),
        (
            "--service-type NodePort --port 51841 --node-port 30742",
            json!({"port": 51841, "serviceType": "NodePort", "nodePort": 30742}),
        ),
    ];
    for (flags, endpoint) in cases {
        create(cluster, "gatewayserver", flags, &spec(endpoint))?;
    }
    delete(cluster, "gatewayserver")
}

fn client(cluster: &Kubernetes) -> Result<()> {
    let endpoint = json!({
        "addresses": ["192.0.2.33", "gateway.milan.example"], "port": 30742, "protocol": "UDP",
    });
    let spec = json!({
        "endpoint": endpoint, "mtu": 1280, "secretRef": {"name": ""},
        "clientTemplateRef": template("WgGatewayClientTemplate", "wireguard-client"),
    });
    let flags = "--addresses 192.0.2.33,gateway.milan.example --port 30742 --mtu 1280";
    create(cluster, "gatewayclient", flags, &spec)?;
    delete(cluster, "gatewayclient")
}

/// liqoctl finds the kind of a template by its plural.
fn template(kind: &str, name: &str) -> Value {
    let group = "networking.liqo.io/v1beta1";
    json!({"apiVersion": group, "kind": kind, "name": name, "namespace": "liqo"})
}

fn public_key(cluster: &Kubernetes) -> Result<()> {
    let flags = format!("--public-key {KEY}");
    let stored = create(cluster, "publickey", &flags, &json!({"publicKey": KEY}))?;
    let label = &stored["metadata"]["labels"]["networking.liqo.io/gateway-resource"];
    ensure!(label == "true", "the label is {label}");
    delete(cluster, "publickey")
}

/// Both ends of a peering, rome's the client, under names that liqoctl would not give them.
fn peer(rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    let cidrs = "--pod-cidr 10.200.0.0/16 --external-cidr 10.70.0.0/16";
    let on_rome = "--addresses 192.0.2.33 --port 51840";
    for (cluster, peer, kind, flags) in [
        (rome, "milan", "configuration", cidrs),
        (rome, "milan", "gatewayclient", on_rome),
        (milan, "rome", "configuration", cidrs),
        (milan, "rome", "gatewayserver", ""),
    ] {
        let place = format!("--namespace liqo-tenant-{peer} --remote-cluster-id {peer}");
        let line = format!("create {kind} other {place} {flags}");
        liqoctl(cluster, &line.split_whitespace().collect::<Vec<_>>())?;
    }
    Ok(())
}

fn disconnect(rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    peer(rome, milan)?;
    on_both(rome, milan, &["network", "disconnect", "--skip-confirm"])?;
    gone(rome, "gatewayclient")?;
    gone(milan, "gatewayserver")?;
    for (cluster, peer) in [(rome, "milan"), (milan, "rome")] {
        let namespace = format!("liqo-tenant-{peer}");
        let configuration = Object::new("configuration", &namespace, "other");
        cluster.get(configuration).context("it was to stay")?;
    }
    Ok(())
}

fn reset(rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    peer(rome, milan)?;
    on_both(milan, rome, &["network", "reset", "--skip-confirm"])?;
    [rome, milan].into_iter().try_for_each(|cluster| {
        let kinds = ["configuration", "gatewayclient", "gatewayserver"];
        kinds.into_iter().try_for_each(|kind| gone(cluster, kind))
    })
}

fn info(cluster: &Kubernetes) -> Result<()> {
    let id = liqoctl(cluster, &["info", "--get", "clusterid"])?;
    ensure!(id.trim() == "rome", "it printed {id:?}");
    Ok(())
}
