//! The user's IP resources: which external address stands for what, and where it is rewritten.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
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
    /// a node rewrites it with conntrack. That rewrites a destination once, so what is for a Service is left to
    /// kube-proxy there, which masquerades it as well.
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
            let mapping = mapping(reference, ip, cluster, problems);
            mappings.extend(mapping.map(|mapping| (reference, mapping)));
        }
    }
    mappings.sort_by_key(|(_, mapping)| mapping.external);
    let mut of_services = BTreeMap::new();
    mappings.retain(|(reference, mapping)| {
        if !is_service(mapping.target, cluster) {
            return true;
        }
        match of_services.entry(mapping.target) {
            Entry::Vacant(entry) => _ = entry.insert(*reference),
            Entry::Occupied(other) => {
                let (target, other) = (mapping.target, other.get());
                let message = format!(
                    "found {target}, which {other} has, too; expected one IP for the address of a Service: \
                     delete one of them"
                );
                problems.add(reference, "spec.ip", message);
                return false;
            }
        }
        true
    });
    let mut uses: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for (_, mapping) in &mappings {
        *uses.entry(mapping.target).or_default() += 1;
    }
    for (_, mapping) in &mut mappings {
        mapping.stateless &= uses[&mapping.target] == 1;
    }
    mappings.into_iter().map(|(_, mapping)| mapping).collect()
}

fn is_service(address: IpAddr, cluster: &Cluster) -> bool {
    cluster.services.iter().any(|cidr| cidr.contains(address))
}

fn mapping(of: &ObjectRef, ip: &IP, cluster: &Cluster, problems: &mut Problems) -> Option<Mapping> {
    let faults = check::ip(ip);
    if !faults.is_empty() {
        faults.iter().for_each(|fault| problems.fault(of, fault));
        return None;
    }
    let target = ip.spec.address()?;
    let (external, _) = ip_grant(ip)?;
    if !cluster.external_cidrs().any(|cidr| cidr.contains(external)) {
        return None; // an address of another Network, which no peer sends to
    }
    if let Some(own) = cluster.external_cidrs().find(|cidr| cidr.contains(target)) {
        let message = format!(
            "found {target}, which is in this cluster's own external CIDR ({own}), of which peers get addresses; \
             expected the address of a pod, Service or host"
        );
        problems.add(of, "spec.ip", message);
        return None;
    }
    if let Some(overlay) = cluster.internal.as_ref().filter(|of| of.cidr.contains(target)) {
        let cidr = overlay.cidr;
        let message = format!(
            "found {target}, which is in weft's own overlay ({cidr}); expected the address of a pod, Service or host"
        );
        problems.add(of, "spec.ip", message);
        return None;
    }
    if external.is_ipv4() != target.is_ipv4() {
        let message = format!("{target} and {external} are of two families; expected one");
        problems.add(of, "spec.ip", message);
        return None;
    }
    let masquerade = ip.spec.masquerade.unwrap_or(false);
    let is_pod = cluster.pods.iter().any(|pods| pods.contains(target));
    let stateless = !is_pod && (!masquerade || is_service(target, cluster));
    Some(Mapping { external, target, masquerade, stateless })
}
