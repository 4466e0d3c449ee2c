mod node;
mod plan;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use fabric_api::{Cidr, ClusterId};

use self::node::NodeArg;
use self::plan::ClusterPlan;
use super::{manifest, output};

const EXAMPLES: &str = "\
Examples:
  One host, the only node (named as the host, with the address that the default route uses):
    weft init --cluster-id rome --out /etc/weft/rome
  Two nodes, each with its part of the pod CIDR:
    weft init --cluster-id rome --pod-cidr 10.200.0.0/16 \\
      --node n1=192.0.2.11=10.200.1.0/24 --node n2=192.0.2.12=10.200.2.0/24 --out /etc/weft/rome
  Both families:
    weft init --cluster-id rome --pod-cidr 10.200.0.0/16 --pod-cidr fd00:200::/48 \\
      --external-cidr 10.70.0.0/16 --external-cidr fd00:70::/48 \\
      --node n1=192.0.2.11,2001:db8::11=10.200.1.0/24,fd00:200:0:1::/64 --out /etc/weft/rome";

/// Write the manifests that describe this cluster: its ID, its Networks, its Nodes.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InitArgs {
    /// Name of this cluster, different from every peer's: a DNS label.
    #[arg(long, value_name = "ID")]
    cluster_id: ClusterId,
    /// Prefix of the cluster's pods; once a family or more [default: 10.200.0.0/16].
    #[arg(long, value_name = "CIDR")]
    pod_cidr: Vec<Cidr>,
    /// Prefix whose addresses stand in for what is no pod; once a family [default: 10.70.0.0/16,
    /// or another of that length if it is taken].
    #[arg(long, value_name = "CIDR")]
    external_cidr: Vec<Cidr>,
    /// IPv4 prefix of the overlay between nodes and gateways [default: 10.80.0.0/16, or another of
    /// that length if it is taken].
    #[arg(long, value_name = "CIDR")]
    internal_cidr: Option<Cidr>,
    /// Prefix of the cluster's Services, if it has any; never given to a peer.
    #[arg(long, value_name = "CIDR")]
    service_cidr: Vec<Cidr>,
    /// Prefix that is in use elsewhere (a VPN, a data centre's network), never given to a peer; may be
    /// repeated.
    #[arg(long, value_name = "CIDR")]
    reserved_cidr: Vec<Cidr>,
    /// A node: name, address (one a family), pod CIDR (one a family) [default: this host, with the
    /// whole pod CIDR]. An address that changes later is followed, unless the Node that is written
    /// gets the annotation fabric.weft.dev/pin-addresses: "true".
    #[arg(long, value_name = "NAME=ADDRESS[,ADDRESS6]=PODCIDR[,PODCIDR6]")]
    node: Vec<NodeArg>,
    /// Directory to write to; made if it is not there.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Overwrite what an earlier `weft init` wrote.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &InitArgs) -> anyhow::Result<ExitCode> {
    let plan = ClusterPlan::new(args)?;
    let files = text::files(&plan);
    manifest::write_all(&args.out, &files, args.force)?;
    let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
    output::say(&format!("wrote {} to {}", names.join(", "), args.out.display()));
    for warning in plan.warnings() {
        output::say(&format!("note: {warning}"));
    }
    output::say(&format!("next: weft up --manifests {}", args.out.display()));
    Ok(ExitCode::SUCCESS)
}
