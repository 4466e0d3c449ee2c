//! Kinds of Liqo's own networking that weft has no use for, and what Liqo made of them. Pure.

use fabric_api::labels;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ApiResource, GroupVersionKind};

/// Field manager of Liqo's controller-manager.
const MANAGER: &str = "liqo-controller-manager";
/// Annotation of what Helm installs, with the namespace of the release.
const RELEASE_NAMESPACE: &str = "meta.helm.sh/release-namespace";

pub(super) const FIREWALL: [&str; 2] = ["FirewallConfiguration", "firewallconfigurations"];
pub(super) const ROUTE: [&str; 2] = ["RouteConfiguration", "routeconfigurations"];

/// Names a kind of Liqo's networking in requests.
pub(super) fn resource([kind, plural]: [&str; 2]) -> ApiResource {
    let gvk = GroupVersionKind::gvk(labels::NETWORKING_GROUP, "v1beta1", kind);
    ApiResource::from_gvk_with_plural(&gvk, plural)
}

/// True if Liqo's controller-manager has written the object itself, not only its status.
pub(super) fn is_liqos(metadata: &ObjectMeta) -> bool {
    metadata
        .managed_fields
        .iter()
        .flatten()
        .any(|entry| entry.manager.as_deref() == Some(MANAGER) && entry.subresource.is_none())
}

/// True if it is part of a Helm release in that namespace, such as Liqo's.
pub(super) fn is_of_release(metadata: &ObjectMeta, namespace: &str) -> bool {
    let annotations = metadata.annotations.iter().flatten();
    annotations.into_iter().any(|(key, value)| key == RELEASE_NAMESPACE && value == namespace)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn metadata(entry: Value) -> ObjectMeta {
        serde_json::from_value(json!({"managedFields": [entry]})).unwrap()
    }

    #[test]
    fn finalizer_and_status_of_liqo_make_no_object_liqos() {
        assert!(is_liqos(&metadata(json!({"manager": MANAGER, "operation": "Update"}))));
        assert!(!is_liqos(&metadata(json!({"manager": "kubectl-create"}))));
        assert!(!is_liqos(&metadata(json!({"manager": "fabric", "operation": "Update"}))));
        let status = json!({"manager": MANAGER, "subresource": "status"});
        assert!(!is_liqos(&metadata(status)));
    }
}
