//! Objects of weft's own as they should be.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::GatewayConfig;
use fabric_index::{Index, owner};
use fabric_model::Gateway;
use fabric_objects::{Object, ObjectRef};

/// Own objects that one stage makes.
#[derive(Debug, Default)]
pub(super) struct Desired {
    pub(super) objects: BTreeMap<ObjectRef, Object>,
    /// Objects that stay as they are, because what should be in them is not known now.
    pub(super) kept: BTreeSet<ObjectRef>,
}

impl Desired {
    pub(super) fn want(&mut self, object: impl Into<Object>) {
        let object = object.into();
        self.objects.insert(object.reference(), object);
    }

    /// Adds an object for the sake of another.
    pub(super) fn want_owned(&mut self, index: &Index, object: impl Into<Object>, of: &ObjectRef) {
        let mut object = object.into();
        owner::set(&mut object, of);
        object.metadata_mut().owner_references = owner::references(index, of, object.namespace());
        self.want(object);
    }

    /// Leaves an object as it is, if it is there.
    pub(super) fn keep(&mut self, reference: ObjectRef) {
        self.kept.insert(reference);
    }

    pub(super) fn keep_all<'o>(
        &mut self,
        objects: impl Iterator<Item = (&'o ObjectRef, &'o Object)>,
    ) {
        self.kept.extend(objects.map(|(reference, _)| reference.clone()));
    }

    pub(super) fn stays(&self, reference: &ObjectRef) -> bool {
        self.objects.contains_key(reference) || self.kept.contains(reference)
    }

    /// Config that is or stays published for a gateway.
    pub(super) fn config_of<'a>(
        &'a self,
        index: &'a Index,
        gateway: &Gateway<'_>,
    ) -> Option<&'a GatewayConfig> {
        let reference = gateway.config();
        match self.objects.get(&reference) {
            Some(object) => object.try_into().ok(),
            None => index.typed(&reference).filter(|_| self.kept.contains(&reference)),
        }
    }
}

/// Both together.
impl std::ops::AddAssign for Desired {
    fn add_assign(&mut self, other: Self) {
        self.objects.extend(other.objects);
        self.kept.extend(other.kept);
    }
}
