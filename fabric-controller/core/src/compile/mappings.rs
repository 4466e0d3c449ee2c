//! The user's IP resources: which external address stands for what, and who rewrites it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::ipam::IP;
use fabric_api::{check, labels};
use fabric_objects::{Kind, ObjectRef};

use super::cluster::{Cluster, Node};
use super::{Compiler, owner};
use crate::grant::ip_grant;

#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) external: IpAddr,
    pub(super) target: IpAddr,
    pub(super) masquerade: bool,
    /// The gateway can rewrite it packet by packet. Otherwise the target is a pod, whose packets
    /// have a source of their own already, or has two addresses, or must not see the source: then
    /// a node rewrites it with conntrack.
    pub(super) stateless: bool,
}

impl Mapping {
    /// Returns whether this node is the one that rewrites it: its own pod's answers pass no other.
    pub(super) fn is_of(&self, node: &Node) -> bool {
        !self.stateless
            && node.overlay.is_some()
            && node.pods.iter().any(|p| p.contains(self.target))
    }
}

impl Compiler<'_> {
    pub(super) fn mappings(&mut self, cluster: &Cluster) -> Vec<Mapping> {
        let index = self.index;
        let mut mappings = Vec::new();
        for (reference, object) in index.of_kind(Kind::Ip) {
            let unreachable = object.label(labels::HOST_UNREACHABLE) == Some("true");
            if owner::of(object).is_some() || unreachable {
                continue;
            }
            if let Ok(ip) = <&IP>::try_from(object) {
                mappings.extend(self.mapping(reference, ip, cluster));
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

    fn mapping(&mut self, of: &ObjectRef, ip: &IP, cluster: &Cluster) -> Option<Mapping> {
        check::ip(ip).iter().for_each(|fault| self.fault(of, fault));
        let target = ip.spec.address()?;
        let (external, _) = ip_grant(ip)?;
        if !cluster.external_cidrs().any(|cidr| cidr.contains(external)) {
            return None; // an address of another Network, which no peer asks for
        }
        if external.is_ipv4() != target.is_ipv4() {
            let message = format!("{target} and {external} are of two families; expected one");
            self.problem(of, "spec.ip", message);
            return None;
        }
        let masquerade = ip.spec.masquerade.unwrap_or(false);
        let is_pod = cluster.pods.iter().any(|pods| pods.contains(target));
        Some(Mapping { external, target, masquerade, stateless: !is_pod && !masquerade })
    }
}
