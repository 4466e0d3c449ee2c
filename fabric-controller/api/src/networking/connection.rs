use k8s_openapi::api::core::v1::ObjectReference;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// Which gateway reports.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "Connection",
    plural = "connections",
    shortname = "conn",
    category = "liqo",
    namespaced,
    doc = "The state of one peering's tunnel, written by its gateway.",
    status = "ConnectionStatus",
    derive = "PartialEq",
    printcolumn(name = "Type", type_ = "string", json_path = ".spec.type"),
    printcolumn(name = "Status", type_ = "string", json_path = ".status.value"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Latency",
        type_ = "string",
        json_path = ".status.latency.value",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionSpec {
    /// Whether this cluster's gateway listens (Server) or connects (Client).
    #[serde(rename = "type")]
    pub type_: ConnectionType,
    /// The gateway: name and UID are those of its GatewayServer or GatewayClient.
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub gateway_ref: ObjectReference,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConnectionType {
    Server,
    Client,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConnectionStatus {
    /// Connected: packets get through now, in both directions. Connecting: not yet. Error: they
    /// did, and no longer do.
    #[serde(default)]
    #[schemars(with = "String", transform = schema::no_default)]
    pub value: ConnectionValue,
    /// How long packets take to the peer and back.
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
    /// Such as 12ms, 850μs (U+03BC) below one millisecond, or N/A. Liqo reads it back as a Go
    /// duration.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// When it was measured (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub timestamp: Option<String>,
}
