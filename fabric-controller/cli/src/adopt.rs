use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use fabric_migration::adoption::adopt;
use fabric_store::ApiServer;

use super::output::{print, say};

const HELP: &str = "\
Liqo's own network has to be off, whose pods go on forwarding all the same. In this order:

    helm upgrade liqo liqo/liqo --namespace liqo --version 1.2.0 --reuse-values \\
        --set networking.enabled=false --wait
    weft adopt --dry-run
    weft adopt
    helm install weft deploy/chart --namespace liqo --wait ... \\
        --set networking.fabric.config.removeLiqo=true

Connections to peers are interrupted by the last one only, until the new gateways run.

What users have made stays: Networks, IPs, Configurations, PublicKeys, Secrets, gateways with their
addresses, node ports and keys, and how peers' prefixes are remapped. What Liqo's network has made
for itself goes. Interrupted, it goes on when it is run again; a second run has nothing to do.

It needs the verbs list, get, patch and delete on all these in all namespaces, and names what its
user lacks before it does anything; --dry-run needs list and get.

Exit codes: 0 done, or nothing to do, 1 it failed or Liqo's network is not off, 2 wrong usage.";

/// Take over a Kubernetes cluster whose network was Liqo's, before weft is installed.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct AdoptArgs {
    /// Print what would be done, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Namespace of Liqo, and of weft.
    #[arg(short, long, default_value = "liqo")]
    namespace: String,
    /// Kubeconfig of the cluster; without it that of KUBECONFIG, or ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, instead of its current one.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

pub(crate) fn run(args: &AdoptArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (file, context) = (args.kubeconfig.as_deref(), args.context.as_deref());
        let server = ApiServer::open(file, context, Some(args.namespace.clone()))?;
        let steps = adopt(&server, args.dry_run, |step| print(&format!("{step}\n"))).await;
        let steps =
            steps.with_context(|| format!("cannot take over the cluster at {}", server.url))?;
        say(&match (steps, args.dry_run) {
            (0, _) => format!("nothing of Liqo's network is left in the API of {}", server.url),
            (steps, true) => format!("{steps} steps; nothing is done (--dry-run)"),
            (steps, false) => {
                format!("{steps} steps done; now install weft: see `weft adopt --help`")
            }
        });
        Ok(ExitCode::SUCCESS)
    })
}
