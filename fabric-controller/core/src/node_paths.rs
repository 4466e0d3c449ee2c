//! Paths between the nodes and a gateway, folded from what both ends report.

use std::collections::BTreeMap;

use fabric_api::fabric::{GatewayConfig, NodeConfig, PathFault, UnreachableNode};
use jiff::Timestamp;

/// Paths between the nodes and one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    /// Number of nodes that are to reach it.
    pub nodes: usize,
    /// Those whose path fails, by name.
    pub unreachable: Vec<UnreachableNode>,
}

impl NodePaths {
    /// `None` if the gateway answers no probes: an older one, or one that does not run yet.
    pub fn of<'a>(
        gateway: &GatewayConfig,
        nodes: impl IntoIterator<Item = &'a NodeConfig>,
    ) -> Option<Self> {
        let status = gateway.status.as_ref()?;
        status.overlay_probe_port?;
        let probing = usize::try_from(status.probing_nodes).unwrap_or(usize::MAX);
        let mut unreachable = BTreeMap::new();
        let mut idle = Vec::new();
        let mut all = 0;
        for config in nodes.into_iter().filter(|config| !config.spec.removed) {
            all += 1;
            if config.status.as_ref().is_none_or(|status| status.applied_generation == 0) {
                idle.push(config);
            }
            let node = config.metadata.name.clone().unwrap_or_default();
            let reports = config.status.iter().flat_map(|status| &status.unreachable_gateways);
            for report in reports.filter(|r| r.peer_cluster_id == gateway.spec.peer_cluster_id) {
                let (fault, since) = (PathFault::NoAnswer, report.since.clone());
                let fault = UnreachableNode { node: node.clone(), fault, since };
                unreachable.insert(node.clone(), fault);
            }
        }
        // The gateway knows more: whether it is one direction, or only the agent.
        for node in &status.unreachable_nodes {
            unreachable.insert(node.node.clone(), node.clone());
        }
        let counted = probing.max(unreachable.len());
        // An agent may probe without being able to write its status.
        for config in idle.into_iter().take(usize::saturating_sub(all, counted)) {
            let node = config.metadata.name.clone().unwrap_or_default();
            let since = config.metadata.creation_timestamp.as_ref();
            let since = since.map(|time| time.0.to_string()).unwrap_or_default();
            let fault = PathFault::NotStarted;
            let fault = UnreachableNode { node: node.clone(), fault, since };
            unreachable.entry(node).or_insert(fault);
        }
        let unreachable: Vec<_> = unreachable.into_values().collect();
        let missing = unreachable.iter().filter(|node| node.fault == PathFault::NotStarted).count();
        Some(Self { nodes: counted + missing, unreachable })
    }

    /// Number of nodes whose path works.
    pub fn reachable(&self) -> usize {
        self.nodes - self.unreachable.len()
    }
}

/// Failing part, duration and remedy on one line.
pub fn describe(node: &UnreachableNode, now: Timestamp) -> String {
    let UnreachableNode { node: name, fault, since } = node;
    let since: Option<Timestamp> = since.parse().ok();
    let duration = since.map(|since| (now.as_second() - since.as_second()).max(0));
    let duration = duration.map(|seconds| format!(" for {seconds} s")).unwrap_or_default();
    format!("{name}: {}{duration}; {}", cause(*fault), remedy(*fault, name))
}

/// The same without a duration, for a text that changes only with the fault.
pub fn describe_steadily(node: &UnreachableNode) -> String {
    let since = Some(&node.since).filter(|since| !since.is_empty());
    let since = since.map(|since| format!(" since {since}")).unwrap_or_default();
    format!("{}: {}{since}", node.node, cause(node.fault))
}

/// Part that fails.
pub fn cause(fault: PathFault) -> &'static str {
    match fault {
        PathFault::NoAnswer => "no answer over VXLAN",
        PathFault::NoAgent => {
            "its route-agent sends no probes, though its kernel answers over VXLAN"
        }
        PathFault::OneWay => "packets from it arrive over VXLAN, but none reach it",
        PathFault::CutOff => "its route-agent cannot read the published directory",
        PathFault::NotStarted => {
            "no route-agent of it has started: its pods do not reach peers, and what they send \
             there is not refused either"
        }
    }
}

/// Remedy.
pub fn remedy(fault: PathFault, node: &str) -> String {
    match fault {
        PathFault::NoAnswer => format!(
            "see whether {node} is up, its network is connected, its address is the one in its \
             Node, its route-agent runs, and UDP 4879 passes between it and the gateway's host"
        ),
        PathFault::NoAgent => format!("start the route-agent of {node} again, and see its log"),
        PathFault::OneWay => {
            format!(
                "let UDP 4879 pass from the gateway's host to {node}, which a firewall may drop"
            )
        }
        PathFault::NotStarted => {
            format!("run `weft agent --node {node}` there; in Kubernetes see its route-agent's pod")
        }
        PathFault::CutOff => format!("mount or share the published directory on {node} again"),
    }
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::UnreachableGateway;
    use serde_json::json;

    use super::*;

    fn gateway(status: serde_json::Value) -> GatewayConfig {
        let spec = json!({
            "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
            "secretName": "s", "mtu": 1340, "tunnelAddress": "169.254.18.2",
            "peerTunnelAddress": "169.254.18.1", "remaps": [], "podCidrs": [], "externalCidrs": [],
            "overlay": {"address": "10.80.0.7"}, "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
        });
        let mut gateway = GatewayConfig::new("client", serde_json::from_value(spec).unwrap());
        gateway.status = Some(serde_json::from_value(status).unwrap());
        gateway
    }

    fn node(name: &str, unreachable_peer: &str) -> NodeConfig {
        let spec = json!({"clusterId": "rome", "underlay": [], "localPods": [], "podCidrs": [],
            "external": [], "peerings": [], "vxlanSources": []});
        let mut node = NodeConfig::new(name, serde_json::from_value(spec).unwrap());
        let since = "2026-01-31T12:00:00.000Z".to_owned();
        let peer_cluster_id = unreachable_peer.to_owned();
        node.status.get_or_insert_default().unreachable_gateways =
            vec![UnreachableGateway { peer_cluster_id, since }];
        node
    }

    #[test]
    fn gateway_without_responder_has_no_paths() {
        assert_eq!(NodePaths::of(&gateway(json!({})), [&node("n2", "milan")]), None);
    }

    #[test]
    fn reports_of_both_ends_name_each_node_once() {
        let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 3,
            "unreachableNodes": [{"node": "n2", "fault": "OneWay", "since": "2026-01-31T12:00:01Z"}]}));
        let nodes = [node("n2", "milan"), node("n3", "milan"), node("n4", "paris")];
        let paths = NodePaths::of(&gateway, &nodes).unwrap();
        let named: Vec<_> = paths.unreachable.iter().map(|u| (u.node.as_str(), u.fault)).collect();
        assert_eq!(named, [("n2", PathFault::OneWay), ("n3", PathFault::NoAnswer)]);
        assert_eq!((paths.reachable(), paths.nodes), (1, 3));
    }

    #[test]
    fn node_without_agent_is_named_unless_it_probes() {
        let mut nodes = [node("n1", "paris"), node("n2", "paris")];
        nodes[0].status.get_or_insert_default().applied_generation = 3;
        let of = |probing: u32| {
            let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": probing}));
            NodePaths::of(&gateway, &nodes).unwrap()
        };
        let paths = of(1);
        assert_eq!((paths.reachable(), paths.nodes), (1, 2));
        let text = describe_steadily(&paths.unreachable[0]);
        assert!(text.starts_with("n2: no route-agent of it has started"), "{text}");
        assert!(!text.contains("since"), "{text}");
        assert_eq!(of(2).reachable(), 2, "its agent cannot write, but probes");
    }

    #[test]
    fn node_is_named_with_duration_and_remedy() {
        let node = UnreachableNode {
            node: "n2".to_owned(),
            fault: PathFault::NoAnswer,
            since: "2026-01-31T12:00:00.000Z".to_owned(),
        };
        let text = describe(&node, "2026-01-31T12:00:04.9Z".parse().unwrap());
        assert!(
            text.starts_with("n2: no answer over VXLAN for 4 s; see whether n2 is up"),
            "{text}"
        );
    }
}
