//! Connections of each client at a time, so that one that opens many keeps no other from being served.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::{fmt, io};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// Network of a client with IPv6, which may use any address of it.
const CLIENT_PREFIX: u128 = !0 << 64;

/// Counts the connections of each client.
#[derive(Clone, Debug)]
pub struct Seats {
    each: usize,
    taken: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
}

/// A connection's, until it is dropped.
pub struct Seat {
    seats: Seats,
    client: IpAddr,
}

impl Seats {
    /// `each` is the greatest number of connections of one client.
    pub fn new(each: usize) -> Self {
        Self { each, taken: Arc::default() }
    }

    /// Returns `None` if the client has all of its connections already.
    pub fn take(&self, client: IpAddr) -> Option<Seat> {
        let client = match client.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & CLIENT_PREFIX).into(),
            ipv4 => ipv4,
        };
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(client).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Seat { seats: self.clone(), client })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.client);
            }
        }
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Seat").field(&self.client).finish()
    }
}

/// Listener that closes connections for which there is no seat.
#[derive(Debug)]
pub(crate) struct Seated {
    pub(crate) listener: TcpListener,
    pub(crate) seats: Seats,
}

impl Listener for Seated {
    type Io = SeatedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (SeatedStream, SocketAddr) {
        loop {
            let (stream, from) = Listener::accept(&mut self.listener).await;
            if let Some(seat) = self.seats.take(from.ip()) {
                return (SeatedStream { stream, _seat: seat }, from);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[derive(Debug)]
pub(crate) struct SeatedStream {
    stream: TcpStream,
    _seat: Seat,
}

impl AsyncRead for SeatedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for SeatedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
