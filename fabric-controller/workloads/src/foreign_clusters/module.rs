//! Desired content of a ForeignCluster. Pure.

use fabric_api::{ClusterId, labels};
use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use fabric_index::placement::Plan;
use fabric_index::placement::{Peer, PeerCondition};

/// The parts of a peering that Liqo's other modules report.
const OTHERS: [&str; 2] = ["authentication", "offloading"];

/// Change to make to one.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    Remove,
    /// The status with its modules.
    Write(Value),
}

pub(super) fn step(object: &DynamicObject, plan: &Plan, now: Timestamp) -> Option<Step> {
    let peer = peer_of(object).parse().ok().and_then(|id: ClusterId| plan.peers.get(&id));
    match peer {
        // It may only be out of sight.
        None if !plan.whole => None,
        None if is_of_no_use(object) => Some(Step::Remove),
        peer => modules(object, peer, now).map(Step::Write),
    }
}

/// The cluster that it is about.
pub(crate) fn peer_of(object: &DynamicObject) -> String {
    let label = object.labels().get(labels::REMOTE_CLUSTER_ID).map(String::as_str);
    let id = label.or_else(|| object.data["spec"]["clusterID"].as_str());
    id.map_or_else(|| object.name_any(), str::to_owned)
}

/// True if weft made it, and no other module is enabled in it.
fn is_of_no_use(object: &DynamicObject) -> bool {
    let ours = object.labels().get(labels::MANAGED_BY).is_some_and(|by| by == labels::WEFT);
    let modules = &object.data["status"]["modules"];
    ours && OTHERS.iter().all(|other| modules[other]["enabled"] != true)
}

/// Desired modules, if they differ. There are either none or all; of the others, those that are
/// there stay as they are.
fn modules(object: &DynamicObject, want: Option<&Peer>, now: Timestamp) -> Option<Value> {
    let have = &object.data["status"]["modules"];
    let mut modules = json!({"networking": module(&have["networking"], want, now)?});
    for other in OTHERS.into_iter().filter(|other| have[other].is_null()) {
        modules[other] = json!({"enabled": false});
    }
    Some(modules)
}

/// Desired part about networking, if it differs. Conditions of other types are not weft's.
fn module(have: &Value, want: Option<&Peer>, now: Timestamp) -> Option<Value> {
    let before = have["conditions"].as_array().cloned().unwrap_or_default();
    let of_type = |type_: &str| before.iter().find(|condition| condition["type"] == type_);
    let is_ours = |condition: &Value| {
        condition["type"].as_str().is_some_and(|type_| type_.starts_with("Network"))
    };
    let mut conditions: Vec<Value> =
        before.iter().filter(|condition| !is_ours(condition)).cloned().collect();
    let wanted = want.map(|peer| peer.conditions.iter());
    for PeerCondition { type_, status, reason, message } in wanted.into_iter().flatten() {
        let same = of_type(type_).filter(|condition| condition["status"] == *status);
        let since = same.map(|condition| condition["lastTransitionTime"].clone());
        conditions.push(json!({
            "type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": since.unwrap_or_else(|| json!(now.strftime("%FT%TZ").to_string())),
        }));
    }
    let enabled = want.is_some_and(|peer| peer.enabled);
    let reported = have["enabled"].as_bool();
    // For a peer that is none of weft's, an absent value equals false.
    let same_enabled = reported == Some(enabled) || (want.is_none() && reported.is_none());
    let same = same_enabled && is_same(&before, &conditions);
    (!same).then(|| json!({"enabled": enabled, "conditions": conditions}))
}

/// Equality in any order.
fn is_same(one: &[Value], other: &[Value]) -> bool {
    one.len() == other.len() && one.iter().all(|condition| other.contains(condition))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(status: &'static str) -> Peer {
        let type_ = "NetworkConnectionStatus";
        let conditions = vec![PeerCondition { type_, status, reason: "R", message: "m" }];
        Peer { enabled: true, conditions }
    }

    fn foreign_cluster(value: Value) -> DynamicObject {
        let mut object = json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
            "metadata": {"name": "milan"}});
        object.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn condition_keeps_time_while_status_is_the_same() {
        let now = Timestamp::UNIX_EPOCH;
        let first = module(&Value::Null, Some(&peer("Pending")), now).unwrap();
        assert_eq!(first["enabled"], true);
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        let later = Timestamp::from_second(60).unwrap();
        assert_eq!(module(&first, Some(&peer("Pending")), later), None, "nothing to write");
        let second = module(&first, Some(&peer("Established")), later).unwrap();
        assert_eq!(second["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
    }

    #[test]
    fn foreign_conditions_stay_own_ones_go_with_peer() {
        let theirs = json!({"type": "Other", "status": "Ready"});
        let ours = json!({"type": "NetworkConnectionStatus", "status": "Established"});
        let have = json!({"enabled": true, "conditions": [theirs, ours]});
        let gone = module(&have, None, Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(gone, json!({"enabled": false, "conditions": [theirs]}));
        assert_eq!(module(&gone, None, Timestamp::UNIX_EPOCH), None);
        assert_eq!(module(&Value::Null, None, Timestamp::UNIX_EPOCH), None, "it never had any");
    }

    #[test]
    fn missing_modules_are_added_and_others_stay() {
        let written = |object: Value| {
            modules(&foreign_cluster(object), Some(&peer("Pending")), Timestamp::UNIX_EPOCH)
        };
        let off = json!({"enabled": false});
        let new = written(json!({"spec": {"clusterID": "milan"}})).unwrap();
        assert_eq!([&new["authentication"], &new["offloading"]], [&off, &off]);
        let theirs = json!({"authentication": {"enabled": true}});
        let beside = written(json!({"status": {"modules": theirs}})).unwrap();
        assert_eq!((beside.get("authentication"), &beside["offloading"]), (None, &off));
    }

    #[test]
    fn one_that_liqo_uses_or_has_made_stays() {
        let ours = json!({"name": "milan", "labels": {"app.kubernetes.io/managed-by": "weft"}});
        let of = |metadata: &Value, modules: Value| {
            let status = json!({"modules": modules});
            is_of_no_use(&foreign_cluster(json!({"metadata": metadata, "status": status})))
        };
        let off = json!({"enabled": false});
        assert!(of(&ours, json!({"networking": {"enabled": true}, "offloading": off})));
        assert!(!of(&ours, json!({"authentication": {"enabled": true}})));
        assert!(!of(&json!({"name": "milan"}), json!({"networking": off})));
    }

    #[test]
    fn peer_is_read_from_label_then_spec_then_name() {
        let mut object = foreign_cluster(json!({}));
        assert_eq!(peer_of(&object), "milan");
        object.data["spec"] = json!({"clusterID": "of-spec"});
        assert_eq!(peer_of(&object), "of-spec");
        object.labels_mut().insert(labels::REMOTE_CLUSTER_ID.to_owned(), "of-label".to_owned());
        assert_eq!(peer_of(&object), "of-label");
    }

    #[test]
    fn unread_peer_keeps_its_modules() {
        let conditions = json!([{"type": "NetworkConnectionStatus", "status": "Established"}]);
        let networking = json!({"enabled": true, "conditions": conditions});
        let object = foreign_cluster(json!({"status": {"modules": {"networking": networking}}}));
        let step = |whole| step(&object, &Plan { whole, ..Plan::default() }, Timestamp::UNIX_EPOCH);
        assert_eq!(step(false), None);
        assert!(matches!(step(true), Some(Step::Write(_))));
    }
}
