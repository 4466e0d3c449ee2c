//! Objects of the cluster or of users that Liqo's uninstallation deletes, although weft needs them, too:
//! the cluster's ID, and every Network and IP.
//!
//! Liqo's chart and weft's name the Network of a pod CIDR by the value that has it: of two of the same prefix
//! weft's goes, or `liqoctl` would list the prefix twice.
//!
//! Deleted objects are put back once Liqo's controller-manager is gone: its uninstaller waits until there is no
//! Network and no IP. What was there is in memory only, and `helm upgrade` of weft makes the cluster's own
//! ones in any case.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::ApiError;
use fabric_kube_client::requests::Requests;
use fabric_runtime::{Heartbeat, chain};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, DynamicObject};
use kube::{Client, ResourceExt as _};
use tokio::time::Instant;

use super::live::{Key, Objects, Watched};

const KINDS: [Watched; 3] = [Watched::ClusterId, Watched::Network, Watched::Ip];
/// Field manager, another one than that of fields that are removed when weft is uninstalled.
const MANAGER: &str = "weft-restore";
/// Time for which a missing object is remembered: the deletion may be seen before its reason is.
const RECENT: Duration = Duration::from_secs(10);
/// Retry interval of objects that could not be put back.
const RETRY: Duration = Duration::from_secs(2);
/// Chart of Liqo, as value of [`labels::PART_OF`].
const LIQO: &str = "liqo";
const HELMS: &str = "meta.helm.sh/";
/// Prefix of the label with the version of a chart.
const CHART: &str = "helm.sh/";
/// Has helm leave an object that is in no later version of its release.
const KEEP: (&str, &str) = ("helm.sh/resource-policy", "keep");

pub(super) struct SharedObjects {
    requests: Requests,
    known: BTreeMap<Key, Known>,
    due: Option<Instant>,
}

struct Known {
    object: DynamicObject,
    missing_since: Option<Instant>,
}

impl SharedObjects {
    pub(super) fn new(client: Client) -> Self {
        Self { requests: Requests::new(client, MANAGER), known: BTreeMap::new(), due: None }
    }

    /// Time of the next try, if nothing happens before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.due = None;
    }

    /// Remembers what is there while Liqo runs.
    pub(super) fn record(&mut self, objects: &Objects, now: Instant) {
        record(&mut self.known, objects, now);
    }

    /// Removes Networks of weft's chart that Liqo's has, too. Failures are retried.
    pub(super) async fn remove_duplicates(&mut self, objects: &Objects, heartbeat: &Heartbeat) {
        self.due = None;
        for (key, uid) in duplicates(objects) {
            heartbeat.beat();
            let how = DeleteParams::background();
            match self.requests.delete(&key.target(), uid, how).await {
                Ok(is_done) => {
                    tracing::info!(%key, is_done, "removed: Liqo has a Network of this prefix");
                }
                Err(error) => {
                    tracing::warn!(%key, error = chain(&error), "cannot be removed; tried again");
                    self.due = Some(Instant::now() + RETRY);
                }
            }
        }
    }

    /// Makes what is missing. Failures are retried.
    pub(super) async fn restore(&mut self, objects: &Objects, heartbeat: &Heartbeat) {
        self.due = None;
        for (key, known) in self.known.iter().filter(|(key, _)| objects.get(key).is_none()) {
            heartbeat.beat();
            let made = self.requests.create(&key.target(), &restored(&known.object)).await;
            match made {
                Ok(_) => tracing::info!(%key, "put back: Liqo's uninstallation has deleted it"),
                // Its watch has not reported it yet.
                Err(ApiError::Refused { code: 409, .. }) => {}
                Err(error) => {
                    tracing::warn!(%key, error = chain(&error), "cannot be put back; tried again");
                    self.due = Some(Instant::now() + RETRY);
                }
            }
        }
    }
}

fn record(known: &mut BTreeMap<Key, Known>, objects: &Objects, now: Instant) {
    for of in KINDS {
        for (key, object) in objects.all(of).filter(|(_, object)| is_kept(object)) {
            known.insert(key.clone(), Known { object: object.clone(), missing_since: None });
        }
    }
    // They are about to be removed, for good.
    for (key, _) in duplicates(objects) {
        known.remove(&key);
    }
    known.retain(|key, known| {
        let is_there = objects.get(key).is_some_and(is_kept);
        is_there || now < *known.missing_since.get_or_insert(now) + RECENT
    });
}

/// Networks of weft's chart with their uids, where Liqo's has made one of the same type and prefix, which is
/// granted already.
fn duplicates(objects: &Objects) -> Vec<(Key, Option<String>)> {
    let networks = |chart: &'static str| {
        let of_chart = move |network: &DynamicObject| {
            network.labels().get(labels::PART_OF).is_some_and(|of| of == chart)
                && network.labels().contains_key(labels::NETWORK_TYPE)
                && network.metadata.deletion_timestamp.is_none()
        };
        objects.all(Watched::Network).filter(move |(_, network)| of_chart(network))
    };
    let is_same = |(own, theirs): (&DynamicObject, &DynamicObject)| {
        let (cidr, kind) = (&theirs.data["spec"]["cidr"], labels::NETWORK_TYPE);
        own.namespace() == theirs.namespace()
            && own.labels().get(kind) == theirs.labels().get(kind)
            && own.data["spec"]["cidr"] == *cidr
            && theirs.data["status"]["cidr"] == *cidr
    };
    let own = networks(labels::WEFT);
    let twice = own.filter(|(_, own)| networks(LIQO).any(|(_, theirs)| is_same((own, theirs))));
    twice.map(|(key, own)| (key.clone(), own.uid())).collect()
}

/// False for what weft makes by itself, Liqo for its own modules, and for what goes with its owner.
fn is_kept(object: &DynamicObject) -> bool {
    let labels = object.labels();
    let is_made = labels.get(labels::MANAGED_BY).is_some_and(|by| by == labels::WEFT)
        || labels.contains_key(labels::IP_TYPE);
    !is_made && object.owner_references().is_empty() && object.metadata.deletion_timestamp.is_none()
}

/// New object of the same content. What Liqo's chart had made belongs to weft from then on.
fn restored(object: &DynamicObject) -> DynamicObject {
    let mut labels = object.labels().clone();
    let mut annotations = object.annotations().clone();
    if labels.get(labels::PART_OF).is_some_and(|chart| chart == LIQO) {
        labels.insert(labels::PART_OF.to_owned(), labels::WEFT.to_owned());
        labels.remove(labels::MANAGED_BY);
        labels.retain(|key, _| !key.starts_with(CHART));
        annotations.retain(|key, _| !key.starts_with(HELMS));
        annotations.insert(KEEP.0.to_owned(), KEEP.1.to_owned());
    }
    let metadata = ObjectMeta {
        name: object.metadata.name.clone(),
        namespace: object.metadata.namespace.clone(),
        labels: Some(labels),
        annotations: Some(annotations),
        ..ObjectMeta::default()
    };
    let mut data = object.data.clone();
    if let Some(fields) = data.as_object_mut() {
        fields.remove("status");
    }
    DynamicObject { types: object.types.clone(), metadata, data }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(labels: Value, annotations: Value) -> DynamicObject {
        let metadata = json!({"name": "n", "namespace": "liqo", "uid": "u", "labels": labels,
            "resourceVersion": "7", "finalizers": ["f"], "annotations": annotations});
        serde_json::from_value(json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": metadata, "spec": {"cidr": "10.200.0.0/16"},
            "status": {"cidr": "10.200.0.0/16"}}))
        .unwrap()
    }

    fn of_liqo() -> DynamicObject {
        let labels = json!({"app.kubernetes.io/part-of": "liqo",
            "app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "liqo-1.2.0",
            "ipam.liqo.io/network-type": "pod-cidr"});
        object(labels, json!({"meta.helm.sh/release-name": "liqo", "liqo.io/preinstalled": "true"}))
    }

    #[test]
    fn object_of_liqos_chart_is_wefts_once_restored() {
        let restored = serde_json::to_value(restored(&of_liqo())).unwrap();
        assert_eq!(
            restored,
            json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
                "metadata": {"name": "n", "namespace": "liqo",
                    "labels": {"app.kubernetes.io/part-of": "weft",
                        "ipam.liqo.io/network-type": "pod-cidr"},
                    "annotations": {"helm.sh/resource-policy": "keep",
                        "liqo.io/preinstalled": "true"}},
                "spec": {"cidr": "10.200.0.0/16"}})
        );
    }

    #[test]
    fn network_that_liqos_chart_has_too_is_liqos() {
        let network = |name: &str, chart: &str, cidr: &str, granted: Value| {
            let mut network = of_liqo();
            network.metadata.name = Some(name.to_owned());
            network.metadata.uid = Some(format!("{name}-uid"));
            network.labels_mut().insert(labels::PART_OF.to_owned(), chart.to_owned());
            network.data = json!({"spec": {"cidr": cidr}, "status": {"cidr": granted}});
            network
        };
        let cidr = "10.200.0.0/16";
        let twice = |theirs: DynamicObject| {
            let mut objects = Objects::default();
            objects.put(Watched::Network, network("own", "weft", cidr, json!(cidr)));
            objects.put(Watched::Network, theirs);
            duplicates(&objects)
        };
        let own = Key::new(Watched::Network, "liqo", "own");
        let theirs = network("theirs", "liqo", cidr, json!(cidr));
        assert_eq!(twice(theirs.clone()), [(own.clone(), Some("own-uid".to_owned()))]);
        let (mut known, mut objects) = (BTreeMap::new(), Objects::default());
        objects.put(Watched::Network, network("own", "weft", cidr, json!(cidr)));
        record(&mut known, &objects, Instant::now());
        assert!(known.contains_key(&own));
        objects.put(Watched::Network, theirs.clone());
        record(&mut known, &objects, Instant::now());
        assert!(!known.contains_key(&own), "Liqo's uninstallation would put it back");
        for other in [
            network("theirs", "weft", cidr, json!(cidr)),
            network("theirs", "liqo", "10.201.0.0/16", json!("10.201.0.0/16")),
            network("theirs", "liqo", cidr, Value::Null),
            object(json!({"app.kubernetes.io/part-of": "liqo"}), json!({})),
        ] {
            assert_eq!(twice(other.clone()), [], "{other:?}");
        }
        let mut reserved = theirs;
        reserved.labels_mut().insert(labels::NETWORK_TYPE.to_owned(), "reserved".to_owned());
        assert_eq!(twice(reserved), []);
    }

    #[test]
    fn object_of_another_chart_stays_its_own() {
        let theirs = object(json!({"app.kubernetes.io/managed-by": "Helm"}), json!({"a": "b"}));
        let restored = restored(&theirs);
        assert_eq!(restored.labels(), theirs.labels());
        assert_eq!(restored.annotations(), theirs.annotations());
    }

    #[test]
    fn deleted_object_is_remembered_for_a_moment() {
        let (mut known, began) = (BTreeMap::new(), Instant::now());
        let mut objects = Objects::default();
        objects.put(Watched::Network, of_liqo());
        record(&mut known, &objects, began);
        let none = Objects::default();
        let later = began + Duration::from_secs(3600);
        record(&mut known, &none, later);
        record(&mut known, &none, later + RECENT / 2);
        assert_eq!(known.len(), 1, "Liqo's uninstallation may be about to be seen");
        record(&mut known, &none, later + RECENT);
        assert!(known.is_empty(), "its user has deleted it");
    }

    #[test]
    fn objects_that_programs_make_are_not_remembered() {
        let mut owned = of_liqo();
        owned.owner_references_mut().push(Default::default());
        let labelled = |key: &str, value: &str| object(json!({key: value}), json!({}));
        for made in [
            labelled("app.kubernetes.io/managed-by", "weft"),
            labelled("ipam.liqo.io/ip-type", "api-server"),
            owned,
        ] {
            assert!(!is_kept(&made), "{made:?}");
        }
        assert!(is_kept(&of_liqo()));
    }
}
