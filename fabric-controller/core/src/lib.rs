//! Compiler from observed to desired objects: no I/O, no clock, same input, same output.
//!
//! [`Index`] holds the observed state, [`compile()`] returns the desired one, [`LaggingNodes`] the
//! nodes that nothing waits for. [`placement`] is the interface to what runs gateways in
//! Kubernetes.

pub mod compile;
mod grant;
pub mod index;
mod lagging_nodes;
pub mod node_paths;
pub mod placement;
mod probe;

pub use compile::{Published, compile};
pub use grant::Grant;
pub use index::{Index, Settings, compiles_alike, is_acknowledgement};
pub use lagging_nodes::LaggingNodes;
pub use probe::ProbeArgs;
