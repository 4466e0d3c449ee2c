//! UDP at full speed, as a QUIC server sends it: trains that the kernel cuts to datagrams.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};

/// Payload of a datagram in bytes: with IPv4's and UDP's headers it is 1,400, which fits every tunnel.
pub(crate) const DATAGRAM: usize = 1372;
/// Datagrams of a train: as many as fit an IPv4 packet, which is what `UDP_SEGMENT` takes.
const TRAIN: usize = 47;
/// Receive buffer of the sink in bytes: what it loses should be the tunnel's.
const RECEIVE_BUFFER: usize = 8 << 20;

/// Writes blocks as trains of datagrams, or datagram by datagram.
pub(super) struct Sender {
    socket: UdpSocket,
    /// Bytes of one send.
    block: usize,
}

impl Sender {
    /// Sends from `from` to `to`, whose port is known. `segmented`: with `UDP_SEGMENT`.
    pub(super) fn connect(from: SocketAddr, to: SocketAddr, segmented: bool) -> Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::new(from.ip(), 0)).context("binding")?;
        socket.connect(to).with_context(|| format!("connecting to {to}"))?;
        if segmented {
            setsockopt(&socket, sockopt::UdpGsoSegment, &(DATAGRAM as i32))
                .context("switching UDP_SEGMENT on")?;
        }
        Ok(Self { socket, block: if segmented { TRAIN * DATAGRAM } else { DATAGRAM } })
    }
}

impl Write for Sender {
    /// Sends as much of `bytes` as one call takes. A full queue is `WouldBlock`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.socket.send(&bytes[..self.block]) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                Err(ErrorKind::WouldBlock.into())
            }
            sent => sent,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads what arrives, trains as trains.
pub(super) struct Sink(UdpSocket);

impl Sink {
    /// Must be called in the namespace of the sink.
    pub(super) fn bind(address: SocketAddr) -> Result<Self> {
        let socket = UdpSocket::bind(address).with_context(|| format!("binding {address}"))?;
        setsockopt(&socket, sockopt::UdpGroSegment, &true).context("switching UDP_GRO on")?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("receive buffer")?;
        Ok(Self(socket))
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.0
    }
}

impl Read for Sink {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        self.0.recv(block)
    }
}
