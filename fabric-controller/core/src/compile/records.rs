//! FabricRecords to publish: one for the cluster, one for each peering.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{
    ClusterRecord, FabricRecord, FabricRecordSpec, GatewayConfig, GatewayProbe, NO_MTU,
    NodeAddressMap, NodeConfig, NodeConfigSpec, NodePeering, PeeringGateway, PeeringRecord,
    Record as _, RefusedPrefix,
};
use fabric_api::networking::ConnectionValue;
use fabric_index::Index;
use fabric_model::names::{of_node, of_record};
use fabric_model::{Cluster, Gateway, Mapping, Peering};
use fabric_objects::Kind;

use super::desired::Desired;
use super::placed::{internal_endpoint, pod_address, replicas};

/// Peerings as all nodes see them, by peer.
pub(super) type PeeringRecords = BTreeMap<String, PeeringRecord>;

/// All that the record of a peering follows from.
pub(super) struct Sources<'a> {
    pub(super) index: &'a Index,
    pub(super) cluster: &'a Cluster,
    pub(super) gateways: &'a [Gateway<'a>],
    /// GatewayConfigs, among others.
    pub(super) desired: &'a Desired,
}

/// Records of all peerings. One that is not ready keeps its record.
pub(super) fn of_peerings(sources: &Sources<'_>, peerings: &[Peering<'_>]) -> PeeringRecords {
    let index = sources.index;
    let is_certain = index.is_whole() && peerings.iter().all(Peering::is_ready);
    let published = if is_certain { PeeringRecords::new() } else { published_peerings(index) };
    let mut all = PeeringRecords::new();
    for peering in peerings {
        let Some(id) = &peering.id else { continue };
        let before = published.get(id.as_str()).cloned();
        let record = if peering.is_ready() {
            let mut record = peering_record(sources, peering);
            // Its gateway, or the host of that, may be in a file that cannot be read.
            let unread = record.gateway.is_none() && !index.is_whole();
            if let Some(before) = before.filter(|_| unread) {
                (record.gateway, record.mtu) = (before.gateway, before.mtu);
            }
            Some(record)
        } else {
            let mut others = peerings.iter();
            let has_other = others.any(|other| other.is_with(id) && other.is_ready());
            before.filter(|_| !has_other)
        };
        if let Some(record) = record {
            all.entry(id.to_string()).or_insert(record);
        }
    }
    for (peer, record) in published {
        if index.peer_may_be_unread(&peer) {
            all.entry(peer).or_insert(record);
        }
    }
    all
}

/// Peerings as they are published: in records, or by a controller that had none, to nodes.
fn published_peerings(index: &Index) -> PeeringRecords {
    let records = index.all::<FabricRecord>(Kind::FabricRecord);
    let records = records.filter_map(|(_, record)| record.spec.peering.clone());
    let mut all: PeeringRecords =
        records.map(|record| (record.peer_cluster_id.clone(), record)).collect();
    let mut of_nodes: BTreeMap<&str, Vec<(&NodeConfig, &NodePeering)>> = BTreeMap::new();
    for (_, config) in index.all::<NodeConfig>(Kind::NodeConfig) {
        for peering in config.spec.peerings.iter().filter(|_| !config.spec.removed) {
            of_nodes.entry(&peering.peer_cluster_id).or_default().push((config, peering));
        }
    }
    for (peer, of_peer) in of_nodes {
        if let Some((_, first)) = of_peer.first() {
            all.entry(peer.to_owned()).or_insert_with(|| PeeringRecord {
                peer_cluster_id: peer.to_owned(),
                prefixes: first.prefixes.clone(),
                connected: first.connected,
                mtu: first.mtu,
                gateway: gateway_of_nodes(&of_peer),
            });
        }
    }
    all
}

fn peering_record(sources: &Sources<'_>, peering: &Peering<'_>) -> PeeringRecord {
    let Sources { index, gateways, desired, .. } = sources;
    let gateway = gateways.iter().find(|gateway| peering.is_with(&gateway.peer));
    let config = gateway.and_then(|gateway| desired.config_of(index, gateway));
    let status = gateway.and_then(|gateway| index.typed::<GatewayConfig>(&gateway.config()));
    let in_force = status.and_then(|c| c.status.as_ref()).map(|s| s.mtu).filter(|mtu| *mtu > 0);
    let ends = gateway.zip(config);
    let ends = ends.and_then(|(gateway, config)| ends_of(sources, gateway, config));
    PeeringRecord {
        peer_cluster_id: peering.peer(),
        prefixes: peering.sorted_prefixes(),
        connected: gateway.is_some_and(|gateway| is_connected(index, gateway)),
        mtu: in_force.or_else(|| config.map(|c| c.spec.mtu)).unwrap_or(NO_MTU),
        gateway: ends.map(|of| {
            let probe = status.and_then(|status| probe_of(status, of.node.as_ref()));
            PeeringGateway { probe, ..of }
        }),
    }
}

/// The gateway's end of the overlay, and where VXLAN to it goes.
fn ends_of(
    Sources { index, cluster, .. }: &Sources<'_>,
    gateway: &Gateway<'_>,
    config: &GatewayConfig,
) -> Option<PeeringGateway> {
    let own = config.spec.overlay.clone();
    let mut ends = PeeringGateway {
        overlay: own.address,
        mac: own.mac,
        node: own.node,
        underlay: Vec::new(),
        links: Vec::new(),
        listen_port: None,
        node_addresses: Vec::new(),
        probe: None,
        replicas: Vec::new(),
        epoch: None,
    };
    if index.settings.kubernetes {
        ends.underlay.push(pod_address(index, gateway)?);
        let host = internal_endpoint(index, gateway).and_then(|internal| internal.node);
        // Also of those that have no tunnel yet: nodes take their packets from the first one on.
        let replicas = replicas(index, gateway);
        let hosts: BTreeSet<_> =
            host.iter().chain(replicas.iter().map(|replica| &replica.node)).collect();
        let hosts = hosts.into_iter().filter_map(|name| cluster.node(name));
        ends.node_addresses = hosts.flat_map(|host| host.underlay.clone()).collect();
        let addresses = replicas.iter().map(|replica| replica.address);
        let others = addresses.clone().filter(|address| !ends.underlay.contains(address));
        ends.node_addresses.extend(others);
        // One on a node without its Node is no replica any more, and may have the tunnel for a moment.
        if addresses.clone().any(|address| !ends.underlay.contains(&address)) {
            let reported = index.typed::<GatewayConfig>(&gateway.config());
            let active = reported.and_then(|config| config.status.as_ref()?.active);
            let active = active.filter(|active| ends.underlay.contains(&active.address));
            (ends.replicas, ends.epoch) = (addresses.collect(), active.map(|active| active.epoch));
        }
    } else {
        let host = cluster.node(ends.node.as_deref()?)?;
        let links = [own.link_address.map(IpAddr::V4), own.link_address_v6.map(IpAddr::V6)];
        let has = |link: &IpAddr| host.underlay.iter().any(|a| a.is_ipv4() == link.is_ipv4());
        ends.links = links.into_iter().flatten().filter(has).collect();
        ends.underlay.clone_from(&host.underlay);
        ends.listen_port = config.spec.listen_port;
    }
    Some(ends)
}

fn is_connected(index: &Index, gateway: &Gateway<'_>) -> bool {
    let own = index.connections(&gateway.reference, &gateway.uid);
    let mut values = own.filter_map(|connection| connection.status.as_ref());
    values.any(|status| status.value == ConnectionValue::Connected)
}

/// Record of the cluster, to be sealed.
pub(super) fn of_cluster(
    cluster: &Cluster,
    mappings: &[Mapping],
    refused: Vec<RefusedPrefix>,
) -> ClusterRecord {
    ClusterRecord {
        digest: String::new(),
        pod_cidrs: cluster.pods.iter().map(Cidr::to_string).collect(),
        internal_cidr: cluster.internal.as_ref().map(|granted| granted.cidr.to_string()),
        // All of them: a node's own pods send to those addresses, too.
        ips: mappings.iter().map(node_mapping).collect(),
        refused,
    }
}

pub(super) fn objects(cluster: &ClusterRecord, peerings: &PeeringRecords) -> Desired {
    let mut desired = Desired::default();
    for (peer, record) in peerings {
        let spec = FabricRecordSpec { peering: Some(record.clone()), cluster: None };
        desired.want(FabricRecord::new(&FabricRecord::name_of(peer), spec));
    }
    let spec = FabricRecordSpec { cluster: Some(cluster.clone()), peering: None };
    desired.want(FabricRecord::new(FabricRecord::CLUSTER, spec));
    desired
}

/// Prefixes that records have, with their peers.
pub(super) fn recorded_prefixes(index: &Index) -> impl Iterator<Item = (&str, &str)> {
    let records = index.all::<FabricRecord>(Kind::FabricRecord);
    let peerings = records.filter_map(|(_, record)| record.spec.peering.as_ref());
    peerings.flat_map(|of| {
        of.prefixes.iter().map(|prefix| (prefix.as_str(), of.peer_cluster_id.as_str()))
    })
}

/// Prefixes that the stored record of the cluster has nodes refuse.
pub(super) fn recorded_refused(index: &Index) -> &[RefusedPrefix] {
    let cluster = index.typed::<FabricRecord>(&of_record(FabricRecord::CLUSTER));
    let cluster = cluster.and_then(|record| record.spec.cluster.as_ref());
    cluster.map(|cluster| cluster.refused.as_slice()).unwrap_or_default()
}

/// Returns true if a node refuses these prefixes without having them in its own part of its config: its
/// agent reads them in the cluster's record, and has read those that are to leave the config.
pub(super) fn are_refused_by(index: &Index, node: &str, refused: &[RefusedPrefix]) -> bool {
    let Some(config) = index.typed::<NodeConfig>(&of_node(node)) else { return false };
    let has_newest = || {
        let read = config.status.as_ref().and_then(|status| status.records.as_ref());
        let newest = index.records.as_ref();
        read.zip(newest).is_some_and(|(read, newest)| read.includes(newest))
            && recorded_refused(index) == refused
    };
    config.status.as_ref().is_some_and(|status| status.refuses_recorded)
        && (config.spec.refused.is_empty() || has_newest())
}

/// Returns true if a node's own part is all that it needs in its config. An agent that shows no
/// newer records, such as one that was replaced by an older version, gets all of it again.
pub(super) fn are_read_by(index: &Index, node: &str) -> bool {
    let is_stalled = index.stalled_nodes.contains(node);
    let Some(read) = index.records_read(node).filter(|_| !is_stalled) else {
        return false;
    };
    let config = index.typed::<NodeConfig>(&of_node(node));
    if config.is_some_and(|config| config.spec.from_records) {
        let cluster = index.typed::<FabricRecord>(&of_record(FabricRecord::CLUSTER));
        let uid = cluster.and_then(|cluster| cluster.metadata.uid.as_ref());
        return Some(&read.uid) == uid;
    }
    index.records.as_ref().is_some_and(|newest| read.includes(newest))
}

/// A gateway as it was published to the nodes of its cluster, each of which had its own part of it.
fn gateway_of_nodes(of_nodes: &[(&NodeConfig, &NodePeering)]) -> Option<PeeringGateway> {
    let mut found: Option<PeeringGateway> = None;
    for (config, peering) in of_nodes {
        let Some(of_node) = &peering.gateway else { continue };
        let gateway = found.get_or_insert_with(|| PeeringGateway {
            overlay: of_node.overlay,
            mac: of_node.mac.clone(),
            node: of_node.probe.as_ref().and_then(|probe| probe.node.clone()),
            underlay: Vec::new(),
            links: Vec::new(),
            listen_port: None,
            node_addresses: other_sources(&config.spec),
            probe: of_node.probe.clone(),
            replicas: of_node.replicas.clone(),
            epoch: of_node.epoch,
        });
        if !of_node.links.is_empty() {
            gateway.links.clone_from(&of_node.links);
            gateway.listen_port = of_node.listen_port;
            gateway.node.clone_from(&config.metadata.name);
            gateway.underlay.clone_from(&config.spec.underlay);
        } else if !gateway.underlay.contains(&of_node.underlay) && gateway.links.is_empty() {
            gateway.underlay.push(of_node.underlay);
        }
    }
    found
}

/// Sources of VXLAN that are no gateway's end: in Kubernetes, addresses of nodes that have gateways.
fn other_sources(config: &NodeConfigSpec) -> Vec<IpAddr> {
    let gateways = || config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
    let is_end = |source: &&IpAddr| gateways().any(|gateway| gateway.underlay == **source);
    config.vxlan_sources.iter().filter(|source| !is_end(source)).copied().collect()
}

fn node_mapping(mapping: &Mapping) -> NodeAddressMap {
    let Mapping { external, target, masquerade, .. } = *mapping;
    NodeAddressMap { external, target, masquerade }
}

/// An older gateway answers none.
fn probe_of(gateway: &GatewayConfig, node: Option<&String>) -> Option<GatewayProbe> {
    let port = gateway.status.as_ref()?.overlay_probe_port?;
    Some(GatewayProbe { port, node: node.cloned() })
}
