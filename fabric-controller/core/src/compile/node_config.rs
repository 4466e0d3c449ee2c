//! NodeConfigs to publish, one per node.

use std::collections::BTreeSet;

use fabric_api::Cidr;
use fabric_api::fabric::{NodeConfig, NodeConfigSpec, NodePeering, RefusedPrefix, node_spec};
use fabric_objects::{Kind, ObjectRef};
use jiff::{SignedDuration, Timestamp};

use super::Compiler;
use super::cluster::{Cluster, Node};
use super::gateway::Gateway;
use super::mappings::Mapping;
use super::names::of_node;
use super::peering::Peering;
use super::records::PeeringRecords;
use crate::index::Settings;

/// Annotation: when it was known that the node is gone.
const REMOVED_SINCE: &str = "fabric.weft.dev/removed-since";
/// Maximum time for the agent of a node that is gone, if it runs on. Kubernetes ends it within a
/// minute.
const FAREWELL: SignedDuration = SignedDuration::from_secs(120);

impl Compiler<'_> {
    pub(super) fn node_configs(
        &mut self,
        cluster: &Cluster,
        peerings: &[Peering<'_>],
        gateways: &[Gateway<'_>],
        mappings: &[Mapping],
    ) {
        let records = self.peering_records(cluster, peerings, gateways);
        if !cluster.is_ready() {
            self.keep_refused();
            self.keep_all(Kind::FabricRecord);
            cluster.nodes.iter().for_each(|node| self.keep(of_node(&node.name)));
            return self.removed_nodes(cluster);
        }
        let refused = self.refused(cluster, &carried(peerings, &records));
        let of_cluster = self.cluster_record(cluster, mappings, &records);
        for node in &cluster.nodes {
            let Some(mut spec) = own_spec(cluster, node, &self.index.settings) else { continue };
            spec.refused.clone_from(&refused);
            if !self.reads_records(&node.name) {
                spec = node_spec(&spec, &node.name, &of_cluster, records.values());
            }
            self.want(NodeConfig::new(&node.name, spec));
        }
        self.removed_nodes(cluster);
    }

    /// Removed nodes take everything away before their config goes, if they have applied any. The
    /// peerings live on, so their prefixes stay refused there for as long as the agent runs. In
    /// Kubernetes the agent goes with its node, so there may be none to report that.
    fn removed_nodes(&mut self, cluster: &Cluster) {
        let index = self.index;
        for (reference, config) in index.all::<NodeConfig>(Kind::NodeConfig) {
            if cluster.node(&reference.name).is_some() {
                continue;
            }
            let node = ObjectRef::new(Kind::Node, "", &reference.name);
            if self.may_still_be(&node) {
                self.keep(reference.clone());
                continue;
            }
            let applied = config.status.as_ref().map_or(0, |status| status.applied_generation);
            let generation = config.metadata.generation.unwrap_or_default();
            if applied == 0 || (config.spec.removed && applied >= generation) {
                continue;
            }
            let refused = self.all_prefixes(&config.spec);
            let spec = NodeConfigSpec { removed: true, refused, ..config.spec.clone() };
            let mut removed = NodeConfig::new(&reference.name, spec);
            if index.settings.kubernetes {
                let since = removed_since(config).unwrap_or(self.now);
                if self.now.duration_since(since) > FAREWELL {
                    continue;
                }
                let note = (REMOVED_SINCE.to_owned(), since.to_string());
                removed.metadata.annotations = Some([note].into());
            }
            self.want(removed);
        }
    }

    /// Prefixes of the peerings that a node has, and those that it refuses.
    fn all_prefixes(&self, spec: &NodeConfigSpec) -> Vec<RefusedPrefix> {
        let entry = |prefix: &str, peer: &str| RefusedPrefix {
            peer_cluster_id: peer.to_owned(),
            prefix: prefix.to_owned(),
        };
        let of_peering = |peering: &NodePeering| -> Vec<_> {
            let peer = &peering.peer_cluster_id;
            peering.prefixes.iter().map(|prefix| entry(prefix, peer)).collect()
        };
        let mut all: BTreeSet<_> = spec.peerings.iter().flat_map(of_peering).collect();
        let recorded = self.recorded_prefixes().filter(|_| spec.from_records);
        all.extend(recorded.map(|(prefix, peer)| entry(prefix, peer)));
        all.extend(spec.refused.iter().cloned());
        all.into_iter().collect()
    }
}

/// Prefixes that lead to peers now, or soon will.
fn carried(peerings: &[Peering<'_>], records: &PeeringRecords) -> BTreeSet<Cidr> {
    let published = records.values().flat_map(|record| &record.prefixes);
    let published = published.filter_map(|prefix| prefix.parse().ok());
    published.chain(peerings.iter().flat_map(Peering::prefixes)).collect()
}

fn removed_since(config: &NodeConfig) -> Option<Timestamp> {
    let annotations = config.metadata.annotations.as_ref()?;
    annotations.get(REMOVED_SINCE)?.parse().ok().filter(|_| config.spec.removed)
}

/// Own part of a node's config; the rest follows from records.
fn own_spec(cluster: &Cluster, node: &Node, settings: &Settings) -> Option<NodeConfigSpec> {
    if !cluster.is_ready() {
        return None;
    }
    Some(NodeConfigSpec {
        cluster_id: cluster.id.as_ref()?.to_string(),
        overlay: node.overlay,
        mac: node.mac.clone(),
        underlay: node.underlay.clone(),
        declared: node.declared.clone(),
        local_pods: node.pods.iter().map(Cidr::to_string).collect(),
        overlapping_pods: node.overlapping.clone(),
        pod_cidrs: Vec::new(),
        external: node.external.clone(),
        from_records: true,
        peerings: Vec::new(),
        ips: Vec::new(),
        internal_cidr: None,
        vxlan_sources: Vec::new(),
        full_masquerade: settings.full_masquerade,
        removed: false,
        refused: Vec::new(),
        refuse_seconds: settings.refuse_seconds,
    })
}
