//! The only crate that talks to the kernel's network tables.
//!
//! * [`Netns`]: a network namespace, and work done inside it.
//! * [`Handle`]: one namespace's tables: observe, apply, look up, watch.
//! * [`nft`]: our firewall table, put there in one transaction and read back by netlink.
//! * [`legacy_rules`]: whether rules of the old packet filter have changed.
//! * [`conntrack`]: tracked connections, listed and deleted.
//! * [`DatagramSocket`]: UDP for probes.

mod apply;
mod attributes;
mod churn_limiter;
mod datagram;
mod events;
mod foreign;
mod handle;
mod links;
mod message;
mod multicast;
mod netns;
mod nfnetlink;
mod observe;
mod sysctl;
mod vxlan;

pub mod conntrack;
pub mod legacy_rules;
pub mod nft;

pub use apply::Failure;
pub use churn_limiter::ChurnLimiter;
pub use datagram::DatagramSocket;
pub use events::Events;
pub use foreign::{ForeignAction, ForeignRoute, ForeignRule, Mark};
pub use handle::{Handle, NetlinkError};
pub use links::{LinkInfo, RouteInfo};
pub use netns::{Netns, NetnsError};
pub use observe::{LOCAL_TABLE, Scope};
pub use sysctl::{Settings, read_sysctl, write_sysctl};
