//! Statuses of the user's own objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fabric_api::fabric::{GatewayConfig, GatewayConfigStatus, PeeringFault, RemapKind};
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::{
    CidrList, ClusterCidrs, Configuration, EndpointStatus, InternalEndpoint, SideConfig,
};
use fabric_objects::{Kind, Object, ObjectRef, Problem};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::Compiler;
use super::cluster::Cluster;
use super::conditions::{self, Readiness};
use super::gateway::{End, Gateway};
use super::peering::Peering;
use crate::index::Index;

impl<'a> Compiler<'a> {
    pub(super) fn configuration_statuses(&mut self, cluster: &Cluster, peerings: &[Peering<'_>]) {
        for peering in peerings {
            let mut configuration: Configuration = peering.configuration.clone();
            let readiness = self.readiness(cluster, peering);
            let status = configuration.status.get_or_insert_default();
            if matches!(readiness, Readiness::Configured) {
                status.remote = Some(as_seen_here(peering));
            }
            let newest = configuration.metadata.generation.unwrap_or_default();
            // A newer version that is not used is not covered by this condition.
            let used = conditions::observed(&status.conditions).filter(|_| self.is_kept(peering));
            let generation = used.unwrap_or(newest);
            conditions::set(&mut status.conditions, &readiness, generation, self.now);
            self.out.awaits_nodes |= matches!(readiness, Readiness::Routing(_));
            if cluster.is_ready() {
                configuration.spec.local = Some(own_side(cluster));
            }
            self.out.statuses.insert(peering.reference.clone(), configuration.into());
        }
    }

    /// Its newest version is wrong, and the last good one stays in use.
    fn is_kept(&self, peering: &Peering<'_>) -> bool {
        let mut faulty = self.index.file_problems().iter().filter_map(|p| p.object.as_ref());
        peering.fault.is_none() && faulty.any(|object| *object == peering.reference)
    }

    fn readiness(&self, cluster: &Cluster, peering: &Peering<'_>) -> Readiness {
        if let Some(fault) = &peering.fault {
            return Readiness::Invalid(fault.clone());
        }
        if peering.is_ready() {
            if is_told(peering) {
                return Readiness::Configured;
            }
            let nodes = self.without_routes(cluster, peering);
            return match nodes.is_empty() {
                true => Readiness::Configured,
                false => Readiness::Routing(self.without_agent(&nodes)),
            };
        }
        if !cluster.is_ready() {
            let what = "the cluster's own pod, external and internal CIDR are not there yet";
            return Readiness::Waiting(what.to_owned());
        }
        let missing = peering.remotes.iter().filter(|remote| remote.granted.is_none());
        let reasons = missing.map(|remote| match self.index.denial(&remote.network) {
            Some(reason) => format!("{}: {reason}", remote.cidr),
            None => remote.cidr.to_string(),
        });
        Readiness::Waiting(reasons.collect::<Vec<_>>().join(", "))
    }

    /// Names only nodes that are slow, and no more than three: with hundreds, each acknowledgement would
    /// change the condition of each peering.
    fn without_agent(&self, nodes: &[String]) -> String {
        let slow: Vec<_> =
            nodes.iter().filter(|node| self.index.slow_nodes.contains(*node)).collect();
        let names = match &slow[..] {
            [] => return "nodes are making routes".to_owned(),
            [_, _, _, _, ..] => "more than three nodes".to_owned(),
            few => few.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", "),
        };
        let remedy = match (self.index.settings.kubernetes, &slow[..]) {
            (true, _) => "see whether weft's route-agent pods run there".to_owned(),
            (false, [node]) => format!("run `weft agent --node {node}` there, if it does not run"),
            (false, _) => "run `weft agent --node NAME` on each, if it does not run".to_owned(),
        };
        format!("no routes yet on {names}; {remedy}")
    }

    /// Nodes that would send what is for the peer along their default route, in clear. Those that do not
    /// answer are not among them.
    fn without_routes(&self, cluster: &Cluster, peering: &Peering<'_>) -> Vec<String> {
        let (peer, prefixes) = (peering.peer(), peering.sorted_prefixes());
        let has_routes = |name: &str| self.index.has_routes(name, &peer, &prefixes);
        let names = cluster.nodes.iter().map(|node| &node.name);
        let awaited = names.filter(|name| !self.index.lagging_nodes.contains(*name));
        awaited.filter(|name| !has_routes(name)).cloned().collect()
    }

    /// Sets on each object whether its newest manifest is used, and why not.
    pub(super) fn acceptance(&mut self) {
        let index = self.index;
        for kind in [Kind::Configuration, Kind::GatewayServer, Kind::GatewayClient] {
            for (reference, object) in index.of_kind(kind) {
                let wrong = self.wrong_with(reference);
                let faults = self.faults_of(reference, object);
                let planned = self.out.statuses.remove(reference);
                let mut object = planned.unwrap_or_else(|| object.clone());
                let generation = object.generation();
                let has_news = !wrong.is_empty() || !faults.is_empty();
                if let Some(conditions) = conditions_of(&mut object, has_news) {
                    conditions::accept(conditions, &wrong, generation, self.now);
                    conditions::report_peer(conditions, &faults, generation, self.now);
                }
                self.out.statuses.insert(reference.clone(), object);
            }
        }
    }

    /// The trouble with a peer that gateways report and that concerns an object.
    fn faults_of(&self, reference: &ObjectRef, object: &Object) -> Vec<&'a PeeringFault> {
        let index = self.index;
        let faults = |config: &'a GatewayConfig| {
            config.status.iter().flat_map(|status: &'a GatewayConfigStatus| &status.faults)
        };
        let Object::Configuration(configuration) = object else {
            let config = ObjectRef { kind: Kind::GatewayConfig, ..reference.clone() };
            return index.typed::<GatewayConfig>(&config).into_iter().flat_map(faults).collect();
        };
        let label = |labels: &'_ BTreeMap<String, String>| labels.get(REMOTE_CLUSTER_ID).cloned();
        let peer = configuration.metadata.labels.as_ref().and_then(label);
        let configs = index.all::<GatewayConfig>(Kind::GatewayConfig);
        let of_peer = configs.filter(|(config, of)| {
            config.namespace == reference.namespace
                && Some(&of.spec.peer_cluster_id) == peer.as_ref()
        });
        let all = of_peer.flat_map(|(_, config)| faults(config));
        all.filter(|fault| fault.reason == PeeringFault::CIDR_MISMATCH).collect()
    }

    /// All problems of an object but what it merely waits for. Keys have no status of their own:
    /// their problems are reported by the gateway that needs them.
    fn wrong_with(&self, object: &ObjectRef) -> String {
        let is_about = |problem: &Problem, one| problem.object.as_ref() == Some(one);
        let needed = self.needed.get(object);
        let is_needed =
            |problem: &Problem| needed.into_iter().flatten().any(|one| is_about(problem, one));
        let all = self.out.problems.iter();
        let all = all.filter(|problem| !problem.message.starts_with("waits for"));
        let texts: BTreeSet<String> = all
            .filter_map(|problem| match is_about(problem, object) {
                true => Some(Problem { object: None, ..problem.clone() }.to_string()),
                false => is_needed(problem).then(|| problem.to_string()),
            })
            .collect();
        texts.into_iter().collect::<Vec<_>>().join("; ")
    }

    pub(super) fn gateway_statuses(&mut self, cluster: &Cluster, gateways: &[Gateway<'_>]) {
        for gateway in gateways {
            let config = self.config_of(gateway).cloned();
            let (Some(settings), Some(config)) = (&gateway.settings, config) else { continue };
            let secret = ObjectReference {
                namespace: gateway.reference.namespace.clone(),
                name: Some(settings.secret_name.clone()),
                ..ObjectReference::default()
            };
            let internal = config.spec.overlay.link_address.map(|link| InternalEndpoint {
                ip: Some(link.to_string()),
                node: config.spec.overlay.node.clone(),
            });
            let object = match gateway.end {
                End::Server(server) => {
                    let mut server = server.clone();
                    let status = server.status.get_or_insert_default();
                    status.server_ref = Some(reference_to(&config));
                    status.secret_ref = Some(secret);
                    status.internal_endpoint = internal;
                    let balancer = server.spec.endpoint.load_balancer_ip.clone();
                    status.endpoint = Some(endpoint(cluster, &config, balancer));
                    server.into()
                }
                End::Client(client) => {
                    let mut client = client.clone();
                    let status = client.status.get_or_insert_default();
                    status.client_ref = Some(reference_to(&config));
                    status.secret_ref = Some(secret);
                    status.internal_endpoint = internal;
                    client.into()
                }
            };
            self.out.statuses.insert(gateway.reference.clone(), object);
        }
    }
}

/// Objects of the user as they are while something that the controller needs cannot be read, for which
/// reason `why` nothing is compiled.
pub fn unreadable(index: &Index, why: &str, now: Timestamp) -> Vec<Object> {
    let kinds = [Kind::Configuration, Kind::GatewayServer, Kind::GatewayClient];
    let mut objects: Vec<Object> =
        kinds.into_iter().flat_map(|kind| index.of_kind(kind)).map(|(_, o)| o.clone()).collect();
    for object in &mut objects {
        let generation = object.generation();
        if let Some(conditions) = conditions_of(object, true) {
            conditions::unreadable(conditions, why, generation, now);
        }
    }
    objects
}

/// Conditions of the kinds whose status has them; `make` a status if there is none.
pub(super) fn conditions_of(object: &mut Object, make: bool) -> Option<&mut Vec<Condition>> {
    fn status<T: Default>(of: &mut Option<T>, make: bool) -> Option<&mut T> {
        if make { Some(of.get_or_insert_default()) } else { of.as_mut() }
    }
    match object {
        Object::Configuration(x) => {
            Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
        }
        Object::GatewayServer(x) => {
            Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
        }
        Object::GatewayClient(x) => {
            Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
        }
        Object::Namespace(_)
        | Object::ConfigMap(_)
        | Object::Secret(_)
        | Object::Node(_)
        | Object::Network(_)
        | Object::Ip(_)
        | Object::Connection(_)
        | Object::PublicKey(_)
        | Object::GatewayConfig(_)
        | Object::NodeConfig(_)
        | Object::FabricRecord(_)
        | Object::GatewayRecord(_) => None,
    }
}

/// True if the status has the prefixes as seen here. They stay there: each change of a node's
/// config makes that unapplied for a moment.
fn is_told(peering: &Peering<'_>) -> bool {
    let status = peering.configuration.status.as_ref();
    status.is_some_and(|status| status.remote.as_ref() == Some(&as_seen_here(peering)))
}

/// Index by index as in `spec.remote`.
fn as_seen_here(peering: &Peering<'_>) -> SideConfig {
    let list = |kind: RemapKind| {
        let of_kind = peering.remotes.iter().filter(|remote| remote.kind == kind);
        CidrList(of_kind.filter_map(|r| r.granted).map(|cidr| cidr.to_string()).collect())
    };
    let cidr = ClusterCidrs { pod: list(RemapKind::Pod), external: list(RemapKind::External) };
    SideConfig { cidr }
}

fn own_side(cluster: &Cluster) -> SideConfig {
    let pod = CidrList(cluster.pods.iter().map(ToString::to_string).collect());
    let external = CidrList(cluster.external_cidrs().map(|cidr| cidr.to_string()).collect());
    SideConfig { cidr: ClusterCidrs { pod, external } }
}

/// Endpoint of this server for the peer's client.
fn endpoint(cluster: &Cluster, config: &GatewayConfig, balancer: Option<String>) -> EndpointStatus {
    let host = config.spec.overlay.node.as_deref().and_then(|name| cluster.node(name));
    let own = host.map(|host| host.underlay.iter().map(ToString::to_string).collect());
    let balancer = balancer.filter(|address| !address.is_empty()).map(|address| vec![address]);
    EndpointStatus {
        addresses: balancer.or(own).unwrap_or_default(),
        port: config.spec.listen_port.map(i32::from),
        ports: Vec::new(),
        protocol: Some("UDP".to_owned()),
    }
}

/// Reference to the GatewayConfig made from a gateway's manifest.
fn reference_to(config: &GatewayConfig) -> ObjectReference {
    ObjectReference {
        api_version: Some(Kind::GatewayConfig.api_version().to_owned()),
        kind: Some(Kind::GatewayConfig.as_str().to_owned()),
        namespace: config.metadata.namespace.clone(),
        name: config.metadata.name.clone(),
        ..ObjectReference::default()
    }
}
