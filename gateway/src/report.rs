//! What others see of the gateway: status, Connection, metrics, HTTP.

pub mod http;
pub mod metrics;
pub mod status;
