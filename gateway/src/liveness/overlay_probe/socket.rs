//! Sockets in the inner namespace, for the probes of nodes and for the answers of their kernels.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;

use fabric_api::fabric::OVERLAY_PROBE_PORT;
use fabric_api::overlay_v6;
use netlink::{DatagramSocket, Netns};
use nix::sys::socket::sockopt::{Ipv4RecvErr, Ipv6RecvErr};
use nix::sys::socket::{MsgFlags, SockaddrStorage, recvmsg, setsockopt};
use socket2::{Domain, Protocol, Socket, Type};

/// Errors read in one go.
const MAX_ERRORS: usize = 256;

/// A socket a family at the gateway's overlay address; IPv4 only if the kernel has no IPv6.
pub(super) struct Responder {
    v4: DatagramSocket,
    v6: Option<DatagramSocket>,
    /// Any port, for datagrams to kernels.
    trace_v4: DatagramSocket,
    trace_v6: Option<DatagramSocket>,
}

impl Responder {
    pub(super) fn open(inner: &Netns, overlay: Ipv4Addr) -> anyhow::Result<Self> {
        let (v4, v6) = (IpAddr::from(overlay), IpAddr::from(overlay_v6(overlay)));
        let sockets = inner.run(|| {
            let v6 = |port| bind(SocketAddr::new(v6, port)).ok();
            let v4 = |port| bind(SocketAddr::new(v4, port));
            Ok::<_, io::Error>((v4(OVERLAY_PROBE_PORT)?, v6(OVERLAY_PROBE_PORT), v4(0)?, v6(0)))
        })??;
        let (v4, v6, trace_v4, trace_v6) = sockets;
        setsockopt(&trace_v4, Ipv4RecvErr, &true)?;
        if let Some(socket) = &trace_v6 {
            setsockopt(socket, Ipv6RecvErr, &true)?;
        }
        Ok(Self {
            v4: DatagramSocket::from_std(v4)?,
            v6: v6.map(DatagramSocket::from_std).transpose()?,
            trace_v4: DatagramSocket::from_std(trace_v4)?,
            trace_v6: trace_v6.map(DatagramSocket::from_std).transpose()?,
        })
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        match &self.v6 {
            None => self.v4.readable().await,
            Some(v6) => tokio::select! {
                ready = self.v4.readable() => ready,
                ready = v6.readable() => ready,
            },
        }
    }

    /// A datagram that is there already.
    pub(super) fn received(&self, buffer: &mut [u8]) -> Option<(SocketAddr, usize)> {
        let sockets = [Some(&self.v4), self.v6.as_ref()].into_iter().flatten();
        let mut datagrams = sockets.filter_map(|socket| socket.try_recv_from(buffer).ok());
        datagrams.next().map(|(length, from)| (from, length))
    }

    /// A reply that cannot be sent is a lost one.
    pub(super) fn send(&self, datagram: &[u8], to: SocketAddr) {
        let socket = if to.is_ipv4() { Some(&self.v4) } else { self.v6.as_ref() };
        if let Some(Err(error)) = socket.map(|socket| socket.try_send_to(datagram, to)) {
            tracing::debug!(%error, %to, "cannot answer a node's probe");
        }
    }

    /// Sends a datagram that the kernel of a node refuses.
    pub(super) fn trace(&self, to: IpAddr) {
        let socket = if to.is_ipv4() { Some(&self.trace_v4) } else { self.trace_v6.as_ref() };
        let Some(socket) = socket else { return };
        // An error that is pending is reported once, instead of sending.
        let to = SocketAddr::new(to, OVERLAY_PROBE_PORT);
        if socket.try_send_to(&[], to).is_err() {
            _ = socket.try_send_to(&[], to);
        }
    }

    /// Destinations of datagrams that were refused.
    pub(super) fn traced(&self) -> Vec<IpAddr> {
        let sockets = [Some(&self.trace_v4), self.trace_v6.as_ref()].into_iter().flatten();
        sockets.flat_map(|socket| (0..MAX_ERRORS).map_while(|_| refused(socket))).collect()
    }
}

/// The address need not be there yet.
fn bind(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    match address {
        SocketAddr::V4(_) => socket.set_freebind_v4(true)?,
        SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Destination of a datagram that an error was received about.
fn refused(socket: &DatagramSocket) -> Option<IpAddr> {
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut [], None, flags).ok()?;
    let address = message.address?;
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))
}
