//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      two replicas of each gateway,
//!   b -- rome-2 --+              +-- milan-2 -- b      a datagram each way every millisecond
//! ```

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::kubernetes::{Image, Object};
use weft_tests::traffic::HeldConnection;
use weft_tests::{Kubernetes, Lab, skip, wait_until};

use crate::pair::{GATEWAYS, Pair, SOON, TIMEOUT, selector};
use crate::stage::{note, note_time, play, step};

const REPLICAS: &str = "networking.gatewayTemplates.replicas=2";
/// Longest outage when the replica with the tunnel is gone at once, and when it hands the tunnel over: much of
/// it is the share of two processors that four nodes leave to a pod.
const TAKEN_OVER: Duration = Duration::from_secs(3);
const HANDED_OVER: Duration = Duration::from_secs(1);
/// Time for the outcome of an event to show in a stream.
const AFTERWARDS: Duration = Duration::from_secs(3);

/// Something that takes the tunnel from a replica.
type Event = (&'static str, fn(&Kubernetes, Object<'_>) -> Result<()>, bool);

const EVENTS: [Event; 4] = [
    ("its process is killed", kill, false),
    ("its pod is deleted at once", delete_at_once, false),
    ("its pod is deleted", delete, true),
    ("its Deployment is restarted", restart, true),
];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn second_replica_takes_over() -> Result<()> {
    let rounds = std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-failover")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| {
                step("both are connected", || pair.connect())?;
                step("a second replica of each gateway stands by", || second_replicas(&pair))?;
                let (mut held, _server) = pair.hold()?;
                all_events(&pair, &mut held, rounds)
            })
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

/// Nothing is lost meanwhile.
pub(crate) fn second_replicas(pair: &Pair) -> Result<()> {
    let traffic = pair.streaming(|| {
        pair.each(|cluster| cluster.set_weft(REPLICAS))?;
        for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
            wait_until("both replicas are ready", TIMEOUT, || are_ready(cluster, gateway))?;
        }
        pair.wait_connected(SOON)
    })?;
    note_time(traffic.longest_outage(), "without a tunnel while the Deployments were replaced");
    ensure!(traffic.longest_outage() < HANDED_OVER, "{traffic:?}");
    Ok(())
}

pub(crate) fn all_events(pair: &Pair, held: &mut HeldConnection, rounds: usize) -> Result<()> {
    for (what, event, is_hand_over) in EVENTS {
        for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
            let mut outages = Vec::new();
            for _ in 0..rounds {
                let before = active(cluster, gateway)?.address;
                let traffic = pair.streaming(|| {
                    event(cluster, gateway)?;
                    std::thread::sleep(AFTERWARDS);
                    wait_until("another replica is active", SOON, || {
                        let after = active(cluster, gateway)?.address;
                        ensure!(after != before, "{after} is still active");
                        are_ready(cluster, gateway)
                    })?;
                    pair.wait_connected(SOON)
                })?;
                let lost: Vec<_> = traffic.streams.iter().map(|stream| stream.lost).collect();
                let limit = if is_hand_over { HANDED_OVER } else { TAKEN_OVER };
                ensure!(traffic.longest_outage() < limit, "{what}: {traffic:?}");
                outages.push((traffic.longest_outage(), lost));
                held.echoes(SOON)?;
            }
            note(&format!("{gateway}: {what}: outages and losses {outages:?}"));
        }
    }
    Ok(())
}

/// The replica that has the tunnel.
struct Active {
    pod: String,
    address: IpAddr,
}

fn pods(cluster: &Kubernetes, gateway: Object<'_>) -> Result<Vec<Value>> {
    let line = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let list = cluster.kubectl(&[&line[..], &["--output=json"]].concat())?;
    let mut list: Value = serde_json::from_str(&list).context("kubectl prints JSON")?;
    Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
}

fn active(cluster: &Kubernetes, gateway: Object<'_>) -> Result<Active> {
    let config = Object::new("gatewayconfig", gateway.namespace, gateway.name);
    let config = cluster.get(config)?;
    let address = &config["status"]["active"]["address"];
    let pods = pods(cluster, gateway)?;
    let pod = pods.iter().find(|pod| pod["status"]["podIP"] == *address);
    let pod = pod.with_context(|| format!("no pod of {gateway} has {address}"))?;
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    let address = address.as_str().context("an address")?.parse()?;
    Ok(Active { pod: name.to_owned(), address })
}

/// Two are ready, on two nodes, and the label is that of the one with the tunnel alone.
fn are_ready(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let pods = pods(cluster, gateway)?;
    let is_ready = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        pod["metadata"]["deletionTimestamp"].is_null()
            && conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
    };
    let ready = pods.iter().filter(is_ready).count();
    ensure!(ready == 2 && pods.len() == 2, "{ready} of {} are ready", pods.len());
    let active = active(cluster, gateway)?;
    for pod in &pods {
        let label = &pod["metadata"]["labels"]["networking.liqo.io/active"];
        let is_active = pod["metadata"]["name"] == active.pod.as_str();
        ensure!(*label == if is_active { "true" } else { "false" }, "{label} of {pod}");
    }
    Ok(())
}

fn kill(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let active = active(cluster, gateway)?;
    let process = cluster.process_in(gateway.namespace, &active.pod, "gateway")?;
    Command::new("kill").args(["-KILL", &process.to_string()]).status()?;
    Ok(())
}

fn delete_at_once(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    delete_by(cluster, gateway, &["--force", "--grace-period=0"])
}

fn delete(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    delete_by(cluster, gateway, &[])
}

fn delete_by(cluster: &Kubernetes, gateway: Object<'_>, how: &[&str]) -> Result<()> {
    let active = active(cluster, gateway)?;
    let line = ["delete", "pod", &active.pod, "--namespace", gateway.namespace, "--wait=false"];
    cluster.kubectl(&[&line[..], how].concat()).map(drop)
}

fn restart(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let name = format!("deployment/gw-{}", gateway.name);
    for verb in ["restart", "status"] {
        cluster.kubectl(&["rollout", verb, &name, "--namespace", gateway.namespace])?;
    }
    Ok(())
}
