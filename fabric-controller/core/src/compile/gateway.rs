//! GatewayServers and GatewayClients: one for each peer, and what each is to do.

use std::collections::BTreeMap;

use fabric_api::check::Fault;
use fabric_api::fabric::{GatewayConfig, NO_MTU, PeerEndpoint, Role};
use fabric_api::networking::{GatewayClient, GatewayServer, PublicKeyObject, secret_name};
use fabric_api::{ClusterId, PublicKey, check, labels};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::LocalObjectReference;

use super::cluster::Cluster;
use super::peering::Peering;
use super::{Compiler, KeyPair};
use crate::index::key_pair;

/// A gateway that is to run, or goes on as it did.
#[derive(Debug)]
pub(super) struct Gateway<'a> {
    pub(super) reference: ObjectRef,
    pub(super) uid: String,
    pub(super) peer: ClusterId,
    pub(super) end: End<'a>,
    /// `None` if something is wrong: then what is published of it stays.
    pub(super) settings: Option<GatewaySettings>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum End<'a> {
    Server(&'a GatewayServer),
    Client(&'a GatewayClient),
}

#[derive(Clone, Debug)]
pub(super) struct GatewaySettings {
    pub(super) listen_port: Option<u16>,
    pub(super) endpoint: Option<PeerEndpoint>,
    pub(super) mtu: u32,
    pub(super) secret_name: String,
    pub(super) peer_public_key: Option<PublicKey>,
}

#[derive(Default)]
struct Keys {
    /// By namespace and peer; no key if there is a wrong one, or two.
    of: BTreeMap<(String, ClusterId), (ObjectRef, Option<PublicKey>)>,
    /// By namespace, one without a label for its peer.
    unlabelled: BTreeMap<String, ObjectRef>,
}

impl Gateway<'_> {
    pub(super) fn config(&self) -> ObjectRef {
        ObjectRef { kind: Kind::GatewayConfig, ..self.reference.clone() }
    }

    pub(super) fn role(&self) -> Role {
        match self.end {
            End::Server(_) => Role::Server,
            End::Client(_) => Role::Client,
        }
    }

    pub(super) fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }

    pub(super) fn secret_ref(&self) -> Option<&LocalObjectReference> {
        match self.end {
            End::Server(server) => server.spec.secret_ref.as_ref(),
            End::Client(client) => client.spec.secret_ref.as_ref(),
        }
    }

    fn mtu(&self) -> Option<i64> {
        match self.end {
            End::Server(server) => server.spec.mtu,
            End::Client(client) => client.spec.mtu,
        }
    }
}

impl<'a> Compiler<'a> {
    pub(super) fn gateways(
        &mut self,
        cluster: &Cluster,
        peerings: &[Peering<'_>],
    ) -> Vec<Gateway<'a>> {
        let index = self.index;
        let servers = index.all::<GatewayServer>(Kind::GatewayServer);
        let clients = index.all::<GatewayClient>(Kind::GatewayClient);
        let mut all = Vec::new();
        for (reference, server) in servers {
            all.extend(self.gateway(reference, &server.metadata, End::Server(server), cluster));
        }
        for (reference, client) in clients {
            all.extend(self.gateway(reference, &client.metadata, End::Client(client), cluster));
        }
        let mut gateways = self.one_of(all, |g| g.peer.to_string(), "for the same peer");
        gateways = self.one_of(gateways, |g| g.config().to_string(), "of the same name");
        let keys = self.public_keys(cluster);
        for gateway in &mut gateways {
            gateway.settings = self.gateway_settings(gateway, &keys);
            self.placement_faults(gateway);
            if !peerings.iter().any(|peering| peering.is_with(&gateway.peer)) {
                let message = format!("waits for a Configuration of {}", gateway.peer);
                self.problem(&gateway.reference, "", message);
            }
        }
        if !index.settings.kubernetes {
            self.one_for_a_port(&mut gateways);
        }
        gateways
    }

    fn gateway(
        &mut self,
        reference: &ObjectRef,
        metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
        end: End<'a>,
        cluster: &Cluster,
    ) -> Option<Gateway<'a>> {
        if metadata.deletion_timestamp.is_some() {
            return None; // it waits for what was made for it to go
        }
        let uid = metadata.uid.clone().unwrap_or_default();
        let peer = match self.peer_of(reference, metadata, cluster) {
            Ok(peer) => Some(peer),
            Err(_) => {
                self.keep(ObjectRef { kind: Kind::GatewayConfig, ..reference.clone() });
                self.faulty.insert(reference.clone());
                // It goes on for the peer that it was for.
                self.running(reference, &uid).and_then(|c| c.spec.peer_cluster_id.parse().ok())
            }
        };
        Some(Gateway { reference: reference.clone(), uid, peer: peer?, end, settings: None })
    }

    /// Selects among conflicting gateways; the one that runs goes on.
    fn one_of(
        &mut self,
        all: Vec<Gateway<'a>>,
        key: fn(&Gateway<'a>) -> String,
        what: &str,
    ) -> Vec<Gateway<'a>> {
        let mut groups: BTreeMap<String, Vec<Gateway<'a>>> = BTreeMap::new();
        for gateway in all {
            groups.entry(key(&gateway)).or_default().push(gateway);
        }
        let mut chosen = Vec::new();
        for mut rivals in groups.into_values() {
            let runs = rivals.iter().position(|g| self.published(g).is_some()).unwrap_or(0);
            if rivals.len() > 1 {
                let names: Vec<_> = rivals.iter().map(|g| g.reference.to_string()).collect();
                let (names, running) = (names.join(" and "), &rivals[runs].reference);
                let message = format!("{names} are {what}; expected one. {running} runs");
                for rival in &rivals {
                    self.problem(&rival.reference, "", message.clone());
                }
            }
            chosen.push(rivals.swap_remove(runs));
        }
        chosen.sort_by(|a, b| a.reference.cmp(&b.reference));
        chosen
    }

    /// GatewayConfig in use for this very gateway.
    pub(super) fn published(&self, gateway: &Gateway<'_>) -> Option<&'a GatewayConfig> {
        self.running(&gateway.reference, &gateway.uid)
    }

    fn running(&self, gateway: &ObjectRef, uid: &str) -> Option<&'a GatewayConfig> {
        let config = ObjectRef { kind: Kind::GatewayConfig, ..gateway.clone() };
        let config = self.index.typed::<GatewayConfig>(&config)?;
        (config.spec.gateway_uid == uid).then_some(config)
    }

    fn one_for_a_port(&mut self, gateways: &mut [Gateway<'a>]) {
        let mut by_port: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
        for (i, gateway) in gateways.iter().enumerate() {
            if let Some(port) = gateway.settings.as_ref().and_then(|s| s.listen_port) {
                by_port.entry(port).or_default().push(i);
            }
        }
        for (port, rivals) in by_port.into_iter().filter(|(_, rivals)| rivals.len() > 1) {
            let listens = |i: &&usize| {
                let published = self.published(&gateways[**i]);
                published.is_some_and(|config| config.spec.listen_port == Some(port))
            };
            let first = rivals.iter().find(listens).copied().unwrap_or(rivals[0]);
            let winner = gateways[first].reference.clone();
            for i in rivals.into_iter().filter(|i| *i != first) {
                let message = format!("port {port} is {winner}'s; expected another port");
                let reference = gateways[i].reference.clone();
                self.problem(&reference, "spec.endpoint", message);
                gateways[i].settings = None;
            }
        }
    }

    fn gateway_settings(&mut self, gateway: &Gateway<'_>, keys: &Keys) -> Option<GatewaySettings> {
        // All of it is checked before any of it is refused, so that every fault is reported at
        // once.
        let (mut faults, ends) = match gateway.end {
            End::Server(server) => (
                check::gateway_server(server),
                self.listen_port(server).map(|port| (Some(port), None)),
            ),
            End::Client(client) => {
                let addresses = client.spec.endpoint.addresses.clone();
                let port = check::client_port(client);
                let endpoint = port.map(|port| (None, Some(PeerEndpoint { addresses, port })));
                (check::gateway_client(client), endpoint)
            }
        };
        let labelled = !self.faulty.contains(&gateway.reference);
        let peer_label = check::label_field(labels::REMOTE_CLUSTER_ID);
        faults.retain(|fault| fault.field != peer_label); // reported already
        faults.iter().for_each(|fault| self.fault(&gateway.reference, fault));
        let secret_name = self.secret(gateway);
        let peer_public_key = self.peer_key(gateway, keys, &secret_name);
        let (listen_port, endpoint) = ends.ok().filter(|_| labelled && faults.is_empty())?;
        let mtu = gateway.mtu().and_then(|mtu| u32::try_from(mtu).ok()).unwrap_or(NO_MTU);
        Some(GatewaySettings {
            listen_port,
            endpoint,
            mtu,
            secret_name,
            peer_public_key: peer_public_key?,
        })
    }

    /// A pod has all ports for itself; standalone, a node port is the host's.
    fn listen_port(&self, server: &GatewayServer) -> Result<u16, Fault> {
        if self.index.settings.kubernetes {
            check::service_port(server)
        } else {
            check::listen_port(server)
        }
    }

    /// The Secret with the key pair: the one named, or one that is made here.
    fn secret(&mut self, gateway: &Gateway<'_>) -> String {
        let reference = key_pair(&gateway.reference, gateway.secret_ref());
        let name = reference.name.clone();
        if secret_name(gateway.secret_ref()).is_some() {
            return name;
        }
        // One that runs has a key, whose public half the peer has: perhaps it just cannot be read
        // now.
        let unread = self.published(gateway).is_some() && self.index.may_be_unread(&reference);
        if self.index.get(&reference).is_none() && !unread {
            let owner = self.owned_by(&gateway.reference, Some(gateway.namespace()));
            let owner = owner.and_then(|owners| owners.into_iter().next());
            self.out.keys.insert(reference, KeyPair { peer: gateway.peer.to_string(), owner });
        }
        name
    }

    /// Checks the key pair, and finds the peer's key. `None` if it is unfit, `Some(None)` if it is
    /// not there yet.
    fn peer_key(
        &mut self,
        gateway: &Gateway<'_>,
        keys: &Keys,
        secret_name: &str,
    ) -> Option<Option<PublicKey>> {
        let secret = ObjectRef::new(Kind::Secret, gateway.namespace(), secret_name);
        let own = self.own_key(gateway, &secret);
        let theirs = keys.of.get(&(gateway.namespace().to_owned(), gateway.peer.clone()));
        let unlabelled = keys.unlabelled.get(gateway.namespace());
        let public = theirs.map(|(reference, _)| reference).or(unlabelled);
        let needed = [Some(secret), public.cloned()].into_iter().flatten().collect();
        self.needed.insert(gateway.reference.clone(), needed);
        match theirs {
            Some((reference, Some(key))) if own == Some(*key) => {
                let message = "this is this cluster's own public key; expected the peer's";
                self.problem(reference, "spec.publicKey", message);
                None
            }
            Some((_, key)) => key.map(Some),
            // One that has lost its label, or cannot be read, may be the one in use.
            None if (unlabelled.is_some() || !self.index.is_whole())
                && self.published(gateway).is_some_and(|c| c.spec.peer_public_key.is_some()) =>
            {
                None
            }
            None => {
                let message = format!("waits for a PublicKey of {} in its namespace", gateway.peer);
                self.problem(&gateway.reference, "", message);
                Some(None)
            }
        }
    }

    /// This gateway's own public key, to compare only. Problems with the Secret are reported; its
    /// gateway waits for a good one by itself.
    fn own_key(&mut self, gateway: &Gateway<'_>, reference: &ObjectRef) -> Option<PublicKey> {
        let Some(public) = self.index.own_key(reference) else {
            if !self.out.keys.contains_key(reference) {
                let message = format!("waits for {reference}");
                self.problem(&gateway.reference, "spec.secretRef.name", message);
            }
            return None;
        };
        self.accepted(reference, public)
    }

    fn public_keys(&mut self, cluster: &Cluster) -> Keys {
        let index = self.index;
        let mut keys = Keys::default();
        for (reference, object) in index.all::<PublicKeyObject>(Kind::PublicKey) {
            let namespace = reference.namespace.clone().unwrap_or_default();
            let Ok(peer) = self.peer_of(reference, &object.metadata, cluster) else {
                keys.unlabelled.insert(namespace, reference.clone());
                continue;
            };
            let key = PublicKey::from_base64(&object.spec.public_key);
            let key = key.map_err(|error| {
                self.problem(reference, "spec.publicKey", error.to_string());
            });
            let mut key = key.ok();
            if let Some((first, Some(known))) = keys.of.get(&(namespace.clone(), peer.clone()))
                && key.is_some_and(|key| key != *known)
            {
                let message = format!("{first} has another key of {peer}; expected one");
                self.problem(reference, "spec.publicKey", message);
                key = None;
            }
            keys.of.insert((namespace, peer), (reference.clone(), key));
        }
        keys
    }
}
