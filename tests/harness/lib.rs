//! Whole clusters on one machine, for the system tests and the demo.
mod capture;
mod carrier;
mod cluster;
mod flood;
mod host;
pub mod kubernetes;
mod lab;
pub mod manifests;
mod netns;
mod program;
mod report;
mod spec;
mod stock_peer;
mod wait;

pub mod traffic;

pub use api_server::{skip, skip_disturbed};
pub use capture::Capture;
pub use carrier::{Carrier, Machines};
pub use cluster::{Cluster, MANIFESTS, Node, Pod, STATE, View};
pub use flood::{FloodReport, Forger, Forgery, Vxlan, flood, in_vxlan};
pub use host::{Files, Host, find_holders, remove_group};
pub use kubernetes::Kubernetes;
pub use lab::{Lab, SWITCH_V4, SWITCH_V6, TIMEOUT, on_segment};
pub use netns::{Netns, require};
pub use program::{Program, bin_dir, measured, previous_dir, resident_bytes, stolen};
pub use report::scrape;
pub use spec::{ClusterSpec, Families};
pub use stock_peer::{STOCK_DEVICE, StockPeer, Tunnel, hex};
pub use wait::{stays_so, wait_until};
