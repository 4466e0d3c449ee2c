//! The label of the pod that has a gateway's tunnel, by which its Service and Liqo's tools find it.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::labels;
use fabric_index::placement::ActiveReplicas;
use fabric_kube_client::requests::{Requests, Target};
use fabric_objects::{Kind, ObjectRef};
use fabric_runtime::{Heartbeat, chain};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::ApiResource;
use serde_json::json;
use tokio::time::Instant;

use super::pods::GatewayPod;

/// Time until the retry of a write that failed, or that the watch has not reported.
const RETRY: Duration = Duration::from_secs(5);

/// Writes the labels.
pub(super) struct ActiveLabels {
    requests: Requests,
    /// Values written a moment ago, by uid of the pod.
    written: BTreeMap<String, (bool, Instant)>,
}

impl ActiveLabels {
    pub(super) fn new(client: Client) -> Self {
        let requests = Requests::new(client, labels::CONTROLLER_MANAGER);
        Self { requests, written: BTreeMap::new() }
    }

    /// Time of the next retry.
    pub(super) fn due(&self) -> Option<Instant> {
        self.written.values().map(|(_, at)| *at + RETRY).min()
    }

    pub(super) async fn reconcile(
        &mut self,
        active: &ActiveReplicas,
        pods: &[&GatewayPod],
        heartbeat: &Heartbeat,
    ) {
        let wrong = wrong(active, pods);
        self.written.retain(|uid, (value, at)| {
            let is_wrong =
                wrong.iter().any(|(pod, is)| pod.uid.as_ref() == Some(uid) && is == value);
            is_wrong && at.elapsed() < RETRY
        });
        for (pod, value) in wrong {
            let Some(uid) = pod.uid.clone().filter(|uid| !self.written.contains_key(uid)) else {
                continue;
            };
            heartbeat.beat();
            let (namespace, name) = (pod.gateway.0.clone(), pod.name.clone());
            let target = Target::new(ApiResource::erase::<Pod>(&()), (namespace, name));
            let change =
                json!({"metadata": {"uid": uid, "labels": {labels::ACTIVE: value.to_string()}}});
            self.written.insert(uid, (value, Instant::now()));
            match self.requests.merge_unread(&target, &change).await {
                Ok(()) => tracing::info!(pod = %target, active = value, "labelled"),
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(pod = %target, error, "cannot be labelled; its Service may lead elsewhere");
                }
            }
        }
    }
}

/// Pods with a wrong label, and its right value. Without a report of the active one every pod is labelled, as
/// it may be the one with the tunnel.
fn wrong<'a>(active: &ActiveReplicas, pods: &[&'a GatewayPod]) -> Vec<(&'a GatewayPod, bool)> {
    let should = |pod: &GatewayPod| {
        let (namespace, name) = &pod.gateway;
        let gateways = [Kind::GatewayServer, Kind::GatewayClient]
            .map(|kind| ObjectRef::new(kind, namespace, name));
        let active = gateways.iter().find_map(|gateway| active.get(gateway));
        active.is_none_or(|active| pod.address.parse().as_ref() == Ok(active))
    };
    let all = pods.iter().map(|pod| (*pod, should(pod)));
    all.filter(|(pod, should)| pod.is_active != *should).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn pod(name: &str, address: &str, active: bool) -> GatewayPod {
        let pod: Value = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "t", "uid": name, "labels": {
                labels::COMPONENT: labels::GATEWAY, labels::GATEWAY_NAME: "server",
                labels::ACTIVE: active.to_string()}},
            "spec": {"nodeName": "n1"}, "status": {"phase": "Running", "podIP": address}});
        GatewayPod::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    #[test]
    fn pod_with_tunnel_alone_is_labelled() {
        let pods = [pod("a", "10.200.1.7", true), pod("b", "10.200.2.7", true)];
        let of = |address: Option<&str>, pods: &[GatewayPod]| {
            let gateway = ObjectRef::new(Kind::GatewayServer, "t", "server");
            let active = address.map(|address| (gateway, address.parse().unwrap()));
            let pods: Vec<_> = pods.iter().collect();
            let wrong = wrong(&active.into_iter().collect(), &pods);
            wrong.iter().map(|(pod, should)| (pod.name.clone(), *should)).collect::<Vec<_>>()
        };
        assert_eq!(of(Some("10.200.2.7"), &pods), [("a".to_owned(), false)]);
        assert!(of(None, &pods).is_empty());
        let pods = [pod("a", "10.200.1.7", false), pod("b", "10.200.2.7", true)];
        let expected = [("a".to_owned(), true), ("b".to_owned(), false)];
        assert_eq!(of(Some("10.200.1.7"), &pods), expected);
        assert_eq!(of(None, &pods), [("a".to_owned(), true)]);
    }
}
