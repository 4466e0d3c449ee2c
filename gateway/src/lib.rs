//! One gateway: the process that ends the tunnel of one peering.
//!
//! [`lane`] moves packets, on a thread of its own and without an async runtime. Everything else
//! here is what surrounds it: config and key in, network namespaces and routes, probes, status
//! and metrics out. `main` is the table of contents.

pub mod config;
pub mod connection;
pub mod dataplane;
pub mod desired;
pub mod endpoint;
pub mod engine;
pub mod health;
pub mod http;
pub mod input;
pub mod kept;
pub mod lane;
pub mod metrics;
pub mod monitor;
pub mod overlay;
pub mod overlay_probe;
pub mod path_mtu;
pub mod probe;
pub mod probe_log;
pub mod secret;
pub mod status;
