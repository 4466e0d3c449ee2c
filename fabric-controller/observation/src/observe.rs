//! Observed state of the peerings of a cluster, put together from the store and from what really
//! runs.

mod faults;
mod nodes;
mod remote;
mod transit;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::fabric::{
    GatewayConfig, MtuBound, NodeAddressMap, PeeringFault, REFUSE_SECONDS, RefusedPrefix, Remap,
    Role,
};
use fabric_api::labels;
use fabric_api::networking::{
    ACCEPTED, Configuration, Connection, ConnectionStatus, ConnectionValue,
    NETWORK_CIDRS_CONFIGURED, NODES_REACHABLE, PEER_HEALTHY, PODS_STARTED,
};
use fabric_store::{Kind, Object, ObjectRef, Problem, Snapshot};
use fabric_supervisor::workloads::names;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::Serialize;

use nodes::Nodes;
pub use transit::Transit;

/// Kinds that [`observe`] needs from the store.
pub(crate) const KINDS: [Kind; 7] = [
    Kind::Configuration,
    Kind::Connection,
    Kind::GatewayServer,
    Kind::GatewayClient,
    Kind::GatewayConfig,
    Kind::NodeConfig,
    Kind::FabricRecord,
];

/// Everything `weft status` shows; its JSON is documented there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Observation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub peerings: Vec<Peering>,
    /// Prefixes of peerings that are gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<Refused>,
    pub problems: Vec<String>,
}

/// A prefix that nodes refuse since its peering is gone.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// The peer that it stood for.
    pub cluster: String,
    pub prefix: String,
    /// Sources that sent to it of late.
    pub senders: BTreeSet<IpAddr>,
    /// Time without a packet, in seconds, after which it is free.
    pub refuse_seconds: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Peering {
    /// The peer.
    pub cluster: String,
    pub namespace: String,
    /// Name of the GatewayServer or GatewayClient; absent while there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    pub state: State,
    /// Latency as Liqo writes it: `3ms`, `250μs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<String>,
    pub remaps: Vec<Remap>,
    pub received_bytes: u64,
    pub transmitted_bytes: u64,
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_handshake: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Bound that limits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu_bound: Option<MtuBound>,
    /// The largest IP packet known to reach the peer over the underlay, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// Endpoint from which the last packet of the peer came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The node whose gateway it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Causes of trouble between the two gateways, and remedies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<PeeringFault>,
    /// The nodes that reach the gateway through the overlay; absent if it answers no probes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Nodes>,
    /// Addresses at which other peers reach this one through this cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub transit: Vec<Transit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum State {
    /// Packets get through now.
    Connected,
    /// Connected, with a fault that the problems name: packets may be lost, even all of them while
    /// the peer no longer answers and is not in Error yet.
    Degraded,
    /// Nothing has been received from the peer yet.
    Connecting,
    /// The peer was there and is no more, or the gateway does not answer.
    Error,
    /// The gateway does not run.
    Down,
    /// Something that the peering needs is not there yet.
    Waiting,
}

/// State of a gateway's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    Answers,
    Silent,
    Gone,
}

/// Processes found running, apart from the store.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The host that was looked at; in Kubernetes that is all of them.
    pub node: Option<String>,
    pub cluster_id: Option<String>,
    /// Option that names the host's run directory to commands, after a space; empty if they find it.
    pub run_option: String,
    /// Gateways by namespace and name. One that is not among them runs where it cannot be seen.
    pub gateways: BTreeMap<(String, String), Life>,
    /// Problems of all else that runs.
    pub problems: Vec<String>,
}

/// Liveness of one gateway.
#[derive(Clone, Debug)]
pub struct Life {
    pub liveness: Liveness,
    pub problem: Option<String>,
    /// The node it runs on, if its config does not name one.
    pub node: Option<String>,
}

pub fn observe(snapshot: &Snapshot, found: &Found) -> Observation {
    let (view, now) = (View::new(snapshot), Timestamp::now());
    let mut problems: BTreeSet<String> =
        snapshot.problems.iter().map(ToString::to_string).collect();
    let left = found.node.as_deref().filter(|node| view.lacks_node(node));
    problems.extend(left.map(|node| view.no_node(node, found)));
    problems.extend(found.node.is_none().then(|| view.no_nodes(found)).flatten());
    let mut peerings = Vec::new();
    for config in &view.configs {
        let (namespace, name) = names(config);
        let life = found.gateways.get(&(namespace.to_owned(), name.to_owned())).cloned();
        let on_host = found.node.as_deref();
        let life = match life {
            Some(own) if on_host.is_some() => {
                Some(remote::unreported(&view, config, (own, now), &found.run_option))
            }
            life => life.or_else(|| remote::silent(&view, config, (on_host?, now))),
        };
        let life = life.as_ref();
        problems.extend(life.and_then(|life| life.problem.clone()));
        problems.extend(gateway_problems(config));
        let mut peering = view.peering(config, life);
        // A gateway that does not run or answer reports nothing any more.
        if life.is_none_or(|life| life.liveness == Liveness::Answers) {
            peering.take_faults(faults::shown(config, now));
            problems.extend(faults::problems(&view, config, now));
            problems.extend(nodes::problems(&peering, now));
        }
        let is_explained = left.is_some() || life.is_some_and(|life| life.problem.is_some());
        if !is_explained {
            problems.extend(unexplained(config, &peering));
        }
        if left.is_some() {
            peering.state = State::Error;
            peering.latency = None;
        }
        peerings.push(peering);
    }
    peerings.extend(view.waiting());
    transit::fill_in(&mut peerings, view.ips);
    peerings.sort_by(|a, b| {
        (&a.cluster, &a.namespace, &a.gateway).cmp(&(&b.cluster, &b.namespace, &b.gateway))
    });
    problems.extend(view.problems(&snapshot.problems, !found.gateways.is_empty()));
    let mut all = found.problems.clone();
    // Findings of a node's agent explain why gateways and other nodes get no answer.
    all.extend(view.node_problems());
    all.extend(problems);
    // A message of several lines would look like several problems.
    let line = |problem: &String| problem.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut all: Vec<_> = all.iter().map(line).collect();
    all.retain(|problem| !problem.is_empty());
    Observation {
        cluster_id: found.cluster_id.clone().or_else(|| view.cluster_id()),
        node: found.node.clone(),
        peerings,
        refused: view.refused(),
        problems: all,
    }
}

fn gateway_problems(config: &GatewayConfig) -> Vec<String> {
    let (namespace, name) = names(config);
    let mut found = Vec::new();
    if config.spec.peer_public_key.is_none() {
        found.push(format!(
            "gateway {namespace}/{name}: no PublicKey of cluster {} yet",
            config.spec.peer_cluster_id
        ));
    }
    let reported = config.status.iter().flat_map(|status| &status.problems);
    let reported = reported.filter(|problem| !problem.trim().is_empty());
    found.extend(reported.map(|problem| format!("gateway {namespace}/{name}: {problem}")));
    found
}

/// Problem of a gateway that has named none yet: a state other than Connected never stands there without one.
fn unexplained(config: &GatewayConfig, peering: &Peering) -> Option<String> {
    let (namespace, name) = names(config);
    let peer = &config.spec.peer_cluster_id;
    let text = match peering.state {
        State::Waiting => format!(
            "there is no Connection gw-{name}; it writes one within 5 s of its start, or after one was deleted"
        ),
        State::Connecting => format!("no packet of {peer} has arrived yet; it looks for the cause"),
        State::Error => {
            format!("{peer} has not answered for several seconds; it looks for the cause")
        }
        State::Connected | State::Degraded | State::Down => return None,
    };
    let is_named = !peering.faults.is_empty() || !gateway_problems(config).is_empty();
    (!is_named).then(|| format!("gateway {namespace}/{name}: {text}"))
}

/// The store's objects by kind.
#[derive(Default)]
struct View<'a> {
    configs: Vec<&'a GatewayConfig>,
    connections: Vec<&'a Connection>,
    configurations: Vec<&'a Configuration>,
    gateways: Vec<(&'a ObjectMeta, Role)>,
    conditions: Vec<(ObjectRef, &'a [Condition])>,
    nodes: Vec<&'a fabric_api::fabric::NodeConfig>,
    /// Prefixes that all nodes refuse.
    refused: &'a [RefusedPrefix],
    /// Targets of the addresses of IP resources.
    ips: &'a [NodeAddressMap],
}

impl Peering {
    fn take_faults(&mut self, faults: Vec<PeeringFault>) {
        if self.state == State::Connected && !faults.is_empty() {
            self.state = State::Degraded;
        }
        self.faults = faults;
    }
}

impl<'a> View<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        let mut view = Self::default();
        for (reference, object) in &snapshot.objects {
            view.conditions.push((reference.clone(), object.conditions()));
            match object {
                Object::GatewayConfig(x) => view.configs.push(x),
                Object::Connection(x) => view.connections.push(x),
                Object::Configuration(x) => view.configurations.push(x),
                Object::GatewayServer(x) => view.gateways.push((&x.metadata, Role::Server)),
                Object::GatewayClient(x) => view.gateways.push((&x.metadata, Role::Client)),
                Object::NodeConfig(x) => view.nodes.push(x),
                Object::FabricRecord(x) => {
                    if let Some(cluster) = &x.spec.cluster {
                        (view.refused, view.ips) = (&cluster.refused, &cluster.ips);
                    }
                }
                Object::Namespace(_)
                | Object::ConfigMap(_)
                | Object::Secret(_)
                | Object::Node(_)
                | Object::Network(_)
                | Object::Ip(_)
                | Object::PublicKey(_)
                | Object::GatewayRecord(_) => {}
            }
        }
        view
    }

    /// Name of the Configuration for a peer.
    fn configuration_of(&self, namespace: &str, peer: &str) -> Option<&str> {
        let is_for = |meta: &ObjectMeta| {
            let label = meta.labels.as_ref().and_then(|l| l.get(labels::REMOTE_CLUSTER_ID));
            meta.namespace.as_deref() == Some(namespace) && label.is_some_and(|id| id == peer)
        };
        let of_peer = self.configurations.iter().find(|of| is_for(&of.metadata))?;
        of_peer.metadata.name.as_deref()
    }

    /// The ID in the published configs, for a host that has nothing else.
    fn cluster_id(&self) -> Option<String> {
        self.nodes.first().map(|node| node.spec.cluster_id.clone())
    }

    /// Returns true if there is something for nodes, and this one is none of them.
    fn lacks_node(&self, name: &str) -> bool {
        let mut nodes = self.nodes.iter().filter(|node| !node.spec.removed);
        let is_empty = self.nodes.is_empty() && self.configs.is_empty();
        !is_empty && !nodes.any(|node| node.metadata.name.as_deref() == Some(name))
    }

    fn no_node(&self, name: &str, found: &Found) -> String {
        self.no_nodes(found).unwrap_or_else(|| {
            format!(
                "this host, {name}, is no node of {}: its pods reach no peer; add its Node to the \
                 manifests, or run `weft down{}` here",
                self.cluster(found),
                found.run_option
            )
        })
    }

    /// Problem of a cluster with gateways, or with nodes before, that has no node.
    fn no_nodes(&self, found: &Found) -> Option<String> {
        let is_empty = self.nodes.is_empty() && self.configs.is_empty();
        let has_none = !is_empty && self.nodes.iter().all(|node| node.spec.removed);
        let (removal, place) = match found.node {
            Some(_) => ("`weft down` is taking it away", " in the manifests"),
            None => ("weft is being uninstalled", ""),
        };
        has_none.then(|| {
            let cluster = self.cluster(found);
            format!("{cluster} has no node: {removal}, or no Node is left{place}; no pod of it reaches a peer")
        })
    }

    fn cluster(&self, found: &Found) -> String {
        let cluster = found.cluster_id.clone().or_else(|| self.cluster_id());
        cluster.unwrap_or_else(|| "the cluster".to_owned())
    }

    fn refused(&self) -> Vec<Refused> {
        let mut all = BTreeMap::new();
        // A removed one refuses those of living peerings, too.
        let present = self.nodes.iter().filter(|node| !node.spec.removed);
        let of_nodes = present.flat_map(|node| &node.spec.refused);
        for prefix in self.refused.iter().chain(of_nodes) {
            all.entry(prefix).or_insert_with(BTreeSet::new);
        }
        for (prefix, senders) in &mut all {
            let statuses = self.nodes.iter().filter_map(|node| node.status.as_ref());
            let traffic = statuses.filter_map(|status| status.refused.as_ref()).flatten();
            let to = traffic.filter(|traffic| traffic.prefix == prefix.prefix);
            senders.extend(to.flat_map(|traffic| traffic.senders.iter().copied()));
        }
        let refuse_seconds = self.refuse_seconds();
        let refused = |(of, senders): (&RefusedPrefix, _)| Refused {
            cluster: of.peer_cluster_id.clone(),
            prefix: of.prefix.clone(),
            senders,
            refuse_seconds,
        };
        all.into_iter().map(refused).collect()
    }

    /// All nodes have one setting, but for those of a moment ago.
    fn refuse_seconds(&self) -> u64 {
        let of_nodes = self.nodes.iter().filter(|node| !node.spec.removed);
        let longest = of_nodes.map(|node| node.spec.quiet_after().as_secs()).max();
        longest.unwrap_or_else(|| REFUSE_SECONDS.into())
    }

    fn connection_of(&self, config: &GatewayConfig) -> Option<&'a ConnectionStatus> {
        let (namespace, name) = names(config);
        let connection = self.connections.iter().find(|connection| {
            connection.metadata.namespace.as_deref() == Some(namespace)
                && connection.spec.gateway_ref.name.as_deref() == Some(name)
        })?;
        connection.status.as_ref()
    }

    fn peering(&self, config: &GatewayConfig, life: Option<&Life>) -> Peering {
        let (namespace, name) = names(config);
        let reported = self.connection_of(config).cloned();
        let liveness = life.map(|life| life.liveness);
        // A gateway that hangs reports nothing of them any more.
        let answers = liveness.is_none_or(|liveness| liveness == Liveness::Answers);
        let nodes = Nodes::of(config, &self.nodes).filter(|_| answers);
        let is_degraded = nodes.as_ref().is_some_and(Nodes::are_faulty);
        let mut state = state(reported.as_ref().map(|reported| reported.value), liveness);
        if state == State::Connected && is_degraded {
            state = State::Degraded;
        }
        let latency = reported.and_then(|reported| Some(reported.latency?.value));
        let status = config.status.clone().unwrap_or_default();
        Peering {
            cluster: config.spec.peer_cluster_id.clone(),
            namespace: namespace.to_owned(),
            gateway: Some(name.to_owned()),
            role: Some(config.spec.role),
            state,
            latency: latency.filter(|_| matches!(state, State::Connected | State::Degraded)),
            remaps: config.spec.remaps.clone(),
            received_bytes: status.received_bytes,
            transmitted_bytes: status.transmitted_bytes,
            last_handshake: status.last_handshake,
            mtu: Some(status.mtu).filter(|mtu| *mtu > 0),
            mtu_bound: status.mtu_bound,
            path_mtu: status.path_mtu,
            endpoint: status.peer_endpoint,
            node: life
                .and_then(|life| life.node.clone())
                .or_else(|| config.spec.overlay.node.clone()),
            faults: Vec::new(),
            nodes,
            transit: Vec::new(),
        }
    }

    /// Peerings that have resources, but no gateway that could run.
    fn waiting(&self) -> Vec<Peering> {
        let running: BTreeSet<_> = self.configs.iter().map(|config| names(config)).collect();
        let mut rows = BTreeMap::new();
        for (meta, role) in &self.gateways {
            let row = waiting(meta, Some(*role));
            let gateway = row.gateway.clone().unwrap_or_default();
            if !running.contains(&(row.namespace.as_str(), gateway.as_str())) {
                rows.insert((row.cluster.clone(), row.namespace.clone(), gateway), row);
            }
        }
        let with_gateway: BTreeSet<String> = self
            .configs
            .iter()
            .map(|config| config.spec.peer_cluster_id.clone())
            .chain(rows.values().map(|row| row.cluster.clone()))
            .collect();
        for configuration in &self.configurations {
            let row = waiting(&configuration.metadata, None);
            if !with_gateway.contains(&row.cluster) {
                rows.insert((row.cluster.clone(), row.namespace.clone(), String::new()), row);
            }
        }
        rows.into_values().collect()
    }

    /// Pods that are known show by themselves why they do not start.
    fn problems(&self, known: &[Problem], are_pods_known: bool) -> Vec<String> {
        let mut found = Vec::new();
        for row in self.waiting().iter().filter(|row| row.gateway.is_none()) {
            found.push(format!(
                "peering with {}: no GatewayServer or GatewayClient yet in namespace {}",
                row.cluster, row.namespace
            ));
        }
        let is_refused = |row: &Peering| {
            let of_row = |object: &ObjectRef| {
                matches!(object.kind, Kind::GatewayServer | Kind::GatewayClient)
                    && object.namespace.as_deref() == Some(&row.namespace)
                    && Some(&object.name) == row.gateway.as_ref()
            };
            let mut all = self.conditions.iter().filter(|(object, _)| of_row(object));
            all.any(|(_, conditions)| unmet(conditions, are_pods_known).next().is_some())
        };
        let waits = |row: &&Peering| row.gateway.is_some() && !is_refused(row);
        for row in self.waiting().iter().filter(waits) {
            found.push(format!(
                "gateway {}/{}: the fabric-controller has published no GatewayConfig of it yet",
                row.namespace,
                row.gateway.as_deref().unwrap_or_default()
            ));
        }
        for (object, conditions) in &self.conditions {
            for condition in unmet(conditions, are_pods_known) {
                let unreported = unreported(condition, object, known);
                found.extend(unreported.map(|message| format!("{object}: {message}")));
            }
        }
        found
    }

    /// Problems that the nodes' agents report.
    fn node_problems(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for node in &self.nodes {
            let name = node.metadata.name.as_deref().unwrap_or_default();
            let reported = node.status.iter().flat_map(|status| &status.problems);
            let reported = reported.filter(|problem| !problem.trim().is_empty());
            found.extend(reported.map(|problem| format!("node {name}: {problem}")));
        }
        found
    }
}

/// Returns the conditions that are false, without those of gateways, nodes and pods whose reports are shown from their own
/// objects.
fn unmet(conditions: &[Condition], are_pods_known: bool) -> impl Iterator<Item = &Condition> {
    let is_refused = conditions.iter().any(|c| c.type_ == ACCEPTED && c.status == "False");
    let is_shown = move |c: &Condition| match c.type_.as_str() {
        PEER_HEALTHY | NODES_REACHABLE => true,
        PODS_STARTED => are_pods_known,
        // The same faults as in the other condition.
        NETWORK_CIDRS_CONFIGURED => is_refused && c.reason == "InvalidConfiguration",
        _ => false,
    };
    conditions.iter().filter(move |c| c.status == "False" && !is_shown(c))
}

/// Returns the part of a condition that goes beyond what the store has found by itself.
fn unreported(condition: &Condition, object: &ObjectRef, known: &[Problem]) -> Option<String> {
    if condition.message.trim().is_empty() {
        return Some(format!(
            "{} is False ({}), no message given",
            condition.type_, condition.reason
        ));
    }
    if condition.type_ != ACCEPTED {
        return Some(format!("{}: {}", condition.reason, condition.message));
    }
    // As the controller writes them into it: with their places, if it knew those.
    let mut texts = BTreeSet::new();
    for problem in known {
        let mut placed = problem.clone();
        placed.object = problem.object.clone().filter(|of| of != object);
        let bare = Problem { source: String::new(), ..placed.clone() };
        texts.extend([placed.to_string(), bare.to_string()]);
    }
    let mut message = format!("{}; ", condition.message);
    let mut texts: Vec<_> = texts.into_iter().collect();
    texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
    for text in texts {
        message = message.replace(&format!("{text}; "), "");
    }
    let rest = message.trim_end_matches("; ");
    (!rest.is_empty()).then(|| rest.to_owned())
}

/// Trusts the status of the Connection only for a gateway that runs and answers, or that runs on
/// another host.
fn state(reported: Option<ConnectionValue>, liveness: Option<Liveness>) -> State {
    match (liveness, reported) {
        (Some(Liveness::Gone), _) => State::Down,
        (Some(Liveness::Silent), Some(ConnectionValue::Connected))
        | (_, Some(ConnectionValue::Error)) => State::Error,
        (Some(Liveness::Silent), None) => State::Connecting,
        (_, Some(ConnectionValue::Connected)) => State::Connected,
        (_, Some(ConnectionValue::Connecting)) => State::Connecting,
        (_, None) => State::Waiting,
    }
}

fn waiting(meta: &ObjectMeta, role: Option<Role>) -> Peering {
    let remote = meta.labels.as_ref().and_then(|labels| labels.get(labels::REMOTE_CLUSTER_ID));
    Peering {
        cluster: remote.cloned().unwrap_or_else(|| "?".to_owned()),
        namespace: meta.namespace.clone().unwrap_or_default(),
        gateway: role.and_then(|_| meta.name.clone()),
        role,
        state: State::Waiting,
        latency: None,
        remaps: Vec::new(),
        received_bytes: 0,
        transmitted_bytes: 0,
        last_handshake: None,
        mtu: None,
        mtu_bound: None,
        path_mtu: None,
        endpoint: None,
        node: None,
        faults: Vec::new(),
        nodes: None,
        transit: Vec::new(),
    }
}

#[cfg(test)]
pub(crate) mod tests;
