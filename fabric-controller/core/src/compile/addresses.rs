//! IP resources of weft's own: addresses of nodes and gateways.

use std::net::IpAddr;

use fabric_api::ipam::{IP, IPSpec};
use fabric_api::{Cidr, labels};
use fabric_index::{Index, ip_grant, owner};
use fabric_model::cluster::Granted;
use fabric_model::names::{of_gateway, of_node_address};
use fabric_model::{Cluster, Gateway};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::ObjectReference;

use super::desired::Desired;

pub(super) fn of_nodes(index: &Index, cluster: &Cluster) -> Desired {
    let mut desired = Desired::default();
    let networks = [
        ("overlay", cluster.internal.as_ref()),
        ("external-ipv4", cluster.external_of(true)),
        ("external-ipv6", cluster.external_of(false)),
    ];
    for node in &cluster.nodes {
        let reference = ObjectRef::new(Kind::Node, "", &node.name);
        for (what, network) in networks {
            let ip = of_node_address(&index.settings, &node.name, what);
            if let Some(network) = network {
                want(&mut desired, (index, cluster), (ip, network), &reference);
            } else if !cluster.is_ready() {
                desired.keep(ip); // its prefix may come back
            }
        }
    }
    desired
}

pub(super) fn of_gateways(index: &Index, cluster: &Cluster, gateways: &[Gateway<'_>]) -> Desired {
    let mut desired = Desired::default();
    // A pod has its own address; standalone, the veth to the host needs one.
    let addresses: &[&str] =
        if index.settings.kubernetes { &["overlay"] } else { &["overlay", "link"] };
    for gateway in gateways {
        for what in addresses {
            let ip = of_gateway(&gateway.reference, what);
            if let Some(network) = &cluster.internal {
                want(&mut desired, (index, cluster), (ip, network), &gateway.reference);
            } else {
                desired.keep(ip);
            }
        }
    }
    desired
}

/// Wants an IP of a network. In Kubernetes an address that is granted cannot change: where it is of another
/// prefix, the IP goes first.
fn want(
    desired: &mut Desired,
    (index, cluster): (&Index, &Cluster),
    (ip, network): (ObjectRef, &Granted),
    owner: &ObjectRef,
) {
    let grant = index.typed(&ip).and_then(ip_grant);
    let is_moved = grant.is_some_and(|grant| !is_usable(grant, network.cidr, cluster));
    // The user's own Network may come back in a moment, with its prefix.
    let is_lasting = || !index.get(&network.network).is_some_and(owner::is_own);
    if !(index.settings.kubernetes && is_moved && is_lasting()) {
        desired.want_owned(index, address(ip, network), owner);
    }
}

/// True for an address of the prefix, or of any external CIDR of the cluster.
pub(super) fn is_usable((address, from): (IpAddr, Cidr), cidr: Cidr, cluster: &Cluster) -> bool {
    let is_of = |cidr: Cidr| from == cidr && cidr.contains(address);
    is_of(cidr) || cluster.external_cidrs().any(is_of)
}

/// An IP that requests an address of a network.
fn address(ip: ObjectRef, Granted { network, cidr }: &Granted) -> IP {
    // Liqo's field must not be empty; this address has no other meaning.
    let unspecified = if cidr.is_ipv4() { "0.0.0.0" } else { "::" };
    let spec = IPSpec {
        ip: unspecified.to_owned(),
        network_ref: Some(ObjectReference {
            api_version: Some(Kind::Network.api_version().to_owned()),
            kind: Some(Kind::Network.as_str().to_owned()),
            namespace: network.namespace.clone(),
            name: Some(network.name.clone()),
            ..ObjectReference::default()
        }),
        ..IPSpec::default()
    };
    let mut own = IP::new(&ip.name, spec);
    own.metadata.namespace = ip.namespace;
    own.metadata.labels = Some([(labels::HOST_UNREACHABLE.to_owned(), "true".to_owned())].into());
    own
}
