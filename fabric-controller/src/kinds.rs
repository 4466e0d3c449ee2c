//! Kinds of the store that the controller reads and writes.

use fabric_store::Kind;

/// Kinds that the controller reads. Nothing depends on a Namespace.
pub const READ: [Kind; 14] = [
    Kind::ConfigMap,
    Kind::Secret,
    Kind::Node,
    Kind::Network,
    Kind::Ip,
    Kind::Configuration,
    Kind::Connection,
    Kind::GatewayServer,
    Kind::GatewayClient,
    Kind::PublicKey,
    Kind::GatewayConfig,
    Kind::NodeConfig,
    Kind::FabricRecord,
    Kind::GatewayRecord,
];
/// Kinds of which it writes whole objects.
pub(crate) const WRITTEN: [Kind; 7] = [
    Kind::Network,
    Kind::Ip,
    Kind::Secret,
    Kind::GatewayConfig,
    Kind::NodeConfig,
    Kind::FabricRecord,
    Kind::GatewayRecord,
];
/// Kinds of which it writes statuses.
pub(crate) const STATUSES: [Kind; 5] =
    [Kind::Network, Kind::Ip, Kind::Configuration, Kind::GatewayServer, Kind::GatewayClient];
