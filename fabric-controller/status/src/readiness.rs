//! Readiness of each Configuration's prefixes: granted, with routes on all nodes.

use fabric_api::Cidr;
use fabric_api::fabric::RemapKind;
use fabric_api::networking::{CidrList, ClusterCidrs, SideConfig};
use fabric_index::Index;
use fabric_model::{Cluster, Peering};

/// Reason why a Configuration's prefixes are ready or not.
#[derive(Clone, Debug)]
pub enum Readiness {
    Configured,
    /// With the CIDRs that ipam is to grant.
    Waiting(String),
    /// With the nodes that have no routes yet.
    Routing(String),
    /// With what is wrong.
    Invalid(String),
}

impl Readiness {
    pub(crate) fn parts(&self) -> (&'static str, &'static str, &str) {
        match self {
            Self::Configured => {
                ("True", "NetworkCIDRsConfigured", "all CIDRs have their counterparts here")
            }
            Self::Waiting(what) => ("False", "WaitingForNetworks", what),
            Self::Routing(nodes) => ("False", "WaitingForNodes", nodes),
            Self::Invalid(what) => ("False", "InvalidConfiguration", what),
        }
    }
}

impl Readiness {
    pub fn of(index: &Index, cluster: &Cluster, peering: &Peering<'_>) -> Self {
        if let Some(fault) = &peering.fault {
            return Self::Invalid(fault.clone());
        }
        if peering.is_ready() {
            if is_published(peering) {
                return Self::Configured;
            }
            let nodes = without_routes(index, cluster, peering);
            return match nodes.is_empty() {
                true => Self::Configured,
                false => Self::Routing(without_agent(index, &nodes)),
            };
        }
        if !cluster.is_ready() {
            return Self::Waiting(cluster.missing());
        }
        let missing = peering.remotes.iter().filter(|remote| remote.granted.is_none());
        let reasons = missing.map(|remote| match index.denial(&remote.network) {
            Some(reason) => format!("{}: {reason}", remote.cidr),
            None => remote.cidr.to_string(),
        });
        Self::Waiting(reasons.collect::<Vec<_>>().join(", "))
    }
}

/// Names only nodes that are slow, and no more than three: with hundreds, each acknowledgement would
/// change the condition of each peering.
fn without_agent(index: &Index, nodes: &[&str]) -> String {
    let slow: Vec<_> =
        nodes.iter().copied().filter(|node| index.slow_nodes.contains(*node)).collect();
    let names = match &slow[..] {
        [] => return "nodes are making routes".to_owned(),
        [_, _, _, _, ..] => "more than three nodes".to_owned(),
        few => few.join(", "),
    };
    let remedy = match (index.settings.kubernetes, &slow[..]) {
        (true, _) => "see whether weft's route-agent pods run there".to_owned(),
        (false, [node]) => format!("run `weft agent --node {node}` there, if it does not run"),
        (false, _) => "run `weft agent --node NAME` on each, if it does not run".to_owned(),
    };
    format!("no routes yet on {names}; {remedy}")
}

/// Nodes that would send what is for the peer along their default route, in clear. Those that do not
/// answer are not among them.
fn without_routes<'a>(index: &Index, cluster: &'a Cluster, peering: &Peering<'_>) -> Vec<&'a str> {
    let (peer, prefixes) = (peering.peer(), peering.sorted_prefixes());
    let has_routes = |name: &str| index.has_routes(name, &peer, &prefixes);
    let names = cluster.nodes.iter().map(|node| node.name.as_str());
    let awaited = names.filter(|name| !index.lagging_nodes.contains(*name));
    awaited.filter(|name| !has_routes(name)).collect()
}

/// True if the status has the prefixes as seen here. They stay there: each change of a node's
/// config makes that unapplied for a moment.
fn is_published(peering: &Peering<'_>) -> bool {
    let status = peering.configuration.status.as_ref();
    status.is_some_and(|status| status.remote.as_ref() == Some(&as_seen_here(peering)))
}

/// Index by index as in `spec.remote`.
pub(crate) fn as_seen_here(peering: &Peering<'_>) -> SideConfig {
    let written = &peering.configuration.spec.remote.cidr;
    let list = |kind: RemapKind, written: &CidrList| {
        let granted = |text: &String| {
            let cidr: Cidr = text.parse().ok()?;
            let mut remotes = peering.remotes.iter();
            remotes.find(|remote| remote.kind == kind && remote.cidr == cidr)?.granted
        };
        CidrList(written.0.iter().filter_map(granted).map(|cidr| cidr.to_string()).collect())
    };
    let pod = list(RemapKind::Pod, &written.pod);
    let external = list(RemapKind::External, &written.external);
    SideConfig { cidr: ClusterCidrs { pod, external } }
}
