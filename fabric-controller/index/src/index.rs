//! Index of all objects that the store has reported.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::check::{self, Fault};
use fabric_api::fabric::{
    FabricRecord, GatewayConfig, GatewayConfigStatus, GatewayRecord, NodeConfig, NodeConfigStatus,
    ProbeSettings, RecordVersion, version,
};
use fabric_api::networking::{Connection, GatewayClient, GatewayServer, secret_name};
use fabric_api::{Cidr, PublicKey, labels};
use fabric_objects::{Event, Kind, Object, ObjectRef, Problem};
use k8s_openapi::api::core::v1::LocalObjectReference;

use crate::grant::{Grant, ip_grant, network_grant};
use crate::placement::{Placement, Placements};

/// Kinds for whose objects others are made. Of the rest, there are new ones for as long as it runs.
const SEEN: [Kind; 6] = [
    Kind::Configuration,
    Kind::GatewayServer,
    Kind::GatewayClient,
    Kind::Node,
    Kind::ConfigMap,
    Kind::Secret,
];

/// Settings from the command line.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The namespace of the cluster's own objects.
    pub namespace: String,
    /// The node that this host is, on which standalone gateways run.
    pub node: Option<String>,
    /// Gateways run in pods of their own, wherever Kubernetes puts them.
    pub kubernetes: bool,
    /// Pods, too, are given their node's external address.
    pub full_masquerade: bool,
    /// Time without a packet, in seconds, after which the prefix of a peering that is gone is free;
    /// none: the agents' default.
    pub refuse_seconds: Option<u32>,
    /// Probing of connections by gateways.
    pub probe: ProbeSettings,
}

impl Settings {
    /// Reference to an object of the cluster's own.
    pub fn own(&self, kind: Kind, name: &str) -> ObjectRef {
        ObjectRef::new(kind, &self.namespace, name)
    }
}

/// Settings of a host.
impl Default for Settings {
    fn default() -> Self {
        Self {
            namespace: labels::LIQO_NAMESPACE.to_owned(),
            node: None,
            kubernetes: false,
            full_masquerade: false,
            refuse_seconds: None,
            probe: ProbeSettings::default(),
        }
    }
}

/// The latest version of every object, and what is wrong with the manifests.
#[derive(Clone, Debug, Default)]
pub struct Index {
    pub settings: Settings,
    objects: BTreeMap<Kind, BTreeMap<ObjectRef, Object>>,
    file_problems: Vec<Problem>,
    /// Placements of gateways, in Kubernetes.
    placements: Placements,
    /// Nodes that nothing waits for.
    pub lagging_nodes: BTreeSet<String>,
    /// Nodes whose agent takes longer than one that runs.
    pub slow_nodes: BTreeSet<String>,
    /// Nodes whose agent may be one that reads no records.
    pub stalled_nodes: BTreeSet<String>,
    /// Origin of the routes in the last config that a node is known to have applied, by node.
    routes: BTreeMap<String, Routes>,
    /// Newest version of the FabricRecords of which all are known.
    pub records: Option<RecordVersion>,
    /// The same of the GatewayRecords.
    pub gateway_records: Option<RecordVersion>,
    /// Prefixes of a peer in that version, and the first one that has them, by peer.
    recorded: BTreeMap<String, (Vec<String>, RecordVersion)>,
    /// Reason why ipam refused a Network or an IP.
    denials: BTreeMap<ObjectRef, String>,
    /// The public halves of all Secrets with a key pair, computed once; or what is wrong.
    own_keys: BTreeMap<ObjectRef, Result<PublicKey, Fault>>,
    /// Every object ever reported, of those whose absence may mean nothing.
    seen: BTreeSet<ObjectRef>,
    /// The peers that had a Configuration among those.
    seen_peers: BTreeSet<String>,
}

/// Origin of a node's routes to peers.
#[derive(Clone, Debug)]
enum Routes {
    /// Prefixes in its config, by peer.
    Config(BTreeMap<String, Vec<String>>),
    /// FabricRecords of the version that it acknowledges.
    Records,
}

impl Index {
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Takes in what happened and gives back the version that was there before.
    pub fn apply(&mut self, event: Event) -> Option<Object> {
        match event {
            Event::Applied(object) => {
                let reference = object.reference();
                let peer = object.label(labels::REMOTE_CLUSTER_ID).map(str::to_owned);
                self.seen_peers.extend(peer.filter(|_| reference.kind == Kind::Configuration));
                if SEEN.contains(&reference.kind) {
                    self.seen.insert(reference.clone());
                }
                if let Object::NodeConfig(config) = &object {
                    self.note_routes(&reference.name, config);
                }
                if let Object::Secret(secret) = &object {
                    let public = check::private_key(secret).map(|private| private.public());
                    self.own_keys.insert(reference.clone(), public);
                }
                let (kind, version) = (reference.kind, object.version());
                let before = self.objects.entry(kind).or_default().insert(reference, object);
                // A watch repeats what was written.
                if before.as_ref().map(Object::version) != Some(version) {
                    self.note_records(kind);
                }
                before
            }
            Event::Deleted(reference) => {
                self.denials.remove(&reference);
                self.own_keys.remove(&reference);
                if reference.kind == Kind::NodeConfig {
                    self.routes.remove(&reference.name);
                }
                let before = self.objects.get_mut(&reference.kind)?.remove(&reference);
                self.note_records(reference.kind);
                before
            }
            Event::Problems(problems) => {
                self.file_problems = problems;
                None
            }
            Event::Synced => None,
        }
    }

    /// A config that is not applied yet leaves the routes of the one before.
    fn note_routes(&mut self, node: &str, config: &NodeConfig) {
        if config.is_applied() {
            let peerings = config.spec.peerings.iter();
            let of_peers = peerings.map(|of| (of.peer_cluster_id.clone(), of.prefixes.clone()));
            let routes = match config.spec.from_records {
                true => Routes::Records,
                false => Routes::Config(of_peers.collect()),
            };
            self.routes.insert(node.to_owned(), routes);
        }
    }

    /// Between two writes there are records that no version has.
    fn note_records(&mut self, changed: Kind) {
        if changed == Kind::GatewayRecord {
            let all = self.all::<GatewayRecord>(changed).map(|(_, record)| record);
            let newest = version(all.collect::<Vec<_>>());
            self.gateway_records = newest.or_else(|| self.gateway_records.take());
        }
        if changed != Kind::FabricRecord {
            return;
        }
        let all = self.all::<FabricRecord>(changed).map(|(_, record)| record);
        let Some(version) = version(all.collect::<Vec<_>>()) else { return };
        let known = std::mem::take(&mut self.recorded);
        let all = self.all::<FabricRecord>(Kind::FabricRecord);
        let peerings = all.filter_map(|(_, record)| record.spec.peering.as_ref());
        let noted = peerings.map(|peering| {
            let peer = peering.peer_cluster_id.clone();
            let first = known.get(&peer).filter(|(prefixes, first)| {
                *prefixes == peering.prefixes && version.includes(first)
            });
            let first = first.map_or(&version, |(_, first)| first).clone();
            (peer, (peering.prefixes.clone(), first))
        });
        self.recorded = noted.collect();
        self.records = Some(version);
    }

    /// Version of the records that a node has read.
    pub fn records_read(&self, node: &str) -> Option<&RecordVersion> {
        let config = self.typed::<NodeConfig>(&ObjectRef::new(Kind::NodeConfig, "", node))?;
        config.status.as_ref()?.records.as_ref()
    }

    /// True if a node's tables are made from the newest of all that its agent reads.
    pub fn is_applied(&self, node: &str) -> bool {
        let config = self.typed::<NodeConfig>(&ObjectRef::new(Kind::NodeConfig, "", node));
        let Some(config) = config.filter(|config| config.is_applied()) else { return false };
        let Some(newest) = self.records.as_ref().filter(|_| config.spec.from_records) else {
            return true;
        };
        config.spec.removed || self.records_read(node).is_some_and(|read| read.includes(newest))
    }

    /// The same of all nodes that are waited for.
    pub fn is_applied_by_all(&self) -> bool {
        let mut names = self.of_kind(Kind::Node).map(|(node, _)| &node.name);
        names.all(|node| self.lagging_nodes.contains(node) || self.is_applied(node))
    }

    /// True if the node is known to have routes to these prefixes of a peer, and none to others of it.
    pub fn has_routes(&self, node: &str, peer: &str, prefixes: &[String]) -> bool {
        match self.routes.get(node) {
            Some(Routes::Config(peers)) => peers.get(peer).is_some_and(|known| known == prefixes),
            Some(Routes::Records) => self.recorded.get(peer).is_some_and(|(known, first)| {
                known == prefixes
                    && self.records_read(node).is_some_and(|read| read.includes(first))
            }),
            None => false,
        }
    }

    pub fn place(&mut self, placements: Placements) {
        self.placements = placements;
    }

    pub fn placement(&self, gateway: &ObjectRef) -> Option<&Placement> {
        self.placements.of.get(gateway)
    }

    /// Addresses of pods of a node that lie outside its pod CIDRs.
    pub fn pods_outside(&self, node: &str) -> impl Iterator<Item = IpAddr> {
        self.placements.pods.get(node).into_iter().flatten().copied()
    }

    /// Remembers that ipam refused, until it grants or the object goes.
    pub fn deny(&mut self, object: ObjectRef, reason: String) {
        self.denials.insert(object, reason);
    }

    pub fn granted(&mut self, object: &ObjectRef) {
        self.denials.remove(object);
    }

    pub fn get(&self, reference: &ObjectRef) -> Option<&Object> {
        self.objects.get(&reference.kind)?.get(reference)
    }

    pub fn typed<'a, T>(&'a self, reference: &ObjectRef) -> Option<&'a T>
    where
        &'a T: TryFrom<&'a Object>,
    {
        self.get(reference).and_then(|object| object.try_into().ok())
    }

    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = (&ObjectRef, &Object)> {
        self.objects.get(&kind).into_iter().flatten()
    }

    /// All objects of the kind that `T` is.
    pub fn all<'a, T>(&'a self, kind: Kind) -> impl Iterator<Item = (&'a ObjectRef, &'a T)>
    where
        T: 'a,
        &'a T: TryFrom<&'a Object>,
    {
        self.of_kind(kind).filter_map(|(r, object)| Some((r, object.try_into().ok()?)))
    }

    /// Those in one namespace.
    pub fn all_in<'a, T>(
        &'a self,
        kind: Kind,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = (&'a ObjectRef, &'a T)>
    where
        T: 'a,
        &'a T: TryFrom<&'a Object>,
    {
        let first =
            ObjectRef { kind, namespace: namespace.map(str::to_owned), name: String::new() };
        let from_first = self.objects.get(&kind).map(|all| all.range(first.clone()..));
        let in_it = from_first.into_iter().flatten();
        let in_it = in_it.take_while(move |(of, _)| of.namespace == first.namespace);
        in_it.filter_map(|(r, object)| Some((r, object.try_into().ok()?)))
    }

    /// Connections reported by gateways of that name, without those of one that is gone: `uid` is
    /// that of the present one.
    pub fn connections<'a>(
        &'a self,
        gateway: &ObjectRef,
        uid: &str,
    ) -> impl Iterator<Item = &'a Connection> {
        let all = self.all_in::<Connection>(Kind::Connection, gateway.namespace.as_deref());
        let own = all.filter(move |(_, connection)| {
            let of = &connection.spec.gateway_ref;
            of.name.as_ref() == Some(&gateway.name) && of.uid.as_deref().is_none_or(|of| of == uid)
        });
        own.map(|(_, connection)| connection)
    }

    /// The prefix that ipam granted a Network.
    pub fn network_grant(&self, network: &ObjectRef) -> Option<Cidr> {
        network_grant(self.typed(network)?)
    }

    /// The address that ipam granted an IP.
    pub fn ip_grant(&self, ip: &ObjectRef) -> Option<IpAddr> {
        ip_grant(self.typed(ip)?).map(|(address, _)| address)
    }

    /// The public key that belongs to the private one in a Secret.
    pub fn own_key(&self, secret: &ObjectRef) -> Option<Result<PublicKey, Fault>> {
        self.own_keys.get(secret).cloned()
    }

    /// Secrets in which gateways look for their key pairs, without those labelled as such.
    pub fn unlabelled_secrets(&self) -> BTreeSet<ObjectRef> {
        let servers = self.all::<GatewayServer>(Kind::GatewayServer);
        let servers = servers.map(|(gateway, server)| (gateway, server.spec.secret_ref.as_ref()));
        let clients = self.all::<GatewayClient>(Kind::GatewayClient);
        let clients = clients.map(|(gateway, client)| (gateway, client.spec.secret_ref.as_ref()));
        let secrets = servers.chain(clients).map(|(gateway, secret)| key_pair(gateway, secret));
        let labelled = |secret: &Object| secret.label(labels::GATEWAY_RESOURCE) == Some("true");
        secrets.filter(|secret| !self.get(secret).is_some_and(labelled)).collect()
    }

    pub fn denial(&self, object: &ObjectRef) -> Option<&str> {
        self.denials.get(object).map(String::as_str)
    }

    pub fn denials(&self) -> impl Iterator<Item = (&ObjectRef, &str)> {
        self.denials.iter().map(|(object, reason)| (object, reason.as_str()))
    }

    /// True if a Network of its own holds what another gives up.
    pub fn holds(&self, grant: Grant) -> bool {
        let mut networks = self.of_kind(Kind::Network);
        networks.any(|(_, network)| {
            network.label(labels::NETWORK_SHARED) != Some("true")
                && matches!(grant, Grant::Network(_))
                && Grant::of(network) == Some(grant)
        })
    }

    /// Prefixes of peers in the newest records of which all are known, with their peers.
    pub(crate) fn recorded_prefixes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.recorded.iter().flat_map(|(peer, (prefixes, _))| {
            prefixes.iter().map(move |prefix| (peer.as_str(), prefix.as_str()))
        })
    }

    pub fn file_problems(&self) -> &[Problem] {
        &self.file_problems
    }

    /// True if `object` may well be in a file that could not be read: then its absence means
    /// nothing, and what was made for it stays.
    pub fn may_be_unread(&self, object: &ObjectRef) -> bool {
        self.has_unread() && !self.seen.contains(object)
    }

    /// The same for the Configuration of a peer.
    pub fn peer_may_be_unread(&self, peer: &str) -> bool {
        self.has_unread() && !self.seen_peers.contains(peer)
    }

    /// True if there is nothing that could not be read.
    pub fn is_whole(&self) -> bool {
        !self.has_unread()
    }

    fn has_unread(&self) -> bool {
        self.file_problems.iter().any(|problem| match &problem.object {
            Some(object) => self.get(object).is_none(),
            None => true,
        })
    }
}

/// True if the same is compiled from both: they differ at most in what is reported again and again, such
/// as latency or counters, or in conditions, which are compiled from the rest.
pub fn compiles_alike(before: &Object, after: &Object) -> bool {
    match (before, after) {
        (Object::Connection(before), Object::Connection(after)) => {
            let value = |of: &Connection| of.status.as_ref().map(|status| status.value);
            value(before) == value(after)
                && before.spec == after.spec
                && before.metadata == after.metadata
        }
        (Object::GatewayConfig(before), Object::GatewayConfig(after)) => {
            before.spec == after.spec
                && before.metadata == after.metadata
                && compiled_status(before) == compiled_status(after)
        }
        (before, after) => before == after || differ_in_conditions(before, after),
    }
}

/// True if both have conditions, and differ in nothing else.
fn differ_in_conditions(before: &Object, after: &Object) -> bool {
    let [mut before, mut after] = [before, after].map(Object::clone);
    let cleared = [&mut before, &mut after].map(|of| of.conditions_mut(false).map(Vec::clear));
    cleared.iter().all(Option::is_some) && before == after
}

/// True if an agent reports nothing but what its node's tables are made from.
pub fn is_acknowledgement(before: &Object, after: &Object) -> bool {
    let (Object::NodeConfig(before), Object::NodeConfig(after)) = (before, after) else {
        return false;
    };
    let rest = |config: &NodeConfig| {
        let status = config.status.clone().unwrap_or_default();
        NodeConfigStatus { applied_generation: 0, records: None, reported_by: None, ..status }
    };
    before.status != after.status
        && before.spec == after.spec
        && before.metadata == after.metadata
        && rest(before) == rest(after)
}

/// Part of a gateway's status that others are compiled from.
fn compiled_status(config: &GatewayConfig) -> Option<GatewayConfigStatus> {
    let mut status = config.status.clone()?;
    (status.last_handshake, status.applied_generation) = (None, 0);
    (status.received_bytes, status.transmitted_bytes) = (0, 0);
    // Which records it has read matters until it is known to read them.
    if let Some(read) = status.records.as_mut().filter(|_| config.spec.from_records) {
        read.generation = 0;
    }
    Some(status)
}

/// The Secret with the key pair of a gateway: the one that it names, or one that is made for it.
pub fn key_pair(gateway: &ObjectRef, named: Option<&LocalObjectReference>) -> ObjectRef {
    let own = || format!("gw-{}", gateway.name);
    let name = secret_name(named).map_or_else(own, str::to_owned);
    ObjectRef::new(Kind::Secret, gateway.namespace.as_deref().unwrap_or_default(), &name)
}
