//! Desired state of the gateway: its config and its private key, from the store.
//!
//! * [`input`]: the latest of both, watched.
//! * [`desired`]: a config, parsed and checked.
//! * [`restart_cache`]: what a start without the store begins with.

pub mod desired;
pub mod input;
mod published;
pub mod restart_cache;
mod secret;

#[cfg(test)]
mod test_config;
