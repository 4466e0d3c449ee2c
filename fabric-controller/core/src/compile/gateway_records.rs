//! GatewayRecords to publish: one for the cluster, one for each node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{
    AddressMap, GatewayClusterRecord, GatewayConfig, GatewayRecord, GatewayRecordSpec, NodeRecord,
    PeerPrefixes, Record as _,
};
use fabric_index::Index;
use fabric_model::cluster::Node;
use fabric_model::{Cluster, Gateway, Mapping, Peering};
use fabric_objects::{Kind, ObjectRef};
use jiff::{SignedDuration, Timestamp};

use super::desired::Desired;
use super::uncertain::Uncertain;

/// Time after which a gateway that has applied nothing may be one that reads no records. Much longer than
/// an API server under load takes: what it then gets is large.
const MAX_START: SignedDuration = SignedDuration::from_secs(60);

/// Contents of all GatewayRecords.
pub(super) struct GatewayRecords {
    pub(super) cluster: GatewayClusterRecord,
    /// Nodes as all gateways see them, by name.
    pub(super) nodes: BTreeMap<String, NodeRecord>,
}

impl GatewayRecords {
    pub(super) fn objects(&self) -> Desired {
        let mut desired = Desired::default();
        for (name, node) in &self.nodes {
            let spec = GatewayRecordSpec { node: Some(node.clone()), cluster: None };
            desired.want(GatewayRecord::new(&GatewayRecord::name_of(name), spec));
        }
        let spec = GatewayRecordSpec { cluster: Some(self.cluster.clone()), node: None };
        desired.want(GatewayRecord::new(GatewayRecord::CLUSTER, spec));
        desired
    }
}

/// Records of the nodes, and of those that may just be out of sight.
pub(super) fn of_nodes(
    index: &Index,
    cluster: &Cluster,
    mappings: &[Mapping],
    uncertain: &Uncertain<'_>,
) -> BTreeMap<String, NodeRecord> {
    let records = cluster.nodes.iter().filter_map(|node| node_record(node, mappings));
    let mut all: BTreeMap<_, _> = records.map(|record| (record.name.clone(), record)).collect();
    if uncertain.is_empty() {
        return all;
    }
    for (name, record) in published_nodes(index) {
        if uncertain.node_may_still_be(&name) {
            all.entry(name).or_insert(record);
        }
    }
    all
}

/// Nodes as they are published: in records, or by a controller that had none, to gateways.
fn published_nodes(index: &Index) -> BTreeMap<String, NodeRecord> {
    let mut all = BTreeMap::new();
    let configs = index.all::<GatewayConfig>(Kind::GatewayConfig);
    for node in configs.flat_map(|(_, config)| &config.spec.nodes) {
        let known = all.entry(node.name.clone()).or_insert_with(|| NodeRecord {
            name: node.name.clone(),
            overlay: node.overlay,
            mac: node.mac.clone(),
            underlay: Vec::new(),
            prefixes: node.prefixes.clone(),
        });
        if !known.underlay.contains(&node.underlay) {
            known.underlay.push(node.underlay);
        }
    }
    let records = index.all::<GatewayRecord>(Kind::GatewayRecord);
    let records = records.filter_map(|(_, record)| record.spec.node.clone());
    all.extend(records.map(|record| (record.name.clone(), record)));
    all
}

/// Returns true if a gateway's own part is all that it needs in its config: while it acknowledges some
/// records, and in Kubernetes, where its image comes with this controller, also before it could. Others
/// get all of it until they have acknowledged the newest records, as does one that acknowledges none: it
/// was replaced by an older version, or may not read them.
pub(super) fn are_read_by(index: &Index, gateway: &Gateway<'_>, now: Timestamp) -> bool {
    let Some(config) = gateway.published(index) else { return index.settings.kubernetes };
    let read = config.status.as_ref().and_then(|status| status.records.as_ref());
    if config.spec.from_records {
        let cluster = ObjectRef::new(Kind::GatewayRecord, "", GatewayRecord::CLUSTER);
        let cluster = index.get(&cluster);
        return match read {
            Some(read) => cluster.is_some_and(|cluster| read.uid == cluster.uid()),
            None => index.settings.kubernetes && is_starting(config, now),
        };
    }
    let newest = index.gateway_records.as_ref();
    read.zip(newest).is_some_and(|(read, newest)| read.includes(newest))
}

/// Returns true if a gateway has applied nothing yet, and its config is new.
fn is_starting(config: &GatewayConfig, now: Timestamp) -> bool {
    let has_applied = config.status.as_ref().is_some_and(|status| status.applied_generation > 0);
    let created = config.metadata.creation_timestamp.as_ref();
    !has_applied && created.is_none_or(|created| now.duration_since(created.0) < MAX_START)
}

/// `None` until the node has an overlay address.
fn node_record(node: &Node, mappings: &[Mapping]) -> Option<NodeRecord> {
    let mapped = mappings.iter().filter(|mapping| mapping.is_of(node));
    let mapped = mapped.map(|mapping| mapping.external);
    let hosts = node.external.iter().copied().chain(mapped).map(Cidr::host);
    Some(NodeRecord {
        name: node.name.clone(),
        overlay: node.overlay?,
        mac: node.mac.clone(),
        underlay: node.underlay.clone(),
        prefixes: node.pods.iter().copied().chain(hosts).map(|cidr| cidr.to_string()).collect(),
    })
}

/// Record of the cluster, to be sealed.
pub(super) fn of_cluster(
    cluster: &Cluster,
    peerings: &[Peering<'_>],
    mappings: &[Mapping],
) -> GatewayClusterRecord {
    let stateless = mappings.iter().filter(|mapping| mapping.stateless);
    let network_address = |ipv4| Some(cluster.external_of(ipv4)?.cidr.address());
    GatewayClusterRecord {
        digest: String::new(),
        pod_cidrs: cluster.pods.iter().map(Cidr::to_string).collect(),
        external_cidrs: cluster.external_cidrs().map(|cidr| cidr.to_string()).collect(),
        ips: stateless.map(|m| AddressMap { external: m.external, target: m.target }).collect(),
        icmp_sources: [true, false].into_iter().filter_map(network_address).collect(),
        peers: peers(peerings),
        egress: egress(cluster, mappings),
    }
}

/// Peers that have prefixes here, sorted.
fn peers(peerings: &[Peering<'_>]) -> Vec<PeerPrefixes> {
    let good = peerings.iter().filter(|peering| peering.fault.is_none());
    let peers = good.map(|peering| (peering.peer(), peering.sorted_prefixes()));
    let peers: BTreeMap<_, _> = peers.filter(|(_, prefixes)| !prefixes.is_empty()).collect();
    let named = |(peer_cluster_id, prefixes)| PeerPrefixes { peer_cluster_id, prefixes };
    peers.into_iter().map(named).collect()
}

/// Prefixes of IP resources that no node of its own rewrites.
fn egress(cluster: &Cluster, mappings: &[Mapping]) -> Vec<String> {
    let elsewhere = |m: &&Mapping| !cluster.nodes.iter().any(|node| m.is_of(node));
    let address = |m: &Mapping| -> IpAddr { if m.stateless { m.target } else { m.external } };
    let all: BTreeSet<Cidr> =
        mappings.iter().filter(elsewhere).map(|mapping| Cidr::host(address(mapping))).collect();
    all.iter().map(Cidr::to_string).collect()
}
