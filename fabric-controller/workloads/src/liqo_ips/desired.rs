//! Desired IPs, and their differences from those that are there. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::ipam::{IP, IPSpec};
use fabric_api::{Cidr, labels};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::Value;

use super::key;
use crate::live::{Key, Objects, Watched};

/// Argument by which Liqo's chart switches its networking off.
pub const NETWORKING_OFF: &str = "--networking-enabled=false";
/// Annotation of Liqo's controller-manager while its uninstaller runs.
const UNINSTALLING: &str = "liqo.io/uninstalling";
/// Suffix of the name of the IP of a peer's unknown source, after that of its Configuration.
const UNKNOWN_SOURCE: &str = "unknown-source";

/// Liqo's controller-manager beside weft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Liqo {
    Absent,
    /// Its uninstaller waits until there is neither Network nor IP.
    Ending,
    WithNetworking,
    WithoutNetworking,
}

/// Desired IPs.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) ips: BTreeMap<Key, IP>,
    /// IPs whose content is not known now. Those that are there stay.
    unknown: Vec<Key>,
}

#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) apply: Vec<IP>,
    /// IPs to delete, with their uids.
    pub(super) delete: Vec<(Key, String)>,
}

impl Liqo {
    pub(super) fn of(objects: &Objects) -> Self {
        let managers: Vec<_> = objects.all(Watched::LiqoManager).map(|(_, one)| one).collect();
        let is_off = |manager: &&DynamicObject| {
            let args = manager.data["args"].as_array().into_iter().flatten();
            args.flat_map(|args| args.as_array().into_iter().flatten())
                .any(|arg| arg == NETWORKING_OFF)
        };
        let is_ending = |one: &&DynamicObject| one.annotations().contains_key(UNINSTALLING);
        if managers.is_empty() {
            Self::Absent
        } else if !managers.iter().all(is_off) {
            Self::WithNetworking
        } else if managers.iter().any(is_ending) {
            Self::Ending
        } else {
            Self::WithoutNetworking
        }
    }
}

/// IPs as Liqo's own networking makes them, in `installation` those of the cluster.
pub(super) fn wanted(objects: &Objects, installation: &str) -> Wanted {
    let mut wanted = Wanted::default();
    for (of, type_) in
        [(Watched::ApiServer, labels::API_SERVER), (Watched::LiqoProxy, labels::API_SERVER_PROXY)]
    {
        let mut addresses = objects.all(of).filter_map(|(_, service)| {
            address(&service.data["spec"]["clusterIP"]).filter(|_| !is_ending(service))
        });
        if let Some(address) = addresses.next() {
            wanted.add(of_service(installation, type_, address));
        }
    }
    let networks = objects.all(Watched::Network).filter(|(key, network)| {
        let type_ = network.labels().get(labels::NETWORK_TYPE);
        key.namespace == installation && type_.is_some_and(|type_| type_ == "pod-cidr")
    });
    let own: Vec<Cidr> = networks.filter_map(|(_, network)| granted(network)).collect();
    for (_, pod) in objects.all(Watched::ShadowPod) {
        // Without networking with its peer a pod's address is not remapped, and may be another pod's here.
        let address = address(&pod.data["status"]["podIP"])
            .filter(|address| !own.iter().any(|cidr| cidr.contains(*address)));
        wanted.add_or_keep(pod, &pod.name_any(), address.map(|address| of_pod(pod, address)));
    }
    for (_, configuration) in objects.all(Watched::Configuration) {
        let name = format!("{}-{UNKNOWN_SOURCE}", configuration.name_any());
        let ip = first_external(configuration).map(|ip| of_peer(configuration, &name, ip));
        wanted.add_or_keep(configuration, &name, ip);
    }
    wanted
}

impl Wanted {
    fn add(&mut self, ip: IP) {
        self.ips.insert(key(&ip.namespace().unwrap_or_default(), &ip.name_any()), ip);
    }

    /// Adds the IP of an object, or keeps the one that is there while its address is not known.
    fn add_or_keep(&mut self, of: &DynamicObject, name: &str, ip: Option<IP>) {
        match ip {
            Some(ip) => self.add(ip),
            None => self.unknown.push(key(&of.namespace().unwrap_or_default(), name)),
        }
    }
}

/// Differences between the desired IPs and those that are there. What is not weft's stays, but for
/// an outdated IP of the same pod or Configuration, which Liqo's networking has left.
pub(super) fn changes(objects: &Objects, wanted: &Wanted) -> Changes {
    let mut changes = Changes::default();
    for (key, want) in &wanted.ips {
        match objects.get(key) {
            None => changes.apply.push(want.clone()),
            Some(there) if is_ending(there) || !is_replaceable(there, want) => {}
            // The address of an IP is immutable.
            Some(there) if there.data["spec"]["ip"] != want.spec.ip => {
                changes.delete.push((key.clone(), there.uid().unwrap_or_default()));
            }
            Some(there) if is_ours(there) && !has_all(there, want) => {
                changes.apply.push(want.clone());
            }
            Some(_) => {}
        }
    }
    let ours = objects.all(Watched::Ip).filter(|(_, ip)| is_ours(ip) && !is_ending(ip));
    let stale =
        ours.filter(|(key, _)| !wanted.ips.contains_key(key) && !wanted.unknown.contains(key));
    let stale = stale.map(|(key, ip)| (key.clone(), ip.uid().unwrap_or_default()));
    changes.delete.extend(stale);
    changes
}

fn of_service(installation: &str, type_: &str, address: IpAddr) -> IP {
    let mut ip = new(installation, type_, address);
    ip.labels_mut().insert(labels::IP_TYPE.to_owned(), type_.to_owned());
    ip.annotations_mut().insert(labels::PREINSTALLED.to_owned(), "true".to_owned());
    ip
}

fn of_pod(pod: &DynamicObject, address: IpAddr) -> IP {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let mut ip = new(&namespace, &name, address);
    ip.labels_mut().insert(labels::OFFLOADED_POD_NAME.to_owned(), name);
    ip.labels_mut().insert(labels::OFFLOADED_POD_NAMESPACE.to_owned(), namespace);
    ip.metadata.owner_references = Some(vec![owner("v1", "Pod", pod)]);
    ip
}

fn of_peer(configuration: &DynamicObject, name: &str, address: IpAddr) -> IP {
    let mut ip = new(&configuration.namespace().unwrap_or_default(), name, address);
    let peer = configuration.labels().get(labels::REMOTE_CLUSTER_ID).cloned();
    let peer = peer.unwrap_or_else(|| configuration.name_any());
    ip.labels_mut().insert(labels::REMOTE_CLUSTER_ID.to_owned(), peer);
    let resource = Watched::Configuration.resource();
    let owner = owner(&resource.api_version, &resource.kind, configuration);
    ip.metadata.owner_references = Some(vec![owner]);
    ip
}

fn new(namespace: &str, name: &str, address: IpAddr) -> IP {
    let ours = [(labels::MANAGED_BY, labels::WEFT), (labels::FOR_LIQO, "true")];
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(ours.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
        ..ObjectMeta::default()
    };
    let spec = IPSpec { ip: address.to_string(), ..IPSpec::default() };
    IP { metadata, spec, status: None }
}

/// Owner reference as Liqo has it: not as its controller, and without holding up its deletion.
fn owner(api_version: &str, kind: &str, of: &DynamicObject) -> OwnerReference {
    OwnerReference {
        api_version: api_version.to_owned(),
        kind: kind.to_owned(),
        name: of.name_any(),
        uid: of.uid().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

fn granted(network: &DynamicObject) -> Option<Cidr> {
    network.data["status"]["cidr"].as_str()?.parse().ok()
}

/// First address of the peer's external CIDR as this cluster sees it: the source of what comes from no
/// pod there.
fn first_external(configuration: &DynamicObject) -> Option<IpAddr> {
    let cidr = configuration.data["status"]["remote"]["cidr"]["external"].get(0)?.as_str()?;
    Some(cidr.parse::<Cidr>().ok()?.address())
}

fn address(value: &Value) -> Option<IpAddr> {
    value.as_str()?.parse().ok()
}

fn is_ours(ip: &DynamicObject) -> bool {
    ip.labels().get(labels::FOR_LIQO).is_some_and(|value| value == "true")
}

/// True for weft's own, and for one with the same owner.
fn is_replaceable(there: &DynamicObject, want: &IP) -> bool {
    let owners = want.owner_references();
    is_ours(there)
        || owners.iter().any(|owner| there.owner_references().iter().any(|o| o.uid == owner.uid))
}

/// True if all labels, annotations and owners are there.
fn has_all(there: &DynamicObject, want: &IP) -> bool {
    let has = |have: &BTreeMap<String, String>, want: &BTreeMap<String, String>| {
        want.iter().all(|(key, value)| have.get(key) == Some(value))
    };
    let owns =
        |owner: &OwnerReference| there.owner_references().iter().any(|have| have.uid == owner.uid);
    has(there.labels(), want.labels())
        && has(there.annotations(), want.annotations())
        && want.owner_references().iter().all(owns)
}

fn is_ending(object: &DynamicObject) -> bool {
    object.metadata.deletion_timestamp.is_some()
}

#[cfg(test)]
mod tests;
