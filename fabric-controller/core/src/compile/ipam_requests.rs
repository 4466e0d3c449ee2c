//! Requests to ipam.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{GatewayConfig, Remap};
use fabric_api::ipam::{IP, Network};
use fabric_api::{Cidr, labels};
use fabric_index::owner::keeps_refused_prefix;
use fabric_index::{Index, ip_grant, network_grant, owner};
use fabric_model::{Cluster, Problems};
use fabric_objects::{Kind, Object, ObjectRef};

use super::addresses::is_usable;
use super::networks::stand_in_of;

/// An object that requests a prefix or an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpamRequest {
    pub object: ObjectRef,
    /// Uid of the object as it was; a grant for a namesake is released.
    pub uid: String,
    pub allocation: Allocation,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    Network {
        cidr: Cidr,
        immutable: bool,
        /// It was granted, which is forgotten, and gateways have it.
        is_published: bool,
        exclusive: bool,
        pre_allocated: u32,
    },
    /// An address out of a prefix that was granted.
    Address {
        cidr: Cidr,
        /// The last free one. Stock Liqo numbers what stands for its IPs from the first address on, and
        /// rewrites those sources on whatever interface they arrive.
        from_end: bool,
    },
}

/// Requests for prefixes, the most urgent first, of the Networks that stay. `returned` are those that get
/// one without ipam. A peer's prefix that gateways still have, though its grant is lost, is requested as it is.
pub(super) fn of_networks(
    index: &Index,
    cluster: &Cluster,
    returned: &BTreeMap<ObjectRef, Object>,
    stays: impl Fn(&ObjectRef, &Object) -> bool,
    problems: &mut Problems,
) -> Vec<IpamRequest> {
    let mut requests = Vec::new();
    let published = published_prefixes(index);
    for (reference, object) in index.of_kind(Kind::Network) {
        let rank = rank(object);
        // A peer must not get what the cluster itself is still to get.
        if (rank == LAST && !cluster.is_ready()) || !stays(reference, object) {
            continue;
        }
        // It may have the same prefix.
        if let Some(stand_in) = stand_in_of(index, object) {
            problems.add(reference, "", format!("waits for {stand_in} to go"));
            continue;
        }
        let returned = returned.get(reference).and_then(|object| object.try_into().ok());
        let published = translation_of(object).and_then(|of| published.get(&of)).copied();
        let request = network_request(reference, object, (returned, published));
        requests.extend(request.map(|request| (rank, request)));
    }
    requests.sort_by_key(|(rank, _)| *rank);
    requests.into_iter().map(|(_, request)| request).collect()
}

/// A peer, the kind of one of its prefixes, and that prefix as the peer has it.
type Translation = (String, String, Cidr);

/// The peers' prefixes as configs of gateways have them.
fn published_prefixes(index: &Index) -> BTreeMap<Translation, Cidr> {
    let configs = index.of_kind(Kind::GatewayConfig);
    let configs = configs.filter_map(|(_, object)| <&GatewayConfig>::try_from(object).ok());
    let remaps = configs.flat_map(|GatewayConfig { spec, .. }| {
        spec.remaps.iter().filter_map(|Remap { kind, remote, local }| {
            let of = (spec.peer_cluster_id.clone(), kind.name().to_owned(), remote.parse().ok()?);
            Some((of, local.parse().ok()?))
        })
    });
    remaps.collect()
}

/// Translation that a Network of a peering stands for.
fn translation_of(network: &Object) -> Option<Translation> {
    let label = |name| network.label(name).map(str::to_owned);
    let Object::Network(of) = network else { return None };
    let peer = label(labels::REMOTE_CLUSTER_ID).filter(|_| owner::of(network).is_some())?;
    Some((peer, label(labels::CIDR_TYPE)?, of.spec.cidr.parse().ok()?))
}

fn network_request(
    of: &ObjectRef,
    object: &Object,
    (returned, published): (Option<&Network>, Option<Cidr>),
) -> Option<IpamRequest> {
    let network: &Network = object.try_into().ok()?;
    let cidr = network.spec.cidr.parse::<Cidr>().ok()?; // reported with the cluster
    let immutable = is_immutable(object);
    let fits = |granted: Cidr| {
        let same_shape = granted.len() == cidr.len() && granted.is_ipv4() == cidr.is_ipv4();
        if immutable { granted == cidr } else { same_shape }
    };
    if network_grant(network).or_else(|| returned.and_then(network_grant)).is_some_and(fits) {
        return None;
    }
    let published = published.filter(|prefix| fits(*prefix));
    let allocation = Allocation::Network {
        cidr: published.unwrap_or(cidr),
        is_published: published.is_some(),
        immutable,
        exclusive: !(immutable && object.label(labels::NETWORK_SHARED) == Some("true")),
        pre_allocated: network.spec.pre_allocated.unwrap_or(0),
    };
    Some(IpamRequest { object: of.clone(), uid: object.uid().to_owned(), allocation })
}

/// Requests for addresses, of the IPs that stay.
pub(super) fn of_ips(
    index: &Index,
    cluster: &Cluster,
    stays: impl Fn(&ObjectRef, &Object) -> bool,
    problems: &mut Problems,
) -> Vec<IpamRequest> {
    let all = index.of_kind(Kind::Ip).filter(|(reference, object)| stays(reference, object));
    let requests = all.filter_map(|(reference, object)| {
        let ip: &IP = object.try_into().ok()?;
        let cidr = requested_from(index, (reference, ip), cluster, problems)?;
        if let Some(grant @ (address, from)) = ip_grant(ip) {
            if is_usable(grant, cidr, cluster) {
                return None;
            }
            // There, an address that is granted cannot change.
            if index.settings.kubernetes {
                if owner::of(object).is_none() && object.label(labels::FOR_LIQO).is_none() {
                    let found = format!("found {address} of {from}; expected one of {cidr}");
                    let message = format!("{found}: delete this IP, and create it again");
                    problems.add(reference, "status.ip", message);
                }
                return None;
            }
        }
        let is_external = cluster.external_cidrs().any(|external| external == cidr);
        let from_end = is_external && owner::of(object).is_some();
        let (object, uid) = (reference.clone(), object.uid().to_owned());
        Some(IpamRequest { object, uid, allocation: Allocation::Address { cidr, from_end } })
    });
    requests.collect()
}

/// Prefix that an IP is to have its address from, if it is there.
fn requested_from(
    index: &Index,
    (of, ip): (&ObjectRef, &IP),
    cluster: &Cluster,
    problems: &mut Problems,
) -> Option<Cidr> {
    let wanted = ip.spec.address()?; // reported with the mappings
    let Some(network) = &ip.spec.network_ref else {
        let external = cluster.external_of(wanted.is_ipv4());
        if external.is_none() && cluster.is_ready() {
            let family = if wanted.is_ipv4() { "IPv4" } else { "IPv6" };
            let message = format!(
                "found {wanted}; the cluster has no {family} external CIDR that it could be granted an \
                 address of: expected a Network of it, or an address of the other family"
            );
            problems.add(of, "spec.ip", message);
        }
        return Some(external?.cidr);
    };
    let namespace = network.namespace.as_ref().or(of.namespace.as_ref());
    let namespace = namespace.map(String::as_str).unwrap_or_default();
    let network =
        ObjectRef::new(Kind::Network, namespace, network.name.as_deref().unwrap_or_default());
    if index.get(&network).is_none() {
        problems.add(of, "spec.networkRef", format!("waits for {network}"));
    }
    index.network_grant(&network)
}

/// Reports refusals of ipam, of prefixes and addresses that are still requested. A prefix that is to be
/// kept from others, and is taken, is kept from them.
pub(super) fn report_refusals(index: &Index, requests: &[IpamRequest], problems: &mut Problems) {
    let requested: BTreeSet<_> = requests.iter().map(|request| &request.object).collect();
    for (reference, reason) in index.denials().filter(|(object, _)| requested.contains(object)) {
        let Some(object) = index.get(reference).filter(|of| !keeps_refused_prefix(of)) else {
            continue;
        };
        match owner::of(object) {
            Some(owner) => problems.add(&owner, "", format!("{reference}: {reason}")),
            None => problems.add(reference, "", reason),
        }
    }
}

const LAST: u8 = 3;

/// Priority of a request: immutable ones first, then the cluster's own, then all other Networks of
/// the user, and peers' prefixes last.
fn rank(object: &Object) -> u8 {
    let own = object.label(labels::NETWORK_TYPE).is_some();
    match (is_immutable(object), own, owner::of(object)) {
        (true, ..) => 0,
        (false, true, _) => 1,
        (false, false, None) => 2,
        (false, false, Some(_)) => LAST,
    }
}

fn is_immutable(object: &Object) -> bool {
    object.label(labels::NETWORK_NOT_REMAPPED).is_some_and(|value| value != "false")
}
