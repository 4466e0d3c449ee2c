//! Prefixes of peerings that are gone: refused on every node, and granted to nobody, until all
//! nodes report that nothing is sent to them.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{NodeConfig, RefusedPrefix};
use fabric_api::ipam::{Network, NetworkStatus};
use fabric_api::{Cidr, labels};
use fabric_objects::{Kind, Object, ObjectRef};

use super::cluster::{Cluster, own_network};
use super::names::of_node;
use super::peering::Peering;
use super::{Compiler, names, owner};

/// Annotation of a Network that holds a refused prefix: the prefix as the peer has it.
const REMOTE: &str = "fabric.weft.dev/remote-cidr";

impl Compiler<'_> {
    /// `carried` are the prefixes that peerings of nodes have now.
    pub(super) fn refused(
        &mut self,
        cluster: &Cluster,
        carried: &BTreeSet<Cidr>,
    ) -> Vec<RefusedPrefix> {
        let mut refused = self.published_before(cluster);
        refused.retain(|prefix, _| !carried.iter().any(|other| other.overlaps(prefix)));
        // A peering that comes back finds all of its prefixes, or none.
        let busy: BTreeSet<String> = refused
            .iter()
            .filter(|(prefix, _)| !self.is_quiet(cluster, prefix))
            .map(|(_, peer)| peer.clone())
            .collect();
        refused.retain(|_, peer| busy.contains(peer));
        for (prefix, peer) in &refused {
            self.hold(prefix, peer);
        }
        let entry = |(prefix, peer): (Cidr, String)| RefusedPrefix {
            peer_cluster_id: peer,
            prefix: prefix.to_string(),
        };
        refused.into_iter().map(entry).collect()
    }

    /// Leaves the Networks of refused prefixes alone while too little is known of the cluster.
    pub(super) fn keep_refused(&mut self) {
        let networks = self.index.of_kind(Kind::Network);
        let held: Vec<_> =
            networks.filter(|(_, o)| keeps_refused_prefix(o)).map(|(r, _)| r.clone()).collect();
        held.into_iter().for_each(|network| self.keep(network));
    }

    /// Leaves the Network of a replaced prefix alone as long as nodes have it, which is until the new
    /// one is granted; then [`Self::hold`] follows.
    pub(super) fn keep_replaced(&mut self, cluster: &Cluster, peerings: &[Peering<'_>]) {
        let carried: BTreeSet<Cidr> = self.published_before(cluster).into_keys().collect();
        let waiting = |owner: &ObjectRef| {
            let mut all = peerings.iter().filter(|peering| !peering.is_ready());
            all.any(|peering| peering.reference == *owner)
        };
        let index = self.index;
        for (reference, object) in index.of_kind(Kind::Network) {
            let granted = index.network_grant(reference).filter(|prefix| carried.contains(prefix));
            if granted.is_some() && owner::of(object).as_ref().is_some_and(waiting) {
                self.keep(reference.clone());
            }
        }
    }

    /// All prefixes that nodes have or should refuse, with their peers.
    fn published_before(&self, cluster: &Cluster) -> BTreeMap<Cidr, String> {
        let mut all = BTreeMap::new();
        let mut add = |prefix: &str, peer: &str| {
            if let Ok(prefix) = prefix.parse() {
                all.insert(prefix, peer.to_owned());
            }
        };
        for (_, object) in
            self.index.of_kind(Kind::Network).filter(|(_, o)| keeps_refused_prefix(o))
        {
            if let Object::Network(network) = object {
                let peer = object.label(labels::REMOTE_CLUSTER_ID).unwrap_or_default();
                add(&network.spec.cidr, peer);
            }
        }
        for node in &cluster.nodes {
            let Some(config) = self.config_of_node(&node.name) else { continue };
            for peering in config.spec.peerings.iter().filter(|_| !config.spec.removed) {
                peering.prefixes.iter().for_each(|prefix| add(prefix, &peering.peer_cluster_id));
            }
        }
        self.recorded_prefixes().for_each(|(prefix, peer)| add(prefix, peer));
        all
    }

    /// Returns whether every agent that runs reports a prefix as quiet. Those that report nothing
    /// of the kind are older ones; lagging nodes are not waited for.
    fn is_quiet(&self, cluster: &Cluster, prefix: &Cidr) -> bool {
        let mut live =
            cluster.nodes.iter().filter(|node| !self.index.lagging_nodes.contains(&node.name));
        let prefix = prefix.to_string();
        live.all(|node| {
            let applied = self.index.is_applied(&node.name);
            let config = self.config_of_node(&node.name).filter(|_| applied);
            match config.and_then(|config| config.status.as_ref()).map(|status| &status.refused) {
                Some(Some(refused)) => refused.iter().any(|r| r.prefix == prefix && r.quiet),
                Some(None) => true,
                None => false,
            }
        })
    }

    fn config_of_node(&self, name: &str) -> Option<&NodeConfig> {
        self.index.typed::<NodeConfig>(&of_node(name))
    }

    /// Wants a Network that keeps the prefix from all others, over restarts, too.
    fn hold(&mut self, prefix: &Cidr, peer: &str) {
        let text = prefix.to_string();
        let name = self.own(Kind::Network, &format!("refused-{}", names::dashed(&text)));
        let mut network = own_network(&name, "reserved", &text, None);
        let labels = network.metadata.labels.get_or_insert_default();
        labels.insert(labels::NETWORK_NOT_REMAPPED.to_owned(), "true".to_owned());
        labels.insert(labels::REMOTE_CLUSTER_ID.to_owned(), peer.to_owned());
        if let Some((kind, remote)) = self.stood_for(&name, prefix) {
            labels.insert(labels::CIDR_TYPE.to_owned(), kind);
            network.metadata.annotations = Some([(REMOTE.to_owned(), remote)].into());
        }
        let map = self.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
        self.want_owned(network, &map);
    }

    /// Kind and prefix that it stood for: from the Network that holds it already, or else from the
    /// peering's that had it.
    fn stood_for(&self, held: &ObjectRef, prefix: &Cidr) -> Option<(String, String)> {
        if let Some(object) = self.index.get(held).filter(|object| keeps_refused_prefix(object)) {
            let kind = object.label(labels::CIDR_TYPE)?.to_owned();
            return Some((kind, remote_of(object)?.to_owned()));
        }
        let mut networks = self.index.all::<Network>(Kind::Network);
        let (reference, network) = networks.find(|(reference, network)| {
            let owner = self.index.get(reference).and_then(owner::of);
            let of_peering = owner.is_some_and(|owner| owner.kind == Kind::Configuration);
            of_peering && crate::grant::network_grant(network) == Some(*prefix)
        })?;
        let kind = self.index.get(reference)?.label(labels::CIDR_TYPE)?;
        Some((kind.to_owned(), network.spec.cidr.clone()))
    }

    /// Gives the Networks of a peering that is back the prefixes that are still refused for it.
    pub(super) fn return_prefixes(&mut self, peerings: &[Peering<'_>]) {
        for peering in peerings.iter().filter(|peering| peering.fault.is_none()) {
            for remote in peering.remotes.iter().filter(|remote| remote.granted.is_none()) {
                let Some(Object::Network(network)) = self.index.get(&remote.network) else {
                    continue;
                };
                let mut held =
                    self.index.of_kind(Kind::Network).filter(|(_, o)| keeps_refused_prefix(o));
                let back = held.find_map(|(reference, object)| {
                    let same = object.label(labels::REMOTE_CLUSTER_ID) == Some(&peering.peer())
                        && object.label(labels::CIDR_TYPE) == Some(remote.kind.name())
                        && remote_of(object) == Some(&remote.cidr.to_string());
                    self.index.network_grant(reference).filter(|_| same)
                });
                if let Some(prefix) = back {
                    let mut network = Network::clone(network);
                    network.status = Some(NetworkStatus { cidr: Some(prefix.to_string()) });
                    self.out.statuses.insert(remote.network.clone(), network.into());
                }
            }
        }
    }
}

/// True for the Network that keeps the prefix of a peering that is gone from others.
pub fn keeps_refused_prefix(object: &Object) -> bool {
    owner::is_own(object)
        && object.label(labels::NETWORK_TYPE) == Some("reserved")
        && object.label(labels::REMOTE_CLUSTER_ID).is_some()
}

fn remote_of(object: &Object) -> Option<&str> {
    object.metadata().annotations.as_ref()?.get(REMOTE).map(String::as_str)
}
