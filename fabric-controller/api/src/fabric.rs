//! `fabric.weft.dev/v1alpha1`: what the fabric-controller publishes for gateways and route-agents.
//!
//! A group of its own, so that Liqo's installed CRDs are never touched. Never any key material.
//! Prefixes are written as text here; consumers parse them into [`crate::Cidr`] once, at the edge.

mod gateway_config;
mod gateway_record;
mod node_config;
mod overlay_probe;
mod record;
mod records;

pub use gateway_config::{
    ActiveReplica, AddressMap, GatewayConfig, GatewayConfigSpec, GatewayConfigStatus,
    GatewayOverlay, GatewayReplica, IpFamily, MtuBound, OverlayNode, PeerEndpoint, PeeringFault,
    ProbeSettings, Remap, RemapKind,
};
pub use gateway_record::{
    GatewayClusterRecord, GatewayRecord, GatewayRecordSpec, NodeRecord, PeerPrefixes, gateway_spec,
};
pub use node_config::{
    Diversion, ForwardingOff, MovedAddress, NodeAddressMap, NodeConfig, NodeConfigSpec,
    NodeConfigStatus, NodeGateway, NodePeering, OverlappingPods, PacketDrop, REFUSE_SECONDS,
    RefusedPrefix, RefusedTraffic, ReportingAgent, UndoneStep,
};

pub use overlay_probe::{
    CrampedGateway, CutOffGateway, GatewayProbe, LossyGateway, OverlayProbe, PathFault,
    UnreachableGateway, UnreachableNode,
};
pub use record::{
    ClusterRecord, FabricRecord, FabricRecordSpec, PeeringGateway, PeeringRecord, common_family,
    node_spec,
};
pub use records::{Record, RecordVersion, Records, digest, version};

pub use crate::networking::ConnectionType as Role;

/// VXLAN network identifier and UDP port of the overlay: Liqo's own old values (4789, 6081 and
/// 8472 belong to CNIs).
pub const VNI: u32 = 18952;
pub const VXLAN_PORT: u16 = 4879;
/// UDP port of Liqo's connection probe.
pub const PROBE_PORT: u16 = 12345;
/// UDP port where a gateway answers the probes of nodes, at its overlay address only.
pub const OVERLAY_PROBE_PORT: u16 = 12346;
/// Stands for a tunnel's MTU where none is given: as large as IP packets can be, so that devices
/// and the path decide.
pub const NO_MTU: u32 = 65_535;
