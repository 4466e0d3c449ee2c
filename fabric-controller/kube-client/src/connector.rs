//! Connections to an API server, and whether any can be made.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use hyper_util::client::legacy::connect::HttpConnector;
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

/// Connector that reports whether the server can be reached.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    tcp: HttpConnector,
    unreachable: Arc<watch::Sender<bool>>,
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
        (Self { tcp, unreachable: Arc::new(unreachable) }, reported)
    }
}

impl<R> Service<R> for Connector
where
    HttpConnector: Service<R, Response: Send, Error: Error + Send, Future: Send + 'static>,
    <HttpConnector as Service<R>>::Error: 'static,
{
    type Response = <HttpConnector as Service<R>>::Response;
    type Error = <HttpConnector as Service<R>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(cx)
    }

    fn call(&mut self, to: R) -> Self::Future {
        let (connecting, unreachable) = (self.tcp.call(to), Arc::clone(&self.unreachable));
        let set = move |is| {
            unreachable.send_if_modified(|before| std::mem::replace(before, is) != is);
        };
        async move {
            let mut connecting = pin!(connecting);
            let connected = match timeout(ANSWER, &mut connecting).await {
                Ok(connected) => connected,
                Err(_) => {
                    set(true);
                    connecting.await
                }
            };
            set(connected.as_ref().is_err_and(|error| !is_refused(error)));
            connected
        }
        .boxed()
    }
}

/// True if the machine is there, and no server on it.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    let own = error.downcast_ref::<io::Error>();
    own.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        || error.source().is_some_and(is_refused)
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpStream};

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
}
