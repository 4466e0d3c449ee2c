use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LocalObjectReference, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EndpointStatus, InternalEndpoint};
use crate::schema;

/// How the gateway is made, and how it can be reached.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "GatewayServer",
    plural = "gatewayservers",
    shortname = "gws",
    shortname = "gwserver",
    category = "liqo",
    namespaced,
    doc = "The end of a peering that listens for the other's GatewayClient. Its label liqo.io/remote-cluster-id names the peer.",
    status = "GatewayServerStatus",
    derive = "PartialEq",
    printcolumn(
        name = "Template Kind",
        type_ = "string",
        json_path = ".spec.serverTemplateRef.kind",
        priority = 1
    ),
    printcolumn(
        name = "Template Name",
        type_ = "string",
        json_path = ".spec.serverTemplateRef.name"
    ),
    printcolumn(
        name = "Template Namespace",
        type_ = "string",
        json_path = ".spec.serverTemplateRef.namespace",
        priority = 1
    ),
    printcolumn(name = "IP", type_ = "string", json_path = ".status.endpoint.addresses[*]"),
    printcolumn(name = "Port", type_ = "string", json_path = ".status.endpoint.port"),
    printcolumn(
        name = "Protocol",
        type_ = "string",
        json_path = ".status.endpoint.protocol",
        priority = 1
    ),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".spec.mtu", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GatewayServerSpec {
    /// The WgGatewayServerTemplate that the gateway is made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub server_template_ref: Option<ObjectReference>,
    /// Upper bound of the tunnel's MTU, in bytes, 576 to 65535; without one, devices and the path
    /// decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::integer")]
    pub mtu: Option<i64>,
    /// How clients reach the gateway.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub endpoint: ServerEndpoint,
    /// The Secret with the key pair, privateKey and publicKey of 32 bytes each. One is made if this
    /// names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::secret_reference")]
    pub secret_ref: Option<LocalObjectReference>,
    /// Annotations for the gateway's Service, over those of the template.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub service_annotations: BTreeMap<String, String>,
    /// Labels for the gateway's Service, over those of the template.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub service_labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::server_ports()))]
pub struct ServerEndpoint {
    /// The Service's UDP port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<i32>,
    /// Several UDP ports instead of one; the first is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub ports: Vec<i32>,
    /// How the gateway's Service is exposed: ClusterIP, NodePort or LoadBalancer. ExternalName is
    /// not supported.
    #[serde(default)]
    pub service_type: ServiceType,
    /// The port on every node, for a NodePort Service; without one, the cluster picks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_port: Option<i32>,
    /// Several ports on every node instead of one; the first is used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub node_ports: Vec<i32>,
    /// The address to ask the load balancer for, if it supports that.
    #[serde(default, rename = "loadBalancerIP", skip_serializing_if = "Option::is_none")]
    pub load_balancer_ip: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
    ExternalName,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayServerStatus {
    /// What is wrong, while something is. Of weft's, beyond Liqo's fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// What the controller has made of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub server_ref: Option<ObjectReference>,
    /// Where clients find the gateway: what goes into spec.endpoint of the peer's GatewayClient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<EndpointStatus>,
    /// The Secret with the key pair. Its publicKey goes into a PublicKey at the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub secret_ref: Option<ObjectReference>,
    /// Where the gateway runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_endpoint: Option<InternalEndpoint>,
}
