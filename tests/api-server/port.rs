use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// Under `net.ipv4.ip_local_port_range` (32768 and up), so that no connection takes one while its server is
/// down, and under the ports of NodePorts.
const FIRST: u32 = 20_000;
const COUNT: u32 = 10_000;

/// A TCP port of 127.0.0.1 that no other test gets, while this value lives: it holds the
/// UDP port of the same number, which none of the programs uses.
pub(crate) struct Port {
    claim: UdpSocket,
}

impl Port {
    pub(crate) fn claim() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Processes begin apart, so that they seldom try the same ones.
        let start = process::id().wrapping_mul(97);
        let claimed = (0..COUNT).find_map(|_| {
            let next = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
            let port = u16::try_from(FIRST + next).ok()?;
            let claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
            Some(Self { claim })
        });
        claimed.expect("a free port between 20000 and 29999")
    }

    pub(crate) fn number(&self) -> u16 {
        self.claim.local_addr().map_or(0, |address| address.port())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claimed_port_is_free_and_claimed_once() {
        let ports = [(); 50].map(|()| Port::claim());
        let mut numbers = ports.each_ref().map(Port::number);
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|two| two[0] < two[1]), "{numbers:?}");
        let are_free =
            || numbers.iter().all(|number| TcpListener::bind(("127.0.0.1", *number)).is_ok());
        // A program that another test starts just then has the listener of a claim until it runs.
        let became_free = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            are_free()
        });
        assert!(became_free, "{numbers:?}");
    }
}
