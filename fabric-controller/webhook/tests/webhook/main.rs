//! The webhook, called by a real kubectl through a real API server, with no more rights than it needs.
//!
//! ```text
//! kubectl --> API server --URL in place of the Service--> replica <--TLS-- the test
//!               ^  Secret, MutatingWebhookConfiguration      |
//!               +--------------------------------------------+
//! ```

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

mod certificate;
mod foreign_clusters;
mod logs;
mod replica;
mod strings;
mod world;
