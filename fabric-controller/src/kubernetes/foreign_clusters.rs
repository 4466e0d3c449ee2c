//! Tells Liqo's ForeignClusters how the networking with each peer is. Where Liqo is not installed,
//! there are none.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::writer::answer;
use crate::compile::PeerCondition;
use crate::placement::Peers;

/// Liqo makes a ForeignCluster when it sees the first resource of a peer; and it may be installed
/// any time.
const PERIOD: Duration = Duration::from_secs(30);
/// There may be one in a moment: Liqo makes it for what was just made here.
const SOON: Duration = Duration::from_secs(2);

pub(super) struct ForeignClusters {
    api: Api<DynamicObject>,
    told: Option<Peers>,
    due: Instant,
}

impl ForeignClusters {
    pub(super) fn new(client: Client) -> Self {
        let kind = GroupVersionKind::gvk("core.liqo.io", "v1beta1", "ForeignCluster");
        let resource = ApiResource::from_gvk_with_plural(&kind, "foreignclusters");
        Self { api: Api::all_with(client, &resource), told: None, due: Instant::now() + PERIOD }
    }

    /// When they are to be looked at again.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    pub(super) async fn tell(&mut self, peers: &Peers) {
        let news = self.told.as_ref() != Some(peers);
        if !news && Instant::now() < self.due {
            return;
        }
        self.due = Instant::now() + if news { SOON } else { PERIOD };
        self.told = Some(peers.clone());
        let all = match answer(self.api.list(&ListParams::default())).await {
            Ok(all) => all,
            Err(kube::Error::Api(status)) if status.code == 404 => {
                self.due = Instant::now() + PERIOD;
                return;
            }
            Err(error) => return tracing::debug!(%error, "ForeignClusters cannot be listed"),
        };
        for cluster in all {
            let name = cluster.name_any();
            let have = &cluster.data["status"]["modules"]["networking"];
            let Some(want) = module(have, of(peers, &name), Timestamp::now()) else {
                continue;
            };
            let modules = with_others(want, &cluster.data["status"]["modules"]);
            let patch = Patch::Merge(json!({"status": {"modules": modules}}));
            let parameters = PatchParams::default();
            let written = self.api.patch_status(&name, &parameters, &patch);
            match answer(written).await {
                Ok(_) => tracing::debug!(name, "ForeignCluster told"),
                Err(error) => tracing::debug!(name, %error, "a ForeignCluster is not told"),
            }
        }
    }
}

/// A ForeignCluster has either no modules or all; Liqo fills in what it runs.
fn with_others(networking: Value, have: &Value) -> Value {
    let mut modules = json!({"networking": networking});
    for other in ["authentication", "offloading"] {
        if have[other].is_null() {
            modules[other] = json!({"enabled": false});
        }
    }
    modules
}

fn of<'a>(peers: &'a Peers, name: &str) -> Option<&'a Vec<PeerCondition>> {
    peers.get(&name.parse().ok()?)
}

/// What its module should be, if that differs. Conditions of other types are not weft's.
fn module(have: &Value, want: Option<&Vec<PeerCondition>>, now: Timestamp) -> Option<Value> {
    let before = have["conditions"].as_array().cloned().unwrap_or_default();
    let of_type = |type_: &str| before.iter().find(|condition| condition["type"] == type_);
    let is_ours = |condition: &Value| {
        condition["type"].as_str().is_some_and(|type_| type_.starts_with("Network"))
    };
    let mut conditions: Vec<Value> =
        before.iter().filter(|condition| !is_ours(condition)).cloned().collect();
    for PeerCondition { type_, status, reason, message } in want.into_iter().flatten() {
        let same = of_type(type_).filter(|condition| condition["status"] == *status);
        let since = same.map(|condition| condition["lastTransitionTime"].clone());
        conditions.push(json!({
            "type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": since.unwrap_or_else(|| json!(now.strftime("%FT%TZ").to_string())),
        }));
    }
    let enabled = want.is_some();
    let same =
        have["enabled"].as_bool().unwrap_or_default() == enabled && is_same(&before, &conditions);
    (!same).then(|| json!({"enabled": enabled, "conditions": conditions}))
}

/// In whatever order.
fn is_same(one: &[Value], other: &[Value]) -> bool {
    one.len() == other.len() && one.iter().all(|condition| other.contains(condition))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn established(status: &'static str) -> Vec<PeerCondition> {
        let type_ = "NetworkConnectionStatus";
        vec![PeerCondition { type_, status, reason: "R", message: "m" }]
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_stays() {
        let now = Timestamp::UNIX_EPOCH;
        let first = module(&Value::Null, Some(&established("Pending")), now).unwrap();
        assert_eq!(first["enabled"], true);
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        let later = Timestamp::from_second(60).unwrap();
        assert_eq!(module(&first, Some(&established("Pending")), later), None, "nothing to write");
        let second = module(&first, Some(&established("Established")), later).unwrap();
        assert_eq!(second["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
    }

    #[test]
    fn others_conditions_stay_and_a_peer_that_is_gone_has_none_of_ours() {
        let theirs = json!({"type": "Other", "status": "Ready"});
        let ours = json!({"type": "NetworkConnectionStatus", "status": "Established"});
        let have = json!({"enabled": true, "conditions": [theirs, ours]});
        let gone = module(&have, None, Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(gone, json!({"enabled": false, "conditions": [theirs]}));
        assert_eq!(module(&gone, None, Timestamp::UNIX_EPOCH), None);
        assert_eq!(module(&Value::Null, None, Timestamp::UNIX_EPOCH), None, "it never had any");
    }
}
