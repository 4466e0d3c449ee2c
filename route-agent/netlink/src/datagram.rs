use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Non-blocking UDP socket whose program awaits reads only.
///
/// tokio's own is registered for writes as well, and wakes its program once more after every datagram
/// that has left.
#[derive(Debug)]
pub struct DatagramSocket(AsyncFd<UdpSocket>);

impl DatagramSocket {
    pub fn from_std(socket: UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        // SAFETY: the socket owns its descriptor, and nothing takes it out of the `AsyncFd`.
        #[allow(unsafe_code)]
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
        Ok(Self(socket.map_err(io::Error::from)?))
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.get_ref().local_addr()
    }

    /// Returns once a datagram or an error may be read.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await.map(drop)
    }

    /// Can be cancelled without losing a datagram.
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.0.async_io(Interest::READABLE, |socket| socket.recv_from(buffer)).await
    }

    pub fn try_recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.0.try_io(Interest::READABLE, |socket| socket.recv_from(buffer))
    }

    pub fn try_send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<usize> {
        self.0.get_ref().send_to(datagram, to)
    }
}

impl AsRawFd for DatagramSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
