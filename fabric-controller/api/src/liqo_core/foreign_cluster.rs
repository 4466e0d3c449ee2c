use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// Which cluster it is.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "core.liqo.io",
    version = "v1beta1",
    kind = "ForeignCluster",
    plural = "foreignclusters",
    shortname = "fc",
    category = "liqo",
    doc = "Another cluster that this one has to do with, and how that goes; it has the cluster's ID as name and as label liqo.io/remote-cluster-id.",
    status = "ForeignClusterStatus",
    derive = "PartialEq",
    printcolumn(name = "Role", type_ = "string", json_path = ".status.role"),
    printcolumn(name = "ClusterID", type_ = "string", json_path = ".spec.clusterID", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct ForeignClusterSpec {
    /// The cluster's ID.
    #[serde(rename = "clusterID")]
    #[schemars(
        extend("pattern" = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
        extend("x-kubernetes-validations" = schema::immutable("clusterID cannot change: delete this ForeignCluster and create another"))
    )]
    pub cluster_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForeignClusterStatus {
    /// The metadata.generation that the status was found for.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub observed_generation: i64,
    /// Whether the cluster uses resources of this one (Consumer), or this one uses its (Provider).
    #[schemars(
        extend("enum" = ["Consumer", "Provider", "ConsumerAndProvider", "Unknown"]),
        extend("default" = "Unknown")
    )]
    pub role: String,
    /// How each part of the peering is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<Modules>,
    /// Where the cluster's API server is.
    #[serde(default, rename = "apiServerUrl", skip_serializing_if = "String::is_empty")]
    pub api_server_url: String,
    /// The proxy through which that is reached.
    #[serde(default, rename = "foreignProxyUrl", skip_serializing_if = "String::is_empty")]
    pub foreign_proxy_url: String,
    /// The namespaces of the peering.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub tenant_namespace: TenantNamespaces,
    /// What concerns all modules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<ModuleCondition>,
}

/// The parts of a peering.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Modules {
    pub networking: Module,
    pub authentication: Module,
    pub offloading: Module,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Module {
    /// Whether this part is in use with this cluster.
    pub enabled: bool,
    /// All is well while each is Ready or Established.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<ModuleCondition>,
}

/// One aspect. Unlike that of Kubernetes' own conditions, its status is a word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleCondition {
    /// Which aspect.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = [
        "APIServerStatus",
        "NetworkConnectionStatus",
        "NetworkGatewayServerStatus",
        "NetworkGatewayClientStatus",
        "NetworkGatewayPresence",
        "NetworkConfigurationStatus",
        "AuthIdentityControlPlaneStatus",
        "AuthTenantStatus",
        "OffloadingVirtualNodeStatus",
        "OffloadingNodeStatus",
    ]))]
    pub type_: String,
    /// How it is.
    #[schemars(
        extend("enum" = ["None", "Pending", "Established", "Error", "Ready", "NotReady", "SomeNotReady"]),
        extend("default" = "None")
    )]
    pub status: String,
    /// When status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: Option<String>,
    /// Why, in one word for programs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(transform = schema::no_default)]
    pub reason: String,
    /// The same in a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(transform = schema::no_default)]
    pub message: String,
}

/// The namespaces of one peering, here and there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TenantNamespaces {
    /// Its name in this cluster.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local: String,
    /// Its name in the other cluster.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remote: String,
}
