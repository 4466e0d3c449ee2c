//! Networks of weft's own: prefixes of the cluster, addresses of nodes, counterparts of peers' prefixes.

use fabric_api::ipam::{Network, NetworkSpec};
use fabric_api::{Cidr, labels};
use fabric_index::{Index, owner};
use fabric_model::cluster::{address_network, network_type};
use fabric_model::{Cluster, Peering};
use fabric_objects::{Kind, Object, ObjectRef};

use super::desired::Desired;

const EXTERNAL_CIDR: &str = "10.70.0.0/16";
const INTERNAL_CIDR: &str = "10.80.0.0/16";

/// The external and internal CIDR, if the user describes a cluster and leaves them out, and
/// the addresses of the nodes, so that no peer's prefix is put over them.
pub(super) fn of_cluster(index: &Index, cluster: &Cluster) -> Desired {
    let mut desired = Desired::default();
    let has = |wanted: &str| {
        let mut networks = index.of_kind(Kind::Network);
        networks.any(|(_, o)| network_type(index, o) == Some(wanted) && !owner::is_own(o))
    };
    let map = index.settings.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
    let described = cluster.id.is_some() && has("pod-cidr");
    // The network addresses stay free: one stands in for unknown sources, and a host with a
    // connected subnet of that prefix takes it for a broadcast address.
    for (kind, cidr) in [("external-cidr", EXTERNAL_CIDR), ("internal-cidr", INTERNAL_CIDR)] {
        let name = stand_in(index, kind);
        if !described {
            desired.keep(name);
        } else if !has(kind) {
            desired.want_owned(index, of_type(&name, kind, cidr, Some(1)), &map);
        }
    }
    for node in &cluster.nodes {
        for address in &node.underlay {
            let own = address_network(&index.settings, &node.name, *address);
            let cidr = Cidr::host(*address).to_string();
            let mut network = of_type(&own, "reserved", &cidr, None);
            let set = network.metadata.labels.get_or_insert_default();
            set.insert(labels::NETWORK_NOT_REMAPPED.to_owned(), "true".to_owned());
            set.insert(labels::NETWORK_SHARED.to_owned(), "true".to_owned());
            desired.want_owned(index, network, &ObjectRef::new(Kind::Node, "", &node.name));
        }
    }
    desired
}

/// Own Network of a type of which the user has none.
fn stand_in(index: &Index, kind: &str) -> ObjectRef {
    index.settings.own(Kind::Network, &format!("default-{kind}"))
}

/// Stand-in that is still there for a Network of the user's.
pub(super) fn stand_in_of(index: &Index, network: &Object) -> Option<ObjectRef> {
    let kind = network_type(index, network).filter(|_| !owner::is_own(network))?;
    Some(stand_in(index, kind)).filter(|of| index.get(of).is_some_and(owner::is_own))
}

/// One Network for each prefix of a peer. That of a Configuration that was about another peer has to go first: its
/// prefix leads there.
pub(super) fn of_peerings(index: &Index, peerings: &[Peering<'_>]) -> Desired {
    let mut desired = Desired::default();
    for peering in peerings.iter().filter(|peering| peering.fault.is_none()) {
        for remote in peering.remotes.iter().filter(|remote| !remote.is_of_other) {
            let spec = NetworkSpec { cidr: remote.cidr.to_string(), pre_allocated: None };
            let mut network = Network::new(&remote.network.name, spec);
            network.metadata.namespace = Some(peering.namespace().to_owned());
            let labels = [
                (labels::REMOTE_CLUSTER_ID.to_owned(), peering.peer()),
                (labels::CIDR_TYPE.to_owned(), remote.kind.name().to_owned()),
            ];
            network.metadata.labels = Some(labels.into());
            desired.want_owned(index, network, &peering.reference);
        }
    }
    desired
}

/// A Network of the cluster's own.
pub(super) fn of_type(
    of: &ObjectRef,
    kind: &str,
    cidr: &str,
    pre_allocated: Option<u32>,
) -> Network {
    let mut network = Network::new(&of.name, NetworkSpec { cidr: cidr.to_owned(), pre_allocated });
    network.metadata.namespace.clone_from(&of.namespace);
    network.metadata.labels = Some([(labels::NETWORK_TYPE.to_owned(), kind.to_owned())].into());
    network
}
