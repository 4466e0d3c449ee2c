//! Liqo's gRPC service `IPAM`, which ipam serves and the fabric-controller calls, and the
//! [`Address`] at which the two meet.
//!
//! The code is generated from `ipam.proto` and checked in, so that building needs no protoc; a
//! test generates it again and compares. Its names are prost's: `IPAcquire` is `ip_acquire`.

mod address;
#[allow(unused_qualifications, clippy::all, clippy::or_fun_call, clippy::use_self)]
#[rustfmt::skip]
mod generated;

pub use address::{Address, ParseAddressError};
pub use generated::*;
