//! `liqoctl test network`, with one provider and with two.
//!
//! ```text
//!   rome (consumer)         milan, venice (providers)        outside
//!   liqoctl, pods -- rome-1 --+--[ switch ]--+-- milan-1 -- pods
//!     1.1.1.1, port 80, 443 --+              +-- venice-1 -- pods
//! ```
//!
//! liqoctl takes what is there already: its Service and Deployments, here with an image that has a tag
//! and with names of Services, which are in no DNS.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, NETSHOOT, Object};
use weft_tests::traffic::{Service, TcpServer};
use weft_tests::{Host, Kubernetes, Lab, on_segment};

use super::{peer, play_on};
use crate::liqoctl::liqoctl;
use crate::pair::{HTTP, TIMEOUT};
use crate::stage::{each, note, step};

/// As liqoctl calls it.
pub(super) const NAMESPACE: &str = "liqo-test-network";
pub(super) const NAME: &str = "netshoot";
/// Host that liqoctl calls, and its address on the segment.
const OUTSIDE: &str = "1.1.1.1";
const NEXT_HOP: &str = "192.0.2.250";
/// Checks that liqoctl makes with one provider and with two.
const CHECKS: [u32; 2] = [38, 82];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn liqoctl_tests_network_with_two_providers() -> Result<()> {
    play_on(["rome", "milan", "venice"], |lab, clusters| {
        let [rome, milan, venice] = clusters;
        let _outside = outside(lab, clusters)?;
        let image = Image::netshoot()?;
        each(clusters, |cluster| cluster.load(&image))?;
        step("rome is peered with milan", || peer(rome, milan, &[]))?;
        step("a namespace is offloaded", || offload(rome))?;
        step("pods run in rome and milan", || run(rome, &[rome, milan]))?;
        step("liqoctl tests the network with one provider", || test(rome, &[milan], CHECKS[0]))?;
        step("rome is peered with venice", || peer(rome, venice, &[]))?;
        step("pods run in venice", || run(rome, &[venice]))?;
        step("liqoctl tests the network with two providers", || {
            test(rome, &[milan, venice], CHECKS[1])
        })
    })
}

/// A host outside of the clusters; nodes masquerade what pods send there, as CNIs have it.
fn outside(lab: &Lab, clusters: &[Kubernetes]) -> Result<(Host, [TcpServer; 2])> {
    let host = lab.machine("outside", &[on_segment(NEXT_HOP.parse()?)])?;
    host.ip(&format!("addr add {OUTSIDE}/32 dev eth0\n"))?;
    let serve = |port| TcpServer::start(host.net(), port, Service::Http);
    let servers = [serve(HTTP)?, serve(super::HTTPS)?];
    for cluster in clusters {
        let node = &cluster.head().host;
        node.ip(&format!("route add {OUTSIDE} via {NEXT_HOP}\n"))?;
        let pods = cluster.spec.pod_cidrs[0];
        node.net().nft(&format!(
            "table ip cni {{
               chain post {{
                 type nat hook postrouting priority 100;
                 ip saddr {pods} ip daddr {OUTSIDE} masquerade
               }}
             }}"
        ))?;
    }
    Ok((host, servers))
}

pub(super) fn offload(rome: &Kubernetes) -> Result<()> {
    let label = format!("liqo.io/remote-cluster-id={}", rome.spec.id);
    rome.kubectl(&["label", "node", &rome.spec.node_name(1), &label])?;
    rome.kubectl(&["create", "namespace", NAMESPACE])?;
    let strategy = "--namespace-mapping-strategy=EnforceSameName";
    liqoctl(rome, &["offload", "namespace", NAMESPACE, strategy])?;
    let spec = json!({"selector": {"app": NAME}, "ports": [{"port": HTTP, "targetPort": HTTP}]});
    let metadata = json!({"name": NAME, "namespace": NAMESPACE});
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec});
    rome.apply(&service.to_string()).map(drop)
}

/// Pods in these clusters, one of the node's network and one of its own.
pub(super) fn run(rome: &Kubernetes, clusters: &[&Kubernetes]) -> Result<()> {
    let mut items = Vec::new();
    for cluster in clusters {
        let service = Object::new("service", NAMESPACE, NAME);
        cluster.wait_for(service, "create", TIMEOUT)?;
        let service = cluster.get(service)?["spec"]["clusterIP"].clone();
        items.extend([NAME, "netshoot-host"].map(|kind| deployment(kind, cluster, &service)));
    }
    rome.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    items.iter().try_for_each(|item| {
        let name = item["metadata"]["name"].as_str().context("it has a name")?;
        let deployment = Object::new("deployment", NAMESPACE, name);
        rome.wait_for(deployment, "condition=Available", TIMEOUT)
    })
}

fn deployment(kind: &str, cluster: &Kubernetes, service: &Value) -> Value {
    let id = &cluster.spec.id;
    let name = format!("{kind}-{id}");
    let labels = json!({"app": kind, "app-cluster": name});
    let container = json!({"name": NAME, "image": NETSHOOT, "imagePullPolicy": "Never",
        "command": ["httpd", "-f", "-p", HTTP.to_string(), "-h", "/www"]});
    let spec = json!({
        "hostNetwork": kind != NAME,
        "nodeSelector": {"liqo.io/remote-cluster-id": id},
        "hostAliases": [{"ip": service, "hostnames": [format!("{NAME}.{NAMESPACE}")]}],
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app-cluster": name}},
            "template": {"metadata": {"labels": labels}, "spec": spec}},
    })
}

fn test(rome: &Kubernetes, providers: &[&Kubernetes], checks: u32) -> Result<()> {
    let files = providers.iter().map(|provider| rome.kubeconfig_of(provider));
    let files = files.collect::<Result<Vec<_>>>()?.join(",");
    let files = format!("--remote-kubeconfigs={files}");
    let line = ["test", "network", "--np-ext", "--pod-np", "--ip", "--timeout=170s", &files];
    let output = liqoctl(rome, &line)?;
    let made = succeeded(&output);
    ensure!(made == Some(checks), "{made:?} checks, expected {checks}: {output}");
    note(&format!("{checks} checks"));
    Ok(())
}

/// Number of checks that succeeded: the last one printed is that of all of them.
fn succeeded(output: &str) -> Option<u32> {
    let line = output.lines().rev().find(|line| line.contains("counter"))?;
    // A colour is an escape character, numbers and `m`.
    let mut parts = line.split('\u{1b}');
    let first = parts.next()?.to_owned();
    let plain = parts.filter_map(|part| part.split_once('m')).map(|(_, text)| text);
    let plain = plain.fold(first, |all, text| all + text);
    plain.rsplit_once("counter")?.1.trim_matches(|c: char| !c.is_ascii_digit()).parse().ok()
}

#[test]
fn checks_are_counted_with_and_without_colours() {
    let lines = [
        "INFO  Checks succeeded counter: 38",
        "\u{1b}[96mINFO \u{1b}[0m Checks succeeded \u{1b}[96mcounter: \u{1b}[0m38",
        "INFO  Checks succeeded counter: 7\nINFO  All checks completed\nINFO  Checks succeeded\n    └ counter: 38\n",
    ];
    assert_eq!(lines.map(succeeded), [Some(38); 3]);
    assert_eq!(succeeded("INFO  All checks completed"), None);
}
