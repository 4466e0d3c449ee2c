//! Two clusters in which weft is installed are joined, shown and parted by liqoctl, or where
//! there is none, by its calls.
//!
//! ```text
//!   liqoctl on rome-1 (client) --+--[ switch ]--+-- milan-1 (server, NodePort)
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, Object, require_liqoctl};
use weft_tests::{Kubernetes, Lab, skip, wait_until};

use crate::calls::list;
use crate::pair::{SOON, TIMEOUT};
use crate::readme::Readme;
use crate::stage::{each, play, rome_and_milan, step};
use crate::tool::Tool;

const TENANTS: [&str; 2] = ["liqo-tenant-milan", "liqo-tenant-rome"];
/// Several times what it takes, and shorter than a connection that waits for a resync.
const MOVED: Duration = Duration::from_secs(20);
/// A peer of which there is nothing but what is created here.
const ANOTHER_PEER: &str = "venice";

#[test]
fn liqoctl_connects_shows_and_resets_clusters() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-liqoctl-peering")?;
            let clusters = step("two clusters come up", || rome_and_milan(&lab))?;
            let result = by_all_tools(&clusters, &image);
            if result.is_err() {
                clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
            }
            result
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn by_all_tools(clusters: &[Kubernetes; 2], image: &Image) -> Result<()> {
    let readme = Readme::read()?;
    step("weft is installed as in the README", || install(clusters, image, &readme))?;
    match require_liqoctl() {
        Ok(()) => {
            step("all that liqoctl does", || through(clusters, Tool::Liqoctl))?;
            step("they are connected as in the README", || readme.connect(clusters))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            step("all that liqoctl calls", || through(clusters, Tool::Calls))
        }
    }
}

fn through(clusters: &[Kubernetes; 2], tool: Tool) -> Result<()> {
    let [rome, milan] = clusters;
    step("info shows that all is well", || {
        // ipam grants a moment after it is ready.
        let well = |one| wait_until("all is well", SOON, || is_well(tool, one));
        clusters.iter().try_for_each(well)
    })?;
    step("connect", || tool.connect(rome, milan, None))?;
    step("what liqoctl expects is there", || as_expected(clusters))?;
    step("connect again changes nothing", || stays(tool, clusters))?;
    step("info peer", || info_peer(tool, clusters))?;
    step("generate prints what connect has written", || generated(tool, rome, milan))?;
    step("another peer with the same port", || another_peer(tool, milan))?;
    step("connect on another node port, twice", || moves(tool, clusters))?;
    step("disconnect", || disconnect(tool, clusters))?;
    step("connect the other way round", || tool.connect(milan, rome, None))?;
    step("reset", || reset(tool, clusters))
}

fn install(clusters: &[Kubernetes; 2], image: &Image, readme: &Readme) -> Result<()> {
    each(clusters, |cluster| {
        // liqoctl finds the API server's address by this label.
        let head = cluster.spec.node_name(1);
        cluster.kubectl(&["label", "node", &head, "node-role.kubernetes.io/control-plane="])?;
        cluster.kubectl(&["create", "namespace", ANOTHER_PEER])?;
        let label = "liqo.io/tenant-namespace=true";
        cluster.kubectl(&["label", "namespace", ANOTHER_PEER, label])?;
        cluster.load(image)
    })?;
    readme.install(clusters)?;
    each(clusters, |cluster| cluster.wait_for_weft(TIMEOUT)).map(drop)
}

/// No warning, and every prefix that there should be.
fn is_well(tool: Tool, cluster: &Kubernetes) -> Result<()> {
    let info = tool.info(cluster)?;
    ensure!(info["local"]["clusterID"] == cluster.spec.id.as_str(), "{info}");
    ensure!(info["local"]["version"] == env!("CARGO_PKG_VERSION"), "{info}");
    ensure!(info["health"]["healthy"] == true, "{info}");
    let network = json!({
        "podCIDRs": ["10.200.0.0/16"], "serviceCIDR": "10.96.0.0/12",
        "externalCIDR": "10.70.0.0/16", "internalCIDR": "10.80.0.0/16",
    });
    ensure!(info["network"] == network, "{info}");
    Ok(())
}

/// The pitfalls: one Connection, one Deployment, the endpoint whole, keys of 32 bytes.
fn as_expected(clusters: &[Kubernetes; 2]) -> Result<()> {
    for (cluster, tenant) in clusters.iter().zip(TENANTS) {
        let connections = list(cluster, "connections", Some(tenant), "")?;
        ensure!(connections.len() == 1, "{connections:?}");
        let label = "networking.liqo.io/component=gateway";
        let gateways = list(cluster, "deployments", Some(tenant), label)?;
        ensure!(gateways.len() == 1, "{gateways:?}");
        let label = "networking.liqo.io/gateway-resource=true";
        let keys = list(cluster, "publickeies", Some(tenant), label)?;
        let key = keys.first().context("there is no PublicKey")?["spec"]["publicKey"].as_str();
        ensure!(key.is_some_and(|key| key.len() == 44), "{keys:?}");
    }
    let server = clusters[1].get(Object::new("gatewayserver", TENANTS[1], "rome"))?;
    let service = clusters[1].get(Object::new("service", TENANTS[1], "gw-rome"))?;
    let on = |node: u8| {
        let port = &service["spec"]["ports"][0]["nodePort"];
        let address = clusters[1].spec.node_address(node);
        json!({"addresses": [address], "port": port, "protocol": "UDP"})
    };
    let endpoint = &server["status"]["endpoint"];
    ensure!([on(1), on(2)].contains(endpoint), "its published endpoint is {endpoint}");
    // A server that was made anew may have the endpoint of its namesake's pod, and every node
    // answers at a NodePort.
    let client = clusters[0].get(Object::new("gatewayclient", TENANTS[0], "milan"))?;
    ensure!([on(1), on(2)].contains(&client["spec"]["endpoint"]), "{client}");
    Ok(())
}

/// UIDs and specs of the desired objects.
fn wanted(clusters: &[Kubernetes; 2]) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for (cluster, tenant) in clusters.iter().zip(TENANTS) {
        for kind in
            ["configurations", "gatewayclients", "gatewayservers", "publickeies", "deployments"]
        {
            let objects = list(cluster, kind, Some(tenant), "")?;
            all.extend(objects.into_iter().map(|o| json!([o["metadata"]["uid"], o["spec"]])));
        }
    }
    Ok(all)
}

fn stays(tool: Tool, clusters: &[Kubernetes; 2]) -> Result<()> {
    let before = wanted(clusters)?;
    tool.connect(&clusters[0], &clusters[1], None)?;
    let after = wanted(clusters)?;
    ensure!(before == after, "{before:?} became {after:?}");
    Ok(())
}

fn info_peer(tool: Tool, [rome, milan]: &[Kubernetes; 2]) -> Result<()> {
    for (cluster, peer, role) in [(rome, milan, "Server"), (milan, rome, "Client")] {
        // The controller follows the Connection.
        wait_until("the peer is well", SOON, || {
            let info = tool.info_peer(cluster, &peer.spec.id)?;
            let network = &info[&peer.spec.id]["network"];
            ensure!(network["status"] == "Healthy", "{info}");
            ensure!(network["gateway"]["role"] == role, "{info}");
            ensure!(network["CIDRs"]["remote"]["pod"] == json!(["10.200.0.0/16"]), "{info}");
            Ok(())
        })?;
    }
    Ok(())
}

fn generated(tool: Tool, rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    let printed = tool.configuration(milan)?;
    let stored = rome.get(Object::new("configuration", TENANTS[0], "milan"))?;
    ensure!(printed["spec"]["remote"] == stored["spec"]["remote"], "{printed} {stored}");
    let printed = tool.public_key(milan, rome)?;
    let stored = rome.get(Object::new("publickey", TENANTS[0], "milan"))?;
    ensure!(printed["spec"] == stored["spec"], "{printed} {stored}");
    Ok(())
}

/// Every gateway has a pod of its own, so all may have the same port.
fn another_peer(tool: Tool, cluster: &Kubernetes) -> Result<()> {
    tool.create_and_delete(cluster, ANOTHER_PEER)?;
    wait_until("its ForeignCluster is gone", SOON, || {
        let left = cluster.kubectl(&["get", "foreignclusters", "--output=name"])?;
        ensure!(!left.contains(ANOTHER_PEER), "{left}");
        Ok(())
    })?;
    cluster.wait_connected("rome", "rome", SOON)
}

/// The GatewayServer is deleted and made anew, with the old one's Service still there, and its key pair
/// about to go.
fn moves(tool: Tool, clusters: &[Kubernetes; 2]) -> Result<()> {
    for port in [30743, 30744] {
        let began = Instant::now();
        tool.connect(&clusters[0], &clusters[1], Some(port))?;
        ensure!(began.elapsed() < MOVED, "connected after {:?}", began.elapsed());
        let client = clusters[0].get(Object::new("gatewayclient", TENANTS[0], "milan"))?;
        ensure!(client["spec"]["endpoint"]["port"] == port, "{client}");
        clusters[0].wait_connected("milan", "milan", SOON)?;
    }
    as_expected(clusters)
}

fn disconnect(tool: Tool, clusters: &[Kubernetes; 2]) -> Result<()> {
    tool.disconnect(&clusters[0], &clusters[1])?;
    let kinds =
        "gatewayclients,gatewayservers,connections,publickeies,deployments,services,gatewayconfigs";
    for (cluster, tenant) in clusters.iter().zip(TENANTS) {
        nothing_of(cluster, tenant, kinds)?;
        let peer = &tenant["liqo-tenant-".len()..];
        let stays = cluster.get(Object::new("configuration", tenant, peer))?;
        ensure!(stays["status"]["remote"].is_object(), "{stays}");
    }
    Ok(())
}

fn reset(tool: Tool, clusters: &[Kubernetes; 2]) -> Result<()> {
    tool.reset(&clusters[0], &clusters[1])?;
    let kinds = "configurations,networks,ips,gatewayclients,gatewayservers,connections,publickeies,\
        deployments,services,secrets,gatewayconfigs";
    for (cluster, tenant) in clusters.iter().zip(TENANTS) {
        nothing_of(cluster, tenant, kinds)?;
        nothing_of(cluster, "", "foreignclusters")?;
    }
    Ok(())
}

fn nothing_of(cluster: &Kubernetes, namespace: &str, kinds: &str) -> Result<()> {
    wait_until("all of it is gone", SOON, || {
        let left = cluster.kubectl(&["get", kinds, "--namespace", namespace, "--output=name"])?;
        ensure!(left.is_empty(), "{} still has {left}", cluster.spec.id);
        Ok(())
    })
}
