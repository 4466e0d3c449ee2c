//! The command line. The only place that reads the environment.

use std::path::PathBuf;

use aead::Implementation;
use clap::Parser;
use fabric_runtime::{HttpAddress, LogArgs};
use fabric_store::StoreArgs;

use lane::Offloads;

/// Ends the WireGuard tunnel of one peering.
///
/// The gateway takes its GatewayConfig (made by the fabric-controller) and its private key from
/// the store, builds a network namespace of its own with a VXLAN device towards the cluster's nodes
/// and a TUN device towards the peer, and reports how the peering is in a Connection named gw-NAME.
///
/// Needs CAP_NET_ADMIN, CAP_SYS_ADMIN (for the namespaces) and /dev/net/tun.
#[derive(Debug, Parser)]
#[command(name = "gateway", version)]
pub struct Args {
    #[command(flatten)]
    pub store: StoreArgs,

    /// Namespace of the GatewayServer or GatewayClient.
    #[arg(long, env = "WEFT_NAMESPACE")]
    pub namespace: String,

    /// Name of the GatewayServer or GatewayClient.
    #[arg(long, env = "WEFT_NAME")]
    pub name: String,

    /// Run on a host rather than in a pod: make a namespace with a veth pair to the host, as a pod
    /// would have, and put the overlay there. Only the tunnel's UDP socket is the host's.
    #[arg(long)]
    pub standalone: bool,

    /// Address that serves /metrics, /healthz and /readyz: `unix:PATH` or `IP:PORT`.
    #[arg(long, value_name = "unix:PATH|IP:PORT")]
    pub http: Option<HttpAddress>,

    /// Keep the last config and private key here, for a restart while the API server is away. It has
    /// to be memory (tmpfs): in a pod, an emptyDir of medium Memory.
    #[arg(long, env = "WEFT_KEEP", value_name = "DIR")]
    pub keep: Option<PathBuf>,

    /// Do not use UDP segmentation offload when sending (UDP_SEGMENT).
    #[arg(long)]
    pub no_gso: bool,

    /// Do not let the kernel coalesce received datagrams (UDP_GRO).
    #[arg(long)]
    pub no_gro: bool,

    /// Do not use segmentation and checksum offloads on the TUN device.
    #[arg(long)]
    pub no_tun_offload: bool,

    /// Seal and open with that code rather than with the fastest for the processor: ring, avx2 or
    /// avx512.
    #[arg(long, value_name = "ring|avx2|avx512")]
    pub cipher: Option<Implementation>,

    #[command(flatten)]
    pub log: LogArgs,
}

/// Arguments the gateway was started with.
#[derive(Clone, Debug)]
pub struct Config {
    pub store: StoreArgs,
    pub namespace: String,
    pub name: String,
    pub standalone: bool,
    pub http: Option<HttpAddress>,
    pub keep: Option<PathBuf>,
    pub offloads: Offloads,
    pub cipher: Option<Implementation>,
}

impl From<Args> for Config {
    fn from(args: Args) -> Self {
        let offloads = Offloads { gso: !args.no_gso, gro: !args.no_gro, tun: !args.no_tun_offload };
        Self {
            store: args.store,
            namespace: args.namespace,
            name: args.name,
            standalone: args.standalone,
            http: args.http,
            keep: args.keep,
            offloads,
            cipher: args.cipher,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn switches_of_the_command_line_force_fallbacks() {
        Args::command().debug_assert();
        let line = ["gateway", "--run-dir", "/r", "--namespace", "ns", "--name", "n", "--no-gso"];
        let line = [&line[..], &["--cipher", "ring"]].concat();
        let config = Config::from(Args::try_parse_from(line).unwrap());
        assert_eq!(config.offloads, Offloads { gso: false, gro: true, tun: true });
        assert_eq!(config.cipher, Some(Implementation::Ring));
    }
}
