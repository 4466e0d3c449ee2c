//! deploy/chart as helm renders it, without a cluster.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod helm;
mod strict;

mod crds;
mod flags;
mod golden;
mod life;
mod monitoring;
mod references;
mod rights;
mod uninstall;
mod values;
