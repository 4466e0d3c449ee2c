//! GatewayConfigs to publish, one per gateway.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use fabric_api::fabric::{
    AddressMap, GatewayConfig, GatewayConfigSpec, GatewayOverlay, OverlayNode, Remap, Role,
    common_family,
};
use fabric_api::{Cidr, labels, link_v6};
use fabric_store::{Kind, ObjectRef};

use super::Compiler;
use super::cluster::{Cluster, Node};
use super::gateway::{Gateway, GatewaySettings};
use super::mappings::Mapping;
use super::names;
use super::peering::Peering;

const SERVER_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 1);
const CLIENT_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 2);

/// All that a gateway's config follows from.
struct Sources<'a> {
    cluster: &'a Cluster,
    peerings: &'a [Peering<'a>],
    mappings: &'a [Mapping],
    /// The node that gateways run on.
    host: Option<String>,
}

impl Compiler<'_> {
    pub(super) fn gateway_configs(
        &mut self,
        cluster: &Cluster,
        peerings: &[Peering<'_>],
        gateways: &[Gateway<'_>],
        mappings: &[Mapping],
    ) {
        let host = if self.index.settings.kubernetes { None } else { self.host(cluster) };
        let sources = Sources { cluster, peerings, mappings, host };
        for gateway in gateways {
            self.check_families(gateway, &sources);
            if let Some(config) = self.gateway_config(gateway, &sources) {
                self.want(config);
            } else if self.has_configuration(gateway, peerings) {
                self.keep(gateway.config());
            }
        }
    }

    /// Something stands in the way of a new config, but the old one has not lost its ground.
    fn has_configuration(&self, gateway: &Gateway<'_>, peerings: &[Peering<'_>]) -> bool {
        peerings.iter().any(|peering| peering.id.as_ref() == Some(&gateway.peer))
            || self.index.peer_may_be_unread(gateway.peer.as_str())
    }

    /// The node that this host is, and its gateways run on.
    pub(super) fn host(&mut self, cluster: &Cluster) -> Option<String> {
        let named = self.index.settings.node.clone();
        if let Some(name) = &named {
            if cluster.node(name).is_none() {
                let node = ObjectRef::new(Kind::Node, "", name);
                self.problem(&node, "", "missing, and this host is said to be it");
            }
            return named;
        }
        match cluster.nodes.as_slice() {
            [only] => Some(only.name.clone()),
            _ => None,
        }
    }

    fn gateway_config(
        &self,
        gateway: &Gateway<'_>,
        sources: &Sources<'_>,
    ) -> Option<GatewayConfig> {
        let settings = gateway.settings.clone()?;
        let cluster = sources.cluster;
        let peering = sources.peerings.iter().find(|peering| peering.is_with(&gateway.peer))?;
        if !cluster.is_ready() || !peering.is_ready() {
            return None;
        }
        let address = self.gateway_address(gateway, "overlay")?;
        let mac = self.mac(&gateway.uid);
        let overlay = if self.index.settings.kubernetes {
            let node = self.internal_endpoint(gateway).and_then(|internal| internal.node);
            GatewayOverlay { address, mac, link_address: None, link_address_v6: None, node }
        } else {
            let node = sources.host.clone();
            let host = node.as_deref().and_then(|name| cluster.node(name));
            let link = self.gateway_address(gateway, "link")?;
            let link_address_v6 = host.and_then(|host| host.v6()).map(|host| link_v6(link, host));
            GatewayOverlay { address, mac, link_address: Some(link), link_address_v6, node }
        };
        let spec = self.spec(gateway, settings, peering, sources, overlay)?;
        let mut config = GatewayConfig::new(&gateway.reference.name, spec);
        config.metadata.namespace = gateway.reference.namespace.clone();
        let peer = (labels::REMOTE_CLUSTER_ID.to_owned(), gateway.peer.to_string());
        config.metadata.labels = Some([peer].into());
        config.metadata.owner_references =
            self.owned_by(&gateway.reference, config.metadata.namespace.as_deref());
        Some(config)
    }

    fn spec(
        &self,
        gateway: &Gateway<'_>,
        settings: GatewaySettings,
        peering: &Peering<'_>,
        sources: &Sources<'_>,
        overlay: GatewayOverlay,
    ) -> Option<GatewayConfigSpec> {
        let cluster = sources.cluster;
        let (tunnel_address, peer_tunnel_address) = match gateway.role() {
            Role::Server => (SERVER_TUNNEL_ADDRESS, CLIENT_TUNNEL_ADDRESS),
            Role::Client => (CLIENT_TUNNEL_ADDRESS, SERVER_TUNNEL_ADDRESS),
        };
        let remaps = peering.remotes.iter().filter_map(|remote| {
            let (remote, local, kind) = (remote.cidr, remote.granted?, remote.kind);
            Some(Remap { kind, remote: remote.to_string(), local: local.to_string() })
        });
        let stateless = sources.mappings.iter().filter(|mapping| mapping.stateless);
        let network_address = |ipv4| Some(cluster.external_of(ipv4)?.cidr.address());
        Some(GatewayConfigSpec {
            cluster_id: cluster.id.as_ref()?.to_string(),
            peer_cluster_id: gateway.peer.to_string(),
            role: gateway.role(),
            gateway_uid: gateway.uid.clone(),
            secret_name: settings.secret_name,
            peer_public_key: settings.peer_public_key.map(|key| key.to_string()),
            listen_port: settings.listen_port,
            endpoint: settings.endpoint,
            mtu: settings.mtu,
            tunnel_address,
            peer_tunnel_address,
            remaps: remaps.collect(),
            pod_cidrs: cluster.pods.iter().map(Cidr::to_string).collect(),
            external_cidrs: cluster.external_cidrs().map(|cidr| cidr.to_string()).collect(),
            ips: stateless.map(|m| AddressMap { external: m.external, target: m.target }).collect(),
            icmp_sources: [true, false].into_iter().filter_map(network_address).collect(),
            egress: egress(peering, sources),
            egress_node: overlay.node.clone(),
            nodes: self.overlay_nodes(gateway, sources, overlay.node.as_deref()),
            overlay,
            probe: self.index.settings.probe,
        })
    }

    /// The addresses that VXLAN to and from nodes has at the gateway's end.
    fn underlay_of(&self, gateway: &Gateway<'_>, host: Option<&Node>) -> Vec<IpAddr> {
        match self.pod_address(gateway) {
            Some(pod) => vec![pod],
            None => host.map(|host| host.underlay.clone()).unwrap_or_default(),
        }
    }

    /// A node and a gateway without a family in common have no overlay between them.
    fn check_families(&mut self, gateway: &Gateway<'_>, sources: &Sources<'_>) {
        let host = sources.host.as_deref().and_then(|name| sources.cluster.node(name));
        let end = self.underlay_of(gateway, host);
        let apart = |node: &&Node| common_family(&node.underlay, &end).is_none();
        for node in sources.cluster.nodes.iter().filter(apart) {
            let expected = end.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" or ");
            let found = node.underlay.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
            let message = format!(
                "found {found}; expected one of the family of {expected}, where gateways are"
            );
            self.problem(&ObjectRef::new(Kind::Node, "", &node.name), "status.addresses", message);
        }
    }

    fn gateway_address(&self, gateway: &Gateway<'_>, what: &str) -> Option<Ipv4Addr> {
        match self.index.ip_grant(&names::of_gateway(&gateway.reference, what))? {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        }
    }

    fn overlay_nodes(
        &self,
        gateway: &Gateway<'_>,
        sources: &Sources<'_>,
        host: Option<&str>,
    ) -> Vec<OverlayNode> {
        let host = host.and_then(|name| sources.cluster.node(name));
        let end = self.underlay_of(gateway, host);
        let nodes = sources.cluster.nodes.iter().filter_map(|node| {
            let mapped = sources.mappings.iter().filter(|mapping| mapping.is_of(node));
            let mapped = mapped.map(|mapping| mapping.external);
            let hosts = node.external.iter().copied().chain(mapped).map(Cidr::host);
            Some(OverlayNode {
                name: node.name.clone(),
                overlay: node.overlay?,
                mac: node.mac.clone(),
                underlay: common_family(&node.underlay, &end)?,
                prefixes: node.pods.iter().copied().chain(hosts).map(|c| c.to_string()).collect(),
            })
        });
        let mut nodes: Vec<_> = nodes.collect();
        if let Some(published) = self.published(gateway) {
            let unread = published
                .spec
                .nodes
                .iter()
                .filter(|node| self.may_still_be(&ObjectRef::new(Kind::Node, "", &node.name)));
            nodes.extend(unread.cloned());
        }
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        nodes
    }
}

/// Prefixes that the gateway passes on to the egress node.
fn egress(peering: &Peering<'_>, sources: &Sources<'_>) -> Vec<String> {
    let others = sources.peerings.iter().filter(|other| other.reference != peering.reference);
    let others = others.filter(|other| other.fault.is_none()).flat_map(Peering::prefixes);
    let elsewhere = |m: &&Mapping| !sources.cluster.nodes.iter().any(|node| m.is_of(node));
    let mapped = sources.mappings.iter().filter(elsewhere).map(|mapping| {
        Cidr::host(if mapping.stateless { mapping.target } else { mapping.external })
    });
    let all: BTreeSet<Cidr> = others.chain(mapped).collect();
    all.iter().map(Cidr::to_string).collect()
}
