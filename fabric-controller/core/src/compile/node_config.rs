//! NodeConfigs to publish, one per node.

use std::collections::BTreeSet;

use fabric_api::Cidr;
use fabric_api::fabric::{
    ClusterRecord, NodeConfig, NodeConfigSpec, NodePeering, RefusedPrefix, node_spec,
};
use fabric_index::{Index, Settings};
use fabric_model::Cluster;
use fabric_model::cluster::Node;
use fabric_objects::Kind;
use jiff::{SignedDuration, Timestamp};

use super::desired::Desired;
use super::records::{self, PeeringRecords, recorded_prefixes, recorded_refused};
use super::uncertain::Uncertain;

/// Annotation: when it was known that the node is gone.
const REMOVED_SINCE: &str = "fabric.weft.dev/removed-since";
/// Maximum time for the agent of a node that is gone, if it runs on. Kubernetes ends it within a
/// minute.
const REMOVAL_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);

/// Configs of the nodes that are there: in whole, or where its agent reads records, its own part.
pub(super) fn configs(
    index: &Index,
    cluster: &Cluster,
    of_cluster: &ClusterRecord,
    peerings: &PeeringRecords,
) -> Desired {
    let mut desired = Desired::default();
    for node in &cluster.nodes {
        let Some(mut spec) = own_spec(cluster, node, &index.settings) else { continue };
        if !records::are_read_by(index, &node.name) {
            spec = node_spec(&spec, &node.name, of_cluster, peerings.values());
        } else if !records::are_refused_by(index, &node.name, &of_cluster.refused) {
            spec.refused.clone_from(&of_cluster.refused);
        }
        desired.want(NodeConfig::new(&node.name, spec));
    }
    desired
}

/// Removed nodes take everything away before their config goes, if they have applied any. The
/// peerings remain, so their prefixes stay refused there for as long as the agent runs. In
/// Kubernetes the agent goes with its node, so there may be none to report that.
pub(super) fn of_removed_nodes(
    index: &Index,
    cluster: &Cluster,
    uncertain: &Uncertain<'_>,
    now: Timestamp,
) -> Desired {
    let mut desired = Desired::default();
    for (reference, config) in index.all::<NodeConfig>(Kind::NodeConfig) {
        if cluster.node(&reference.name).is_some() {
            continue;
        }
        if uncertain.node_may_still_be(&reference.name) {
            desired.keep(reference.clone());
            continue;
        }
        let applied = config.status.as_ref().map_or(0, |status| status.applied_generation);
        let generation = config.metadata.generation.unwrap_or_default();
        if applied == 0 || (config.spec.removed && applied >= generation) {
            continue;
        }
        let refused = all_prefixes(index, &config.spec);
        let spec = NodeConfigSpec { removed: true, refused, ..config.spec.clone() };
        let mut removed = NodeConfig::new(&reference.name, spec);
        if index.settings.kubernetes {
            let since = removed_since(config).unwrap_or(now);
            if now.duration_since(since) > REMOVAL_TIMEOUT {
                continue;
            }
            let note = (REMOVED_SINCE.to_owned(), since.to_string());
            removed.metadata.annotations = Some([note].into());
        }
        desired.want(removed);
    }
    desired
}

/// Prefixes of the peerings that a node has, and those that it refuses.
fn all_prefixes(index: &Index, spec: &NodeConfigSpec) -> Vec<RefusedPrefix> {
    let entry = |prefix: &str, peer: &str| RefusedPrefix {
        peer_cluster_id: peer.to_owned(),
        prefix: prefix.to_owned(),
    };
    let of_peering = |peering: &NodePeering| -> Vec<_> {
        let peer = &peering.peer_cluster_id;
        peering.prefixes.iter().map(|prefix| entry(prefix, peer)).collect()
    };
    let mut all: BTreeSet<_> = spec.peerings.iter().flat_map(of_peering).collect();
    if spec.from_records {
        all.extend(recorded_prefixes(index).map(|(prefix, peer)| entry(prefix, peer)));
        all.extend(recorded_refused(index).iter().cloned());
    }
    all.extend(spec.refused.iter().cloned());
    all.into_iter().collect()
}

fn removed_since(config: &NodeConfig) -> Option<Timestamp> {
    let annotations = config.metadata.annotations.as_ref()?;
    annotations.get(REMOVED_SINCE)?.parse().ok().filter(|_| config.spec.removed)
}

/// Own part of a node's config; the rest follows from records.
fn own_spec(cluster: &Cluster, node: &Node, settings: &Settings) -> Option<NodeConfigSpec> {
    Some(NodeConfigSpec {
        cluster_id: cluster.id.as_ref()?.to_string(),
        overlay: node.overlay,
        mac: node.mac.clone(),
        underlay: node.underlay.clone(),
        declared: node.declared.clone(),
        local_pods: node.pods.iter().map(Cidr::to_string).collect(),
        overlapping_pods: node.overlapping.clone(),
        outside_pods: outside_pods(cluster, node, settings),
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

/// Pod CIDRs of the node that peers do not accept. None where the CNI has pools of its own, as its pods
/// outside of their nodes' pod CIDRs show: then nothing uses those.
fn outside_pods(cluster: &Cluster, node: &Node, settings: &Settings) -> Vec<String> {
    let mut pods = cluster.nodes.iter().flat_map(|node| &node.pods);
    if settings.kubernetes && pods.any(|pod| *pod == Cidr::host(pod.address())) {
        return Vec::new();
    }
    cluster.outside(&node.pods).map(Cidr::to_string).collect()
}
