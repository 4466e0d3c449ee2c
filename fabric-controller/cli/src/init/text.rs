//! The manifests as text, with comments for their editors. Everything put in is checked, so nothing
//! needs quoting.

use std::fmt::Write as _;

use fabric_api::labels;

use super::node::NodeArg;
use super::plan::{ClusterPlan, NetworkPlan, Purpose};
use crate::manifest::NewFile;

pub(super) fn files(plan: &ClusterPlan) -> Vec<NewFile> {
    let file = |name: &str, text| NewFile { name: name.to_owned(), text, mode: 0o644 };
    vec![
        file("cluster.yaml", cluster(plan)),
        file("networks.yaml", networks(plan)),
        file("nodes.yaml", nodes(plan)),
    ]
}

fn cluster(plan: &ClusterPlan) -> String {
    format!(
        "\
# The name of this cluster. Peers put it into their labels ({remote_id}),
# and granted addresses hang on it, so do not change it later.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
  namespace: {namespace}
  labels:
    {app}: {app_value}
data:
  {key}: \"{id}\"
",
        remote_id = labels::REMOTE_CLUSTER_ID,
        name = labels::CLUSTER_ID_CONFIGMAP,
        namespace = labels::LIQO_NAMESPACE,
        app = labels::APP_NAME,
        app_value = labels::CLUSTER_ID_APP,
        key = labels::CLUSTER_ID_KEY,
        id = plan.cluster_id,
    )
}

fn networks(plan: &ClusterPlan) -> String {
    let mut text = "# The prefixes of this cluster.\n".to_owned();
    let mut before: Option<Purpose> = None;
    let mut nth = 1;
    for network in &plan.networks {
        nth = if before == Some(network.purpose) { nth + 1 } else { 1 };
        if before.is_some() {
            text.push_str("---\n");
        }
        text.push_str(&one_network(network, nth));
        before = Some(network.purpose);
    }
    text
}

fn one_network(network: &NetworkPlan, nth: usize) -> String {
    let purpose = network.purpose.as_str();
    let name = if nth == 1 { purpose.to_owned() } else { format!("{purpose}-{nth}") };
    let mut text = format!("# {}\n", about(network.purpose));
    if !network.fixed {
        text.push_str(
            "# If it is taken, another of the same length is granted (see the status).\n",
        );
    }
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\
apiVersion: ipam.liqo.io/v1alpha1
kind: Network
metadata:
  name: {name}
  namespace: {}
  labels:
    {}: {purpose}
",
        labels::LIQO_NAMESPACE,
        labels::NETWORK_TYPE,
    );
    if network.fixed {
        let _ = writeln!(text, "    {}: \"true\"", labels::NETWORK_NOT_REMAPPED);
    }
    if matches!(network.purpose, Purpose::Pod | Purpose::Service | Purpose::Reserved) {
        let _ = writeln!(text, "    {}: \"true\"", labels::NETWORK_SHARED);
    }
    let _ = writeln!(text, "spec:\n  cidr: {}", network.cidr);
    if network.purpose == Purpose::External {
        // As Liqo: the network address itself is never handed out.
        text.push_str("  preAllocated: 1\n");
    }
    text
}

fn about(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Pod => "Pods. A peer that uses the same prefix sees another in its place.",
        Purpose::Service => "Services. Kept apart from peers' prefixes, never reached by them.",
        Purpose::External => {
            "External: an address of it stands in for each node, and for each IP resource."
        }
        Purpose::Reserved => "In use elsewhere. Kept apart from peers' prefixes.",
        Purpose::Internal => "Internal: overlay addresses of nodes and gateways. No peer sees it.",
    }
}

fn nodes(plan: &ClusterPlan) -> String {
    let nodes: Vec<_> = plan.nodes.iter().map(one_node).collect();
    format!(
        "# The hosts of this cluster: where they are reached, and which pods each has.\n\
         # The name is what `weft up --node` and `weft agent --node` are given.\n{}",
        nodes.join("---\n")
    )
}

fn one_node(node: &NodeArg) -> String {
    let mut text =
        format!("apiVersion: v1\nkind: Node\nmetadata:\n  name: \"{}\"\nspec:\n", node.name);
    let _ = writeln!(text, "  podCIDR: {}\n  podCIDRs:", node.pod_cidrs[0]);
    for cidr in &node.pod_cidrs {
        let _ = writeln!(text, "  - {cidr}");
    }
    text.push_str("status:\n  addresses:\n");
    for address in &node.addresses {
        let _ = writeln!(text, "  - type: InternalIP\n    address: \"{address}\"");
    }
    text
}
