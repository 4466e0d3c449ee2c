//! Fields that weft has written into objects of others: those stay, without stale values.

use std::collections::BTreeSet;

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
                if part == Part::Status
                    && let Some(empty) = emptied(&object)
                {
                    let change = json!({"status": empty});
                    cluster.merge(&kind, &object, part, &change).await?;
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

/// Change of the status that removes what weft alone has, objects of which nothing would be left among that: given
/// up, one that Liqo has made would stay as `null`, which its definition refuses.
fn emptied(object: &impl Resource) -> Option<Value> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for entry in object.managed_fields() {
        let fields =
            entry.fields_v1.as_ref().and_then(|fields| fields.0.get("f:status")?.as_object());
        let is_ours = entry.manager.as_deref() == Some(ApiServer::MANAGER);
        if is_ours { ours.extend(fields) } else { theirs.extend(fields) }
    }
    removal(&ours, &theirs)
}

/// Merge patch that removes the fields of an object which are ours alone, or all of it (`null`) if no other
/// ones are left; none if there is nothing to remove. Fields as in `managedFields`.
fn removal(ours: &[&Map<String, Value>], theirs: &[&Map<String, Value>]) -> Option<Value> {
    let names = |of: &[&Map<String, Value>]| -> BTreeSet<String> {
        of.iter()
            .flat_map(|fields| fields.keys())
            .filter(|key| key.starts_with("f:"))
            .cloned()
            .collect()
    };
    let (own, of_others) = (names(ours), names(theirs));
    let mut is_left = of_others.difference(&own).next().is_some();
    let mut removed = Map::new();
    for key in own {
        let [ours, theirs] = [ours, theirs].map(|of| {
            of.iter().filter_map(|fields| fields.get(&key)?.as_object()).collect::<Vec<_>>()
        });
        let change = if names(&ours).is_empty() {
            theirs.is_empty().then_some(Value::Null)
        } else {
            removal(&ours, &theirs)
        };
        is_left |= change.as_ref().is_none_or(|change| !change.is_null());
        removed.extend(change.map(|change| (key.trim_start_matches("f:").to_owned(), change)));
    }
    if !is_left {
        return Some(Value::Null);
    }
    (!removed.is_empty()).then(|| removed.into())
}

/// Patch without fields: it gives up all that weft applied. The uid keeps this from making one that
/// has just gone.
fn nothing_of(kind: &ApiResource, object: &impl Resource) -> Value {
    let metadata = json!({
        "name": object.name_any(), "namespace": object.namespace(), "uid": object.uid(),
    });
    json!({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(ours: &Value, theirs: &[Value]) -> Option<Value> {
        let theirs: Vec<_> = theirs.iter().filter_map(Value::as_object).collect();
        removal(&[ours.as_object().unwrap()], &theirs)
    }

    #[test]
    fn objects_of_which_nothing_is_left_are_removed() {
        let ours = json!({"f:secretRef": {}, "f:endpoint": {"f:port": {}, "f:addresses": {}}});
        let all = Some(Value::Null);
        assert_eq!(removed(&ours, &[]), all);
        assert_eq!(removed(&ours, &[json!({})]), all, "an empty status of theirs");
        assert_eq!(removed(&ours, &[json!({".": {}, "f:endpoint": {}})]), all, "an endpoint, too");
        assert_eq!(removed(&ours, &[json!({"f:endpoint": {".": {}}})]), all);
    }

    #[test]
    fn fields_of_others_stay() {
        let ours = json!({"f:secretRef": {}, "f:endpoint": {"f:port": {}, "f:addresses": {}}});
        let without = |theirs: Value| removed(&ours, &[theirs]);
        let endpoint = json!({"secretRef": null, "endpoint": null});
        assert_eq!(without(json!({"f:serverRef": {}})), Some(endpoint));
        let port = json!({"secretRef": null, "endpoint": {"addresses": null}});
        assert_eq!(without(json!({"f:endpoint": {"f:port": {}}})), Some(port));
        let other = json!({"secretRef": null, "endpoint": {"addresses": null, "port": null}});
        assert_eq!(without(json!({"f:endpoint": {"f:node": {}}})), Some(other));
        let shared = json!({"endpoint": null});
        assert_eq!(without(json!({"f:secretRef": {}})), Some(shared));
        let list = json!({"f:conditions": {"k:{\"type\":\"Ready\"}": {"f:status": {}}}});
        assert_eq!(
            removed(&list, std::slice::from_ref(&list)),
            None,
            "elements are given up one by one"
        );
    }
}
