//! Addresses of a peer that Liqo's other modules have stored as that has them, not as this cluster sees
//! them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use fabric_api::{Cidr, labels};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::Value;

use crate::foreign_clusters::peer_of;
use crate::live::{Key, Objects, Watched};

/// Age from which on a virtual kubelet is restarted. A younger one may wait for the Lease of the one
/// before, which has stored what is seen.
const MIN_AGE: SignedDuration = SignedDuration::from_secs(60);

/// Address that is stored unmapped.
#[derive(Debug, PartialEq)]
pub(super) struct Unmapped {
    /// Name and uid of the object that is reported.
    pub(super) object: (String, String),
    /// Pod that has the address, as `namespace/name`; absent for an EndpointSlice.
    pod: Option<String>,
    peer: String,
    found: IpAddr,
    expected: IpAddr,
    /// Absent while it is too early.
    pub(super) repair: Option<Repair>,
}

#[derive(Debug, PartialEq)]
pub(super) enum Repair {
    /// A change of the ShadowEndpointSlice with this uid, which has Liqo write its EndpointSlice.
    Annotate { uid: String },
    /// Deletion of a virtual kubelet's pods, by name and uid.
    Delete { pods: Vec<(String, String)> },
}

/// CIDRs of a peer, each as the peer has it and as this cluster sees it.
struct Mapping(Vec<[Cidr; 2]>);

/// All that is unmapped although networking with its peer is on: EndpointSlices by their
/// ShadowEndpointSlice, virtual kubelets by the name of their node.
pub(super) fn unmapped(objects: &Objects, now: Timestamp) -> BTreeMap<Key, Unmapped> {
    let mappings = mappings(objects);
    if mappings.is_empty() {
        return BTreeMap::new();
    }
    let slices = objects.all(Watched::ReflectedSlice).filter_map(|(key, slice)| {
        let key = Key::new(Watched::ShadowSlice, &key.namespace, &key.name);
        let unmapped = of_slice(slice, objects.get(&key)?, &mappings)?;
        Some((key, unmapped))
    });
    slices.chain(of_kubelets(objects, &mappings, now)).collect()
}

/// Mappings of peers with networking on, by cluster ID.
fn mappings(objects: &Objects) -> BTreeMap<String, Mapping> {
    let is_on =
        |object: &DynamicObject| object.data["status"]["modules"]["networking"]["enabled"] == true;
    let on = objects.all(Watched::ForeignCluster).filter(|(_, object)| is_on(object));
    let on: BTreeSet<String> = on.map(|(_, object)| peer_of(object)).collect();
    let configurations = objects.all(Watched::Configuration).filter_map(|(_, configuration)| {
        let peer = configuration.labels().get(labels::REMOTE_CLUSTER_ID)?;
        Some((on.get(peer)?.clone(), Mapping::of(configuration)?))
    });
    configurations.collect()
}

/// Address that the slice has unmapped. One that it lacks is no fault: Liqo may be about to write it.
fn of_slice(
    slice: &DynamicObject,
    shadow: &DynamicObject,
    mappings: &BTreeMap<String, Mapping>,
) -> Option<Unmapped> {
    let uid = shadow.uid()?;
    let is_owned = slice.owner_references().iter().any(|owner| owner.uid == uid);
    if !is_owned || is_ending(slice) || is_ending(shadow) {
        return None;
    }
    let peer = shadow.labels().get(labels::REFLECTED_FROM)?;
    let mapping = mappings.get(peer)?;
    let (stored, direct) = (addresses(slice), direct(shadow));
    let (found, expected) = addresses(shadow).difference(&direct).find_map(|found| {
        let expected = mapping.seen(*found)?;
        let is_unmapped = stored.contains(found) && !stored.contains(&expected);
        is_unmapped.then_some((*found, expected))
    })?;
    let repair = Some(Repair::Annotate { uid: uid.clone() });
    let (object, peer) = ((shadow.name_any(), uid), peer.clone());
    Some(Unmapped { object, pod: None, peer, found, expected, repair })
}

/// Virtual kubelets whose pods have addresses of the peer.
fn of_kubelets(
    objects: &Objects,
    mappings: &BTreeMap<String, Mapping>,
    now: Timestamp,
) -> BTreeMap<Key, Unmapped> {
    let mut nodes: BTreeMap<&str, Vec<&DynamicObject>> = BTreeMap::new();
    for (_, kubelet) in objects.all(Watched::VirtualKubelet) {
        let node = kubelet.labels().get(labels::VIRTUAL_NODE);
        if let Some(node) = node.filter(|_| runs(kubelet)) {
            nodes.entry(node).or_default().push(kubelet);
        }
    }
    let mut found = BTreeMap::new();
    for (_, pod) in objects.all(Watched::ShadowPod).filter(|(_, pod)| runs(pod)) {
        let node = pod.data["spec"]["nodeName"].as_str().unwrap_or_default();
        let Some(kubelets) = nodes.get(node) else { continue };
        if let Some((key, unmapped)) = of_kubelet(node, kubelets, pod, mappings, now) {
            found.entry(key).or_insert(unmapped);
        }
    }
    found
}

fn of_kubelet(
    node: &str,
    kubelets: &[&DynamicObject],
    pod: &DynamicObject,
    mappings: &BTreeMap<String, Mapping>,
    now: Timestamp,
) -> Option<(Key, Unmapped)> {
    let first = kubelets.first()?;
    let peer = first.labels().get(labels::REMOTE_CLUSTER_ID)?;
    let mapping = mappings.get(peer)?;
    let found: IpAddr = pod.data["status"]["podIP"].as_str()?.parse().ok()?;
    let expected = mapping.seen(found).filter(|_| !mapping.has_seen(found))?;
    let pods = kubelets.iter().map(|pod| Some((pod.name_any(), pod.uid()?)));
    let pods: Vec<_> = pods.collect::<Option<_>>()?;
    let is_old = |pod: &&DynamicObject| {
        let created = pod.creation_timestamp();
        created.is_some_and(|created| now.duration_since(created.0) >= MIN_AGE)
    };
    let unmapped = Unmapped {
        object: pods.first()?.clone(),
        pod: Some(format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())),
        peer: peer.clone(),
        found,
        expected,
        repair: kubelets.iter().all(is_old).then_some(Repair::Delete { pods }),
    };
    let namespace = first.namespace().unwrap_or_default();
    Some((Key::new(Watched::VirtualKubelet, &namespace, node), unmapped))
}

impl Mapping {
    /// `None` while not all CIDRs of the peer are mapped.
    fn of(configuration: &DynamicObject) -> Option<Self> {
        let mut pairs = Vec::new();
        for kind in ["pod", "external"] {
            let cidrs = |part: &str| -> Option<Vec<Cidr>> {
                let all = configuration.data[part]["remote"]["cidr"][kind].as_array()?;
                all.iter().map(|cidr| cidr.as_str()?.parse().ok()).collect()
            };
            let (own, seen) = (cidrs("spec")?, cidrs("status")?);
            if own.len() != seen.len() {
                return None;
            }
            pairs.extend(own.into_iter().zip(seen).map(|(own, seen)| [own, seen]));
        }
        Some(Self(pairs))
    }

    /// Address of the peer as this cluster sees it; `None` if that is the same, or another's.
    fn seen(&self, address: IpAddr) -> Option<IpAddr> {
        let [own, seen] = self.0.iter().find(|[own, _]| own.contains(address))?;
        seen.translate(address, own).filter(|seen| *seen != address)
    }

    /// True for an address that may be mapped already.
    fn has_seen(&self, address: IpAddr) -> bool {
        self.0.iter().any(|[_, seen]| seen.contains(address))
    }
}

impl fmt::Display for Unmapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, found, expected, .. } = self;
        match &self.pod {
            None => write!(
                f,
                "its EndpointSlice had {found} of {peer}, expected {expected}: Liqo wrote it while \
                 networking was off, and is made to write it again"
            ),
            Some(pod) => write!(
                f,
                "pod {pod} had {found} of {peer}, expected {expected}: this virtual kubelet started \
                 while networking was off, and is started again once it is {} s old",
                MIN_AGE.as_secs()
            ),
        }
    }
}

fn addresses(slice: &DynamicObject) -> BTreeSet<IpAddr> {
    let endpoints = slice.data["addresses"].as_array().into_iter().flatten();
    let addresses = endpoints.flat_map(|one| one.as_array().into_iter().flatten());
    addresses.filter_map(address).collect()
}

/// Addresses in the slice that are not the peer's, but those of other clusters.
fn direct(shadow: &DynamicObject) -> BTreeSet<IpAddr> {
    let text = shadow.annotations().get(labels::DIRECT_CONNECTIONS);
    let data: Value = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let clusters = data["clusterAddresses"].as_object().into_iter().flatten();
    let addresses = clusters.flat_map(|(_, all)| all.as_array().into_iter().flatten());
    addresses.filter_map(address).collect()
}

fn address(value: &Value) -> Option<IpAddr> {
    value.as_str()?.parse().ok()
}

/// Liqo does not update the address of a pod that has ended.
fn runs(pod: &DynamicObject) -> bool {
    let has_ended = ["Succeeded", "Failed"].map(|phase| pod.data["status"]["phase"] == phase);
    !is_ending(pod) && has_ended == [false; 2]
}

fn is_ending(object: &DynamicObject) -> bool {
    object.metadata.deletion_timestamp.is_some()
}
