//! The cluster itself: who it is, which prefixes it uses, which nodes it has.

use std::net::{IpAddr, Ipv4Addr};

use fabric_api::fabric::{MovedAddress, NodeConfig, OverlappingPods};
use fabric_api::ipam::{Network, NetworkSpec};
use fabric_api::{Cidr, ClusterId, Mac, check, labels};
use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1 as core;

use super::names::of_node;
use super::{Compiler, names, owner};
use crate::index::Index;

const EXTERNAL_CIDR: &str = "10.70.0.0/16";
const INTERNAL_CIDR: &str = "10.80.0.0/16";

/// Facts about the cluster; some of them may still be missing.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) id: Option<ClusterId>,
    pub(super) pods: Vec<Cidr>,
    pub(super) external: Vec<Granted>,
    /// Overlay addresses come from it; IPv4, and IPv6 next hops follow from them.
    pub(super) internal: Option<Granted>,
    pub(super) nodes: Vec<Node>,
}

#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub(super) network: ObjectRef,
    pub(super) cidr: Cidr,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) name: String,
    /// At most one a family; the first is preferred.
    pub(super) underlay: Vec<IpAddr>,
    /// Standalone: those of the manifest, if its agent is to report what took their place.
    pub(super) declared: Vec<IpAddr>,
    pub(super) pods: Vec<Cidr>,
    /// Pod CIDRs that another node has, too.
    pub(super) overlapping: Vec<OverlappingPods>,
    pub(super) overlay: Option<Ipv4Addr>,
    pub(super) mac: Option<String>,
    /// At most one a family.
    pub(super) external: Vec<IpAddr>,
}

impl Cluster {
    /// Peerings get their prefixes only once the cluster has its own, or a peer could take them.
    pub(super) fn is_ready(&self) -> bool {
        self.id.is_some()
            && !self.pods.is_empty()
            && !self.external.is_empty()
            && self.internal.is_some()
    }

    pub(super) fn external_of(&self, ipv4: bool) -> Option<&Granted> {
        self.external.iter().find(|granted| granted.cidr.is_ipv4() == ipv4)
    }

    pub(super) fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    pub(super) fn external_cidrs(&self) -> impl Iterator<Item = Cidr> {
        self.external.iter().map(|granted| granted.cidr)
    }
}

/// The value of the label `ipam.liqo.io/network-type`, on the cluster's own Networks.
fn network_type<'o>(index: &Index, object: &'o Object) -> Option<&'o str> {
    let ours = object.namespace() == Some(&index.settings.namespace);
    object.label(labels::NETWORK_TYPE).filter(|_| ours)
}

impl Compiler<'_> {
    /// An object of the cluster's own.
    pub(super) fn own(&self, kind: Kind, name: &str) -> ObjectRef {
        ObjectRef::new(kind, &self.index.settings.namespace, name)
    }

    pub(super) fn cluster(&mut self) -> Cluster {
        let index = self.index;
        let mut cluster = Cluster { id: self.cluster_id(), ..Cluster::default() };
        for (reference, object) in index.of_kind(Kind::Network) {
            let Some(kind) = network_type(index, object) else { continue };
            let granted = index.network_grant(reference);
            let granted = granted.map(|cidr| Granted { network: reference.clone(), cidr });
            match (kind, granted) {
                ("pod-cidr", Some(granted)) => cluster.pods.push(granted.cidr),
                ("external-cidr" | "external-cidr-v6", Some(granted)) => {
                    cluster.external.push(granted)
                }
                ("internal-cidr", Some(granted)) if granted.cidr.is_ipv4() => {
                    cluster.internal.get_or_insert(granted);
                }
                ("internal-cidr", Some(granted)) => {
                    let message = format!("found {}; expected an IPv4 prefix", granted.cidr);
                    self.problem(reference, "spec.cidr", message);
                }
                (_, Some(_) | None) => {}
            }
        }
        for (reference, network) in index.all::<Network>(Kind::Network) {
            check::network(network).iter().for_each(|fault| self.fault(reference, fault));
            if network.metadata.namespace.as_ref() == Some(&index.settings.namespace) {
                check::network_type(network).iter().for_each(|fault| self.fault(reference, fault));
            }
        }
        cluster.nodes = self.nodes(&cluster);
        cluster
    }

    fn cluster_id(&mut self) -> Option<ClusterId> {
        let reference = self.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
        let Some(map) = self.index.typed::<core::ConfigMap>(&reference) else {
            self.problem(
                &reference,
                "",
                "missing; expected the cluster's ID in it (the chart, or `weft init`, makes it)",
            );
            return None;
        };
        self.accepted(&reference, check::cluster_id(map))
    }

    /// The external and internal CIDR, if the user describes a cluster and leaves them out, and
    /// the addresses of the nodes, so that no peer's prefix is put over them.
    pub(super) fn own_networks(&mut self, cluster: &Cluster) {
        let index = self.index;
        let has = |wanted: &str| {
            let mut networks = index.of_kind(Kind::Network);
            networks.any(|(_, o)| owner::of(o).is_none() && network_type(index, o) == Some(wanted))
        };
        let map = self.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
        let described = cluster.id.is_some() && has("pod-cidr");
        // The network addresses stay free: one stands in for unknown sources, and a host with a
        // connected subnet of that prefix takes it for a broadcast address.
        for (kind, cidr) in [("external-cidr", EXTERNAL_CIDR), ("internal-cidr", INTERNAL_CIDR)] {
            let name = format!("default-{kind}");
            if described && !has(kind) {
                let network = own_network(&self.own(Kind::Network, &name), kind, cidr, Some(1));
                self.want_owned(network, &map);
            } else if !described {
                self.keep(self.own(Kind::Network, &name));
            }
        }
        for node in &cluster.nodes {
            for address in &node.underlay {
                let name = format!("node-{}-{}", node.name, names::dashed(&address.to_string()));
                let cidr = Cidr::host(*address).to_string();
                let name = self.own(Kind::Network, &name);
                let mut network = own_network(&name, "reserved", &cidr, None);
                let set = network.metadata.labels.get_or_insert_default();
                set.insert(labels::NETWORK_NOT_REMAPPED.to_owned(), "true".to_owned());
                set.insert(labels::NETWORK_SHARED.to_owned(), "true".to_owned());
                self.want_owned(network, &ObjectRef::new(Kind::Node, "", &node.name));
            }
        }
    }

    pub(super) fn want_owned(&mut self, object: impl Into<Object>, of: &ObjectRef) {
        let mut object = object.into();
        owner::set(&mut object, of);
        object.metadata_mut().owner_references = self.owned_by(of, object.namespace());
        self.want(object);
    }

    fn nodes(&mut self, cluster: &Cluster) -> Vec<Node> {
        let nodes = self.index.all::<core::Node>(Kind::Node);
        let real = |node: &core::Node| {
            let labels = node.metadata.labels.as_ref();
            labels.and_then(|l| l.get(labels::NODE_TYPE)).is_none_or(|t| t != "virtual-node")
        };
        let real: Vec<_> = nodes.filter(|(_, node)| real(node)).collect();
        let mut nodes: Vec<Node> = Vec::new();
        for (reference, node) in real {
            if let Some(mut node) = self.node(reference, node, cluster) {
                self.apart(reference, &mut node, &nodes);
                nodes.push(node);
            }
        }
        nodes.iter_mut().for_each(|node| self.add_pods(cluster, node));
        nodes
    }

    /// Reports addresses of another node and removes its pod CIDRs: packets could go to one only.
    fn apart(&mut self, reference: &ObjectRef, node: &mut Node, others: &[Node]) {
        for other in others {
            if let Some(address) = node.underlay.iter().find(|a| other.underlay.contains(a)) {
                let message = format!("{address} is {}'s too; expected one of its own", other.name);
                self.problem(reference, "status.addresses", message);
            }
            let overlapping = &mut node.overlapping;
            node.pods.retain(|cidr| {
                let overlaps = other.pods.iter().any(|theirs| theirs.overlaps(cidr));
                if overlaps {
                    let node = other.name.clone();
                    overlapping.push(OverlappingPods { cidr: cidr.to_string(), node });
                    let message = format!("{cidr} overlaps {}'s; it is left out", other.name);
                    self.problem(reference, "spec.podCIDRs", message);
                }
                !overlaps
            });
        }
    }

    fn node(
        &mut self,
        reference: &ObjectRef,
        node: &core::Node,
        cluster: &Cluster,
    ) -> Option<Node> {
        check::node(node).iter().for_each(|fault| self.fault(reference, fault));
        let (declared, _) = check::node_addresses(node);
        if declared.is_empty() {
            self.faulty.insert(reference.clone());
            return None;
        }
        let underlay = self.current_addresses(reference, node, &declared);
        let declared = if self.index.settings.kubernetes { Vec::new() } else { declared };
        let name = reference.name.clone();
        let granted = |what: &str| self.index.ip_grant(&self.of_node(&name, what));
        let overlay = granted("overlay").and_then(|address| match address {
            IpAddr::V4(overlay) => Some(overlay),
            IpAddr::V6(_) => None,
        });
        let external = ["external-ipv4", "external-ipv6"].into_iter().filter_map(granted).collect();
        let pods = self.pod_cidrs(reference, node, cluster);
        let mac = self.mac(node.metadata.uid.as_deref().unwrap_or_default());
        let overlapping = Vec::new();
        Some(Node { name, underlay, declared, pods, overlapping, overlay, mac, external })
    }

    /// Those declared, but where the node's agent has found another in the place of one. In Kubernetes
    /// kubelets keep them up to date.
    fn current_addresses(
        &mut self,
        reference: &ObjectRef,
        node: &core::Node,
        declared: &[IpAddr],
    ) -> Vec<IpAddr> {
        let config = self.index.typed::<NodeConfig>(&of_node(&reference.name));
        let status = config.and_then(|config| config.status.as_ref());
        let moved = status.filter(|_| !self.index.settings.kubernetes).map(|status| &status.moved);
        let annotations = node.metadata.annotations.as_ref();
        let pin = annotations.and_then(|all| all.get(labels::PIN_ADDRESSES));
        let pinned = pin.is_some_and(|value| value == "true");
        let mut current = Vec::new();
        for address in declared {
            let is_it = |moved: &&MovedAddress| {
                moved.declared == *address && moved.found.is_ipv4() == address.is_ipv4()
            };
            let found = moved.into_iter().flatten().find(is_it).map(|moved| moved.found);
            if let Some(found) = found.filter(|_| pinned) {
                let message = format!(
                    "found {address}, which no device of the node has; expected {found} (the \
                     annotation {} keeps weft from using it)",
                    labels::PIN_ADDRESSES
                );
                self.problem(reference, "status.addresses", message);
            }
            current.push(found.filter(|_| !pinned).unwrap_or(*address));
        }
        current
    }

    /// In Kubernetes, where pods reach each other, VXLAN devices have MAC addresses unknown to
    /// pods: then none can send to a gateway what only nodes may. The source of a packet proves
    /// nothing: it is what a node's CNI makes it, and pods may write what they like there.
    pub(super) fn mac(&self, uid: &str) -> Option<String> {
        let known = self.index.settings.kubernetes && !uid.is_empty();
        known.then(|| Mac::of_uid(uid).to_string())
    }

    /// Pods outside of the node's pod CIDRs, one by one. Those outside of the cluster's are nothing
    /// that a peer would accept, or could reach.
    fn add_pods(&self, cluster: &Cluster, node: &mut Node) {
        let outside = self.index.pods_outside(&node.name);
        let known = outside.filter(|ip| cluster.pods.iter().any(|pods| pods.contains(*ip)));
        let others: Vec<Cidr> =
            known.filter(|ip| !node.pods.iter().any(|c| c.contains(*ip))).map(Cidr::host).collect();
        node.pods.extend(others);
    }

    fn pod_cidrs(
        &mut self,
        reference: &ObjectRef,
        node: &core::Node,
        cluster: &Cluster,
    ) -> Vec<Cidr> {
        let mut cidrs = Vec::new();
        for (field, cidr) in check::node_pod_cidrs(node) {
            let Ok(cidr) = cidr else { continue };
            let inside = |pods: &Cidr| pods.overlaps(&cidr) && pods.len() <= cidr.len();
            if !cluster.pods.is_empty() && !cluster.pods.iter().any(inside) {
                let message = format!(
                    "{cidr} lies in no Network of type pod-cidr, so peers do not accept its pods"
                );
                self.problem(reference, &field, message);
            }
            cidrs.push(cidr);
        }
        cidrs
    }
}

pub(super) fn own_network(
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
