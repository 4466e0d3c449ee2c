//! A store and an ipam of a few lines, in memory.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use fabric_api::fabric::{
    FabricRecord, GatewayConfig, GatewayConfigSpec, GatewayRecord, NodeConfig, NodeConfigSpec,
    RecordVersion, Records, RefusedTraffic,
};
use fabric_api::{Cidr, PrivateKey};
use fabric_objects::{Event, Kind, Object, ObjectRef, Problem};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{Published, compile};
use fabric_index::{Grant, Index, Settings};

pub(super) struct World {
    pub(super) index: Index,
    pub(super) last: Published,
    prefixes: BTreeMap<Cidr, usize>,
    addresses: BTreeMap<Cidr, Vec<IpAddr>>,
    /// Nodes whose agents apply their config.
    pub(super) agents: Vec<&'static str>,
    /// Those agents read FabricRecords.
    pub(super) with_records: bool,
    /// Those agents refuse what the cluster's FabricRecord names, too.
    pub(super) refuses_recorded: bool,
    /// Gateways read GatewayRecords.
    pub(super) with_gateway_records: bool,
    /// Reports of their agents on refused prefixes, if there are any.
    pub(super) quiet: Option<bool>,
}

impl World {
    /// A cluster with one node `n1`, pods in 10.200.0.0/16.
    pub(super) fn new(id: &str) -> Self {
        let mut world = Self::empty();
        for object in cluster(id) {
            world.apply(object);
        }
        world
    }

    pub(super) fn empty() -> Self {
        Self {
            index: Index::new(Settings { node: Some("n1".to_owned()), ..Settings::default() }),
            last: Published::default(),
            prefixes: BTreeMap::new(),
            addresses: BTreeMap::new(),
            agents: vec!["n1"],
            with_records: false,
            refuses_recorded: false,
            with_gateway_records: false,
            quiet: None,
        }
    }

    /// Controller after a restart: all its state is in the store.
    pub(super) fn restart_without(self, unread: &[ObjectRef], why: Vec<Problem>) -> Self {
        let mut next = Self { index: Index::new(self.index.settings.clone()), ..self };
        for kind in Kind::ALL {
            for (reference, object) in self.index.of_kind(kind) {
                if !unread.contains(reference) {
                    next.index.apply(Event::Applied(object.clone()));
                }
            }
        }
        next.index.apply(Event::Problems(why));
        next
    }

    pub(super) fn apply(&mut self, mut object: Object) {
        let have = self.index.get(&object.reference()).cloned();
        object.copy_status(have.as_ref());
        self.index.apply(Event::Applied(object));
    }

    pub(super) fn delete(&mut self, reference: &ObjectRef) {
        let gone = self.index.apply(Event::Deleted(reference.clone()));
        let passed_on = gone.as_ref().and_then(Grant::of).is_some_and(|g| self.index.holds(g));
        self.release(gone.filter(|_| !passed_on));
    }

    /// Has the agents report anew.
    pub(super) fn report(&mut self) {
        for name in self.agents.clone() {
            let reference = ObjectRef::new(Kind::NodeConfig, "", name);
            let Some(config) = self.index.typed::<NodeConfig>(&reference) else { continue };
            let mut config = config.clone();
            let traffic = self.traffic(&config);
            let status = config.status.get_or_insert_default();
            (status.refused, status.refuses_recorded) = (traffic, self.refuses_recorded);
            self.index.apply(Event::Applied(config.into()));
        }
    }

    /// Compiles and stores once.
    pub(super) fn round(&mut self) {
        self.last = compile(&self.index, Timestamp::UNIX_EPOCH);
        self.step();
    }

    /// Compiles until nothing changes. Compiling again must then give the same.
    pub(super) fn settle(&mut self) {
        for _ in 0..50 {
            self.last = compile(&self.index, Timestamp::UNIX_EPOCH);
            if !self.step() && !self.acknowledge_records() && !self.acknowledge_gateway_records() {
                assert_eq!(compile(&self.index, Timestamp::MAX), self.last);
                self.assert_records_suffice();
                return;
            }
        }
        panic!("it never settles: {:#?}", self.last);
    }

    /// The same, while agents acknowledge no records.
    pub(super) fn settle_but_for_agents(&mut self) {
        for _ in 0..50 {
            self.last = compile(&self.index, Timestamp::UNIX_EPOCH);
            if !self.step() {
                return;
            }
        }
        panic!("it never settles: {:#?}", self.last);
    }

    /// The Configuration of a peer turns bad.
    pub(super) fn spoil(&mut self, peer: &str) {
        let reference = ObjectRef::new(Kind::Configuration, &tenant(peer), peer);
        let mut object = self.index.get(&reference).cloned().expect("it is there");
        if let Object::Configuration(configuration) = &mut object {
            let configuration = Arc::make_mut(configuration);
            configuration.spec.remote.cidr.pod.0 = vec!["nonsense".to_owned()];
        }
        self.index.apply(Event::Applied(object));
    }

    fn step(&mut self) -> bool {
        let mut changed = false;
        let wanted = self.last.clone();
        for (reference, mut object) in wanted.objects {
            let have = self.index.get(&reference).cloned();
            object.copy_status(have.as_ref());
            object.metadata_mut().uid = Some(format!("uid of {reference}"));
            let generation = have.as_ref().map_or(0, Object::generation);
            let same = |have: &Object| have.to_value()["spec"] == object.to_value()["spec"];
            let generation = generation + i64::from(!have.as_ref().is_some_and(same));
            object.metadata_mut().generation = Some(generation);
            if let Object::NodeConfig(config) = &mut object
                && self.agents.contains(&reference.name.as_str())
            {
                let config = Arc::make_mut(config);
                let traffic = self.traffic(config);
                let status = config.status.get_or_insert_default();
                status.applied_generation = generation;
                (status.refused, status.refuses_recorded) = (traffic, self.refuses_recorded);
            }
            if have.as_ref() != Some(&object) {
                self.index.apply(Event::Applied(object));
                changed = true;
            }
        }
        for (reference, _) in wanted.keys {
            self.index.apply(Event::Applied(key_pair(&reference).into()));
            changed = true;
        }
        for (reference, object) in wanted.statuses {
            if self.index.get(&reference) != Some(&object) {
                self.index.apply(Event::Applied(object));
                changed = true;
            }
        }
        for reference in wanted.deleted {
            self.delete(&reference);
            changed = true;
        }
        for ipam_request in wanted.ipam_requests {
            let grant = match ipam_request.allocation {
                crate::Allocation::Network { cidr, immutable, .. } => {
                    Grant::Network(self.acquire(cidr, immutable))
                }
                crate::Allocation::Address { cidr, .. } => {
                    Grant::Address { ip: self.issue(cidr), cidr }
                }
            };
            let mut object =
                self.index.get(&ipam_request.object).cloned().expect("an object requested it");
            grant.write_to(&mut object);
            self.index.apply(Event::Applied(object));
            changed = true;
        }
        changed
    }

    /// Report of a node's agent on all that it refuses.
    fn traffic(&self, config: &NodeConfig) -> Option<Vec<RefusedTraffic>> {
        let quiet = self.quiet?;
        let joined = config.joined(&self.records()).filter(|_| self.refuses_recorded);
        let spec = joined.map_or_else(|| config.spec.clone(), |joined| joined.spec);
        let prefixes = spec.refused.into_iter().map(|refused| refused.prefix);
        let traffic = |prefix| RefusedTraffic { prefix, quiet, senders: Vec::new() };
        Some(prefixes.map(traffic).collect())
    }

    /// Records as an agent has them.
    pub(super) fn records(&self) -> Records<FabricRecord> {
        let all = self.index.all::<FabricRecord>(Kind::FabricRecord);
        all.map(|(_, record)| record.clone()).collect()
    }

    /// Records as a gateway has them.
    pub(super) fn gateway_records(&self) -> Records<GatewayRecord> {
        let all = self.index.all::<GatewayRecord>(Kind::GatewayRecord);
        all.map(|(_, record)| record.clone()).collect()
    }

    /// Returns true if an agent has acknowledged others than before.
    fn acknowledge_records(&mut self) -> bool {
        let version = self.records().version().filter(|_| self.with_records);
        let read = |node: &str| self.index.records_read(node).cloned();
        let late: Vec<_> = self.agents.iter().filter(|node| read(node) != version).collect();
        let late: Vec<String> = late.into_iter().map(|node| (*node).to_owned()).collect();
        late.iter().for_each(|node| self.acknowledge(node, version.clone()));
        late.iter().any(|node| self.index.records_read(node).is_some())
    }

    pub(super) fn acknowledge(&mut self, node: &str, version: Option<RecordVersion>) {
        let reference = ObjectRef::new(Kind::NodeConfig, "", node);
        let Some(config) = self.index.typed::<NodeConfig>(&reference) else { return };
        let mut config = config.clone();
        config.status.get_or_insert_default().records = version;
        self.index.apply(Event::Applied(config.into()));
    }

    /// Returns true if a gateway has acknowledged others than before.
    fn acknowledge_gateway_records(&mut self) -> bool {
        let Some(version) = self.gateway_records().version().filter(|_| self.with_gateway_records)
        else {
            return false;
        };
        let configs = self.index.all::<GatewayConfig>(Kind::GatewayConfig);
        let mut configs: Vec<_> = configs.map(|(_, config)| config.clone()).collect();
        configs.retain_mut(|config| {
            let read = &mut config.status.get_or_insert_default().records;
            read.replace(version.clone()).as_ref() != Some(&version)
        });
        let is_news = !configs.is_empty();
        for config in configs {
            self.index.apply(Event::Applied(config.into()));
        }
        is_news
    }

    /// Whichever form is published, an agent or a gateway finds the same in the other.
    fn assert_records_suffice(&self) {
        self.assert_gateway_records_suffice();
        let records = self.records();
        for object in self.last.objects.values() {
            let Object::NodeConfig(config) = object else { continue };
            if config.spec.removed {
                continue;
            }
            let mut other = NodeConfig::clone(config);
            other.spec = config.spec.own_part();
            let joined = other.joined(&records).expect("all records are there");
            if config.spec.from_records {
                // An older agent has refused prefixes of its own.
                let refused = config.spec.refused.clone();
                let own = NodeConfigSpec { refused, ..joined.spec.own_part() };
                assert_eq!(config.spec, own);
            } else {
                assert_eq!(config.spec, joined.spec);
            }
        }
    }

    fn assert_gateway_records_suffice(&self) {
        let records = self.gateway_records();
        for object in self.last.objects.values() {
            let Object::GatewayConfig(config) = object else { continue };
            let spec = config.spec.own_part();
            let joined = records.join(&spec).expect("all records are there");
            match config.spec.from_records {
                true => assert_eq!(config.spec, joined.own_part()),
                false => assert_eq!(config.spec, joined),
            }
        }
    }

    fn acquire(&mut self, wanted: Cidr, immutable: bool) -> Cidr {
        let free = |cidr: &Cidr| !self.prefixes.keys().any(|taken| taken.overlaps(cidr));
        let base = if wanted.is_ipv4() { "10" } else { "fd" };
        let others = (0..=255).filter_map(|n| {
            let text = if wanted.is_ipv4() {
                format!("{base}.{n}.0.0")
            } else {
                format!("{base}{n:02x}::")
            };
            Cidr::around(text.parse().unwrap(), wanted.len())
        });
        let granted = if immutable || free(&wanted) {
            wanted
        } else {
            others.into_iter().find(|cidr| free(cidr)).expect("room")
        };
        *self.prefixes.entry(granted).or_default() += 1;
        granted
    }

    fn issue(&mut self, cidr: Cidr) -> IpAddr {
        let issued = self.addresses.entry(cidr).or_default();
        let next = |n: u32| match cidr.address() {
            IpAddr::V4(first) => IpAddr::V4((u32::from(first) + n).into()),
            IpAddr::V6(first) => IpAddr::V6((u128::from(first) + u128::from(n)).into()),
        };
        let address = (1..).map(next).find(|address| !issued.contains(address)).unwrap();
        issued.push(address);
        address
    }

    fn release(&mut self, gone: Option<Object>) {
        match gone.as_ref().and_then(Grant::of) {
            Some(Grant::Network(cidr)) => {
                let holders = self.prefixes.get_mut(&cidr).expect("held");
                *holders -= 1;
                self.prefixes.retain(|_, holders| *holders > 0);
            }
            Some(Grant::Address { ip, cidr }) => {
                self.addresses.get_mut(&cidr).expect("held").retain(|held| *held != ip);
            }
            None => {}
        }
    }

    pub(super) fn held(&self) -> (Vec<String>, usize) {
        let prefixes = self.prefixes.keys().map(ToString::to_string).collect();
        (prefixes, self.addresses.values().map(Vec::len).sum())
    }

    pub(super) fn problems(&self) -> Vec<String> {
        self.last.problems.iter().map(ToString::to_string).collect()
    }

    pub(super) fn gateway(&self, namespace: &str, name: &str) -> Option<&GatewayConfigSpec> {
        let reference = ObjectRef::new(Kind::GatewayConfig, namespace, name);
        self.index.typed::<GatewayConfig>(&reference).map(|config| &config.spec)
    }

    /// The same as the gateway has it.
    pub(super) fn whole_gateway(&self, namespace: &str, name: &str) -> Option<GatewayConfigSpec> {
        let reference = ObjectRef::new(Kind::GatewayConfig, namespace, name);
        let config = self.index.typed::<GatewayConfig>(&reference)?;
        Some(config.joined(&self.gateway_records()).expect("all records are there").spec)
    }

    pub(super) fn node(&self, name: &str) -> Option<&NodeConfigSpec> {
        let reference = ObjectRef::new(Kind::NodeConfig, "", name);
        self.index.typed::<NodeConfig>(&reference).map(|config| &config.spec)
    }

    pub(super) fn status(&self, reference: &ObjectRef) -> Value {
        self.index.get(reference).expect("it is there").to_value()["status"].clone()
    }
}

fn key_pair(reference: &ObjectRef) -> Secret {
    let private = PrivateKey::generate();
    let bytes = ByteString(private.expose().to_vec());
    let mut secret =
        Secret { data: Some([("privateKey".to_owned(), bytes)].into()), ..Secret::default() };
    secret.metadata.name = Some(reference.name.clone());
    secret.metadata.namespace = reference.namespace.clone();
    secret
}

/// An object as the store gives it.
pub(super) fn object<T: DeserializeOwned + Into<Object>>(kind: Kind, rest: Value) -> Object {
    let mut value = json!({ "apiVersion": kind.api_version(), "kind": kind.as_str() });
    let map = value.as_object_mut().unwrap();
    map.extend(rest.as_object().unwrap().clone());
    let mut object: Object = serde_json::from_value::<T>(value).unwrap().into();
    let uid = format!("uid of {}", object.reference());
    object.metadata_mut().uid = Some(uid);
    object.metadata_mut().generation = Some(1);
    object
}

macro_rules! of {
    ($kind:ident, $t:ty, $($json:tt)+) => {
        crate::compile::tests::world::object::<$t>(fabric_objects::Kind::$kind, serde_json::json!($($json)+))
    };
}
pub(super) use of;

pub(super) fn cluster(id: &str) -> Vec<Object> {
    vec![
        cluster_id(id),
        network("pod-cidr", "pod-cidr", "10.200.0.0/16"),
        node("n1", "192.0.2.11", 1),
    ]
}

pub(super) fn cluster_id(id: &str) -> Object {
    of!(ConfigMap, k8s_openapi::api::core::v1::ConfigMap, {
        "metadata": {"name": "liqo-clusterid-configmap", "namespace": "liqo"},
        "data": {"CLUSTER_ID": id}
    })
}

/// Makes a Network; one of pods is not remapped, and shared.
pub(super) fn network(name: &str, kind: &str, cidr: &str) -> Object {
    let fixed = if kind == "pod-cidr" { "true" } else { "false" };
    of!(Network, fabric_api::ipam::Network, {
        "metadata": {"name": name, "namespace": "liqo", "labels": {
            "ipam.liqo.io/network-type": kind,
            "ipam.liqo.io/network-not-remapped": fixed, "ipam.liqo.io/network-shared": fixed
        }},
        "spec": {"cidr": cidr}
    })
}

pub(super) fn node(name: &str, address: &str, n: u8) -> Object {
    of!(Node, k8s_openapi::api::core::v1::Node, {
        "metadata": {"name": name},
        "spec": {"podCIDRs": [format!("10.200.{n}.0/24")]},
        "status": {"addresses": [
            {"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}
        ]}
    })
}

/// All that a peering with `peer` needs here, as the server. Both use 10.200.0.0/16 and 10.70.0.0/16.
pub(super) fn server_side(peer: &str, port: u16) -> Vec<Object> {
    let mut all = either_side(peer, json!(["10.200.0.0/16"]), json!(["10.70.0.0/16"]));
    all.push(server(peer, port));
    all
}

pub(super) fn client_side(peer: &str) -> Vec<Object> {
    let mut all = either_side(peer, json!("10.200.0.0/16"), json!("10.70.0.0/16"));
    all.push(client(peer));
    all
}

fn metadata(name: &str, peer: &str) -> Value {
    json!({"name": name, "namespace": tenant(peer), "labels": {"liqo.io/remote-cluster-id": peer}})
}

pub(super) fn tenant(peer: &str) -> String {
    format!("liqo-tenant-{peer}")
}

pub(super) fn configuration(peer: &str, pod: Value, external: Value) -> Object {
    of!(Configuration, fabric_api::networking::Configuration, {
        "metadata": metadata(peer, peer),
        "spec": {"remote": {"cidr": {"pod": pod, "external": external}}}
    })
}

pub(super) fn either_side(peer: &str, pod: Value, external: Value) -> Vec<Object> {
    vec![
        configuration(peer, pod, external),
        secret(peer),
        public_key("gw-publickey", peer, "SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q="),
    ]
}

pub(super) fn secret(peer: &str) -> Object {
    of!(Secret, Secret, {
        "metadata": metadata("gw-keys", peer),
        "data": {
            "privateKey": "YHztEzTrIe/fVxknCVVsPWqDeBmhvLUVHTmT8GgV6ko=",
            "publicKey": "VQBlodNolSfnUBl5QCtt/y7SPSCRQCQyUQc/jzyrZjE="
        }
    })
}

pub(super) fn public_key(name: &str, peer: &str, key: &str) -> Object {
    of!(PublicKey, fabric_api::networking::PublicKeyObject, {
        "metadata": metadata(name, peer), "spec": {"publicKey": key}
    })
}

pub(super) fn server(peer: &str, port: u16) -> Object {
    of!(GatewayServer, fabric_api::networking::GatewayServer, {
        "metadata": metadata("server", peer),
        "spec": {
            "secretRef": {"name": "gw-keys"}, "mtu": 1400,
            "endpoint": {"serviceType": "NodePort", "port": 51840, "nodePort": port}
        }
    })
}

pub(super) fn client(peer: &str) -> Object {
    of!(GatewayClient, fabric_api::networking::GatewayClient, {
        "metadata": metadata("client", peer),
        "spec": {
            "secretRef": {"name": "gw-keys"},
            "endpoint": {"addresses": ["192.0.2.20"], "port": 30742, "protocol": "UDP"}
        }
    })
}

/// The same objects in another order, by a number.
pub(super) fn shuffled(mut objects: Vec<Object>, seed: u64) -> Vec<Object> {
    let mut state = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    for i in (1..objects.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let j = (state >> 33) as usize % (i + 1);
        objects.swap(i, j);
    }
    objects
}
