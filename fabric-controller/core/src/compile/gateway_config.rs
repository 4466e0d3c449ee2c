//! GatewayConfigs to publish, one per gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fabric_api::fabric::{
    GatewayConfig, GatewayConfigSpec, GatewayOverlay, IpFamily, Remap, Role, common_family,
    gateway_spec,
};
use fabric_api::{labels, link_v6};
use fabric_objects::{Kind, ObjectRef};

use super::Compiler;
use super::cluster::{Cluster, Node};
use super::gateway::{Gateway, GatewaySettings};
use super::gateway_records::GatewayRecords;
use super::mappings::Mapping;
use super::names;
use super::peering::Peering;

const SERVER_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 1);
const CLIENT_TUNNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 2);

/// All that a gateway's config follows from.
struct Sources<'a> {
    cluster: &'a Cluster,
    peerings: &'a [Peering<'a>],
    /// `None` while too little is known of the cluster.
    records: Option<GatewayRecords>,
    /// The node that gateways run on.
    host: Option<String>,
}

impl Sources<'_> {
    /// Addresses of a node, which may just be out of sight.
    fn underlay(&self, node: &str) -> Vec<IpAddr> {
        let known = self.cluster.node(node).map(|node| &node.underlay);
        let recorded = self.records.as_ref().and_then(|records| records.nodes.get(node));
        let recorded = recorded.map(|record| &record.underlay);
        known.or(recorded).cloned().unwrap_or_default()
    }
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
        let records = self.gateway_records(cluster, peerings, mappings);
        let sources = Sources { cluster, peerings, records, host };
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
        let peering = sources.peerings.iter().find(|peering| peering.is_with(&gateway.peer))?;
        let records = sources.records.as_ref().filter(|_| peering.is_ready())?;
        let overlay = self.gateway_overlay(gateway, sources)?;
        let mut spec = self.own_spec(gateway, settings, peering, (sources.cluster, overlay))?;
        if !self.gateway_reads_records(gateway) {
            spec = gateway_spec(&spec, &records.cluster, records.nodes.values());
        }
        let mut config = GatewayConfig::new(&gateway.reference.name, spec);
        config.metadata.namespace = gateway.reference.namespace.clone();
        let peer = (labels::REMOTE_CLUSTER_ID.to_owned(), gateway.peer.to_string());
        config.metadata.labels = Some([peer].into());
        config.metadata.owner_references =
            self.owned_by(&gateway.reference, config.metadata.namespace.as_deref());
        Some(config)
    }

    fn gateway_overlay(
        &self,
        gateway: &Gateway<'_>,
        sources: &Sources<'_>,
    ) -> Option<GatewayOverlay> {
        let node = match self.index.settings.kubernetes {
            true => self.internal_endpoint(gateway).and_then(|internal| internal.node),
            false => sources.host.clone(),
        };
        let host = node.as_deref().map(|name| sources.underlay(name)).unwrap_or_default();
        let families = self.underlay_of(gateway, &host).into_iter().map(IpFamily::from);
        let mut overlay = GatewayOverlay {
            address: self.gateway_address(gateway, "overlay")?,
            mac: self.mac(&gateway.uid),
            link_address: None,
            link_address_v6: None,
            node,
            ip_families: families.collect(),
        };
        if !self.index.settings.kubernetes {
            let link = self.gateway_address(gateway, "link")?;
            overlay.link_address = Some(link);
            overlay.link_address_v6 = first_v6(&host).map(|host| link_v6(link, host));
        }
        Some(overlay)
    }

    /// Own part of a gateway's config; the rest follows from records.
    fn own_spec(
        &self,
        gateway: &Gateway<'_>,
        settings: GatewaySettings,
        peering: &Peering<'_>,
        (cluster, overlay): (&Cluster, GatewayOverlay),
    ) -> Option<GatewayConfigSpec> {
        let (tunnel_address, peer_tunnel_address) = match gateway.role() {
            Role::Server => (SERVER_TUNNEL_ADDRESS, CLIENT_TUNNEL_ADDRESS),
            Role::Client => (CLIENT_TUNNEL_ADDRESS, SERVER_TUNNEL_ADDRESS),
        };
        let remaps = peering.remotes.iter().filter_map(|remote| {
            let (remote, local, kind) = (remote.cidr, remote.granted?, remote.kind);
            Some(Remap { kind, remote: remote.to_string(), local: local.to_string() })
        });
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
            from_records: true,
            pod_cidrs: Vec::new(),
            external_cidrs: Vec::new(),
            ips: Vec::new(),
            icmp_sources: Vec::new(),
            egress: Vec::new(),
            egress_node: overlay.node.clone(),
            overlay,
            nodes: Vec::new(),
            probe: self.index.settings.probe,
        })
    }

    /// The addresses that VXLAN to and from nodes has at the gateway's end.
    fn underlay_of(&self, gateway: &Gateway<'_>, host: &[IpAddr]) -> Vec<IpAddr> {
        self.pod_address(gateway).map_or_else(|| host.to_vec(), |pod| vec![pod])
    }

    /// A node and a gateway without a family in common have no overlay between them.
    fn check_families(&mut self, gateway: &Gateway<'_>, sources: &Sources<'_>) {
        let host = sources.host.as_deref().map(|name| sources.underlay(name)).unwrap_or_default();
        let end = self.underlay_of(gateway, &host);
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
}

fn first_v6(addresses: &[IpAddr]) -> Option<Ipv6Addr> {
    addresses.iter().find_map(|address| match address {
        IpAddr::V6(address) => Some(*address),
        IpAddr::V4(_) => None,
    })
}
