//! The label of the pod that has a gateway's tunnel, by which its Service and Liqo's tools find it.
//!
//! Every replica of the controller keeps the labels right, from what gateways report alone: the one that works may have
//! been on the node that was lost with the tunnel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::fabric::{ActiveReplica, GatewayConfig};
use fabric_api::labels;
use fabric_kube_client::ApiServer;
use fabric_kube_client::reflector::{Change, Reflector, Selection};
use fabric_kube_client::requests::{Name, Requests, Target, name};
use fabric_runtime::{chain, until};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ApiResource, NotUsed, Object};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::pods::{GatewayPod, Read, put};

/// Time until the retry of a write that failed, or that the watch has not reported.
const RETRY: Duration = Duration::from_secs(5);
/// Time that is left to the replica that works.
const STANDBY_DELAY: Duration = Duration::from_millis(300);

/// Part of a GatewayConfig that is read.
type ReadConfig = Object<NotUsed, Status>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Status {
    active: Option<ActiveReplica>,
}

/// Addresses of the pods that have the tunnels, by namespace and name of the gateway.
type ActiveReplicas = BTreeMap<Name, IpAddr>;

/// Keeps the labels right, and does not return. While `works` is false another replica of the controller may do
/// so, too.
pub async fn keep_active_labels(server: &ApiServer, mut works: watch::Receiver<bool>) {
    let mut labels = ActiveLabels::new(server);
    let mut due: Option<Instant> = None;
    loop {
        let is_news = tokio::select! {
            change = labels.configs.next() => take(&mut labels.active, change, address_of_active),
            change = labels.pods.next() => take(&mut labels.known, change, GatewayPod::of),
            changed = works.changed() => changed.is_ok(),
            () = until(due) => {
                due = labels.write().await;
                false
            }
        };
        if is_news && labels.configs.is_synced() && labels.pods.is_synced() {
            let delay = if *works.borrow() { Duration::ZERO } else { STANDBY_DELAY };
            let soon = Instant::now() + delay;
            due = Some(due.map_or(soon, |due| due.min(soon)));
        }
    }
}

struct ActiveLabels {
    requests: Requests,
    configs: Reflector<(), ReadConfig>,
    pods: Reflector<(), Read>,
    active: ActiveReplicas,
    known: BTreeMap<Name, GatewayPod>,
    /// Values written a moment ago, by uid of the pod.
    written: BTreeMap<String, (bool, Instant)>,
}

impl ActiveLabels {
    fn new(server: &ApiServer) -> Self {
        let (client, metrics) = (&server.client, &server.metrics);
        let mut configs = Reflector::new(client.clone(), metrics.clone());
        configs.open((), Selection::all(ApiResource::erase::<GatewayConfig>(&())));
        let mut pods = Reflector::new(client.clone(), metrics.clone());
        let all = Selection::all(ApiResource::erase::<Pod>(&()));
        pods.open((), all.labels(&format!("{}={}", labels::COMPONENT, labels::GATEWAY)));
        Self {
            requests: Requests::new(client.clone(), labels::CONTROLLER_MANAGER),
            configs,
            pods,
            active: BTreeMap::new(),
            known: BTreeMap::new(),
            written: BTreeMap::new(),
        }
    }

    /// Writes the labels that are wrong, and returns the time of the next retry.
    async fn write(&mut self) -> Option<Instant> {
        let unread = self.read_again().await;
        let wrong = wrong(&self.active, self.known.values());
        self.written.retain(|uid, (value, at)| {
            let is_wrong =
                wrong.iter().any(|(pod, is)| pod.uid.as_ref() == Some(uid) && is == value);
            is_wrong && at.elapsed() < RETRY
        });
        let mut due = Vec::new();
        for (pod, value) in wrong.into_iter().filter(|(pod, _)| !unread.contains(&pod.gateway)) {
            let Some(uid) = pod.uid.clone().filter(|uid| !self.written.contains_key(uid)) else {
                continue;
            };
            due.push(label(&self.requests, pod, value));
            self.written.insert(uid, (value, Instant::now()));
        }
        // At once: kube-proxy may wait for a second after each change of a Service's pods.
        join_all(due).await;
        let again = (!unread.is_empty()).then(|| Instant::now() + RETRY);
        self.written.values().map(|(_, at)| *at + RETRY).chain(again).min()
    }

    /// Reads the configs of gateways whose labels seem wrong: of the two watches of a replica that was cut off, that of
    /// configs may be back later. Returns those that cannot be read.
    async fn read_again(&mut self) -> BTreeSet<Name> {
        let is_due =
            |pod: &GatewayPod| pod.uid.as_ref().is_some_and(|uid| !self.written.contains_key(uid));
        let wrong = wrong(&self.active, self.known.values()).into_iter();
        let wrong = wrong.filter(|(pod, _)| is_due(pod)).map(|(pod, _)| pod.gateway.clone());
        let gateways: BTreeSet<Name> = wrong.collect();
        let requests = &self.requests;
        let read = gateways.into_iter().map(async |gateway| {
            let target = Target::new(ApiResource::erase::<GatewayConfig>(&()), gateway.clone());
            (gateway, requests.read::<ReadConfig>(&target).await)
        });
        let mut unread = BTreeSet::new();
        for (gateway, config) in join_all(read).await {
            match config {
                Ok(config) => {
                    let active = config.as_ref().and_then(address_of_active);
                    put(&mut self.active, gateway, active);
                }
                Err(error) => {
                    tracing::debug!(?gateway, error = chain(&error), "its labels stay");
                    unread.insert(gateway);
                }
            }
        }
        unread
    }
}

async fn label(requests: &Requests, pod: &GatewayPod, value: bool) {
    let target =
        Target::new(ApiResource::erase::<Pod>(&()), (pod.gateway.0.clone(), pod.name.clone()));
    let labels = json!({labels::ACTIVE: value.to_string()});
    let change = json!({"metadata": {"uid": pod.uid, "labels": labels}});
    match requests.merge_unread(&target, &change).await {
        Ok(()) => tracing::info!(pod = %target, active = value, "labelled"),
        Err(error) => {
            let error = chain(&error);
            tracing::warn!(pod = %target, error, "cannot be labelled; its Service may lead elsewhere");
        }
    }
}

/// Takes a change over, and returns true if there may be news in it.
fn take<K: ResourceExt, V: PartialEq>(
    known: &mut BTreeMap<Name, V>,
    change: Change<(), K>,
    value_of: impl Fn(&K) -> Option<V>,
) -> bool {
    let (name, value) = match change {
        Change::Applied((), object) => (name(object.meta()), value_of(&object)),
        Change::Deleted((), object) => (name(object.meta()), None),
        Change::Listed((), names) => {
            known.retain(|name, _| names.contains(name));
            return true;
        }
        Change::Problems => return false,
    };
    let is_news = known.get(&name) != value.as_ref();
    put(known, name, value);
    is_news
}

fn address_of_active(config: &ReadConfig) -> Option<IpAddr> {
    config.status.as_ref()?.active.map(|active| active.address)
}

/// Pods with a wrong label, and its right value. While no pod of a gateway is the one that is reported to have the
/// tunnel, each is labelled, as it may be.
fn wrong<'a>(
    active: &ActiveReplicas,
    pods: impl Iterator<Item = &'a GatewayPod> + Clone,
) -> Vec<(&'a GatewayPod, bool)> {
    let has_tunnel = |pod: &GatewayPod| {
        let active = active.get(&pod.gateway);
        active.is_some_and(|active| pod.address.parse().as_ref() == Ok(active))
    };
    let should = |pod: &GatewayPod| {
        let mut own = pods.clone().filter(|other| other.gateway == pod.gateway);
        has_tunnel(pod) || !own.any(has_tunnel)
    };
    let all = pods.clone().map(|pod| (pod, should(pod)));
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
            let gateway = ("t".to_owned(), "server".to_owned());
            let active = address.map(|address| (gateway, address.parse().unwrap()));
            let wrong = wrong(&active.into_iter().collect(), pods.iter());
            wrong.iter().map(|(pod, should)| (pod.name.clone(), *should)).collect::<Vec<_>>()
        };
        assert_eq!(of(Some("10.200.2.7"), &pods), [("a".to_owned(), false)]);
        assert!(of(None, &pods).is_empty());
        assert!(of(Some("10.200.3.7"), &pods).is_empty(), "of a pod that is gone");
        let pods = [pod("a", "10.200.1.7", false), pod("b", "10.200.2.7", true)];
        let expected = [("a".to_owned(), true), ("b".to_owned(), false)];
        assert_eq!(of(Some("10.200.1.7"), &pods), expected);
        assert_eq!(of(None, &pods), [("a".to_owned(), true)]);
    }
}
