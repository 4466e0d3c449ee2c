//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      two replicas of each gateway,
//!   b -- rome-2 --+              +-- milan-2 -- b      a datagram each way every millisecond
//! ```

use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::kubernetes::{Image, Machine, Object};
use weft_tests::traffic::HeldConnection;
use weft_tests::{Kubernetes, Lab, measured, skip, wait_until};

use crate::pair::{GATEWAYS, Pair, SOON, TIMEOUT, Traffic, selector};
use crate::stage::{note, note_time, play, rome_and_milan_specs, step};

pub(crate) const REPLICAS: &str = "networking.gatewayTemplates.replicas=2";
const SINGLE: &str = "networking.gatewayTemplates.replicas=1";
/// Longest outage when the replica with the tunnel is gone at once, and when it hands the tunnel over: much of
/// it is the share of two processors that four nodes leave to a pod.
pub(crate) const TAKEN_OVER: Duration = Duration::from_secs(3);
const HANDED_OVER: Duration = Duration::from_secs(1);
/// The same if what a Service leads elsewhere by may have been on the same node: the working controller.
const CUT_OFF: Duration = Duration::from_secs(10);
/// Longest outage by a node of the standby, which takes nothing from the replica with the tunnel.
const UNTOUCHED: Duration = Duration::from_millis(200);
/// Time until an address is granted without a node. Services lead to what was on it until Kubernetes has given it up.
const GRANTED: Duration = Duration::from_secs(30);
/// Time in which a key shared by replicas is shown: three seconds, its detection, and a probe.
const SHOWN: Duration = Duration::from_secs(8);
/// Time for the outcome of an event to show in a stream.
pub(crate) const AFTERWARDS: Duration = Duration::from_secs(3);

/// Something after which another replica has the tunnel, or the same one if it stays.
struct Event {
    what: &'static str,
    run: fn(&Kubernetes, &Active) -> Result<()>,
    /// Gives back what it took, while traffic goes on.
    undo: fn(&Kubernetes, &Active) -> Result<()>,
    limit: Duration,
    /// Time until it is undone.
    lasts: Duration,
    stays: bool,
    /// Packets to a server's Service go to the lost node until kube-proxy learns of the other one.
    is_of_clients: bool,
}

impl Event {
    const fn abrupt(what: &'static str, run: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self {
            what,
            run,
            undo: |_, _| Ok(()),
            limit: TAKEN_OVER,
            lasts: AFTERWARDS,
            stays: false,
            is_of_clients: false,
        }
    }

    const fn hand_over(what: &'static str, run: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self { limit: HANDED_OVER, ..Self::abrupt(what, run) }
    }

    /// The outage depends on more than the other replica.
    const fn cut_off(what: &'static str, run: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self { limit: CUT_OFF, lasts: CUT_OFF, ..Self::abrupt(what, run) }
    }

    /// The tunnel stays where it is.
    const fn of_standby(what: &'static str, run: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self { limit: UNTOUCHED, stays: true, ..Self::abrupt(what, run) }
    }

    const fn lasting(self, lasts: Duration) -> Self {
        Self { lasts, ..self }
    }

    const fn of_clients(self) -> Self {
        Self { is_of_clients: true, ..self }
    }

    const fn undone_by(self, undo: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self { undo, ..self }
    }
}

const EVENTS: [Event; 5] = [
    Event::abrupt("its process is killed", kill),
    Event::abrupt("its pod is deleted at once", delete_at_once),
    Event::hand_over("its pod is deleted", delete),
    Event::hand_over("its Deployment is restarted", restart),
    Event::hand_over("its pod is deleted without a controller", delete_without_controller)
        .undone_by(start_controller)
        .lasting(CUT_OFF)
        .of_clients(),
];

/// Events for clusters without a pod of the streams on any node of a gateway.
const EVENTS_OF_NODES: [Event; 8] = [
    Event::of_standby("the node of its standby is cut off", cut_off_standby)
        .undone_by(give_back_standby),
    Event::cut_off("its node is cut off", cut_off).undone_by(give_back),
    Event::cut_off("its node receives nothing any more", deafen).undone_by(give_back),
    Event::abrupt("the node of its standby receives nothing any more", deafen_standby)
        .undone_by(give_back_standby),
    Event::cut_off("its node and the API server are cut off", cut_off_without_server)
        .undone_by(give_back_with_server)
        .of_clients(),
    Event::cut_off("its process is killed without an API server", kill_without_server)
        .undone_by(start_server),
    Event::hand_over("its node is drained", drain).undone_by(uncordon),
    Event::abrupt("its Node is deleted", delete_node).undone_by(add_node),
];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn second_replica_takes_over() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-failover")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| {
                step("both are connected", || pair.connect())?;
                step("a second replica of each gateway stands by", || second_replicas(&pair))?;
                let (mut held, _server) = pair.hold()?;
                play_all(&pair, &EVENTS, &mut held, rounds())
            })
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

/// ```text
///   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      API servers, and the address of the server
///        rome-2 --+              +-- milan-2           replicas of gateway and controller
///        rome-3 --+              +-- milan-3           the same
/// ```
#[test]
#[ignore = "minutes long: make soak-rounds"]
fn second_replica_outlives_its_node() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-node-failover")?;
            let pair = Pair::install_on(&lab, &image, rome_and_milan_specs(3), &[("a", 1)])?;
            pair.explained(|| {
                step("nothing of weft's stays beside the API server", || {
                    pair.each(leave_first_node).map(drop)
                })?;
                step("both are connected", || pair.connect())?;
                step("addresses are granted without any one node", || {
                    grants_without_a_node(&pair.clusters[0])
                })?;
                step("a second replica of each gateway stands by", || second_replicas(&pair))?;
                let (mut held, _server) = pair.hold()?;
                play_all(&pair, &EVENTS_OF_NODES, &mut held, rounds())
            })
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

/// Cuts off each of the nodes that the working controller and a replica of ipam may be on.
fn grants_without_a_node(cluster: &Kubernetes) -> Result<()> {
    for machine in &cluster.machines[1..] {
        machine.host.net().nft(CUT)?;
        let (name, cut) = (format!("without-{}", machine.name), Instant::now());
        cluster.apply(&format!(
            "apiVersion: ipam.liqo.io/v1alpha1\nkind: IP\nmetadata: {{name: {name}, namespace: default}}\n\
             spec: {{ip: 198.51.100.7}}\n"
        ))?;
        wait_until("an address is granted", GRANTED, || {
            let ip = cluster.get(Object::new("ip.ipam.liqo.io", "default", &name))?;
            ensure!(ip["status"]["ip"].is_string(), "{ip}");
            Ok::<_, anyhow::Error>(())
        })?;
        note_time(cut.elapsed(), &format!("until an address is granted without {}", machine.name));
        machine.host.net().nft(GIVEN_BACK)?;
        cluster.wait_for_weft(TIMEOUT)?;
    }
    Ok(())
}

pub(crate) fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

/// But for the agent.
pub(crate) fn leave_first_node(cluster: &Kubernetes) -> Result<()> {
    cluster.kubectl(&["cordon", &cluster.head().name])?;
    let deployments = ["rollout", "restart", "deployment", "--namespace", &cluster.namespace];
    cluster.kubectl(&deployments)?;
    cluster.wait_for_weft(TIMEOUT)
}

/// Nothing is lost meanwhile.
pub(crate) fn second_replicas(pair: &Pair) -> Result<()> {
    let mut is_first = true;
    let replace = || {
        if !std::mem::replace(&mut is_first, false) {
            single_replicas(pair)?;
        }
        pair.streaming(|| {
            pair.each(|cluster| cluster.set_weft(REPLICAS))?;
            for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
                wait_until("both replicas are ready", TIMEOUT, || are_ready(cluster, gateway))?;
            }
            pair.wait_connected(SOON)
        })
    };
    let traffic = measured(replace, |of| of.longest_outage().saturating_sub(HANDED_OVER))?;
    ensure!(traffic.longest_outage() < HANDED_OVER, "{traffic:?}");
    note_time(traffic.longest_outage(), "without a tunnel while the Deployments were replaced");
    Ok(())
}

/// Back to one replica of each gateway.
fn single_replicas(pair: &Pair) -> Result<()> {
    pair.each(|cluster| cluster.set_weft(SINGLE))?;
    for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
        wait_until("one replica is left", TIMEOUT, || {
            let pods = pods(cluster, gateway)?;
            ensure!(pods.len() == 1 && pods.iter().all(is_ready), "{} are there", pods.len());
            Ok::<_, anyhow::Error>(())
        })?;
    }
    pair.wait_connected(SOON)
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let has_condition =
        conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
    has_condition && pod["metadata"]["deletionTimestamp"].is_null()
}

/// Plays an abrupt event, a hand-over, and one that depends on the replicas alone.
pub(crate) fn few_events(pair: &Pair, held: &mut HeldConnection) -> Result<()> {
    let [abrupt, _, _, hand_over, alone] = EVENTS;
    play_all(pair, &[abrupt, hand_over, alone], held, 1)
}

fn play_all(pair: &Pair, events: &[Event], held: &mut HeldConnection, rounds: usize) -> Result<()> {
    for event in events {
        let ends = if event.is_of_clients { 1 } else { 2 };
        for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS).take(ends) {
            let mut outages = Vec::new();
            for _ in 0..rounds {
                let excess = |of: &Traffic| of.longest_outage().saturating_sub(event.limit);
                let traffic = measured(|| take_tunnel(pair, event, cluster, gateway), excess)?;
                ensure!(traffic.longest_outage() < event.limit, "{}: {traffic:?}", event.what);
                let lost: Vec<_> = traffic.streams.iter().map(|stream| stream.lost).collect();
                outages.push((traffic.longest_outage(), lost));
                held.echoes(SOON)?;
            }
            note(&format!("{gateway}: {}: outages and losses {outages:?}", event.what));
        }
    }
    Ok(())
}

fn take_tunnel(
    pair: &Pair,
    event: &Event,
    cluster: &Kubernetes,
    gateway: Object<'static>,
) -> Result<Traffic> {
    let before = active(cluster, gateway)?;
    pair.streaming(|| {
        (event.run)(cluster, &before)?;
        std::thread::sleep(event.lasts);
        (event.undo)(cluster, &before)?;
        no_key_is_shared(pair)?;
        let expected = if event.stays { "the same replica" } else { "another replica" };
        wait_until(&format!("{expected} is active"), TIMEOUT, || {
            let after = active(cluster, gateway)?.address;
            ensure!((after == before.address) == event.stays, "{after} is active");
            are_ready(cluster, gateway)
        })?;
        pair.wait_connected(SOON)
    })
}

/// For a while after an event: replicas are one gateway to the peer, also if one is back that had the tunnel.
fn no_key_is_shared(pair: &Pair) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < SHOWN {
        for cluster in &pair.clusters {
            let (status, _) = cluster.status_and_code()?;
            ensure!(!status.to_string().contains("KeyShared"), "{:?}: {status}", start.elapsed());
        }
    }
    Ok(())
}

/// The replica that has the tunnel.
pub(crate) struct Active {
    gateway: Object<'static>,
    pod: String,
    pub(crate) node: String,
    pub(crate) address: IpAddr,
}

fn pods(cluster: &Kubernetes, gateway: Object<'_>) -> Result<Vec<Value>> {
    let line = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let list = cluster.kubectl(&[&line[..], &["--output=json"]].concat())?;
    let mut list: Value = serde_json::from_str(&list).context("kubectl prints JSON")?;
    Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
}

pub(crate) fn active(cluster: &Kubernetes, gateway: Object<'static>) -> Result<Active> {
    let config = Object::new("gatewayconfig", gateway.namespace, gateway.name);
    let config = cluster.get(config)?;
    let address = &config["status"]["active"]["address"];
    let pods = pods(cluster, gateway)?;
    let pod = pods.iter().find(|pod| pod["status"]["podIP"] == *address);
    replica(gateway, pod.with_context(|| format!("no pod of {gateway} has {address}"))?)
}

fn replica(gateway: Object<'static>, pod: &Value) -> Result<Active> {
    let name = pod["metadata"]["name"].as_str().context("a pod has a name")?;
    let node = pod["spec"]["nodeName"].as_str().context("a pod has a node")?;
    let address = pod["status"]["podIP"].as_str().context("an address")?.parse()?;
    Ok(Active { gateway, pod: name.to_owned(), node: node.to_owned(), address })
}

/// Two are ready, on two nodes, and the label is that of the one with the tunnel alone.
pub(crate) fn are_ready(cluster: &Kubernetes, gateway: Object<'static>) -> Result<()> {
    let pods = pods(cluster, gateway)?;
    let ready = pods.iter().filter(|pod| is_ready(pod)).count();
    ensure!(ready == 2 && pods.len() == 2, "{ready} of {} are ready", pods.len());
    let active = active(cluster, gateway)?;
    for pod in &pods {
        let label = &pod["metadata"]["labels"]["networking.liqo.io/active"];
        let is_active = pod["metadata"]["name"] == active.pod.as_str();
        ensure!(*label == if is_active { "true" } else { "false" }, "{label} of {pod}");
    }
    Ok(())
}

pub(crate) fn kill(cluster: &Kubernetes, active: &Active) -> Result<()> {
    let process = cluster.process_in(active.gateway.namespace, &active.pod, "gateway")?;
    Command::new("kill").args(["-KILL", &process.to_string()]).status()?;
    Ok(())
}

pub(crate) fn delete_at_once(cluster: &Kubernetes, active: &Active) -> Result<()> {
    delete_by(cluster, active, &["--force", "--grace-period=0"])
}

pub(crate) fn delete(cluster: &Kubernetes, active: &Active) -> Result<()> {
    delete_by(cluster, active, &[])
}

fn delete_by(cluster: &Kubernetes, active: &Active, how: &[&str]) -> Result<()> {
    let namespace = active.gateway.namespace;
    let line = ["delete", "pod", &active.pod, "--namespace", namespace, "--wait=false"];
    cluster.kubectl(&[&line[..], how].concat()).map(drop)
}

/// Nodes go by notices of the successor alone.
fn delete_without_controller(cluster: &Kubernetes, active: &Active) -> Result<()> {
    scale_controller(cluster, "0")?;
    delete(cluster, active)
}

fn start_controller(cluster: &Kubernetes, _: &Active) -> Result<()> {
    scale_controller(cluster, "2")?;
    cluster.wait_for_weft(TIMEOUT)
}

fn scale_controller(cluster: &Kubernetes, replicas: &str) -> Result<()> {
    let (name, namespace) = ("deployment/liqo-fabric-controller", cluster.namespace.as_str());
    let replicas = format!("--replicas={replicas}");
    cluster.kubectl(&["scale", name, "--namespace", namespace, &replicas])?;
    let status = ["rollout", "status", name, "--namespace", namespace];
    cluster.kubectl(&status).map(drop)
}

pub(crate) fn restart(cluster: &Kubernetes, active: &Active) -> Result<()> {
    let name = format!("deployment/gw-{}", active.gateway.name);
    for verb in ["restart", "status"] {
        cluster.kubectl(&["rollout", verb, &name, "--namespace", active.gateway.namespace])?;
    }
    Ok(())
}

/// Leaves the pods of that node running until Kubernetes collects them.
fn delete_node(cluster: &Kubernetes, active: &Active) -> Result<()> {
    cluster.kubectl(&["delete", "node", &active.node]).map(drop)
}

fn add_node(cluster: &Kubernetes, active: &Active) -> Result<()> {
    cluster.add_node(&active.node)
}

fn drain(cluster: &Kubernetes, active: &Active) -> Result<()> {
    let line = ["drain", &active.node, "--ignore-daemonsets", "--delete-emptydir-data"];
    cluster.kubectl(&[&line[..], &["--timeout=60s"]].concat()).map(drop)
}

/// A rollout spreads over the nodes again what a drain has put on one of them.
fn uncordon(cluster: &Kubernetes, active: &Active) -> Result<()> {
    cluster.kubectl(&["uncordon", &active.node])?;
    restart(cluster, active)
}

/// Nothing passes its uplink, as if the switch had lost it; its addresses and routes stay. Neighbours have to be found
/// again afterwards.
const CUT: &str = "table inet cut {
    chain in { type filter hook prerouting priority -400; iifname eth0 drop; }
    chain out { type filter hook postrouting priority 400; oifname eth0 drop; }
}
table arp cut {
    chain in { type filter hook input priority 0; iifname eth0 drop; }
    chain out { type filter hook output priority 0; oifname eth0 drop; }
}";
/// The same one way.
const DEAFENED: &str = "table inet cut {
    chain in { type filter hook prerouting priority -400; iifname eth0 drop; }
}
table arp cut {
    chain in { type filter hook input priority 0; iifname eth0 drop; }
}";
const GIVEN_BACK: &str = "delete table inet cut\ndelete table arp cut";

pub(crate) fn cut_off(cluster: &Kubernetes, active: &Active) -> Result<()> {
    machine_of(cluster, active)?.host.net().nft(CUT)
}

pub(crate) fn give_back(cluster: &Kubernetes, active: &Active) -> Result<()> {
    machine_of(cluster, active)?.host.net().nft(GIVEN_BACK)
}

fn deafen(cluster: &Kubernetes, active: &Active) -> Result<()> {
    machine_of(cluster, active)?.host.net().nft(DEAFENED)
}

fn cut_off_standby(cluster: &Kubernetes, active: &Active) -> Result<()> {
    cut_off(cluster, &standby_of(cluster, active)?)
}

fn deafen_standby(cluster: &Kubernetes, active: &Active) -> Result<()> {
    deafen(cluster, &standby_of(cluster, active)?)
}

fn give_back_standby(cluster: &Kubernetes, active: &Active) -> Result<()> {
    give_back(cluster, &standby_of(cluster, active)?)
}

fn standby_of(cluster: &Kubernetes, active: &Active) -> Result<Active> {
    let pods = pods(cluster, active.gateway)?;
    let other = pods.iter().find(|pod| pod["metadata"]["name"] != active.pod.as_str());
    replica(active.gateway, other.context("no pod stands by")?)
}

fn machine_of<'a>(cluster: &'a Kubernetes, active: &Active) -> Result<&'a Machine> {
    let machine = cluster.machines.iter().find(|machine| machine.name == active.node);
    machine.with_context(|| format!("no machine is {}", active.node))
}

fn cut_off_without_server(cluster: &Kubernetes, active: &Active) -> Result<()> {
    cluster.stop_api_server()?;
    cut_off(cluster, active)
}

fn give_back_with_server(cluster: &Kubernetes, active: &Active) -> Result<()> {
    give_back(cluster, active)?;
    cluster.start_api_server()
}

fn kill_without_server(cluster: &Kubernetes, active: &Active) -> Result<()> {
    let process = cluster.process_in(active.gateway.namespace, &active.pod, "gateway")?;
    cluster.stop_api_server()?;
    Command::new("kill").args(["-KILL", &process.to_string()]).status()?;
    Ok(())
}

fn start_server(cluster: &Kubernetes, _: &Active) -> Result<()> {
    cluster.start_api_server()
}
