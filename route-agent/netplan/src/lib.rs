//! Works out what to change in the kernel, without changing it.
//!
//! * [`State`]: the part of the kernel's network state that is ours, wanted or observed.
//! * [`plan`]: the steps from one to the other, make before break.
//! * [`Firewall`]: our nftables table as one value, which prints as input for `nft -f`.
//! * [`Refusal`]: likewise, the table of prefixes that no tunnel leads to any more.
//! * [`names`]: numbers and names of what is ours.
//!
//! No I/O, no clock: the crate `netlink` observes and applies.

mod firewall;
pub mod names;
mod op;
mod plan;
mod refusal;
mod state;

pub use firewall::{DIVERTED, Firewall, Link, SOURCES_PRIORITY, TABLE as FIREWALL_TABLE};
pub use op::Op;
pub use plan::plan;
pub use refusal::{COUNTER, Refusal, TABLE as REFUSAL_TABLE};
pub use state::{
    Address, Device, Family, NextHop, Route, RouteKey, Rule, RuleAction, State, Sysctl, Via, Vxlan,
};
