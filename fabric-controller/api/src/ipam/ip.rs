use k8s_openapi::api::core::v1::ObjectReference;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An address to take from a Network (the external CIDR unless `networkRef` says otherwise),
/// standing for `spec.ip`.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "ipam.liqo.io",
    version = "v1alpha1",
    kind = "IP",
    plural = "ips",
    category = "liqo",
    namespaced,
    status = "IPStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct IPSpec {
    /// The address that the granted one stands for.
    pub ip: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_ref: Option<ObjectReference>,
    /// True: packets to `ip` leave the node with the node's own source address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct IPStatus {
    /// The address granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
    /// The prefix it was taken from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr: Option<String>,
}
