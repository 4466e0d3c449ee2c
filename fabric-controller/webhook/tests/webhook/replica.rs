//! One running webhook, and requests to it without an API server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use fabric_webhook::{Webhook, WebhookArgs};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::world::World;

pub(crate) struct Replica {
    pub(crate) address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Replica {
    pub(crate) fn start(world: &World) -> Self {
        let args = WebhookArgs { webhook_listen: (Ipv4Addr::LOCALHOST, 0).into() };
        let api = world.api();
        let webhook = world.runtime.block_on(Webhook::listen(&api, args)).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let address = webhook.address();
        let task = world.runtime.spawn(webhook.run(async { drop(stopped.await) }));
        Self { address, stop, task }
    }

    pub(crate) fn stop(self, world: &World) {
        drop(self.stop);
        world.runtime.block_on(self.task).unwrap();
    }

    /// The certificate that it presents, as PEM text without its frame; None if these authorities
    /// did not sign it.
    pub(crate) fn presents(&self, world: &World, authorities: &str) -> Option<Vec<u8>> {
        let stream = world.runtime.block_on(connect(self.address, authorities)).ok()?;
        Some(stream.get_ref().1.peer_certificates().unwrap()[0].to_vec())
    }

    /// The whole answer to a request.
    pub(crate) fn request(&self, world: &World, head: &str, body: &[u8]) -> String {
        let length = body.len();
        let head = format!("{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n");
        let request = [head.as_bytes(), b"Connection: close\r\n\r\n", body].concat();
        let authorities = world.bundle();
        world.runtime.block_on(async {
            let mut stream = connect(self.address, &authorities).await.unwrap();
            // It may answer, and close, before it has all.
            let _ = stream.write_all(&request).await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8(answer).unwrap()
        })
    }
}

pub(crate) fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
}

async fn connect(address: SocketAddr, authorities: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        roots.add(authority.unwrap()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::from(address.ip());
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}
