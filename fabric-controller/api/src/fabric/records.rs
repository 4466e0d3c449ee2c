//! Facts that several readers share, each in an object of its own: one of the cluster, which names
//! the version of all, and any number of others.

use std::collections::BTreeMap;

use kube::Resource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Kind of shared facts.
pub trait Record: Resource {
    /// Name of the record of the cluster.
    const CLUSTER: &str = "cluster";

    /// Digest of the other records, in the record of the cluster only.
    fn digest(&self) -> Option<&str>;

    /// True for a record that counts in the digest.
    fn is_digested(&self) -> bool;

    /// The version that the cluster's record stands for.
    fn version(&self) -> Option<RecordVersion> {
        self.digest()?;
        let uid = self.meta().uid.clone()?;
        Some(RecordVersion { uid, generation: self.meta().generation? })
    }
}

/// Identifies a version of all records of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecordVersion {
    /// UID of the record named cluster; generations count within it.
    pub uid: String,
    /// Its metadata.generation.
    pub generation: i64,
}

impl RecordVersion {
    /// Returns true if this is the other version, or one after it.
    pub fn includes(&self, other: &Self) -> bool {
        self.uid == other.uid && self.generation >= other.generation
    }
}

/// The records that a reader has, by name.
#[derive(Clone, Debug)]
pub struct Records<R>(BTreeMap<String, R>);

impl<R> Default for Records<R> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<R: Record> Records<R> {
    /// Takes a record in, unless a newer version of it is there.
    pub fn insert(&mut self, record: R) {
        let name = record.meta().name.clone().unwrap_or_default();
        let is_late = |known: &R| {
            known.meta().uid == record.meta().uid
                && known.meta().generation > record.meta().generation
        };
        if !self.0.get(&name).is_some_and(is_late) {
            self.0.insert(name, record);
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Newest version of which all records are there; `None` while some are missing or others are
    /// there, too.
    pub fn version(&self) -> Option<RecordVersion> {
        version(self.0.values())
    }

    /// The cluster's record and all others, if these are a [`Self::version`].
    pub(super) fn whole(&self) -> Option<(&R, impl Iterator<Item = &R>)> {
        self.version()?;
        Some((self.0.get(R::CLUSTER)?, self.0.values()))
    }
}

impl<R: Record> FromIterator<R> for Records<R> {
    fn from_iter<T: IntoIterator<Item = R>>(all: T) -> Self {
        let mut records = Self::default();
        all.into_iter().for_each(|record| records.insert(record));
        records
    }
}

/// Version of which these are all records, in the order of their names; `None` if there is none.
pub fn version<'a, R: Record + 'a>(
    records: impl IntoIterator<Item = &'a R> + Clone,
) -> Option<RecordVersion> {
    let named = |record: &&R| record.meta().name.as_deref() == Some(R::CLUSTER);
    let cluster = records.clone().into_iter().find(named)?;
    cluster.version().filter(|_| cluster.digest() == Some(&digest(records)))
}

/// Digest of the digested ones among these records, which come in the order of their names. It stands
/// for their contents: for one uid and generation there is but one.
pub fn digest<'a, R: Record + 'a>(records: impl IntoIterator<Item = &'a R>) -> String {
    let mut digest = Sha256::new();
    for record in records.into_iter().filter(|record| record.is_digested()) {
        let metadata = record.meta();
        let uid = metadata.uid.as_deref().unwrap_or_default();
        let generation = metadata.generation.unwrap_or_default().to_string();
        let name = metadata.name.as_deref().unwrap_or_default();
        for part in [name, " ", uid, " ", &generation, "\n"] {
            digest.update(part);
        }
    }
    digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}
