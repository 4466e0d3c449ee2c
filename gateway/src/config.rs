//! Desired state of the gateway: its config and key from the store, and the address of the peer.

pub mod desired;
pub mod endpoint;
pub mod input;
mod published;
pub mod restart_cache;
pub mod secret;
