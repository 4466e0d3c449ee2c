//! Traffic between namespaces, without external tools, every operation bounded in time.
//!
//! A socket is opened on a thread inside its namespace and stays there; what uses it runs outside.

mod icmp;
mod tcp;
mod udp;

pub use icmp::{PingError, PingStats, Pinger, ping};
pub use tcp::{BulkReport, Service, TcpServer, bulk, connect, http_get};
pub use udp::{FlowReport, UdpEcho, udp_echo, udp_flow};
