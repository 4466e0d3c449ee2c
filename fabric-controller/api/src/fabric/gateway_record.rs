//! Facts that all gateways share, each in one object: one for the cluster, one for each node.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    AddressMap, GatewayConfig, GatewayConfigSpec, GatewayOverlay, OverlayNode, Record, Records,
};

/// A fact that all gateways share. Exactly one field is set.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "GatewayRecord",
    plural = "gatewayrecords",
    shortname = "gwrec",
    category = "weft",
    doc = "A fact that all gateways share, published by the fabric-controller: of the cluster (named cluster), or of a node (named after it). It holds neither key material nor a MAC address of a gateway, but those of nodes, which pods must not know.",
    derive = "PartialEq",
    printcolumn(name = "Overlay", type_ = "string", json_path = ".spec.node.overlay"),
    printcolumn(name = "Underlay", type_ = "string", json_path = ".spec.node.underlay[*]"),
    printcolumn(name = "Prefixes", type_ = "string", json_path = ".spec.node.prefixes[*]"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Generation",
        type_ = "integer",
        json_path = ".metadata.generation",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayRecordSpec {
    /// Facts of the cluster, in the object named cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<GatewayClusterRecord>,
    /// Facts of a node, in all other objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeRecord>,
}

/// The cluster as its gateways see it. Its generation numbers the versions of all records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClusterRecord {
    /// Digest of the records of the nodes that belong to this version. A gateway goes by its records
    /// only while they are these.
    pub digest: String,
    /// The cluster's pod CIDRs, which peers may reach.
    pub pod_cidrs: Vec<String>,
    /// The cluster's external CIDRs, which peers may reach.
    pub external_cidrs: Vec<String>,
    /// IP resources that gateways themselves rewrite: one external address, one target.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<AddressMap>,
    /// External addresses (at most one a family) that stand in for the sources of ICMP errors
    /// which lie outside the cluster's CIDRs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub icmp_sources: Vec<IpAddr>,
    /// Peers, whose prefixes go from the gateways of all others to their egress nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerPrefixes>,
    /// Prefixes that go from every gateway to its egress node: IP resources' targets, and those of
    /// their addresses that the egress node rewrites.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
}

/// Prefixes of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeerPrefixes {
    /// The other cluster's ID.
    pub peer_cluster_id: String,
    /// The peer's CIDRs as this cluster sees them.
    pub prefixes: Vec<String>,
}

/// A node as all gateways see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeRecord {
    /// The node's name.
    pub name: String,
    /// Its VXLAN device's address, from the internal CIDR.
    pub overlay: Ipv4Addr,
    /// MAC address of that device; without it, the one that follows from overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The node's addresses, at most one a family; the first is preferred.
    pub underlay: Vec<IpAddr>,
    /// Pod CIDRs of the node, /32s and /128s of pods outside them, the node's external addresses,
    /// and those of IP resources that stand for its pods.
    pub prefixes: Vec<String>,
}

impl GatewayRecord {
    /// Name of the record of a node.
    pub fn name_of(node: &str) -> String {
        format!("node-{node}")
    }
}

impl Record for GatewayRecord {
    fn digest(&self) -> Option<&str> {
        self.spec.cluster.as_ref().map(|cluster| cluster.digest.as_str())
    }

    fn is_digested(&self) -> bool {
        self.spec.node.is_some()
    }
}

impl Records<GatewayRecord> {
    /// Everything that a gateway needs, from its own config and these records; `None` if these are no
    /// [`Self::version`].
    pub fn join(&self, own: &GatewayConfigSpec) -> Option<GatewayConfigSpec> {
        let (cluster, records) = self.whole()?;
        let nodes = records.filter_map(|record| record.spec.node.as_ref());
        Some(gateway_spec(own, cluster.spec.cluster.as_ref()?, nodes))
    }
}

/// Config of a gateway in whole, from its own part of it, the cluster's record and those of all nodes.
pub fn gateway_spec<'a>(
    own: &GatewayConfigSpec,
    cluster: &GatewayClusterRecord,
    nodes: impl IntoIterator<Item = &'a NodeRecord>,
) -> GatewayConfigSpec {
    let nodes = nodes.into_iter().filter_map(|record| overlay_node(record, &own.overlay));
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    GatewayConfigSpec {
        from_records: false,
        pod_cidrs: cluster.pod_cidrs.clone(),
        external_cidrs: cluster.external_cidrs.clone(),
        ips: cluster.ips.clone(),
        icmp_sources: cluster.icmp_sources.clone(),
        egress: egress(cluster, &own.peer_cluster_id),
        nodes,
        ..own.clone()
    }
}

fn egress(cluster: &GatewayClusterRecord, own_peer: &str) -> Vec<String> {
    let others = cluster.peers.iter().filter(|peer| peer.peer_cluster_id != own_peer);
    let prefixes = others.flat_map(|peer| &peer.prefixes).chain(&cluster.egress);
    prefixes.collect::<BTreeSet<_>>().into_iter().cloned().collect()
}

/// `None` for a node that has no address of a family of the gateway.
fn overlay_node(record: &NodeRecord, gateway: &GatewayOverlay) -> Option<OverlayNode> {
    let families = &gateway.ip_families;
    let is_common =
        |address: &&IpAddr| families.is_empty() || families.contains(&(**address).into());
    Some(OverlayNode {
        name: record.name.clone(),
        overlay: record.overlay,
        mac: record.mac.clone(),
        underlay: record.underlay.iter().find(is_common).copied()?,
        prefixes: record.prefixes.clone(),
    })
}

impl GatewayConfig {
    /// The same in whole, from these records; `None` if it is here in part only, and they are no
    /// [`Records::version`].
    pub fn joined(&self, records: &Records<GatewayRecord>) -> Option<Self> {
        if !self.spec.from_records {
            return Some(self.clone());
        }
        Some(Self { spec: records.join(&self.spec)?, ..self.clone() })
    }
}

impl GatewayConfigSpec {
    /// Own part of a gateway's config: all that does not follow from records.
    #[must_use]
    pub fn own_part(&self) -> Self {
        Self {
            from_records: true,
            pod_cidrs: Vec::new(),
            external_cidrs: Vec::new(),
            ips: Vec::new(),
            icmp_sources: Vec::new(),
            egress: Vec::new(),
            nodes: Vec::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fabric::digest;

    fn record(name: &str, generation: i64, spec: serde_json::Value) -> GatewayRecord {
        let mut record = GatewayRecord::new(name, serde_json::from_value(spec).unwrap());
        record.metadata.uid = Some(format!("uid of {name}"));
        record.metadata.generation = Some(generation);
        record
    }

    fn node(name: &str, underlay: &[&str]) -> GatewayRecord {
        let node = json!({"name": name, "overlay": "10.80.0.2", "mac": "02:00:5e:10:00:01",
            "underlay": underlay, "prefixes": ["10.200.1.0/24"]});
        record(&GatewayRecord::name_of(name), 1, json!({"node": node}))
    }

    fn records(nodes: &[GatewayRecord]) -> Records<GatewayRecord> {
        let peer =
            |id: &str, n: u8| json!({"peerClusterId": id, "prefixes": [format!("10.{n}.0.0/16")]});
        let cluster = json!({"digest": digest(nodes), "podCidrs": ["10.200.0.0/16"],
            "externalCidrs": ["10.70.0.0/16"], "icmpSources": ["10.70.0.0"],
            "peers": [peer("milan", 72), peer("paris", 71)], "egress": ["192.0.2.99/32"]});
        let cluster = record(GatewayRecord::CLUSTER, 1, json!({"cluster": cluster}));
        nodes.iter().cloned().chain([cluster]).collect()
    }

    fn own(families: &[&str]) -> GatewayConfigSpec {
        let spec = json!({"clusterId": "rome", "peerClusterId": "milan", "role": "Client",
            "gatewayUid": "u", "secretName": "gw-keys", "mtu": 1400, "fromRecords": true,
            "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1", "remaps": [],
            "externalCidrs": [], "nodes": [],
            "overlay": {"address": "10.80.0.9", "ipFamilies": families},
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5}});
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn own_peers_prefixes_are_no_egress() {
        let joined = records(&[]).join(&own(&[])).unwrap();
        assert_eq!(joined.egress, ["10.71.0.0/16", "192.0.2.99/32"]);
        assert_eq!(joined.own_part(), own(&[]));
    }

    #[test]
    fn node_has_an_address_of_the_gateways_families() {
        let nodes = [node("n1", &["192.0.2.11", "2001:db8::11"]), node("n2", &["2001:db8::12"])];
        let underlays = |families: &[&str]| {
            let joined = records(&nodes).join(&own(families)).unwrap();
            joined.nodes.iter().map(|node| node.underlay.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(underlays(&["IPv4"]), ["192.0.2.11"]);
        assert_eq!(underlays(&["IPv6"]), ["2001:db8::11", "2001:db8::12"]);
        assert_eq!(underlays(&["IPv4", "IPv6"]), ["192.0.2.11", "2001:db8::12"]);
        assert_eq!(underlays(&[]), ["192.0.2.11", "2001:db8::12"], "not known yet");
    }

    #[test]
    fn own_part_alone_makes_no_config() {
        let config = GatewayConfig::new("client", own(&["IPv4"]));
        let mut records = records(&[node("n1", &["192.0.2.11"])]);
        assert!(config.joined(&records).is_some());
        records.remove("node-n1");
        assert_eq!(config.joined(&records), None);
        let spec = GatewayConfigSpec { from_records: false, ..own(&[]) };
        let whole = GatewayConfig::new("client", spec);
        assert_eq!(whole.joined(&records).as_ref(), Some(&whole));
    }
}
