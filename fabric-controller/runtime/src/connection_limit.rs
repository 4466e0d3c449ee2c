//! Limit of connections for each client, so that one that opens many keeps no other from being served.

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

/// Count of each client's connections, and the greatest one. Clones share it.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    each: usize,
    open: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
}

/// Permission for one connection, until it is dropped.
pub struct ConnectionPermit {
    limit: ConnectionLimit,
    client: IpAddr,
}

impl ConnectionLimit {
    /// `each` is the greatest number of connections of one client.
    pub fn new(each: usize) -> Self {
        Self { each, open: Arc::default() }
    }

    /// Returns `None` if the client has all of its connections already.
    pub fn take(&self, client: IpAddr) -> Option<ConnectionPermit> {
        let client = match client.to_canonical() {
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & CLIENT_PREFIX).into(),
            ipv4 => ipv4,
        };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(client).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { limit: self.clone(), client })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.limit.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.client);
            }
        }
    }
}

impl fmt::Debug for ConnectionPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConnectionPermit").field(&self.client).finish()
    }
}

/// Listener that closes connections beyond the limit.
#[derive(Debug)]
pub(crate) struct LimitedListener {
    pub(crate) listener: TcpListener,
    pub(crate) limit: ConnectionLimit,
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        loop {
            let (stream, from) = Listener::accept(&mut self.listener).await;
            if let Some(permit) = self.limit.take(from.ip()) {
                return (LimitedStream { stream, _permit: permit }, from);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[derive(Debug)]
pub(crate) struct LimitedStream {
    stream: TcpStream,
    _permit: ConnectionPermit,
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for LimitedStream {
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
