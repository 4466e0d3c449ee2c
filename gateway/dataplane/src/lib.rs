//! Dataplane of the gateway: what packets go through, made and kept as the config wants it.
//!
//! * [`overlay`]: namespaces, devices, routes and filters.
//! * [`engine`]: the lane that moves packets, and its replacement.
//! * [`standby_relay`]: the relay of a replica without the tunnel.

pub mod engine;
pub mod overlay;
pub mod standby_relay;

#[cfg(test)]
#[path = "../../config/src/test_config.rs"]
mod test_config;
