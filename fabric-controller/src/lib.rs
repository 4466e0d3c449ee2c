//! The fabric-controller: custom resources in, dataplane config and statuses out.
//!
//! [`fabric_core`] compiles the desired objects, [`publish`] writes what differs, [`grants`] sends
//! requests to ipam, and [`control`] joins them. In Kubernetes, [`gateway_workloads`] makes the
//! gateways run.

pub mod control;
pub mod grants;
pub mod kinds;
pub mod metrics;
mod pacing;
pub mod publish;
mod stale_connections;
mod status_pacing;
pub mod vitals;
