//! Client of a Kubernetes API server: the connection, [`requests`] with a time limit, watches that are
//! retried by themselves ([`reflector`]), leader election ([`lease`]) and Events ([`Emitter`]).
//!
//! An error never quotes what a Secret holds, and a refusal that waiting does not end has its remedy.

mod answer;
mod api_server;
mod connector;
mod error;
mod events;
mod grant;
mod metrics;

pub mod findings;
pub mod lease;
pub mod reflector;
pub mod requests;

pub use api_server::{ApiServer, resource, target};
pub use error::{ApiError, ConnectError};
pub use events::Emitter;
pub use grant::{Grant, may};
pub use metrics::{StoreMetrics, WriteOutcome};
