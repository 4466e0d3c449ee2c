//! Facts that all nodes share, each in one object: one for the cluster, one for each peering.

use std::net::{IpAddr, Ipv4Addr};

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    GatewayProbe, NodeAddressMap, NodeConfig, NodeConfigSpec, NodeGateway, NodePeering, Record,
    Records, RefusedPrefix,
};

/// A fact that all nodes share. Exactly one field is set.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "FabricRecord",
    plural = "fabricrecords",
    shortname = "fabrec",
    category = "weft",
    doc = "A fact that all route-agents share, published by the fabric-controller: of the cluster (named cluster), or of a peering (named after the peer). It never holds key material, but MAC addresses that pods must not know.",
    derive = "PartialEq",
    printcolumn(name = "Prefixes", type_ = "string", json_path = ".spec.peering.prefixes[*]"),
    printcolumn(name = "Connected", type_ = "boolean", json_path = ".spec.peering.connected"),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".spec.peering.mtu"),
    printcolumn(name = "Gateway", type_ = "string", json_path = ".spec.peering.gateway.overlay"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Generation",
        type_ = "integer",
        json_path = ".metadata.generation",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct FabricRecordSpec {
    /// Facts of the cluster, in the object named cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterRecord>,
    /// Facts of a peering, in all other objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peering: Option<PeeringRecord>,
}

/// The cluster as its nodes see it. Its generation numbers the versions of all records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRecord {
    /// Digest of the records of the peerings that belong to this version. A node goes by its records
    /// only while they are these.
    pub digest: String,
    /// The cluster's pod CIDRs.
    pub pod_cidrs: Vec<String>,
    /// The cluster's internal CIDR, where overlay addresses and gateways' link addresses come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_cidr: Option<String>,
    /// IP resources: packets to external go to target, by conntrack, on each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<NodeAddressMap>,
    /// Prefixes of peerings that are gone: all packets to them are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedPrefix>,
}

/// A peering as all nodes see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeeringRecord {
    /// The other cluster's ID.
    pub peer_cluster_id: String,
    /// The peer's CIDRs as this cluster sees them.
    pub prefixes: Vec<String>,
    /// True while the tunnel carries packets; without it new connections are refused at once.
    pub connected: bool,
    /// MTU of the way to the peer, in bytes; an upper bound for the routes.
    pub mtu: u32,
    /// Absent until the peering has a gateway with addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<PeeringGateway>,
}

/// A gateway as all nodes see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeeringGateway {
    /// The next hop, on the VXLAN device.
    pub overlay: Ipv4Addr,
    /// Its MAC address; without it, the one that follows from overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Name of the node that it runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Destinations of VXLAN to it, at most one a family: its pod's address, or standalone those of
    /// its host, which passes it on.
    pub underlay: Vec<IpAddr>,
    /// Standalone: the addresses of its link, at most one a family, to which its own host sends VXLAN.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<IpAddr>,
    /// Standalone: UDP port of a server's WireGuard socket, which firewalls of its host must let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
    /// Kubernetes: other sources of its VXLAN. Addresses of its node, which many a CNI gives to what the pod
    /// sends, and those of the pods that may take its place and of their nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_addresses: Vec<IpAddr>,
    /// Present if the gateway answers probes through the overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<GatewayProbe>,
    /// Kubernetes: addresses that underlay may become by a notice of a take-over, if there are several replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<IpAddr>,
    /// The take-over by which the replica at underlay got the tunnel: notices of later ones count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}

impl FabricRecord {
    /// Name of the record of a peering.
    pub fn name_of(peer: &str) -> String {
        format!("peering-{peer}")
    }
}

impl Record for FabricRecord {
    fn digest(&self) -> Option<&str> {
        self.spec.cluster.as_ref().map(|cluster| cluster.digest.as_str())
    }

    fn is_digested(&self) -> bool {
        self.spec.peering.is_some()
    }
}

impl Records<FabricRecord> {
    /// Everything that a node needs, from its own config and these records; `None` if these are no
    /// [`Self::version`].
    pub fn join(&self, own: &NodeConfigSpec, node: &str) -> Option<NodeConfigSpec> {
        let (cluster, records) = self.whole()?;
        let peerings = records.filter_map(|record| record.spec.peering.as_ref());
        Some(node_spec(own, node, cluster.spec.cluster.as_ref()?, peerings))
    }
}

/// Config of a node in whole, from its own part of it, the cluster's record and those of all peerings.
pub fn node_spec<'a>(
    own: &NodeConfigSpec,
    node: &str,
    cluster: &ClusterRecord,
    peerings: impl IntoIterator<Item = &'a PeeringRecord>,
) -> NodeConfigSpec {
    let records: Vec<_> = peerings.into_iter().collect();
    let mut peerings: Vec<_> =
        records.iter().map(|record| node_peering(record, node, &own.underlay)).collect();
    peerings.sort_by(|a, b| a.peer_cluster_id.cmp(&b.peer_cluster_id));
    NodeConfigSpec {
        from_records: false,
        pod_cidrs: cluster.pod_cidrs.clone(),
        internal_cidr: cluster.internal_cidr.clone(),
        ips: cluster.ips.clone(),
        vxlan_sources: vxlan_sources(&peerings, &records),
        refused: refused(&cluster.refused, &own.refused),
        peerings,
        ..own.clone()
    }
}

/// Those of the record, and others of the config: an older controller writes them only there.
fn refused(recorded: &[RefusedPrefix], own: &[RefusedPrefix]) -> Vec<RefusedPrefix> {
    let others = own.iter().filter(|prefix| !recorded.contains(prefix));
    recorded.iter().chain(others).cloned().collect()
}

fn node_peering(record: &PeeringRecord, node: &str, underlay: &[IpAddr]) -> NodePeering {
    NodePeering {
        peer_cluster_id: record.peer_cluster_id.clone(),
        prefixes: record.prefixes.clone(),
        connected: record.connected,
        mtu: record.mtu,
        gateway: record.gateway.as_ref().and_then(|gateway| node_gateway(gateway, node, underlay)),
    }
}

/// Route from a node to a gateway: standalone by its host, the only one with the address of its link.
fn node_gateway(gateway: &PeeringGateway, node: &str, underlay: &[IpAddr]) -> Option<NodeGateway> {
    let ipv4 = common_family(underlay, &gateway.underlay)?.is_ipv4();
    let is_host = gateway.node.as_deref() == Some(node) && !gateway.links.is_empty();
    let ends = if is_host { &gateway.links } else { &gateway.underlay };
    Some(NodeGateway {
        overlay: gateway.overlay,
        mac: gateway.mac.clone(),
        underlay: ends.iter().copied().find(|end| end.is_ipv4() == ipv4)?,
        links: if is_host { gateway.links.clone() } else { Vec::new() },
        listen_port: gateway.listen_port.filter(|_| is_host),
        probe: gateway.probe.clone(),
        replicas: if is_host { Vec::new() } else { gateway.replicas.clone() },
        epoch: gateway.epoch,
    })
}

fn vxlan_sources(peerings: &[NodePeering], records: &[&PeeringRecord]) -> Vec<IpAddr> {
    let gateways = peerings.iter().filter_map(|peering| peering.gateway.as_ref());
    let mut sources: Vec<IpAddr> = gateways.map(|gateway| gateway.underlay).collect();
    let gateways = records.iter().filter_map(|record| record.gateway.as_ref());
    sources.extend(gateways.flat_map(|gateway| &gateway.node_addresses));
    sources.sort();
    sources.dedup();
    sources
}

/// The preferred one of a node's addresses among those of a family that the other end of the overlay
/// has, too; the first one while nothing is known of that.
pub fn common_family(own: &[IpAddr], end: &[IpAddr]) -> Option<IpAddr> {
    let common = |address: &&IpAddr| {
        end.is_empty() || end.iter().any(|other| other.is_ipv4() == address.is_ipv4())
    };
    own.iter().find(common).copied()
}

impl NodeConfig {
    /// The same in whole, from these records; `None` if it is here in part only, and they are no
    /// [`Records::version`]. A node that is removed needs no more than that.
    pub fn joined(&self, records: &Records<FabricRecord>) -> Option<Self> {
        if !self.spec.from_records || self.spec.removed {
            return Some(self.clone());
        }
        let node = self.metadata.name.as_deref().unwrap_or_default();
        let spec = records.join(&self.spec, node)?;
        Some(Self { spec, ..self.clone() })
    }
}

impl NodeConfigSpec {
    /// Own part of a node's config: all that does not follow from records.
    #[must_use]
    pub fn own_part(&self) -> Self {
        Self {
            from_records: true,
            pod_cidrs: Vec::new(),
            internal_cidr: None,
            ips: Vec::new(),
            vxlan_sources: Vec::new(),
            peerings: Vec::new(),
            refused: Vec::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fabric::digest;

    fn record(name: &str, generation: i64, spec: FabricRecordSpec) -> FabricRecord {
        let mut record = FabricRecord::new(name, spec);
        record.metadata.uid = Some(format!("uid of {name}"));
        record.metadata.generation = Some(generation);
        record
    }

    fn peering(peer: &str, generation: i64) -> FabricRecord {
        let peering = json!({"peerClusterId": peer, "prefixes": ["10.71.0.0/16"], "connected": true,
            "mtu": 1340, "gateway": {"overlay": "10.80.0.2", "node": "n1", "listenPort": 51840,
                "underlay": ["192.0.2.11", "2001:db8::11"], "links": ["10.80.0.3", "fd00::3"]}});
        let spec = json!({"peering": peering});
        record(&FabricRecord::name_of(peer), generation, serde_json::from_value(spec).unwrap())
    }

    fn cluster(generation: i64, peerings: &[FabricRecord]) -> FabricRecord {
        let pod_cidrs = vec!["10.200.0.0/16".to_owned()];
        let cluster = ClusterRecord { digest: digest(peerings), pod_cidrs, ..Default::default() };
        let spec = FabricRecordSpec { cluster: Some(cluster), peering: None };
        record(FabricRecord::CLUSTER, generation, spec)
    }

    fn own(underlay: &[&str]) -> NodeConfigSpec {
        let spec = json!({"clusterId": "rome", "underlay": underlay, "localPods": [],
            "external": [], "fromRecords": true, "peerings": [], "vxlanSources": []});
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn version_has_exactly_the_records_of_its_digest() {
        let (milan, paris) = (peering("milan", 1), peering("paris", 4));
        let mut records = Records::default();
        records.insert(cluster(7, &[milan.clone(), paris.clone()]));
        records.insert(milan.clone());
        assert_eq!(records.version(), None, "one is missing");
        records.insert(paris);
        assert_eq!(records.version().unwrap().generation, 7);
        records.insert(peering("paris", 5));
        assert_eq!(records.version(), None, "one is newer");
        records.insert(peering("paris", 4));
        assert_eq!(records.version(), None, "the newer one stays");
        records.insert(cluster(8, &[milan.clone(), peering("paris", 5)]));
        assert_eq!(records.version().unwrap().generation, 8);
        records.insert(peering("turin", 1));
        assert_eq!(records.version(), None, "one is too many");
        records.remove("peering-turin");
        records.remove("peering-paris");
        assert_eq!(records.join(&own(&["192.0.2.12"]), "n2"), None);
        records.insert(cluster(9, &[milan]));
        assert!(records.join(&own(&["192.0.2.12"]), "n2").is_some());
    }

    #[test]
    fn prefix_of_either_form_is_refused_once() {
        let refused = |prefix: &str| RefusedPrefix {
            peer_cluster_id: "paris".to_owned(),
            prefix: prefix.to_owned(),
        };
        let [first, second, third] = ["10.72.0.0/16", "10.73.0.0/16", "10.74.0.0/16"].map(refused);
        let mut of_cluster = cluster(1, &[]);
        let known = of_cluster.spec.cluster.as_mut().unwrap();
        known.refused = vec![first.clone(), second.clone()];
        let records: Records<_> = [of_cluster].into_iter().collect();
        let mut own = own(&["192.0.2.12"]);
        own.refused = vec![second.clone(), third.clone()];
        assert_eq!(records.join(&own, "n2").unwrap().refused, [first, second, third]);
    }

    #[test]
    fn route_to_a_gateway_depends_on_the_node() {
        let milan = peering("milan", 1);
        let all = [cluster(1, std::slice::from_ref(&milan)), milan];
        let records: Records<_> = all.into_iter().collect();
        let gateway = |node: &str, underlay: &[&str]| {
            let joined = records.join(&own(underlay), node).unwrap();
            let gateway = joined.peerings[0].gateway.clone();
            gateway.map(|gateway| (gateway.underlay.to_string(), gateway.listen_port))
        };
        let here = Some(("10.80.0.3".to_owned(), Some(51840)));
        assert_eq!(gateway("n1", &["192.0.2.11", "2001:db8::11"]), here);
        assert_eq!(gateway("n2", &["192.0.2.12"]), Some(("192.0.2.11".to_owned(), None)));
        let v6 = ["2001:db8::12", "192.0.2.12"];
        assert_eq!(gateway("n2", &v6), Some(("2001:db8::11".to_owned(), None)));
    }
}
