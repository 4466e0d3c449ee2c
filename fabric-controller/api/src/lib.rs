//! The resources users write, the config weft publishes, and the words the rest of the workspace
//! uses for them. No I/O.
//!
//! * [`networking`], [`ipam`] and [`liqo_core`]: Liqo's custom resources, field for field.
//! * [`fabric`]: weft's own published config, in its own API group.
//! * [`Cidr`], [`ClusterId`], [`PublicKey`], [`PrivateKey`], [`Mac`]: those of `fabric-primitives`.
//! * [`check`]: what can be wrong with one object by itself.
//! * [`crds`]: the definitions of all these resources, for an API server.

#![allow(clippy::duplicated_attributes, reason = "printer columns have types and paths in common")]

mod schema;

pub mod check;
pub mod crds;
pub mod fabric;
pub mod ipam;
pub mod labels;
pub mod liqo_core;
pub mod networking;

pub use fabric_primitives::{
    Cidr, ClusterId, KeyError, Mac, ParseCidrError, ParseClusterIdError, ParseMacError, PrivateKey,
    PublicKey, link_v6, overlay_v6,
};
