//! Condition `NodesReachable` on Configurations and gateways.

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_api::networking::NODES_REACHABLE;
use fabric_objects::{Kind, ObjectRef};

use super::gateway::Gateway;
use super::peering::Peering;
use super::{Compiler, conditions, statuses};
use crate::node_paths::{NodePaths, describe_steadily};

impl Compiler<'_> {
    /// A gateway that answers no probes leaves its objects without the condition.
    pub(super) fn node_paths(&mut self, peerings: &[Peering<'_>], gateways: &[Gateway<'_>]) {
        for gateway in gateways {
            let Some(paths) = self.paths_of(gateway) else { continue };
            let peering = peerings.iter().find(|peering| peering.is_with(&gateway.peer));
            let configuration = peering.map(|peering| peering.reference.clone());
            for object in [Some(gateway.reference.clone()), configuration].into_iter().flatten() {
                self.set_nodes_reachable(&object, &paths);
            }
        }
    }

    fn paths_of(&self, gateway: &Gateway<'_>) -> Option<NodePaths> {
        let config = self.index.typed::<GatewayConfig>(&gateway.config())?;
        let nodes = self.index.all::<NodeConfig>(Kind::NodeConfig).map(|(_, node)| node);
        NodePaths::of(config, nodes)
    }

    fn set_nodes_reachable(&mut self, reference: &ObjectRef, paths: &NodePaths) {
        let planned = self.out.statuses.remove(reference);
        let Some(mut object) = planned.or_else(|| self.index.get(reference).cloned()) else {
            return;
        };
        let generation = object.generation();
        if let Some(conditions) = statuses::conditions_of(&mut object, true) {
            let message = message(paths);
            let (status, reason) = match paths.unreachable.is_empty() {
                true => ("True", "AllNodesReachable"),
                false => ("False", "NodesUnreachable"),
            };
            let condition = (NODES_REACHABLE, status, reason, message.as_str());
            conditions::put(conditions, condition, generation, self.now);
        }
        self.out.statuses.insert(reference.clone(), object);
    }
}

/// Changes with the faults only, never with time.
fn message(paths: &NodePaths) -> String {
    let count = format!("{} of {} nodes reach the gateway", paths.reachable(), paths.nodes);
    let faults = paths.unreachable.iter().map(describe_steadily);
    std::iter::once(count).chain(faults).collect::<Vec<_>>().join("; ")
}
