use k8s_openapi::api::core::v1::ObjectReference;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of one peering's tunnel, written by its gateway.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "Connection",
    plural = "connections",
    shortname = "conn",
    category = "liqo",
    namespaced,
    status = "ConnectionStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionSpec {
    #[serde(rename = "type")]
    pub type_: ConnectionType,
    pub gateway_ref: ObjectReference,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConnectionType {
    Server,
    Client,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConnectionStatus {
    #[serde(default)]
    pub value: ConnectionValue,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<ConnectionLatency>,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum ConnectionValue {
    /// Packets get through now, in both directions.
    Connected,
    /// Not yet.
    #[default]
    Connecting,
    /// They did, and no longer do.
    Error,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConnectionLatency {
    /// `<n>ms`, `<n>μs` (U+03BC) below one millisecond, or `N/A`: Liqo reads it back as a Go duration.
    pub value: String,
    /// RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
}
