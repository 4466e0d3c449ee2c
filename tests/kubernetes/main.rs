//! What happens on real clusters of Kubernetes, two side by side.
//!
//! Each is as heavy as two real nodes, and what is left on the host can only be told when nobody
//! else builds any, so one test runs at a time.

mod calls;
mod clusters;
mod inventory;
mod leftovers;
mod liqoctl;
mod liqoctl_peering;
mod pair;
mod peering;
mod reach;
mod stage;
mod status;
mod tool;
