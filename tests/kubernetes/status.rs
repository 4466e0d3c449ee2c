//! Output of `weft status` for a cluster.

use anyhow::{Result, ensure};
use serde_json::json;
use weft_tests::{Kubernetes, wait_until};

use crate::pair::{SOON, TIMEOUT};

const IPAM: &str = "deployment/liqo-ipam";

/// Checks the status of a connected cluster: first that it is, then without ipam, and without an
/// API server.
pub(crate) fn is_true(cluster: &Kubernetes) -> Result<()> {
    wait_until("all is well", SOON, || is_well(cluster))?;
    scale(cluster, IPAM, 0)?;
    wait_until("ipam is missed", SOON, || {
        let status = cluster.status()?;
        let problems = status["problems"].to_string();
        ensure!(problems.contains("ipam: it has no pod"), "{problems}");
        ensure!(status["peerings"][0]["state"] == "Connected", "{status}");
        Ok(())
    })?;
    scale(cluster, IPAM, 1)?;
    cluster.wait_for_weft(TIMEOUT)?;
    wait_until("all is well again", SOON, || is_well(cluster))?;
    cluster.stop_api_server()?;
    let blind = cluster.status();
    cluster.start_api_server()?;
    let Err(error) = blind else { anyhow::bail!("{blind:?} without an API server") };
    let text = format!("{error:#}");
    ensure!(text.contains("cannot ask the API server at https://"), "{text}");
    wait_until("all is well at last", SOON, || is_well(cluster))
}

pub(crate) fn is_well(cluster: &Kubernetes) -> Result<()> {
    let status = cluster.status()?;
    let peering = &status["peerings"][0];
    ensure!(status["clusterId"] == json!(cluster.spec.id), "{status}");
    ensure!(status["problems"] == json!([]), "{}", status["problems"]);
    ensure!(peering["state"] == "Connected" && peering["latency"].is_string(), "{peering}");
    let fields = ["mtu", "endpoint", "lastHandshake", "node"];
    let missing: Vec<_> = fields.iter().filter(|field| peering[*field].is_null()).collect();
    ensure!(missing.is_empty(), "no {missing:?}: {peering}");
    let node = peering["node"].as_str().unwrap_or_default();
    ensure!(cluster.machines.iter().any(|machine| machine.name == node), "{peering}");
    let remaps = peering["remaps"].as_array().map_or(0, Vec::len);
    let prefixes = cluster.spec.pod_cidrs.len() + cluster.spec.external_cidrs.len();
    ensure!(remaps == prefixes && peering["receivedBytes"].as_u64() > Some(0), "{peering}");
    Ok(())
}

fn scale(cluster: &Kubernetes, what: &str, replicas: u32) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    cluster.kubectl(&["scale", what, "--namespace=liqo", &replicas]).map(drop)
}
