//! Secrets with gateways' key pairs in Kubernetes: references to them, and what they lack.

use fabric_api::networking::secret_name;
use fabric_api::{PublicKey, labels};
use fabric_index::Index;
use fabric_index::owner::reference_to;
use fabric_index::placement::{SecretGap, SecretGaps};
use fabric_model::{Gateway, Problems};
use fabric_objects::{Object, ObjectRef};
use k8s_openapi::api::core::v1::{ObjectReference, Secret};

/// Gaps in the Secrets of all gateways.
pub(super) fn gaps(index: &Index, gateways: &[Gateway<'_>], problems: &mut Problems) -> SecretGaps {
    gateways.iter().filter_map(|gateway| gap(index, gateway, problems)).collect()
}

/// One that the user named may lack labels or the public half, one that was made for a gateway of
/// the same name the owner that is there now. One of another peer's is none of this.
fn gap(
    index: &Index,
    gateway: &Gateway<'_>,
    problems: &mut Problems,
) -> Option<(ObjectRef, SecretGap)> {
    let reference = gateway.key_pair();
    let object = index.get(&reference)?;
    let orphan = is_orphan(object, gateway);
    let labelled = object.label(labels::REMOTE_CLUSTER_ID);
    if let Some(other) = labelled.filter(|id| *id != gateway.peer.as_str() && !orphan) {
        let message = format!("{reference} is labelled as that of the peer {other}");
        problems.add(&gateway.reference, "spec.secretRef.name", message);
        return None;
    }
    let is_found = labelled == Some(gateway.peer.as_str())
        && object.label(labels::GATEWAY_RESOURCE) == Some("true");
    let gap = SecretGap {
        uid: object.uid().to_owned(),
        peer: (!is_found).then(|| gateway.peer.clone()),
        owner: index.get(&gateway.reference).filter(|_| orphan).map(reference_to),
        public_key: index
            .own_key(&reference)
            .and_then(Result::ok)
            .filter(|_| public_half(object).is_none()),
    };
    let is_gap = gap.peer.is_some() || gap.owner.is_some() || gap.public_key.is_some();
    is_gap.then_some((reference, gap))
}

/// Reference to a Secret that holds what liqoctl reads from it, and stays: one whose gateway is
/// gone does not.
pub(super) fn reference(index: &Index, gateway: &Gateway<'_>) -> Option<ObjectReference> {
    let secret = gateway.key_pair();
    let object = index.get(&secret).filter(|object| !is_orphan(object, gateway))?;
    let public = index.own_key(&secret).and_then(Result::ok);
    public.filter(|public| public_half(object) == Some(*public))?;
    Some(ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Secret".to_owned()),
        namespace: secret.namespace,
        name: Some(secret.name),
        ..ObjectReference::default()
    })
}

/// True if weft made it for another gateway, of the same name, that is gone.
fn is_orphan(secret: &Object, gateway: &Gateway<'_>) -> bool {
    let is_ours = secret_name(gateway.secret_ref()).is_none()
        && secret.label(labels::MANAGED_BY) == Some(labels::WEFT);
    let mut owners = secret.metadata().owner_references.iter().flatten();
    is_ours && !owners.any(|owner| owner.uid == gateway.uid)
}

fn public_half(secret: &Object) -> Option<PublicKey> {
    let secret: &Secret = secret.try_into().ok()?;
    let bytes = &secret.data.as_ref()?.get("publicKey")?.0;
    PublicKey::from_bytes(bytes).ok()
}
