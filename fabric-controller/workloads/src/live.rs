//! Observed objects of gateways, as the API server reports them.

use std::collections::BTreeMap;

use fabric_api::ipam::{IP, Network};
use fabric_api::labels;
use fabric_api::liqo_core::ForeignCluster;
use fabric_api::networking::{Configuration, WgGatewayClientTemplate, WgGatewayServerTemplate};
use fabric_kube_client::StoreMetrics;
use fabric_kube_client::reflector::{Change, Reflector, Selection};
use fabric_objects::Problem;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, Role, RoleBinding};
use kube::Client;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::rights::RECORD_READERS;

/// Label with the maker of an EndpointSlice, and its value on those of weft.
pub const SLICE_OF: &str = "endpointslice.kubernetes.io/managed-by";
pub const SLICE_OF_WEFT: &str = "weft.dev";

/// Fields of a Deployment's status that are read.
const STATUS_OF_ROLLOUT: [&str; 6] = [
    "observedGeneration",
    "replicas",
    "updatedReplicas",
    "readyReplicas",
    "unavailableReplicas",
    "conditions",
];

/// Kinds that are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Watched {
    Account,
    Role,
    Binding,
    /// The binding of the accounts that read GatewayRecords.
    RecordReaders,
    Service,
    Slice,
    Deployment,
    Budget,
    ServerTemplate,
    ClientTemplate,
    ForeignCluster,
    /// Deployment of Liqo's controller-manager.
    LiqoManager,
    /// Service of the API server.
    ApiServer,
    /// Service of Liqo's proxy to the API server.
    LiqoProxy,
    /// Pods that Liqo runs in other clusters.
    ShadowPod,
    Network,
    /// ConfigMap with the cluster's ID.
    ClusterId,
    Configuration,
    Ip,
    /// Pods of Liqo's virtual kubelets.
    VirtualKubelet,
    /// EndpointSlices of other clusters, as their virtual kubelets reflect them.
    ShadowSlice,
    /// EndpointSlices that Liqo makes from those.
    ReflectedSlice,
}

/// Names an object of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) of: Watched,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// SHA-256 of an object's content.
pub(super) type ContentDigest = [u8; 32];

/// The latest version of each.
#[derive(Debug, Default)]
pub(super) struct Objects(BTreeMap<Key, Observed>);

/// Object with as much of its content as is read here: of a gateway's, there may be thousands.
#[derive(Debug, PartialEq)]
struct Observed {
    object: DynamicObject,
    content: ContentDigest,
}

/// Observed objects, kept current by their watches.
pub(super) struct Live {
    objects: Objects,
    reflector: Reflector<Watched, DynamicObject>,
}

impl Watched {
    /// Kinds that gateways and Services of IPs are made of and made from.
    pub(super) const OF_GATEWAYS: [Self; 10] = [
        Self::Account,
        Self::Role,
        Self::Binding,
        Self::RecordReaders,
        Self::Service,
        Self::Slice,
        Self::Deployment,
        Self::Budget,
        Self::ServerTemplate,
        Self::ClientTemplate,
    ];
    /// Kinds that IPs for Liqo's other modules are made from, those themselves, and what Liqo's uninstallation
    /// deletes.
    pub(super) const OF_LIQO_IPS: [Self; 7] = [
        Self::ApiServer,
        Self::LiqoProxy,
        Self::ShadowPod,
        Self::Network,
        Self::ClusterId,
        Self::Configuration,
        Self::Ip,
    ];
    /// Kinds that show, with those, which addresses Liqo's other modules have stored.
    pub(super) const OF_LIQO_REPAIRS: [Self; 4] =
        [Self::ForeignCluster, Self::VirtualKubelet, Self::ShadowSlice, Self::ReflectedSlice];
    /// Kinds of the objects of a gateway.
    pub(super) const MADE: [Self; 6] =
        [Self::Account, Self::Role, Self::Binding, Self::Service, Self::Deployment, Self::Budget];
    /// Kinds of the objects of an IP's Service.
    pub(super) const EXPOSED: [Self; 2] = [Self::Service, Self::Slice];

    pub(super) fn resource(self) -> ApiResource {
        match self {
            Self::Account => ApiResource::erase::<ServiceAccount>(&()),
            Self::Role => ApiResource::erase::<Role>(&()),
            Self::Binding => ApiResource::erase::<RoleBinding>(&()),
            Self::RecordReaders => ApiResource::erase::<ClusterRoleBinding>(&()),
            Self::Service | Self::ApiServer | Self::LiqoProxy => ApiResource::erase::<Service>(&()),
            Self::Slice | Self::ReflectedSlice => ApiResource::erase::<EndpointSlice>(&()),
            Self::Deployment | Self::LiqoManager => ApiResource::erase::<Deployment>(&()),
            Self::Budget => ApiResource::erase::<PodDisruptionBudget>(&()),
            Self::ServerTemplate => ApiResource::erase::<WgGatewayServerTemplate>(&()),
            Self::ClientTemplate => ApiResource::erase::<WgGatewayClientTemplate>(&()),
            Self::ForeignCluster => ApiResource::erase::<ForeignCluster>(&()),
            Self::ShadowPod | Self::VirtualKubelet => ApiResource::erase::<Pod>(&()),
            Self::Network => ApiResource::erase::<Network>(&()),
            Self::ClusterId => ApiResource::erase::<ConfigMap>(&()),
            Self::Configuration => ApiResource::erase::<Configuration>(&()),
            Self::Ip => ApiResource::erase::<IP>(&()),
            Self::ShadowSlice => {
                let kind = "ShadowEndpointSlice";
                let kind = GroupVersionKind::gvk("offloading.liqo.io", "v1beta1", kind);
                ApiResource::from_gvk_with_plural(&kind, "shadowendpointslices")
            }
        }
    }

    /// Kind of an object that is written.
    pub(super) fn of_kind(kind: &str) -> Option<Self> {
        let mut written = Self::OF_GATEWAYS.into_iter().chain([Self::Ip]);
        written.find(|watched| watched.resource().kind == kind)
    }

    /// True for a gateway's objects that take effect only once others are there: an API server resolves the
    /// Role of a binding, and no pod starts without its account.
    pub(super) fn refers_to_others(self) -> bool {
        matches!(self, Self::Binding | Self::Deployment)
    }

    /// `installation` is the namespace of weft, which is that of Liqo, too.
    fn selection(self, installation: &str) -> Selection {
        let gateways = format!("{}={}", labels::COMPONENT, labels::GATEWAY);
        let ours = format!("{}={}", labels::MANAGED_BY, labels::WEFT);
        let all = Selection::all(self.resource());
        match self {
            Self::Account | Self::Role | Self::Binding | Self::Deployment | Self::Budget => {
                all.labels(&format!("{gateways},{ours}"))
            }
            Self::RecordReaders => all.fields(&format!("metadata.name={RECORD_READERS}")),
            // Services of gateways and of IPs.
            Self::Service => all.labels(&ours),
            // Kubernetes' own slices of Services have the labels of those.
            Self::Slice => all.labels(&format!("{SLICE_OF}={SLICE_OF_WEFT}")),
            Self::ServerTemplate | Self::ClientTemplate => all,
            // Absent where Liqo is not installed.
            Self::ForeignCluster | Self::ShadowSlice => all.optional(),
            Self::LiqoManager => {
                let (name, part_of) = (labels::APP_NAME, labels::PART_OF);
                let other = labels::WEFT;
                all.inside(installation)
                    .labels(&format!("{name}=controller-manager,{part_of}!={other}"))
            }
            Self::ApiServer => all.inside("default").fields("metadata.name=kubernetes"),
            Self::LiqoProxy => {
                all.inside(installation).labels(&format!("{}=proxy", labels::APP_NAME))
            }
            Self::ShadowPod => all.labels(&format!("{}=true", labels::SHADOW_POD)),
            Self::ClusterId => all
                .inside(installation)
                .fields(&format!("metadata.name={}", labels::CLUSTER_ID_CONFIGMAP)),
            Self::VirtualKubelet => {
                all.labels(&format!("{}={}", labels::OFFLOADING_COMPONENT, labels::VIRTUAL_KUBELET))
            }
            Self::ReflectedSlice => {
                all.labels(&format!("{}={}", labels::REFLECTED_BY, labels::SHADOW_SLICE))
            }
            Self::Configuration | Self::Network | Self::Ip => all,
        }
    }

    /// Part of the content that is read here.
    fn kept(self, mut data: Value) -> Value {
        match self {
            Self::Account | Self::Role | Self::Binding | Self::Slice | Self::Budget => json!({}),
            Self::Deployment => {
                let mut kept = serde_json::Map::new();
                for field in STATUS_OF_ROLLOUT {
                    kept.insert(field.to_owned(), data["status"][field].take());
                }
                json!({"status": kept})
            }
            Self::LiqoManager => {
                let containers = data["spec"]["template"]["spec"]["containers"].as_array_mut();
                let args = containers.into_iter().flatten().map(|one| one["args"].take());
                json!({"args": args.collect::<Vec<_>>()})
            }
            Self::ApiServer | Self::LiqoProxy => {
                json!({"spec": {"clusterIP": data["spec"]["clusterIP"].take()}})
            }
            Self::ShadowPod => json!({
                "spec": {"nodeName": data["spec"]["nodeName"].take()},
                "status": {
                    "phase": data["status"]["phase"].take(),
                    "podIP": data["status"]["podIP"].take(),
                },
            }),
            Self::VirtualKubelet => json!({"status": {"phase": data["status"]["phase"].take()}}),
            Self::ShadowSlice => addresses(&mut data["spec"]["template"]),
            Self::ReflectedSlice => addresses(&mut data),
            Self::Network => json!({
                "spec": data["spec"].take(),
                "status": {"cidr": data["status"]["cidr"].take()},
            }),
            Self::Configuration => json!({
                "spec": {"remote": data["spec"]["remote"].take()},
                "status": {"remote": data["status"]["remote"].take()},
            }),
            Self::Ip => json!({"spec": data["spec"].take()}),
            Self::ClusterId
            | Self::RecordReaders
            | Self::Service
            | Self::ServerTemplate
            | Self::ClientTemplate
            | Self::ForeignCluster => data,
        }
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
        Some(&self.0.get(key)?.object)
    }

    /// Digest of all but the status and what changes by itself.
    pub(super) fn content(&self, key: &Key) -> Option<ContentDigest> {
        Some(self.0.get(key)?.content)
    }

    pub(super) fn all(&self, of: Watched) -> impl Iterator<Item = (&Key, &DynamicObject)> {
        let all = self.0.range(Key::new(of, "", "")..).take_while(move |(key, _)| key.of == of);
        all.map(|(key, observed)| (key, &observed.object))
    }

    /// True if it has changed. What a watch reports late does not replace the answer to a newer
    /// write.
    pub(super) fn put(&mut self, of: Watched, mut object: DynamicObject) -> bool {
        let key = Key::of(of, &object);
        if self.get(&key).is_some_and(|have| is_older(&object, have)) {
            return false;
        }
        object.metadata.managed_fields = None;
        let content = content(&object);
        object.data = of.kept(object.data);
        let now = Observed { object, content };
        let before = self.0.get_mut(&key);
        let is_changed = before.is_none_or(|before| {
            before
                .object
                .metadata
                .resource_version
                .clone_from(&now.object.metadata.resource_version);
            *before != now
        });
        self.0.insert(key, now);
        is_changed
    }

    /// True if it was there. A report about one that had the same name before removes nothing.
    fn remove(&mut self, of: Watched, object: &DynamicObject) -> bool {
        let key = Key::of(of, object);
        let is_same = |have: &DynamicObject| have.metadata.uid == object.metadata.uid;
        self.get(&key).is_some_and(is_same) && self.0.remove(&key).is_some()
    }
}

impl Live {
    /// Must be called within a tokio runtime; nothing is sent yet.
    pub(super) fn watch(client: &Client, metrics: &StoreMetrics, all: &[Watched]) -> Self {
        let reflector = Reflector::new(client.clone(), metrics.clone());
        let mut live = Self { objects: Objects::default(), reflector };
        live.open(all, "");
        live
    }

    /// Watches more kinds.
    pub(super) fn open(&mut self, all: &[Watched], installation: &str) {
        all.iter().for_each(|one| self.reflector.open(*one, one.selection(installation)));
    }

    /// Reasons why not all of it can be read.
    pub(super) fn obstacles(&self) -> impl Iterator<Item = &Problem> {
        self.reflector.problems()
    }

    /// True once all is known that was there at the start.
    pub(super) fn is_whole(&self) -> bool {
        self.reflector.is_synced()
    }

    /// True once all of these kinds is known that was there at the start.
    pub(super) fn has_listed(&self, all: &[Watched]) -> bool {
        all.iter().all(|of| self.reflector.is_listed(of))
    }

    /// True if that kind has no definition.
    pub(super) fn is_missing(&self, of: Watched) -> bool {
        self.reflector.is_missing(&of)
    }

    /// Waits for something to happen; true if anything is different now. Cancel safe.
    pub(super) async fn next(&mut self) -> bool {
        let unlisted = self.reflector.count_unlisted();
        let objects = &mut self.objects;
        let is_changed = match self.reflector.next().await {
            Change::Applied(of, object) => objects.put(of, object),
            Change::Deleted(of, object) => objects.remove(of, &object),
            Change::Listed(of, names) => {
                let before = objects.0.len();
                let is_named =
                    |key: &Key| names.contains(&(key.namespace.clone(), key.name.clone()));
                objects.0.retain(|key, _| key.of != of || is_named(key));
                objects.0.len() != before
            }
            Change::Problems => false,
        };
        is_changed || unlisted != self.reflector.count_unlisted()
    }

    pub(super) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Objects to update by answers of the API server, which watches may report later.
    pub(super) fn objects_mut(&mut self) -> &mut Objects {
        &mut self.objects
    }

    /// The same of one that is gone.
    pub(super) fn forget(&mut self, key: &Key) {
        self.objects.0.remove(key);
    }
}

/// Addresses of the endpoints of a slice.
fn addresses(slice: &mut Value) -> Value {
    let endpoints = slice["endpoints"].as_array_mut();
    let addresses = endpoints.into_iter().flatten().map(|one| one["addresses"].take());
    json!({"addresses": addresses.collect::<Vec<_>>()})
}

/// Digest of all but the status and what changes by itself, such as the replica that a Service selects.
pub(super) fn content(of: &DynamicObject) -> ContentDigest {
    let metadata = &of.metadata;
    let of_all = with_all_replicas(&of.data);
    let fields = of_all.as_ref().unwrap_or(&of.data).as_object().into_iter().flatten();
    let data: BTreeMap<&str, &Value> = fields
        .map(|(name, field)| (name.as_str(), field))
        .filter(|(name, _)| *name != "status")
        .collect();
    let owners = &metadata.owner_references;
    let content = (&metadata.labels, &metadata.annotations, &metadata.uid, owners, data);
    let mut digest = Sha256::new();
    // Maps with text keys, numbers and text only: JSON has a form for all of it, and a digest takes all.
    let _ = serde_json::to_writer(&mut digest, &content);
    digest.finalize().into()
}

/// A Service as it would select all replicas; `None` if it does so.
fn with_all_replicas(service: &Value) -> Option<Value> {
    service["spec"]["selector"].get(labels::REPLICA)?;
    let mut same = service.clone();
    same["spec"]["selector"].as_object_mut()?.remove(labels::REPLICA);
    Some(same)
}

/// True for an older version of the same object. Versions that are no numbers have no order.
fn is_older(object: &DynamicObject, than: &DynamicObject) -> bool {
    let version = |object: &DynamicObject| -> Option<u64> {
        object.metadata.resource_version.as_ref()?.parse().ok()
    };
    let same = object.metadata.uid == than.metadata.uid;
    same && version(object).zip(version(than)).is_some_and(|(one, other)| one < other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn news(objects: &mut Objects, of: Watched, object: Value) -> bool {
        objects.put(of, serde_json::from_value(object).unwrap())
    }

    #[test]
    fn selected_replica_is_no_content_of_a_service() {
        let content_of = |selector: Value| {
            let service = json!({"metadata": {"name": "a"}, "spec": {"selector": selector}});
            content(&serde_json::from_value(service).unwrap())
        };
        let all = content_of(json!({"a": "b"}));
        assert_eq!(content_of(json!({"a": "b", labels::REPLICA: "u"})), all);
        assert_ne!(content_of(json!({"a": "c"})), all);
    }

    #[test]
    fn late_report_of_a_watch_replaces_no_newer_answer() {
        let mut objects = Objects::default();
        let mut service = |uid: &str, version: &str, port: u16| {
            let metadata = json!({"name": "a", "uid": uid, "resourceVersion": version});
            let spec = json!({"ports": [{"port": port}]});
            news(&mut objects, Watched::Service, json!({"metadata": metadata, "spec": spec}))
        };
        assert!(service("one", "10", 1));
        assert!(!service("one", "9", 2), "it came late");
        assert!(service("one", "11", 2));
        assert!(!service("one", "12", 2), "nothing that is read of it is new");
        assert!(service("two", "8", 2), "another object of that name");
    }

    #[test]
    fn every_kind_is_found_by_its_name() {
        for watched in Watched::OF_GATEWAYS {
            assert_eq!(Watched::of_kind(&watched.resource().kind), Some(watched));
        }
        assert_eq!(Watched::of_kind("Secret"), None);
    }
}
