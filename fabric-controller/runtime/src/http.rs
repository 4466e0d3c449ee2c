//! HTTP on a Unix socket or a TCP port.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use axum::Router;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, interval, sleep};

use crate::connection_limit::{ConnectionLimit, LimitedListener};

/// Interval at which the file of a Unix socket is looked for.
const CHECK: Duration = Duration::from_secs(5);

/// Time in which a process that is being stopped no longer listens, and between looks.
const ENDS: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(20);

/// Connections of one client over TCP. Kubelets and Prometheus have one or two.
const MAX_OF_CLIENT: usize = 16;

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

/// Failure to listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Often the port is another program's.
    #[error("cannot listen on {address}")]
    Address {
        address: HttpAddress,
        #[source]
        source: io::Error,
    },
    /// A process that does the same work serves there.
    #[error(
        "process {pid} is at work already and listens on {address}: end that one first (`kill {pid}`)"
    )]
    Held { address: HttpAddress, pid: i32 },
}

/// Open socket. The file of a Unix socket is removed once it no longer serves.
#[derive(Debug)]
pub enum HttpListener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl HttpAddress {
    /// Needs a tokio runtime. The file of a Unix socket is replaced if it was left by a program that was
    /// killed. The path is made of the work's name: one that listens there and does not end is an error.
    pub async fn bind(&self) -> Result<HttpListener, ListenError> {
        let address = self.clone();
        let bound = match self {
            Self::Unix(path) => {
                if let Some(pid) = listening(path).await {
                    return Err(ListenError::Held { address, pid });
                }
                let _ = std::fs::remove_file(path);
                UnixListener::bind(path).map(|bound| HttpListener::Unix(bound, path.clone()))
            }
            Self::Tcp(address) => crate::listen(*address).await.map(HttpListener::Tcp),
        };
        bound.map_err(|source| ListenError::Address { address, source })
    }
}

impl HttpListener {
    /// Serves until `stop` is ready and every request under way is answered. The file of a Unix socket
    /// that something has removed is made again.
    pub async fn serve(
        self,
        router: Router,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        match self {
            Self::Unix(listener, path) => {
                let served = serve_unix(listener, &path, router, stop).await;
                let _ = std::fs::remove_file(&path);
                served
            }
            Self::Tcp(listener) => {
                let limit = ConnectionLimit::new(MAX_OF_CLIENT);
                let listener = LimitedListener { listener, limit };
                axum::serve(listener, router).with_graceful_shutdown(stop).await
            }
        }
    }
}

/// The process that listens on a Unix socket, unless it ends soon.
async fn listening(path: &Path) -> Option<i32> {
    let give_up = Instant::now() + ENDS;
    while let Ok(stream) = UnixStream::connect(path).await {
        if Instant::now() >= give_up {
            let peer = stream.peer_cred().ok();
            return Some(peer.and_then(|peer| peer.pid()).unwrap_or_default());
        }
        sleep(RETRY).await;
    }
    None
}

async fn serve_unix(
    mut listener: UnixListener,
    path: &Path,
    router: Router,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    tokio::pin!(stop);
    loop {
        let (end, ended) = oneshot::channel::<()>();
        let serving = axum::serve(listener, router.clone())
            .with_graceful_shutdown(async { drop(ended.await) })
            .into_future();
        tokio::pin!(serving);
        listener = tokio::select! {
            served = &mut serving => return served,
            () = &mut stop => {
                drop(end);
                return serving.await;
            }
            again = bound_again(path) => again,
        };
    }
}

/// Waits until the file of the socket is gone, or something else than a socket is in its place, and makes it
/// again. Another socket there is that of a successor.
async fn bound_again(path: &Path) -> UnixListener {
    let mut checks = interval(CHECK);
    loop {
        checks.tick().await;
        let found = std::fs::symlink_metadata(path);
        if !found.is_ok_and(|found| found.file_type().is_socket()) {
            let _ = std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path));
            if let Ok(listener) = UnixListener::bind(path) {
                tracing::warn!(path = %path.display(), "the socket was gone: made again");
                return listener;
            }
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
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    async fn connect(from: [u8; 4], to: SocketAddr) -> tokio::net::TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        timeout(LONG, socket.connect(to)).await.unwrap().unwrap()
    }

    async fn answer(stream: &mut tokio::net::TcpStream) -> String {
        let request = b"GET /healthz HTTP/1.1\r\nhost: weft\r\nconnection: close\r\n\r\n";
        let _ = stream.write_all(request).await;
        let mut text = Vec::new();
        let _ = timeout(LONG, stream.read_to_end(&mut text)).await.unwrap();
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn client_with_many_connections_blocks_no_other() {
        let listener = HttpAddress::Tcp(([127, 0, 0, 1], 0).into()).bind().await.unwrap();
        let HttpListener::Tcp(tcp) = &listener else { unreachable!() };
        let address = tcp.local_addr().unwrap();
        let router = Router::new().route("/healthz", get(async || "ok"));
        tokio::spawn(listener.serve(router, std::future::pending()));
        let mut of_one = Vec::new();
        for _ in 0..=MAX_OF_CLIENT {
            of_one.push(connect([127, 0, 0, 2], address).await);
        }
        assert_eq!(answer(of_one.last_mut().unwrap()).await, "", "it is beyond the limit");
        assert!(answer(&mut connect([127, 0, 0, 3], address).await).await.ends_with("ok"));
        drop(of_one);
        let again = async {
            while !answer(&mut connect([127, 0, 0, 2], address).await).await.ends_with("ok") {}
        };
        timeout(LONG, again).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn removed_socket_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("http");
        let listener = HttpAddress::Unix(path.clone()).bind().await.unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = listener.serve(Router::new(), async { drop(stopped.await) });
        let serving = tokio::spawn(serving);
        sleep(CHECK / 2).await;
        std::fs::remove_file(&path).unwrap();
        sleep(CHECK).await;
        assert!(UnixStream::connect(&path).await.is_ok(), "removed");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "garbage").unwrap();
        sleep(CHECK).await;
        assert!(UnixStream::connect(&path).await.is_ok(), "replaced by a file");
        drop(stop);
        serving.await.unwrap().unwrap();
        assert!(!path.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn socket_of_a_live_process_is_left_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let address = HttpAddress::Unix(dir.path().join("http"));
        let first = address.bind().await.unwrap();
        let refused = address.bind().await.unwrap_err().to_string();
        assert!(
            refused.contains(&format!("process {} is at work", std::process::id())),
            "{refused}"
        );
        let end = async {
            sleep(ENDS / 2).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(address.bind(), end);
        second.unwrap();
    }

    #[test]
    fn http_addresses_are_a_path_or_a_port() {
        assert_eq!("unix:/a/b".parse(), Ok(HttpAddress::Unix("/a/b".into())));
        assert_eq!("[::1]:80".parse(), Ok(HttpAddress::Tcp("[::1]:80".parse().unwrap())));
        for bad in ["unix:", "80", "localhost:80", ""] {
            assert_eq!(bad.parse::<HttpAddress>(), Err(ParseHttpAddressError), "{bad}");
        }
    }
}
