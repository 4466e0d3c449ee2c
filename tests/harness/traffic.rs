//! Traffic between namespaces, without external tools, every operation bounded in time.
//!
//! A socket is opened on a thread inside its namespace and stays there; what uses it runs outside.

mod held;
mod icmp;
mod stream;
mod tcp;
mod udp;

use std::io::{ErrorKind, Result};
use std::time::{Duration, Instant};

pub use held::HeldConnection;
pub use icmp::{PingError, PingStats, Pinger, ping};
pub use stream::{Arrived, StreamReport, Streams, Way};
pub use tcp::{BulkReport, Service, TcpServer, bulk, connect, http_get, paced_bulk};
pub use udp::{FlowReport, UdpEcho, udp_connect, udp_echo, udp_flow, udp_refusal};

/// Time for which a released port may still be in use.
const TAKEN: Duration = Duration::from_secs(2);

/// Binds to a port as soon as it is free: what was closed here, a child of this process holds until it has
/// become another program.
fn once_free<T>(bind: impl Fn() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match bind() {
            Err(error) if error.kind() == ErrorKind::AddrInUse && began.elapsed() < TAKEN => {
                std::thread::sleep(Duration::from_millis(10));
            }
            bound => return bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn port_is_bound_once_it_is_released() {
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let giving_up = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(other);
        });
        once_free(|| UdpSocket::bind(address)).unwrap();
        giving_up.join().unwrap();
    }
}
