//! State of other programs in a node's kernel that takes, drops or translates packets between pods and peers.
//!
//! * [`foreign_routes`]: routes and rules, which are named and left alone.
//! * [`other_firewalls`]: chains that drop, which get accepts of ours, and rules, which are named.

pub mod foreign_routes;
pub mod other_firewalls;
