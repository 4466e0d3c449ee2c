use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::TemplateKind;
use crate::schema;

/// What is made of it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "WgGatewayServerTemplate",
    plural = "wggatewayservertemplates",
    shortname = "wggst",
    shortname = "wgst",
    category = "liqo",
    namespaced,
    doc = "What gateways of a GatewayServer that refers to it are made from.",
    label("networking.liqo.io/gatewaytemplate", "true"),
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct WgGatewayServerTemplateSpec {
    /// The kind of object that Liqo makes of the template: WgGatewayServer.
    #[serde(default, skip_serializing_if = "schema::is_default")]
    pub object_kind: TemplateKind,
    /// metadata and spec of that object. Texts are Go templates with .Spec (of the GatewayServer),
    /// .Name, .Namespace, .GatewayUID, .ClusterID and .SecretName. A key that begins with ? is left
    /// out if its value turns out empty.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "schema::any_object")]
    pub template: Map<String, Value>,
}
