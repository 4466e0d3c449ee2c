//! Nodes whose configs stay unacknowledged, standalone. In Kubernetes, their pods show why.

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_index::Index;
use fabric_model::names::of_node;
use fabric_model::{Cluster, Problems};
use fabric_objects::Kind;

/// An agent that cannot write its status is only noticed by what it does not acknowledge.
pub(super) fn report(index: &Index, cluster: &Cluster, problems: &mut Problems) {
    for node in index.lagging_nodes.iter().filter(|_| !index.settings.kubernetes) {
        let reference = of_node(node);
        let config = index.typed::<NodeConfig>(&reference);
        let Some(config) = config.filter(|_| !index.is_applied(node)) else { continue };
        let generation = config.metadata.generation.unwrap_or_default();
        // Without probes, the node is unreachable, and shown so.
        if probes(index, node, cluster.nodes.len()) {
            let cause = format!(
                "its route-agent sends probes, but does not acknowledge generation \
                     {generation}: it cannot write to the published directory; share that with \
                     {node} for writing, or nothing here shows what is wrong there"
            );
            problems.add(&reference, "", cause);
        }
    }
}

/// Returns true if gateways receive probes of this node: of all nodes, and miss none of this one.
fn probes(index: &Index, node: &str, nodes: usize) -> bool {
    let gateways = index.all::<GatewayConfig>(Kind::GatewayConfig);
    let mut statuses = gateways.filter_map(|(_, gateway)| gateway.status.as_ref());
    statuses.any(|status| {
        usize::try_from(status.probing_nodes).is_ok_and(|probing| probing >= nodes)
            && status.unreachable_nodes.iter().all(|unreachable| unreachable.node != node)
    })
}
