//! Compiler from observed to desired objects: no I/O, no clock, same input, same output.
//!
//! [`fabric_index`] holds the observed state, [`fabric_model`] is its meaning, and [`compile()`] returns
//! the desired objects, statuses and requests.

mod compile;

pub use compile::{Allocation, IpamRequest, Published, compile, unreadable, unshown_faults};
pub use fabric_model::KeyPair;
