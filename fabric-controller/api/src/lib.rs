//! The resources users write, the config weft publishes, and the words the rest of the workspace
//! uses for them. No I/O.
//!
//! * [`networking`], [`ipam`] and [`liqo_core`]: Liqo's custom resources, field for field.
//! * [`fabric`]: weft's own published config, in its own API group.
//! * [`Cidr`], [`ClusterId`], [`PublicKey`], [`PrivateKey`], [`Mac`]: values that are right by
//!   construction. Text is parsed into them at the edge and never validated again.
//! * [`check`]: what can be wrong with one object by itself.
//! * [`crds`]: the definitions of all these resources, for an API server.

#![allow(clippy::duplicated_attributes, reason = "printer columns have types and paths in common")]

mod cidr;
mod cluster_id;
mod keys;
mod mac;
mod schema;

pub mod check;
pub mod crds;
pub mod fabric;
pub mod ipam;
pub mod labels;
pub mod liqo_core;
pub mod networking;

pub use cidr::{Cidr, ParseCidrError};
pub use cluster_id::{ClusterId, ParseClusterIdError};
pub use keys::{KeyError, PrivateKey, PublicKey};
pub use mac::{Mac, ParseMacError, link_v6, overlay_v6};
