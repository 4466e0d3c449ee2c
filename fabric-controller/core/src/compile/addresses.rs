//! IP resources of weft's own: addresses of nodes and gateways.

use fabric_api::ipam::{IP, IPSpec};
use fabric_api::labels;
use fabric_index::{Index, ip_grant};
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
                want(&mut desired, index, (ip, network), &reference);
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
                want(&mut desired, index, (ip, network), &gateway.reference);
            } else {
                desired.keep(ip);
            }
        }
    }
    desired
}

/// Wants an IP of a network. In Kubernetes one that has an address of another prefix goes first, since that
/// stays as long as it.
fn want(
    desired: &mut Desired,
    index: &Index,
    (ip, network): (ObjectRef, &Granted),
    owner: &ObjectRef,
) {
    let grant = index.typed(&ip).and_then(ip_grant);
    let is_moved = grant.is_some_and(|(_, from)| from != network.cidr);
    if !(is_moved && index.settings.kubernetes) {
        desired.want_owned(index, address(ip, network), owner);
    }
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
