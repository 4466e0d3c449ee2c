use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, ServiceSpec};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// What the address stands for, and where it comes from.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "ipam.liqo.io",
    version = "v1alpha1",
    kind = "IP",
    plural = "ips",
    category = "liqo",
    namespaced,
    doc = "An address to take from a Network, by which peers reach spec.ip.",
    status = "IPStatus",
    derive = "PartialEq",
    printcolumn(name = "Local IP", type_ = "string", json_path = ".spec.ip"),
    printcolumn(name = "Remapped IP", type_ = "string", json_path = ".status.ip"),
    printcolumn(name = "Remapped IP CIDR", type_ = "string", json_path = ".status.cidr"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct IPSpec {
    /// The address that the granted one stands for, of either family.
    #[schemars(
        schema_with = "schema::address",
        extend("x-kubernetes-validations" = schema::immutable("ip cannot change: delete this IP and create another"))
    )]
    pub ip: String,
    /// The Network to take the address from; without one, the cluster's external CIDR.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-map-type" = "atomic"))]
    pub network_ref: Option<ObjectReference>,
    /// A Service to make, named as this IP, with an EndpointSlice that leads to ip itself, each port to
    /// the same one there; none by default. Only in Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_template: Option<ServiceTemplate>,
    /// True: packets to ip leave the node with the node's own source address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
}

impl IPSpec {
    /// Address for which the granted one stands; none if `ip` is no address.
    pub fn address(&self) -> Option<IpAddr> {
        self.ip.parse().ok()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceTemplate {
    /// The Service's metadata.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub metadata: ServiceMetadata,
    /// The Service's spec; see kubectl explain service.spec.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    #[schemars(schema_with = "schema::service_spec")]
    pub spec: ServiceSpec,
}

/// What can be said of a Service's metadata beforehand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceMetadata {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finalizers: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct IPStatus {
    /// The address granted, of either family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        schema_with = "schema::address",
        extend("x-kubernetes-validations" = schema::immutable("an address granted stays: delete this IP to give it back"))
    )]
    pub ip: Option<String>,
    /// The prefix it was taken from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        extend("format" = "cidr"),
        extend("x-kubernetes-validations" = schema::immutable("an address granted stays: delete this IP to give it back"))
    )]
    pub cidr: Option<String>,
}
