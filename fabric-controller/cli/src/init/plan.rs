//! Plan that `weft init` was asked for, checked as a whole.

use std::collections::BTreeSet;
use std::str::FromStr as _;

use anyhow::{Context as _, bail, ensure};
use fabric_api::{Cidr, ClusterId, check};

use super::InitArgs;
use super::node::NodeArg;
use crate::host;

const POD_CIDR: &str = "10.200.0.0/16";
const EXTERNAL_CIDR: &str = "10.70.0.0/16";
const INTERNAL_CIDR: &str = "10.80.0.0/16";

#[derive(Debug)]
pub(super) struct ClusterPlan {
    pub(super) cluster_id: ClusterId,
    pub(super) networks: Vec<NetworkPlan>,
    pub(super) nodes: Vec<NodeArg>,
}

#[derive(Debug)]
pub(super) struct NetworkPlan {
    pub(super) purpose: Purpose,
    pub(super) cidr: Cidr,
    /// The user named it: ipam must not grant another.
    pub(super) fixed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Pod,
    Service,
    External,
    Internal,
    Reserved,
}

impl Purpose {
    /// Option of `weft init`.
    fn option(self) -> &'static str {
        if self == Self::Reserved { "reserved-cidr" } else { self.as_str() }
    }

    /// Name of the Network, and value of its label `ipam.liqo.io/network-type`.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "pod-cidr",
            Self::Service => "service-cidr",
            Self::External => "external-cidr",
            Self::Internal => "internal-cidr",
            Self::Reserved => "reserved",
        }
    }
}

impl ClusterPlan {
    pub(super) fn new(args: &InitArgs) -> anyhow::Result<Self> {
        let networks = networks(args)?;
        disjoint(&networks)?;
        let pods: Vec<Cidr> = of(&networks, Purpose::Pod).collect();
        let nodes = if args.node.is_empty() { vec![this_host(&pods)?] } else { args.node.clone() };
        check_nodes(&nodes, &pods)?;
        Ok(Self { cluster_id: args.cluster_id.clone(), networks, nodes })
    }

    /// Returns warnings about settings that are legal, but probably not meant.
    pub(super) fn warnings(&self) -> Vec<String> {
        let has_v6 = |purpose| of(&self.networks, purpose).any(|cidr| !cidr.is_ipv4());
        let mut found = Vec::new();
        if has_v6(Purpose::Pod) && !has_v6(Purpose::External) {
            found.push(
                "there is an IPv6 pod CIDR but no IPv6 external CIDR, so over IPv6 only pods can \
                 reach a peer, the nodes themselves cannot; add --external-cidr fd00:70::/48 or \
                 the like"
                    .to_owned(),
            );
        }
        for node in self.nodes.iter().filter(|node| node.addresses.len() == 1) {
            if node.addresses[0].is_ipv6() && self.nodes.len() > 1 {
                found.push(format!("node {} can be reached by IPv6 nodes only", node.name));
            }
        }
        found
    }
}

fn of(networks: &[NetworkPlan], purpose: Purpose) -> impl Iterator<Item = Cidr> {
    networks.iter().filter(move |network| network.purpose == purpose).map(|network| network.cidr)
}

fn networks(args: &InitArgs) -> anyhow::Result<Vec<NetworkPlan>> {
    let mut networks = Vec::new();
    let mut add = |purpose, given: &[Cidr], default: Option<&str>| -> anyhow::Result<()> {
        networks.extend(given.iter().map(|&cidr| NetworkPlan { purpose, cidr, fixed: true }));
        if let (true, Some(default)) = (given.is_empty(), default) {
            // Which pods there are is nothing ipam could decide.
            let fixed = purpose == Purpose::Pod;
            networks.push(NetworkPlan { purpose, cidr: Cidr::from_str(default)?, fixed });
        }
        Ok(())
    };
    add(Purpose::Pod, &args.pod_cidr, Some(POD_CIDR))?;
    add(Purpose::Service, &args.service_cidr, None)?;
    add(Purpose::External, &args.external_cidr, Some(EXTERNAL_CIDR))?;
    add(Purpose::Internal, args.internal_cidr.as_slice(), Some(INTERNAL_CIDR))?;
    add(Purpose::Reserved, &args.reserved_cidr, None)?;
    for network in &networks {
        let (name, cidr) = (network.purpose.option(), network.cidr);
        ensure!(
            network.purpose == Purpose::Reserved || check::is_unicast(&cidr),
            "--{name} {cidr}: expected {}, such as {POD_CIDR}",
            check::UNICAST
        );
        let has_hosts = !matches!(network.purpose, Purpose::Service | Purpose::Reserved);
        if let Some(expected) = check::lacks_room(&cidr).filter(|_| has_hosts) {
            bail!("--{name} {cidr}: {expected}");
        }
    }
    if let Some(cidr) = of(&networks, Purpose::Internal).find(|cidr| !cidr.is_ipv4()) {
        bail!("--internal-cidr {cidr}: expected an IPv4 prefix, from which IPv6 next hops follow");
    }
    Ok(networks)
}

fn disjoint(networks: &[NetworkPlan]) -> anyhow::Result<()> {
    for (i, second) in networks.iter().enumerate() {
        if let Some(first) = networks[..i].iter().find(|first| first.cidr.overlaps(&second.cidr)) {
            bail!(
                "--{} {} overlaps --{} {}; expected prefixes with no address in common",
                second.purpose.option(),
                second.cidr,
                first.purpose.option(),
                first.cidr
            );
        }
    }
    Ok(())
}

fn this_host(pods: &[Cidr]) -> anyhow::Result<NodeArg> {
    let name = host::name()?;
    let address = host::default_source().context(
        "this host has no default route, so its address cannot be determined; \
         give --node NAME=ADDRESS=PODCIDR",
    )?;
    let first = |ipv4| pods.iter().find(|cidr| cidr.is_ipv4() == ipv4).copied();
    let pod_cidrs = [first(true), first(false)].into_iter().flatten().collect();
    Ok(NodeArg { name, addresses: vec![address], pod_cidrs })
}

fn check_nodes(nodes: &[NodeArg], pods: &[Cidr]) -> anyhow::Result<()> {
    let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    let mut taken: Vec<(Cidr, &str)> = Vec::new();
    for node in nodes {
        let name = node.name.as_str();
        ensure!(names.insert(name), "--node {name} is there twice");
        for address in &node.addresses {
            ensure!(addresses.insert(address), "--node {name}: another node has address {address}");
            if let Some(pods) = pods.iter().find(|pods| pods.contains(*address)) {
                bail!(
                    "--node {name}: address {address} lies in --pod-cidr {pods}; expected a pod CIDR \
                     apart from the addresses of hosts: give another --pod-cidr"
                );
            }
        }
        for &cidr in &node.pod_cidrs {
            let inside = |pod: &Cidr| pod.contains(cidr.address()) && pod.len() <= cidr.len();
            ensure!(
                pods.iter().any(inside),
                "--node {name}: {cidr} lies in none of the pod CIDRs ({}); \
                 expected a part of one of --pod-cidr",
                pods.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            );
            if let Some((other, owner)) = taken.iter().find(|(other, _)| other.overlaps(&cidr)) {
                bail!("--node {name}: {cidr} overlaps {other} of node {owner}");
            }
            taken.push((cidr, name));
        }
    }
    Ok(())
}
