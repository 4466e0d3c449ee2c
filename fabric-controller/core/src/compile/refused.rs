//! Prefixes of peerings that are gone: refused on every node, and not granted again, until all
//! nodes report that nothing is sent to them.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{NodeConfig, RefusedPrefix};
use fabric_api::ipam::{Network, NetworkStatus};
use fabric_api::{Cidr, labels};
use fabric_index::owner::keeps_refused_prefix;
use fabric_index::{Index, owner};
use fabric_model::names::{dashed, of_node};
use fabric_model::peering::Remote;
use fabric_model::{Cluster, Peering};
use fabric_objects::{Kind, Object, ObjectRef};

use super::desired::Desired;
use super::networks;
use super::records::{PeeringRecords, recorded_prefixes, recorded_refused};

/// Annotation of a Network that holds a refused prefix: the prefix as the peer has it.
const REMOTE: &str = "fabric.weft.dev/remote-cidr";

/// Refused prefixes, with the peers that they stood for.
pub(super) type Refused = BTreeMap<Cidr, String>;

/// Prefixes that lead to peers now, or soon will.
pub(super) fn carried(peerings: &[Peering<'_>], records: &PeeringRecords) -> BTreeSet<Cidr> {
    let published = records.values().flat_map(|record| &record.prefixes);
    let published = published.filter_map(|prefix| prefix.parse().ok());
    published.chain(peerings.iter().flat_map(Peering::prefixes)).collect()
}

/// Prefixes that nodes had, or were to refuse, but for those that are carried now.
pub(super) fn refused(index: &Index, cluster: &Cluster, carried: &BTreeSet<Cidr>) -> Refused {
    let mut refused = published_before(index, cluster);
    refused.retain(|prefix, _| {
        !carried.contains(prefix) && !carried.iter().any(|other| other.overlaps(prefix))
    });
    // A peering that comes back finds all of its prefixes, or none.
    let busy: BTreeSet<String> = refused
        .iter()
        .filter(|(prefix, _)| !is_quiet(index, cluster, prefix))
        .map(|(_, peer)| peer.clone())
        .collect();
    refused.retain(|_, peer| busy.contains(peer));
    refused
}

pub(super) fn entries(refused: &Refused) -> Vec<RefusedPrefix> {
    let entry = |(prefix, peer): (&Cidr, &String)| RefusedPrefix {
        peer_cluster_id: peer.clone(),
        prefix: prefix.to_string(),
    };
    refused.iter().map(entry).collect()
}

/// Prefixes in the record of a peer that waits, which the Network of a Configuration has, or had, that is about
/// another peer now.
pub(super) fn left(index: &Index, peerings: &[Peering<'_>], records: &PeeringRecords) -> Refused {
    let remotes = peerings.iter().flat_map(|peering| &peering.remotes);
    let of_others = remotes.filter(|remote| remote.is_of_other);
    let mut left: BTreeSet<Cidr> =
        of_others.filter_map(|remote| index.network_grant(&remote.network)).collect();
    left.extend(held(index).filter_map(|(_, object)| {
        let network: &Network = object.try_into().ok()?;
        network.spec.cidr.parse::<Cidr>().ok()
    }));
    let granted: BTreeSet<Cidr> = peerings.iter().flat_map(Peering::prefixes).collect();
    let recorded = records.iter().flat_map(|(peer, record)| {
        let prefixes = record.prefixes.iter().filter_map(|prefix| prefix.parse().ok());
        prefixes.map(|prefix: Cidr| (prefix, peer.clone()))
    });
    recorded.filter(|(prefix, _)| left.contains(prefix) && !granted.contains(prefix)).collect()
}

/// Networks that keep prefixes from all but the peers that they stand for, over restarts, too.
pub(super) fn networks(index: &Index, refused: &Refused) -> Desired {
    let mut desired = Desired::default();
    let map = index.settings.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
    for (prefix, peer) in refused {
        let text = prefix.to_string();
        let name = index.settings.own(Kind::Network, &format!("refused-{}", dashed(&text)));
        let mut network = networks::of_type(&name, "reserved", &text, None);
        let labels = network.metadata.labels.get_or_insert_default();
        labels.insert(labels::NETWORK_NOT_REMAPPED.to_owned(), "true".to_owned());
        labels.insert(labels::REMOTE_CLUSTER_ID.to_owned(), peer.clone());
        if let Some((kind, remote)) = original_of(index, &name, prefix) {
            labels.insert(labels::CIDR_TYPE.to_owned(), kind);
            network.metadata.annotations = Some([(REMOTE.to_owned(), remote)].into());
        }
        desired.want_owned(index, network, &map);
    }
    desired
}

/// Networks of refused prefixes, which stay while too little is known of the cluster.
pub(super) fn held(index: &Index) -> impl Iterator<Item = (&ObjectRef, &Object)> {
    index.of_kind(Kind::Network).filter(|(_, object)| keeps_refused_prefix(object))
}

/// Leaves the Network of a replaced prefix alone as long as nodes have it, which is until the new
/// one is granted; then [`networks`] follows. The same for a peer whose Configuration is another now.
pub(super) fn replaced(index: &Index, cluster: &Cluster, peerings: &[Peering<'_>]) -> Desired {
    let mut desired = Desired::default();
    let waiting: Vec<_> = peerings.iter().filter(|peering| !peering.is_ready()).collect();
    if waiting.is_empty() {
        return desired;
    }
    let peers: BTreeSet<_> = waiting.iter().map(|peering| peering.peer()).collect();
    let owners: BTreeSet<_> = waiting.iter().map(|of| (&of.reference, of.peer())).collect();
    let carried = published_before(index, cluster);
    for (reference, object) in index.of_kind(Kind::Network) {
        let granted = index.network_grant(reference);
        let is_carried = granted.is_some_and(|prefix| carried.contains_key(&prefix));
        let peer = object.label(labels::REMOTE_CLUSTER_ID).unwrap_or_default();
        let is_awaited = |owner: ObjectRef| {
            owners.contains(&(&owner, peer.to_owned()))
                || peers.contains(peer) && is_left(index, object)
        };
        if is_carried && owner::of(object).is_some_and(is_awaited) {
            desired.keep(reference.clone());
        }
    }
    desired
}

/// All prefixes that nodes have or should refuse, with their peers.
fn published_before(index: &Index, cluster: &Cluster) -> Refused {
    let mut all = Refused::new();
    let mut add = |prefix: &str, peer: &str| {
        if let Ok(prefix) = prefix.parse() {
            all.insert(prefix, peer.to_owned());
        }
    };
    for (_, object) in held(index) {
        if let Object::Network(network) = object {
            let peer = object.label(labels::REMOTE_CLUSTER_ID).unwrap_or_default();
            add(&network.spec.cidr, peer);
        }
    }
    let configs = cluster.nodes.iter().filter_map(|node| config_of(index, &node.name));
    for config in configs.filter(|config| !config.spec.removed) {
        for peering in &config.spec.peerings {
            peering.prefixes.iter().for_each(|prefix| add(prefix, &peering.peer_cluster_id));
        }
    }
    for (reference, object) in granted_before(index, cluster) {
        if let Some(prefix) = index.network_grant(reference) {
            add(&prefix.to_string(), object.label(labels::REMOTE_CLUSTER_ID).unwrap_or_default());
        }
    }
    recorded_prefixes(index).for_each(|(prefix, peer)| add(prefix, peer));
    // Its Network may not have been written yet.
    recorded_refused(index).iter().for_each(|of| add(&of.prefix, &of.peer_cluster_id));
    all
}

/// Networks of peerings, whether these are still there or not. They stay while too little is known of the cluster
/// to refuse their prefixes.
pub(super) fn of_peerings(index: &Index) -> impl Iterator<Item = (&ObjectRef, &Object)> {
    let of_peering =
        |object: &Object| owner::of(object).is_some_and(|of| of.kind == Kind::Configuration);
    index.of_kind(Kind::Network).filter(move |(_, object)| of_peering(object))
}

/// The same, if nothing published is left: a host that restarts loses that, and peerings may have ended or changed
/// meanwhile.
fn granted_before<'a>(
    index: &'a Index,
    cluster: &Cluster,
) -> impl Iterator<Item = (&'a ObjectRef, &'a Object)> {
    let mut configs = cluster.nodes.iter().filter_map(|node| config_of(index, &node.name));
    let is_lost = index.of_kind(Kind::FabricRecord).next().is_none()
        && configs.all(|config| config.spec.peerings.is_empty());
    of_peerings(index).filter(move |_| is_lost)
}

/// Returns whether every agent that runs reports a prefix as quiet. Those that report nothing
/// of the kind are older ones; lagging nodes are not waited for. Of a cluster without Nodes nothing is known.
fn is_quiet(index: &Index, cluster: &Cluster, prefix: &Cidr) -> bool {
    if cluster.nodes.is_empty() {
        return false;
    }
    let mut live = cluster.nodes.iter().filter(|node| !index.lagging_nodes.contains(&node.name));
    let prefix = prefix.to_string();
    live.all(|node| {
        let applied = index.is_applied(&node.name);
        let config = config_of(index, &node.name).filter(|_| applied);
        match config.and_then(|config| config.status.as_ref()).map(|status| &status.refused) {
            Some(Some(refused)) => refused.iter().any(|r| r.prefix == prefix && r.quiet),
            Some(None) => true,
            None => false,
        }
    })
}

fn config_of<'a>(index: &'a Index, node: &str) -> Option<&'a NodeConfig> {
    index.typed::<NodeConfig>(&of_node(node))
}

/// Kind and prefix that it stood for: from the Network that holds it already, or else from the
/// peering's that had it.
fn original_of(index: &Index, held: &ObjectRef, prefix: &Cidr) -> Option<(String, String)> {
    if let Some(object) = index.get(held).filter(|object| keeps_refused_prefix(object)) {
        let kind = object.label(labels::CIDR_TYPE)?.to_owned();
        return Some((kind, remote_of(index, object)?.to_owned()));
    }
    let mut networks = index.of_kind(Kind::Network);
    let (_, object) = networks.find(|(reference, object)| {
        let owner = owner::of(object);
        let of_peering = owner.is_some_and(|owner| owner.kind == Kind::Configuration);
        of_peering && index.network_grant(reference) == Some(*prefix)
    })?;
    let network: &Network = object.try_into().ok()?;
    Some((object.label(labels::CIDR_TYPE)?.to_owned(), network.spec.cidr.clone()))
}

/// True for the Network of a peering whose Configuration is gone, or about to go.
fn is_left(index: &Index, network: &Object) -> bool {
    let is_going = |owner: &Object| owner.metadata().deletion_timestamp.is_some();
    owner::of(network).is_some_and(|owner| {
        owner.kind == Kind::Configuration && index.get(&owner).is_none_or(is_going)
    })
}

/// Networks of peerings that are back, with the prefixes that are still refused for them, or that those of a former
/// Configuration of the peer have.
pub(super) fn returned(index: &Index, peerings: &[Peering<'_>]) -> BTreeMap<ObjectRef, Object> {
    let mut returned = BTreeMap::new();
    for peering in peerings.iter().filter(|peering| peering.fault.is_none()) {
        let waiting = |remote: &&Remote| remote.granted.is_none() && !remote.is_of_other;
        for remote in peering.remotes.iter().filter(waiting) {
            let Some(Object::Network(network)) = index.get(&remote.network) else { continue };
            let back = index.of_kind(Kind::Network).find_map(|(reference, object)| {
                let same = object.label(labels::REMOTE_CLUSTER_ID) == Some(&peering.peer())
                    && object.label(labels::CIDR_TYPE) == Some(remote.kind.name())
                    && remote_of(index, object) == Some(&remote.cidr.to_string());
                index.network_grant(reference).filter(|_| same)
            });
            if let Some(prefix) = back {
                let mut network = Network::clone(network);
                network.status = Some(NetworkStatus { cidr: Some(prefix.to_string()) });
                returned.insert(remote.network.clone(), network.into());
            }
        }
    }
    returned
}

/// The prefix as the peer has it, for which one is refused, or was granted to a former Configuration.
fn remote_of<'a>(index: &Index, object: &'a Object) -> Option<&'a str> {
    if keeps_refused_prefix(object) {
        return object.metadata().annotations.as_ref()?.get(REMOTE).map(String::as_str);
    }
    let network: &Network = object.try_into().ok().filter(|_| is_left(index, object))?;
    Some(&network.spec.cidr)
}
