//! `liqoctl info --verbose` and `liqoctl info peer`.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::Kubernetes;

use super::{PEER, cluster_id, list, networks, one_network};

pub(crate) fn info(cluster: &Kubernetes) -> Result<Value> {
    let manager =
        "app.kubernetes.io/name=controller-manager,app.kubernetes.io/component=controller-manager";
    let managers = list(cluster, "deployments", Some("liqo"), manager)?;
    let [manager] = managers.as_slice() else { bail!("expected one controller: {managers:?}") };
    let pods = list(cluster, "pods", Some("liqo"), "")?;
    list(cluster, "foreignclusters", None, "").context("unable to retrieve peerings")?;
    Ok(json!({
        "local": {"clusterID": cluster_id(cluster)?, "version": version(manager)?},
        "health": {"healthy": pods.iter().all(is_ready)},
        "network": {
            "podCIDRs": networks(cluster, "pod-cidr", None)?,
            "serviceCIDR": one_network(cluster, "service-cidr", None)?,
            "externalCIDR": one_network(cluster, "external-cidr", None)?,
            "internalCIDR": one_network(cluster, "internal-cidr", None)?,
        },
    }))
}

/// Tag of the image of the container of that name.
fn version(manager: &Value) -> Result<String> {
    let containers = manager["spec"]["template"]["spec"]["containers"].as_array();
    let mut containers = containers.into_iter().flatten();
    let container = containers.find(|container| container["name"] == "controller-manager");
    let image = container.and_then(|container| container["image"].as_str());
    let version = image.and_then(|image| image.rsplit(':').next());
    version.map(str::to_owned).context("there is no container controller-manager")
}

fn is_ready(pod: &Value) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Output of `info peer` for one peer.
pub(crate) fn info_peer(cluster: &Kubernetes, peer: &str) -> Result<Value> {
    let label = format!("{PEER}={peer}");
    let found = list(cluster, "foreignclusters", None, &label)?;
    let [foreign] = found.as_slice() else { bail!("it crashes: {found:?} of {peer}") };
    ensure!(foreign["spec"]["clusterID"] == peer && foreign["status"]["role"].is_string());
    let module = &foreign["status"]["modules"]["networking"];
    if module["enabled"] != true {
        return Ok(json!({peer: {"network": {"status": "Disabled"}}}));
    }
    let configurations = list(cluster, "configurations", None, &label)?;
    let [configuration] = configurations.as_slice() else {
        bail!("expected one Configuration: {configurations:?}")
    };
    let remapped = &configuration["status"]["remote"]["cidr"];
    ensure!(remapped.is_object(), "it crashes: no status.remote in {configuration}");
    let role = match [
        count(cluster, "gatewayclients", &label)?,
        count(cluster, "gatewayservers", &label)?,
    ] {
        [1, 0] => "Server",
        [0, 1] => "Client",
        other => bail!("{other:?} gateways"),
    };
    let remote = &configuration["spec"]["remote"]["cidr"];
    let network = json!({
        "status": if is_healthy(module) { "Healthy" } else { "Unhealthy" },
        "CIDRs": {"remote": remote, "remapped": remapped}, "gateway": {"role": role},
    });
    Ok(json!({peer: {"network": network}}))
}

fn is_healthy(module: &Value) -> bool {
    let mut conditions = module["conditions"].as_array().into_iter().flatten();
    conditions
        .all(|condition| condition["status"] == "Ready" || condition["status"] == "Established")
}

fn count(cluster: &Kubernetes, kind: &str, label: &str) -> Result<usize> {
    list(cluster, kind, None, label).map(|all| all.len())
}
