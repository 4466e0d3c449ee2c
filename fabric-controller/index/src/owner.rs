//! Owners of the objects that weft made.

use fabric_api::labels;
use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::index::Index;

/// Annotation on every Network and IP of weft's own; what has none is the user's.
pub const ANNOTATION: &str = "fabric.weft.dev/owner";

/// True if weft made it for the sake of another.
pub fn is_own(object: &Object) -> bool {
    object.metadata().annotations.as_ref().is_some_and(|all| all.contains_key(ANNOTATION))
}

/// The owner of a Network or an IP, if weft made it.
pub fn of(object: &Object) -> Option<ObjectRef> {
    let text = object.metadata().annotations.as_ref()?.get(ANNOTATION)?;
    let (kind, name) = text.split_once(' ')?;
    let kind = Kind::ALL.into_iter().find(|k| k.as_str() == kind)?;
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    Some(ObjectRef::new(kind, namespace, name))
}

/// Marks an object as made for another.
pub fn set(object: &mut Object, owner: &ObjectRef) {
    let annotations = object.metadata_mut().annotations.get_or_insert_default();
    annotations.insert(ANNOTATION.to_owned(), owner.to_string());
}

/// Owner reference by which Kubernetes removes what is owned together with its owner, whether weft
/// still runs or not. It does not hold up the owner's deletion: that would take another right.
pub fn reference_to(owner: &Object) -> OwnerReference {
    OwnerReference {
        api_version: owner.kind().api_version().to_owned(),
        kind: owner.kind().as_str().to_owned(),
        name: owner.name().to_owned(),
        uid: owner.uid().to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// Owner with which Kubernetes removes an object of that namespace. Objects of a node leave
/// in an order of their own, and those of the cluster stay.
pub fn references(
    index: &Index,
    owner: &ObjectRef,
    namespace: Option<&str>,
) -> Option<Vec<OwnerReference>> {
    let of_a_peering =
        matches!(owner.kind, Kind::Configuration | Kind::GatewayServer | Kind::GatewayClient);
    let near = of_a_peering && owner.namespace.as_deref() == namespace;
    let object = index.get(owner).filter(|object| !object.uid().is_empty())?;
    (index.settings.kubernetes && near).then(|| vec![reference_to(object)])
}

/// True for the Network that keeps the prefix of a peering that is gone from others.
pub fn keeps_refused_prefix(object: &Object) -> bool {
    is_own(object)
        && object.label(labels::NETWORK_TYPE) == Some("reserved")
        && object.label(labels::REMOTE_CLUSTER_ID).is_some()
}
