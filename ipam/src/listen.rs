use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ipam_proto::Address;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::server::Router;

/// An open socket. A unix socket's file goes away with it.
pub(crate) enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener),
}

impl Listener {
    pub(crate) async fn bind(address: &Address) -> anyhow::Result<Self> {
        match address {
            Address::Tcp(address) => match address.parse() {
                Ok(address) => Ok(Self::Tcp(fabric_runtime::listen(address).await?)),
                Err(_) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            },
            Address::Unix(path) => {
                remove_stale(path).await?;
                let listener = UnixListener::bind(path)?;
                // Access to the socket permits taking all addresses of the cluster.
                std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
                Ok(Self::Unix(listener, SocketFile(path.clone())))
            }
        }
    }

    /// Serves until `stop` resolves and every call under way is answered.
    pub(crate) async fn serve(
        self,
        router: Router,
        stop: impl Future<Output = ()>,
    ) -> Result<(), tonic::transport::Error> {
        match self {
            Self::Tcp(listener) => {
                let incoming = TcpListenerStream::new(listener);
                router.serve_with_incoming_shutdown(incoming, stop).await
            }
            Self::Unix(listener, file) => {
                let incoming = UnixListenerStream::new(listener);
                let outcome = router.serve_with_incoming_shutdown(incoming, stop).await;
                drop(file);
                outcome
            }
        }
    }
}

/// Removes its file when dropped.
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Makes way for a new socket: what a killed ipam left behind goes, a living one's stays.
async fn remove_stale(path: &Path) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make folder {}", folder.display()))?;
    }
    match UnixStream::connect(path).await {
        Ok(_) => bail!("another ipam is listening there"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Ok(std::fs::remove_file(path)?)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context("it is taken by something that is not an ipam"),
    }
}
