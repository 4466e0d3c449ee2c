use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The key itself.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "PublicKey",
    root = "PublicKeyObject",
    plural = "publickeies", // clients have this spelling built in
    shortname = "pk",
    shortname = "pkies",
    shortname = "pkey",
    category = "liqo",
    namespaced,
    doc = "The peer's WireGuard public key. Its label liqo.io/remote-cluster-id names the peer.",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct PublicKeySpec {
    /// The 32 bytes of the key in base64, as wg pubkey prints them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(extend("format" = "byte"))]
    pub public_key: String,
}
