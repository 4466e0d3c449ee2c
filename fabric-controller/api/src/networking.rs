//! `networking.liqo.io/v1beta1`, field for field as Liqo has it.

mod cidr_list;
mod configuration;
mod connection;
mod gateway_client;
mod gateway_server;
mod public_key;
mod wg_gateway_client_template;
mod wg_gateway_server_template;

pub use cidr_list::CidrList;
pub use configuration::{
    ACCEPTED, ClusterCidrs, Configuration, ConfigurationSpec, ConfigurationStatus,
    NETWORK_CIDRS_CONFIGURED, NODES_REACHABLE, PEER_HEALTHY, PODS_STARTED, SideConfig,
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
pub use wg_gateway_client_template::{WgGatewayClientTemplate, WgGatewayClientTemplateSpec};
pub use wg_gateway_server_template::{WgGatewayServerTemplate, WgGatewayServerTemplateSpec};

use k8s_openapi::api::core::v1::LocalObjectReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// Where a gateway can be reached: a server's status, a client's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::ports()))]
pub struct EndpointStatus {
    /// IP addresses of either family, or DNS names; the first that answers is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// The UDP port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<i32>,
    /// Several UDP ports instead of one; the first is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub ports: Vec<i32>,
    /// UDP for WireGuard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["TCP", "UDP"]))]
    pub protocol: Option<String>,
}

/// The address of the gateway inside its own cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InternalEndpoint {
    /// The gateway's address, of either family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::address")]
    pub ip: Option<String>,
    /// Name of the node it runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// What a template is a template of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateKind {
    /// Such as networking.liqo.io/v1beta1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Such as WgGatewayServer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

/// The name in a `secretRef`, if it has one.
pub fn secret_name(secret_ref: Option<&LocalObjectReference>) -> Option<&str> {
    secret_ref.map(|r| r.name.as_str()).filter(|name| !name.is_empty())
}
