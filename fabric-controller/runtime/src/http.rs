//! HTTP on a Unix socket or a TCP port.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use axum::Router;
use tokio::net::{TcpListener, UnixListener};

/// Media type of what `prometheus-client` encodes.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Address to listen on for HTTP: `unix:PATH` or `IP:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected unix:PATH or IP:PORT")]
pub struct ParseHttpAddressError;

/// Failure to listen; often the port is another program's.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}")]
pub struct ListenError {
    address: HttpAddress,
    #[source]
    source: io::Error,
}

/// Open socket. The file of a Unix socket is removed once it no longer serves.
#[derive(Debug)]
pub enum HttpListener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl HttpAddress {
    /// Needs a tokio runtime. The file of a Unix socket is replaced: it was left by a program that
    /// was killed, a live one would be a second for the same work.
    pub async fn bind(&self) -> Result<HttpListener, ListenError> {
        let bound = match self {
            Self::Unix(path) => {
                let _ = std::fs::remove_file(path);
                UnixListener::bind(path).map(|bound| HttpListener::Unix(bound, path.clone()))
            }
            Self::Tcp(address) => crate::listen(*address).await.map(HttpListener::Tcp),
        };
        bound.map_err(|source| ListenError { address: self.clone(), source })
    }
}

impl HttpListener {
    /// Serves until `stop` is ready and every request under way is answered.
    pub async fn serve(
        self,
        router: Router,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        match self {
            Self::Unix(listener, path) => {
                let served = axum::serve(listener, router).with_graceful_shutdown(stop).await;
                let _ = std::fs::remove_file(&path);
                served
            }
            Self::Tcp(listener) => axum::serve(listener, router).with_graceful_shutdown(stop).await,
        }
    }
}

impl FromStr for HttpAddress {
    type Err = ParseHttpAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("unix:") {
            Some("") => Err(ParseHttpAddressError),
            Some(path) => Ok(Self::Unix(path.into())),
            None => text.parse().map(Self::Tcp).map_err(|_| ParseHttpAddressError),
        }
    }
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_addresses_are_a_path_or_a_port() {
        assert_eq!("unix:/a/b".parse(), Ok(HttpAddress::Unix("/a/b".into())));
        assert_eq!("[::1]:80".parse(), Ok(HttpAddress::Tcp("[::1]:80".parse().unwrap())));
        for bad in ["unix:", "80", "localhost:80", ""] {
            assert_eq!(bad.parse::<HttpAddress>(), Err(ParseHttpAddressError), "{bad}");
        }
    }
}
