//! Reachability and packet sizes: of the peer and of the nodes.

pub mod alternation;
pub mod connection;
pub mod health;
pub mod monitor;
pub mod overlay_probe;
pub mod path_mtu;
pub mod probe;
pub mod probe_log;
