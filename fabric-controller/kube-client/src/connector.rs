//! Connections to an API server, and whether any can be made.

use std::error::Error;
use std::io::{self, ErrorKind, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use tokio::sync::watch;
use tokio::time::timeout;
use tower::Service;

/// Keepalive that detects a connection to a machine that is gone: a watch may be idle for minutes. The kernel
/// does it, in whole seconds.
const KEEPALIVE: Duration = Duration::from_secs(1);
/// Time after which a connection ends whose packets are not acknowledged. A server that is busy acknowledges
/// them all the same.
const UNACKNOWLEDGED: Duration = Duration::from_millis(1500);
/// Time to connect. The first SYN may be lost.
const CONNECT: Duration = Duration::from_secs(2);
/// Time to connect after which the server counts as unreachable: its kernel answers, however busy it is.
const ANSWER: Duration = Duration::from_millis(300);

/// Reports whether the server can be reached: the latest news of any connection counts. Clones share it.
#[derive(Clone, Debug)]
struct Reach(Arc<watch::Sender<bool>>);

impl Reach {
    fn set_unreachable(&self, is: bool) {
        self.0.send_if_modified(|before| std::mem::replace(before, is) != is);
    }

    /// Takes what a connection has read for news. The kernel ends one whose packets nobody
    /// acknowledges; the next request may take another that has not ended yet, and wait for that.
    fn observe<T>(&self, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match &done {
            Poll::Ready(Ok(_)) if *self.0.borrow() => self.set_unreachable(false),
            Poll::Ready(Err(error)) if is_unacknowledged(error.kind()) => {
                self.set_unreachable(true);
            }
            Poll::Ready(_) | Poll::Pending => {}
        }
        done
    }
}

/// Connector that reports whether the server can be reached.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    reach: Reach,
}

impl Connector {
    pub(crate) fn new() -> (Self, watch::Receiver<bool>) {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_keepalive(Some(KEEPALIVE));
        tcp.set_keepalive_interval(Some(KEEPALIVE));
        tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
        let (unreachable, reported) = watch::channel(false);
        (Self { tcp, reach: Reach(Arc::new(unreachable)) }, reported)
    }
}

impl<R> Service<R> for Connector
where
    HttpConnector: Service<R, Response: Send, Error: Error + Send, Future: Send + 'static>,
    <HttpConnector as Service<R>>::Error: 'static,
{
    type Response = Observed<<HttpConnector as Service<R>>::Response>;
    type Error = <HttpConnector as Service<R>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(cx)
    }

    fn call(&mut self, to: R) -> Self::Future {
        let (connecting, reach) = (self.tcp.call(to), self.reach.clone());
        async move {
            let mut connecting = pin!(connecting);
            let connected = match timeout(ANSWER, &mut connecting).await {
                Ok(connected) => connected,
                Err(_) => {
                    reach.set_unreachable(true);
                    connecting.await
                }
            };
            reach.set_unreachable(connected.as_ref().is_err_and(|error| !is_refused(error)));
            connected.map(|stream| Observed { stream, reach })
        }
        .boxed()
    }
}

/// Connection whose reads show whether the server can be reached.
#[derive(Debug)]
pub(crate) struct Observed<S> {
    stream: S,
    reach: Reach,
}

impl<S: Connection> Connection for Observed<S> {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl<S: Read + Unpin> Read for Observed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.reach.observe(read)
    }
}

impl<S: Write + Unpin> Write for Observed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // A write ends in the kernel's buffer: it is no evidence that the server can be reached.
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// True for a connection that has timed out, with the last ICMP error, if there was one.
fn is_unacknowledged(kind: ErrorKind) -> bool {
    use ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(kind, TimedOut | HostUnreachable | NetworkUnreachable)
}

/// True if the machine is there, and no server on it.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let own = error.downcast_ref::<io::Error>();
    own.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use http::Uri;
    use hyper::rt::ReadBuf;
    use socket2::{Domain, Socket, Type};

    use super::*;

    #[tokio::test]
    async fn silent_server_is_unreachable_until_it_connects() {
        let (connector, mut unreachable) = Connector::new();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let connect = |mut connector: Connector| async move {
            connector.call(format!("http://{address}").parse().unwrap()).await.map(drop)
        };
        assert!(connect(connector.clone()).await.is_err());
        assert!(!*unreachable.borrow(), "its kernel refuses");
        // One connection is all that the queue takes: the kernel drops the SYN of the next.
        socket.listen(0).unwrap();
        let _waiting = TcpStream::connect(address).unwrap();
        let connecting = tokio::spawn(connect(connector));
        timeout(CONNECT, unreachable.wait_for(|is| *is)).await.unwrap().unwrap();
        socket.accept().unwrap();
        connecting.await.unwrap().unwrap();
        assert!(!*unreachable.borrow());
    }

    async fn read<S: Read + Unpin>(connection: &mut Observed<S>) -> io::Result<()> {
        let mut space = [0; 1];
        let mut buffer = ReadBuf::new(&mut space);
        poll_fn(|cx| Pin::new(&mut *connection).poll_read(cx, buffer.unfilled())).await
    }

    /// A server that reads nothing more acknowledges no byte beyond its window.
    #[tokio::test]
    async fn unacknowledged_connection_shows_it_at_once() {
        let (mut connector, unreachable) = Connector::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url: Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let mut idle = connector.call(url.clone()).await.unwrap();
        let (mut answering, _) = listener.accept().unwrap();
        let mut full = connector.call(url).await.unwrap();
        let (_reads_nothing, _) = listener.accept().unwrap();
        let is_full = async {
            while poll_fn(|cx| Pin::new(&mut full).poll_write(cx, &[0; 65_536])).await.is_ok() {}
        };
        drop(timeout(Duration::from_millis(300), is_full).await);
        assert!(!*unreachable.borrow());
        let error = timeout(3 * UNACKNOWLEDGED, read(&mut full)).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(*unreachable.borrow());

        // A connection from before is as good as a new one.
        answering.write_all(b"a").unwrap();
        read(&mut idle).await.unwrap();
        assert!(!*unreachable.borrow());
    }
}
