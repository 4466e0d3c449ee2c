//! What should be published, from what is known: no I/O, no clock, same input, same output.
//!
//! [`Index`] holds what is known, [`compile()`] says what should be, [`LaggingNodes`] which nodes
//! nothing waits for. [`placement`] is what passes between them and what runs gateways in Kubernetes.

pub mod compile;
mod grant;
pub mod index;
mod lagging_nodes;
pub mod node_paths;
pub mod placement;
mod probe;

pub use compile::{Published, compile};
pub use grant::Grant;
pub use index::{Index, Settings, compiles_alike};
pub use lagging_nodes::LaggingNodes;
pub use probe::ProbeArgs;
