//! The probes' UDP socket, opened inside the inner namespace and used outside.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fabric_api::fabric::PROBE_PORT;
use gateway_dataplane::overlay::TUN;
use netlink::{DatagramSocket, Netns};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::time::sleep;

/// Time until a socket that could not be opened is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Opened when first needed, and again after it failed.
#[derive(Debug)]
pub(super) struct ProbeSocket {
    inner: Netns,
    socket: Option<DatagramSocket>,
}

impl ProbeSocket {
    pub(super) fn new(inner: Netns) -> Self {
        let mut this = Self { inner, socket: None };
        this.reopen();
        this
    }

    /// The next datagram: from whom, and how long. Can be cancelled without losing one.
    pub(super) async fn receive(&mut self, buffer: &mut [u8]) -> (SocketAddr, usize) {
        loop {
            let Some(socket) = &self.socket else {
                sleep(RETRY).await;
                self.reopen();
                continue;
            };
            match socket.recv_from(buffer).await {
                Ok((length, from)) => return (from, length),
                // An ICMP error that an earlier send brought about, or the device is gone.
                Err(error) => {
                    tracing::debug!(%error, "cannot receive probes");
                    self.socket = None;
                }
            }
        }
    }

    /// A datagram that is there already.
    pub(super) fn received(&self, buffer: &mut [u8]) -> Option<(SocketAddr, usize)> {
        let (length, from) = self.socket.as_ref()?.try_recv_from(buffer).ok()?;
        Some((from, length))
    }

    /// A probe that cannot be sent now is a lost probe.
    pub(super) fn send(&self, datagram: &[u8], to: SocketAddr) {
        let Some(socket) = &self.socket else { return };
        if let Err(error) = socket.try_send_to(datagram, to) {
            tracing::debug!(%error, "cannot send a probe");
        }
    }

    fn reopen(&mut self) {
        let opened = self.inner.run(open).map_err(anyhow::Error::new);
        let socket = opened.and_then(|socket| Ok(DatagramSocket::from_std(socket?)?));
        self.socket = socket
            .map_err(|error| tracing::warn!("cannot open the probes' socket: {error:#}"))
            .ok();
    }
}

/// Bound to the TUN, so that nobody but the peer can reach it.
fn open() -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.bind_device(Some(TUN.as_bytes()))?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, PROBE_PORT)).into())?;
    Ok(socket.into())
}
