//! What the command line and the environment say.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use fabric_controller::{ProbeArgs, Settings};
use fabric_store::StoreArgs;
use ipam_proto::Address;
use tracing_subscriber::EnvFilter;

/// Turns a cluster's manifests into what its gateways and nodes run on.
///
/// Reads the manifests (Liqo's kinds: Configuration, GatewayServer, GatewayClient, PublicKey,
/// Network, IP, and the cluster's Nodes, ConfigMap and Secrets), asks ipam for prefixes and
/// addresses, and publishes a GatewayConfig for each peering and a NodeConfig for each node under
/// RUN_DIR/published. Statuses are written beside them, never into the manifests; what is wrong
/// with any of it is listed in RUN_DIR/published/problems.yaml, and everything else goes on.
///
/// It holds no state of its own: stopped and started again, it allocates nothing anew.
#[derive(Debug, clap::Parser)]
#[command(name = "fabric-controller", version)]
pub(crate) struct Config {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Where ipam listens: unix:PATH or IP:PORT.
    #[arg(long, env = "WEFT_IPAM", value_name = "ADDRESS", default_value = "127.0.0.1:6000")]
    pub(crate) ipam: Address,
    /// The node that this host is, on which gateways run; needed if the cluster has several.
    #[arg(long, env = "WEFT_NODE", value_name = "NAME")]
    node: Option<String>,
    /// Give packets of pods, too, their node's external address.
    #[arg(long, env = "WEFT_FULL_MASQUERADE")]
    full_masquerade: bool,
    #[command(flatten)]
    probe: ProbeArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// How logs are written, on standard error.
    #[arg(long, value_name = "FORMAT", default_value = "plain", value_enum)]
    log_format: LogFormat,
    /// Least level logged, such as info, or debug for some: `info,fabric_controller=debug`.
    #[arg(long, env = "RUST_LOG", value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LogFormat {
    Plain,
    Json,
}

impl Config {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            node: self.node.clone(),
            full_masquerade: self.full_masquerade,
            probe: self.probe.settings(),
        }
    }
}

impl LogArgs {
    pub(crate) fn start(&self) -> anyhow::Result<()> {
        let filter = EnvFilter::try_new(&self.log_level)
            .with_context(|| format!("--log-level {:?} is none", self.log_level))?;
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(std::io::stderr().is_terminal())
            .with_writer(std::io::stderr);
        match self.log_format {
            LogFormat::Plain => subscriber.init(),
            LogFormat::Json => subscriber.json().init(),
        }
        Ok(())
    }
}
