//! `fabric.weft.dev/v1alpha1`: what the fabric-controller publishes for gateways and route-agents.
//!
//! A group of its own, so that Liqo's installed CRDs are never touched. Never any key material.
//! Prefixes are written as text here; consumers parse them into [`crate::Cidr`] once, at the edge.

use std::net::{IpAddr, Ipv4Addr};

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::networking::ConnectionType as Role;

/// VXLAN network identifier and UDP port of the overlay: Liqo's own old values (4789, 6081 and
/// 8472 belong to CNIs).
pub const VNI: u32 = 18952;
pub const VXLAN_PORT: u16 = 4879;
/// UDP port of Liqo's connection probe.
pub const PROBE_PORT: u16 = 12345;
/// Stands for a tunnel's MTU where none is given: as large as IP packets can be, so that devices
/// and the path decide.
pub const NO_MTU: u32 = 65_535;

/// Everything one gateway needs, except its private key. Name and namespace are those of its
/// GatewayServer or GatewayClient.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "GatewayConfig",
    plural = "gatewayconfigs",
    shortname = "gwcfg",
    category = "weft",
    namespaced,
    status = "GatewayConfigStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayConfigSpec {
    /// This cluster.
    pub cluster_id: String,
    /// The other one.
    pub peer_cluster_id: String,
    pub role: Role,
    /// UID of the GatewayServer or GatewayClient.
    pub gateway_uid: String,
    /// Name of the Secret with the private key, in this object's namespace.
    pub secret_name: String,
    /// The peer's key, base64; absent until its PublicKey arrives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_public_key: Option<String>,
    /// UDP port to listen on; absent for a client, which takes any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
    /// Where the peer is; absent for a server, which learns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Upper bound of the tunnel's MTU, in bytes; [`NO_MTU`] if the user names none.
    pub mtu: u32,
    /// 169.254.18.1 for a server, .2 for a client.
    pub tunnel_address: Ipv4Addr,
    pub peer_tunnel_address: Ipv4Addr,
    /// The peer's prefixes: what it uses, and what this cluster sees instead.
    pub remaps: Vec<Remap>,
    /// This cluster's pod CIDRs, which the peer may reach.
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
    /// Name of the node those go to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_node: Option<String>,
    pub overlay: GatewayOverlay,
    pub nodes: Vec<OverlayNode>,
    pub probe: ProbeSettings,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerEndpoint {
    /// IP addresses or DNS names; the first that answers is used.
    pub addresses: Vec<String>,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Remap {
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
    /// Standalone: the address of its end of the veth to the host, from the internal CIDR. The
    /// nodes send VXLAN there. Absent in Kubernetes, where a pod has its own address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_address: Option<Ipv4Addr>,
    /// The node that the gateway runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// A node as a gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OverlayNode {
    pub name: String,
    /// Its VXLAN device's address, from the internal CIDR.
    pub overlay: Ipv4Addr,
    /// Where VXLAN is sent to.
    pub underlay: IpAddr,
    /// Pod CIDRs of the node, /32s and /128s of pods outside them, the node's external addresses,
    /// and those of IP resources that stand for its pods.
    pub prefixes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProbeSettings {
    pub enabled: bool,
    /// 100 to 10,000.
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
    /// `metadata.generation` of the config that the dataplane runs on.
    #[serde(default)]
    pub applied_generation: i64,
    /// What keeps the newest config from being applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Where the peer was last heard from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_endpoint: Option<String>,
    /// RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_handshake: Option<String>,
    /// Bytes of inner packets.
    #[serde(default)]
    pub received_bytes: u64,
    #[serde(default)]
    pub transmitted_bytes: u64,
    /// The tunnel's MTU in force, in bytes.
    #[serde(default)]
    pub mtu: u32,
    /// What the tunnel's MTU follows from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_bound: Option<MtuBound>,
    /// The largest IP packet that is known to reach the peer over the underlay, in bytes. No larger
    /// ones are tried than the other bounds allow. Absent unless the peer answers such probes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// UDP port the gateway listens on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen_port: Option<u16>,
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

/// Everything one route-agent needs. Cluster-wide; name is the node's.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "fabric.weft.dev",
    version = "v1alpha1",
    kind = "NodeConfig",
    plural = "nodeconfigs",
    shortname = "nodecfg",
    category = "weft",
    status = "NodeConfigStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct NodeConfigSpec {
    pub cluster_id: String,
    /// The node's own overlay address; absent until ipam has granted it. Its VXLAN devices have
    /// the MAC address that follows from it, and no IP address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<Ipv4Addr>,
    /// The node's addresses, at most one a family; the first is preferred.
    pub underlay: Vec<IpAddr>,
    /// Sources on this node that keep their address: the node's pod CIDRs, and pods outside them.
    pub local_pods: Vec<String>,
    /// The cluster's pod CIDRs.
    pub pod_cidrs: Vec<String>,
    /// The external address, one a family, that all other sources of this node are given.
    pub external: Vec<IpAddr>,
    /// One for each peering of the cluster.
    pub peerings: Vec<NodePeering>,
    /// IP resources: packets to `external` go to `target`, by conntrack, on this node.
    #[serde(default)]
    pub ips: Vec<NodeAddressMap>,
    /// The cluster's internal CIDR, where overlay addresses and gateways' link addresses come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_cidr: Option<String>,
    /// Underlay addresses that VXLAN is accepted from: the gateways'.
    pub vxlan_sources: Vec<IpAddr>,
    /// Pods, too, are given the node's external address.
    #[serde(default)]
    pub full_masquerade: bool,
    /// The node leaves the fabric: its agent takes everything away.
    #[serde(default)]
    pub removed: bool,
}

/// A peering as a node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePeering {
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
    /// Where VXLAN to it is sent.
    pub underlay: IpAddr,
    /// Standalone: the address of the gateway's host, through which other hosts reach `underlay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeAddressMap {
    pub external: IpAddr,
    pub target: IpAddr,
    /// True: packets to `target` leave with the node's own address.
    pub masquerade: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeConfigStatus {
    #[serde(default)]
    pub applied_generation: i64,
    /// What the agent could not do, or found in its way (a dropping FORWARD policy, a covering route).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}
