//! GatewayConfigs to publish, one per gateway.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fabric_api::fabric::{
    GatewayConfig, GatewayConfigSpec, GatewayOverlay, IpFamily, NodeConfig, PathFault, Remap, Role,
    UnreachableNode, common_family, gateway_spec,
};
use fabric_api::{labels, link_v6};
use fabric_index::node_paths::NodePaths;
use fabric_index::{Index, owner};
use fabric_model::cluster::{Node, mac};
use fabric_model::gateway::GatewaySettings;
use fabric_model::{Cluster, Gateway, Peering, Problems, names};
use fabric_objects::{Kind, ObjectRef};
use jiff::Timestamp;

use super::desired::Desired;
use super::gateway_records::{GatewayRecords, are_read_by};
use super::placed::{internal_endpoint, pod_address, replicas};

const SERVER_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 1);
const CLIENT_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 2);

/// All that a gateway's config follows from.
pub(super) struct Sources<'a> {
    pub(super) index: &'a Index,
    pub(super) cluster: &'a Cluster,
    pub(super) peerings: &'a [Peering<'a>],
    /// `None` while too little is known of the cluster.
    pub(super) records: Option<&'a GatewayRecords>,
    /// Standalone, the node that gateways run on.
    pub(super) host: Option<String>,
    pub(super) now: Timestamp,
}

impl Sources<'_> {
    /// Addresses of a node, which may just be out of sight.
    fn underlay(&self, node: &str) -> Vec<IpAddr> {
        let known = self.cluster.node(node).map(|node| &node.underlay);
        let recorded = self.records.and_then(|records| records.nodes.get(node));
        let recorded = recorded.map(|record| &record.underlay);
        known.or(recorded).cloned().unwrap_or_default()
    }

    fn host_underlay(&self) -> Vec<IpAddr> {
        self.host.as_deref().map(|name| self.underlay(name)).unwrap_or_default()
    }
}

/// The node that this host is, and its gateways run on.
pub(super) fn host(index: &Index, cluster: &Cluster, problems: &mut Problems) -> Option<String> {
    if index.settings.kubernetes {
        return None;
    }
    if let Some(name) = &index.settings.node {
        if cluster.node(name).is_none() {
            let node = ObjectRef::new(Kind::Node, "", name);
            problems.add(&node, "", "missing, and this host is said to be it");
        }
        return Some(name.clone());
    }
    match cluster.nodes.as_slice() {
        [only] => Some(only.name.clone()),
        _ => None,
    }
}

pub(super) fn configs(sources: &Sources<'_>, gateways: &[Gateway<'_>]) -> Desired {
    let mut desired = Desired::default();
    for gateway in gateways {
        if let Some(config) = config(sources, gateway) {
            desired.want(config);
        } else if has_configuration(sources, gateway) {
            desired.keep(gateway.config());
        }
    }
    desired
}

/// True if the peer has a Configuration, or one that may be unread: without a new config, the gateway
/// then keeps its old one.
fn has_configuration(sources: &Sources<'_>, gateway: &Gateway<'_>) -> bool {
    sources.peerings.iter().any(|peering| peering.id.as_ref() == Some(&gateway.peer))
        || sources.index.peer_may_be_unread(gateway.peer.as_str())
}

fn config(sources: &Sources<'_>, gateway: &Gateway<'_>) -> Option<GatewayConfig> {
    let peering = sources.peerings.iter().find(|peering| peering.is_with(&gateway.peer))?;
    let records = sources.records.filter(|_| peering.is_ready())?;
    let mut spec = own_spec(sources, gateway, peering)?;
    if !are_read_by(sources.index, gateway, sources.now) {
        spec = gateway_spec(&spec, &records.cluster, records.nodes.values());
    }
    let mut config = GatewayConfig::new(&gateway.reference.name, spec);
    let metadata = &mut config.metadata;
    metadata.namespace = gateway.reference.namespace.clone();
    metadata.labels =
        Some([(labels::REMOTE_CLUSTER_ID.to_owned(), gateway.peer.to_string())].into());
    metadata.owner_references =
        owner::references(sources.index, &gateway.reference, metadata.namespace.as_deref());
    Some(config)
}

fn overlay(sources: &Sources<'_>, gateway: &Gateway<'_>) -> Option<GatewayOverlay> {
    let index = sources.index;
    let node = match index.settings.kubernetes {
        true => internal_endpoint(index, gateway).and_then(|internal| internal.node),
        false => sources.host.clone(),
    };
    let host = node.as_deref().map(|name| sources.underlay(name)).unwrap_or_default();
    let families = underlay(index, gateway, &host).into_iter().map(IpFamily::from);
    let mut overlay = GatewayOverlay {
        address: gateway_address(index, gateway, "overlay")?,
        mac: mac(&index.settings, &gateway.uid),
        link_address: None,
        link_address_v6: None,
        node,
        ip_families: families.collect(),
    };
    if !index.settings.kubernetes {
        let link = gateway_address(index, gateway, "link")?;
        overlay.link_address = Some(link);
        overlay.link_address_v6 = first_v6(&host).map(|host| link_v6(link, host));
    }
    Some(overlay)
}

/// Own part of a gateway's config; the rest follows from records.
fn own_spec(
    sources: &Sources<'_>,
    gateway: &Gateway<'_>,
    peering: &Peering<'_>,
) -> Option<GatewayConfigSpec> {
    let overlay = overlay(sources, gateway)?;
    let GatewaySettings { listen_port, endpoint, mtu, secret_name, peer_public_key } =
        gateway.settings.clone()?;
    let (tunnel_address, peer_tunnel_address) = match gateway.role() {
        Role::Server => (SERVER_TUNNEL_ADDRESS, CLIENT_TUNNEL_ADDRESS),
        Role::Client => (CLIENT_TUNNEL_ADDRESS, SERVER_TUNNEL_ADDRESS),
    };
    let remaps = peering.remotes.iter().filter_map(|remote| {
        let (remote, local, kind) = (remote.cidr, remote.granted?, remote.kind);
        Some(Remap { kind, remote: remote.to_string(), local: local.to_string() })
    });
    Some(GatewayConfigSpec {
        cluster_id: sources.cluster.id.as_ref()?.to_string(),
        peer_cluster_id: gateway.peer.to_string(),
        role: gateway.role(),
        gateway_uid: gateway.uid.clone(),
        secret_name,
        peer_public_key: peer_public_key.map(|key| key.to_string()),
        listen_port,
        endpoint,
        mtu,
        tunnel_address,
        peer_tunnel_address,
        remaps: remaps.collect(),
        from_records: true,
        pod_cidrs: Vec::new(),
        external_cidrs: Vec::new(),
        ips: Vec::new(),
        icmp_sources: Vec::new(),
        egress: Vec::new(),
        egress_node: egress_node(sources, gateway).or_else(|| overlay.node.clone()),
        overlay,
        nodes: Vec::new(),
        replicas: replicas(sources.index, gateway).to_vec(),
        probe: sources.index.settings.probe,
        faulty_nodes: faulty_nodes(sources.index, gateway),
    })
}

/// The node that has been the egress so far: its conntrack has the connections, wherever the gateway is
/// now. `None` if it is gone, its agent is, or none was needed yet.
fn egress_node(sources: &Sources<'_>, gateway: &Gateway<'_>) -> Option<String> {
    let Sources { index, cluster, .. } = sources;
    let config = index.typed::<GatewayConfig>(&gateway.config())?;
    let node = config.spec.egress_node.as_ref()?;
    let is_alive = cluster.node(node).is_some() && !index.lagging_nodes.contains(node);
    (index.settings.kubernetes && is_alive).then(|| node.clone())
}

/// Number of nodes with a fault that the gateway itself does not report, as no probe shows it.
fn faulty_nodes(index: &Index, gateway: &Gateway<'_>) -> u32 {
    let Some(config) = index.typed::<GatewayConfig>(&gateway.config()) else { return 0 };
    let reported = config.status.iter().flat_map(|status| &status.unreachable_nodes);
    let reported: BTreeSet<_> = reported.map(|fault| fault.node.as_str()).collect();
    let nodes = index.all::<NodeConfig>(Kind::NodeConfig).map(|(_, node)| node);
    let faults = NodePaths::of(config, nodes).map(|paths| paths.unreachable).unwrap_or_default();
    let is_unseen = |fault: &&UnreachableNode| {
        use PathFault::{
            Cramped, Diverted, Lossy, NotForwarding, PodCidrOutside, PodCidrOverlap, Undone,
        };
        matches!(
            fault.fault,
            Cramped | Diverted | Lossy | NotForwarding | PodCidrOutside | PodCidrOverlap | Undone
        )
    };
    let unseen = faults.iter().filter(is_unseen);
    let count = unseen.filter(|fault| !reported.contains(fault.node.as_str())).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The addresses that VXLAN to and from nodes has at the gateway's end.
fn underlay(index: &Index, gateway: &Gateway<'_>, host: &[IpAddr]) -> Vec<IpAddr> {
    pod_address(index, gateway).map_or_else(|| host.to_vec(), |pod| vec![pod])
}

/// Reports nodes that have no family in common with a gateway, and so no overlay.
pub(super) fn check_families(
    sources: &Sources<'_>,
    gateways: &[Gateway<'_>],
    problems: &mut Problems,
) {
    let host = sources.host_underlay();
    for gateway in gateways {
        let end = underlay(sources.index, gateway, &host);
        let apart = |node: &&Node| common_family(&node.underlay, &end).is_none();
        for node in sources.cluster.nodes.iter().filter(apart) {
            let expected = end.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" or ");
            let found = node.underlay.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
            let message = format!(
                "found {found}; expected one of the family of {expected}, where gateways are"
            );
            problems.add(&ObjectRef::new(Kind::Node, "", &node.name), "status.addresses", message);
        }
    }
}

fn gateway_address(index: &Index, gateway: &Gateway<'_>, what: &str) -> Option<Ipv4Addr> {
    match index.ip_grant(&names::of_gateway(&gateway.reference, what))? {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

fn first_v6(addresses: &[IpAddr]) -> Option<Ipv6Addr> {
    addresses.iter().find_map(|address| match address {
        IpAddr::V6(address) => Some(*address),
        IpAddr::V4(_) => None,
    })
}
