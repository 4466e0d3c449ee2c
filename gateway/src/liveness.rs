//! Whether packets get through, and how large ones: to the peer and to the nodes.

pub mod connection;
pub mod health;
pub mod monitor;
pub mod overlay_probe;
pub mod path_mtu;
pub mod probe;
pub mod probe_log;
