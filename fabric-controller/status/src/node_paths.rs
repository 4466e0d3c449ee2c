//! Paths between the nodes and each gateway.

use std::collections::BTreeMap;

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_index::Index;
use fabric_index::node_paths::NodePaths;
use fabric_model::{Gateway, Peering};
use fabric_objects::{Kind, ObjectRef};

/// By gateway and by Configuration. A gateway that answers no probes has none.
pub fn paths(
    index: &Index,
    peerings: &[Peering<'_>],
    gateways: &[Gateway<'_>],
) -> BTreeMap<ObjectRef, NodePaths> {
    let mut all = BTreeMap::new();
    for gateway in gateways {
        let config = index.typed::<GatewayConfig>(&gateway.config());
        let nodes = index.all::<NodeConfig>(Kind::NodeConfig).map(|(_, node)| node);
        let Some(paths) = config.and_then(|config| NodePaths::of(config, nodes)) else { continue };
        let peering = peerings.iter().find(|peering| peering.is_with(&gateway.peer));
        all.extend(peering.map(|peering| (peering.reference.clone(), paths.clone())));
        all.insert(gateway.reference.clone(), paths);
    }
    all
}
