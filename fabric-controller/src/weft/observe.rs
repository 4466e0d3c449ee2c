//! What is known of the peerings of this host's cluster, put together from what the store says
//! and from which processes really run.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{GatewayConfig, MtuBound, Remap, Role};
use fabric_api::labels;
use fabric_api::networking::{Configuration, Connection, ConnectionValue};
use fabric_store::{Kind, Object, Snapshot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use super::workloads::{gateways_of, names};

/// What [`observe`] needs of the store.
pub(crate) const KINDS: [Kind; 6] = [
    Kind::Configuration,
    Kind::Connection,
    Kind::GatewayServer,
    Kind::GatewayClient,
    Kind::GatewayConfig,
    Kind::NodeConfig,
];

/// Everything `weft status` shows; its JSON is documented there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Observation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cluster_id: Option<String>,
    pub(crate) node: String,
    pub(crate) peerings: Vec<Peering>,
    pub(crate) problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Peering {
    /// The peer.
    pub(crate) cluster: String,
    pub(crate) namespace: String,
    /// Name of the GatewayServer or GatewayClient; absent while there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<Role>,
    pub(crate) state: State,
    /// As Liqo writes it: `3ms`, `250μs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<String>,
    pub(crate) remaps: Vec<Remap>,
    pub(crate) received_bytes: u64,
    pub(crate) transmitted_bytes: u64,
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_handshake: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    /// What keeps it from being larger.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu_bound: Option<MtuBound>,
    /// The largest IP packet known to reach the peer over the underlay, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) path_mtu: Option<u32>,
    /// Where the peer was last heard from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) endpoint: Option<String>,
    /// The node whose gateway it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum State {
    /// Packets get through now.
    Connected,
    /// The gateway runs; the peer has not been heard yet.
    Connecting,
    /// The peer was there and is no more, or the gateway does not answer.
    Error,
    /// The gateway's process does not run.
    Down,
    /// Something that the peering needs is not there yet.
    Waiting,
}

/// How a gateway's process is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    Answers,
    Silent,
}

/// What was found on the host, apart from the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    pub(crate) node: String,
    pub(crate) cluster_id: Option<String>,
    /// The processes that run, by name.
    pub(crate) running: BTreeMap<String, Liveness>,
    /// The processes that should.
    pub(crate) expected: Vec<String>,
    /// Whether a supervisor is at work.
    pub(crate) supervised: bool,
}

pub(crate) fn observe(snapshot: &Snapshot, host: &Host) -> Observation {
    let view = View::new(snapshot);
    let gateways = gateways_of(&host.node, view.configs.iter().copied());
    let mut problems: BTreeSet<String> =
        snapshot.problems.iter().map(ToString::to_string).collect();
    let processes: BTreeMap<_, _> =
        gateways.iter().map(|(process, config)| (names(config), process.as_str())).collect();
    let mut peerings: Vec<_> = view
        .configs
        .iter()
        .map(|config| {
            let process = processes.get(&names(config)).copied();
            let liveness = process.map(|process| host.running.get(process).copied());
            problems.extend(gateway_problems(config, process, liveness));
            view.peering(config, liveness)
        })
        .collect();
    peerings.extend(view.waiting());
    peerings.sort_by(|a, b| {
        (&a.cluster, &a.namespace, &a.gateway).cmp(&(&b.cluster, &b.namespace, &b.gateway))
    });
    problems.extend(view.problems());
    let mut all = supervision_problems(host);
    all.extend(problems);
    Observation {
        cluster_id: host.cluster_id.clone().or_else(|| view.cluster_id()),
        node: host.node.clone(),
        peerings,
        problems: all,
    }
}

fn supervision_problems(host: &Host) -> Vec<String> {
    let mut found = Vec::new();
    if !host.supervised {
        found.push(
            "no `weft up` or `weft agent` runs here: changes have no effect, and what dies stays \
             dead"
                .to_owned(),
        );
    }
    let dead = host.expected.iter().filter(|process| !host.running.contains_key(*process));
    found.extend(dead.map(|process| format!("{process} does not run")));
    found
}

fn gateway_problems(
    config: &GatewayConfig,
    process: Option<&str>,
    liveness: Option<Option<Liveness>>,
) -> Vec<String> {
    let (namespace, name) = names(config);
    let process = process.unwrap_or_default();
    let mut found = Vec::new();
    match liveness {
        Some(None) => found.push(format!("{process} does not run; see `weft logs {process}`")),
        Some(Some(Liveness::Silent)) => found.push(format!("{process} does not answer")),
        Some(Some(Liveness::Answers)) | None => {}
    }
    if config.spec.peer_public_key.is_none() {
        found.push(format!(
            "gateway {namespace}/{name}: no PublicKey of cluster {} yet",
            config.spec.peer_cluster_id
        ));
    }
    let told = config.status.iter().flat_map(|status| &status.problems);
    found.extend(told.map(|problem| format!("gateway {namespace}/{name}: {problem}")));
    found
}

/// The store's objects by kind.
#[derive(Default)]
struct View<'a> {
    configs: Vec<&'a GatewayConfig>,
    connections: Vec<&'a Connection>,
    configurations: Vec<&'a Configuration>,
    gateways: Vec<(&'a ObjectMeta, Role)>,
    nodes: Vec<&'a fabric_api::fabric::NodeConfig>,
}

impl<'a> View<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        let mut view = Self::default();
        for object in snapshot.objects.values() {
            match object {
                Object::GatewayConfig(x) => view.configs.push(x),
                Object::Connection(x) => view.connections.push(x),
                Object::Configuration(x) => view.configurations.push(x),
                Object::GatewayServer(x) => view.gateways.push((&x.metadata, Role::Server)),
                Object::GatewayClient(x) => view.gateways.push((&x.metadata, Role::Client)),
                Object::NodeConfig(x) => view.nodes.push(x),
                Object::Namespace(_)
                | Object::ConfigMap(_)
                | Object::Secret(_)
                | Object::Node(_)
                | Object::Network(_)
                | Object::Ip(_)
                | Object::PublicKey(_) => {}
            }
        }
        view
    }

    /// As the published configs tell it, on a host that has nothing else.
    fn cluster_id(&self) -> Option<String> {
        self.nodes.first().map(|node| node.spec.cluster_id.clone())
    }

    fn peering(&self, config: &GatewayConfig, liveness: Option<Option<Liveness>>) -> Peering {
        let (namespace, name) = names(config);
        let connection = self.connections.iter().find(|connection| {
            connection.metadata.namespace.as_deref() == Some(namespace)
                && connection.spec.gateway_ref.name.as_deref() == Some(name)
        });
        let told = connection.and_then(|connection| connection.status.clone());
        let state = state(told.as_ref().map(|told| told.value), liveness);
        let latency = told.and_then(|told| Some(told.latency?.value));
        let status = config.status.clone().unwrap_or_default();
        Peering {
            cluster: config.spec.peer_cluster_id.clone(),
            namespace: namespace.to_owned(),
            gateway: Some(name.to_owned()),
            role: Some(config.spec.role),
            state,
            latency: latency.filter(|_| state == State::Connected),
            remaps: config.spec.remaps.clone(),
            received_bytes: status.received_bytes,
            transmitted_bytes: status.transmitted_bytes,
            last_handshake: status.last_handshake,
            mtu: Some(status.mtu).filter(|mtu| *mtu > 0),
            mtu_bound: status.mtu_bound,
            path_mtu: status.path_mtu,
            endpoint: status.peer_endpoint,
            node: config.spec.overlay.node.clone(),
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

    fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        for row in self.waiting().iter().filter(|row| row.gateway.is_none()) {
            found.push(format!(
                "peering with {}: no GatewayServer or GatewayClient yet in namespace {}",
                row.cluster, row.namespace
            ));
        }
        for configuration in &self.configurations {
            let meta = &configuration.metadata;
            let conditions = configuration.status.iter().flat_map(|status| &status.conditions);
            for condition in conditions.filter(|condition| condition.status == "False") {
                found.push(format!(
                    "Configuration {}/{}: {}: {}",
                    meta.namespace.as_deref().unwrap_or_default(),
                    meta.name.as_deref().unwrap_or_default(),
                    condition.reason,
                    condition.message
                ));
            }
        }
        for node in &self.nodes {
            let name = node.metadata.name.as_deref().unwrap_or_default();
            let told = node.status.iter().flat_map(|status| &status.problems);
            found.extend(told.map(|problem| format!("node {name}: {problem}")));
        }
        found
    }
}

/// What the Connection says is believed only of a gateway that runs and answers, or that runs on
/// another host.
fn state(told: Option<ConnectionValue>, liveness: Option<Option<Liveness>>) -> State {
    match (liveness, told) {
        (Some(None), _) => State::Down,
        (Some(Some(Liveness::Silent)), Some(ConnectionValue::Connected))
        | (_, Some(ConnectionValue::Error)) => State::Error,
        (Some(Some(Liveness::Silent)), None) => State::Connecting,
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weft::workloads::tests::config;

    fn connection(value: ConnectionValue) -> Connection {
        let mut connection: Connection = serde_json::from_value(serde_json::json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
            "metadata": {"name": "gw-client", "namespace": "t"},
            "spec": {"type": "Client", "gatewayRef": {"name": "client"}},
            "status": {"value": "Connected", "latency": {"value": "3ms"}},
        }))
        .unwrap();
        connection.status.as_mut().unwrap().value = value;
        connection
    }

    fn snapshot(objects: impl IntoIterator<Item = Object>) -> Snapshot {
        let objects = objects.into_iter().map(|object| (object.reference(), object)).collect();
        Snapshot { objects, problems: Vec::new() }
    }

    fn host(running: &[(&str, Liveness)]) -> Host {
        let running = running.iter().map(|(name, how)| ((*name).to_owned(), *how)).collect();
        Host { node: "n1".to_owned(), supervised: true, running, ..Host::default() }
    }

    #[test]
    fn a_peering_is_down_without_its_process_whatever_its_connection_says() {
        let objects = snapshot([
            config("t", "client", "n1").into(),
            connection(ConnectionValue::Connected).into(),
        ]);
        for (running, expected) in [
            (vec![("gateway-t-client", Liveness::Answers)], State::Connected),
            (vec![("gateway-t-client", Liveness::Silent)], State::Error),
            (vec![], State::Down),
        ] {
            let seen = observe(&objects, &host(&running));
            assert_eq!(seen.peerings[0].state, expected);
            assert_eq!(seen.peerings[0].latency.is_some(), expected == State::Connected);
        }
    }

    #[test]
    fn a_gateway_that_has_just_started_is_connecting() {
        let objects = snapshot([config("t", "client", "n1").into()]);
        let seen = observe(&objects, &host(&[("gateway-t-client", Liveness::Silent)]));
        assert_eq!(seen.peerings[0].state, State::Connecting);
    }

    #[test]
    fn a_gateway_of_another_host_is_believed() {
        let mut host = host(&[]);
        host.node = "n2".to_owned();
        let objects = snapshot([
            config("t", "client", "n1").into(),
            connection(ConnectionValue::Connected).into(),
        ]);
        assert_eq!(observe(&objects, &host).peerings[0].state, State::Connected);
    }

    #[test]
    fn a_peering_without_gateway_waits_and_says_for_what() {
        let mut configuration = Configuration::new("paris", Default::default());
        configuration.metadata.namespace = Some("liqo-tenant-paris".to_owned());
        configuration.metadata.labels =
            Some([(labels::REMOTE_CLUSTER_ID.to_owned(), "paris".to_owned())].into());
        let seen = observe(&snapshot([configuration.into()]), &host(&[]));
        assert_eq!(
            (seen.peerings[0].cluster.as_str(), seen.peerings[0].state),
            ("paris", State::Waiting)
        );
        assert!(seen.problems[0].contains("no GatewayServer or GatewayClient yet"), "{seen:?}");
    }
}
