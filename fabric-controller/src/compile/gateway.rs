//! GatewayServers and GatewayClients: one for each peer, and what each is to do.

use std::collections::BTreeMap;

use fabric_api::fabric::{GatewayConfig, PeerEndpoint, Role};
use fabric_api::networking::{
    GatewayClient, GatewayServer, PublicKeyObject, ServiceType, secret_name,
};
use fabric_api::{ClusterId, PrivateKey, PublicKey};
use fabric_store::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::{LocalObjectReference, Secret};

use super::Compiler;
use super::cluster::Cluster;
use super::peering::Peering;

/// Liqo's default.
pub(super) const DEFAULT_MTU: u32 = 1340;
/// Every IPv4 host takes packets of this size (RFC 791).
const MIN_MTU: u32 = 576;

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

/// Public keys by namespace and peer; an error if there is a wrong one, or two.
type Keys = BTreeMap<(String, ClusterId), Result<(ObjectRef, PublicKey), ()>>;

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

    fn secret_ref(&self) -> Option<&LocalObjectReference> {
        match self.end {
            End::Server(server) => server.spec.secret_ref.as_ref(),
            End::Client(client) => client.spec.secret_ref.as_ref(),
        }
    }

    fn mtu(&self) -> Option<i32> {
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
            if !peerings.iter().any(|peering| peering.is_with(&gateway.peer)) {
                let message = format!("waits for a Configuration of {}", gateway.peer);
                self.problem(&gateway.reference, "", message);
            }
        }
        self.one_for_a_port(&mut gateways);
        gateways
    }

    fn gateway(
        &mut self,
        reference: &ObjectRef,
        metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
        end: End<'a>,
        cluster: &Cluster,
    ) -> Option<Gateway<'a>> {
        let uid = metadata.uid.clone().unwrap_or_default();
        match self.peer_of(reference, metadata.labels.as_ref(), cluster) {
            Ok(peer) => {
                Some(Gateway { reference: reference.clone(), uid, peer, end, settings: None })
            }
            Err(_) => {
                self.keep(ObjectRef { kind: Kind::GatewayConfig, ..reference.clone() });
                self.faulty.insert(reference.clone());
                None
            }
        }
    }

    /// Of gateways that get in each other's way, the one that runs goes on.
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

    /// What this very gateway runs on.
    pub(super) fn published(&self, gateway: &Gateway<'_>) -> Option<&'a GatewayConfig> {
        let config = self.index.typed::<GatewayConfig>(&gateway.config())?;
        (config.spec.gateway_uid == gateway.uid).then_some(config)
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
        // All of it is looked at before any of it is refused, so that every fault is told at once.
        let mtu = self.mtu(gateway);
        let ends = match gateway.end {
            End::Server(server) => {
                self.listen_port(&gateway.reference, server).map(|port| (Some(port), None))
            }
            End::Client(client) => {
                self.endpoint(&gateway.reference, client).map(|endpoint| (None, Some(endpoint)))
            }
        };
        let secret_name = self.secret(gateway);
        let peer_public_key = self.peer_key(gateway, keys, &secret_name);
        let (listen_port, endpoint) = ends?;
        Some(GatewaySettings {
            listen_port,
            endpoint,
            mtu: mtu?,
            secret_name,
            peer_public_key: peer_public_key?,
        })
    }

    fn mtu(&mut self, gateway: &Gateway<'_>) -> Option<u32> {
        let Some(found) = gateway.mtu() else { return Some(DEFAULT_MTU) };
        let mtu = u32::try_from(found).ok().filter(|mtu| (MIN_MTU..=65_535).contains(mtu));
        if mtu.is_none() {
            let message = format!("found {found}; expected {MIN_MTU} to 65535 bytes");
            self.problem(&gateway.reference, "spec.mtu", message);
        }
        mtu
    }

    fn listen_port(&mut self, of: &ObjectRef, server: &GatewayServer) -> Option<u16> {
        let endpoint = &server.spec.endpoint;
        if endpoint.service_type == ServiceType::ExternalName {
            let message = "found ExternalName; expected NodePort, LoadBalancer or ClusterIP";
            self.problem(of, "spec.endpoint.serviceType", message);
            return None;
        }
        let own = (endpoint.port, &endpoint.ports, "spec.endpoint.port");
        let node = (endpoint.node_port, &endpoint.node_ports, "spec.endpoint.nodePort");
        let has_node_port = node.0.is_some() || !node.1.is_empty();
        let (one, many, field) = match endpoint.service_type {
            ServiceType::NodePort if has_node_port => node,
            ServiceType::NodePort
            | ServiceType::ClusterIP
            | ServiceType::LoadBalancer
            | ServiceType::ExternalName => own,
        };
        self.port(of, field, one.or_else(|| many.first().copied()))
    }

    fn endpoint(&mut self, of: &ObjectRef, client: &GatewayClient) -> Option<PeerEndpoint> {
        let endpoint = &client.spec.endpoint;
        let port = endpoint.port.or_else(|| endpoint.ports.first().copied());
        let port = self.port(of, "spec.endpoint.port", port);
        let mut sound = true;
        let mut fault = |compiler: &mut Self, field: &str, message: String| {
            sound = false;
            compiler.problem(of, field, message);
        };
        if let Some(protocol) = endpoint.protocol.as_deref().filter(|p| *p != "UDP") {
            let message = format!("found {protocol:?}; expected UDP");
            fault(self, "spec.endpoint.protocol", message);
        }
        if endpoint.addresses.is_empty() {
            let message = "missing; expected an IP address or DNS name of the server".to_owned();
            fault(self, "spec.endpoint.addresses", message);
        }
        for (i, address) in endpoint.addresses.iter().enumerate() {
            if !is_host(address) {
                let message = format!("found {address:?}; expected an IP address or DNS name");
                fault(self, &format!("spec.endpoint.addresses[{i}]"), message);
            }
        }
        let port = port?;
        sound.then(|| PeerEndpoint { addresses: endpoint.addresses.clone(), port })
    }

    fn port(&mut self, of: &ObjectRef, field: &str, found: Option<i32>) -> Option<u16> {
        let port = found.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
        if port.is_none() {
            let found = found.map_or_else(|| "missing".to_owned(), |port| format!("found {port}"));
            self.problem(of, field, format!("{found}; expected a port, 1 to 65535"));
        }
        port
    }

    /// The Secret with the key pair: the one named, or one that is made here.
    fn secret(&mut self, gateway: &Gateway<'_>) -> String {
        if let Some(name) = secret_name(gateway.secret_ref()) {
            return name.to_owned();
        }
        let name = format!("gw-{}", gateway.reference.name);
        let reference = ObjectRef::new(Kind::Secret, gateway.namespace(), &name);
        if self.index.get(&reference).is_none() {
            self.out.keys.insert(reference, gateway.peer.to_string());
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
        match keys.get(&(gateway.namespace().to_owned(), gateway.peer.clone())) {
            Some(Ok((reference, key))) if own == Some(*key) => {
                let message = "this is this cluster's own public key; expected the peer's";
                self.problem(reference, "spec.publicKey", message);
                None
            }
            Some(Ok((_, key))) => Some(Some(*key)),
            Some(Err(())) => None,
            None => {
                let message = format!("waits for a PublicKey of {} in its namespace", gateway.peer);
                self.problem(&gateway.reference, "", message);
                Some(None)
            }
        }
    }

    /// Our own public key, to compare only. What is wrong with the Secret is told; its gateway
    /// waits for a good one by itself.
    fn own_key(&mut self, gateway: &Gateway<'_>, reference: &ObjectRef) -> Option<PublicKey> {
        let Some(secret) = self.index.typed::<Secret>(reference) else {
            if !self.out.keys.contains_key(reference) {
                let message = format!("waits for {reference}");
                self.problem(&gateway.reference, "spec.secretRef.name", message);
            }
            return None;
        };
        let data = |key: &str| secret.data.as_ref().and_then(|data| data.get(key));
        let Some(private) = data("privateKey") else {
            self.problem(reference, "data.privateKey", "missing; expected 32 bytes in base64");
            return None;
        };
        let public = match PrivateKey::from_bytes(&private.0) {
            Ok(private) => private.public(),
            Err(error) => {
                self.problem(reference, "data.privateKey", error.to_string());
                return None;
            }
        };
        if data("publicKey").is_some_and(|given| given.0 != public.as_bytes()) {
            let message = format!("does not belong to the private key; expected {public}");
            self.problem(reference, "data.publicKey", message);
        }
        Some(public)
    }

    fn public_keys(&mut self, cluster: &Cluster) -> Keys {
        let index = self.index;
        let mut keys = Keys::new();
        for (reference, object) in index.all::<PublicKeyObject>(Kind::PublicKey) {
            let Ok(peer) = self.peer_of(reference, object.metadata.labels.as_ref(), cluster) else {
                continue;
            };
            let key = PublicKey::from_base64(&object.spec.public_key);
            let key = key.map_err(|error| {
                self.problem(reference, "spec.publicKey", error.to_string());
            });
            let namespace = reference.namespace.clone().unwrap_or_default();
            let mut entry = key.map(|key| (reference.clone(), key));
            if let Some(Ok((first, known))) = keys.get(&(namespace.clone(), peer.clone()))
                && entry.as_ref().is_ok_and(|(_, key)| key != known)
            {
                let message = format!("{first} has another key of {peer}; expected one");
                self.problem(reference, "spec.publicKey", message);
                entry = Err(());
            }
            keys.insert((namespace, peer), entry);
        }
        keys
    }
}

fn is_host(text: &str) -> bool {
    let label = |part: &str| {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (1..=63).contains(&part.len()) && part.chars().all(legal) && !part.starts_with('-')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let digits = name.chars().all(|c| c.is_ascii_digit() || c == '.');
    let dns = name.len() <= 253 && !digits && name.split('.').all(label);
    dns || text.parse::<std::net::IpAddr>().is_ok()
}
