//! The webhooks by which the API server makes lists of the plain strings that older guides write for
//! CIDRs, so that stored objects hold what clients with types can read, and by which networking stays
//! in the ForeignClusters that Liqo's other modules read: Liqo's controller clears it at every
//! reconciliation, and a virtual kubelet that starts meanwhile maps no address.
//!
//! [`admission`] changes objects and depends on nothing else, [`certificate`] makes and
//! checks certificates, [`manager`] makes the API server and all replicas use one of them, and
//! [`server`] answers. Every replica serves this. Without any of it only plain strings are refused:
//! the MutatingWebhookConfiguration has `failurePolicy: Ignore`.

mod admission;
mod certificate;
mod manager;
mod server;

use std::future::Future;
use std::net::SocketAddr;

use fabric_kube_client::ApiServer;
use tokio::sync::watch;

use self::manager::CertificateManager;
use self::server::Server;

pub use self::server::ListenError;

/// The MutatingWebhookConfiguration. Which names or addresses the certificate is for is taken from
/// it, so that a URL in place of the Service serves an API server that reaches no Services.
pub const CONFIGURATION: &str = "weft-cidr-lists";
/// The Secret of the certificate, in the namespace of the installation; the garbage collector
/// removes it after the [`CONFIGURATION`].
pub const SECRET: &str = "weft-webhook-certificate";
/// Path to which the API server posts its requests about Configurations.
pub const PATH: &str = "/cidr-lists";
/// Path for those about the status of ForeignClusters.
pub const FOREIGN_CLUSTERS_PATH: &str = "/foreign-clusters";

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct WebhookArgs {
    /// Where the API server asks for lists of CIDRs in place of plain strings: IP:PORT.
    #[arg(long, env = "WEFT_WEBHOOK_LISTEN", value_name = "ADDRESS", default_value = "[::]:9443")]
    pub webhook_listen: SocketAddr,
}

pub struct Webhook {
    server: Server,
    manager: CertificateManager,
}

impl Webhook {
    /// Listens; no request is answered before [`Self::run`]. Needs a tokio runtime.
    pub async fn listen(api: &ApiServer, args: WebhookArgs) -> Result<Self, ListenError> {
        let (serve, served) = watch::channel(None);
        let server = Server::listen(args.webhook_listen, served).await?;
        Ok(Self { server, manager: CertificateManager::new(api, serve) })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Runs until `stop` is ready, and answers the requests received by then.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { server, manager } = self;
        let stopped = async {
            tokio::select! {
                () = stop => {}
                () = manager.run() => {}
            }
        };
        server.run(stopped).await;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        webhook: WebhookArgs,
    }

    #[test]
    fn webhook_listens_on_all_addresses_by_default() {
        let parse = |args: &[&str]| Line::try_parse_from([&["x"], args].concat());
        let everywhere = parse(&[]).unwrap().webhook.webhook_listen;
        assert!(everywhere.ip().is_unspecified() && everywhere.port() == 9443);
        let one = parse(&["--webhook-listen", "127.0.0.1:1"]).unwrap().webhook.webhook_listen;
        assert_eq!(one, ([127, 0, 0, 1], 1).into());
        assert!(parse(&["--webhook-listen", "9443"]).is_err());
    }
}
