//! WireGuard and IP packets as a state machine. No sockets, no clock, no threads: buffers and `now`
//! come in, datagrams and frames go out through a [`Wire`].
//!
//! * [`Engine`] is the whole dataplane of one peering; the rest of this page is what it is made of.
//! * Out: a train from the TUN is translated once, split in place, and each segment is sealed
//!   straight into one send buffer.
//! * In: each datagram is opened behind the payload of the one before, so that joining segments
//!   is a matter of not moving them; a whole train is translated once and written once.

mod drop_reason;
mod ecn;
mod engine;
mod join;
mod outbox;
#[cfg(test)]
mod pair;
mod random;
mod session;
mod split;
#[cfg(test)]
mod trains;
mod udp_path;

pub mod checksum;
pub mod packet;
pub mod rules;

pub use drop_reason::DropReason;
pub use engine::{Config, Counters, Datagrams, Engine, PeerState, Received, Wire};
pub use noise::{Stamper, Tai64n};
pub use rules::{AddressMap, Remap, Rules, RulesConfig, RulesError};
pub use session::{RejectedInitiation, Rejections, Unconfirmed};
pub use udp_path::UdpPath;
