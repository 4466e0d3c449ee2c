//! The cluster itself: its ID, its prefixes and its nodes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use fabric_api::fabric::{MovedAddress, NodeConfig, OverlappingPods};
use fabric_api::ipam::Network;
use fabric_api::networking::GatewayClient;
use fabric_api::{Cidr, ClusterId, Mac, check, labels};
use fabric_index::{Index, Settings, owner};
use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1 as core;

use crate::names::{dashed, of_node, of_node_address};
use crate::problems::Problems;

/// Facts about the cluster; some of them may still be missing.
#[derive(Debug, Default)]
pub struct Cluster {
    pub id: Option<ClusterId>,
    pub pods: Vec<Cidr>,
    /// Service CIDRs that are the cluster's own Networks.
    pub services: Vec<Cidr>,
    pub external: Vec<Granted>,
    /// Overlay addresses come from it; IPv4, and IPv6 next hops follow from them.
    pub internal: Option<Granted>,
    pub nodes: Vec<Node>,
    /// Nodes without a usable address: what was made for them stays.
    pub faulty: Vec<ObjectRef>,
}

#[derive(Clone, Debug)]
pub struct Granted {
    pub network: ObjectRef,
    pub cidr: Cidr,
}

#[derive(Clone, Debug)]
pub struct Node {
    pub name: String,
    /// At most one a family; the first is preferred.
    pub underlay: Vec<IpAddr>,
    /// Those of its Node. Its agent reports what took their place.
    pub declared: Vec<IpAddr>,
    pub pods: Vec<Cidr>,
    /// Pod CIDRs that another node has, too.
    pub overlapping: Vec<OverlappingPods>,
    pub overlay: Option<Ipv4Addr>,
    pub mac: Option<String>,
    /// At most one a family.
    pub external: Vec<IpAddr>,
}

impl Cluster {
    /// Peerings get their prefixes only once the cluster has its own, or a peer could take them.
    pub fn is_ready(&self) -> bool {
        self.id.is_some()
            && !self.pods.is_empty()
            && !self.external.is_empty()
            && self.internal.is_some()
    }

    /// Description of what [`Self::is_ready`] waits for.
    pub fn missing(&self) -> String {
        let parts = [
            ("ID", self.id.is_some()),
            ("pod CIDR", !self.pods.is_empty()),
            ("external CIDR", !self.external.is_empty()),
            ("internal CIDR", self.internal.is_some()),
        ];
        let missing = parts.iter().filter(|(_, is_there)| !is_there).map(|(name, _)| *name);
        format!("the cluster's own {}", missing.collect::<Vec<_>>().join(", "))
    }

    pub fn external_of(&self, ipv4: bool) -> Option<&Granted> {
        self.external.iter().find(|granted| granted.cidr.is_ipv4() == ipv4)
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// Those of a node's pod CIDRs that lie in none of the cluster's.
    pub fn outside<'a>(&'a self, cidrs: &'a [Cidr]) -> impl Iterator<Item = &'a Cidr> {
        cidrs.iter().filter(|cidr| lies_outside(&self.pods, cidr))
    }

    pub fn external_cidrs(&self) -> impl Iterator<Item = Cidr> {
        self.external.iter().map(|granted| granted.cidr)
    }
}

impl Cluster {
    /// Reads the cluster's ID, its Networks and all Nodes.
    pub fn read(index: &Index, problems: &mut Problems) -> Self {
        let mut cluster = Self { id: cluster_id(index, problems), ..Self::default() };
        for (reference, network) in index.all::<Network>(Kind::Network) {
            check::network(network).iter().for_each(|fault| problems.fault(reference, fault));
            if network.metadata.namespace.as_ref() == Some(&index.settings.namespace) {
                check::network_type(network).iter().for_each(|f| problems.fault(reference, f));
            }
        }
        for (reference, object) in index.of_kind(Kind::Network) {
            let granted = index.network_grant(reference);
            if let Some((kind, cidr)) = network_type(index, object).zip(granted) {
                cluster.add_network(kind, Granted { network: reference.clone(), cidr }, problems);
            }
        }
        report_seconds(index, problems);
        report_moved(index, problems);
        cluster.add_nodes(index, problems);
        cluster
    }

    fn add_network(&mut self, kind: &str, granted: Granted, problems: &mut Problems) {
        match kind {
            // Liqo's chart and weft's may each have made a Network of it, under two names.
            "pod-cidr" if self.pods.contains(&granted.cidr) => {}
            "pod-cidr" => self.pods.push(granted.cidr),
            "service-cidr" => self.services.push(granted.cidr),
            "external-cidr" | "external-cidr-v6" => self.external.push(granted),
            "internal-cidr" if granted.cidr.is_ipv4() => {
                self.internal.get_or_insert(granted);
            }
            "internal-cidr" => {
                let message = format!("found {}; expected an IPv4 prefix", granted.cidr);
                problems.add(&granted.network, "spec.cidr", message);
            }
            _ => {}
        }
    }

    fn add_nodes(&mut self, index: &Index, problems: &mut Problems) {
        let real = |node: &core::Node| {
            let labels = node.metadata.labels.as_ref();
            labels.and_then(|l| l.get(labels::NODE_TYPE)).is_none_or(|t| t != "virtual-node")
        };
        let real = index.all::<core::Node>(Kind::Node).filter(|(_, node)| real(node));
        let of_peers = prefixes_of_peers(index);
        for (reference, manifest) in real {
            match node(index, (reference, manifest), (&self.pods, &of_peers), problems) {
                Some(node) => {
                    report_addresses(reference, &node, &self.nodes, problems);
                    self.nodes.push(node);
                }
                None => self.faulty.push(reference.clone()),
            }
        }
        let Self { nodes, pods, faulty, .. } = self;
        report_addresses_of_pods(nodes, problems);
        report_addresses_of_peers(index, nodes, problems);
        separate_pods(index, nodes, faulty, problems);
        nodes.iter_mut().for_each(|node| add_pods(index, pods, node));
    }
}

/// The value of the label `ipam.liqo.io/network-type`, on the cluster's own Networks.
pub fn network_type<'o>(index: &Index, object: &'o Object) -> Option<&'o str> {
    let ours = object.namespace() == Some(&index.settings.namespace);
    object.label(labels::NETWORK_TYPE).filter(|_| ours)
}

fn cluster_id(index: &Index, problems: &mut Problems) -> Option<ClusterId> {
    let reference = index.settings.own(Kind::ConfigMap, labels::CLUSTER_ID_CONFIGMAP);
    report_second_ids(index, &reference, problems);
    let published = published_id(index);
    let Some(map) = index.typed::<core::ConfigMap>(&reference) else {
        let expected = match &published {
            Some(id) => {
                format!("CLUSTER_ID: {id}, by which nodes and peers go on to know this cluster")
            }
            None => "the cluster's ID in it (the chart, or `weft init`, makes it)".to_owned(),
        };
        problems.add(&reference, "", format!("missing; expected {expected}"));
        return published;
    };
    let given = problems.accepted(&reference, check::cluster_id(map));
    if let Some((given, known)) = given.as_ref().zip(published.as_ref()).filter(|(a, b)| a != b) {
        let message = format!(
            "found {given}; expected {known}, by which nodes and peers go on to know this cluster; to give it another \
             name, take weft away first (`weft down`, `helm uninstall`; what an older release left: `kubectl delete \
             nodeconfigs --all`)"
        );
        problems.add(&reference, &format!("data.{}", labels::CLUSTER_ID_KEY), message);
    }
    published.or(given)
}

/// ID under which nodes have their configs: the cluster is the same one without the object that names it.
fn published_id(index: &Index) -> Option<ClusterId> {
    let mut present = index.all::<NodeConfig>(Kind::NodeConfig).filter(|(_, of)| !of.spec.removed);
    present.find_map(|(_, config)| config.spec.cluster_id.parse().ok())
}

/// Reports other ConfigMaps that name the cluster, by their name or the label by which Liqo finds its own. In
/// Kubernetes no other one is read.
fn report_second_ids(index: &Index, used: &ObjectRef, problems: &mut Problems) {
    let maps = index.all::<core::ConfigMap>(Kind::ConfigMap);
    for (other, map) in maps.filter(|(other, _)| *other != used) {
        let app = map.metadata.labels.as_ref().and_then(|all| all.get(labels::APP_NAME));
        if other.name != used.name && app.is_none_or(|app| app != labels::CLUSTER_ID_APP) {
            continue;
        }
        let id = map.data.as_ref().and_then(|data| data.get(labels::CLUSTER_ID_KEY));
        let (field, found) = match id {
            Some(id) => (format!("data.{}", labels::CLUSTER_ID_KEY), format!(", {id}")),
            None => (String::new(), String::new()),
        };
        let message = format!("found a second cluster ID{found}; expected {used} alone");
        problems.add(other, &field, message);
    }
}

/// Reports Networks of the user's that are of a type, and family, of which an earlier one is used.
fn report_seconds(index: &Index, problems: &mut Problems) {
    let mut used: Vec<(&str, Granted)> = Vec::new();
    for (reference, object) in index.of_kind(Kind::Network).filter(|(_, o)| !owner::is_own(o)) {
        let kind = match network_type(index, object) {
            Some("external-cidr" | "external-cidr-v6") => Some("external"),
            Some("internal-cidr") => Some("internal"),
            Some(_) | None => None,
        };
        let Some((kind, cidr)) = kind.zip(index.network_grant(reference)) else { continue };
        let same =
            |(of, known): &&(&str, Granted)| *of == kind && known.cidr.is_ipv4() == cidr.is_ipv4();
        if let Some((_, Granted { network, cidr: its })) = used.iter().find(same) {
            let name = &network.name;
            let message = format!(
                "found a second Network of this type, {cidr}; {name}, {its}, is used; expected one: delete the other"
            );
            problems.add(reference, &check::label_field(labels::NETWORK_TYPE), message);
            continue;
        }
        used.push((kind, Granted { network: reference.clone(), cidr }));
    }
}

/// Reports Networks of prefixes that are in use as they are, and stand for other ones now.
fn report_moved(index: &Index, problems: &mut Problems) {
    for (reference, object) in index.of_kind(Kind::Network) {
        let kind = network_type(index, object);
        let is_fixed = matches!(kind, Some("pod-cidr" | "service-cidr" | "reserved"))
            && object.label(labels::NETWORK_NOT_REMAPPED) != Some("true");
        let granted = index.network_grant(reference).filter(|_| is_fixed);
        let (Object::Network(network), Some(granted)) = (object, granted) else { continue };
        let own = &network.spec.cidr;
        if own.parse::<Cidr>().is_ok_and(|own| own != granted) {
            let message = format!(
                "{granted} stands for {own}, and nothing here uses that; expected the label {}: \"true\" and a prefix \
                 that is free",
                labels::NETWORK_NOT_REMAPPED
            );
            problems.add(reference, "spec.cidr", message);
        }
    }
}

/// Reports nodes that have the address of a pod: VXLAN would go to that.
fn report_addresses_of_pods(nodes: &[Node], problems: &mut Problems) {
    for node in nodes {
        let cidrs = nodes.iter().flat_map(|of| of.pods.iter().map(|cidr| (cidr, &of.name)));
        let within = |address: &IpAddr| cidrs.clone().find(|(cidr, _)| cidr.contains(*address));
        let found = node.underlay.iter().find_map(|address| Some((address, within(address)?)));
        if let Some((address, (cidr, of))) = found {
            let reference = ObjectRef::new(Kind::Node, "", &node.name);
            let message = format!(
                "found {address}, which is in {cidr}, whose addresses {of}'s pods have; expected the host's own"
            );
            problems.add(&reference, "status.addresses", message);
        }
    }
}

/// Reports nodes that have the address of a peer's gateway: VXLAN would leave the cluster. One that the node's
/// agent has found on a device is its own; the peer's gateway is then on the same host. In Kubernetes nodes report
/// their own.
fn report_addresses_of_peers(index: &Index, nodes: &[Node], problems: &mut Problems) {
    if index.settings.kubernetes {
        return;
    }
    let mut of_peers = BTreeMap::new();
    for (client, of) in index.all::<GatewayClient>(Kind::GatewayClient) {
        let addresses = of.spec.endpoint.addresses.iter().filter_map(|of| of.parse().ok());
        of_peers.extend(addresses.map(|address: IpAddr| (address, client)));
    }
    for node in nodes {
        for address in &node.declared {
            let client = of_peers.get(address);
            let client = client.filter(|_| !is_found_by_agent(index, &node.name, *address));
            let Some(client) = client else { continue };
            let message = format!(
                "found {address}, which is the peer's gateway in spec.endpoint.addresses of {client}; expected \
                 the host's own"
            );
            let reference = ObjectRef::new(Kind::Node, "", &node.name);
            problems.add(&reference, "status.addresses", message);
        }
    }
}

/// Returns whether a node's agent works with a config of this address and reports no other in its place.
fn is_found_by_agent(index: &Index, node: &str, address: IpAddr) -> bool {
    let config = index.typed::<NodeConfig>(&of_node(node));
    let Some(config) = config.filter(|of| of.is_applied() && of.spec.declared.contains(&address))
    else {
        return false;
    };
    let status = config.status.as_ref().filter(|status| status.reported_by.is_some());
    status.is_some_and(|status| status.moved.iter().all(|moved| moved.declared != address))
}

/// Reports addresses of another node.
fn report_addresses(reference: &ObjectRef, node: &Node, others: &[Node], problems: &mut Problems) {
    for other in others {
        if let Some(address) = node.underlay.iter().find(|a| other.underlay.contains(a)) {
            let message = format!("{address} is {}'s too; expected one of its own", other.name);
            problems.add(reference, "status.addresses", message);
        } else if let Some(address) = node.declared.iter().find(|a| other.declared.contains(a)) {
            let message = format!(
                "found {address}, which {}'s Node has, too; expected the node's own one, which weft uses \
                 as its agent has found it",
                other.name
            );
            problems.add(reference, "status.addresses", message);
        }
    }
}

/// Reports pod CIDRs that overlap another node's and removes them: packets could go to one only. A node keeps
/// one that is published as its own, even if its Node is `faulty` now; of others, the first by name.
fn separate_pods(index: &Index, nodes: &mut [Node], faulty: &[ObjectRef], problems: &mut Problems) {
    let published = |name: &str| {
        let spec = index.typed::<NodeConfig>(&of_node(name)).map(|config| &config.spec);
        let spec = spec.filter(|spec| !spec.removed);
        spec.map(|spec| spec.local_pods.as_slice()).unwrap_or_default()
    };
    let mut all = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        let known = published(&node.name);
        all.extend(node.pods.iter().map(|cidr| (!known.contains(&cidr.to_string()), at, *cidr)));
    }
    all.sort_by_key(|(is_new, at, _)| (*is_new, *at));
    let mut kept: Vec<(String, Cidr)> = Vec::new();
    for ObjectRef { name, .. } in faulty {
        let pods = published(name).iter().filter_map(|pods| pods.parse().ok());
        kept.extend(pods.map(|pods| (name.clone(), pods)));
    }
    for (_, at, cidr) in all {
        let name = nodes[at].name.clone();
        let overlaps = |(other, theirs): &&(String, Cidr)| *other != name && theirs.overlaps(&cidr);
        let Some((other, _)) = kept.iter().find(overlaps) else {
            kept.push((name, cidr));
            continue;
        };
        let other = other.clone();
        let reference = ObjectRef::new(Kind::Node, "", &name);
        let message = format!("{cidr} overlaps {other}'s; it is left out; expected one of its own");
        problems.add(&reference, "spec.podCIDRs", message);
        nodes[at].pods.retain(|pods| *pods != cidr);
        nodes[at].overlapping.push(OverlappingPods { cidr: cidr.to_string(), node: other });
    }
}

/// Prefixes that stand for peers, and the peers' IDs.
fn prefixes_of_peers(index: &Index) -> Vec<(Cidr, &str)> {
    let networks = index.of_kind(Kind::Network);
    let of_peers = networks.filter_map(|(reference, object)| {
        Some((index.network_grant(reference)?, object.label(labels::REMOTE_CLUSTER_ID)?))
    });
    of_peers.collect()
}

/// Network that keeps peers' prefixes away from a node's address.
pub fn address_network(settings: &Settings, node: &str, address: IpAddr) -> ObjectRef {
    settings.own(Kind::Network, &format!("node-{node}-{}", dashed(&address.to_string())))
}

/// `None` without a usable address.
fn node(
    index: &Index,
    (reference, node): (&ObjectRef, &core::Node),
    (cluster_pods, of_peers): (&[Cidr], &[(Cidr, &str)]),
    problems: &mut Problems,
) -> Option<Node> {
    check::node(node).iter().for_each(|fault| problems.fault(reference, fault));
    let (mut declared, _) = check::node_addresses(node);
    declared.retain(|address| {
        // Packets for it would go into the tunnel, VXLAN among them.
        let taken = of_peers.iter().find(|(prefix, _)| prefix.contains(*address));
        let own = || address_network(&index.settings, &reference.name, *address);
        let taken = taken.filter(|_| index.network_grant(&own()).is_none());
        if let Some((prefix, peer)) = taken {
            let message = format!(
                "found {address}, which is in {prefix}, where {peer} is reached; expected an address outside of \
                 peers' prefixes"
            );
            problems.add(reference, "status.addresses", message);
        }
        taken.is_none()
    });
    if declared.is_empty() {
        return None;
    }
    let underlay = current_addresses(index, (reference, node), &declared, problems);
    let settings = &index.settings;
    let name = reference.name.clone();
    let granted = |what: &str| index.ip_grant(&of_node_address(settings, &name, what));
    let overlay = granted("overlay").and_then(|address| match address {
        IpAddr::V4(overlay) => Some(overlay),
        IpAddr::V6(_) => None,
    });
    Some(Node {
        underlay,
        declared,
        pods: pod_cidrs((reference, node), cluster_pods, problems),
        overlapping: Vec::new(),
        overlay,
        mac: mac(settings, node.metadata.uid.as_deref().unwrap_or_default()),
        external: ["external-ipv4", "external-ipv6"].into_iter().filter_map(granted).collect(),
        name,
    })
}

/// Those declared, but where the node's agent has found another in the place of one. In Kubernetes a kubelet that
/// is not started with `--node-ip` reports it as well, but later.
fn current_addresses(
    index: &Index,
    (reference, node): (&ObjectRef, &core::Node),
    declared: &[IpAddr],
    problems: &mut Problems,
) -> Vec<IpAddr> {
    let config = index.typed::<NodeConfig>(&of_node(&reference.name));
    let status = config.and_then(|config| config.status.as_ref());
    let moved = status.map(|status| &status.moved);
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
            problems.add(reference, "status.addresses", message);
        }
        current.push(found.filter(|_| !pinned).unwrap_or(*address));
    }
    current
}

/// In Kubernetes, where pods reach each other, VXLAN devices have MAC addresses unknown to
/// pods: then none can send to a gateway what only nodes may. The source of a packet proves
/// nothing: it is what a node's CNI makes it, and pods may write what they like there.
pub fn mac(settings: &Settings, uid: &str) -> Option<String> {
    let known = settings.kubernetes && !uid.is_empty();
    known.then(|| Mac::of_uid(uid).to_string())
}

/// Pods outside of the node's pod CIDRs, one by one. Those outside of the cluster's are nothing
/// that a peer would accept, or could reach.
fn add_pods(index: &Index, cluster_pods: &[Cidr], node: &mut Node) {
    let outside = index.pods_outside(&node.name);
    let known = outside.filter(|ip| cluster_pods.iter().any(|pods| pods.contains(*ip)));
    let others: Vec<Cidr> =
        known.filter(|ip| !node.pods.iter().any(|c| c.contains(*ip))).map(Cidr::host).collect();
    node.pods.extend(others);
}

fn lies_outside(cluster_pods: &[Cidr], cidr: &Cidr) -> bool {
    let holds = |pods: &Cidr| pods.overlaps(cidr) && pods.len() <= cidr.len();
    !cluster_pods.is_empty() && !cluster_pods.iter().any(holds)
}

fn pod_cidrs(
    (reference, node): (&ObjectRef, &core::Node),
    cluster_pods: &[Cidr],
    problems: &mut Problems,
) -> Vec<Cidr> {
    let mut cidrs = Vec::new();
    for (field, cidr) in check::node_pod_cidrs(node) {
        let Ok(cidr) = cidr else { continue };
        if lies_outside(cluster_pods, &cidr) {
            let message = format!(
                "{cidr} lies in no Network of type pod-cidr, so peers do not accept its pods"
            );
            problems.add(reference, &field, message);
        }
        cidrs.push(cidr);
    }
    cidrs
}
