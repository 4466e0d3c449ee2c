//! `liqoctl network connect --wait`.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::Object;

use super::{PEER, Side, generate_configuration, poll, public_key};
use crate::tool::GROUP;

/// `--timeout`, for all of it; here for each wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The client first. With a node port, as with `--gw-server-service-nodeport`.
pub(crate) fn connect(sides: &[Side<'_>; 2], node_port: Option<u16>) -> Result<()> {
    let [client, server] = sides;
    sides.iter().try_for_each(tenant_namespace)?;
    configure(client, server)?;
    configure(server, client)?;
    sides.iter().try_for_each(configured)?;
    check_template(server, node_port.is_some())?;
    sides.iter().try_for_each(initialized)?;
    if !client.about("gatewayservers")?.is_empty() || !server.about("gatewayclients")?.is_empty() {
        return Ok(()); // connected the other way round
    }
    let gateway = ensure_server(server, node_port)?;
    pod_ready(server, &gateway)?;
    let endpoint = endpoint(server, &gateway)?;
    let other = ensure_client(client, &endpoint)?;
    pod_ready(client, &other)?;
    share_key((server, "gatewayserver", &gateway), (client, "gatewayclient", &other))?;
    share_key((client, "gatewayclient", &other), (server, "gatewayserver", &gateway))?;
    connection(server)?;
    connection(client)?;
    established(client)?;
    established(server)
}

fn tenant_namespace(side: &Side<'_>) -> Result<()> {
    let labels = json!({PEER: side.peer, "liqo.io/tenant-namespace": "true"});
    let metadata = json!({"name": side.namespace, "labels": labels});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
    side.cluster.apply(&namespace.to_string()).map(drop)
}

/// The name of what is there about the peer already, or its ID.
fn name(side: &Side<'_>, kind: &str) -> Result<String> {
    let known = side.about(kind)?;
    ensure!(known.len() < 2, "multiple {kind}: {known:?}");
    let name = known.first().and_then(|object| object["metadata"]["name"].as_str());
    Ok(name.unwrap_or(&side.peer).to_owned())
}

fn configure(here: &Side<'_>, there: &Side<'_>) -> Result<()> {
    let mut configuration = generate_configuration(there.cluster)?;
    configuration["metadata"] = here.metadata(&name(here, "configurations")?);
    here.cluster.apply(&configuration.to_string()).map(drop)
}

fn is_configured(side: &Side<'_>) -> Result<bool> {
    let all = side.about("configurations")?;
    let [configuration] = all.as_slice() else { bail!("expected one Configuration: {all:?}") };
    let mut conditions = configuration["status"]["conditions"].as_array().into_iter().flatten();
    let generation = &configuration["metadata"]["generation"];
    Ok(conditions.any(|condition| {
        condition["type"] == "NetworkCIDRsConfigured"
            && condition["status"] == "True"
            && condition["observedGeneration"] == *generation
    }))
}

fn configured(side: &Side<'_>) -> Result<()> {
    poll("the Configuration is done", TIMEOUT, || Ok(is_configured(side)?.then_some(())))
}

/// The same once more, without waiting.
fn initialized(side: &Side<'_>) -> Result<()> {
    ensure!(is_configured(side)?, "network Configuration status is not set yet");
    Ok(())
}

fn check_template(server: &Side<'_>, with_node_port: bool) -> Result<()> {
    let template = Object::new("wggatewayservertemplate", "liqo", "wireguard-server");
    let template = server.cluster.get(template)?;
    let service = &template["spec"]["template"]["spec"]["service"]["spec"];
    let ports = service["ports"].as_array().context("the template's ports are a list")?;
    let has = |port: &Value| ["nodePort", "?nodePort"].iter().any(|key| !port[key].is_null());
    ensure!(!with_node_port || ports.iter().any(has), "the template has no nodePort");
    Ok(())
}

/// Deleted and made anew at once if its Service is not what is wanted now.
fn ensure_server(side: &Side<'_>, node_port: Option<u16>) -> Result<String> {
    let name = name(side, "gatewayservers")?;
    let mut endpoint = json!({"serviceType": "NodePort", "port": 51840});
    if let Some(port) = node_port {
        endpoint["nodePort"] = json!(port);
    }
    if let Some(service) = side.get("service", &format!("gw-{name}"))?
        && has_changed(&endpoint, &service["spec"])
    {
        let wait = ["delete", "gatewayserver", &name, "--namespace", &side.namespace];
        side.cluster.kubectl(&[&wait[..], &["--wait=false"]].concat())?;
    }
    side.cluster.apply(
        &json!({
            "apiVersion": GROUP, "kind": "GatewayServer", "metadata": side.metadata(&name),
            "spec": {"endpoint": endpoint, "mtu": 1340, "serverTemplateRef": {
                "apiVersion": GROUP, "kind": "WgGatewayServerTemplate",
                "name": "wireguard-server", "namespace": "liqo",
            }},
        })
        .to_string(),
    )?;
    Ok(name)
}

fn has_changed(endpoint: &Value, service: &Value) -> bool {
    let port = &service["ports"][0];
    let node_port = endpoint.get("nodePort");
    endpoint["serviceType"] != service["type"]
        || endpoint["port"] != port["port"]
        || node_port.is_some_and(|wanted| *wanted != port["nodePort"])
        || service["loadBalancerIP"].as_str().is_some_and(|address| !address.is_empty())
}

fn pod_ready(side: &Side<'_>, gateway: &str) -> Result<()> {
    poll("the gateway's Deployment is ready", TIMEOUT, || {
        let deployment = side.get("deployment", &format!("gw-{gateway}"))?;
        let ready = deployment.and_then(|found| found["status"]["readyReplicas"].as_i64());
        Ok(ready.filter(|ready| *ready > 0).map(drop))
    })
}

/// Taken as it is once it has addresses, and never looked at again.
fn endpoint(side: &Side<'_>, gateway: &str) -> Result<Value> {
    let endpoint = poll("the server's endpoint is published", TIMEOUT, || {
        let gateway = side.get("gatewayserver", gateway)?.context("it is gone")?;
        let endpoint = &gateway["status"]["endpoint"];
        let known = endpoint["addresses"].as_array().is_some_and(|all| !all.is_empty());
        Ok(known.then(|| endpoint.clone()))
    })?;
    ensure!(endpoint["protocol"] == "UDP", "it crashes: no protocol in {endpoint}");
    Ok(json!({
        "addresses": endpoint["addresses"], "port": endpoint["port"],
        "protocol": endpoint["protocol"],
    }))
}

fn ensure_client(side: &Side<'_>, endpoint: &Value) -> Result<String> {
    let name = name(side, "gatewayclients")?;
    side.cluster.apply(
        &json!({
            "apiVersion": GROUP, "kind": "GatewayClient", "metadata": side.metadata(&name),
            "spec": {"endpoint": endpoint, "mtu": 1340, "clientTemplateRef": {
                "apiVersion": GROUP, "kind": "WgGatewayClientTemplate",
                "name": "wireguard-client", "namespace": "liqo",
            }},
        })
        .to_string(),
    )?;
    Ok(name)
}

type Gateway<'a> = (&'a Side<'a>, &'a str, &'a str);

/// One end's public key becomes a PublicKey of the other's, which goes with that one's gateway.
fn share_key((of, kind, name): Gateway<'_>, (to, to_kind, to_name): Gateway<'_>) -> Result<()> {
    let gateway = poll("the gateway's status names its key", TIMEOUT, || {
        let gateway = of.get(kind, name)?.context("it is gone")?;
        Ok(gateway["status"]["secretRef"].is_object().then_some(gateway))
    })?;
    let key = public_key(of.cluster, &gateway)?;
    let owner = to.get(to_kind, to_name)?.context("its gateway is gone")?;
    let mut metadata = to.metadata(&super::connect::name(to, "publickeies")?);
    metadata["labels"]["networking.liqo.io/gateway-resource"] = json!("true");
    metadata["ownerReferences"] = json!([{"apiVersion": GROUP, "kind": owner["kind"],
        "name": to_name, "uid": owner["metadata"]["uid"]}]);
    let object = json!({"apiVersion": GROUP, "kind": "PublicKey", "metadata": metadata,
        "spec": {"publicKey": key}});
    to.cluster.apply(&object.to_string()).map(drop)
}

/// Two end it at once.
fn connection(side: &Side<'_>) -> Result<Value> {
    poll("there is a Connection", TIMEOUT, || {
        let mut all = side.about("connections")?;
        ensure!(all.len() < 2, "multiple Connections: {all:?}");
        Ok(all.pop())
    })
}

fn established(side: &Side<'_>) -> Result<()> {
    poll("the Connection is Connected", TIMEOUT, || {
        let connection = connection(side)?;
        Ok((connection["status"]["value"] == "Connected").then_some(()))
    })
}
