//! The definitions of the custom resources: the files of the chart, Liqo's own definitions,
//! which objects they take, and all that before a real API server.

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

mod accept;
mod files;
mod liqo;
mod objects;
mod same;
mod server;
