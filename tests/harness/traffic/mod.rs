//! Traffic between namespaces, without external tools, every operation bounded in time.
//!
//! A socket is opened on a thread inside its namespace and stays there; what uses it runs outside.

mod held;
mod icmp;
mod stream;
mod tcp;
mod udp;

pub use held::HeldConnection;
pub use icmp::{PingError, PingStats, Pinger, ping};
pub use stream::{Arrived, StreamReport, Streams, Way};
pub use tcp::{BulkReport, Service, TcpServer, bulk, connect, http_get, paced_bulk};
pub use udp::{FlowReport, UdpEcho, udp_connect, udp_echo, udp_flow, udp_refusal};
