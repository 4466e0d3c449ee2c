//! Digests in the records of the cluster, by which readers detect that they have all of a version.

use std::sync::Arc;

use fabric_api::fabric::{FabricRecord, GatewayRecord, Record, digest};
use fabric_index::Index;
use fabric_objects::{Kind, Object, ObjectRef};

use super::Published;

impl Published {
    /// Computes the digests from what is stored. To be called anew once all other records are written,
    /// whose generations they stand for.
    pub fn seal(&mut self, index: &Index) {
        let digest =
            stored::<FabricRecord>(index, Kind::FabricRecord, |of| self.objects.contains_key(of));
        let cluster = ObjectRef::new(Kind::FabricRecord, "", FabricRecord::CLUSTER);
        if let Some(Object::FabricRecord(record)) = self.objects.get_mut(&cluster)
            && let Some(cluster) = &mut Arc::make_mut(record).spec.cluster
        {
            cluster.digest = digest;
        }
        let digest =
            stored::<GatewayRecord>(index, Kind::GatewayRecord, |of| self.objects.contains_key(of));
        let cluster = ObjectRef::new(Kind::GatewayRecord, "", GatewayRecord::CLUSTER);
        if let Some(Object::GatewayRecord(record)) = self.objects.get_mut(&cluster)
            && let Some(cluster) = &mut Arc::make_mut(record).spec.cluster
        {
            cluster.digest = digest;
        }
    }
}

/// Digest of the stored records that stay.
fn stored<'a, R: Record + 'a>(
    index: &'a Index,
    kind: Kind,
    stays: impl Fn(&ObjectRef) -> bool,
) -> String
where
    &'a R: TryFrom<&'a Object>,
{
    let all = index.all::<R>(kind).filter(|(reference, _)| stays(reference));
    digest(all.map(|(_, record)| record))
}
