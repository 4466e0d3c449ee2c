//! Paths between the nodes and a gateway, folded from what both ends report.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::fabric::{
    Diversion, GatewayConfig, NodeConfig, PacketDrop, PathFault, UnreachableNode,
};
use jiff::Timestamp;

/// Paths between the nodes and one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    /// Number of nodes that are to reach it.
    pub nodes: usize,
    /// The cluster has no node at all.
    pub is_without_nodes: bool,
    /// Those whose path fails, by name.
    pub unreachable: Vec<UnreachableNode>,
}

impl NodePaths {
    /// `None` while nothing is known: the gateway answers no probes (an older one, or one that does not run yet),
    /// or has just started or taken over, and no node has probed it.
    pub fn of<'a>(
        gateway: &GatewayConfig,
        nodes: impl IntoIterator<Item = &'a NodeConfig>,
    ) -> Option<Self> {
        let status = gateway.status.as_ref()?;
        status.overlay_probe_port?;
        let probing = usize::try_from(status.probing_nodes).unwrap_or(usize::MAX);
        let mut unreachable = BTreeMap::new();
        let mut idle = Vec::new();
        let present: Vec<_> = nodes.into_iter().filter(|config| !config.spec.removed).collect();
        let all = present.len();
        for config in &present {
            if config.status.as_ref().is_none_or(|status| status.applied_generation == 0) {
                idle.push(*config);
            }
            let reports = config.status.iter().flat_map(|status| &status.unreachable_gateways);
            for report in reports.filter(|r| r.peer_cluster_id == gateway.spec.peer_cluster_id) {
                let node = config.metadata.name.clone().unwrap_or_default();
                let (fault, since) = (PathFault::NoAnswer, report.since.clone());
                let fault = UnreachableNode { node: node.clone(), fault, detail: None, since };
                unreachable.insert(node.clone(), fault);
            }
        }
        // The gateway reports more: whether it is one direction, or only the agent.
        for node in &status.unreachable_nodes {
            unreachable.insert(node.node.clone(), node.clone());
        }
        let counted = probing.max(unreachable.len());
        // An agent that is taken down takes its status with it.
        for config in &idle {
            let node = config.metadata.name.as_deref().unwrap_or_default();
            let reports = config.status.iter().any(|of| !of.unreachable_gateways.is_empty());
            if let Some(node) = unreachable.get_mut(node).filter(|_| !reports)
                && matches!(node.fault, PathFault::NoAnswer | PathFault::NoAgent)
            {
                node.fault = PathFault::NotStarted;
            }
        }
        let probed = unreachable.len();
        // An agent may probe without being able to write its status.
        for config in idle.into_iter().take(usize::saturating_sub(all, counted)) {
            let node = config.metadata.name.clone().unwrap_or_default();
            let since = config.metadata.creation_timestamp.as_ref();
            let since = since.map(|time| time.0.to_string()).unwrap_or_default();
            let fault = PathFault::NotStarted;
            let fault = UnreachableNode { node: node.clone(), fault, detail: None, since };
            unreachable.entry(node).or_insert(fault);
        }
        let missing = unreachable.len() - probed;
        let host = gateway.spec.overlay.node.as_deref();
        let host = present.iter().copied().find(|config| config.metadata.name.as_deref() == host);
        if let Some(host) = host {
            add_drop_of_host(host, all, &mut unreachable);
        }
        for config in present {
            add_drop(config, &mut unreachable);
            add_undone(config, gateway, &mut unreachable);
            // A fault that stops all packets explains more than one that stops some.
            let faults = [
                fault_of_pods(config, gateway),
                cut_off(config, gateway),
                loss(config, gateway),
                cramp(config, gateway),
            ];
            if let Some(fault) = faults.into_iter().flatten().next() {
                unreachable.entry(fault.node.clone()).or_insert(fault);
            }
        }
        let unreachable: Vec<_> = unreachable.into_values().collect();
        let nodes = unreachable.len().max(counted + missing);
        (nodes > 0 || all == 0).then_some(Self { nodes, is_without_nodes: all == 0, unreachable })
    }

    /// Number of nodes whose path works.
    pub fn reachable(&self) -> usize {
        self.nodes - self.unreachable.len()
    }
}

/// Bytes that VXLAN adds to a packet, over IPv4 and IPv6.
const VXLAN_OVERHEAD: u32 = 50;
const VXLAN_OVERHEAD_V6: u32 = 70;
/// Separates the parts of a detail: cause and remedy, or the size of packets and that of links.
const SEPARATOR: &str = "; ";

/// Fault that a node itself reports.
fn reported(config: &NodeConfig, fault: PathFault, detail: String, since: &str) -> UnreachableNode {
    let node = config.metadata.name.clone().unwrap_or_default();
    UnreachableNode { node, fault, detail: Some(detail), since: since.to_owned() }
}

/// Loss on the way between a node and the gateway, as the node's probes show it.
fn loss(config: &NodeConfig, gateway: &GatewayConfig) -> Option<UnreachableNode> {
    let mut reports = config.status.iter().flat_map(|status| &status.lossy_gateways);
    let report = reports.find(|of| of.peer_cluster_id == gateway.spec.peer_cluster_id)?;
    let share = format!("{} %", report.lost_percent);
    Some(reported(config, PathFault::Lossy, share, &report.since))
}

/// A gateway whose replies to the node's probes report that it is cut off.
fn cut_off(config: &NodeConfig, gateway: &GatewayConfig) -> Option<UnreachableNode> {
    let mut reports = config.status.iter().flat_map(|status| &status.cut_off_gateways);
    let report = reports.find(|of| of.peer_cluster_id == gateway.spec.peer_cluster_id)?;
    let node = config.metadata.name.clone().unwrap_or_default();
    let (fault, since) = (PathFault::GatewayCutOff, report.since.clone());
    Some(UnreachableNode { node, fault, detail: None, since })
}

/// A way between a node and the gateway that carries small packets only.
fn cramp(config: &NodeConfig, gateway: &GatewayConfig) -> Option<UnreachableNode> {
    let mut reports = config.status.iter().flat_map(|status| &status.cramped_gateways);
    let report = reports.find(|of| of.peer_cluster_id == gateway.spec.peer_cluster_id)?;
    let [v4, v6] = [VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6].map(|of| report.bytes.saturating_add(of));
    let has = |ipv6| config.spec.underlay.iter().any(|own: &IpAddr| own.is_ipv6() == ipv6);
    let on_links = match (has(false), has(true)) {
        (true, true) => format!("{v4} bytes ({v6} over IPv6)"),
        (false, true) => format!("{v6} bytes"),
        (_, false) => format!("{v4} bytes"),
    };
    let detail = format!("{}{SEPARATOR}{on_links}", report.bytes);
    Some(reported(config, PathFault::Cramped, detail, &report.since))
}

/// Names a step that is undone again and again: probes pass or fail with it by chance. A gateway that misses
/// a node which itself reports nothing of that knows better: it may be off.
fn add_undone(
    config: &NodeConfig,
    gateway: &GatewayConfig,
    unreachable: &mut BTreeMap<String, UnreachableNode>,
) {
    let Some(status) = &config.status else { return };
    let Some(undone) = &status.undone else { return };
    let fault = reported(config, PathFault::Undone, undone.step.clone(), &undone.since);
    let peer = &gateway.spec.peer_cluster_id;
    let agrees = status.unreachable_gateways.iter().any(|of| of.peer_cluster_id == *peer);
    if agrees || !unreachable.contains_key(&fault.node) {
        unreachable.insert(fault.node.clone(), fault);
    }
}

/// Names the chain on a node that drops packets, if its path fails.
fn add_drop(config: &NodeConfig, unreachable: &mut BTreeMap<String, UnreachableNode>) {
    let name = config.metadata.name.as_deref().unwrap_or_default();
    let mut drops = config.status.iter().flat_map(|status| &status.packet_drops);
    if let Some(node) = unreachable.get_mut(name)
        && let Some(drop) = drops.next()
        && matches!(node.fault, PathFault::NoAnswer | PathFault::NoAgent | PathFault::OneWay)
    {
        node.detail = Some(drop_at(name, drop));
    }
}

/// Names what the gateway's own host lacks or drops, if none of several others of all `nodes` is reached from it.
fn add_drop_of_host(
    host: &NodeConfig,
    nodes: usize,
    unreachable: &mut BTreeMap<String, UnreachableNode>,
) {
    let name = host.metadata.name.as_deref().unwrap_or_default();
    let is_silent =
        |of: &&mut UnreachableNode| matches!(of.fault, PathFault::NoAnswer | PathFault::OneWay);
    let others = unreachable.values_mut().filter(|of| of.node != name);
    let others: Vec<_> = others.filter(is_silent).collect();
    let drop = host.status.iter().flat_map(|status| &status.packet_drops).next();
    if let Some(drop) = drop.filter(|_| others.len() > 1 && others.len() + 1 == nodes) {
        let detail = drop_at(name, drop);
        others.into_iter().for_each(|of| of.detail = Some(detail.clone()));
    }
}

/// Cause and remedy of a drop on a host.
fn drop_at(host: &str, drop: &PacketDrop) -> String {
    // Comments of rules are in it.
    let cause = drop.cause.replace(SEPARATOR, ", ");
    format!("{cause}{SEPARATOR}on {host}, {}", drop.remedy)
}

/// Fault of the path between a node's pods and a peer that probes do not show: they are sent by the
/// node itself, so nothing forwards them.
fn fault_of_pods(config: &NodeConfig, gateway: &GatewayConfig) -> Option<UnreachableNode> {
    let node = || config.metadata.name.clone().unwrap_or_default();
    let prefixes = || gateway.spec.remaps.iter().map(|remap| &remap.local);
    let concerns = |ipv6: bool| prefixes().any(|prefix| prefix.contains(':') == ipv6);
    let mut off = config.status.iter().flat_map(|status| &status.forwarding_off);
    if let Some(off) = off.find(|off| concerns(off.ipv6)) {
        let (fault, since) = (PathFault::NotForwarding, off.since.clone());
        let detail = Some(off.setting.clone());
        return Some(UnreachableNode { node: node(), fault, detail, since });
    }
    let mut diversions = config.status.iter().flat_map(|status| &status.diversions);
    let is_of_peer = |diversion: &&Diversion| prefixes().any(|p| diversion.prefixes.contains(p));
    if let Some(diversion) = diversions.find(is_of_peer) {
        let (removal, since) = (diversion.removal.clone(), diversion.since.clone());
        let detail = diversion.cause.iter().cloned().chain([removal]).collect::<Vec<_>>();
        let detail = Some(detail.join(SEPARATOR));
        return Some(UnreachableNode { node: node(), fault: PathFault::Diverted, detail, since });
    }
    let outside = config.spec.outside_pods.iter().find(|cidr| concerns(cidr.contains(':')));
    if let Some(cidr) = outside {
        let (fault, since) = (PathFault::PodCidrOutside, String::new());
        return Some(UnreachableNode { node: node(), fault, detail: Some(cidr.clone()), since });
    }
    let overlap = config.spec.overlapping_pods.iter().find(|o| concerns(o.cidr.contains(':')))?;
    let detail = Some(format!("{} overlaps one of {}", overlap.cidr, overlap.node));
    let (fault, since) = (PathFault::PodCidrOverlap, String::new());
    Some(UnreachableNode { node: node(), fault, detail, since })
}

/// Failing part, duration and remedy on one line.
pub fn describe(node: &UnreachableNode, now: Timestamp) -> String {
    let since: Option<Timestamp> = node.since.parse().ok();
    let duration = since.map(|since| (now.as_second() - since.as_second()).max(0));
    let duration = duration.map(|seconds| format!(" for {seconds} s")).unwrap_or_default();
    format!("{}: {}{duration}; {}", node.node, cause(node), remedy(node))
}

/// The same without a duration, for a text that changes only with the fault.
pub fn describe_steadily(node: &UnreachableNode) -> String {
    let since = Some(&node.since).filter(|since| !since.is_empty());
    let since = since.map(|since| format!(" since {since}")).unwrap_or_default();
    format!("{}: {}{since}", node.node, cause(node))
}

/// Part that fails.
pub fn cause(node: &UnreachableNode) -> String {
    let detail = node.detail.as_deref().unwrap_or_default();
    let dropped = detail.split_once(SEPARATOR).map(|(cause, _)| format!(": {cause}"));
    let dropped = dropped.unwrap_or_default();
    match node.fault {
        PathFault::NoAnswer => format!("no answer over VXLAN{dropped}"),
        PathFault::NoAgent => {
            format!(
                "no probes of its route-agent arrive, though its kernel answers over VXLAN{dropped}"
            )
        }
        PathFault::OneWay => {
            format!("packets from it arrive over VXLAN, but none reach it{dropped}")
        }
        PathFault::Lossy => {
            format!("{detail} of its probes over VXLAN or of the answers are lost")
        }
        PathFault::CutOff => "its route-agent cannot read its NodeConfig".to_owned(),
        PathFault::GatewayCutOff => {
            "the gateway cannot report whether it is connected: what is shown of that is old".to_owned()
        }
        PathFault::NotStarted => "no route-agent of it has started, or none that can write its status: \
                                  its pods do not reach peers, and what they send there may leave in clear"
            .to_owned(),
        PathFault::NotForwarding => {
            format!("{detail} is 0, so packets between its pods and peers are not forwarded")
        }
        PathFault::PodCidrOverlap => {
            format!("its pod CIDR {detail}, where packets of peers to its pods go")
        }
        PathFault::PodCidrOutside => format!(
            "its pod CIDR {detail} lies in none of the cluster's, so peers do not accept its pods"
        ),
        PathFault::Cramped => format!(
            "packets of {} bytes between it and the gateway are lost over VXLAN, smaller ones pass",
            detail.split_once(SEPARATOR).map_or(detail, |(bytes, _)| bytes)
        ),
        PathFault::Undone => {
            format!("another program keeps undoing what its route-agent sets: `{detail}`")
        }
        PathFault::Diverted if !dropped.is_empty() => dropped.trim_start_matches(": ").to_owned(),
        PathFault::Diverted => {
            "a rule or route of another program takes packets between its pods and the peer"
                .to_owned()
        }
    }
}

/// Remedy.
pub fn remedy(of: &UnreachableNode) -> String {
    let (node, detail) = (&of.node, of.detail.as_deref().unwrap_or_default());
    let second_part = detail.split_once(SEPARATOR).map(|(_, remedy)| remedy);
    match of.fault {
        PathFault::NoAnswer | PathFault::NoAgent | PathFault::OneWay if second_part.is_some() => {
            second_part.unwrap_or_default().to_owned()
        }
        PathFault::NoAnswer => format!(
            "see whether {node} is up, its network is connected, its address is the one in its \
             Node and the source of what it sends (`ip route get`), its route-agent runs, and UDP \
             4879 passes between it and the gateway's host"
        ),
        PathFault::NoAgent => {
            format!("see whether the route-agent of {node} runs, and its log; start it again")
        }
        PathFault::OneWay => {
            format!(
                "let UDP 4879 pass from the gateway's host to {node}, which a firewall may drop, or a \
                 published port of a container lead elsewhere"
            )
        }
        PathFault::Lossy => format!(
            "look for an overloaded link, a bad cable or a rule that limits UDP 4879 between {node} and the \
             gateway's host"
        ),
        PathFault::Cramped => format!(
            "let all links between {node} and the gateway's host pass {}: give their devices one \
             MTU; or set spec.mtu of the gateway lower",
            second_part.unwrap_or(detail)
        ),
        PathFault::Undone => format!(
            "find that program on {node} (`ip monitor all`, `nft monitor`) and have it leave alone what \
             weft sets"
        ),
        PathFault::NotStarted => {
            format!("run `weft agent --node {node}` there; in Kubernetes see its route-agent's pod")
        }
        PathFault::CutOff => format!(
            "mount or share the published directory on {node} again; in Kubernetes, see why {node} does \
             not reach the API server"
        ),
        PathFault::GatewayCutOff => {
            "see the gateway's log; in Kubernetes, let its pod reach the API server, and delete the pod if \
             its log says Unauthorized"
                .to_owned()
        }
        PathFault::NotForwarding => {
            format!("run `sysctl -w {detail}=1` on {node}, and see what has set it to 0")
        }
        PathFault::PodCidrOverlap => {
            format!("give {node} a spec.podCIDRs that no other Node has")
        }
        PathFault::PodCidrOutside => format!(
            "give {node} a spec.podCIDRs within the Network of type pod-cidr, or the cluster a Network \
             of that type with {detail}"
        ),
        PathFault::Diverted if second_part.is_some() => match second_part.unwrap_or_default() {
            words if words.starts_with(Diversion::WORDS) => words.to_owned(),
            command => format!("run `{command}` on {node}"),
        },
        PathFault::Diverted => {
            format!(
                "run `{detail}` on {node}, or have its owner let packets of pods and peers pass it"
            )
        }
    }
}

#[cfg(test)]
mod tests;
