//! Objects of the user that are faulty or cannot be read: what was made for them stays.

use std::collections::BTreeSet;

use fabric_index::Index;
use fabric_model::Model;
use fabric_objects::{Kind, ObjectRef};

pub(super) struct Uncertain<'a> {
    index: &'a Index,
    faulty: BTreeSet<&'a ObjectRef>,
}

impl<'a> Uncertain<'a> {
    pub(super) fn new(index: &'a Index, model: &'a Model<'_>) -> Self {
        let Model { cluster, peerings, gateways, .. } = model;
        let peerings = peerings.iter().filter(|peering| peering.fault.is_some());
        let peerings = peerings.map(|peering| &peering.reference);
        let faulty = cluster.faulty.iter().chain(&gateways.faulty).chain(peerings).collect();
        Self { index, faulty }
    }

    /// True if all objects were read and are right.
    pub(super) fn is_empty(&self) -> bool {
        self.faulty.is_empty() && self.index.is_whole()
    }

    /// True if the owner is out of sight, or wrong, but not known to be gone.
    pub(super) fn may_still_be(&self, owner: &ObjectRef) -> bool {
        self.faulty.contains(owner) || self.index.may_be_unread(owner)
    }

    /// The same for a node.
    pub(super) fn node_may_still_be(&self, name: &str) -> bool {
        self.may_still_be(&ObjectRef::new(Kind::Node, "", name))
    }

    /// True if the gateway of a config may be in a file that could not be read.
    pub(super) fn gateway_may_be_unread(&self, config: &ObjectRef) -> bool {
        let of = |kind| ObjectRef { kind, ..config.clone() };
        self.index.may_be_unread(&of(Kind::GatewayServer))
            && self.index.may_be_unread(&of(Kind::GatewayClient))
    }
}
