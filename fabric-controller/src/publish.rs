//! Writes what differs.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{FabricRecord, Record as _};
use fabric_api::ipam::Network;
use fabric_api::{Cidr, PrivateKey, PublicKey, labels};
use fabric_runtime::{Heartbeat, WRITE_RETRY, WriteBackoff};
use fabric_store::{Event, Kind, Object, ObjectRef, Problem, Store, StoreError};
use futures::stream::{self, StreamExt as _};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use fabric_core::{KeyPair, Published};
use fabric_index::owner::{self, is_own, keeps_refused_prefix};
use fabric_index::{Grant, Index, compiles_alike};

use crate::pacing::Pacing;
use crate::status_pacing::StatusPacing;

/// Result of a round of writes.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The index is no longer what was compiled.
    pub changed: bool,
    /// Nothing but configs and records has changed: acknowledgements follow.
    pub configured: bool,
    /// Grants of objects that are gone.
    pub lost: Vec<Grant>,
    /// Failed writes. They are tried again.
    pub problems: Vec<Problem>,
    /// The store did not answer: nothing else was tried, or each would wait for its own answer.
    pub unreachable: bool,
}

/// Destination of what is published. Each write that is done is a beat.
#[derive(Debug)]
pub struct Sink<'a> {
    pub store: &'a Store,
    pub heartbeat: &'a Heartbeat,
}

/// Writes under way at a time. The API server takes as many of one client without making it wait.
pub(crate) const MAX_WRITES: usize = 16;

/// Time before which something is not written.
#[derive(Debug, Default)]
pub struct Schedule {
    /// Writes that were refused, by the desired content.
    pub refusals: WriteBackoff<ObjectRef, Value>,
    /// Versions of the FabricRecords.
    pub pacing: Pacing,
    pub statuses: StatusPacing,
}

/// Brings the store and the index to the desired state. Refused writes wait for their backoff, and a
/// version of the FabricRecords for its time: with it, all configs that are there, which may rely on its content.
pub async fn publish(
    sink: Sink<'_>,
    index: &mut Index,
    schedule: &mut Schedule,
    wanted: &mut Published,
) -> Outcome {
    let mut waiting = without_gateways(index, wanted);
    schedule.pacing.await_gateways(&mut waiting);
    wanted.objects.retain(|reference, _| !waiting.contains(reference));
    let hold = schedule.pacing.earliest(index).filter(|_| has_news(index, wanted));
    schedule.pacing.hold(hold);
    let (is_held, outcome) = (hold.is_some(), Outcome::default());
    let mut publisher = Publisher { sink, index, schedule, is_held, outcome };
    for turn in [Turn::Hold, Turn::Record, Turn::Version, Turn::Other] {
        if turn == Turn::Version {
            wanted.seal(publisher.index);
        }
        let objects = wanted.objects.iter().map(Write::object);
        publisher.write_all(objects.filter(|write| Turn::of(write) == turn)).await;
    }
    publisher.write_all(wanted.keys.iter().map(Write::key)).await;
    // After a change the next round has others, which would follow these at once.
    if !publisher.outcome.changed {
        publisher.schedule.statuses.begin();
        publisher.write_all(wanted.statuses.iter().map(Write::status)).await;
    }
    // A prefix that is not held yet would be anybody's, also when its peering is back.
    let unheld = wanted.objects.iter().filter(|(reference, want)| {
        let have = publisher.index.get(reference);
        keeps_refused_prefix(want) && !have.is_some_and(|have| is_same(have, want))
    });
    let unheld: Vec<Cidr> = unheld.filter_map(|(_, want)| prefix_of(want)).collect();
    let is_unheld = |of: &ObjectRef| {
        let granted = publisher.index.network_grant(of);
        granted.is_some_and(|granted| unheld.iter().any(|prefix| prefix.overlaps(&granted)))
    };
    let deleted: Vec<_> = wanted.deleted.iter().filter(|of| !is_unheld(of)).collect();
    publisher.write_all(deleted.into_iter().map(Write::deletion)).await;
    publisher.schedule.refusals.keep(|reference| is_wanted(wanted, reference));
    publisher.outcome
}

fn prefix_of(network: &Object) -> Option<Cidr> {
    let network: &Network = network.try_into().ok()?;
    network.spec.cidr.parse().ok()
}

/// Order of the writes of objects.
#[derive(PartialEq)]
enum Turn {
    /// A prefix that a peer had is known only from the records that are about to be replaced.
    Hold,
    Record,
    /// Readers go by records as soon as the cluster's is written, which names what is stored of the others.
    Version,
    Other,
}

impl Turn {
    fn of(write: &Write<'_>) -> Self {
        let Write { reference, what } = write;
        match (reference.kind, what) {
            (Kind::Network, What::Object(object)) if keeps_refused_prefix(object) => Self::Hold,
            (Kind::FabricRecord | Kind::GatewayRecord, _) => {
                let is_version = reference.name == FabricRecord::CLUSTER;
                if is_version { Self::Version } else { Self::Record }
            }
            (_, _) => Self::Other,
        }
    }
}

/// True for what gateways and route-agents go by.
fn is_config(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::FabricRecord | Kind::NodeConfig | Kind::GatewayConfig | Kind::GatewayRecord
    )
}

/// True if there are changes of FabricRecords, which make a version that all nodes acknowledge.
fn has_news(index: &Index, wanted: &Published) -> bool {
    let is_record = |reference: &ObjectRef| reference.kind == Kind::FabricRecord;
    let mut records = wanted.objects.iter().filter(|(reference, _)| is_record(reference));
    records.any(|(of, want)| index.get(of).is_none_or(|have| !is_same(have, want)))
        || wanted.deleted.iter().any(is_record)
}

/// Records of new peerings whose gateways have no pod yet. Nodes that still refuse a peer's prefixes get
/// its record with the version that ends this.
fn without_gateways(index: &Index, wanted: &Published) -> BTreeSet<ObjectRef> {
    let peers: BTreeSet<&str> = wanted.gateways.values().map(|of| of.peer.as_str()).collect();
    let cluster = ObjectRef::new(Kind::FabricRecord, "", FabricRecord::CLUSTER);
    let cluster = index.typed::<FabricRecord>(&cluster);
    let refused = cluster.and_then(|record| record.spec.cluster.as_ref()).map(|of| &of.refused);
    let is_refused =
        |peer: &str| refused.into_iter().flatten().any(|of| of.peer_cluster_id == peer);
    let awaits_gateway = |object: &Object| {
        let record = <&FabricRecord>::try_from(object).ok();
        record.and_then(|record| record.spec.peering.as_ref()).is_some_and(|peering| {
            let peer = peering.peer_cluster_id.as_str();
            peering.gateway.is_none() && peers.contains(peer) && !is_refused(peer)
        })
    };
    let new = wanted.objects.iter().filter(|(of, _)| index.get(of).is_none());
    new.filter(|(_, want)| awaits_gateway(want)).map(|(of, _)| of.clone()).collect()
}

fn is_wanted(wanted: &Published, reference: &ObjectRef) -> bool {
    wanted.objects.contains_key(reference)
        || wanted.keys.contains_key(reference)
        || wanted.statuses.contains_key(reference)
        || wanted.deleted.contains(reference)
}

/// One write to the store.
struct Write<'a> {
    reference: &'a ObjectRef,
    what: What<'a>,
}

enum What<'a> {
    /// An object of weft's own; its status stays.
    Object(&'a Object),
    /// A Secret with a key pair that is generated when it is written.
    Key(&'a KeyPair),
    Status(&'a Object),
    Deletion,
}

/// Answer of the store to a [`Write`].
enum Written {
    Object(Object),
    Key(Object, PublicKey),
    Status,
    Deletion,
}

impl<'a> Write<'a> {
    fn object((reference, object): (&'a ObjectRef, &'a Object)) -> Self {
        Self { reference, what: What::Object(object) }
    }

    fn key((reference, pair): (&'a ObjectRef, &'a KeyPair)) -> Self {
        Self { reference, what: What::Key(pair) }
    }

    fn status((reference, object): (&'a ObjectRef, &'a Object)) -> Self {
        Self { reference, what: What::Status(object) }
    }

    fn deletion(reference: &'a ObjectRef) -> Self {
        Self { reference, what: What::Deletion }
    }

    /// The desired content, to recognise a write that was refused.
    fn want(&self) -> Value {
        match self.what {
            What::Object(object) | What::Status(object) => timeless(object.to_value()),
            What::Key(pair) => json!({"peer": pair.peer, "owner": pair.owner}),
            What::Deletion => Value::Null,
        }
    }

    /// `have` is the object as the index has it.
    async fn run(&self, store: &Store, have: Option<&Object>) -> Result<Written, StoreError> {
        match self.what {
            What::Object(object) => {
                let mut whole = object.clone();
                whole.copy_status(have);
                store.put(&whole).await.map(Written::Object)
            }
            What::Key(pair) => {
                let private = PrivateKey::generate();
                let stored = store.put(&key_secret(self.reference, pair, &private).into()).await?;
                Ok(Written::Key(stored, private.public()))
            }
            What::Status(object) => store.put_status(object).await.map(|_| Written::Status),
            What::Deletion => store.delete(self.reference).await.map(|()| Written::Deletion),
        }
    }
}

/// A condition that could not be written is as old as the try, every time.
fn timeless(mut want: Value) -> Value {
    let conditions = want.pointer_mut("/status/conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten().filter_map(Value::as_object_mut) {
        condition.remove("lastTransitionTime");
    }
    want
}

fn key_secret(reference: &ObjectRef, pair: &KeyPair, private: &PrivateKey) -> Secret {
    let data = [
        ("privateKey".to_owned(), ByteString(private.expose().to_vec())),
        ("publicKey".to_owned(), ByteString(private.public().as_bytes().to_vec())),
    ];
    let labels = [
        (labels::REMOTE_CLUSTER_ID.to_owned(), pair.peer.clone()),
        (labels::GATEWAY_RESOURCE.to_owned(), "true".to_owned()),
    ];
    Secret {
        metadata: ObjectMeta {
            name: Some(reference.name.clone()),
            namespace: reference.namespace.clone(),
            labels: Some(labels.into()),
            owner_references: pair.owner.clone().map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some(data.into()),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    }
}

struct Publisher<'a> {
    sink: Sink<'a>,
    index: &'a mut Index,
    schedule: &'a mut Schedule,
    /// A version of the FabricRecords waits.
    is_held: bool,
    outcome: Outcome,
}

impl Publisher<'_> {
    /// Writes what differs, [`MAX_WRITES`] at a time, until the store does not answer.
    async fn write_all<'w>(&mut self, writes: impl Iterator<Item = Write<'w>>) {
        let due: Vec<_> = writes.filter(|write| self.is_due(write)).collect();
        let store = self.sink.store;
        let with_known = due.into_iter().map(|write| {
            let have = self.index.get(write.reference).cloned();
            async move {
                let result = write.run(store, have.as_ref()).await;
                (write, result)
            }
        });
        let mut running = stream::iter(with_known.collect::<Vec<_>>()).buffer_unordered(MAX_WRITES);
        while let Some((write, result)) = running.next().await {
            self.sink.heartbeat.beat();
            match result {
                Ok(written) => self.take(&write, written),
                Err(error) => self.fail(&write, &error),
            }
            if self.outcome.unreachable {
                return;
            }
        }
    }

    /// True if it differs from what the store has and may be tried now.
    fn is_due(&mut self, write: &Write<'_>) -> bool {
        let have = self.index.get(write.reference);
        // A gateway that starts goes by no record of its peering.
        let is_new_gateway = have.is_none() && write.reference.kind == Kind::GatewayConfig;
        if self.is_held && is_config(write.reference.kind) && !is_new_gateway {
            return false;
        }
        match write.what {
            What::Object(want) if have.is_some_and(|have| is_same(have, want)) => return false,
            What::Object(want) if have.is_some_and(|have| is_in_the_way(have, want)) => {
                if !have.is_some_and(|have| serves(have, want)) {
                    let message =
                        "weft needs this name for an object of its own; expected another name";
                    self.problem(write.reference, message.to_owned());
                }
                return false;
            }
            What::Status(want) if have == Some(want) => return false,
            What::Object(_) | What::Status(_) | What::Key(_) | What::Deletion => {}
        }
        let is_same = |refused: &Value| *refused == write.want();
        let standing = self.schedule.refusals.pending(write.reference, is_same);
        if let Some(message) = standing.map(str::to_owned) {
            self.problem(write.reference, message);
            return false;
        }
        let is_early = match write.what {
            What::Status(want) => !self.schedule.statuses.is_due(write.reference, want),
            What::Object(_) | What::Key(_) | What::Deletion => false,
        };
        !is_early && !self.outcome.unreachable
    }

    fn take(&mut self, write: &Write<'_>, written: Written) {
        let object = write.reference;
        match written {
            Written::Object(stored) => {
                let generation = stored.generation();
                if is_version(&stored) {
                    self.schedule.pacing.published();
                }
                if self.apply(stored) {
                    tracing::info!(%object, generation, "published");
                }
            }
            Written::Key(stored, public) => {
                tracing::info!(%object, %public, "made a key pair");
                self.apply(stored);
            }
            Written::Status => {
                tracing::debug!(%object, "status written");
                self.schedule.statuses.written(object);
                if let What::Status(want) = write.what {
                    self.apply(want.clone());
                }
            }
            Written::Deletion => {
                self.schedule.refusals.clear(object);
                tracing::info!(%object, "removed");
                let gone = self.index.apply(Event::Deleted(object.clone()));
                self.outcome.lost.extend(gone.as_ref().and_then(Grant::of));
                self.outcome.changed = true;
            }
        }
    }

    /// Returns true if the index changed. It has not where the store holds something else than was
    /// desired, and will: a label that others have added, a field that its definition of the kind
    /// lacks.
    fn apply(&mut self, object: Object) -> bool {
        self.schedule.refusals.clear(&object.reference());
        let before = self.index.get(&object.reference());
        let news = before != Some(&object);
        let is_alike = before.is_some_and(|before| compiles_alike(before, &object));
        let is_config = is_config(object.kind());
        self.outcome.configured |= news && is_config;
        self.outcome.changed |= !is_alike && !is_config;
        self.index.apply(Event::Applied(object));
        news
    }

    fn fail(&mut self, write: &Write<'_>, error: &StoreError) {
        let cause = std::error::Error::source(error).map(|c| format!(": {c}")).unwrap_or_default();
        let message = format!("{error}{cause}");
        if error.is_unreachable() {
            self.outcome.unreachable = true;
        } else {
            self.schedule.refusals.refused(write.reference, write.want(), &message, WRITE_RETRY);
        }
        self.problem(write.reference, message);
    }

    fn problem(&mut self, reference: &ObjectRef, message: String) {
        let object = Some(reference.clone());
        let problem = Problem { source: String::new(), object, field: None, message };
        self.outcome.problems.push(problem);
    }
}

/// The record of the cluster names all others of its version.
fn is_version(object: &Object) -> bool {
    object.kind() == Kind::FabricRecord && object.name() == FabricRecord::CLUSTER
}

/// True if the store has the object as wanted, whatever its status.
fn is_same(have: &Object, want: &Object) -> bool {
    let (have_meta, want_meta) = (have.metadata(), want.metadata());
    have.label(labels::MANAGED_BY) == Some(labels::WEFT)
        && ours(have_meta.labels.as_ref()).eq(ours(want_meta.labels.as_ref()))
        && ours(have_meta.annotations.as_ref()).eq(ours(want_meta.annotations.as_ref()))
        && is_owned_alike(have, want)
        && is_same_spec(have, want)
}

/// True if the store's has all owners of the one that is wanted. Others may have added some.
fn is_owned_alike(have: &Object, want: &Object) -> bool {
    let have = have.metadata().owner_references.as_deref().unwrap_or_default();
    let want = want.metadata().owner_references.as_deref().unwrap_or_default();
    want.iter().all(|owner| have.contains(owner))
}

/// Labels or annotations, in order, without those that others hang on objects for their own ends, and the one
/// that the store adds.
fn ours(map: Option<&BTreeMap<String, String>>) -> impl Iterator<Item = (&String, &String)> {
    let is_ours = |key: &str| {
        key != labels::MANAGED_BY && ["liqo.io/", "weft.dev/"].iter().any(|end| key.contains(end))
    };
    map.into_iter().flatten().filter(move |(key, _)| is_ours(key))
}

/// Compares the kinds that the controller publishes.
fn is_same_spec(have: &Object, want: &Object) -> bool {
    match (have, want) {
        (Object::Network(have), Object::Network(want)) => have.spec == want.spec,
        (Object::Ip(have), Object::Ip(want)) => have.spec == want.spec,
        (Object::GatewayConfig(have), Object::GatewayConfig(want)) => have.spec == want.spec,
        (Object::NodeConfig(have), Object::NodeConfig(want)) => have.spec == want.spec,
        (Object::FabricRecord(have), Object::FabricRecord(want)) => have.spec == want.spec,
        (Object::GatewayRecord(have), Object::GatewayRecord(want)) => have.spec == want.spec,
        (_, _) => false,
    }
}

/// A manifest of the user, or Liqo, has the name of an object of ours.
fn is_in_the_way(have: &Object, want: &Object) -> bool {
    matches!(have.kind(), Kind::Network | Kind::Ip) && is_own(want) && !is_own(have)
}

/// True for a Network of a peer's prefix as Liqo has made it, which weft uses as it is.
fn serves(have: &Object, want: &Object) -> bool {
    let is_of_peering = owner::of(want).is_some_and(|owner| owner.kind == Kind::Configuration);
    is_of_peering && is_same_spec(have, want)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fabric_api::fabric::{ClusterRecord, FabricRecordSpec, GatewayConfig};
    use fabric_api::ipam::{IP, IPSpec};
    use fabric_store::StoreArgs;

    use super::*;
    use crate::pacing::BURST;
    use crate::pacing::tests::{index_of_nodes, node_config};

    #[test]
    fn time_of_a_condition_makes_no_other_write() {
        let status = |reason: &str, time: u32| {
            let conditions = json!([{"reason": reason, "lastTransitionTime": time}]);
            timeless(json!({"status": {"conditions": conditions}}))
        };
        assert_eq!(status("a", 1), status("a", 2));
        assert_ne!(status("a", 1), status("b", 1));
    }

    #[tokio::test]
    async fn status_waits_for_round_without_changes() {
        let dir = tempfile::tempdir().unwrap();
        let [run, state] = ["run", "state"].map(|name| dir.path().join(name));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        let (mut index, mut schedule) = (Index::default(), Schedule::default());
        let mut written = async |ips: &[&str], status: Option<Object>| {
            let ips = ips.iter().map(|name| {
                let mut ip = IP::new(name, IPSpec::default());
                ip.metadata.namespace = Some("liqo".to_owned());
                Object::from(ip)
            });
            let statuses = status.into_iter().map(|object| (object.reference(), object)).collect();
            let objects = ips.map(|object| (object.reference(), object)).collect();
            let mut wanted = Published { objects, statuses, ..Published::default() };
            let sink = Sink { store: &store, heartbeat: &Heartbeat::default() };
            publish(sink, &mut index, &mut schedule, &mut wanted).await;
            index.get(&ObjectRef::new(Kind::Ip, "liqo", "a")).cloned().unwrap()
        };
        let before = written(&["a"], None).await;
        let Object::Ip(mut ip) = before.clone() else { panic!("{before:?}") };
        let status = fabric_api::ipam::IPStatus { ip: Some("10.80.0.7".to_owned()), cidr: None };
        std::sync::Arc::make_mut(&mut ip).status = Some(status);
        let want = Object::Ip(ip);
        assert_eq!(written(&["a", "b"], Some(want.clone())).await, before, "b is new");
        assert_eq!(written(&["a", "b"], Some(want.clone())).await, want);
    }

    fn gateway_config(name: &str) -> GatewayConfig {
        let spec = json!({"clusterId": "rome", "peerClusterId": "milan", "role": "Client",
            "gatewayUid": "u", "secretName": "s", "mtu": 1340, "tunnelAddress": "169.254.18.2",
            "peerTunnelAddress": "169.254.18.1", "remaps": [], "podCidrs": [], "externalCidrs": [],
            "overlay": {"address": "10.80.0.7"}, "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5}});
        let mut config = GatewayConfig::new(name, serde_json::from_value(spec).unwrap());
        config.metadata.namespace = Some("liqo-tenant-milan".to_owned());
        config
    }

    /// A version of the records, a NodeConfig that relies on it, and what does not: an IP, and the config of
    /// a new gateway.
    fn version(number: u32) -> Published {
        let peering =
            json!({"peerClusterId": "milan", "prefixes": [], "connected": true, "mtu": number});
        let peering = serde_json::from_value(peering).unwrap();
        let of_peering = FabricRecordSpec { cluster: None, peering: Some(peering) };
        let cluster = Some(ClusterRecord::default());
        let of_cluster = FabricRecordSpec { cluster, peering: None };
        let mut ip = IP::new(&format!("ip-{number}"), IPSpec::default());
        ip.metadata.namespace = Some("liqo".to_owned());
        let objects: [Object; 5] = [
            FabricRecord::new(&FabricRecord::name_of("milan"), of_peering).into(),
            FabricRecord::new(FabricRecord::CLUSTER, of_cluster).into(),
            node_config(&format!("of-{number}"), false).into(),
            ip.into(),
            gateway_config(&format!("of-{number}")).into(),
        ];
        let objects = objects.map(|object| (object.reference(), object)).into();
        Published { objects, ..Published::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn configs_wait_with_the_version_they_rely_on() {
        let dir = tempfile::tempdir().unwrap();
        let [run, state] = ["run", "state"].map(|name| dir.path().join(name));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        let (mut index, mut schedule) = (index_of_nodes(200, 199), Schedule::default());
        let heartbeat = Heartbeat::default();
        let mut written = async |mut wanted: Published| {
            for _ in 0..3 {
                let sink = Sink { store: &store, heartbeat: &heartbeat };
                publish(sink, &mut index, &mut schedule, &mut wanted).await;
            }
            let have = |(of, want): (&ObjectRef, &Object)| {
                index.get(of).is_some_and(|have| is_same(have, want)).then_some(of.kind)
            };
            // The cluster's record is always sealed as the others are stored.
            let others = wanted.objects.iter().filter(|(of, _)| of.name != FabricRecord::CLUSTER);
            let kinds: Vec<Kind> = others.filter_map(have).collect();
            (kinds, schedule.pacing.due().map(|due| due - tokio::time::Instant::now()))
        };
        let all = [Kind::Ip, Kind::GatewayConfig, Kind::NodeConfig, Kind::FabricRecord];
        let all = (all.to_vec(), None);
        for number in 0..BURST {
            tokio::time::advance(Duration::from_secs(1)).await;
            assert_eq!(written(version(number)).await, all);
        }
        let longest = Duration::from_secs(5);
        assert_eq!(
            written(version(BURST)).await,
            (vec![Kind::Ip, Kind::GatewayConfig], Some(longest))
        );
        tokio::time::advance(longest).await;
        assert_eq!(written(version(BURST)).await, all);
    }
}
