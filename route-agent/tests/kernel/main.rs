//! The route-agent's program against the real kernel, in namespaces that die with the test.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod absent_pods;
mod cilium;
mod cleanup;
mod dropping_rules;
mod firewall;
mod flow;
mod foreign_routes;
mod healing;
mod input;
mod liqo_leftovers;
mod node;
mod packet_drops;
mod policy;
mod probes;
mod records;
mod refusal;
mod tables;
mod take_over;
mod too_big;
