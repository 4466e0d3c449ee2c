//! Namespaces, devices, routes, and the lane that moves packets.

pub mod engine;
pub mod overlay;
pub mod reconcile;
