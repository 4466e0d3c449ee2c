//! Reachability and packet sizes: of the peer and of the nodes.

pub mod monitor;
pub mod overlay_probe;
