//! Calls of liqoctl 1.2 to a cluster, reading and writing, one by one: in its order, once a second
//! where it waits, and once where it does not. Where it would crash, there is an error.

mod connect;
mod info;

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::Kubernetes;
use weft_tests::kubernetes::Object;

pub(crate) use connect::connect;
pub(crate) use info::{info, info_peer};

const POLL: Duration = Duration::from_secs(1);
const PEER: &str = "liqo.io/remote-cluster-id";

/// One of two clusters, and its view of the other.
pub(crate) struct Side<'a> {
    pub(crate) cluster: &'a Kubernetes,
    /// The other's ID, which objects about it are named after.
    pub(crate) peer: String,
    /// The namespace of the peering.
    pub(crate) namespace: String,
}

/// Both as `network` sees them: the local cluster first, which is the client.
pub(crate) fn sides<'a>(local: &'a Kubernetes, remote: &'a Kubernetes) -> Result<[Side<'a>; 2]> {
    let (local_id, remote_id) = (cluster_id(local)?, cluster_id(remote)?);
    let side =
        |cluster, peer: String| Side { cluster, namespace: format!("liqo-tenant-{peer}"), peer };
    Ok([side(local, remote_id), side(remote, local_id)])
}

impl Side<'_> {
    /// The objects of a kind that are about the peer.
    fn about(&self, kind: &str) -> Result<Vec<Value>> {
        list(self.cluster, kind, Some(&self.namespace), &format!("{PEER}={}", self.peer))
    }

    fn get(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        let arguments = ["get", kind, name, "--namespace", &self.namespace];
        let found = self
            .cluster
            .kubectl(&[&arguments[..], &["--ignore-not-found", "--output=json"]].concat())?;
        if found.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&found)?)) }
    }

    fn metadata(&self, name: &str) -> Value {
        json!({"name": name, "namespace": self.namespace, "labels": {PEER: self.peer}})
    }
}

/// `network disconnect`: clients first, then servers, here and there.
pub(crate) fn disconnect(sides: &[Side<'_>; 2]) -> Result<()> {
    for kind in ["gatewayclients", "gatewayservers"] {
        sides.iter().try_for_each(|side| delete(side, kind))?;
    }
    Ok(())
}

/// `network reset`.
pub(crate) fn reset(sides: &[Side<'_>; 2]) -> Result<()> {
    disconnect(sides)?;
    sides.iter().try_for_each(|side| delete(side, "configurations"))
}

fn delete(side: &Side<'_>, kind: &str) -> Result<()> {
    let label = format!("--selector={PEER}={}", side.peer);
    side.cluster.kubectl(&["delete", kind, "--namespace", &side.namespace, &label]).map(drop)
}

/// `create KIND --wait`, until what liqoctl waits for is there.
pub(crate) fn create(side: &Side<'_>, object: &Value, at_most: Duration) -> Result<()> {
    side.cluster.apply(&object.to_string())?;
    let kind = object["kind"].as_str().context("it has a kind")?;
    let name = object["metadata"]["name"].as_str().context("it has a name")?;
    let fields: &[&str] = match kind {
        "Configuration" => &["remote"],
        "GatewayServer" => &["endpoint", "serverRef"],
        "GatewayClient" => &["clientRef"],
        _ => return Ok(()),
    };
    poll(&format!("{kind} {name} has {fields:?}"), at_most, || {
        let found = side.get(kind, name)?.context("it is gone")?;
        Ok(fields.iter().all(|field| found["status"][field].is_object()).then_some(()))
    })
}

/// `generate configuration`: the CIDRs of this cluster for a peer.
pub(crate) fn generate_configuration(cluster: &Kubernetes) -> Result<Value> {
    let id = cluster_id(cluster)?;
    let pods = networks(cluster, "pod-cidr", Some("liqo"))?;
    let external = one_network(cluster, "external-cidr", Some("liqo"))?;
    Ok(json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
        "metadata": {"name": id, "labels": {PEER: id}},
        "spec": {"remote": {"cidr": {"pod": pods, "external": [external]}}},
    }))
}

/// `generate publickey`, of the gateway of that kind and name.
pub(crate) fn generate_publickey(side: &Side<'_>, kind: &str, name: &str) -> Result<Value> {
    let gateway = side.get(kind, name)?.context("there is no such gateway")?;
    let key = public_key(side.cluster, &gateway)?;
    Ok(json!({"spec": {"publicKey": key}}))
}

/// The key in the Secret that a gateway's status names; read once.
fn public_key(cluster: &Kubernetes, gateway: &Value) -> Result<String> {
    let secret = &gateway["status"]["secretRef"];
    let name = secret["name"].as_str().context("it crashes: no status.secretRef")?;
    let namespace = secret["namespace"].as_str().context("status.secretRef has no namespace")?;
    let secret = cluster.get(Object::new("secret", namespace, name))?;
    let key = secret["data"]["publicKey"].as_str().context("it does not contain publicKey")?;
    ensure!(key.len() == 44 && key.ends_with('='), "{key} are not 32 raw bytes");
    Ok(key.to_owned())
}

/// ID in the one ConfigMap with that label.
fn cluster_id(cluster: &Kubernetes) -> Result<String> {
    let label = "app.kubernetes.io/name=clusterid-configmap";
    let maps = list(cluster, "configmaps", Some("liqo"), label)?;
    let [map] = maps.as_slice() else { bail!("expected one ConfigMap: {maps:?}") };
    map["data"]["CLUSTER_ID"].as_str().map(str::to_owned).context("it has no CLUSTER_ID")
}

/// CIDRs granted to Networks of a type.
fn networks(cluster: &Kubernetes, of: &str, namespace: Option<&str>) -> Result<Vec<String>> {
    let label = format!("ipam.liqo.io/network-type={of}");
    let all = list(cluster, "networks", namespace, &label)?;
    ensure!(!all.is_empty(), "there is no {of}");
    let cidr = |network: &Value| network["status"]["cidr"].as_str().map(str::to_owned);
    all.iter().map(|network| cidr(network).context("it has no status.cidr")).collect()
}

fn one_network(cluster: &Kubernetes, of: &str, namespace: Option<&str>) -> Result<String> {
    let all = networks(cluster, of, namespace)?;
    let [one] = all.as_slice() else { bail!("multiple Network resources found: {all:?}") };
    Ok(one.clone())
}

/// Objects of one namespace, or of all.
pub(crate) fn list(
    cluster: &Kubernetes,
    kind: &str,
    namespace: Option<&str>,
    labels: &str,
) -> Result<Vec<Value>> {
    let place = namespace
        .map_or_else(|| "--all-namespaces".to_owned(), |name| format!("--namespace={name}"));
    let labels = format!("--selector={labels}");
    let found = cluster.kubectl(&["get", kind, &place, &labels, "--output=json"])?;
    let found: Value = serde_json::from_str(&found).context("kubectl prints JSON")?;
    Ok(found["items"].as_array().cloned().unwrap_or_default())
}

/// Polls once a second. An error is the end of it.
fn poll<T>(
    what: &str,
    at_most: Duration,
    mut check: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(answer) = check().with_context(|| what.to_owned())? {
            return Ok(answer);
        }
        ensure!(began.elapsed() < at_most, "waited {at_most:?} until {what}");
        sleep(POLL);
    }
}
