//! Settings from the command line and the environment.

use std::path::PathBuf;
use std::time::Duration;

use fabric_index::{ProbeArgs, Settings};
use std::net::{IpAddr, SocketAddr};

use fabric_runtime::{HttpAddress, LogArgs};
use fabric_store::StoreArgs;
use fabric_webhook::WebhookArgs;
use ipam_proto::Address;
use jiff::Timestamp;

/// Turns a cluster's resources into what its gateways and nodes run on.
///
/// Reads Liqo's kinds (Configuration, GatewayServer, GatewayClient, PublicKey, Network, IP) and the
/// cluster's Nodes, ConfigMap and Secrets, asks ipam for prefixes and addresses, and publishes a
/// GatewayConfig for each peering and a NodeConfig for each node. What is wrong with any of it is
/// reported where it is, and everything else goes on.
///
/// With --kubernetes all of that is in the API server: statuses and conditions are the objects'
/// own. Otherwise it is in directories: manifests are read and never written to, what is published
/// is under RUN_DIR/published with the statuses beside it, and what is wrong is listed in
/// RUN_DIR/published/problems.yaml.
///
/// It holds no state of its own: stopped and started again, it allocates nothing anew.
#[derive(Debug, clap::Parser)]
#[command(name = "fabric-controller", version)]
pub(crate) struct Config {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Where ipam listens: unix:PATH or HOST:PORT.
    #[arg(long, env = "WEFT_IPAM", value_name = "ADDRESS", default_value = "127.0.0.1:6000")]
    pub(crate) ipam: Address,
    /// File with a token for ipam.
    #[arg(long, value_name = "FILE")]
    pub(crate) ipam_token: Option<PathBuf>,
    /// The node that this host is, on which gateways run; needed if the cluster has several and
    /// --kubernetes is not given.
    #[arg(long, env = "WEFT_NODE", value_name = "NAME")]
    node: Option<String>,
    /// What this program is called among its like, in Events and in the Lease that says which of
    /// them works.
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "fabric-controller")]
    pub(crate) name: String,
    /// Address of this program, where others of its like find out whether it lives, at the port of --http.
    #[arg(long, env = "POD_IP", value_name = "IP")]
    pod_ip: Option<IpAddr>,
    /// Address that serves /metrics, /healthz and /readyz: `unix:PATH` or `IP:PORT`.
    #[arg(long, value_name = "unix:PATH|IP:PORT")]
    pub(crate) http: Option<HttpAddress>,
    /// Give packets of pods, too, their node's external address.
    #[arg(long, env = "WEFT_FULL_MASQUERADE")]
    full_masquerade: bool,
    /// Once a peering is gone, refuse and reserve its prefixes until nothing was sent to them for so
    /// many seconds [default: 300].
    #[arg(long, env = "WEFT_REFUSE_FOR", value_name = "SECONDS")]
    refuse_for: Option<u32>,
    /// With --kubernetes: how many of all gateways a change that concerns them all replaces at a time, in
    /// percent, but one at least. The next ones follow once these are ready; a gateway that was not
    /// ready before does not count, and one that is edited by itself does not wait.
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) wave: u8,
    #[command(flatten)]
    pub(crate) webhook: WebhookArgs,
    #[command(flatten)]
    probe: ProbeArgs,
    #[command(flatten)]
    _liqoctl: LiqoctlArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Arguments of this program that others read.
#[derive(Debug, clap::Args)]
struct LiqoctlArgs {
    /// Where peers reach this cluster's API server. liqoctl reads it here; otherwise it takes a node
    /// of the control plane.
    #[arg(long, value_name = "URL")]
    api_server_address_override: Option<String>,
    /// What this cluster is like, for liqoctl to show.
    #[arg(long, value_name = "KEY=VALUE,...")]
    cluster_labels: Option<String>,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Takes away what weft has made in a Kubernetes cluster, for good: `helm uninstall` runs it.
    ///
    /// The fabric-controller that works is asked to stand by. Route-agents then remove what is theirs on
    /// their nodes, and are waited for; then weft's own objects go. What users have made stays, without
    /// what weft has written into it, but for the labels and the public half that it has given to users'
    /// Secrets. Run again, it finds nothing to do.
    #[command(verbatim_doc_comment)]
    Withdraw(WithdrawArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct WithdrawArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// How long to wait for nodes that do not answer, such as 90s.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub(crate) patience: Duration,
    /// Keep how peers' prefixes and IPs are mapped, for Liqo's own network.
    #[arg(long)]
    pub(crate) keep_prefixes: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    let signed: jiff::SignedDuration =
        text.parse().map_err(|_| "expected a time such as 90s or 2m".to_owned())?;
    signed.try_into().map_err(|_| "a time cannot be negative".to_owned())
}

impl Config {
    /// TCP address of this program.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self.http {
            Some(HttpAddress::Tcp(http)) => Some(SocketAddr::new(self.pod_ip?, http.port())),
            Some(HttpAddress::Unix(_)) | None => None,
        }
    }

    /// The name, and what no other start of this program has.
    pub(crate) fn identity(&self) -> String {
        format!("{}_{:x}", self.name, Timestamp::now().as_nanosecond())
    }

    /// `installation` is the namespace of weft in Kubernetes, if that is where it runs.
    pub(crate) fn settings(&self, installation: Option<String>) -> Settings {
        let on_a_host = Settings::default();
        Settings {
            kubernetes: installation.is_some(),
            namespace: installation.unwrap_or(on_a_host.namespace),
            node: self.node.clone(),
            full_masquerade: self.full_masquerade,
            refuse_seconds: self.refuse_for,
            probe: self.probe.settings(),
        }
    }
}
