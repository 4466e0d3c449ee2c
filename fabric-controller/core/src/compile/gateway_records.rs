//! GatewayRecords to publish: one for the cluster, one for each node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{
    AddressMap, GatewayClusterRecord, GatewayConfig, GatewayRecord, GatewayRecordSpec, NodeRecord,
    PeerPrefixes, Record as _,
};
use fabric_objects::{Kind, ObjectRef};

use super::Compiler;
use super::cluster::{Cluster, Node};
use super::gateway::Gateway;
use super::mappings::Mapping;
use super::peering::Peering;
use super::seal::stored;

/// Nodes as all gateways see them, by name.
type NodeRecords = BTreeMap<String, NodeRecord>;

/// Contents of all GatewayRecords.
pub(super) struct GatewayRecords {
    pub(super) cluster: GatewayClusterRecord,
    pub(super) nodes: NodeRecords,
}

impl Compiler<'_> {
    /// Wants the records of a cluster that is ready, and leaves them alone while too little is known
    /// of it. The cluster's names those of the nodes that the store has: it is sealed once others are
    /// there.
    pub(super) fn gateway_records(
        &mut self,
        cluster: &Cluster,
        peerings: &[Peering<'_>],
        mappings: &[Mapping],
    ) -> Option<GatewayRecords> {
        if !cluster.is_ready() {
            self.keep_all(Kind::GatewayRecord);
            return None;
        }
        let nodes = self.node_records(cluster, mappings);
        for (name, node) in &nodes {
            let spec = GatewayRecordSpec { node: Some(node.clone()), cluster: None };
            self.want(GatewayRecord::new(&GatewayRecord::name_of(name), spec));
        }
        let digest = stored::<GatewayRecord>(self.index, Kind::GatewayRecord, &self.out.objects);
        let record = cluster_record(cluster, peerings, mappings, digest);
        let spec = GatewayRecordSpec { cluster: Some(record.clone()), node: None };
        self.want(GatewayRecord::new(GatewayRecord::CLUSTER, spec));
        Some(GatewayRecords { cluster: record, nodes })
    }

    fn node_records(&self, cluster: &Cluster, mappings: &[Mapping]) -> NodeRecords {
        let records = cluster.nodes.iter().filter_map(|node| node_record(node, mappings));
        let mut all: NodeRecords = records.map(|record| (record.name.clone(), record)).collect();
        if self.faulty.is_empty() && self.index.is_whole() {
            return all;
        }
        for (name, record) in self.published_nodes() {
            if self.may_still_be(&ObjectRef::new(Kind::Node, "", &name)) {
                all.entry(name).or_insert(record);
            }
        }
        all
    }

    /// Nodes as they are published: in records, or by a controller that had none, to gateways.
    fn published_nodes(&self) -> NodeRecords {
        let mut all = NodeRecords::new();
        let configs = self.index.all::<GatewayConfig>(Kind::GatewayConfig);
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
        let records = self.index.all::<GatewayRecord>(Kind::GatewayRecord);
        let records = records.filter_map(|(_, record)| record.spec.node.clone());
        all.extend(records.map(|record| (record.name.clone(), record)));
        all
    }

    /// Returns true if a gateway's own part is all that it needs in its config: once it has
    /// acknowledged the newest records, and then for as long as it acknowledges some. One that was
    /// replaced by an older version, which acknowledges none, gets all of it again.
    pub(super) fn gateway_reads_records(&self, gateway: &Gateway<'_>) -> bool {
        let Some(config) = self.published(gateway) else { return false };
        let read = config.status.as_ref().and_then(|status| status.records.as_ref());
        if config.spec.from_records {
            let cluster = ObjectRef::new(Kind::GatewayRecord, "", GatewayRecord::CLUSTER);
            let cluster = self.index.get(&cluster);
            return read.zip(cluster).is_some_and(|(read, cluster)| read.uid == cluster.uid());
        }
        let newest = self.index.gateway_records.as_ref();
        read.zip(newest).is_some_and(|(read, newest)| read.includes(newest))
    }

    /// Leaves all objects of a kind as they are.
    pub(super) fn keep_all(&mut self, kind: Kind) {
        let all: Vec<_> = self.index.of_kind(kind).map(|(object, _)| object.clone()).collect();
        all.into_iter().for_each(|object| self.keep(object));
    }
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

fn cluster_record(
    cluster: &Cluster,
    peerings: &[Peering<'_>],
    mappings: &[Mapping],
    digest: String,
) -> GatewayClusterRecord {
    let stateless = mappings.iter().filter(|mapping| mapping.stateless);
    let network_address = |ipv4| Some(cluster.external_of(ipv4)?.cidr.address());
    GatewayClusterRecord {
        digest,
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
