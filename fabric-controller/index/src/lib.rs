//! Observed state of a cluster, in memory: no I/O, no clock.
//!
//! [`Index`] holds the latest version of every object, [`Grant`] is what ipam gave one, [`owner`] for
//! which object weft made another, [`Holders`] the holders of grants. [`LaggingNodes`] are those
//! that nothing waits for, [`node_paths`] the paths that nodes and gateways report. [`placement`] is
//! the interface to what runs gateways in Kubernetes, [`pod_start`] why a pod of theirs does not start.

mod grant;
mod holders;
mod index;
mod lagging_nodes;
pub mod node_paths;
pub mod owner;
pub mod placement;
pub mod pod_start;
mod probe;

pub use grant::{Grant, ip_grant, network_grant};
pub use holders::Holders;
pub use index::{Index, Settings, compiles_alike, is_acknowledgement, key_pair};
pub use lagging_nodes::LaggingNodes;
pub use probe::ProbeArgs;
