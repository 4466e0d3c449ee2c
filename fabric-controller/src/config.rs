//! What the command line and the environment say.

use fabric_controller::{ProbeArgs, Settings};
use fabric_shell::LogArgs;
use fabric_store::StoreArgs;
use ipam_proto::Address;

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
    /// Where ipam listens: unix:PATH or HOST:PORT.
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

impl Config {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            node: self.node.clone(),
            full_masquerade: self.full_masquerade,
            probe: self.probe.settings(),
        }
    }
}
