use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The other side's WireGuard public key.
///
/// The plural is spelled `publickeies`: clients have it built in.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "networking.liqo.io",
    version = "v1beta1",
    kind = "PublicKey",
    root = "PublicKeyObject",
    plural = "publickeies",
    shortname = "pk",
    shortname = "pkies",
    shortname = "pkey",
    category = "liqo",
    namespaced,
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct PublicKeySpec {
    /// Base64 of the raw 32 bytes.
    pub public_key: String,
}
