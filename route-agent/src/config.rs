use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use fabric_runtime::{HttpAddress, LogArgs};
use fabric_store::StoreArgs;

/// Gives a node its ways to the pods of other clusters.
///
/// route-agent applies its NodeConfig: it makes the devices weft4 and weft6 (VXLAN, VNI 18952, UDP
/// 4879), routes in table 18952 with one rule a family at priority 105, refusals in table 18953
/// with one at 32765, two rules at 103 and 104 for each pod CIDR of the node, one at 102 for each
/// network of its own in a peer's prefix, and the nftables tables `inet weft` and, for prefixes of
/// peers that are gone, `inet weft_refused`. It looks at every change of these, by any program, and
/// puts back what is missing. It needs CAP_NET_ADMIN, a writable /proc/sys/net and the program nft.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Follows the NodeConfig of a node until stopped, and then leaves all as it is.
    ///
    /// Only `route-agent cleanup` and a NodeConfig marked `removed` take anything away: an upgrade
    /// cuts no connection.
    #[command(verbatim_doc_comment)]
    Run(Box<RunArgs>),
    /// Takes away all that weft made on this node. Needs no config. Refused while an agent runs here,
    /// which would make it again.
    Cleanup {
        /// Leave the refusal of peers' prefixes (nftables table `inet weft_refused`) if something
        /// still sends to them, and print who. Without this, that table goes, too. Once it is gone,
        /// so is what weft-refuse.service would load (`/var/lib/weft/*/refusal.nft`).
        #[arg(long)]
        refuse: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) store: Option<StoreArgs>,
    /// Read only this directory, the `published` of another host's run directory.
    #[arg(long, value_name = "DIR", conflicts_with = "StoreArgs")]
    pub(crate) published: Option<PathBuf>,
    /// The node that this is; its NodeConfig has this name.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub(crate) node: String,
    /// Address that serves /metrics, /healthz and /readyz: `unix:PATH` or `IP:PORT`.
    #[arg(long, value_name = "unix:PATH|IP:PORT")]
    pub(crate) http: Option<HttpAddress>,
    /// Leave chains of others alone: by default, weft puts accepts (comment "weft") where FORWARD
    /// and INPUT chains drop what they have no rule for, behind all rules that drop more: for packets of
    /// the overlay, VXLAN, and WireGuard of a server on this host.
    #[arg(long)]
    pub(crate) no_accept_rules: bool,
    /// Remove what the daemon of Liqo's own network has left on this node, as soon as weft serves the same
    /// prefixes: its devices (liqo.XXXXXXXXXX), the rules and routes that lead to them, and its nft
    /// tables. For clusters that `weft adopt` has taken over.
    #[arg(long)]
    pub(crate) remove_liqo: bool,
    /// Save into this file what nft has to load before the network is up, so that nothing is sent to
    /// peers while the host starts.
    #[arg(long, value_name = "FILE")]
    pub(crate) refusal_file: Option<PathBuf>,
    /// For how many seconds a node refuses what is still sent to peers when weft is uninstalled from its
    /// cluster. The uninstallation waits for that, 80 seconds at most.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) linger: u32,
    /// Print what would be done, as commands, and do nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::REFUSE_SECONDS;

    use super::*;

    fn run(more: &[&str]) -> RunArgs {
        let line = ["route-agent", "run", "--node", "n1"];
        let cli = Cli::try_parse_from(line.iter().chain(more)).unwrap();
        let Command::Run(args) = cli.command else { panic!("another command") };
        *args
    }

    /// README.md, deploy/chart/README.md and the help name both.
    #[test]
    fn refusal_lasts_five_minutes_and_linger_one() {
        assert_eq!(REFUSE_SECONDS, 300);
        assert_eq!(run(&[]).linger, 60);
    }

    #[test]
    fn the_config_comes_from_one_place() {
        let agent = run(&["--published", "/mnt/rome"]);
        assert!(agent.store.is_none() && agent.published.is_some());
        assert!(run(&["--kubernetes"]).store.is_some_and(|store| store.kubernetes));
        assert!(run(&["--run-dir", "/r"]).store.is_some_and(|store| store.run_dir.is_some()));
        assert!(run(&[]).store.is_none());
    }
}
