//! `networking.liqo.io/v1beta1`, field for field as Liqo has it.

mod cidr_list;
mod configuration;
mod connection;
mod gateway_client;
mod gateway_server;
mod public_key;

pub use cidr_list::CidrList;
pub use configuration::{
    ACCEPTED, ClusterCidrs, Configuration, ConfigurationSpec, ConfigurationStatus,
    NETWORK_CIDRS_CONFIGURED, SideConfig,
};
pub use connection::{
    Connection, ConnectionLatency, ConnectionSpec, ConnectionStatus, ConnectionType,
    ConnectionValue,
};
pub use gateway_client::{GatewayClient, GatewayClientSpec, GatewayClientStatus};
pub use gateway_server::{
    GatewayServer, GatewayServerSpec, GatewayServerStatus, ServerEndpoint, ServiceType,
};
pub use public_key::{PublicKeyObject, PublicKeySpec};

use k8s_openapi::api::core::v1::LocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where a gateway can be reached: a server's status, a client's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EndpointStatus {
    /// IP addresses or DNS names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<i32>,
    /// More ports, for more lanes; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<i32>,
    /// Always UDP for WireGuard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// The address of the gateway inside its own cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InternalEndpoint {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The name in a `secretRef`, if it says one.
pub fn secret_name(secret_ref: Option<&LocalObjectReference>) -> Option<&str> {
    secret_ref.map(|r| r.name.as_str()).filter(|name| !name.is_empty())
}
