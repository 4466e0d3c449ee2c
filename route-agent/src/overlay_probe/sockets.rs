//! Sockets that probes leave by, and that notices of gateways arrive at.

use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use fabric_api::fabric::OVERLAY_PROBE_PORT;
use futures::future::select_all;
use netlink::DatagramSocket;

/// Between two changes of the source port while a gateway is unreachable.
const REOPEN: Duration = Duration::from_secs(5);

/// A replica that takes over sends its notices to the port of a node's probes, which is open all the time. A tracked
/// connection from before our table was there would never be translated: a gateway that does not answer is probed from
/// other ports, too.
#[derive(Default)]
pub(super) struct Sockets {
    known: Pair,
    /// At any port, while probes leave by it.
    others: Option<Pair>,
    /// Time of the last change from one port to the other.
    changed: Option<Instant>,
}

#[derive(Default)]
struct Pair {
    v4: Option<DatagramSocket>,
    v6: Option<DatagramSocket>,
}

impl Sockets {
    /// The socket for the next probe, which a gateway that is `unanswered` gets from one port and another in turn.
    pub(super) fn open(&mut self, to: SocketAddr, unanswered: bool) -> io::Result<&DatagramSocket> {
        let now = Instant::now();
        let changed = *self.changed.get_or_insert(now);
        if unanswered && now - changed > REOPEN {
            self.others = self.others.is_none().then(Pair::default);
            self.changed = Some(now);
            // Another program may have had the port.
            self.known.retain_port(OVERLAY_PROBE_PORT);
        }
        let known = self.known.open(to, OVERLAY_PROBE_PORT)?;
        match &mut self.others {
            Some(others) => others.open(to, 0),
            None => Ok(known),
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &DatagramSocket> {
        let pairs = [Some(&self.known), self.others.as_ref()].into_iter().flatten();
        pairs.flat_map(|of| [&of.v4, &of.v6]).flatten()
    }

    /// Returns once any of them has a datagram or an error.
    pub(super) async fn readable(&self) {
        let all: Vec<_> = self.all().map(|socket| Box::pin(socket.readable())).collect();
        if all.is_empty() {
            pending().await
        }
        drop(select_all(all).await);
    }
}

impl Pair {
    /// Closes sockets at other ports.
    fn retain_port(&mut self, port: u16) {
        for socket in [&mut self.v4, &mut self.v6] {
            let is_at_port =
                |of: &DatagramSocket| of.local_addr().is_ok_and(|at| at.port() == port);
            *socket = socket.take().filter(is_at_port);
        }
    }

    /// A port that another program has is left to that.
    fn open(&mut self, to: SocketAddr, port: u16) -> io::Result<&DatagramSocket> {
        let (socket, any) = match to {
            SocketAddr::V4(_) => (&mut self.v4, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            SocketAddr::V6(_) => (&mut self.v6, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
        };
        if socket.is_none() {
            let opened =
                UdpSocket::bind(&[SocketAddr::new(any, port), SocketAddr::new(any, 0)][..])?;
            *socket = Some(DatagramSocket::from_std(opened)?);
        }
        socket.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}
