//! Reports of the gateway to others: status, Connection, metrics, HTTP.

pub mod http;
pub mod metrics;
pub mod status;
