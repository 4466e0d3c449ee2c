//! HTTPS, with whichever certificate is newest.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Bytes, HttpBody as _};
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use fabric_runtime::{ConnectionLimit, ConnectionPermit};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

use super::manager::Served;
use super::{FOREIGN_CLUSTERS_PATH, PATH};
use super::{admission, certificate};

/// A review holds an object twice, and etcd takes no object of more than 1.5 MiB.
const MAX_BODY: usize = 4 << 20;
/// Connections of one client: an API server, or a pod that has no business here.
const MAX_OF_CLIENT: usize = 64;
/// Timeout of a handshake, of a body, and of the last answers.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// API servers close an idle connection after 90 s; closing it first would cost a request.
const IDLE: Duration = Duration::from_secs(120);
/// Wait after the system refused a connection, mostly for want of file descriptors.
const REFUSED: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on --webhook-listen {address}; expected a free port")]
    Address { address: SocketAddr, source: io::Error },
    #[error("cannot use TLS")]
    Tls(#[from] rustls::Error),
}

pub(super) struct Server {
    listener: TcpListener,
    address: SocketAddr,
    tls: TlsAcceptor,
}

impl Server {
    pub(super) async fn listen(
        address: SocketAddr,
        served: watch::Receiver<Served>,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Address { address, source };
        let listener = fabric_runtime::listen(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let config = ServerConfig::builder_with_provider(certificate::provider())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Newest(served)));
        Ok(Self { listener, address, tls: TlsAcceptor::from(Arc::new(config)) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Runs until `stop` is ready, and answers the requests received by then.
    pub(super) async fn run(self, stop: impl Future<Output = ()>) {
        let open = GracefulShutdown::new();
        let limit = ConnectionLimit::new(MAX_OF_CLIENT);
        let router = Router::new()
            .route(PATH, post(review))
            .route(FOREIGN_CLUSTERS_PATH, post(review))
            .layer(DefaultBodyLimit::max(MAX_BODY));
        let mut stop = pin!(stop);
        loop {
            let (stream, permit) = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&self.listener, &limit) => accepted,
            };
            let (tls, router, watcher) = (self.tls.clone(), router.clone(), open.watcher());
            tokio::spawn(async move {
                serve(stream, tls, router, watcher).await;
                drop(permit);
            });
        }
        let _ = timeout(HANDSHAKE_TIMEOUT, open.shutdown()).await;
    }
}

async fn accept(listener: &TcpListener, limit: &ConnectionLimit) -> (TcpStream, ConnectionPermit) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => match limit.take(from.ip()) {
                Some(permit) => return (stream, permit),
                None => tracing::debug!(%from, "it has {MAX_OF_CLIENT} connections already"),
            },
            Err(error) => {
                tracing::debug!(%error, "a connection is lost");
                sleep(REFUSED).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, tls: TlsAcceptor, router: Router, watcher: Watcher) {
    let handshake = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await;
    let stream = match handshake.map_err(io::Error::from).and_then(|outcome| outcome) {
        Ok(stream) => TokioIo::new(stream),
        Err(error) => return tracing::debug!(%error, "no TLS handshake"),
    };
    let mut http = auto::Builder::new(TokioExecutor::new()).http1_only();
    http.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
    let connection = http.serve_connection(stream, TowerToHyperService::new(router));
    if let Err(error) = watcher.watch(connection.into_owned()).await {
        tracing::debug!(error, "a connection ends");
    }
}

async fn review(request: Request) -> Response {
    // Before it is read, which may take long.
    if request.body().size_hint().lower() > MAX_BODY as u64 {
        return too_large();
    }
    let body = match timeout(HANDSHAKE_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => return too_large(),
        Ok(Err(error)) => return (error.status(), format!("{error}\n")).into_response(),
        Err(_) => return (StatusCode::REQUEST_TIMEOUT, "the body is late\n").into_response(),
    };
    match admission::answer(&body) {
        Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer).into_response(),
        Err(error) => {
            let what = format!("{:#}\n", anyhow::Error::new(error));
            tracing::debug!(error = what.trim_end(), "a review is refused");
            (StatusCode::BAD_REQUEST, what).into_response()
        }
    }
}

/// Newest certificate; none before there is one, when the handshake fails.
#[derive(Debug)]
struct Newest(watch::Receiver<Served>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().clone()
    }
}

fn too_large() -> Response {
    let what = format!("expected a body of at most {MAX_BODY} bytes\n");
    (StatusCode::PAYLOAD_TOO_LARGE, what).into_response()
}
