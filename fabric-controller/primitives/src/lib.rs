//! Values that are right by construction: text is parsed into them at the edge and never validated
//! again. They use nothing of Kubernetes, so the packet path and the plans depend on them alone.

mod cidr;
mod cluster_id;
mod keys;
mod mac;

pub use cidr::{Cidr, ParseCidrError};
pub use cluster_id::{ClusterId, ParseClusterIdError};
pub use keys::{KeyError, PrivateKey, PublicKey};
pub use mac::{Mac, ParseMacError, link_v6, overlay_v6};
