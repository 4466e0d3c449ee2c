//! The fabric-controller: custom resources in, dataplane config and statuses out.
//!
//! [`index`] holds what is known, [`compile()`] says what should be (pure: same input, same
//! output), [`publish`] writes what differs, [`grants`] asks ipam, and [`control`] joins them. In
//! Kubernetes, [`kubernetes`] makes the gateways run.

pub mod compile;
pub mod control;
pub mod grants;
pub mod index;
pub mod kubernetes;
pub mod metrics;
pub mod node_paths;
pub mod obstacles;
pub mod placement;
pub mod probe;
pub mod publish;
pub mod refusals;
mod silence;
mod stragglers;
pub mod vitals;
pub mod webhook;

pub use compile::{Published, compile};
pub use index::{Index, Settings};
pub use probe::ProbeArgs;
