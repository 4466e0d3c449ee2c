//! The nodes of a cluster as one of its gateways is reached by them.

use fabric_api::fabric::{GatewayConfig, NodeConfig, PathFault};
use fabric_index::node_paths::{NodePaths, cause, describe, remedy};
use jiff::Timestamp;
use serde::Serialize;

use super::{Peering, State};

/// Number of nodes that reach the gateway, and names of those that do not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Nodes {
    pub reachable: usize,
    /// Nodes with a live route-agent, now or before.
    pub of: usize,
    /// The cluster has no node at all.
    #[serde(skip)]
    pub(super) is_without_nodes: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreachable: Vec<Node>,
}

/// A node whose path to the gateway fails.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Node {
    pub node: String,
    pub fault: PathFault,
    /// RFC 3339; empty if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub since: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    pub cause: String,
    pub remedy: String,
}

impl Nodes {
    pub(super) fn of(gateway: &GatewayConfig, nodes: &[&NodeConfig]) -> Option<Self> {
        let paths = NodePaths::of(gateway, nodes.iter().copied())?;
        let (reachable, of) = (paths.reachable(), paths.nodes);
        let is_without_nodes = paths.is_without_nodes;
        let unreachable = paths.unreachable.into_iter().map(|unreachable| Node {
            cause: cause(&unreachable),
            remedy: remedy(&unreachable),
            node: unreachable.node,
            fault: unreachable.fault,
            detail: unreachable.detail,
            since: unreachable.since,
        });
        Some(Self { reachable, of, is_without_nodes, unreachable: unreachable.collect() })
    }

    /// Packets of some pods do not pass.
    pub(super) fn are_faulty(&self) -> bool {
        self.is_without_nodes || !self.unreachable.is_empty()
    }
}

/// One line a node, of a gateway that answers or is not seen.
pub(super) fn problems(peering: &Peering, now: Timestamp) -> Vec<String> {
    let runs = peering.state != State::Waiting;
    let nodes = peering.nodes.iter().filter(|_| runs).flat_map(|nodes| &nodes.unreachable);
    let gateway = peering.gateway.as_deref().unwrap_or_default();
    let place = format!("gateway {}/{gateway}", peering.namespace);
    nodes.map(|node| format!("{place}: {}", describe(&node.as_reported(), now))).collect()
}

impl Node {
    fn as_reported(&self) -> fabric_api::fabric::UnreachableNode {
        let (node, since) = (self.node.clone(), self.since.clone());
        let (fault, detail) = (self.fault, self.detail.clone());
        fabric_api::fabric::UnreachableNode { node, fault, detail, since }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::config;

    fn gateway(unreachable: serde_json::Value) -> GatewayConfig {
        let mut gateway = config("t", "client", "n1");
        let status = serde_json::json!({
            "overlayProbePort": 12346, "probingNodes": 2, "unreachableNodes": unreachable});
        gateway.status = Some(serde_json::from_value(status).unwrap());
        gateway
    }

    #[test]
    fn json_names_node_cause_and_remedy() {
        let since = "2026-01-31T12:00:00.000Z";
        let faults = serde_json::json!([{"node": "n2", "fault": "NoAgent", "since": since}]);
        let json = serde_json::to_value(Nodes::of(&gateway(faults), &[]).unwrap()).unwrap();
        assert_eq!((&json["reachable"], &json["of"]), (&1.into(), &2.into()));
        let node = &json["unreachable"][0];
        assert_eq!((&node["node"], &node["fault"]), (&"n2".into(), &"NoAgent".into()));
        assert!(
            node["cause"].as_str().unwrap().contains("no probes of its route-agent arrive"),
            "{json}"
        );
        assert!(node["remedy"].as_str().unwrap().contains("the route-agent of n2 runs"), "{json}");
    }
}
