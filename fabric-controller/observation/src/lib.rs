//! Observes a running fabric: what is published, and what really runs.
//!
//! * [`host`] looks at a run directory and its processes, [`cluster`] at an API server and its pods.
//! * [`observe`] joins either with the resources of the store. Pure.

pub mod cluster;
pub mod host;
mod observe;

pub use observe::{Found, Life, Liveness, Observation, Peering, Refused, State, Transit, observe};
