//! The controller and ipam, as programs, on a real API server.
//!
//! ```text
//! kubectl --> API server <-- fabric-controller --gRPC--> ipam
//!                  ^-------------------------------------/
//! ```

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

mod peering;
mod stage;
