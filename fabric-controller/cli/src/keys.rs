mod superseded;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fabric_api::{ClusterId, PrivateKey, PublicKey, labels};

use super::manifest::{self, NewFile};
use super::output;
use super::selection::Selection;

const EXAMPLES: &str = "\
Examples:
  In rome, for its peering with milan; writes milan.gw-keys.secret.yaml (stays here, mode
  0600) and rome-for-milan.publickey.yaml (goes to milan):
    weft keys --cluster-id rome --peer milan --out .
  Both documents on stdout:
    weft keys --cluster-id rome --peer milan
  New keys for a peering that runs:
    weft keys --cluster-id rome --peer milan --out . --force
  then each file replaces the old one of its kind, the Secret in rome's manifests and the PublicKey
  in milan's; and the same the other way round if milan shall have new keys, too. The order does not
  matter. Once both have both, nothing is lost; 180 s after a change the old key is refused.
  At once, for a key that somebody else may have, in milan, once it has rome's new PublicKey:
    weft keys --peer rome --end-superseded
  and if milan is in Kubernetes:
    kubectl delete pod --all-namespaces \\
      --selector networking.liqo.io/component=gateway,liqo.io/remote-cluster-id=rome";

/// Make the keys of a peering: a Secret for this cluster, a PublicKey manifest for the peer.
///
/// The Secret holds the private key and stays in this cluster; GatewayServer or GatewayClient name
/// it in `spec.secretRef`. The PublicKey is labelled with this cluster's ID and belongs into the
/// manifests of the peer.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeysArgs {
    /// This cluster.
    #[arg(long, value_name = "ID", required_unless_present = "end_superseded")]
    cluster_id: Option<ClusterId>,
    /// The other cluster.
    #[arg(long, value_name = "ID")]
    peer: ClusterId,
    /// Namespace of the peering in this cluster [default: liqo-tenant-PEER].
    #[arg(long, value_name = "NAMESPACE", value_parser = manifest::dns_name)]
    namespace: Option<String>,
    /// Namespace of the peering in the other cluster [default: liqo-tenant-CLUSTER_ID].
    #[arg(long, value_name = "NAMESPACE", value_parser = manifest::dns_name)]
    peer_namespace: Option<String>,
    /// Name of the Secret.
    #[arg(long, default_value = "gw-keys", value_parser = manifest::dns_name)]
    name: String,
    /// Write two files to this directory instead of printing.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Overwrite files that are there: the old private key is lost.
    #[arg(long, requires = "out")]
    force: bool,
    /// Make no keys, but refuse at once all that the peering with this peer had before, instead of
    /// after 180 s. Its gateways on this host start anew; packets are lost for less than a second.
    #[arg(long, conflicts_with_all = ["cluster_id", "out", "namespace", "peer_namespace"])]
    end_superseded: bool,
    #[command(flatten)]
    selection: Selection,
}

/// Clusters and names of a pair of manifests.
struct Pair<'a> {
    args: &'a KeysArgs,
    cluster: &'a ClusterId,
}

pub(crate) fn run(args: &KeysArgs) -> anyhow::Result<ExitCode> {
    match &args.cluster_id {
        Some(cluster) if *cluster == args.peer => bail!(
            "--peer {cluster}: this is --cluster-id, too; expected the ID of the other cluster"
        ),
        Some(cluster) => make(&Pair { args, cluster }),
        None => superseded::end(&args.selection, &args.peer),
    }
}

fn make(pair: &Pair<'_>) -> anyhow::Result<ExitCode> {
    let args = pair.args;
    let key = PrivateKey::generate();
    let (secret, public) = (secret(pair, &key), public_key(pair, &key.public()));
    let Some(out) = &args.out else {
        output::print(&format!("{secret}---\n{public}"))?;
        output::say(&format!(
            "the Secret stays in {}, readable by root alone; the PublicKey goes to {}",
            pair.cluster, args.peer
        ));
        return Ok(ExitCode::SUCCESS);
    };
    let private_file = format!("{}.{}.secret.yaml", args.peer, args.name);
    let public_file = format!("{}-for-{}.publickey.yaml", pair.cluster, args.peer);
    let files = [
        NewFile { name: private_file.clone(), text: secret, mode: 0o600 },
        NewFile { name: public_file.clone(), text: public, mode: 0o644 },
    ];
    manifest::write_all(out, &files, args.force)?;
    let (cluster, peer) = (pair.cluster, &args.peer);
    let path = |name: &str| out.join(name).display().to_string();
    output::say(&format!("{}: private, for the manifests of {cluster}", path(&private_file)));
    output::say(&format!("{}: public, for the manifests of {peer}", path(&public_file)));
    Ok(ExitCode::SUCCESS)
}

fn secret(Pair { args, cluster }: &Pair<'_>, key: &PrivateKey) -> String {
    let namespace = namespace(args.namespace.as_deref(), &args.peer);
    let mut text = format!(
        "# PRIVATE. Stays in cluster {cluster}: its end of the peering with {}.\n",
        args.peer
    );
    text.push_str(&head("v1", "Secret", &args.name, &namespace));
    text.push_str(&label_lines(&args.peer));
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "type: Opaque\ndata:\n  privateKey: {}\n  publicKey: {}\n",
        STANDARD.encode(key.expose()),
        key.public()
    );
    text
}

fn public_key(Pair { args, cluster }: &Pair<'_>, key: &PublicKey) -> String {
    let namespace = namespace(args.peer_namespace.as_deref(), cluster);
    let mut text = format!("# Goes into the manifests of cluster {}.\n", args.peer);
    text.push_str(&head("networking.liqo.io/v1beta1", "PublicKey", "gw-publickey", &namespace));
    text.push_str(&label_lines(cluster));
    let _ = write!(text, "spec:\n  publicKey: {key}\n");
    text
}

fn namespace(given: Option<&str>, peer: &ClusterId) -> String {
    given.map_or_else(|| format!("liqo-tenant-{peer}"), str::to_owned)
}

fn head(api_version: &str, kind: &str, name: &str, namespace: &str) -> String {
    format!(
        "apiVersion: {api_version}\nkind: {kind}\nmetadata:\n  name: \"{name}\"\n  \
         namespace: \"{namespace}\"\n"
    )
}

fn label_lines(remote: &ClusterId) -> String {
    format!(
        "  labels:\n    {}: \"{remote}\"\n    {}: \"true\"\n",
        labels::REMOTE_CLUSTER_ID,
        labels::GATEWAY_RESOURCE
    )
}
