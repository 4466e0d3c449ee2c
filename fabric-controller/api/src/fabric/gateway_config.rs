use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RecordVersion, Role, UnreachableNode};

/// Everything one gateway needs, except its private key.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "GatewayConfig",
    plural = "gatewayconfigs",
    shortname = "gwcfg",
    category = "weft",
    namespaced,
    doc = "What one gateway runs by, published by the fabric-controller: change the GatewayServer, GatewayClient or Configuration instead. Name and namespace are those of the GatewayServer or GatewayClient. It never holds key material.",
    status = "GatewayConfigStatus",
    derive = "PartialEq",
    printcolumn(name = "Peer", type_ = "string", json_path = ".spec.peerClusterId"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.role"),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.peerEndpoint"),
    printcolumn(
        name = "Active",
        type_ = "string",
        json_path = ".status.active.address",
        priority = 1
    ),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".status.mtu"),
    printcolumn(name = "Handshake", type_ = "date", json_path = ".status.lastHandshake"),
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
    ),
    printcolumn(
        name = "MTU Bound",
        type_ = "string",
        json_path = ".status.mtuBound",
        priority = 1
    ),
    printcolumn(
        name = "Received",
        type_ = "integer",
        json_path = ".status.receivedBytes",
        priority = 1
    ),
    printcolumn(
        name = "Transmitted",
        type_ = "integer",
        json_path = ".status.transmittedBytes",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayConfigSpec {
    /// This cluster's ID.
    pub cluster_id: String,
    /// The other cluster's ID.
    pub peer_cluster_id: String,
    /// Whether the gateway listens (Server) or connects (Client).
    pub role: Role,
    /// UID of the GatewayServer or GatewayClient.
    pub gateway_uid: String,
    /// Name of the Secret with the private key, in this object's namespace.
    pub secret_name: String,
    /// The peer's WireGuard public key in base64; absent until its PublicKey arrives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_public_key: Option<String>,
    /// UDP port to listen on; absent for a client, which takes any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
    /// Where the peer is; absent for a server, which learns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Upper bound of the tunnel's MTU, in bytes; 65535 if the user names none.
    pub mtu: u32,
    /// This end's address inside the tunnel: 169.254.18.1 for a server, .2 for a client.
    pub tunnel_address: Ipv4Addr,
    /// The other end's.
    pub peer_tunnel_address: Ipv4Addr,
    /// The peer's prefixes: what it uses, and what this cluster sees instead.
    pub remaps: Vec<Remap>,
    /// True: podCidrs, externalCidrs, ips, icmpSources, egress and nodes are not here, but follow from
    /// GatewayRecords. So it is once the gateway has acknowledged those.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_records: bool,
    /// This cluster's pod CIDRs, which the peer may reach; absent if they follow from GatewayRecords.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_cidrs: Vec<String>,
    /// This cluster's external CIDRs, which the peer may reach.
    pub external_cidrs: Vec<String>,
    /// IP resources that the gateway itself rewrites: one external address, one target.
    #[serde(default)]
    pub ips: Vec<AddressMap>,
    /// External addresses (at most one a family) that stand in for the sources of ICMP errors
    /// which lie outside this cluster's CIDRs.
    #[serde(default)]
    pub icmp_sources: Vec<IpAddr>,
    /// Prefixes that go to the egress node: other peers' remapped CIDRs, IP resources' targets and
    /// those of their addresses that the egress node rewrites (a pod's own node rewrites the rest).
    #[serde(default)]
    pub egress: Vec<String>,
    /// Name of the node those go to. It stays when the gateway moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_node: Option<String>,
    /// The gateway's place in its cluster's overlay.
    pub overlay: GatewayOverlay,
    /// The nodes of the cluster, and what lies behind each.
    pub nodes: Vec<OverlayNode>,
    /// Kubernetes: the pods of the gateway, one of which has the tunnel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<GatewayReplica>,
    /// How the gateway finds out whether packets get through.
    pub probe: ProbeSettings,
    /// Number of nodes whose pods do not reach the peer for a reason that probes do not show, which
    /// the gateway reports to the peer's together with what they show.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub faulty_nodes: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A pod of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GatewayReplica {
    /// Address of the pod.
    pub address: IpAddr,
    /// The node that it runs on.
    pub node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerEndpoint {
    /// IP addresses or DNS names; the first that answers is used.
    pub addresses: Vec<String>,
    /// UDP port.
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Remap {
    /// Whether it is one of the peer's pod CIDRs or of its external CIDRs.
    pub kind: RemapKind,
    /// The prefix as the peer uses it.
    pub remote: String,
    /// The prefix of the same length as this cluster sees it.
    pub local: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RemapKind {
    Pod,
    External,
}

impl RemapKind {
    /// As Liqo spells it in labels and names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::External => "external",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddressMap {
    /// An address of this cluster's external CIDR.
    pub external: IpAddr,
    /// What it stands for.
    pub target: IpAddr,
}

/// The gateway's place in its cluster's overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayOverlay {
    /// Its VXLAN device's address, from the internal CIDR.
    pub address: Ipv4Addr,
    /// MAC address of that device; without it, the one that follows from address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Standalone: the address of its end of the veth to the host, from the internal CIDR. The
    /// host sends it the VXLAN that nodes address to the host. Absent in Kubernetes, where a pod has
    /// its own address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_address: Option<Ipv4Addr>,
    /// Standalone: the IPv6 address there; absent if the host has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_address_v6: Option<Ipv6Addr>,
    /// The node that the gateway runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// IP families of the addresses that nodes send VXLAN to. Empty while they are not known: each node
    /// is reached at the address that it prefers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ip_families: Vec<IpFamily>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IpFamily {
    IPv4,
    IPv6,
}

impl From<IpAddr> for IpFamily {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::IPv4,
            IpAddr::V6(_) => Self::IPv6,
        }
    }
}

/// A node as a gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OverlayNode {
    /// The node's name.
    pub name: String,
    /// Its VXLAN device's address, from the internal CIDR.
    pub overlay: Ipv4Addr,
    /// MAC address of that device; without it, the one that follows from overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Where VXLAN is sent to.
    pub underlay: IpAddr,
    /// Pod CIDRs of the node, /32s and /128s of pods outside them, the node's external addresses,
    /// and those of IP resources that stand for its pods.
    pub prefixes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProbeSettings {
    /// Without probes, Connected follows the age of the last authentic packet and handshake.
    pub enabled: bool,
    /// Time between two probes in milliseconds, 100 to 10,000.
    pub interval_ms: u32,
    /// How many unanswered probes make a loss.
    pub loss_threshold: u32,
}

impl Default for ProbeSettings {
    /// Liqo's defaults.
    fn default() -> Self {
        Self { enabled: true, interval_ms: 2000, loss_threshold: 5 }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayConfigStatus {
    /// The metadata.generation that the dataplane runs on.
    #[serde(default)]
    pub applied_generation: i64,
    /// Version of the GatewayRecords that the gateway has read, and if the config follows from them,
    /// that the dataplane runs on; then it may lag behind by a minute. Absent if it has not all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<RecordVersion>,
    /// The replica that has the tunnel, and this status is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<ActiveReplica>,
    /// What keeps the newest config from being applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Address and UDP port of the last authentic packet from the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_endpoint: Option<String>,
    /// spec.endpoint while the peer was last connected. As long as it is that one, a gateway that starts
    /// tries peerEndpoint first, to which the peer may have moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured_endpoint: Option<PeerEndpoint>,
    /// Timestamp of the last initiation (RFC 3339), at most as old as the last handshake. Those of a gateway
    /// that starts are later, whatever its clock shows: the peer believes no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub last_initiation: Option<String>,
    /// When the last handshake was done (RFC 3339). There is one every two minutes while packets
    /// flow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub last_handshake: Option<String>,
    /// Bytes of inner packets from the peer, since the gateway started.
    #[serde(default)]
    pub received_bytes: u64,
    /// Bytes of inner packets to the peer, since the gateway started.
    #[serde(default)]
    pub transmitted_bytes: u64,
    /// The tunnel's MTU in force, in bytes.
    #[serde(default)]
    pub mtu: u32,
    /// What keeps the tunnel's MTU from being larger: spec.mtu (Spec), the device or route towards
    /// the peer (Device), the VXLAN to this cluster's nodes (Overlay), what gets through to the peer
    /// (Path).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_bound: Option<MtuBound>,
    /// The largest IP packet that is known to reach the peer over the underlay, in bytes. No larger
    /// ones are tried than the other bounds allow. Absent unless the peer answers such probes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// UDP port the gateway listens on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
    /// Causes for the peering not being, or soon not being, connected; the most specific first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<PeeringFault>,
    /// UDP port at its overlay address where the gateway answers the probes of nodes. Absent: it
    /// answers none, and nodes send none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay_probe_port: Option<u16>,
    /// Number of nodes that have sent probes, or are to follow a take-over, or whose first probe is overdue.
    #[serde(default)]
    pub probing_nodes: u32,
    /// Nodes whose path to the gateway fails now; also those whose first probe is overdue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreachable_nodes: Vec<UnreachableNode>,
}

/// The replica of a gateway that has the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ActiveReplica {
    /// Address of its pod, as in spec.replicas.
    pub address: IpAddr,
    /// Number of the take-over by which it got the tunnel: the greatest one has it.
    pub epoch: u64,
}

/// A cause of trouble between this gateway and the peer's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeeringFault {
    /// One word, such as NoAnswer, ProbeLoss, UnknownKey or CidrMismatch.
    pub reason: String,
    /// The cause, for a person.
    pub message: String,
    /// Remedy.
    pub remedy: String,
    /// Time of the first observation, or of the last packet from the peer (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

impl PeeringFault {
    /// Reasons whose age is part of the message: "no answer from milan for 4 s".
    pub const NO_ANSWER: &str = "NoAnswer";
    pub const NOT_RECEIVED: &str = "NotReceived";
    pub const NO_HANDSHAKE: &str = "NoHandshake";
    /// A Configuration that does not say what the peer reports of itself.
    pub const CIDR_MISMATCH: &str = "CidrMismatch";
}

/// What keeps a tunnel's MTU from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MtuBound {
    /// `spec.mtu`.
    Spec,
    /// The device or route towards the peer.
    Device,
    /// The VXLAN between the gateway and its cluster's nodes.
    Overlay,
    /// What gets through to the peer.
    Path,
}
