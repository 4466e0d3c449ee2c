use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    CrampedGateway, CutOffGateway, GatewayProbe, LossyGateway, RecordVersion, UnreachableGateway,
};

/// Default of [`NodeConfigSpec::refuse_seconds`]: five minutes.
pub const REFUSE_SECONDS: u32 = 300;

/// Everything one route-agent needs.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "NodeConfig",
    plural = "nodeconfigs",
    shortname = "nodecfg",
    category = "weft",
    doc = "What the route-agent of one node runs by, published by the fabric-controller; it has the node's name.",
    status = "NodeConfigStatus",
    derive = "PartialEq",
    printcolumn(name = "Overlay", type_ = "string", json_path = ".spec.overlay"),
    printcolumn(name = "Underlay", type_ = "string", json_path = ".spec.underlay[*]"),
    printcolumn(name = "External", type_ = "string", json_path = ".spec.external[*]"),
    printcolumn(name = "Problem", type_ = "string", json_path = ".status.problems[0]"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Generation",
        type_ = "integer",
        json_path = ".metadata.generation",
        priority = 1
    ),
    printcolumn(
        name = "Applied",
        type_ = "integer",
        json_path = ".status.appliedGeneration",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeConfigSpec {
    /// This cluster's ID.
    pub cluster_id: String,
    /// The node's own overlay address; absent until ipam has granted it. Its VXLAN devices have
    /// no IP address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<Ipv4Addr>,
    /// MAC address of its VXLAN devices; without it, the one that follows from overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The node's addresses, at most one a family; the first is preferred.
    pub underlay: Vec<IpAddr>,
    /// Addresses in the status of the Node. Its agent reports what took their place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declared: Vec<IpAddr>,
    /// Sources on this node that keep their address: the node's pod CIDRs, and pods outside them.
    pub local_pods: Vec<String>,
    /// Pod CIDRs of the node that are left out of localPods: another node has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlapping_pods: Vec<OverlappingPods>,
    /// Pod CIDRs of the node that lie in none of the cluster's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside_pods: Vec<String>,
    /// The cluster's pod CIDRs; absent if they follow from FabricRecords.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<String>,
    /// The external address, one a family, that all other sources of this node are given.
    pub external: Vec<IpAddr>,
    /// True: podCidrs, peerings, ips, internalCidr and vxlanSources are not here, but follow from
    /// FabricRecords. So it is once the node's agent has acknowledged those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_records: bool,
    /// One for each peering of the cluster.
    pub peerings: Vec<NodePeering>,
    /// IP resources: packets to external go to target, by conntrack, on this node.
    #[serde(default)]
    pub ips: Vec<NodeAddressMap>,
    /// The cluster's internal CIDR, where overlay addresses and gateways' link addresses come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_cidr: Option<String>,
    /// Underlay addresses that VXLAN is accepted from: the gateways', and those of the nodes that
    /// masquerade them.
    pub vxlan_sources: Vec<IpAddr>,
    /// Pods, too, are given the node's external address.
    #[serde(default)]
    pub full_masquerade: bool,
    /// The node leaves the fabric: its agent takes everything away. What the node still sends to
    /// peers is refused.
    #[serde(default)]
    pub removed: bool,
    /// Prefixes of peerings that are gone: all packets to them are refused. Those of the cluster's
    /// FabricRecord are here, too, until the node's agent reports refusesRecorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedPrefix>,
    /// Time without a packet, in seconds, after which a refused prefix counts as quiet. Absent: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuse_seconds: Option<u32>,
}

/// A pod CIDR that two nodes claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OverlappingPods {
    /// As this node's Node has it.
    pub cidr: String,
    /// Name of the other node, which packets to it go to.
    pub node: String,
}

/// A prefix that no tunnel leads to any more.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedPrefix {
    /// ID of the cluster that it stood for.
    pub peer_cluster_id: String,
    /// The prefix as this cluster saw it.
    pub prefix: String,
}

/// A peering as a node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePeering {
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
    pub gateway: Option<NodeGateway>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeGateway {
    /// The next hop, on the VXLAN device.
    pub overlay: Ipv4Addr,
    /// Its MAC address; without it, the one that follows from overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Destination of VXLAN to it: its pod, or standalone its host, which passes it on.
    pub underlay: IpAddr,
    /// Standalone, on the gateway's own host: the addresses of its link, at most one a family. What
    /// other hosts send to the node's address of that family, for mac, goes there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<IpAddr>,
    /// Standalone, on a server's own host: UDP port of its WireGuard socket, which firewalls of the
    /// host must let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
    /// Present if the gateway answers probes through the overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<GatewayProbe>,
    /// Addresses that underlay may become by a notice of a take-over, if the gateway has several replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<IpAddr>,
    /// The take-over by which the replica at underlay got the tunnel: notices of later ones count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeAddressMap {
    /// An address of this cluster's external CIDR.
    pub external: IpAddr,
    /// What it stands for.
    pub target: IpAddr,
    /// True: packets to target leave with the node's own address.
    pub masquerade: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeConfigStatus {
    /// The metadata.generation that the node's tables are made from.
    #[serde(default)]
    pub applied_generation: i64,
    /// Version of the FabricRecords that the agent has read, and if the config follows from them, that
    /// the node's tables are made from. Absent if it has not all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<RecordVersion>,
    /// What the agent could not do, or found in its way (a dropping FORWARD policy, a covering route).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Declared addresses that no device of the node has, each with the one in its place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MovedAddress>,
    /// Settings that keep the node from forwarding packets between its pods and peers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwarding_off: Vec<ForwardingOff>,
    /// Rules and routes of other programs that take packets between pods and peers away from weft's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diversions: Vec<Diversion>,
    /// Chains of other programs that drop the node's own packets of the overlay or those for it, or may
    /// do so, while a gateway does not answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packet_drops: Vec<PacketDrop>,
    /// Gateways that do not answer this node's probes through the overlay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable_gateways: Vec<UnreachableGateway>,
    /// Gateways that answer some of this node's probes through the overlay only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lossy_gateways: Vec<LossyGateway>,
    /// Gateways that answer none but smaller probes than packets of their peers may be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cramped_gateways: Vec<CrampedGateway>,
    /// Gateways that answer, but cannot report whether they are connected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cut_off_gateways: Vec<CutOffGateway>,
    /// A step that the agent has to take again and again, as another program keeps undoing it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undone: Option<UndoneStep>,
    /// Prefixes that the node refuses, peerings aside. Absent if its agent does not report that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Vec<RefusedTraffic>>,
    /// True: the agent also refuses the prefixes that the cluster's FabricRecord names. An older one
    /// knows those of its own config only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_recorded: bool,
    /// The agent that reports this. Absent for an older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reported_by: Option<ReportingAgent>,
}

/// A process that reports a node's status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReportingAgent {
    /// Name of its host.
    pub host: String,
    /// Process ID.
    pub process: u32,
    /// Time of its start (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub started: String,
    /// Time of this report (RFC 3339), if another agent reports for the same node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub contested: Option<String>,
}

impl ReportingAgent {
    /// True for reports of one process.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.host, self.process, &self.started) == (&other.host, other.process, &other.started)
    }
}

/// A setting by which a node forwards no packets of one family.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct ForwardingOff {
    /// Name of the setting, such as `net.ipv4.ip_forward`.
    pub setting: String,
    /// True for IPv6.
    pub ipv6: bool,
    /// When the agent found it off (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A rule or route of another program that takes packets between pods and peers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Diversion {
    /// Command that removes it, such as `ip rule del priority 50 prohibit`, or solves the cause. Words, if they begin
    /// with "unpeer".
    pub removal: String,
    /// Cause, if it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The peers' prefixes that it concerns, as this cluster sees them.
    pub prefixes: Vec<String>,
    /// When the agent found it (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

impl Diversion {
    /// Beginning of a removal that is no command.
    pub const WORDS: &str = "unpeer, ";
}

/// A step that another program keeps undoing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UndoneStep {
    /// The command that it equals, such as `ip rule add priority 105 lookup 18952`.
    pub step: String,
    /// When the agent found it undone first (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A chain of another program that drops packets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct PacketDrop {
    /// The chain with its table, its hook and the packets.
    pub cause: String,
    /// Remedy for its owner.
    pub remedy: String,
}

/// An address of a node that changed while its Node did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MovedAddress {
    /// As the Node has it.
    pub declared: IpAddr,
    /// As the node has it.
    pub found: IpAddr,
}

/// Packets that a node refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedTraffic {
    /// Destination.
    pub prefix: String,
    /// Nothing has been sent to it for refuseSeconds.
    pub quiet: bool,
    /// Sources of the packets since, at most eight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub senders: Vec<IpAddr>,
}

impl NodeConfigSpec {
    /// Config of a node that leaves the fabric, and whose earlier config is not known.
    pub fn of_removed(cluster_id: String) -> Self {
        Self {
            cluster_id,
            overlay: None,
            mac: None,
            underlay: Vec::new(),
            declared: Vec::new(),
            local_pods: Vec::new(),
            overlapping_pods: Vec::new(),
            outside_pods: Vec::new(),
            pod_cidrs: Vec::new(),
            external: Vec::new(),
            from_records: false,
            peerings: Vec::new(),
            ips: Vec::new(),
            internal_cidr: None,
            vxlan_sources: Vec::new(),
            full_masquerade: false,
            removed: true,
            refused: Vec::new(),
            refuse_seconds: None,
        }
    }

    /// Time without a packet after which a refused prefix counts as quiet.
    pub fn quiet_after(&self) -> Duration {
        Duration::from_secs(self.refuse_seconds.unwrap_or(REFUSE_SECONDS).into())
    }
}

impl NodeConfig {
    /// The node's tables are made from its newest version.
    pub fn is_applied(&self) -> bool {
        let applied = self.status.as_ref().map(|status| status.applied_generation);
        applied.is_some_and(|applied| applied >= self.metadata.generation.unwrap_or_default())
    }
}
