use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// What is wanted.
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
    doc = "A prefix to take from ipam, so that nobody else of this cluster uses it.",
    status = "NetworkStatus",
    derive = "PartialEq",
    printcolumn(name = "Desired CIDR", type_ = "string", json_path = ".spec.cidr"),
    printcolumn(name = "Remapped CIDR", type_ = "string", json_path = ".status.cidr"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// The prefix wanted, of either family. Unless labels say otherwise, another of the same length
    /// is granted if this one is taken.
    #[schemars(
        extend("format" = "cidr"),
        extend("x-kubernetes-validations" = schema::immutable("cidr cannot change: delete this Network and create another"))
    )]
    pub cidr: String,
    /// How many of the first addresses are never handed out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        schema_with = "schema::count",
        extend("x-kubernetes-validations" = schema::immutable("preAllocated cannot change: delete this Network and create another"))
    )]
    pub pre_allocated: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkStatus {
    /// The prefix granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "cidr"))]
    pub cidr: Option<String>,
}
