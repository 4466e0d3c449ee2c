//! Tests of the overlay against the real kernel, in namespaces that have no name and end with the test. They need
//! root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and /dev/net/tun.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod overlay;
#[path = "../../../tests/kernel/world.rs"]
mod world;
