//! The fabric-controller: custom resources in, dataplane config and statuses out.
//!
//! [`fabric_core`] says what should be, [`publish`] writes what differs, [`grants`] asks ipam, and
//! [`control`] joins them. In Kubernetes, [`gateway_workloads`] makes the gateways run.

pub mod control;
pub mod grants;
pub mod kinds;
pub mod metrics;
pub mod publish;
pub mod refusals;
mod silence;
pub mod vitals;
