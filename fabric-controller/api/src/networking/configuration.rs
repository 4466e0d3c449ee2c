use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::CidrList;

/// Condition of a Configuration: the peer's CIDRs have their remapped counterparts.
pub const NETWORK_CIDRS_CONFIGURED: &str = "NetworkCIDRsConfigured";
/// Condition of any object, `False` while its newest manifest is not used, with what is wrong; the
/// last good version, if there is one, stands meanwhile. Absent while nothing is wrong.
pub const ACCEPTED: &str = "Accepted";

/// Which CIDRs a peer uses, and how this cluster sees them.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "Configuration",
    plural = "configurations",
    shortname = "conf",
    category = "liqo",
    namespaced,
    status = "ConfigurationStatus",
    derive = "PartialEq"
)]
pub struct ConfigurationSpec {
    /// This cluster's own CIDRs, filled in by the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<SideConfig>,
    /// The peer's CIDRs, as the peer uses them.
    pub remote: SideConfig,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SideConfig {
    #[serde(default)]
    pub cidr: ClusterCidrs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterCidrs {
    #[serde(default)]
    pub pod: CidrList,
    #[serde(default)]
    pub external: CidrList,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationStatus {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The peer's CIDRs as this cluster sees them, index by index as in `spec.remote`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<SideConfig>,
}
