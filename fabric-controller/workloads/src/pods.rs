//! Pods: those of gateways, and those whose addresses lie outside their node's pod CIDRs, as those
//! of Calico's and Cilium's own address management may. Of all others nothing is stored but where
//! they are.

mod starting;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::{Cidr, check, labels};
use fabric_kube_client::StoreMetrics;
use fabric_kube_client::reflector::{Change, Reflector, Selection};
use fabric_kube_client::requests::{Name, name};
use fabric_objects::{ObjectRef, Problem};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::ResourceExt as _;
use kube::api::{ApiResource, Object};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Nodes;
use fabric_index::placement::{PodAddresses, PodFault};
use starting::StartingPod;

/// Those that are somewhere, and have not ended.
const FIELDS: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";
const UNPLACED: &str = "spec.nodeName=,status.phase=Pending";

/// Minimum time between two publications. Where pods are anywhere, each that starts or ends is
/// published to every gateway.
const PACE: Duration = Duration::from_secs(1);
/// Maximum time for which an address stays published after its pod: it goes with the next one that its node
/// gets, which spares half of the writes. A node sends nothing to an address that no pod of it has.
const LINGER: Duration = Duration::from_secs(15);

/// Parts of a pod that are read.
pub(super) type Read = Object<Spec, Status>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    node_name: String,
    host_network: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<Address>,
    conditions: Vec<Condition>,
    container_statuses: Vec<Container>,
    init_container_statuses: Vec<Container>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Address {
    ip: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Container {
    state: State,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct State {
    waiting: Option<Waiting>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Waiting {
    reason: String,
    message: String,
}

/// Watch that reports a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// Pods that are on a node.
    Placed,
    /// Pods of gateways that are on none yet.
    Unplaced,
}

/// Pod of a gateway. Of several, as long as none reports that it has the tunnel, the greatest is taken for
/// the one that has it: one that stays, one that is labelled so, one that is ready, the newest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GatewayPod {
    pub(super) stays: bool,
    /// It is labelled as the one that has the tunnel, as a new one is, too.
    pub(super) is_active: bool,
    pub(super) is_ready: bool,
    created: Option<Time>,
    pub(super) name: String,
    /// Namespace and name of the gateway.
    pub(super) gateway: Name,
    pub(super) node: String,
    pub(super) address: String,
    pub(super) uid: Option<String>,
    /// It has the label by which a Service selects it alone.
    pub(super) is_distinct: bool,
    /// Its container has been started: its image is there.
    pub(super) is_started: bool,
}

/// Parts of any other pod that are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pod {
    node: String,
    addresses: Vec<IpAddr>,
    created: Option<Time>,
}

/// All pods of the cluster that are somewhere.
pub(super) struct Pods {
    reflector: Reflector<Source, Read>,
    /// Those with addresses of their own.
    known: BTreeMap<Name, Pod>,
    of_gateways: BTreeMap<Name, GatewayPod>,
    /// Those of gateways that have not started, wherever they are reported.
    starting: BTreeMap<(Source, Name), StartingPod>,
    /// The last published addresses, and when they were last compared.
    published: PodAddresses,
    compared_at: Option<Instant>,
    /// Published addresses that no pod has, and since when.
    gone: BTreeMap<IpAddr, Instant>,
    /// There may be others by now.
    is_changed: bool,
}

impl Pods {
    pub(super) fn watch(client: &Client, metrics: &StoreMetrics) -> Self {
        let all = Selection::all(ApiResource::erase::<core::Pod>(&())).fields(FIELDS);
        let mut reflector = Reflector::new(client.clone(), metrics.clone());
        reflector.open(Source::Placed, all.labels(&format!("{}!=true", labels::SHADOW_POD)));
        let of_gateways = format!("{}={}", labels::COMPONENT, labels::GATEWAY);
        let unplaced = Selection::all(ApiResource::erase::<core::Pod>(&())).fields(UNPLACED);
        reflector.open(Source::Unplaced, unplaced.labels(&of_gateways));
        Self {
            reflector,
            known: BTreeMap::new(),
            of_gateways: BTreeMap::new(),
            starting: BTreeMap::new(),
            published: PodAddresses::new(),
            compared_at: None,
            gone: BTreeMap::new(),
            is_changed: true,
        }
    }

    /// True once all is known that was there at the start.
    pub(super) fn is_whole(&self) -> bool {
        self.reflector.is_synced()
    }

    /// Reasons why they cannot be read.
    pub(super) fn obstacles(&self) -> impl Iterator<Item = &Problem> {
        self.reflector.problems()
    }

    /// Waits for something to happen; true if placements of gateways are different now. Other addresses
    /// outside make it due. Cancel safe.
    pub(super) async fn next(&mut self, nodes: &Nodes) -> bool {
        let change = self.reflector.next().await;
        self.take(change, nodes)
    }

    pub(super) fn of_gateways(&self) -> impl Iterator<Item = &GatewayPod> {
        self.of_gateways.values()
    }

    /// Fault of a pod of that gateway that does not start.
    pub(super) fn start_fault(&self, gateway: &ObjectRef, now: Timestamp) -> Option<PodFault> {
        let namespace = gateway.namespace.as_deref().unwrap_or_default();
        let is_its =
            |pod: &StartingPod| pod.gateway.0 == namespace && pod.gateway.1 == gateway.name;
        let mut own = self.starting.iter().filter(|(_, pod)| is_its(pod));
        let ((_, (_, name)), pod) = own.find(|(_, pod)| pod.delay.is_fault(now))?;
        Some(pod.delay.fault_of(namespace, name))
    }

    /// Time at which the next delay becomes a fault.
    pub(super) fn start_due(&self, now: Timestamp) -> Option<Instant> {
        let due = self.starting.values().filter_map(|pod| pod.delay.fault_at());
        let next = due.filter(|at| *at > now).min()?;
        Some(Instant::now() + Duration::try_from(next.duration_since(now)).ok()?)
    }

    /// Addresses outside, as of now or of a moment ago: a change is published at once, the next
    /// ones later.
    pub(super) fn addresses(&mut self, nodes: &Nodes, now: Instant) -> &PodAddresses {
        if self.due(now).is_some_and(|due| due <= now) {
            (self.is_changed, self.compared_at) = (false, Some(now));
            let mut outside = self.outside(nodes);
            let lingering = self.lingering(&outside, nodes, now);
            self.gone = lingering.iter().map(|(_, ip, since)| (*ip, *since)).collect();
            for (node, ip, _) in lingering {
                outside.entry(node).or_default().insert(ip);
            }
            self.published = outside;
        }
        &self.published
    }

    /// Time at which there may be more to publish.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let changed = self.is_changed.then(|| self.compared_at.map_or(now, |at| at + PACE));
        changed.or_else(|| self.gone.values().min().map(|since| *since + LINGER))
    }

    /// Published addresses that no pod has, of nodes with nothing else to publish.
    fn lingering(
        &self,
        outside: &PodAddresses,
        nodes: &Nodes,
        now: Instant,
    ) -> Vec<(String, IpAddr, Instant)> {
        let in_use: BTreeSet<IpAddr> =
            self.known.values().flat_map(|pod| &pod.addresses).copied().collect();
        let none = BTreeSet::new();
        let mut all = Vec::new();
        for (node, before) in self.published.iter().filter(|(node, _)| nodes.contains_key(*node)) {
            let present = outside.get(node).unwrap_or(&none);
            let gone = before.difference(present);
            let gone: BTreeMap<IpAddr, Instant> =
                gone.map(|ip| (*ip, self.gone.get(ip).copied().unwrap_or(now))).collect();
            let is_due =
                |(ip, since): (&IpAddr, &Instant)| in_use.contains(ip) || *since + LINGER <= now;
            if present.is_subset(before) && !gone.iter().any(is_due) {
                all.extend(gone.into_iter().map(|(ip, since)| (node.clone(), ip, since)));
            }
        }
        all
    }

    /// The nodes have other pod CIDRs now.
    pub(super) fn nodes_changed(&mut self) {
        self.is_changed = true;
    }

    /// An address that two pods have, one of which is about to end, is the newer one's.
    fn outside(&self, nodes: &Nodes) -> PodAddresses {
        let cidrs: BTreeMap<&str, Vec<Cidr>> =
            nodes.iter().map(|(name, node)| (name.as_str(), cidrs_of(node))).collect();
        let mut owners: BTreeMap<IpAddr, &Pod> = BTreeMap::new();
        for pod in self.known.values() {
            for ip in &pod.addresses {
                let before = owners.entry(*ip).or_insert(pod);
                if before.created < pod.created {
                    *before = pod;
                }
            }
        }
        let mut outside = PodAddresses::new();
        for (ip, pod) in owners {
            if cidrs.get(pod.node.as_str()).is_some_and(|cidrs| is_outside(ip, cidrs)) {
                outside.entry(pod.node.clone()).or_default().insert(ip);
            }
        }
        outside
    }

    fn take(&mut self, change: Change<Source, Read>, nodes: &Nodes) -> bool {
        match change {
            Change::Applied(of, read) => self.put(of, name(&read.metadata), Some(&read), nodes),
            Change::Deleted(of, read) => self.put(of, name(&read.metadata), None, nodes),
            Change::Listed(of, names) => {
                let mut gone: BTreeSet<Name> = BTreeSet::new();
                if of == Source::Placed {
                    gone.extend(self.known.keys().chain(self.of_gateways.keys()).cloned());
                }
                let starting = self.starting.keys().filter(|(source, _)| *source == of);
                gone.extend(starting.map(|(_, name)| name.clone()));
                let gone = gone.into_iter().filter(|name| !names.contains(name));
                gone.fold(false, |news, name| self.put(of, name, None, nodes) | news)
            }
            Change::Problems => false,
        }
    }

    /// Returns true if placements of gateways are different now, or reasons for which pods do not start.
    fn put(&mut self, of: Source, name: Name, read: Option<&Read>, nodes: &Nodes) -> bool {
        let starting = read.and_then(StartingPod::of);
        let before = put(&mut self.starting, (of, name.clone()), starting.clone());
        let is_placed = of == Source::Placed && self.replace(name, read, nodes);
        before != starting || is_placed
    }

    /// Returns true if placements of gateways are different now.
    fn replace(&mut self, name: Name, read: Option<&Read>, nodes: &Nodes) -> bool {
        let (pod, of_gateway) = (read.and_then(Pod::of), read.and_then(GatewayPod::of));
        let gateway_before = put(&mut self.of_gateways, name.clone(), of_gateway.clone());
        let before = put(&mut self.known, name, pod.clone());
        let matters = |pod: &Pod| {
            pod.is_outside(nodes) || pod.addresses.iter().any(|ip| self.gone.contains_key(ip))
        };
        self.is_changed |= before != pod && before.iter().chain(&pod).any(matters);
        gateway_before != of_gateway
    }
}

/// Returns the value before.
pub(super) fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, name: K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(name, value),
        None => map.remove(&name),
    }
}

impl Status {
    fn is_ready(&self) -> bool {
        self.conditions.iter().any(|of| of.type_ == "Ready" && of.status == "True")
    }
}

impl GatewayPod {
    /// `None` for any other pod.
    pub(super) fn of(read: &Read) -> Option<Self> {
        let has = |label: &str, value: &str| read.labels().get(label).is_some_and(|v| v == value);
        let gateway = read.labels().get(labels::GATEWAY_NAME)?;
        let status = read.status.as_ref()?;
        let runs = matches!(status.phase.as_str(), "Running" | "Pending");
        let (namespace, name) = name(&read.metadata);
        (has(labels::COMPONENT, labels::GATEWAY) && runs && !status.pod_ip.is_empty()).then(|| {
            Self {
                stays: read.metadata.deletion_timestamp.is_none(),
                is_ready: status.is_ready(),
                created: read.metadata.creation_timestamp.clone(),
                name,
                gateway: (namespace, gateway.clone()),
                node: read.spec.node_name.clone(),
                address: status.pod_ip.clone(),
                uid: read.metadata.uid.clone(),
                is_distinct: read.labels().get(labels::REPLICA) == read.metadata.uid.as_ref(),
                is_active: has(labels::ACTIVE, "true"),
                is_started: status.phase == "Running",
            }
        })
    }

    pub(super) fn is_of(&self, namespace: &str, gateway: &str) -> bool {
        self.gateway.0 == namespace && self.gateway.1 == gateway
    }
}

impl Pod {
    /// `None` of one that has no address of its own.
    fn of(read: &Read) -> Option<Self> {
        let all = read.status.iter().flat_map(|status| &status.pod_ips);
        let addresses: Vec<IpAddr> = all.filter_map(|address| address.ip.parse().ok()).collect();
        let own = !read.spec.host_network && !addresses.is_empty();
        own.then(|| Self {
            node: read.spec.node_name.clone(),
            addresses,
            created: read.metadata.creation_timestamp.clone(),
        })
    }

    fn is_outside(&self, nodes: &Nodes) -> bool {
        let cidrs = nodes.get(&self.node).map(cidrs_of).unwrap_or_default();
        self.addresses.iter().any(|ip| is_outside(*ip, &cidrs))
    }
}

fn cidrs_of(node: &core::Node) -> Vec<Cidr> {
    check::node_pod_cidrs(node).into_iter().filter_map(|(_, cidr)| cidr.ok()).collect()
}

fn is_outside(ip: IpAddr, cidrs: &[Cidr]) -> bool {
    !cidrs.iter().any(|cidr| cidr.contains(ip))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pods() -> Pods {
        let unreachable = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        Pods::watch(&Client::try_from(unreachable).unwrap(), &StoreMetrics::default())
    }

    fn nodes() -> Nodes {
        let mut nodes = BTreeMap::new();
        for n in [1, 2] {
            let cidr = format!("10.200.{n}.0/24");
            let node = json!({"metadata": {"name": format!("n{n}")}, "spec": {"podCIDR": cidr}});
            nodes.insert(format!("n{n}"), serde_json::from_value(node).unwrap());
        }
        nodes.into()
    }

    fn pod(name: &str, node: &str, ip: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "t", "creationTimestamp": "2026-01-31T12:00:00Z"},
            "spec": {"nodeName": node, "containers": []},
            "status": {"podIP": ip, "podIPs": [{"ip": ip}]}})
    }

    fn read(pod: Value) -> Read {
        serde_json::from_value(pod).unwrap()
    }

    fn outside(pods: &Pods) -> Vec<String> {
        let all = pods.outside(&nodes());
        let pairs = all.iter().flat_map(|(node, ips)| ips.iter().map(move |ip| (node, ip)));
        pairs.map(|(node, ip)| format!("{node} {ip}")).collect()
    }

    fn applied(pods: &mut Pods, pod: Value) -> bool {
        pods.take(Change::Applied(Source::Placed, read(pod)), &nodes())
    }

    /// True if addresses outside may be others since the last call.
    fn changed(pods: &mut Pods) -> bool {
        std::mem::take(&mut pods.is_changed)
    }

    #[tokio::test]
    async fn only_addresses_outside_of_the_nodes_cidrs_matter() {
        let mut pods = pods();
        assert!(changed(&mut pods), "nothing is published yet");
        let mut changes = |pod: Value| !applied(&mut pods, pod) && changed(&mut pods);
        assert!(!changes(pod("a", "n1", "10.200.1.7")));
        assert!(changes(pod("b", "n1", "10.200.2.7")));
        assert!(!changes(pod("b", "n1", "10.200.2.7")), "no news");
        let mut host = pod("c", "n2", "192.0.2.12");
        host["spec"]["hostNetwork"] = json!(true);
        assert!(!changes(host));
        applied(&mut pods, pod("d", "virtual", "10.200.9.9"));
        assert_eq!(outside(&pods), ["n1 10.200.2.7"]);
        let gone = Change::Deleted(Source::Placed, read(pod("b", "n1", "10.200.2.7")));
        assert!(!pods.take(gone, &nodes()), "gateways are where they were");
        assert!(changed(&mut pods));
        assert!(outside(&pods).is_empty());
    }

    #[tokio::test]
    async fn changes_after_the_first_are_published_together() {
        let start = Instant::now();
        let mut pods = pods();
        let mut published = Vec::new();
        for (at, ip) in [(0, 1), (10, 2), (20, 3), (1000, 4), (1500, 4), (2500, 5)] {
            applied(&mut pods, pod(&format!("p{ip}"), "n1", &format!("10.200.9.{ip}")));
            let now = start + Duration::from_millis(at);
            let count = pods.addresses(&nodes(), now)["n1"].len();
            published.push((count, pods.due(now).map(|due| (due - start).as_millis())));
        }
        let later = Some(1000);
        let expected = [(1, None), (1, later), (1, later), (4, None), (4, None), (5, None)];
        assert_eq!(published, expected);
    }

    #[tokio::test]
    async fn address_goes_with_next_one_of_its_node() {
        let start = Instant::now();
        let mut pods = pods();
        let mut at = |seconds: u64, changes: &[(&str, &str, &str)]| {
            for (name, node, ip) in changes {
                let change = read(pod(name, node, if ip.is_empty() { "10.200.9.9" } else { ip }));
                let is_gone = ip.is_empty();
                let change = if is_gone {
                    Change::Deleted(Source::Placed, change)
                } else {
                    Change::Applied(Source::Placed, change)
                };
                pods.take(change, &nodes());
            }
            let now = start + Duration::from_secs(seconds);
            let all = pods.addresses(&nodes(), now).clone();
            let pairs = all.iter().flat_map(|(node, ips)| ips.iter().map(move |ip| (node, ip)));
            let all: Vec<_> = pairs.map(|(node, ip)| format!("{node} {ip}")).collect();
            (all.join(", "), pods.due(now).map(|due| (due - start).as_secs()))
        };
        let of = |all: &str, due: Option<u64>| (all.to_owned(), due);
        let first = [("a", "n1", "10.200.9.1"), ("b", "n2", "10.200.9.2")];
        assert_eq!(at(0, &first), of("n1 10.200.9.1, n2 10.200.9.2", None));
        let gone = [("a", "n1", ""), ("b", "n2", "")];
        assert_eq!(at(10, &gone), of("n1 10.200.9.1, n2 10.200.9.2", Some(25)));
        assert_eq!(
            at(20, &[("c", "n1", "10.200.9.3")]),
            of("n1 10.200.9.3, n2 10.200.9.2", Some(25))
        );
        assert_eq!(at(25, &[]), of("n1 10.200.9.3", None), "nothing else of n2");
        assert_eq!(at(30, &[("c", "n1", "")]), of("n1 10.200.9.3", Some(45)));
        let moved = at(31, &[("d", "n2", "10.200.9.3")]);
        assert_eq!(moved, of("n2 10.200.9.3", None), "another node's address goes at once");
        assert_eq!(at(40, &[("d", "n2", "")]), of("n2 10.200.9.3", Some(55)));
        let inside = at(41, &[("e", "n1", "10.200.1.7"), ("f", "n1", "10.200.9.3")]);
        assert_eq!(inside, of("n1 10.200.9.3", None));
    }

    #[tokio::test]
    async fn shared_address_is_that_of_newer_pod() {
        let mut pods = pods();
        let mut newer = pod("a", "n2", "10.200.9.9");
        newer["metadata"]["creationTimestamp"] = json!("2026-01-31T12:00:01Z");
        applied(&mut pods, newer);
        applied(&mut pods, pod("b", "n1", "10.200.9.9"));
        assert_eq!(outside(&pods), ["n2 10.200.9.9"]);
    }

    #[tokio::test]
    async fn pod_that_a_new_list_lacks_is_gone() {
        let mut pods = pods();
        applied(&mut pods, pod("a", "n1", "10.200.9.1"));
        applied(&mut pods, pod("b", "n1", "10.200.9.2"));
        assert_eq!(outside(&pods).len(), 2);
        let names = || [("t".to_owned(), "b".to_owned())].into();
        changed(&mut pods);
        pods.take(Change::Listed(Source::Placed, names()), &nodes());
        assert!(changed(&mut pods));
        assert_eq!(outside(&pods), ["n1 10.200.9.2"]);
        pods.take(Change::Listed(Source::Placed, names()), &nodes());
        assert!(!changed(&mut pods), "no news");
    }

    #[tokio::test]
    async fn gateway_pod_is_observed() {
        let mut pods = pods();
        let mut gateway = pod("g", "n1", "10.200.1.7");
        gateway["metadata"]["labels"] = json!({"networking.liqo.io/component": "gateway",
            "networking.liqo.io/gateway-name": "server", "networking.liqo.io/active": "true"});
        gateway["status"]["phase"] = json!("Running");
        let mut ready = |status: &str| {
            let condition = json!([{"type": "Ready", "status": status, "lastProbeTime": null}]);
            gateway["status"]["conditions"] = condition;
            let is_changed = applied(&mut pods, gateway.clone());
            (is_changed, pods.of_gateways().map(|pod| pod.is_ready).collect::<Vec<_>>())
        };
        assert_eq!(ready("False"), (true, vec![false]));
        assert_eq!(ready("False"), (false, vec![false]));
        assert_eq!(ready("True"), (true, vec![true]));
        gateway["metadata"]["labels"]["networking.liqo.io/active"] = json!("false");
        assert!(applied(&mut pods, gateway));
        let active: Vec<_> = pods.of_gateways().map(|pod| pod.is_active).collect();
        assert_eq!(active, [false]);
    }
}
