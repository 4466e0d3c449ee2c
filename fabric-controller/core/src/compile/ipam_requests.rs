//! Requests to ipam.

use std::collections::BTreeSet;

use fabric_api::ipam::{IP, Network};
use fabric_api::{Cidr, labels};
use fabric_objects::{Kind, Object, ObjectRef};

use super::cluster::Cluster;
use super::refused::keeps_refused_prefix;
use super::{Compiler, owner};
use crate::grant::{ip_grant, network_grant};

/// An object that wants a prefix or an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpamRequest {
    pub object: ObjectRef,
    /// Uid of the object as it was; a grant for a namesake is released.
    pub uid: String,
    pub allocation: Allocation,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    Network {
        cidr: Cidr,
        immutable: bool,
        exclusive: bool,
        pre_allocated: u32,
    },
    /// An address out of a prefix that was granted.
    Address {
        cidr: Cidr,
    },
}

impl Compiler<'_> {
    pub(super) fn request_from_ipam(&mut self, cluster: &Cluster) {
        let index = self.index;
        let mut ipam_requests = Vec::new();
        for (reference, object) in index.of_kind(Kind::Network) {
            let rank = rank(object);
            // A peer must not get what the cluster itself is still to get.
            let is_eligible = rank < LAST || cluster.is_ready();
            if let (true, true, Ok(network)) =
                (is_eligible, self.stays(reference, object), object.try_into())
            {
                ipam_requests
                    .extend(self.network_request(reference, object, network).map(|w| (rank, w)));
            }
        }
        ipam_requests.sort_by_key(|(rank, _)| *rank);
        self.out.ipam_requests =
            ipam_requests.into_iter().map(|(_, ipam_request)| ipam_request).collect();
        for (reference, object) in index.of_kind(Kind::Ip) {
            if let (true, Ok(ip)) = (self.stays(reference, object), object.try_into()) {
                let ipam_request = self.ip_request(reference, object, ip, cluster);
                self.out.ipam_requests.extend(ipam_request);
            }
        }
    }

    /// The user's, or still wanted.
    fn stays(&self, reference: &ObjectRef, object: &Object) -> bool {
        owner::of(object).is_none_or(|owner| self.may_still_be(&owner))
            || self.out.objects.contains_key(reference)
            || self.kept.contains(reference)
    }

    fn network_request(
        &self,
        of: &ObjectRef,
        object: &Object,
        network: &Network,
    ) -> Option<IpamRequest> {
        let cidr = network.spec.cidr.parse::<Cidr>().ok()?; // reported with the cluster
        let immutable = is_immutable(object);
        let fits = |granted: Cidr| {
            let same_shape = granted.len() == cidr.len() && granted.is_ipv4() == cidr.is_ipv4();
            if immutable { granted == cidr } else { same_shape }
        };
        let returned = match self.out.statuses.get(of) {
            Some(Object::Network(returned)) => network_grant(returned),
            Some(_) | None => None,
        };
        if network_grant(network).or(returned).is_some_and(fits) {
            return None;
        }
        let allocation = Allocation::Network {
            cidr,
            immutable,
            exclusive: !(immutable && object.label(labels::NETWORK_SHARED) == Some("true")),
            pre_allocated: network.spec.pre_allocated.unwrap_or(0),
        };
        Some(IpamRequest { object: of.clone(), uid: object.uid().to_owned(), allocation })
    }

    fn ip_request(
        &mut self,
        of: &ObjectRef,
        object: &Object,
        ip: &IP,
        cluster: &Cluster,
    ) -> Option<IpamRequest> {
        let wanted = ip.spec.address()?; // reported with the mappings
        let cidr = match &ip.spec.network_ref {
            Some(network) => {
                let namespace = network.namespace.as_ref().or(of.namespace.as_ref());
                let namespace = namespace.map(String::as_str).unwrap_or_default();
                let name = network.name.as_deref().unwrap_or_default();
                let network = ObjectRef::new(Kind::Network, namespace, name);
                if self.index.get(&network).is_none() {
                    self.problem(of, "spec.networkRef", format!("waits for {network}"));
                }
                self.index.network_grant(&network)?
            }
            None => cluster.external_of(wanted.is_ipv4())?.cidr,
        };
        if ip_grant(ip).is_some_and(|(address, from)| from == cidr && cidr.contains(address)) {
            return None;
        }
        let allocation = Allocation::Address { cidr };
        Some(IpamRequest { object: of.clone(), uid: object.uid().to_owned(), allocation })
    }

    /// Refusals of ipam, of prefixes and addresses that are still requested. A prefix that is to be kept
    /// from others, and is taken, is kept from them.
    pub(super) fn address_problems(&mut self) {
        let index = self.index;
        let asked: BTreeSet<_> =
            self.out.ipam_requests.iter().map(|ipam_request| ipam_request.object.clone()).collect();
        for (reference, reason) in index.denials().filter(|(object, _)| asked.contains(object)) {
            let Some(object) = index.get(reference).filter(|of| !keeps_refused_prefix(of)) else {
                continue;
            };
            match owner::of(object) {
                Some(owner) => self.problem(&owner, "", format!("{reference}: {reason}")),
                None => self.problem(reference, "", reason),
            }
        }
    }
}

const LAST: u8 = 3;

/// Priority of a request: immutable ones first, then the cluster's own, then all other Networks of
/// the user, and peers' prefixes last.
fn rank(object: &Object) -> u8 {
    let own = object.label(labels::NETWORK_TYPE).is_some();
    match (is_immutable(object), own, owner::of(object)) {
        (true, ..) => 0,
        (false, true, _) => 1,
        (false, false, None) => 2,
        (false, false, Some(_)) => LAST,
    }
}

fn is_immutable(object: &Object) -> bool {
    object.label(labels::NETWORK_NOT_REMAPPED).is_some_and(|value| value != "false")
}
