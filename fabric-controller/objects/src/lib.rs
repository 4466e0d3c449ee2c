//! Resources that weft reads or writes, independent of the store that holds them.
//!
//! Metadata, spec and status of a resource are one [`Object`], from however many files. Decoding is
//! strict: [`decode`] reports a field that the kind does not have, and [`expectation`] phrases the
//! remedy in the terms of manifests. A fault is a [`Problem`]; changes are [`Event`]s.

pub mod decode;
pub mod expectation;
mod object;
mod problem;

use std::collections::BTreeMap;

pub use object::{Kind, Object, ObjectRef};
pub use problem::Problem;

/// Change of a resource, as a watch reports it.
#[derive(Clone, Debug)]
pub enum Event {
    /// An object that is new, or whose spec, metadata or status is.
    Applied(Object),
    Deleted(ObjectRef),
    /// All present problems of the manifests, or of what the API server holds; replaces the list
    /// reported before.
    Problems(Vec<Problem>),
    /// All that was there when the watch began has been reported.
    Synced,
}

/// Content of a store at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub objects: BTreeMap<ObjectRef, Object>,
    /// Problems of the manifests, or of what the API server holds.
    pub problems: Vec<Problem>,
}
