//! One gateway: the process that ends the tunnel of one peering.
//!
//! * [`config`]: what the gateway is to do, from the store.
//! * [`dataplane`]: namespaces, devices, routes and the lane, a thread without async runtime that
//!   moves packets.
//! * [`liveness`]: whether packets get through to the peer and to the nodes, and how large ones.
//! * [`replicas`]: which pod of the gateway has the tunnel.
//! * [`report`]: status, Connection, metrics and probes of the kubelet.
//! * [`state`]: what these share, each the latest value of a watch channel.
//!
//! `main` is the table of contents.

pub mod args;
pub mod config;
pub mod dataplane;
pub mod liveness;
pub mod replicas;
pub mod report;
pub mod state;
