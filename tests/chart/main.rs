//! deploy/chart as helm renders it, without a cluster.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod helm;
mod strict;

mod crds;
mod flags;
mod golden;
mod life;
mod liqo_table;
mod monitoring;
mod named_tests;
mod orders;
mod policies;
mod references;
mod rights;
mod uninstall;
mod values;

// Metrics of programs that are no libraries.
#[expect(dead_code, reason = "only names count here")]
#[path = "../../route-agent/src/vitals.rs"]
mod agent_vitals;
#[expect(dead_code, reason = "only names count here")]
#[path = "../../ipam/src/metrics.rs"]
mod ipam_metrics;
