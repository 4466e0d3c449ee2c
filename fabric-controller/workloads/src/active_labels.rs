//! The label of the pod that has a gateway's tunnel, by which Liqo's tools find it, and the replica that its Service
//! selects.
//!
//! Each of several pods has its uid as a label, too, and the Service selects that of the active one: one write is
//! enough. Two pods that change their labels are two changes to kube-proxy, which may wait for a second between them.
//!
//! Every replica of the controller keeps both right, from what gateways report alone: the one that works may have
//! been on the node that was lost with the tunnel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::fabric::{ActiveReplica, GatewayConfig};
use fabric_api::labels;
use fabric_kube_client::reflector::{Change, Reflector, Selection};
use fabric_kube_client::requests::{Name, Requests, Target, name};
use fabric_kube_client::{ApiError, ApiServer};
use fabric_runtime::{chain, until};
use futures::stream::{self, StreamExt as _};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use kube::api::{ApiResource, NotUsed, Object};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::pods::{GatewayPod, Read, put};
use super::writer::MAX_WRITES;

/// Time until the retry of a write that was refused, or that the watch has not reported.
const RETRY: Duration = Duration::from_secs(5);
/// The same of a request that was not answered.
const RETRY_SOON: Duration = Duration::from_millis(500);
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

/// Keeps labels and Services right, and does not return. While `works` is false another replica of the controller may do
/// so, too.
pub async fn keep_active_labels(server: &ApiServer, mut works: watch::Receiver<bool>) {
    let mut labels = ActiveLabels::new(server);
    let mut due: Option<Instant> = None;
    loop {
        let is_news = tokio::select! {
            change = labels.configs.next() => take(&mut labels.active, change, address_of_active),
            change = labels.pods.next() => take(&mut labels.known, change, GatewayPod::of),
            change = labels.services.next() => take(&mut labels.selections, change, Selecting::of),
            changed = works.changed() => changed.is_ok(),
            () = until(due) => {
                due = labels.write().await;
                false
            }
        };
        if is_news && labels.is_synced() {
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
    services: Reflector<(), ReadService>,
    active: ActiveReplicas,
    known: BTreeMap<Name, GatewayPod>,
    selections: BTreeMap<Name, Selecting>,
    /// Changes tried a moment ago, by uid of the object, and when they may be tried again.
    written: BTreeMap<String, (Value, Instant)>,
}

/// Part of a Service that is read.
type ReadService = Object<ServiceSpec, NotUsed>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ServiceSpec {
    selector: BTreeMap<String, String>,
}

/// A gateway's Service.
#[derive(Clone, Debug, PartialEq)]
struct Selecting {
    gateway: Name,
    name: Name,
    uid: Option<String>,
    /// Uid of the pod that it selects; `None` if it selects all that have the tunnel by their label.
    replica: Option<String>,
}

/// Write that is due.
#[derive(Debug, PartialEq)]
struct Due {
    step: Step,
    gateway: Name,
    target: Target,
    uid: String,
    body: Value,
}

/// A Service selects a pod that is labelled as the active one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    LabelActive,
    Select,
    LabelOthers,
}

impl ActiveLabels {
    fn new(server: &ApiServer) -> Self {
        let (client, metrics) = (&server.client, &server.metrics);
        let of_gateways = format!("{}={}", labels::COMPONENT, labels::GATEWAY);
        let mut configs = Reflector::new(client.clone(), metrics.clone());
        configs.open((), Selection::all(ApiResource::erase::<GatewayConfig>(&())));
        let mut pods = Reflector::new(client.clone(), metrics.clone());
        pods.open((), Selection::all(ApiResource::erase::<Pod>(&())).labels(&of_gateways));
        let mut services = Reflector::new(client.clone(), metrics.clone());
        let of_weft = format!("{of_gateways},{}={}", labels::MANAGED_BY, labels::WEFT);
        services.open((), Selection::all(ApiResource::erase::<Service>(&())).labels(&of_weft));
        Self {
            requests: Requests::new(client.clone(), labels::CONTROLLER_MANAGER),
            configs,
            pods,
            services,
            active: BTreeMap::new(),
            known: BTreeMap::new(),
            selections: BTreeMap::new(),
            written: BTreeMap::new(),
        }
    }

    fn is_synced(&self) -> bool {
        self.configs.is_synced() && self.pods.is_synced() && self.services.is_synced()
    }

    /// Writes what is wrong, and returns the time of the next retry.
    async fn write(&mut self) -> Option<Instant> {
        let unread = self.read_again().await;
        let due = self.due();
        self.written.retain(|uid, (body, again)| {
            let is_wrong = due.iter().any(|due| due.uid == *uid && due.body == *body);
            is_wrong && Instant::now() < *again
        });
        let mut steps: BTreeMap<Name, Vec<Due>> = BTreeMap::new();
        for due in due.into_iter().filter(|due| !unread.contains(&due.gateway)) {
            steps.entry(due.gateway.clone()).or_default().push(due);
        }
        let (requests, written) = (&self.requests, &self.written);
        let writes = steps.into_values().map(|due| write_in_order(requests, due, written));
        let done: Vec<_> = stream::iter(writes).buffer_unordered(MAX_WRITES).collect().await;
        self.written.extend(done.into_iter().flatten());
        let again = (!unread.is_empty()).then(|| Instant::now() + RETRY_SOON);
        self.written.values().map(|(_, again)| *again).chain(again).min()
    }

    fn due(&self) -> Vec<Due> {
        due(&self.active, &self.known, self.selections.values())
    }

    /// Reads the configs of gateways of which something seems wrong: of the watches of a replica that was cut off, that
    /// of configs may be back later. Returns those that cannot be read.
    async fn read_again(&mut self) -> BTreeSet<Name> {
        let due = self.due().into_iter().filter(|due| !self.written.contains_key(&due.uid));
        let gateways: BTreeSet<Name> = due.map(|due| due.gateway).collect();
        let requests = &self.requests;
        let read = gateways.into_iter().map(async |gateway| {
            let target = Target::new(ApiResource::erase::<GatewayConfig>(&()), gateway.clone());
            (gateway, requests.read::<ReadConfig>(&target).await)
        });
        let mut unread = BTreeSet::new();
        let read: Vec<_> = stream::iter(read).buffer_unordered(MAX_WRITES).collect().await;
        for (gateway, config) in read {
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

/// Writes what is due for a gateway, up to the first step that fails, or that was written a moment ago and is not observed
/// yet: a Service must not select a pod that is not labelled, nor a pod lose its label while it is selected. Returns
/// what was tried, and when it may be tried again.
async fn write_in_order(
    requests: &Requests,
    mut due: Vec<Due>,
    written: &BTreeMap<String, (Value, Instant)>,
) -> Vec<(String, (Value, Instant))> {
    due.sort_by_key(|due| due.step);
    let mut tried = Vec::new();
    for Due { target, uid, body, .. } in due {
        if written.contains_key(&uid) {
            break;
        }
        let result = requests.merge_unread(&target, &body).await;
        let pause = match &result {
            Ok(()) => RETRY,
            Err(ApiError::Refused { code: 400..429, .. }) => RETRY,
            Err(_) => RETRY_SOON,
        };
        match &result {
            Ok(()) => {
                tracing::info!(object = %target, change = %body, "follows the active replica")
            }
            Err(error) => tracing::warn!(
                object = %target,
                error = chain(error),
                "cannot be changed; the gateway's Service may lead elsewhere"
            ),
        }
        tried.push((uid, (body, Instant::now() + pause)));
        if result.is_err() {
            break;
        }
    }
    tried
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

impl Selecting {
    /// `None` for a Service of something else.
    fn of(service: &ReadService) -> Option<Self> {
        let has_selector = !service.spec.selector.is_empty();
        let gateway = service.labels().get(labels::GATEWAY_NAME).filter(|_| has_selector)?;
        let name = name(&service.metadata);
        Some(Self {
            gateway: (name.0.clone(), gateway.clone()),
            name,
            uid: service.metadata.uid.clone(),
            replica: service.spec.selector.get(labels::REPLICA).cloned(),
        })
    }
}

/// Writes that are due. While no pod of a gateway is the one that is reported to have the tunnel, each is labelled, as
/// it may be.
fn due<'a>(
    active: &ActiveReplicas,
    pods: &BTreeMap<Name, GatewayPod>,
    services: impl Iterator<Item = &'a Selecting>,
) -> Vec<Due> {
    let mut of_gateways: BTreeMap<&Name, Vec<&GatewayPod>> = BTreeMap::new();
    for pod in pods.values() {
        of_gateways.entry(&pod.gateway).or_default().push(pod);
    }
    let holder = |gateway: &Name| {
        let address = active.get(gateway)?;
        let mut own = of_gateways.get(gateway)?.iter();
        own.find(|pod| pod.address.parse().as_ref() == Ok(address))
    };
    let mut all = Vec::new();
    for (&gateway, own) in &of_gateways {
        let holder = holder(gateway);
        for pod in own {
            let is_active = holder.is_none_or(|holder| holder.name == pod.name);
            let mut wrong = Map::new();
            if pod.is_active != is_active {
                wrong.insert(labels::ACTIVE.to_owned(), is_active.to_string().into());
            }
            if own.len() > 1 && !pod.is_distinct {
                wrong.insert(labels::REPLICA.to_owned(), pod.uid.clone().into());
            }
            let Some(uid) = pod.uid.clone().filter(|_| !wrong.is_empty()) else { continue };
            let step = if is_active { Step::LabelActive } else { Step::LabelOthers };
            let of = ApiResource::erase::<Pod>(&());
            let target = Target::new(of, (gateway.0.clone(), pod.name.clone()));
            let body = json!({"metadata": {"uid": uid, "labels": wrong}});
            all.push(Due { step, gateway: gateway.clone(), target, uid, body });
        }
    }
    for service in services {
        let gateway = service.gateway.clone();
        let holder = holder(&gateway).filter(|holder| holder.is_distinct);
        let replica = holder.and_then(|holder| holder.uid.as_ref());
        let is_wrong = replica != service.replica.as_ref();
        let Some(uid) = service.uid.clone().filter(|_| is_wrong) else { continue };
        let target = Target::new(ApiResource::erase::<Service>(&()), service.name.clone());
        let selector = json!({labels::REPLICA: replica});
        let body = json!({"metadata": {"uid": uid}, "spec": {"selector": selector}});
        all.push(Due { step: Step::Select, gateway, target, uid, body });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, address: &str, active: bool, is_distinct: bool) -> GatewayPod {
        let mut pod: Value = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "t", "uid": name, "labels": {
                labels::COMPONENT: labels::GATEWAY, labels::GATEWAY_NAME: "server",
                labels::ACTIVE: active.to_string()}},
            "spec": {"nodeName": "n1"}, "status": {"phase": "Running", "podIP": address}});
        if is_distinct {
            pod["metadata"]["labels"][labels::REPLICA] = name.into();
        }
        GatewayPod::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    /// Names and changes, in the order of the writes.
    fn changes(
        active: Option<&str>,
        pods: &[GatewayPod],
        selected: Option<&str>,
    ) -> Vec<(String, Value)> {
        let gateway = ("t".to_owned(), "server".to_owned());
        let active = active.map(|address| (gateway, address.parse().unwrap()));
        let pods = pods.iter().map(|pod| (("t".to_owned(), pod.name.clone()), pod.clone()));
        let mut selector = BTreeMap::from([(labels::ACTIVE, "true")]);
        selector.extend(selected.map(|uid| (labels::REPLICA, uid)));
        let service: ReadService =
            serde_json::from_value(json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "gw-server", "namespace": "t", "uid": "s",
                "labels": {labels::GATEWAY_NAME: "server"}},
            "spec": {"selector": selector}}))
            .unwrap();
        let service = Selecting::of(&service);
        let mut due = due(&active.into_iter().collect(), &pods.collect(), service.iter());
        due.sort_by_key(|due| due.step);
        let change = |due: &Due| match due.step {
            Step::Select => due.body["spec"]["selector"].clone(),
            Step::LabelActive | Step::LabelOthers => due.body["metadata"]["labels"].clone(),
        };
        due.iter().map(|due| (due.target.to_string(), change(due))).collect()
    }

    fn label(pod: &str, value: &str) -> (String, Value) {
        (format!("Pod t/{pod}"), json!({labels::ACTIVE: value}))
    }

    fn select(replica: Option<&str>) -> (String, Value) {
        ("Service t/gw-server".to_owned(), json!({labels::REPLICA: replica}))
    }

    #[test]
    fn pod_with_tunnel_alone_is_labelled() {
        let pods = [pod("a", "10.200.1.7", true, true), pod("b", "10.200.2.7", true, true)];
        assert_eq!(changes(Some("10.200.2.7"), &pods, Some("b")), [label("a", "false")]);
        assert!(changes(None, &pods, None).is_empty());
        assert!(changes(Some("10.200.3.7"), &pods, None).is_empty(), "of a pod that is gone");
        let pods = [pod("a", "10.200.1.7", false, true), pod("b", "10.200.2.7", true, true)];
        assert_eq!(changes(None, &pods, None), [label("a", "true")]);
    }

    #[test]
    fn service_moves_by_one_write_between_labels() {
        let pods = [pod("a", "10.200.1.7", true, true), pod("b", "10.200.2.7", false, true)];
        let moved = changes(Some("10.200.2.7"), &pods, Some("a"));
        assert_eq!(moved, [label("b", "true"), select(Some("b")), label("a", "false")]);
        let pods = &pods[..1];
        assert!(
            changes(Some("10.200.1.7"), pods, Some("a")).is_empty(),
            "the last one stays selected"
        );
        assert_eq!(changes(None, pods, Some("b")), [select(None)], "of a pod that is gone");
    }

    #[test]
    fn several_pods_alone_are_labelled_apart() {
        let alone = pod("a", "10.200.1.7", true, false);
        assert!(changes(Some("10.200.1.7"), std::slice::from_ref(&alone), None).is_empty());
        let pods = [alone, pod("b", "10.200.2.7", false, false)];
        let apart = |pod: &str| (format!("Pod t/{pod}"), json!({labels::REPLICA: pod}));
        assert_eq!(changes(Some("10.200.1.7"), &pods, None), [apart("a"), apart("b")]);
    }
}
