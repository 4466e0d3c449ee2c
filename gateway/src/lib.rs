//! One gateway: the process that ends the tunnel of one peering.
//!
//! * [`endpoint`]: where the peer is.
//! * [`reconcile`]: namespaces, devices, routes and the lane, a thread without async runtime that
//!   moves packets, kept as [`gateway_config`] wants them by [`gateway_dataplane`].
//! * [`liveness`]: whether packets get through to the peer and to the nodes, and how large ones.
//! * [`replicas`]: which pod of the gateway has the tunnel.
//! * [`report`]: status, Connection, metrics and probes of the kubelet.
//! * [`state`]: what these share, each the latest value of a watch channel.
//!
//! `main` is the table of contents.

pub mod args;
pub mod endpoint;
pub mod liveness;
pub mod reconcile;
pub mod replicas;
pub mod report;
pub mod state;

#[cfg(test)]
#[path = "../config/src/test_config.rs"]
mod test_config;
