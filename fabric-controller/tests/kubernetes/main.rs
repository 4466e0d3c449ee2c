//! The controller, as the program that it is, against a real API server.
//!
//! ```text
//! test --kubectl--> kube-apiserver <--watch, apply-- fabric-controller --gRPC--> ipam (in this process)
//! ```
//!
//! There is no kubelet and nothing else of a cluster: tests create the pods themselves. Prerequisites
//! of the server are documented in the crate `api-server`.

#![allow(clippy::unwrap_used)]

mod adoption;
mod bad;
mod beside_liqo;
mod cluster;
mod election;
mod endpoint;
#[expect(dead_code, reason = "other tests kill it")]
#[path = "../controller/ipam.rs"]
mod ipam;
mod namesake;
mod obstacles;
mod peers;
mod pod_start;
mod pods;
mod services;
mod stale_connection;
mod status;
mod stray;
mod unpeering;
mod unserved;
mod withdrawal;
mod workloads;
