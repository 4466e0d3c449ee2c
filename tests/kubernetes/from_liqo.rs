//! A cluster of Liqo's own network beside one of weft's, and then taken over by weft.
//!
//! ```text
//!   Liqo's gateway, later weft's -- rome-1 --+--[ switch ]--+-- milan-1 -- weft's gateway
//! ```
//!
//! Without Geneve in the kernel, Liqo's gateway and its daemon on nodes have no way to each other: until
//! weft takes over, only the gateways' own packets pass through the tunnel.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, Object, require_liqo_network};
use weft_tests::{ClusterSpec, Kubernetes, Lab, skip, wait_until};

use crate::calls::list;
use crate::liqoctl::on_both;
use crate::pair::{SOON, TIMEOUT, reach};
use crate::stage::{all_of, note_time, play, step};

/// The namespace of the peering in rome.
const TENANT: &str = "liqo-tenant-milan";
/// Longest outage, on a machine that has the images.
const OUTAGE: Duration = Duration::from_secs(30);
/// Kinds of Liqo's own network, and those of its objects that may stay.
const LIQOS: &str = "wggatewayservers,wggatewayclients,routeconfigurations,internalnodes,internalfabrics,\
    genevetunnels,firewallconfigurations";

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn client_of_liqo_is_taken_over() -> Result<()> {
    play_with(|rome, milan| [rome, milan])
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn server_of_liqo_is_taken_over() -> Result<()> {
    play_with(|rome, milan| [milan, rome])
}

/// `roles` are the cluster of the client, and that of the server.
fn play_with(
    roles: for<'a> fn(&'a Kubernetes, &'a Kubernetes) -> [&'a Kubernetes; 2],
) -> Result<()> {
    play(|| match require_liqo_network().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-from-liqo")?;
            let specs = [("rome", 1), ("milan", 2)].map(|(id, n)| ClusterSpec::new(id, n, 1));
            let clusters = step("clusters come up", || all_of(&lab, specs))?;
            let [rome, milan] = &clusters;
            let result = live(rome, milan, roles(rome, milan), &image);
            if result.is_err() {
                clusters.iter().for_each(explain);
            }
            result
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn live(
    rome: &Kubernetes,
    milan: &Kubernetes,
    [client, server]: [&Kubernetes; 2],
    image: &Image,
) -> Result<()> {
    let pods = |cluster: &Kubernetes| cluster.run_pods(&[("a", 1)]);
    let (of_rome, of_milan) = (pods(rome)?, pods(milan)?);
    rome.load(image)?;
    milan.load(image)?;
    step("Liqo with its network is installed", || rome.install_liqo_network(TIMEOUT))?;
    step("weft is installed at its peer", || milan.install_weft(TIMEOUT))?;
    step("liqoctl connects them", || {
        let line = ["network", "connect", "--gw-server-service-type=NodePort", "--wait"];
        on_both(client, server, &[&line[..], &["--timeout=120s", "--skip-validation"]].concat())
    })?;
    step("either gateway restarts", || {
        for (cluster, peer) in [(rome, milan), (milan, rome)] {
            restart_gateway(cluster, peer)?;
            connected(rome, milan)?;
        }
        Ok(())
    })?;

    let [peering, gateways] = [kept(rome, &OF_PEERING)?, kept(rome, &OF_GATEWAYS)?];
    step("Liqo's network is switched off", || rome.switch_liqo_network(false))?;
    connected(rome, milan).context("its gateway goes on")?;
    step("weft adopts the cluster", || rome.adopt(&[]))?;
    connected(rome, milan).context("its gateway goes on")?;
    let began = Instant::now();
    let more = ["--set=networking.fabric.config.removeLiqo=true"];
    step("weft is installed", || rome.install_weft_with(&more, TIMEOUT))?;
    let [there, back] = [rome.view(&milan.spec)?, milan.view(&rome.spec)?];
    step("pods reach each other", || {
        reach(&of_rome, &of_milan, (&there, &back))?;
        reach(&of_milan, &of_rome, (&back, &there))
    })?;
    note_time(began.elapsed(), "from the beginning of the installation");
    ensure!(began.elapsed() < OUTAGE, "it took {:?}", began.elapsed());
    for (fields, before) in [(&OF_PEERING[..], &peering), (&OF_GATEWAYS[..], &gateways)] {
        let after = kept(rome, fields)?;
        ensure!(after == *before, "kept {before:#?}, now {after:#?}");
    }
    step("nothing of Liqo's network is left", || nothing_left(rome))?;

    step("weft gives the cluster back", || give_back(rome))?;
    step("Liqo's gateway is connected", || connected(rome, milan))?;
    let after = kept(rome, &OF_PEERING)?;
    ensure!(after == peering, "kept {peering:#?}, now {after:#?}");
    Ok(())
}

/// Deletes the pod of the gateway, and waits for another.
fn restart_gateway(cluster: &Kubernetes, peer: &Kubernetes) -> Result<()> {
    let namespace = format!("liqo-tenant-{}", peer.spec.id);
    let pods = ["--namespace", &namespace, "--selector=networking.liqo.io/component=gateway"];
    cluster.kubectl(&[&["delete", "pods", "--grace-period=1"], &pods[..]].concat())?;
    wait_until("another pod", SOON, || {
        let ready = "--for=condition=Ready";
        cluster.kubectl(&[&["wait", "pods", ready, "--timeout=30s"], &pods[..]].concat()).map(drop)
    })
}

/// Both ends have just reported it: Liqo's every ten seconds.
fn connected(rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    wait_until("both are connected", SOON, || {
        for (cluster, peer) in [(rome, milan), (milan, rome)] {
            let namespace = format!("liqo-tenant-{}", peer.spec.id);
            let all = list(cluster, "connections", Some(&namespace), "")?;
            let values: Vec<_> = all.iter().map(|one| &one["status"]["value"]).collect();
            ensure!(values == ["Connected"], "{}: {all:#?}", cluster.spec.id);
        }
        let status = milan.status()?;
        let peering = &status["peerings"][0];
        ensure!(peering["state"] == "Connected", "{peering}");
        Ok(())
    })
}

/// Kind, selector, and fields.
type Fields = (&'static str, &'static str, [&'static str; 3]);

/// Remapped prefixes, and keys.
const OF_PEERING: [Fields; 4] = [
    ("networks", "", ["/metadata/uid", "/spec/cidr", "/status/cidr"]),
    ("configurations", "", ["/metadata/uid", "/spec/remote", "/status/remote"]),
    ("publickeies", "", ["/metadata/uid", "/spec", "/spec/publicKey"]),
    ("secrets", "networking.liqo.io/gateway-resource", ["/metadata/uid", "/data", "/type"]),
];
/// Ways to the server.
const OF_GATEWAYS: [Fields; 3] = [
    ("services", "", ["/metadata/uid", "/spec/ports/0/nodePort", "/spec/clusterIP"]),
    ("gatewayservers", "", ["/metadata/uid", "/spec/endpoint", "/status/endpoint/port"]),
    ("gatewayclients", "", ["/metadata/uid", "/spec/endpoint", "/spec/mtu"]),
];

fn kept(rome: &Kubernetes, fields: &[Fields]) -> Result<Vec<Value>> {
    let mut kept = Vec::new();
    for (kind, labels, pointers) in fields {
        for object in list(rome, kind, Some(TENANT), labels)? {
            let fields = pointers.map(|pointer| object.pointer(pointer).cloned());
            kept.extend(fields.into_iter().flatten());
        }
    }
    Ok(kept)
}

/// As deploy/chart/README.md has it.
fn give_back(rome: &Kubernetes) -> Result<()> {
    for server in list(rome, "gatewayservers", Some(TENANT), "")? {
        let endpoint = json!({"nodePort": server["status"]["endpoint"]["port"]});
        let patch = json!({"spec": {"endpoint": endpoint}}).to_string();
        let name = server["metadata"]["name"].as_str().context("it has a name")?;
        let what = ["patch", "gatewayserver", name, "--namespace", TENANT, "--type=merge"];
        rome.kubectl(&[&what[..], &["--patch", &patch]].concat())?;
    }
    rome.set_weft("withdrawal.keepPrefixes=true")?;
    rome.uninstall_weft(TIMEOUT)?;
    rome.switch_liqo_network(true)
}

fn nothing_left(rome: &Kubernetes) -> Result<()> {
    let line = ["get", LIQOS, "--all-namespaces", "--output=name"];
    wait_until("Kubernetes has collected the rest", SOON, || {
        let left = rome.kubectl(&line)?;
        // Liqo's chart has it with its network off, too.
        ensure!(left.lines().all(|name| name.ends_with("/gw-mss-clamping")), "{left}");
        let of_node = rome.shell(&[], "nft list tables; ip -o link")?;
        let is_clean = !of_node.contains("masquerade-bypass") && !of_node.contains(" liqo.");
        ensure!(is_clean, "{of_node}");
        Ok(())
    })?;
    let again = rome.adopt(&[])?;
    ensure!(again.is_empty(), "a second run: {again}");
    let tenant = rome.get(Object::new("namespace", "", TENANT))?;
    ensure!(tenant["status"]["phase"] == "Active", "{tenant}");
    Ok(())
}

fn explain(cluster: &Kubernetes) {
    eprintln!("{}", cluster.report());
    for namespace in ["liqo", TENANT] {
        eprintln!("{}", cluster.logs(namespace, "app.kubernetes.io/part-of=liqo"));
        eprintln!("{}", cluster.logs(namespace, "networking.liqo.io/component=gateway"));
    }
    let all =
        cluster.kubectl(&["get", "connections,networks", "--all-namespaces", "--output=yaml"]);
    eprintln!("{}", all.unwrap_or_else(|error| format!("{error:#}")));
}
