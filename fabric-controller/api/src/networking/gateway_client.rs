use k8s_openapi::api::core::v1::{LocalObjectReference, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EndpointStatus, InternalEndpoint};
use crate::schema;

/// How the gateway is made, and where its server is.
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
    doc = "The end of a peering that connects to the other's GatewayServer. Its label liqo.io/remote-cluster-id names the peer.",
    status = "GatewayClientStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Template Kind",
        type_ = "string",
        json_path = ".spec.clientTemplateRef.kind",
        priority = 1
    ),
    printcolumn(
        name = "Template Name",
        type_ = "string",
        json_path = ".spec.clientTemplateRef.name"
    ),
    printcolumn(
        name = "Template Namespace",
        type_ = "string",
        json_path = ".spec.clientTemplateRef.namespace",
        priority = 1
    ),
    printcolumn(name = "IP", type_ = "string", json_path = ".spec.endpoint.addresses[*]"),
    printcolumn(name = "Port", type_ = "string", json_path = ".spec.endpoint.port"),
    printcolumn(
        name = "Protocol",
        type_ = "string",
        json_path = ".spec.endpoint.protocol",
        priority = 1
    ),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".spec.mtu", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClientSpec {
    /// The WgGatewayClientTemplate that the gateway is made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub client_template_ref: Option<ObjectReference>,
    /// Upper bound of the tunnel's MTU, in bytes, 576 to 65535; without one, devices and the path
    /// decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::integer")]
    pub mtu: Option<i64>,
    /// Where the server can be reached: what its GatewayServer has in status.endpoint.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub endpoint: EndpointStatus,
    /// The Secret with the key pair, privateKey and publicKey of 32 bytes each. One is made if this
    /// names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::secret_reference")]
    pub secret_ref: Option<LocalObjectReference>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayClientStatus {
    /// What is wrong, while something is. Of weft's, beyond Liqo's fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// What the controller has made of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub client_ref: Option<ObjectReference>,
    /// The Secret with the key pair. Its publicKey goes into a PublicKey at the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub secret_ref: Option<ObjectReference>,
    /// Where the gateway runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_endpoint: Option<InternalEndpoint>,
}
