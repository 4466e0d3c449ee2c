//! The user's IP resources: which external address stands for what, and where it is rewritten.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::ipam::IP;
use fabric_api::{check, labels};
use fabric_index::{Index, ip_grant, owner};
use fabric_objects::{Kind, ObjectRef};

use crate::cluster::{Cluster, Node};
use crate::problems::Problems;

#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub external: IpAddr,
    pub target: IpAddr,
    pub masquerade: bool,
    /// The gateway can rewrite it packet by packet. Otherwise the target is a pod, whose packets
    /// have a source of their own already, or has two addresses, or must not see the source: then
    /// a node rewrites it with conntrack.
    pub stateless: bool,
}

impl Mapping {
    /// Returns whether this node is the one that rewrites it: its own pod's answers pass no other.
    pub fn is_of(&self, node: &Node) -> bool {
        !self.stateless
            && node.overlay.is_some()
            && node.pods.iter().any(|p| p.contains(self.target))
    }
}

/// Reads all mapped IPs, sorted by their external address.
pub fn read(index: &Index, cluster: &Cluster, problems: &mut Problems) -> Vec<Mapping> {
    let mut mappings = Vec::new();
    for (reference, object) in index.of_kind(Kind::Ip) {
        let unreachable = object.label(labels::HOST_UNREACHABLE) == Some("true");
        if unreachable || owner::is_own(object) {
            continue;
        }
        if let Ok(ip) = <&IP>::try_from(object) {
            mappings.extend(mapping(reference, ip, cluster, problems));
        }
    }
    let mut uses: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for mapping in &mappings {
        *uses.entry(mapping.target).or_default() += 1;
    }
    for mapping in &mut mappings {
        mapping.stateless &= uses[&mapping.target] == 1;
    }
    mappings.sort_by_key(|mapping| mapping.external);
    mappings
}

fn mapping(of: &ObjectRef, ip: &IP, cluster: &Cluster, problems: &mut Problems) -> Option<Mapping> {
    check::ip(ip).iter().for_each(|fault| problems.fault(of, fault));
    let target = ip.spec.address()?;
    let (external, _) = ip_grant(ip)?;
    if !cluster.external_cidrs().any(|cidr| cidr.contains(external)) {
        return None; // an address of another Network, which no peer sends to
    }
    if external.is_ipv4() != target.is_ipv4() {
        let message = format!("{target} and {external} are of two families; expected one");
        problems.add(of, "spec.ip", message);
        return None;
    }
    let masquerade = ip.spec.masquerade.unwrap_or(false);
    let is_pod = cluster.pods.iter().any(|pods| pods.contains(target));
    Some(Mapping { external, target, masquerade, stateless: !is_pod && !masquerade })
}
