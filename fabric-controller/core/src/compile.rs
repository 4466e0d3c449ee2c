//! Compiler from the index to everything to publish. No I/O, no clock: same input, same output.

mod addresses;
mod cluster;
mod conditions;
mod gateway;
mod gateway_config;
mod gateway_records;
mod ipam_requests;
mod mappings;
mod names;
mod node_config;
mod node_paths;
mod owner;
mod peering;
mod peers;
mod placed;
mod records;
mod refused;
mod seal;
mod secrets;
mod services;
mod statuses;
mod unacknowledged;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::check::Fault;
use fabric_objects::{Kind, Object, ObjectRef, Problem};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

pub use ipam_requests::{Allocation, IpamRequest};
pub use owner::{is_own, reference_to};
pub use refused::keeps_refused_prefix;
pub use statuses::unreadable;

use crate::index::Index;
use crate::placement::{Peers, PlannedGateways, PlannedServices, SecretGaps};

/// All that the controller wants to be so.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Published {
    /// Weft's own objects, without status.
    pub objects: BTreeMap<ObjectRef, Object>,
    /// Own objects that are there and should not be, and statuses of what is gone.
    pub deleted: BTreeSet<ObjectRef>,
    /// Objects of the user with the status they should have.
    pub statuses: BTreeMap<ObjectRef, Object>,
    /// Secrets to create a key pair for. Never deleted while their gateway exists: the peer has the
    /// public half.
    pub keys: BTreeMap<ObjectRef, KeyPair>,
    /// In Kubernetes, the gateways that are to run.
    pub gateways: PlannedGateways,
    pub secrets: SecretGaps,
    pub peers: Peers,
    /// In Kubernetes, IPs that request a Service.
    pub services: PlannedServices,
    /// A peering waits for acknowledgements of nodes.
    pub awaits_nodes: bool,
    /// Requests to ipam, in this order.
    pub ipam_requests: Vec<IpamRequest>,
    /// All problems, with the manifests and with their content. Sorted.
    pub problems: Vec<Problem>,
}

/// A key pair that is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyPair {
    pub peer: String,
    /// Owner in Kubernetes, deleted together with it.
    pub owner: Option<OwnerReference>,
}

/// State that the parts of the compiler share.
struct Compiler<'a> {
    index: &'a Index,
    now: Timestamp,
    out: Published,
    /// Own objects that stay as they are, because what should be in them is not known now.
    kept: BTreeSet<ObjectRef>,
    /// Objects of the user with which something is wrong: what was made for them stays.
    faulty: BTreeSet<ObjectRef>,
    /// By gateway, the objects with the keys that it requires.
    needed: BTreeMap<ObjectRef, Vec<ObjectRef>>,
}

/// `now` is the timestamp of conditions that change, and ends the wait for nodes that are gone.
pub fn compile(index: &Index, now: Timestamp) -> Published {
    let out = Published { problems: index.file_problems().to_vec(), ..Published::default() };
    let mut compiler = Compiler {
        index,
        now,
        out,
        kept: BTreeSet::new(),
        faulty: BTreeSet::new(),
        needed: BTreeMap::new(),
    };
    compiler.run();
    let mut out = compiler.out;
    out.problems.sort();
    out.problems.dedup();
    out
}

impl<'a> Compiler<'a> {
    fn run(&mut self) {
        let cluster = self.cluster();
        self.own_networks(&cluster);
        let mut peerings = self.peerings(&cluster);
        let gateways = self.gateways(&cluster, &peerings);
        self.peering_networks(&peerings);
        self.keep_replaced(&cluster, &peerings);
        self.return_prefixes(&peerings);
        self.own_addresses(&cluster, &gateways);
        let mappings = self.mappings(&cluster);
        for peering in &mut peerings {
            peering.gateway = gateways.iter().position(|g| peering.is_with(&g.peer));
        }
        self.gateway_configs(&cluster, &peerings, &gateways, &mappings);
        self.node_configs(&cluster, &peerings, &gateways, &mappings);
        self.request_from_ipam(&cluster);
        self.address_problems();
        self.unacknowledged(&cluster);
        self.configuration_statuses(&cluster, &peerings);
        if self.index.settings.kubernetes {
            self.placed_gateways(&gateways);
            self.out.peers = self.peers(&peerings, &gateways);
            self.services();
        } else {
            self.gateway_statuses(&cluster, &gateways);
        }
        self.node_paths(&peerings, &gateways);
        self.acceptance();
        self.delete();
    }

    fn problem(&mut self, object: &ObjectRef, field: &str, message: impl Into<String>) {
        let problem = Problem {
            source: String::new(),
            object: Some(object.clone()),
            field: Some(field.to_owned()).filter(|f| !f.is_empty()),
            message: message.into(),
        };
        // A problem that the store has reported already is there with its source.
        let is_same = |p: &Problem| Problem { source: String::new(), ..p.clone() } == problem;
        if !self.out.problems.iter().any(is_same) {
            self.out.problems.push(problem);
        }
    }

    fn fault(&mut self, object: &ObjectRef, fault: &Fault) {
        self.problem(object, &fault.field, fault.message.clone());
    }

    /// Reports the faults, and returns the value if there are none.
    fn accepted<T>(&mut self, object: &ObjectRef, checked: Result<T, Fault>) -> Option<T> {
        checked.map_err(|fault| self.fault(object, &fault)).ok()
    }

    fn want(&mut self, object: impl Into<Object>) {
        let object = object.into();
        self.out.objects.insert(object.reference(), object);
    }

    /// Leaves an own object as it is, if it is there.
    fn keep(&mut self, reference: ObjectRef) {
        self.kept.insert(reference);
    }

    /// Deletes weft's own objects that are no longer desired.
    fn delete(&mut self) {
        let index = self.index;
        for kind in [Kind::Network, Kind::Ip] {
            for (reference, object) in index.of_kind(kind) {
                let Some(owner) = owner::of(object) else { continue };
                if !self.may_still_be(&owner) {
                    self.delete_unless_wanted(reference);
                }
            }
        }
        for (reference, _) in index.of_kind(Kind::GatewayConfig) {
            if !self.gateway_may_be_unread(reference) {
                self.delete_unless_wanted(reference);
            }
        }
        for (reference, _) in index.of_kind(Kind::NodeConfig) {
            let node = ObjectRef::new(Kind::Node, "", &reference.name);
            if !self.may_still_be(&node) {
                self.delete_unless_wanted(reference);
            }
        }
        for kind in [Kind::FabricRecord, Kind::GatewayRecord] {
            for (reference, _) in index.of_kind(kind) {
                self.delete_unless_wanted(reference);
            }
        }
        self.delete_connections();
    }

    /// Deletes the Connections of removed gateways, which would stay `Connected` for ever.
    fn delete_connections(&mut self) {
        for (reference, connection) in
            self.index.all::<fabric_api::networking::Connection>(Kind::Connection)
        {
            let gateway = &connection.spec.gateway_ref;
            let name = gateway.name.as_deref().unwrap_or_default();
            let namespace = reference.namespace.as_deref().unwrap_or_default();
            let config = ObjectRef::new(Kind::GatewayConfig, namespace, name);
            let stands = self.out.objects.contains_key(&config)
                || (self.index.get(&config).is_some() && !self.out.deleted.contains(&config));
            if !stands {
                self.out.deleted.insert(reference.clone());
            }
        }
    }

    fn delete_unless_wanted(&mut self, reference: &ObjectRef) {
        if !self.out.objects.contains_key(reference) && !self.kept.contains(reference) {
            self.out.deleted.insert(reference.clone());
        }
    }

    /// True if the owner is out of sight, or wrong, but not known to be gone.
    fn may_still_be(&self, owner: &ObjectRef) -> bool {
        self.faulty.contains(owner) || self.index.may_be_unread(owner)
    }

    fn gateway_may_be_unread(&self, config: &ObjectRef) -> bool {
        let of = |kind| ObjectRef { kind, ..config.clone() };
        self.index.may_be_unread(&of(Kind::GatewayServer))
            && self.index.may_be_unread(&of(Kind::GatewayClient))
    }
}
