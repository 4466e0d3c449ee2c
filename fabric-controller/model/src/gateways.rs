//! GatewayServers and GatewayClients: one for each peer.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::ClusterId;
use fabric_api::networking::{GatewayClient, GatewayServer};
use fabric_index::Index;
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::KeyPair;
use crate::gateway::{End, Gateway, GatewaySettings, running, settings};
use crate::keys::{self, Keys};
use crate::peering::{Peering, peer_of};
use crate::problems::Problems;

/// All gateways, one for each peer.
#[derive(Debug, Default)]
pub struct Gateways<'a> {
    /// Gateways in the order of their references.
    pub all: Vec<Gateway<'a>>,
    /// Those without a label for a peer: what was made for them stays.
    pub faulty: BTreeSet<ObjectRef>,
    /// Secrets to create a key pair for.
    pub keys: BTreeMap<ObjectRef, KeyPair>,
}

/// Reads all gateways; `own` is the cluster itself.
pub(crate) fn read<'a>(
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
