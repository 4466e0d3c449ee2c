use k8s_openapi::api::core::v1::{LocalObjectReference, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EndpointStatus, InternalEndpoint};

/// The end of a peering that connects.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "GatewayClient",
    plural = "gatewayclients",
    shortname = "gwc",
    shortname = "gwclient",
    category = "liqo",
    namespaced,
    status = "GatewayClientStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClientSpec {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_template_ref: Option<ObjectReference>,
    /// Upper bound of the tunnel's MTU, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i32>,
    /// Where the server can be reached.
    pub endpoint: EndpointStatus,
    /// The Secret with the key pair; one is made if this says none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalObjectReference>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClientStatus {
    /// Of weft's, beyond Liqo's fields; only while something is wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_ref: Option<ObjectReference>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<ObjectReference>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_endpoint: Option<InternalEndpoint>,
}
