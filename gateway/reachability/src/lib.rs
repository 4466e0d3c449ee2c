//! Reachability of the peer and of the nodes, and the size of packets that get through: state machines
//! of probes, their answers and the time. Pure: no socket, no clock.
//!
//! * [`probe`]: Liqo's datagrams, with weft's field; [`probe_log`]: those sent and answered lately.
//! * [`connection`]: the peer's state, by which packets are refused; [`alternation`]: pace of both ends.
//! * [`path_mtu`]: search for the path MTU, and for trains that vanish.
//! * [`nodes`]: those that reach the gateway; [`notices`]: those that learn of a take-over.

pub mod alternation;
pub mod connection;
pub mod nodes;
pub mod notices;
pub mod path_mtu;
pub mod probe;
pub mod probe_log;
