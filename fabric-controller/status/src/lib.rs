//! Statuses of the user's own objects, and their conditions: no I/O, no clock.
//!
//! [`of_configurations`] and [`of_gateways`] are the statuses; [`Readiness`] of prefixes, [`paths`] between
//! nodes and gateways, and all other [`Findings`] become conditions.

mod conditions;
mod findings;
mod node_paths;
mod readiness;
mod statuses;

pub use findings::{Findings, unreadable, unshown_faults};
pub use node_paths::paths;
pub use readiness::Readiness;
pub use statuses::{Statuses, of_configurations, of_gateways};
