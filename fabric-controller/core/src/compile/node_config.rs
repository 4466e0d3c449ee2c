//! NodeConfigs to publish, one per node.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{
    GatewayConfig, GatewayOverlay, GatewayProbe, NO_MTU, NodeAddressMap, NodeConfig,
    NodeConfigSpec, NodeGateway, NodePeering, RefusedPrefix,
};
use fabric_api::networking::ConnectionValue;
use fabric_store::{Kind, Object, ObjectRef};
use jiff::{SignedDuration, Timestamp};

use super::Compiler;
use super::cluster::{Cluster, Node};
use super::gateway::Gateway;
use super::gateway_config::common_family;
use super::mappings::Mapping;
use super::names::of_node;
use super::peering::Peering;

/// Annotation: when it was known that the node is gone.
const REMOVED_SINCE: &str = "fabric.weft.dev/removed-since";
/// Maximum time for the agent of a node that is gone, if it runs on. Kubernetes ends it within a
/// minute.
const FAREWELL: SignedDuration = SignedDuration::from_secs(120);

impl Compiler<'_> {
    pub(super) fn node_configs(
        &mut self,
        cluster: &Cluster,
        peerings: &[Peering<'_>],
        gateways: &[Gateway<'_>],
        mappings: &[Mapping],
    ) {
        let hosts = self.gateway_hosts(cluster, gateways);
        let of_nodes: Vec<Vec<NodePeering>> = cluster
            .nodes
            .iter()
            .map(|node| {
                let published = self.index.typed::<NodeConfig>(&of_node(&node.name));
                self.node_peerings(cluster, node, published, peerings, gateways)
            })
            .collect();
        let refused = if cluster.is_ready() {
            self.refused(cluster, &carried(peerings, of_nodes.iter().flatten()))
        } else {
            self.keep_refused();
            Vec::new()
        };
        for (node, all) in cluster.nodes.iter().zip(&of_nodes) {
            match node_spec(cluster, node, all) {
                Some(mut spec) => {
                    spec.full_masquerade = self.index.settings.full_masquerade;
                    spec.refused.clone_from(&refused);
                    spec.refuse_seconds = self.index.settings.refuse_seconds;
                    spec.vxlan_sources.extend(&hosts);
                    // All of them: the node's own pods send to those addresses, too.
                    spec.ips = mappings.iter().map(node_mapping).collect();
                    self.want(NodeConfig::new(&node.name, spec));
                }
                None => self.keep(of_node(&node.name)),
            }
        }
        self.removed_nodes(cluster);
    }

    /// Removed nodes take everything away before their config goes, if they have applied any. The
    /// peerings live on, so their prefixes stay refused there for as long as the agent runs. In
    /// Kubernetes the agent goes with its node, so there may be none to report that.
    fn removed_nodes(&mut self, cluster: &Cluster) {
        let index = self.index;
        for (reference, config) in index.all::<NodeConfig>(Kind::NodeConfig) {
            if cluster.node(&reference.name).is_some() {
                continue;
            }
            let node = ObjectRef::new(Kind::Node, "", &reference.name);
            if self.may_still_be(&node) {
                self.keep(reference.clone());
                continue;
            }
            let applied = config.status.as_ref().map_or(0, |status| status.applied_generation);
            let generation = config.metadata.generation.unwrap_or_default();
            if applied == 0 || (config.spec.removed && applied >= generation) {
                continue;
            }
            let refused = all_prefixes(&config.spec);
            let spec = NodeConfigSpec { removed: true, refused, ..config.spec.clone() };
            let mut removed = NodeConfig::new(&reference.name, spec);
            if index.settings.kubernetes {
                let since = removed_since(config).unwrap_or(self.now);
                if self.now.duration_since(since) > FAREWELL {
                    continue;
                }
                let note = (REMOVED_SINCE.to_owned(), since.to_string());
                removed.metadata.annotations = Some([note].into());
            }
            self.want(removed);
        }
    }

    fn node_peerings(
        &self,
        cluster: &Cluster,
        node: &Node,
        published: Option<&NodeConfig>,
        peerings: &[Peering<'_>],
        gateways: &[Gateway<'_>],
    ) -> Vec<NodePeering> {
        let before = published.map(|config| config.spec.peerings.as_slice()).unwrap_or_default();
        let before_of = |peer: &str| before.iter().find(|p| p.peer_cluster_id == peer).cloned();
        let mut all: Vec<NodePeering> = Vec::new();
        for peering in peerings {
            let Some(id) = &peering.id else { continue };
            if peering.is_ready() {
                let gateway = peering.gateway.map(|i| &gateways[i]);
                let mut of_peering = self.node_peering(cluster, node, peering, gateway);
                // Its gateway, or the host of that, may be in a file that cannot be read.
                let unread = of_peering.gateway.is_none() && !self.index.is_whole();
                if let Some(before) = before_of(id.as_str()).filter(|_| unread) {
                    (of_peering.gateway, of_peering.mtu) = (before.gateway, before.mtu);
                }
                all.push(of_peering);
            } else if !peerings.iter().any(|other| other.is_with(id) && other.is_ready()) {
                all.extend(before_of(id.as_str()));
            }
        }
        let unread = before.iter().filter(|p| self.index.peer_may_be_unread(&p.peer_cluster_id));
        all.extend(unread.cloned());
        all.sort_by(|a, b| a.peer_cluster_id.cmp(&b.peer_cluster_id));
        all.dedup_by(|a, b| a.peer_cluster_id == b.peer_cluster_id);
        all
    }

    fn node_peering(
        &self,
        cluster: &Cluster,
        node: &Node,
        peering: &Peering<'_>,
        gateway: Option<&Gateway<'_>>,
    ) -> NodePeering {
        let config = gateway.and_then(|gateway| self.config_of(gateway));
        let status =
            gateway.and_then(|gateway| self.index.typed::<GatewayConfig>(&gateway.config()));
        let in_force = status.and_then(|c| c.status.as_ref()).map(|s| s.mtu).filter(|mtu| *mtu > 0);
        NodePeering {
            peer_cluster_id: peering.peer(),
            prefixes: peering.sorted_prefixes(),
            connected: gateway.is_some_and(|gateway| self.is_connected(gateway)),
            mtu: in_force.or_else(|| config.map(|c| c.spec.mtu)).unwrap_or(NO_MTU),
            gateway: config.and_then(|config| {
                let way = match gateway {
                    Some(gateway) if self.index.settings.kubernetes => {
                        self.pod_gateway(node, gateway, config)
                    }
                    Some(_) | None => node_gateway(cluster, node, config),
                };
                let probe = status.and_then(probe_of);
                way.map(|way| NodeGateway { probe, ..way })
            }),
        }
    }

    /// Addresses of the nodes whose pods are gateways: what a pod sends to another node, many a CNI
    /// gives its own node's address.
    fn gateway_hosts(&self, cluster: &Cluster, gateways: &[Gateway<'_>]) -> BTreeSet<IpAddr> {
        let placed = gateways.iter().filter(|_| self.index.settings.kubernetes);
        let names = placed.filter_map(|gateway| self.internal_endpoint(gateway)?.node);
        let hosts = names.filter_map(|name| cluster.node(&name));
        hosts.flat_map(|host| host.underlay.iter().copied()).collect()
    }

    /// Config that is or stays published for a gateway.
    pub(super) fn config_of(&self, gateway: &Gateway<'_>) -> Option<&GatewayConfig> {
        let reference = gateway.config();
        match self.out.objects.get(&reference) {
            Some(Object::GatewayConfig(config)) => Some(config),
            Some(_) | None => {
                let kept = self.kept.contains(&reference);
                self.index.typed::<GatewayConfig>(&reference).filter(|_| kept)
            }
        }
    }

    fn is_connected(&self, gateway: &Gateway<'_>) -> bool {
        let own = self.index.connections(&gateway.reference, &gateway.uid);
        let mut values = own.filter_map(|connection| connection.status.as_ref());
        values.any(|status| status.value == ConnectionValue::Connected)
    }
}

/// Prefixes that lead to peers now, or soon will.
fn carried<'a>(
    peerings: &[Peering<'_>],
    of_nodes: impl Iterator<Item = &'a NodePeering>,
) -> BTreeSet<Cidr> {
    let published = of_nodes.flat_map(|peering| &peering.prefixes);
    let published = published.filter_map(|prefix| prefix.parse().ok());
    published.chain(peerings.iter().flat_map(Peering::prefixes)).collect()
}

/// Prefixes of the peerings that a node has, and those that it refuses.
fn all_prefixes(spec: &NodeConfigSpec) -> Vec<RefusedPrefix> {
    let of_peering = |peering: &NodePeering| {
        let peer = peering.peer_cluster_id.clone();
        let entry = move |prefix| RefusedPrefix { peer_cluster_id: peer.clone(), prefix };
        peering.prefixes.clone().into_iter().map(entry)
    };
    let all = spec.peerings.iter().flat_map(of_peering).chain(spec.refused.iter().cloned());
    all.collect::<BTreeSet<_>>().into_iter().collect()
}

fn node_mapping(mapping: &Mapping) -> NodeAddressMap {
    let Mapping { external, target, masquerade, .. } = *mapping;
    NodeAddressMap { external, target, masquerade }
}

fn removed_since(config: &NodeConfig) -> Option<Timestamp> {
    let annotations = config.metadata.annotations.as_ref()?;
    annotations.get(REMOVED_SINCE)?.parse().ok().filter(|_| config.spec.removed)
}

fn node_spec(cluster: &Cluster, node: &Node, peerings: &[NodePeering]) -> Option<NodeConfigSpec> {
    if !cluster.is_ready() {
        return None;
    }
    let gateways = peerings.iter().filter_map(|peering| peering.gateway.as_ref());
    let mut vxlan_sources: Vec<IpAddr> = gateways.map(|gateway| gateway.underlay).collect();
    vxlan_sources.sort();
    vxlan_sources.dedup();
    Some(NodeConfigSpec {
        cluster_id: cluster.id.as_ref()?.to_string(),
        overlay: node.overlay,
        mac: node.mac.clone(),
        underlay: node.underlay.clone(),
        declared: node.declared.clone(),
        local_pods: node.pods.iter().map(Cidr::to_string).collect(),
        overlapping_pods: node.overlapping.clone(),
        pod_cidrs: cluster.pods.iter().map(Cidr::to_string).collect(),
        external: node.external.clone(),
        peerings: peerings.to_vec(),
        ips: Vec::new(),
        internal_cidr: cluster.internal.as_ref().map(|granted| granted.cidr.to_string()),
        vxlan_sources,
        full_masquerade: false,
        removed: false,
        refused: Vec::new(),
        refuse_seconds: None,
    })
}

/// Route from a node to a gateway: by its host, the only one with the address of its link.
fn node_gateway(cluster: &Cluster, node: &Node, config: &GatewayConfig) -> Option<NodeGateway> {
    let GatewayOverlay { address, mac, link_address, link_address_v6, node: host } =
        config.spec.overlay.clone();
    let host = cluster.node(host.as_deref()?)?;
    let ipv4 = common_family(node, &host.underlay)?.is_ipv4();
    let same_family = |address: &&IpAddr| address.is_ipv4() == ipv4;
    if host.name != node.name {
        let underlay = host.underlay.iter().copied().find(|a| same_family(&a))?;
        return Some(NodeGateway {
            overlay: address,
            mac,
            underlay,
            links: Vec::new(),
            listen_port: None,
            probe: None,
        });
    }
    let links = [link_address.map(IpAddr::V4), link_address_v6.map(IpAddr::V6)];
    let has = |link: &IpAddr| host.underlay.iter().any(|a| a.is_ipv4() == link.is_ipv4());
    let links: Vec<_> = links.into_iter().flatten().filter(has).collect();
    let underlay = links.iter().copied().find(|a| same_family(&a))?;
    let listen_port = config.spec.listen_port;
    Some(NodeGateway { overlay: address, mac, underlay, links, listen_port, probe: None })
}

/// An older gateway answers none.
fn probe_of(gateway: &GatewayConfig) -> Option<GatewayProbe> {
    let port = gateway.status.as_ref()?.overlay_probe_port?;
    Some(GatewayProbe { port, node: gateway.spec.overlay.node.clone() })
}
