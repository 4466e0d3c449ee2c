//! A cluster of hundreds of nodes and peerings without their machines: the control plane is real, nodes,
//! gateways and kubelets are simulated.
//!
//! ```text
//!  user --apply--> kube-apiserver + etcd <--watch, apply-- fabric-controller --gRPC--> ipam
//!                    ^  ^   ^   ^  one watch each, own status
//!      route-agent x N  |   |  kubelets: pods of Deployments, Nodes, Leases
//!             gateway x P  other pods
//! ```
//!
//! Simulated programs use the store that the real ones use, each with connections of its own. Everything
//! that depends on which objects weft publishes is in [`published`].

mod agents;
mod audit;
mod board;
mod gateways;
mod kubelets;
mod lab;
mod manifests;
pub mod published;
mod replay;
mod users;

pub use audit::{AuditLog, RequestCount, Window};
pub use board::Board;
pub use kubelets::OutsidePods;
pub use lab::{Lab, Pids, Size};
pub use manifests::{Endpoint, Peer};
pub use replay::{ReplayOutcome, replay};
pub use users::User;
