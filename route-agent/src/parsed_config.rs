//! A NodeConfig, with the prefixes and MAC addresses in it read.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::Ipv4Addr;
use std::str::FromStr;

use fabric_api::fabric::{NodeConfig, NodeConfigSpec, NodeGateway, NodePeering};
use fabric_api::{Cidr, Mac};

/// Config of a node. Each part that cannot be read is a problem, and left out.
#[derive(Clone, Debug)]
pub(crate) struct ParsedConfig<'a> {
    pub(crate) object: &'a NodeConfig,
    pub(crate) spec: &'a NodeConfigSpec,
    /// MAC address of its VXLAN devices, if it has an overlay address.
    pub(crate) mac: Option<Mac>,
    /// The cluster's pod CIDRs.
    pub(crate) cluster_pods: Vec<Cidr>,
    /// Sources on this node that keep their address: its pod CIDRs, and pods outside them.
    pub(crate) local_pods: Vec<Cidr>,
    /// Pod CIDRs of the node that lie in none of the cluster's.
    pub(crate) outside_pods: Vec<Cidr>,
    pub(crate) internal: Option<Cidr>,
    /// Prefixes of peerings that are gone.
    pub(crate) refused: BTreeSet<Cidr>,
    pub(crate) peerings: Vec<ParsedPeering<'a>>,
    pub(crate) problems: BTreeSet<String>,
}

/// A peering as the node sees it.
#[derive(Clone, Debug)]
pub(crate) struct ParsedPeering<'a> {
    pub(crate) spec: &'a NodePeering,
    pub(crate) prefixes: Vec<Cidr>,
    pub(crate) gateway: Option<ParsedGateway<'a>>,
}

/// A gateway, with the MAC address of the config, or the one that follows from its overlay address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParsedGateway<'a> {
    pub(crate) spec: &'a NodeGateway,
    pub(crate) mac: Mac,
}

impl<'a> ParsedConfig<'a> {
    pub(crate) fn parse(object: &'a NodeConfig) -> Self {
        let spec = &object.spec;
        let mut parser = Parser::default();
        let refused = spec.refused.iter().map(|refused| &refused.prefix);
        let internal = spec.internal_cidr.iter();
        Self {
            object,
            spec,
            mac: spec.overlay.map(|overlay| parser.mac(spec.mac.as_deref(), overlay)),
            cluster_pods: parser.cidrs("the cluster's pods", &spec.pod_cidrs),
            local_pods: parser.cidrs("the node's pods, which are masqueraded,", &spec.local_pods),
            outside_pods: parser.cidrs("the node's pods outside the cluster's", &spec.outside_pods),
            internal: parser.cidrs("internal CIDR", internal).first().copied(),
            refused: parser
                .cidrs("prefix of a peering that is gone", refused)
                .into_iter()
                .collect(),
            peerings: spec.peerings.iter().map(|peering| parser.peering(peering)).collect(),
            problems: parser.0,
        }
    }

    pub(crate) fn gateways(&self) -> impl Iterator<Item = &'a NodeGateway> {
        self.spec.peerings.iter().filter_map(|peering| peering.gateway.as_ref())
    }

    /// The peers' prefixes.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Cidr> {
        self.peerings.iter().flat_map(|peering| &peering.prefixes).copied()
    }

    /// Pods of the cluster and of the node.
    pub(crate) fn pods(&self) -> impl Iterator<Item = Cidr> {
        self.cluster_pods.iter().chain(&self.local_pods).copied()
    }

    /// Pod CIDRs of the node, without pods outside of them.
    pub(crate) fn pod_cidrs(&self) -> impl Iterator<Item = Cidr> {
        self.local_pods.iter().copied().filter(|pods| *pods != Cidr::host(pods.address()))
    }
}

/// Problems so far.
#[derive(Default)]
struct Parser(BTreeSet<String>);

impl Parser {
    fn peering<'a>(&mut self, spec: &'a NodePeering) -> ParsedPeering<'a> {
        let what = format!("peer {}: prefix", spec.peer_cluster_id);
        let prefixes = self.cidrs(&what, &spec.prefixes);
        let gateway = spec.gateway.as_ref().map(|gateway| ParsedGateway {
            spec: gateway,
            mac: self.mac(gateway.mac.as_deref(), gateway.overlay),
        });
        ParsedPeering { spec, prefixes, gateway }
    }

    fn cidrs<'t>(&mut self, what: &str, texts: impl IntoIterator<Item = &'t String>) -> Vec<Cidr> {
        let texts = texts.into_iter();
        texts.filter_map(|text| self.parse(text, format_args!("{what} {text}"))).collect()
    }

    /// Without one, it follows from the overlay address.
    fn mac(&mut self, text: Option<&str>, overlay: Ipv4Addr) -> Mac {
        let what = |text| format!("MAC address {text} of {overlay}");
        let parsed = text.and_then(|text| self.parse(text, what(text)));
        parsed.unwrap_or_else(|| Mac::of_overlay(overlay))
    }

    fn parse<T: FromStr<Err: Display>>(&mut self, text: &str, what: impl Display) -> Option<T> {
        let parsed = text.parse();
        parsed.map_err(|error| self.0.insert(format!("{what}: {error}"))).ok()
    }
}
