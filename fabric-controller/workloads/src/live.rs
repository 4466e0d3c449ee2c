//! Observed objects of gateways, as the API server reports them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::time::Duration;

use fabric_api::labels;
use fabric_api::liqo_core::ForeignCluster;
use fabric_api::networking::{WgGatewayClientTemplate, WgGatewayServerTemplate};
use fabric_store::{ApiError, Problem, StoreMetrics};
use futures::stream::{BoxStream, StreamExt as _};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio_stream::StreamMap;

/// Label with the maker of an EndpointSlice, and its value on those of weft.
pub(super) const SLICE_OF: &str = "endpointslice.kubernetes.io/managed-by";
pub(super) const SLICE_OF_WEFT: &str = "weft.dev";
/// An API server that is away may be back any moment.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// A definition that is not installed may be any day.
const RETRY_MISSING: Duration = Duration::from_secs(30);

/// Kinds that are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Watched {
    Account,
    Role,
    Binding,
    Service,
    Slice,
    Deployment,
    Pod,
    Node,
    ServerTemplate,
    ClientTemplate,
    ForeignCluster,
}

/// Backoff of a watch.
pub(super) struct Patience {
    failures: u32,
    most: Duration,
}

/// Names an object of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) of: Watched,
    pub(super) namespace: String,
    pub(super) name: String,
}

type Told = watcher::Result<Event<DynamicObject>>;

/// The latest version of each.
#[derive(Debug, Default)]
pub(super) struct Objects(BTreeMap<Key, DynamicObject>);

/// Keeps it so.
pub(super) struct Live {
    objects: Objects,
    sources: StreamMap<Watched, BoxStream<'static, Told>>,
    /// Keys that a source has named since it began to list all it has.
    lists: BTreeMap<Watched, BTreeSet<Key>>,
    unlisted: BTreeSet<Watched>,
    /// Kinds without a definition.
    missing: BTreeSet<Watched>,
    /// Reason why a source reports nothing, logged once.
    failing: BTreeMap<Watched, String>,
    /// Sources that are refused, and what to do.
    refused: BTreeMap<Watched, String>,
    metrics: StoreMetrics,
}

impl Watched {
    /// Kinds that gateways and Services of IPs are made of and made from, and of their nodes and
    /// pods.
    pub(super) const OF_GATEWAYS: [Self; 10] = [
        Self::Account,
        Self::Role,
        Self::Binding,
        Self::Service,
        Self::Slice,
        Self::Deployment,
        Self::Pod,
        Self::Node,
        Self::ServerTemplate,
        Self::ClientTemplate,
    ];
    /// Kinds of the objects of a gateway.
    pub(super) const MADE: [Self; 5] =
        [Self::Account, Self::Role, Self::Binding, Self::Service, Self::Deployment];
    /// Kinds of the objects of an IP's Service.
    pub(super) const EXPOSED: [Self; 2] = [Self::Service, Self::Slice];

    pub(super) fn resource(self) -> ApiResource {
        match self {
            Self::Account => ApiResource::erase::<ServiceAccount>(&()),
            Self::Role => ApiResource::erase::<Role>(&()),
            Self::Binding => ApiResource::erase::<RoleBinding>(&()),
            Self::Service => ApiResource::erase::<Service>(&()),
            Self::Slice => ApiResource::erase::<EndpointSlice>(&()),
            Self::Deployment => ApiResource::erase::<Deployment>(&()),
            Self::Pod => ApiResource::erase::<Pod>(&()),
            Self::Node => ApiResource::erase::<Node>(&()),
            Self::ServerTemplate => ApiResource::erase::<WgGatewayServerTemplate>(&()),
            Self::ClientTemplate => ApiResource::erase::<WgGatewayClientTemplate>(&()),
            Self::ForeignCluster => ApiResource::erase::<ForeignCluster>(&()),
        }
    }

    pub(super) fn of_kind(kind: &str) -> Option<Self> {
        Self::OF_GATEWAYS.into_iter().find(|watched| watched.resource().kind == kind)
    }

    fn selection(self) -> watcher::Config {
        let gateways = format!("{}={}", labels::COMPONENT, labels::GATEWAY);
        let ours = format!("{}={}", labels::MANAGED_BY, labels::WEFT);
        let config = watcher::Config::default();
        match self {
            Self::Account | Self::Role | Self::Binding | Self::Deployment => {
                config.labels(&format!("{gateways},{ours}"))
            }
            // Services of gateways and of IPs.
            Self::Service => config.labels(&ours),
            // Kubernetes' own slices of Services have the labels of those.
            Self::Slice => config.labels(&format!("{SLICE_OF}={SLICE_OF_WEFT}")),
            Self::Pod => config.labels(&gateways),
            Self::Node | Self::ServerTemplate | Self::ClientTemplate | Self::ForeignCluster => {
                config
            }
        }
    }

    fn open(self, client: &Client) -> BoxStream<'static, Told> {
        let api = Api::<DynamicObject>::all_with(client.clone(), &self.resource());
        // That a list begins is no success yet.
        let events = watcher(api, self.selection());
        let events = events.filter(|told| ready(!matches!(told, Ok(Event::Init))));
        let most = if self.may_be_missing() { RETRY_MISSING } else { RETRY_MAX };
        events.backoff(Patience { most, ..Patience::default() }).boxed()
    }

    /// Nothing is amiss where its definition is not installed.
    fn may_be_missing(self) -> bool {
        self == Self::ForeignCluster
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self { failures: 0, most: RETRY_MAX }
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.most.min(RETRY * 2_u32.saturating_pow(self.failures.min(16)));
        self.failures += 1;
        Some(wait)
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

impl Key {
    pub(super) fn new(of: Watched, namespace: &str, name: &str) -> Self {
        Self { of, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub(super) fn of(of: Watched, object: &DynamicObject) -> Self {
        let metadata = &object.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        Self::new(of, namespace, metadata.name.as_deref().unwrap_or_default())
    }
}

impl Objects {
    pub(super) fn get(&self, key: &Key) -> Option<&DynamicObject> {
        self.0.get(key)
    }

    pub(super) fn all(&self, of: Watched) -> impl Iterator<Item = (&Key, &DynamicObject)> {
        self.0.range(Key::new(of, "", "")..).take_while(move |(key, _)| key.of == of)
    }

    /// True if it has changed. What a watch reports late does not replace the answer to a newer
    /// write.
    pub(super) fn put(&mut self, of: Watched, object: DynamicObject) -> bool {
        let object = trimmed(of, object);
        if self.0.get(&Key::of(of, &object)).is_some_and(|have| is_older(&object, have)) {
            return false;
        }
        let before = self.0.insert(Key::of(of, &object), object.clone());
        before.is_none_or(|before| before != object)
    }
}

impl Live {
    /// Must be called within a tokio runtime; nothing is sent yet.
    pub(super) fn watch(client: &Client, all: &[Watched]) -> Self {
        let mut sources = StreamMap::new();
        for watched in all {
            sources.insert(*watched, watched.open(client));
        }
        Self {
            objects: Objects::default(),
            sources,
            lists: BTreeMap::new(),
            unlisted: all.iter().copied().collect(),
            missing: BTreeSet::new(),
            failing: BTreeMap::new(),
            refused: BTreeMap::new(),
            metrics: StoreMetrics::default(),
        }
    }

    /// Counts watches that fail.
    pub(super) fn counting(self, metrics: StoreMetrics) -> Self {
        Self { metrics, ..self }
    }

    /// Reasons why not all of it can be read.
    pub(super) fn obstacles(&self) -> BTreeSet<Problem> {
        let problem = |message: &String| Problem {
            source: String::new(),
            object: None,
            field: None,
            message: message.clone(),
        };
        self.refused.values().map(problem).collect()
    }

    /// True once all is known that was there at the start.
    pub(super) fn is_whole(&self) -> bool {
        self.unlisted.is_empty()
    }

    /// True if that kind has no definition.
    pub(super) fn is_missing(&self, of: Watched) -> bool {
        self.missing.contains(&of)
    }

    /// Waits for something to happen; true if anything is different now. Cancel safe.
    pub(super) async fn next(&mut self) -> bool {
        match self.sources.next().await {
            Some((watched, told)) => self.take(watched, told),
            None => std::future::pending().await,
        }
    }

    pub(super) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Stores an answer of the API server; its watch may report it later.
    pub(super) fn put(&mut self, of: Watched, object: DynamicObject) {
        self.objects.put(of, object);
    }

    /// The same of one that is gone.
    pub(super) fn forget(&mut self, key: &Key) {
        self.objects.0.remove(key);
    }

    fn take(&mut self, of: Watched, told: Told) -> bool {
        let changed = match told {
            Ok(Event::Init) => false,
            Ok(Event::InitApply(object)) => {
                self.lists.entry(of).or_default().insert(Key::of(of, &object));
                self.objects.put(of, object)
            }
            Ok(Event::InitDone) => self.listed(of),
            Ok(Event::Apply(object)) => self.objects.put(of, object),
            Ok(Event::Delete(object)) => self.objects.0.remove(&Key::of(of, &object)).is_some(),
            Err(error) => {
                self.failed(of, &error);
                return false;
            }
        };
        self.failing.remove(&of);
        self.refused.remove(&of);
        self.missing.remove(&of);
        changed
    }

    /// Removes the objects that the list did not name.
    fn listed(&mut self, of: Watched) -> bool {
        let named = self.lists.remove(&of).unwrap_or_default();
        let objects = &mut self.objects.0;
        let before = objects.len();
        objects.retain(|key, _| key.of != of || named.contains(key));
        self.unlisted.remove(&of) || objects.len() != before
    }

    fn failed(&mut self, of: Watched, error: &watcher::Error) {
        self.lists.remove(&of);
        self.metrics.count_watch_restart(&of.resource().kind);
        let refusal = refusal(error, &of.resource());
        let told = refusal.clone().unwrap_or_else(|| error.to_string());
        if of.may_be_missing() && is_missing(error) {
            self.missing.insert(of);
            return tracing::trace!(kind = of.resource().kind, "not installed");
        }
        match refusal {
            Some(refusal) => _ = self.refused.insert(of, refusal),
            None => _ = self.refused.remove(&of),
        }
        if self.failing.get(&of) != Some(&told) {
            tracing::warn!(kind = of.resource().kind, error = told, "cannot watch; tried again");
            self.failing.insert(of, told);
        }
    }
}

/// Remedy for a watch that is refused; none if it is worth another try.
fn refusal(error: &watcher::Error, resource: &ApiResource) -> Option<String> {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    let (InitialListFailed(cause) | WatchStartFailed(cause) | WatchFailed(cause)) = error else {
        return None;
    };
    let kube::Error::Api(status) = cause else { return None };
    let refused = ApiError::Refused { code: status.code, message: status.message.clone() };
    refused.refusal(&resource.kind, &resource.api_version, &resource.plural)
}

fn is_missing(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    let (InitialListFailed(cause) | WatchStartFailed(cause)) = error else { return false };
    matches!(cause, kube::Error::Api(status) if status.code == 404)
}

/// True for an older version of the same object. Versions that are no numbers have no order.
fn is_older(object: &DynamicObject, than: &DynamicObject) -> bool {
    let version = |object: &DynamicObject| -> Option<u64> {
        object.metadata.resource_version.as_ref()?.parse().ok()
    };
    let same = object.metadata.uid == than.metadata.uid;
    same && version(object).zip(version(than)).is_some_and(|(one, other)| one < other)
}

/// Without what changes all the time and is of no use here: kubelets report every few seconds.
fn trimmed(of: Watched, mut object: DynamicObject) -> DynamicObject {
    object.metadata.managed_fields = None;
    match of {
        Watched::Node => {
            object.metadata.resource_version = None;
            let mut data = object.data.take();
            let [spec, status] = ["spec", "status"].map(|part| data[part].take());
            object.data = json!({
                "spec": {"podCIDR": spec["podCIDR"], "podCIDRs": spec["podCIDRs"]},
                "status": {"addresses": status["addresses"]},
            });
        }
        Watched::Pod => {
            object.metadata.resource_version = None;
            object.data = pod(&object.data);
        }
        Watched::Account
        | Watched::Role
        | Watched::Binding
        | Watched::Service
        | Watched::Slice
        | Watched::Deployment
        | Watched::ServerTemplate
        | Watched::ClientTemplate
        | Watched::ForeignCluster => {}
    }
    object
}

fn pod(data: &Value) -> Value {
    let conditions = data["status"]["conditions"].as_array().into_iter().flatten();
    let ready: Vec<_> = conditions
        .filter(|condition| condition["type"] == "Ready")
        .map(|condition| json!({"type": "Ready", "status": condition["status"]}))
        .collect();
    json!({
        "spec": {"nodeName": data["spec"]["nodeName"], "containers": []},
        "status": {
            "phase": data["status"]["phase"], "podIP": data["status"]["podIP"], "conditions": ready
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn news(objects: &mut Objects, of: Watched, object: Value) -> bool {
        objects.put(of, serde_json::from_value(object).unwrap())
    }

    #[test]
    fn what_kubelets_say_every_few_seconds_is_no_news() {
        let mut objects = Objects::default();
        let mut node = |version: u32, address: &str| {
            let conditions = json!([{"type": "Ready", "lastHeartbeatTime": version}]);
            let addresses = json!([{"type": "InternalIP", "address": address}]);
            let metadata = json!({"name": "n1", "resourceVersion": version.to_string()});
            let status = json!({"addresses": addresses, "conditions": conditions});
            news(&mut objects, Watched::Node, json!({"metadata": metadata, "status": status}))
        };
        assert!(node(1, "192.0.2.1"));
        assert!(!node(2, "192.0.2.1"));
        assert!(node(3, "192.0.2.2"));
        let mut pod = |version: u32, ready: &str| {
            let conditions = json!([{"type": "Ready", "status": ready, "lastProbeTime": version}]);
            let status = json!({"podIP": "10.200.1.7", "conditions": conditions});
            let metadata =
                json!({"name": "a", "namespace": "t", "resourceVersion": version.to_string()});
            news(&mut objects, Watched::Pod, json!({"metadata": metadata, "status": status}))
        };
        assert!(pod(4, "False"));
        assert!(!pod(5, "False"));
        assert!(pod(6, "True"));
    }

    #[test]
    fn late_report_of_a_watch_replaces_no_newer_answer() {
        let mut objects = Objects::default();
        let mut service = |uid: &str, version: &str| {
            let metadata = json!({"name": "a", "uid": uid, "resourceVersion": version});
            news(&mut objects, Watched::Service, json!({"metadata": metadata}))
        };
        assert!(service("one", "10"));
        assert!(!service("one", "9"), "it came late");
        assert!(service("one", "11"));
        assert!(service("two", "8"), "another object of that name");
    }

    #[test]
    fn every_kind_is_found_by_its_name() {
        for watched in Watched::OF_GATEWAYS {
            assert_eq!(Watched::of_kind(&watched.resource().kind), Some(watched));
        }
        assert_eq!(Watched::of_kind("Secret"), None);
    }

    #[test]
    fn tries_come_further_apart_up_to_a_bound() {
        let mut patience = Patience { failures: 0, most: RETRY_MAX };
        let waits: Vec<_> = patience.by_ref().take(8).collect();
        assert_eq!((waits[0], waits[1], waits[7]), (RETRY, RETRY * 2, RETRY_MAX));
        patience.reset();
        assert_eq!(patience.next(), Some(RETRY));
    }
}
