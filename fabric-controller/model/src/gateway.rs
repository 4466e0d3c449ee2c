//! GatewayServers and GatewayClients: one for each peer, and what each is to do.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::check::Fault;
use fabric_api::fabric::{GatewayConfig, NO_MTU, PeerEndpoint, Role};
use fabric_api::networking::{GatewayClient, GatewayServer};
use fabric_api::{ClusterId, PublicKey, check, labels};
use fabric_index::{Index, key_pair};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::LocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::KeyPair;
use crate::keys::{self, Keys};
use crate::peering::{Peering, peer_of};
use crate::problems::Problems;

/// All gateways, one for each peer.
#[derive(Debug, Default)]
pub struct Gateways<'a> {
    /// In the order of their references.
    pub all: Vec<Gateway<'a>>,
    /// Those without a label for a peer: what was made for them stays.
    pub faulty: BTreeSet<ObjectRef>,
    /// Secrets to create a key pair for.
    pub keys: BTreeMap<ObjectRef, KeyPair>,
}

/// A gateway that is to run, or goes on as it did.
#[derive(Debug)]
pub struct Gateway<'a> {
    pub reference: ObjectRef,
    pub uid: String,
    pub peer: ClusterId,
    pub end: End<'a>,
    /// `None` if something is wrong: then what is published of it stays.
    pub settings: Option<GatewaySettings>,
    /// Objects with the keys that it requires.
    pub needed: Vec<ObjectRef>,
}

#[derive(Clone, Copy, Debug)]
pub enum End<'a> {
    Server(&'a GatewayServer),
    Client(&'a GatewayClient),
}

#[derive(Clone, Debug)]
pub struct GatewaySettings {
    pub listen_port: Option<u16>,
    pub endpoint: Option<PeerEndpoint>,
    pub mtu: u32,
    pub secret_name: String,
    pub peer_public_key: Option<PublicKey>,
}

impl<'a> Gateway<'a> {
    pub fn config(&self) -> ObjectRef {
        ObjectRef { kind: Kind::GatewayConfig, ..self.reference.clone() }
    }

    pub fn role(&self) -> Role {
        match self.end {
            End::Server(_) => Role::Server,
            End::Client(_) => Role::Client,
        }
    }

    pub fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }

    pub fn secret_ref(&self) -> Option<&LocalObjectReference> {
        match self.end {
            End::Server(server) => server.spec.secret_ref.as_ref(),
            End::Client(client) => client.spec.secret_ref.as_ref(),
        }
    }

    /// The Secret with its key pair: the one named, or one that is made for it.
    pub fn key_pair(&self) -> ObjectRef {
        key_pair(&self.reference, self.secret_ref())
    }

    fn mtu(&self) -> Option<i64> {
        match self.end {
            End::Server(server) => server.spec.mtu,
            End::Client(client) => client.spec.mtu,
        }
    }

    /// GatewayConfig in use for this very gateway.
    pub fn published(&self, index: &'a Index) -> Option<&'a GatewayConfig> {
        running(index, &self.reference, &self.uid)
    }
}

/// Reads all gateways; `own` is the cluster itself.
pub fn read<'a>(
    index: &'a Index,
    own: Option<&ClusterId>,
    peerings: &[Peering<'_>],
    problems: &mut Problems,
) -> Gateways<'a> {
    let servers = index.all::<GatewayServer>(Kind::GatewayServer);
    let servers = servers.map(|(of, server)| (of, &server.metadata, End::Server(server)));
    let clients = index.all::<GatewayClient>(Kind::GatewayClient);
    let clients = clients.map(|(of, client)| (of, &client.metadata, End::Client(client)));
    let mut gateways = Gateways::default();
    let mut all = Vec::new();
    // One that is being deleted waits for what was made for it to go.
    let stay = |(_, metadata, _): &(_, &ObjectMeta, _)| metadata.deletion_timestamp.is_none();
    for (reference, metadata, end) in servers.chain(clients).filter(stay) {
        let uid = metadata.uid.clone().unwrap_or_default();
        let peer = peer_of(reference, metadata, own, problems).ok();
        if peer.is_none() {
            gateways.faulty.insert(reference.clone());
        }
        // It goes on for the peer that it was for.
        let former = || running(index, reference, &uid)?.spec.peer_cluster_id.parse().ok();
        let Some(peer) = peer.or_else(former) else { continue };
        let reference = reference.clone();
        all.push(Gateway { reference, uid, peer, end, settings: None, needed: Vec::new() });
    }
    let all = one_of(index, all, (|g| g.peer.to_string(), "for the same peer"), problems);
    gateways.all = one_of(index, all, (|g| g.config().to_string(), "of the same name"), problems);
    gateways.keys = keys::missing(index, &gateways.all);
    let keys = Keys::read(index, own, problems);
    gateways.configure(index, &keys, problems);
    for gateway in &gateways.all {
        if !peerings.iter().any(|peering| peering.is_with(&gateway.peer)) {
            let message = format!("waits for a Configuration of {}", gateway.peer);
            problems.add(&gateway.reference, "", message);
        }
    }
    if !index.settings.kubernetes {
        one_for_a_port(index, &mut gateways.all, problems);
    }
    gateways
}

impl Gateways<'_> {
    fn configure(&mut self, index: &Index, keys: &Keys, problems: &mut Problems) {
        for gateway in &mut self.all {
            let secret = gateway.key_pair();
            gateway.needed = keys.needed(gateway, &secret);
            let is_made = self.keys.contains_key(&secret);
            // Both are checked before either is refused, so that all faults are reported at once.
            let settings = settings(index, gateway, problems);
            let own = keys::own(index, gateway, is_made, problems);
            let key = keys.of_peer(index, gateway, own, problems);
            let is_labelled = !self.faulty.contains(&gateway.reference);
            let settings = settings.zip(key).filter(|_| is_labelled);
            gateway.settings =
                settings.map(|(of, peer_public_key)| GatewaySettings { peer_public_key, ..of });
        }
    }
}

/// Selects among conflicting gateways; the one that runs goes on.
fn one_of<'a>(
    index: &'a Index,
    all: Vec<Gateway<'a>>,
    (key, what): (fn(&Gateway<'a>) -> String, &str),
    problems: &mut Problems,
) -> Vec<Gateway<'a>> {
    let mut groups: BTreeMap<String, Vec<Gateway<'a>>> = BTreeMap::new();
    for gateway in all {
        groups.entry(key(&gateway)).or_default().push(gateway);
    }
    let mut chosen = Vec::new();
    for mut rivals in groups.into_values() {
        let runs = rivals.iter().position(|g| g.published(index).is_some()).unwrap_or(0);
        if rivals.len() > 1 {
            let names: Vec<_> = rivals.iter().map(|g| g.reference.to_string()).collect();
            let (names, running) = (names.join(" and "), &rivals[runs].reference);
            let message = format!("{names} are {what}; expected one. {running} runs");
            for rival in &rivals {
                problems.add(&rival.reference, "", message.clone());
            }
        }
        chosen.push(rivals.swap_remove(runs));
    }
    chosen.sort_by(|a, b| a.reference.cmp(&b.reference));
    chosen
}

fn running<'a>(index: &'a Index, gateway: &ObjectRef, uid: &str) -> Option<&'a GatewayConfig> {
    let config = ObjectRef { kind: Kind::GatewayConfig, ..gateway.clone() };
    let config = index.typed::<GatewayConfig>(&config)?;
    (config.spec.gateway_uid == uid).then_some(config)
}

fn one_for_a_port<'a>(index: &'a Index, gateways: &mut [Gateway<'a>], problems: &mut Problems) {
    let mut by_port: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    for (i, gateway) in gateways.iter().enumerate() {
        if let Some(port) = gateway.settings.as_ref().and_then(|s| s.listen_port) {
            by_port.entry(port).or_default().push(i);
        }
    }
    for (port, rivals) in by_port.into_iter().filter(|(_, rivals)| rivals.len() > 1) {
        let listens = |i: &&usize| {
            let published = gateways[**i].published(index);
            published.is_some_and(|config| config.spec.listen_port == Some(port))
        };
        let first = rivals.iter().find(listens).copied().unwrap_or(rivals[0]);
        let winner = gateways[first].reference.clone();
        for i in rivals.into_iter().filter(|i| *i != first) {
            let message = format!("port {port} is {winner}'s; expected another port");
            problems.add(&gateways[i].reference, "spec.endpoint", message);
            gateways[i].settings = None;
        }
    }
}

/// Settings in the gateway's own manifest, without the peer's key. `None` if any is at fault.
fn settings(
    index: &Index,
    gateway: &Gateway<'_>,
    problems: &mut Problems,
) -> Option<GatewaySettings> {
    let (mut faults, ends) = match gateway.end {
        End::Server(server) => {
            let port = listen_port(index, server).map(|port| (Some(port), None));
            (check::gateway_server(server), port)
        }
        End::Client(client) => {
            let addresses = client.spec.endpoint.addresses.clone();
            let port = check::client_port(client);
            let endpoint = port.map(|port| (None, Some(PeerEndpoint { addresses, port })));
            (check::gateway_client(client), endpoint)
        }
    };
    let peer_label = check::label_field(labels::REMOTE_CLUSTER_ID);
    faults.retain(|fault| fault.field != peer_label); // reported already
    faults.iter().for_each(|fault| problems.fault(&gateway.reference, fault));
    let (listen_port, endpoint) = ends.ok().filter(|_| faults.is_empty())?;
    let mtu = gateway.mtu().and_then(|mtu| u32::try_from(mtu).ok()).unwrap_or(NO_MTU);
    let secret_name = gateway.key_pair().name;
    Some(GatewaySettings { listen_port, endpoint, mtu, secret_name, peer_public_key: None })
}

/// A pod has all ports for itself; standalone, a node port is the host's.
fn listen_port(index: &Index, server: &GatewayServer) -> Result<u16, Fault> {
    if index.settings.kubernetes { check::service_port(server) } else { check::listen_port(server) }
}
