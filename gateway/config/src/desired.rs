//! The published config, parsed and checked once: everything behind this point is right by
//! construction. What is wrong names its field, and the gateway stays on its last good config.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use fabric_api::fabric::{
    self, AddressMap, GatewayConfig, PeerEndpoint, ProbeSettings, RemapKind, Role,
};
use fabric_api::{Cidr, ClusterId, Mac, PublicKey};

/// The smallest MTU every IPv4 host must take (RFC 791), in bytes.
const SMALLEST_MTU: u32 = 576;
/// Linux drops IPv6 from a device below this MTU (RFC 8200 section 5).
pub const IPV6_MTU: u32 = 1280;

/// Desired state of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    /// UID of the GatewayConfig; generations count within it.
    pub uid: String,
    pub generation: i64,
    pub cluster: ClusterId,
    pub peer: ClusterId,
    pub role: Role,
    pub gateway_uid: String,
    pub secret_name: String,
    /// Absent until the peer's key arrives: the gateway is idle.
    pub peer_key: Option<PublicKey>,
    pub listen_port: Option<u16>,
    pub endpoint: Option<Endpoint>,
    /// Upper bound, in bytes.
    pub mtu: u32,
    pub tunnel_address: Ipv4Addr,
    pub peer_tunnel_address: Ipv4Addr,
    pub remaps: Vec<Remap>,
    pub pod_cidrs: Vec<Cidr>,
    pub external_cidrs: Vec<Cidr>,
    pub ips: Vec<AddressMap>,
    pub icmp_sources: Vec<IpAddr>,
    pub egress: Vec<Cidr>,
    /// Overlay address of the node that `egress` goes to; `None` while it is not among `nodes`.
    pub egress_node: Option<Ipv4Addr>,
    /// The gateway's own overlay address.
    pub overlay: Ipv4Addr,
    /// MAC of its VXLAN devices.
    pub mac: Mac,
    /// Standalone: the address of the pod end of the veth.
    pub link_address: Option<Ipv4Addr>,
    pub link_address_v6: Option<Ipv6Addr>,
    /// Underlay address of the gateway's own node; `None` while it is not among `nodes`.
    pub own_underlay: Option<IpAddr>,
    pub nodes: Vec<Node>,
    pub probe: ProbeSettings,
    /// Number of nodes with a fault that probes do not show.
    pub faulty_nodes: u32,
}

/// Addresses and port that a client finds its server at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Addresses and DNS names, the first that answers is used. Never empty.
    pub hosts: Vec<String>,
    pub port: u16,
}

impl Endpoint {
    /// Returns false if it certainly does not lead to this address and port.
    pub fn may_be(&self, at: SocketAddr) -> bool {
        let is_it = |host: &String| {
            host.parse::<IpAddr>().map_or(true, |ip| ip.to_canonical() == at.ip().to_canonical())
        };
        self.port == at.port() && self.hosts.iter().any(is_it)
    }
}

/// Prefix of the peer and the one that this cluster sees in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    pub kind: RemapKind,
    pub remote: Cidr,
    pub local: Cidr,
}

/// Node of this cluster, as the gateway reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub overlay: Ipv4Addr,
    pub mac: Mac,
    pub underlay: IpAddr,
    pub prefixes: Vec<Cidr>,
}

/// Problems of a config, one a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.lines().join("; "))]
pub struct BadConfig(pub Vec<FieldProblem>);

/// Prints as `spec.field: what is wrong`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldProblem {
    pub field: String,
    pub message: String,
}

impl Desired {
    /// Parses and checks a published config; an error has all of its problems.
    pub fn parse(config: &GatewayConfig) -> Result<Self, BadConfig> {
        let mut problems = Problems::default();
        let parsed = parse(config, &mut problems);
        match (parsed, problems.0) {
            (Some(desired), problems) if problems.is_empty() => Ok(desired),
            (_, problems) => Err(BadConfig(problems)),
        }
    }

    /// Time between two of our probes; zero if there are none.
    pub fn probe_interval(&self) -> Duration {
        let millis = if self.probe.enabled { self.probe.interval_ms } else { 0 };
        Duration::from_millis(millis.into())
    }
}

impl BadConfig {
    /// Returns one line for each problem.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(ToString::to_string).collect()
    }
}

impl fmt::Display for FieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// Collects what is wrong, so that a user sees all of it at once.
#[derive(Default)]
struct Problems(Vec<FieldProblem>);

impl Problems {
    fn add(&mut self, field: impl Into<String>, message: impl fmt::Display) {
        self.0.push(FieldProblem { field: field.into(), message: message.to_string() });
    }

    fn take<T, E: fmt::Display>(&mut self, field: &str, parsed: Result<T, E>) -> Option<T> {
        parsed.map_err(|error| self.add(field, error)).ok()
    }

    /// Without one, it follows from the overlay address.
    fn mac(&mut self, field: &str, text: Option<&str>, overlay: Ipv4Addr) -> Mac {
        let parsed = text.and_then(|text| self.take(field, text.parse()));
        parsed.unwrap_or_else(|| Mac::of_overlay(overlay))
    }

    fn cidrs(&mut self, field: &str, texts: &[String]) -> Vec<Cidr> {
        let parse = |(i, text): (usize, &String)| {
            let parsed = self.take(&format!("{field}[{i}]"), text.parse::<Cidr>())?;
            if parsed.is_everything() {
                self.add(
                    format!("{field}[{i}]"),
                    "a prefix that holds every address is not accepted",
                );
                return None;
            }
            Some(parsed)
        };
        texts.iter().enumerate().filter_map(parse).collect()
    }
}

/// `None` only if a problem was added; the reverse need not hold.
fn parse(config: &GatewayConfig, problems: &mut Problems) -> Option<Desired> {
    let spec = &config.spec;
    let key = spec.peer_public_key.as_deref().map(PublicKey::from_base64).transpose();
    let nodes = parse_nodes(&spec.nodes, problems);
    let find = |name: &Option<String>| nodes.iter().find(|node| Some(&node.name) == name.as_ref());
    let desired = Desired {
        uid: config.metadata.uid.clone().unwrap_or_default(),
        generation: config.metadata.generation.unwrap_or_default(),
        cluster: problems.take("spec.clusterId", spec.cluster_id.parse())?,
        peer: problems.take("spec.peerClusterId", spec.peer_cluster_id.parse())?,
        role: spec.role,
        gateway_uid: spec.gateway_uid.clone(),
        secret_name: spec.secret_name.clone(),
        peer_key: problems.take("spec.peerPublicKey", key)?,
        listen_port: spec.listen_port,
        endpoint: parse_endpoint(spec, problems),
        mtu: spec.mtu,
        tunnel_address: spec.tunnel_address,
        peer_tunnel_address: spec.peer_tunnel_address,
        remaps: parse_remaps(&spec.remaps, problems),
        pod_cidrs: problems.cidrs("spec.podCidrs", &spec.pod_cidrs),
        external_cidrs: problems.cidrs("spec.externalCidrs", &spec.external_cidrs),
        ips: spec.ips.clone(),
        icmp_sources: spec.icmp_sources.clone(),
        egress: problems.cidrs("spec.egress", &spec.egress),
        egress_node: find(&spec.egress_node).map(|node| node.overlay),
        overlay: spec.overlay.address,
        mac: problems.mac("spec.overlay.mac", spec.overlay.mac.as_deref(), spec.overlay.address),
        link_address: spec.overlay.link_address,
        link_address_v6: spec.overlay.link_address_v6,
        own_underlay: find(&spec.overlay.node).map(|node| node.underlay),
        nodes,
        probe: spec.probe,
        faulty_nodes: spec.faulty_nodes,
    };
    check(&desired, problems);
    Some(desired)
}

fn parse_endpoint(spec: &fabric::GatewayConfigSpec, problems: &mut Problems) -> Option<Endpoint> {
    let Some(endpoint) = &spec.endpoint else {
        if spec.role == Role::Client {
            problems.add("spec.endpoint", "missing; a client has to know where its server is");
        }
        return None;
    };
    if endpoint.port == 0 {
        problems.add("spec.endpoint.port", "0 is not a port; expected 1 to 65535");
    }
    let endpoint = Endpoint::from(endpoint);
    if endpoint.hosts.is_empty() {
        problems.add("spec.endpoint.addresses", "empty; expected an IP address or a DNS name");
    }
    Some(endpoint)
}

impl From<&PeerEndpoint> for Endpoint {
    fn from(endpoint: &PeerEndpoint) -> Self {
        let hosts = endpoint.addresses.iter().map(|host| host.trim().to_owned());
        Self { hosts: hosts.filter(|host| !host.is_empty()).collect(), port: endpoint.port }
    }
}

fn parse_remaps(remaps: &[fabric::Remap], problems: &mut Problems) -> Vec<Remap> {
    let mut parsed: Vec<Remap> = Vec::new();
    for (i, remap) in remaps.iter().enumerate() {
        let field = |name: &str| format!("spec.remaps[{i}].{name}");
        let remote = problems.take(&field("remote"), remap.remote.parse::<Cidr>());
        let local = problems.take(&field("local"), remap.local.parse::<Cidr>());
        let (Some(remote), Some(local)) = (remote, local) else { continue };
        if remote.is_everything() || local.is_everything() {
            problems.add(
                format!("spec.remaps[{i}]"),
                "a prefix that holds every address is not accepted",
            );
        }
        if (remote.len(), remote.is_ipv4()) != (local.len(), local.is_ipv4()) {
            let message = format!("{local} is not of the same family and length as {remote}");
            problems.add(field("local"), message);
        }
        if let Some(other) = parsed.iter().find(|other| other.local.overlaps(&local)) {
            problems
                .add(field("local"), format!("{local} overlaps {}, another remap's", other.local));
        }
        if let Some(other) = parsed.iter().find(|other| other.remote == remote) {
            problems.add(field("remote"), format!("{} is remapped twice", other.remote));
        }
        parsed.push(Remap { kind: remap.kind, remote, local });
    }
    parsed
}

fn parse_nodes(nodes: &[fabric::OverlayNode], problems: &mut Problems) -> Vec<Node> {
    let (mut names, mut overlays) = (BTreeSet::new(), BTreeSet::new());
    let mut parsed = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let field = |name: &str| format!("spec.nodes[{i}].{name}");
        if !names.insert(&node.name) {
            problems.add(field("name"), format!("{:?} is there twice", node.name));
        }
        if !overlays.insert(node.overlay) {
            problems.add(field("overlay"), format!("{} is another node's, too", node.overlay));
        }
        if node.underlay.is_unspecified() || node.underlay.is_multicast() {
            problems.add(field("underlay"), format!("{} is no node's address", node.underlay));
        }
        parsed.push(Node {
            name: node.name.clone(),
            overlay: node.overlay,
            mac: problems.mac(&field("mac"), node.mac.as_deref(), node.overlay),
            underlay: node.underlay,
            prefixes: problems.cidrs(&field("prefixes"), &node.prefixes),
        });
    }
    parsed
}

/// Checks across fields.
fn check(desired: &Desired, problems: &mut Problems) {
    if !(SMALLEST_MTU..=65_535).contains(&desired.mtu) {
        problems
            .add("spec.mtu", format!("{} bytes; expected {SMALLEST_MTU} to 65535", desired.mtu));
    }
    if desired.secret_name.is_empty() {
        problems.add("spec.secretName", "empty; expected the name of a Secret with privateKey");
    }
    if desired.role == Role::Server && desired.listen_port.is_none_or(|port| port == 0) {
        problems.add("spec.listenPort", "missing; a server has to listen on a port");
    }
    if desired.tunnel_address == desired.peer_tunnel_address {
        problems.add("spec.peerTunnelAddress", "the same as spec.tunnelAddress");
    }
    if desired.nodes.iter().any(|node| node.overlay == desired.overlay) {
        problems.add("spec.overlay.address", format!("{} is a node's, too", desired.overlay));
    }
    let own = desired.pod_cidrs.iter().chain(&desired.external_cidrs);
    for own in own {
        for (i, remap) in desired.remaps.iter().enumerate().filter(|(_, r)| r.local.overlaps(own)) {
            let message = format!("{} overlaps this cluster's own {own}", remap.local);
            problems.add(format!("spec.remaps[{i}].local"), message);
        }
    }
    check_addresses(desired, problems);
    let ProbeSettings { interval_ms, loss_threshold, .. } = desired.probe;
    if !(100..=10_000).contains(&interval_ms) {
        problems.add("spec.probe.intervalMs", format!("{interval_ms}; expected 100 to 10000"));
    }
    if !(1..=100).contains(&loss_threshold) {
        problems.add("spec.probe.lossThreshold", format!("{loss_threshold}; expected 1 to 100"));
    }
}

fn check_addresses(desired: &Desired, problems: &mut Problems) {
    let mut seen = BTreeSet::new();
    for (i, ip) in desired.ips.iter().enumerate() {
        let field = format!("spec.ips[{i}]");
        if ip.external.is_ipv4() != ip.target.is_ipv4() {
            problems.add(&field, format!("{} and {} are of two families", ip.external, ip.target));
        }
        if !seen.insert(ip.external) || !seen.insert(ip.target) {
            problems.add(&field, "an address that another entry has, too: not reversible");
        }
    }
    for (i, source) in desired.icmp_sources.iter().enumerate() {
        if desired.icmp_sources[..i].iter().any(|other| other.is_ipv4() == source.is_ipv4()) {
            problems
                .add(format!("spec.icmpSources[{i}]"), "the second of its family; expected one");
        }
    }
}

#[cfg(test)]
mod tests;
