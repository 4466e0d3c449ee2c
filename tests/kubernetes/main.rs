//! Tests on real clusters of Kubernetes, two side by side.
//!
//! Each is as heavy as two real nodes, and leftovers on the host can only be determined when no
//! other test builds any, so one test runs at a time.

mod bad_manifests;
mod beside_liqo;
mod calls;
mod clusters;
mod dead_node;
mod failover;
mod failover_foreign;
mod from_liqo;
mod in_clear;
mod inventory;
mod ipv6;
mod leftovers;
mod liqoctl;
mod liqoctl_peering;
mod manifest_order;
mod networks;
mod pair;
mod peering;
mod reach;
mod readme;
mod reboot;
mod requests;
mod rights;
mod stage;
mod status;
mod tool;
mod truth;
mod upgrade;
