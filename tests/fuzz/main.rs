//! Whatever bytes come from a network, a tunnel device or a user's file: nothing panics, and what
//! passes is as it must be.
//!
//! Plain `cargo test` runs the corpus and a bounded number of random inputs; `make fuzz` lets
//! coverage lead, also on stable Rust. Inputs are files: `__fuzz__/<target>/corpus`.

#![expect(clippy::unwrap_used, reason = "an input that breaks something is to be seen")]

mod aead;
mod datagram;
mod frame;
mod input;
mod manifests;
mod packet;
mod probe;
mod remap;
mod train;
mod world;
