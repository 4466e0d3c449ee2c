//! Pods whose addresses lie outside their node's pod CIDRs, as those of Calico's and Cilium's own
//! address management may. Of all others nothing is kept but where they are.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::{Cidr, check, labels};
use futures::stream::{BoxStream, StreamExt as _};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ApiResource, Object};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::live::{Key, Objects, Patience, Watched};
use fabric_core::placement::PodAddresses;

/// Those that are somewhere, and have not ended.
const FIELDS: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// Minimum time between two publications. Where pods are anywhere, each that starts or ends is
/// published to every gateway.
const PACE: Duration = Duration::from_secs(1);

/// Parts of a pod that are read.
type Read = Object<Spec, Status>;
type Told = watcher::Result<Event<Read>>;
type Name = (String, String);

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: String,
    host_network: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    #[serde(rename = "podIPs")]
    pod_ips: Vec<Address>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Address {
    ip: String,
}

/// Parts of a pod that are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    node: String,
    addresses: Vec<IpAddr>,
    created: Option<Time>,
}

/// All pods of the cluster that have addresses of their own.
pub(super) struct Pods {
    told: BoxStream<'static, Told>,
    known: BTreeMap<Name, Pod>,
    /// Pods named since the list of all of them began.
    listed: Option<BTreeSet<Name>>,
    whole: bool,
    failing: Option<String>,
    /// The last published addresses, and when that was.
    news: PodAddresses,
    at: Option<Instant>,
    /// There are others by now.
    more: bool,
}

impl Pods {
    pub(super) fn watch(client: &Client) -> Self {
        let api = Api::all_with(client.clone(), &ApiResource::erase::<core::Pod>(&()));
        let selection = watcher::Config::default()
            .fields(FIELDS)
            .labels(&format!("{}!=true", labels::SHADOW_POD));
        // That a list begins is no success yet.
        let told = watcher(api, selection).filter(|told| ready(!matches!(told, Ok(Event::Init))));
        let told = told.backoff(Patience::default()).boxed();
        Self::of(told)
    }

    fn of(told: BoxStream<'static, Told>) -> Self {
        Self {
            told,
            known: BTreeMap::new(),
            listed: None,
            whole: false,
            failing: None,
            news: PodAddresses::new(),
            at: None,
            more: false,
        }
    }

    /// True once all is known that was there at the start.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Waits for something to happen; the pods that are different now, as they were and as they are.
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Vec<Pod> {
        match self.told.next().await {
            Some(told) => self.take(told),
            None => std::future::pending().await,
        }
    }

    /// Returns whether these change what is published.
    pub(super) fn matter(&self, changed: &[Pod], nodes: &Objects) -> bool {
        changed.iter().any(|pod| {
            let cidrs = cidrs_of(&pod.node, nodes);
            pod.addresses.iter().any(|ip| is_outside(*ip, &cidrs))
        })
    }

    /// Addresses outside, as of now or of a moment ago: a change is published at once, the next
    /// ones later.
    pub(super) fn tell(&mut self, nodes: &Objects, now: Instant) -> PodAddresses {
        let outside = self.outside(nodes);
        let rests = self.at.is_some_and(|at| now.duration_since(at) < PACE);
        self.more = rests && outside != self.news;
        if !rests && outside != self.news {
            self.news = outside;
            self.at = Some(now);
        }
        self.news.clone()
    }

    /// Time at which there is more to publish.
    pub(super) fn due(&self) -> Option<Instant> {
        self.at.filter(|_| self.more).map(|at| at + PACE)
    }

    /// An address that two pods have, one of which is about to end, is the newer one's.
    fn outside(&self, nodes: &Objects) -> PodAddresses {
        let cidrs: BTreeMap<&str, Vec<Cidr>> = nodes
            .all(Watched::Node)
            .map(|(key, _)| (key.name.as_str(), cidrs_of(&key.name, nodes)))
            .collect();
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

    fn take(&mut self, told: Told) -> Vec<Pod> {
        let event = match told {
            Ok(event) => event,
            Err(error) => {
                self.failed(&error);
                return Vec::new();
            }
        };
        match event {
            Event::Init => {
                self.listed = Some(BTreeSet::new());
                Vec::new()
            }
            Event::InitApply(pod) => {
                self.listed.get_or_insert_default().insert(name(&pod));
                self.put(&pod)
            }
            Event::Apply(pod) => self.put(&pod),
            Event::Delete(pod) => self.known.remove(&name(&pod)).into_iter().collect(),
            Event::InitDone => self.all_listed(),
        }
    }

    fn put(&mut self, read: &Read) -> Vec<Pod> {
        self.failing = None;
        let name = name(read);
        let now = Pod::of(read);
        let before = match now.clone() {
            Some(pod) => self.known.insert(name, pod),
            None => self.known.remove(&name),
        };
        if before == now { Vec::new() } else { before.into_iter().chain(now).collect() }
    }

    /// Removes the pods that the list did not name.
    fn all_listed(&mut self) -> Vec<Pod> {
        self.failing = None;
        self.whole = true;
        let named = self.listed.take().unwrap_or_default();
        let all = std::mem::take(&mut self.known).into_iter();
        let (stay, gone): (Vec<_>, Vec<_>) = all.partition(|(name, _)| named.contains(name));
        self.known = stay.into_iter().collect();
        gone.into_iter().map(|(_, pod)| pod).collect()
    }

    fn failed(&mut self, error: &watcher::Error) {
        self.listed = None;
        let told = error.to_string();
        if self.failing.as_ref() != Some(&told) {
            tracing::warn!(error = told, "cannot watch pods; tried again");
            self.failing = Some(told);
        }
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
}

fn name(of: &Read) -> Name {
    let metadata = &of.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    (text(&metadata.namespace), text(&metadata.name))
}

fn cidrs_of(node: &str, nodes: &Objects) -> Vec<Cidr> {
    let node = nodes.get(&Key::new(Watched::Node, "", node));
    let node = node.and_then(|node| serde_json::to_value(node).ok());
    let node: Option<core::Node> = node.and_then(|node| serde_json::from_value(node).ok());
    let cidrs = node.iter().flat_map(check::node_pod_cidrs);
    cidrs.filter_map(|(_, cidr)| cidr.ok()).collect()
}

fn is_outside(ip: IpAddr, cidrs: &[Cidr]) -> bool {
    !cidrs.iter().any(|cidr| cidr.contains(ip))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pods() -> Pods {
        Pods::of(futures::stream::pending().boxed())
    }

    fn nodes() -> Objects {
        let mut nodes = Objects::default();
        for n in [1, 2] {
            let cidr = format!("10.200.{n}.0/24");
            let node = json!({"metadata": {"name": format!("n{n}")}, "spec": {"podCIDR": cidr}});
            nodes.put(Watched::Node, serde_json::from_value(node).unwrap());
        }
        nodes
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

    #[test]
    fn only_addresses_outside_of_the_nodes_cidrs_matter() {
        let mut pods = pods();
        let inside = pods.take(Ok(Event::Apply(read(pod("a", "n1", "10.200.1.7")))));
        assert!(!pods.matter(&inside, &nodes()));
        let other = pods.take(Ok(Event::Apply(read(pod("b", "n1", "10.200.2.7")))));
        assert!(pods.matter(&other, &nodes()));
        let again = pods.take(Ok(Event::Apply(read(pod("b", "n1", "10.200.2.7")))));
        assert!(again.is_empty(), "no news: {again:?}");
        let mut host = pod("c", "n2", "192.0.2.12");
        host["spec"]["hostNetwork"] = json!(true);
        assert!(pods.take(Ok(Event::Apply(read(host)))).is_empty());
        pods.take(Ok(Event::Apply(read(pod("d", "virtual", "10.200.9.9")))));
        assert_eq!(outside(&pods), ["n1 10.200.2.7"]);
        let gone = pods.take(Ok(Event::Delete(read(pod("b", "n1", "10.200.2.7")))));
        assert!(pods.matter(&gone, &nodes()));
        assert!(outside(&pods).is_empty());
    }

    #[test]
    fn news_are_told_at_once_and_more_of_them_together() {
        let start = Instant::now();
        let mut pods = pods();
        let mut told = Vec::new();
        for (at, ip) in [(0, 1), (10, 2), (20, 3), (1000, 4), (1500, 4), (2500, 5)] {
            let name = format!("p{ip}");
            pods.take(Ok(Event::Apply(read(pod(&name, "n1", &format!("10.200.9.{ip}"))))));
            let count = pods.tell(&nodes(), start + Duration::from_millis(at))["n1"].len();
            told.push((count, pods.due().map(|due| (due - start).as_millis())));
        }
        let later = Some(1000);
        let expected = [(1, None), (1, later), (1, later), (4, None), (4, None), (5, None)];
        assert_eq!(told, expected);
    }

    #[test]
    fn an_address_is_the_newer_pods() {
        let mut pods = pods();
        let mut newer = pod("a", "n2", "10.200.9.9");
        newer["metadata"]["creationTimestamp"] = json!("2026-01-31T12:00:01Z");
        pods.take(Ok(Event::Apply(read(newer))));
        pods.take(Ok(Event::Apply(read(pod("b", "n1", "10.200.9.9")))));
        assert_eq!(outside(&pods), ["n2 10.200.9.9"]);
    }

    #[test]
    fn what_a_new_list_lacks_is_gone_and_nothing_before_its_end() {
        let mut pods = pods();
        pods.take(Ok(Event::Apply(read(pod("a", "n1", "10.200.9.1")))));
        pods.take(Ok(Event::Apply(read(pod("b", "n1", "10.200.9.2")))));
        pods.take(Ok(Event::Init));
        pods.take(Ok(Event::InitApply(read(pod("b", "n1", "10.200.9.2")))));
        assert_eq!(outside(&pods).len(), 2);
        assert!(!pods.is_whole());
        assert_eq!(pods.take(Ok(Event::InitDone)).len(), 1);
        assert_eq!(outside(&pods), ["n1 10.200.9.2"]);
        assert!(pods.is_whole());
    }
}
