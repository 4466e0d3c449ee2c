use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A prefix to take from ipam.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "ipam.liqo.io",
    version = "v1alpha1",
    kind = "Network",
    plural = "networks",
    shortname = "net",
    category = "liqo",
    namespaced,
    status = "NetworkStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// The prefix wanted; another of the same length may be granted.
    pub cidr: String,
    /// How many of the first addresses are never handed out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre_allocated: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkStatus {
    /// The prefix granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cidr: Option<String>,
}
