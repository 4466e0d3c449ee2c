//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a
//!   b -- rome-2 --+              +-- milan-2 -- b      pods 10.200.0.0/16, services 10.96.0.0/16, twice
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::Object;
use weft_tests::traffic::{Service, TcpServer, connect, http_get, ping};
use weft_tests::{Kubernetes, Lab, Netns, Pod, wait_until};

use crate::leftovers::{Namespaces, Traces};
use crate::stage::{each, play, rome_and_milan, step};

const TIMEOUT: Duration = Duration::from_secs(60);
const LAB: &str = "weft-kubernetes";
const HTTP: u16 = 8080;

#[test]
#[ignore = "of the harness alone: make soak-rounds"]
fn clusters_with_same_cidr_start_and_leave_nothing() -> Result<()> {
    play(|| {
        let before = Traces::of_the_host()?;
        let lab = Lab::new(LAB)?;
        let clusters = step("two clusters come up", || rome_and_milan(&lab))?;
        clusters.iter().try_for_each(nodes_are_ready)?;
        let pods = step("a pod runs on each node", || each(&clusters, run_pods))?;
        step("pods reach each other and services", || {
            clusters.iter().zip(&pods).try_for_each(|(cluster, pods)| {
                pods_reach_each_other(cluster, pods)?;
                services_answer(cluster, pods, lab.switch().net())
            })
        })?;
        step("objects are waited for", || waits_end(&clusters[0]))?;
        step("an API server goes and comes back", || api_server_restarts(&clusters[0], &pods[0]))?;
        let during = Namespaces::of_lab(LAB);
        ensure!(during.count() > 20, "the check sees {} namespaces", during.count());
        step("everything ends", || {
            drop((clusters, pods, lab));
            before.wait_for_no_more(&during, TIMEOUT)
        })
    })
}

fn nodes_are_ready(cluster: &Kubernetes) -> Result<()> {
    let nodes: Value = serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])?)?;
    let nodes = nodes["items"].as_array().context("a list has items")?;
    ensure!(nodes.len() == 2, "{} has {} nodes", cluster.spec.id, nodes.len());
    for (number, node) in (1..).zip(nodes) {
        let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        let ready = conditions.filter(|c| c["type"] == "Ready" && c["status"] == "True").count();
        ensure!(ready == 1, "{node}");
        let address = json!({"type": "InternalIP", "address": cluster.spec.node_address(number)});
        ensure!(node["status"]["addresses"].as_array().is_some_and(|all| all.contains(&address)));
    }
    Ok(())
}

fn run_pods(cluster: &Kubernetes) -> Result<Vec<Pod>> {
    let pods = cluster.run_pods(&[("a", 1), ("b", 2)])?;
    for (node, pod) in (1..).zip(&pods) {
        let inside = |address: &IpAddr| {
            cluster.spec.node_pod_cidrs(node).iter().any(|cidr| cidr.contains(address))
        };
        ensure!(pod.addresses.iter().all(inside), "{} has {:?}", pod.name, pod.addresses);
    }
    for pod in ["a", "b"] {
        let printed = cluster.exec("default", pod, &["hostname"])?;
        ensure!(printed.trim() == pod, "hostname printed {printed:?} in {pod}");
    }
    Ok(pods)
}

fn pods_reach_each_other(cluster: &Kubernetes, pods: &[Pod]) -> Result<()> {
    let [a, b] = pods else { unreachable!("two pods were started") };
    let _server = TcpServer::start(&b.ns, HTTP, Service::Http)?;
    let stats = ping(&a.ns, b.addresses[0], 3)?;
    ensure!(stats.lost == 0, "{} to {}: {stats:?}", a.name, b.name);
    let seen = http_get(&a.ns, SocketAddr::new(b.addresses[0], HTTP))?;
    ensure!(seen == a.addresses[0], "{} saw {seen} instead of {}", b.name, a.name);
    let api = cluster.spec.service_cidrs[0].hosts().next().context("a CIDR has hosts")?;
    connect(&a.ns, SocketAddr::new(api, 443), TIMEOUT).context("the API server, from a pod")?;
    Ok(())
}

/// Checks a Service by its own address from every pod, and from outside by a port of every node.
fn services_answer(cluster: &Kubernetes, pods: &[Pod], outside: &Netns) -> Result<()> {
    let _server = TcpServer::start(&pods[1].ns, HTTP, Service::Http)?;
    cluster.apply(&service("b"))?;
    let spec = cluster.get(Object::new("service", "default", "b"))?["spec"].take();
    let address = spec["clusterIP"].as_str().context("a service has an address")?.parse()?;
    let port = spec["ports"][0]["nodePort"].as_u64().context("a service has a node port")?;
    let nodes = cluster.machines.iter().map(|node| node.addresses[0]);
    let ways = pods.iter().map(|pod| (&pod.ns, SocketAddr::new(address, 80)));
    let port = u16::try_from(port)?;
    for (from, to) in ways.chain(nodes.map(|node| (outside, SocketAddr::new(node, port)))) {
        let what = format!("the service of {} answers at {to}", cluster.spec.id);
        wait_until(&what, TIMEOUT, || http_get(from, to))?;
    }
    Ok(())
}

fn waits_end(cluster: &Kubernetes) -> Result<()> {
    let [pod, none] = ["a", "none"].map(|name| Object::new("pod", "default", name));
    cluster.wait_for(pod, "condition=Ready", TIMEOUT)?;
    cluster.wait_for(pod, "jsonpath={.status.phase}=Running", TIMEOUT)?;
    cluster.wait_for(none, "delete", TIMEOUT)?;
    let soon = Duration::from_millis(300);
    for (object, part) in [(pod, r#""phase":"Running""#), (none, "NotFound")] {
        let Err(error) = cluster.wait_for(object, "jsonpath={.status.phase}=Failed", soon) else {
            bail!("{object} has failed")
        };
        let text = format!("{error:#}");
        ensure!(text.contains(&format!("of {object} of rome")) && text.contains(part), "{text}");
    }
    Ok(())
}

fn service(app: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": app, "namespace": "default"},
        "spec": {
            "type": "NodePort",
            "selector": {"app": app},
            "ports": [{"port": 80, "targetPort": HTTP}],
        },
    })
    .to_string()
}

fn api_server_restarts(cluster: &Kubernetes, pods: &[Pod]) -> Result<()> {
    cluster.stop_api_server()?;
    ensure!(cluster.kubectl(&["get", "nodes"]).is_err(), "a stopped API server answers");
    let stats = ping(&pods[0].ns, pods[1].addresses[0], 3)?;
    ensure!(stats.lost == 0, "without an API server: {stats:?}");
    cluster.start_api_server()?;
    let later = cluster.run_pods(&[("later", 2)])?;
    let stats = ping(&pods[0].ns, later[0].addresses[0], 3)?;
    ensure!(stats.lost == 0, "{stats:?}");
    Ok(())
}
