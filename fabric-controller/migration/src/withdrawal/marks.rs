//! Fields that weft has written into objects of others: those stay, without stale values.

use fabric_api::ipam::{IP, Network};
use fabric_api::labels;
use fabric_api::networking::{Configuration, GatewayClient, GatewayServer};
use fabric_kube_client::ApiServer;
use fabric_kube_client::requests::{Part, Target};
use kube::api::ApiResource;
use kube::{Resource, ResourceExt as _};
use serde_json::{Map, Value, json};

use super::cluster::{Cluster, kind};
use super::{Prefixes, WithdrawError};

pub(super) async fn remove(cluster: &Cluster, prefixes: Prefixes) -> Result<(), WithdrawError> {
    // The chart's own Networks go in a moment; if they do not, their prefixes shall not change.
    // Weft's own have gone, or are held by others until they may.
    let (part_of, weft) = (labels::PART_OF, labels::WEFT);
    let labels = format!("{part_of}!={weft},{}!={weft}", labels::MANAGED_BY);
    let gateways = [kind::<GatewayServer>(), kind::<GatewayClient>()];
    let granted = [kind::<Configuration>(), kind::<IP>(), kind::<Network>()];
    let granted = granted.into_iter().filter(|_| prefixes == Prefixes::Returned);
    for kind in gateways.into_iter().chain(granted) {
        for object in cluster.list_metadata(&kind, &labels).await? {
            // A Network that an earlier withdrawal has kept has other fields that weft applied: it is nobody's.
            let is_status_only = kind.group == Network::group(&());
            for part in parts(&object).filter(|part| *part == Part::Status || !is_status_only) {
                let nested = nested(&object);
                if part == Part::Status && !nested.is_empty() {
                    let change = json!({"status": nested});
                    cluster.merge_part(&kind, &object, part, &change).await?;
                }
                let nothing = nothing_of(&kind, &object);
                cluster.apply(&kind, &object, part, &nothing).await?;
                tracing::info!("cleared {}", Target::of(&kind, object.meta()));
            }
        }
    }
    Ok(())
}

/// Parts that weft has written: the status, or the rest.
fn parts(object: &impl Resource) -> impl Iterator<Item = Part> {
    let fields = object.managed_fields().iter();
    let ours = fields.filter(|entry| entry.manager.as_deref() == Some(ApiServer::MANAGER));
    ours.map(|entry| match entry.subresource.as_deref() {
        Some("status") => Part::Status,
        Some(_) | None => Part::AllButStatus,
    })
}

/// Objects in the status that weft has applied fields of, each with `null`, which removes it. One that Liqo has
/// made would stay without fields, as `null`, which its definition refuses.
fn nested(object: &impl Resource) -> Map<String, Value> {
    let ours = object.managed_fields().iter().filter(|entry| {
        entry.manager.as_deref() == Some(ApiServer::MANAGER)
            && entry.subresource.as_deref() == Some("status")
    });
    let fields = ours.filter_map(|entry| entry.fields_v1.as_ref()?.0.get("f:status")?.as_object());
    let is_object = |parts: &Value| {
        parts.as_object().is_some_and(|parts| parts.keys().any(|key| key.starts_with("f:")))
    };
    let nested = fields.flatten().filter(|(_, parts)| is_object(parts));
    nested
        .filter_map(|(name, _)| Some((name.strip_prefix("f:")?.to_owned(), Value::Null)))
        .collect()
}

/// Patch without fields: it gives up all that weft applied. The uid keeps this from making one that
/// has just gone.
fn nothing_of(kind: &ApiResource, object: &impl Resource) -> Value {
    let metadata = json!({
        "name": object.name_any(), "namespace": object.namespace(), "uid": object.uid(),
    });
    json!({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata})
}
