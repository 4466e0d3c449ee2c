use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::CidrList;
use crate::schema;

/// Condition of a Configuration: the peer's CIDRs have their remapped counterparts.
pub const NETWORK_CIDRS_CONFIGURED: &str = "NetworkCIDRsConfigured";
/// Condition of any object, `False` while its newest manifest is not used, with what is wrong; the
/// last good version, if there is one, stands meanwhile. Absent while nothing is wrong.
pub const ACCEPTED: &str = "Accepted";
/// Condition of gateways and Configurations, `False` with cause and remedy while the gateway reports
/// trouble with the peer's. Absent while it reports none.
pub const PEER_HEALTHY: &str = "PeerHealthy";
/// Condition of a Configuration, GatewayServer or GatewayClient: every node with a live route-agent
/// reaches the gateway through the overlay; its message names those that do not. Absent while the
/// gateway answers no probes of nodes.
pub const NODES_REACHABLE: &str = "NodesReachable";

/// Condition of gateways in Kubernetes, `False` with the reason while a pod of the gateway does not start,
/// whether another one is ready or not. Absent while all start.
pub const PODS_STARTED: &str = "PodsStarted";

/// What a peering's CIDRs are.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "Configuration",
    plural = "configurations",
    shortname = "conf",
    category = "liqo",
    namespaced,
    doc = "Which CIDRs a peer uses, and how this cluster sees them. Its label liqo.io/remote-cluster-id names the peer.",
    status = "ConfigurationStatus",
    derive = "PartialEq",
    printcolumn(name = "Desired Pod CIDR ", type_ = "string", json_path = ".spec.remote.cidr.pod"),
    printcolumn(
        name = "Remapped Pod CIDR",
        type_ = "string",
        json_path = ".status.remote.cidr.pod"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Desired External CIDR",
        type_ = "string",
        json_path = ".spec.remote.cidr.external",
        priority = 1
    ),
    printcolumn(
        name = "Remapped External CIDR",
        type_ = "string",
        json_path = ".status.remote.cidr.external",
        priority = 1
    ),
    printcolumn(
        name = "ClusterID",
        type_ = "string",
        json_path = r".metadata.labels.liqo\.io/remote-cluster-id",
        priority = 1
    )
)]
pub struct ConfigurationSpec {
    /// This cluster's own CIDRs. The controller fills them in: leave them out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<SideConfig>,
    /// The peer's CIDRs, as the peer uses them, whether or not they are taken here.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub remote: SideConfig,
}

/// One cluster's side of a peering.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SideConfig {
    /// The cluster's CIDRs. A plain string, as older guides have it, is stored as a list of one; only
    /// server-side apply refuses strings and says that it expects a list.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub cidr: ClusterCidrs,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterCidrs {
    /// Where the cluster's pods are, such as 10.200.0.0/16; prefixes of either family.
    #[serde(default, skip_serializing_if = "CidrList::is_empty")]
    pub pod: CidrList,
    /// What stands for everything else of the cluster: hosts, external clients, IP resources.
    #[serde(default, skip_serializing_if = "CidrList::is_empty")]
    pub external: CidrList,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationStatus {
    /// NetworkCIDRsConfigured is True once every CIDR of spec.remote has its counterpart in
    /// status.remote, and nodes have routes there. Accepted is False while the spec is not used, with what is wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// The peer's CIDRs as this cluster sees them, index by index as in spec.remote. Pods here
    /// reach the peer's pods by these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<SideConfig>,
}
