//! Input of the gateway: its GatewayConfig, the GatewayRecords that this follows from, and its private
//! key, watched in the store.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fabric_api::PrivateKey;
use fabric_api::fabric::{ActiveReplica, GatewayConfig, GatewayConfigStatus, RecordVersion};
use fabric_store::{Event, Kind, Note, Object, ObjectRef, Problem, Store, Watch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel::Tai64n;

use crate::desired::{Desired, Endpoint};
use crate::published::Published;
use crate::restart_cache::RestartCache;
use crate::secret::private_key;

/// Time until a key is read again that could not be read.
const KEY_RETRY: Duration = Duration::from_secs(5);
/// Clocks of nodes may differ by so much, in seconds.
const EPOCH_SLACK: u64 = 3600;

/// The latest of everything.
#[derive(Clone, Debug, Default)]
pub struct Input {
    /// All that was there at the start has been read.
    pub synced: bool,
    /// The newest config in whole, good or bad; absent before the first and after its deletion.
    pub config: Option<Arc<GatewayConfig>>,
    /// Version of the GatewayRecords that was read last, and if the config follows from them, that it
    /// is of.
    pub records: Option<RecordVersion>,
    /// True if the config follows from records: the controller knows that this gateway reads them.
    pub is_from_records: bool,
    /// The last good one, which stays when a bad one follows, or its file is gone.
    pub desired: Option<Arc<Desired>>,
    pub key: Option<PrivateKey>,
    pub remembered: Remembered,
    /// Published `status.active`.
    pub named: Option<ActiveReplica>,
    /// Problems of the newest config, its file, or the key.
    pub config_problems: Vec<String>,
    pub unreadable: Option<String>,
    pub key_problem: Option<String>,
}

/// Sources that the input is read from.
pub struct Sources {
    pub store: Store,
    /// In a pod: what the container that ran before has left.
    pub keep: Option<RestartCache>,
}

/// State that an earlier gateway reported last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// The peer's last endpoint.
    pub peer: Option<SocketAddr>,
    /// The configured endpoint by which that was found.
    pub configured: Option<Endpoint>,
    /// Its own UDP port, to which the peer may be sending.
    pub port: Option<u16>,
    /// Timestamp of the last initiation.
    pub stamp: Tai64n,
}

/// Follows the store until `stop`, or until an API server reports that the config is gone: then the
/// program ends, and its kernel state is removed.
pub async fn run(
    sources: Sources,
    name: ObjectRef,
    inputs: watch::Sender<Input>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let Sources { store, keep } = sources;
    let watch = store.follow(&name, &[]).context("cannot watch the store")?;
    // One of its own: a gateway that may not read them gets a whole config.
    let record_watch = store.watch(&[Kind::GatewayRecord]).context("cannot watch the store")?;
    let follower = Follower {
        store,
        keep,
        name,
        watch,
        record_watch,
        published: Published::default(),
        followed: None,
        is_from_cache: false,
        is_listed: false,
        is_over: false,
        key_due: None,
        input: Input::default(),
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => Ok(()),
        () = follower.run(inputs, &stop) => Ok(()),
    }
}

struct Follower {
    store: Store,
    keep: Option<RestartCache>,
    name: ObjectRef,
    watch: Watch,
    record_watch: Watch,
    published: Published,
    /// The Secret that is followed, too.
    followed: Option<ObjectRef>,
    /// The config is a cached one, and the store has not reported any.
    is_from_cache: bool,
    /// The store has reported the config, if there is one.
    is_listed: bool,
    /// An API server reports that the config is gone. A directory may lose a file by mistake.
    is_over: bool,
    /// Time of the next request for a key that could not be read.
    key_due: Option<Instant>,
    input: Input,
}

impl Follower {
    async fn run(mut self, inputs: watch::Sender<Input>, stop: &CancellationToken) {
        if self.take_kept() {
            self.follow_secret();
            inputs.send_replace(self.input.clone());
        }
        loop {
            let news = tokio::select! {
                event = self.watch.next() => self.take(event).await,
                event = self.record_watch.next() => {
                    self.published.take_record(event) && self.join().await
                }
                // No event comes of a right that is back.
                () = sleep_until(self.key_due.unwrap_or_else(Instant::now)), if self.key_due.is_some() => {
                    self.read_key().await
                }
            };
            self.follow_secret();
            if news {
                inputs.send_replace(self.input.clone());
            }
            if self.is_over {
                self.keep.iter().for_each(RestartCache::forget);
                tracing::info!("the peering is gone, and so is its tunnel");
                return stop.cancel();
            }
        }
    }

    /// Begins with what was kept: the store may be long in coming.
    fn take_kept(&mut self) -> bool {
        let kept = self.keep.as_ref().and_then(|keep| keep.read(&self.name));
        let Some((config, key)) = kept.filter(|(config, _)| Desired::parse(config).is_ok()) else {
            return false;
        };
        tracing::info!(generation = config.metadata.generation, "beginning with the config kept");
        (self.is_from_cache, self.input.synced, self.input.key) = (true, true, Some(key));
        self.input.named = named(&config);
        self.input.take_config(config)
    }

    /// True if there is something new.
    async fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Applied(object) => self.take_object(object).await,
            Event::Deleted(object) if object == self.name => {
                forget(&self.store, &self.name).await;
                self.is_over = self.store.api_server().is_some();
                self.published.config = None;
                self.input.lose_config()
            }
            Event::Deleted(object) => self.input.lose_secret(&self.name, &object),
            Event::Problems(problems) => self.input.take_problems(&self.name, &problems),
            Event::Synced if self.is_from_cache && self.input.unreadable.is_none() => {
                self.is_over = true;
                self.input.lose_config()
            }
            Event::Synced => {
                self.is_listed = true;
                self.join().await
            }
        }
    }

    /// Joins config and records as they are published. While records are missing, the gateway stays as it
    /// is. True if there is something new.
    async fn join(&mut self) -> bool {
        let mut is_changed = false;
        if let Some(config) = self.published.joined() {
            self.input.is_from_records = !self.published.is_whole();
            let read = self.published.version().or_else(|| self.input.records.clone());
            is_changed = std::mem::replace(&mut self.input.records, read.clone()) != read;
            if self.input.take_config(config) {
                is_changed = true;
                self.input.remember(&self.store, &self.name).await;
                self.read_key().await;
            }
        }
        is_changed | self.finish_listing().await
    }

    /// True once all that was there at the start is read. If the config is bad, or records are missing,
    /// it begins with the last good one.
    async fn finish_listing(&mut self) -> bool {
        let lacks_config = self.published.config.is_some() && self.input.config.is_none();
        let is_waiting = lacks_config && !self.published.lacks_records();
        if self.input.synced || !self.is_listed || is_waiting {
            return false;
        }
        if self.input.recall(&self.store, &self.name, lacks_config).await {
            self.read_key().await;
        }
        self.input.synced = !lacks_config || self.input.config.is_some();
        self.input.synced
    }

    async fn take_object(&mut self, object: Object) -> bool {
        match object {
            Object::GatewayConfig(config) if is(&self.name, &config.metadata) => {
                self.is_from_cache = false;
                let named = named(&config);
                let is_other = std::mem::replace(&mut self.input.named, named) != named;
                self.published.config = Some(Arc::unwrap_or_clone(config));
                self.join().await | is_other
            }
            Object::Secret(secret) => self.input.take_secret(&self.name, &secret),
            // Not asked for.
            Object::Namespace(_)
            | Object::ConfigMap(_)
            | Object::Node(_)
            | Object::Network(_)
            | Object::Ip(_)
            | Object::Configuration(_)
            | Object::Connection(_)
            | Object::GatewayServer(_)
            | Object::GatewayClient(_)
            | Object::PublicKey(_)
            | Object::GatewayConfig(_)
            | Object::NodeConfig(_)
            | Object::FabricRecord(_)
            | Object::GatewayRecord(_) => false,
        }
    }

    /// True if there is something new.
    async fn read_key(&mut self) -> bool {
        let before = (self.input.key.clone(), self.input.key_problem.clone());
        let is_read = self.input.read_key(&self.store, &self.name).await;
        self.key_due = (!is_read).then(|| Instant::now() + KEY_RETRY);
        before != (self.input.key.clone(), self.input.key_problem.clone())
    }

    /// Watches the config's Secret: RBAC permits that one, and no other.
    fn follow_secret(&mut self) {
        let Some(secret) = self.input.secret_name() else { return };
        let namespace = self.name.namespace.as_deref().unwrap_or_default();
        let secret = ObjectRef::new(Kind::Secret, namespace, &secret);
        if self.followed.as_ref() != Some(&secret) {
            self.watch.also(&secret);
            self.followed = Some(secret);
        }
    }
}

/// Under which the last good config is kept, for a gateway that starts while the newest is bad.
fn note_name(name: &ObjectRef) -> String {
    format!("gateway.{}.{}", name.namespace.as_deref().unwrap_or_default(), name.name)
}

async fn forget(store: &Store, name: &ObjectRef) {
    if let Err(error) = store.delete_note(Note::Copy(&note_name(name))).await {
        tracing::warn!(%error, "cannot forget the last good config");
    }
}

fn is(
    name: &ObjectRef,
    metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
) -> bool {
    metadata.name.as_deref() == Some(&name.name) && metadata.namespace == name.namespace
}

impl Remembered {
    fn of(status: &GatewayConfigStatus) -> Self {
        let peer = status.peer_endpoint.as_ref().and_then(|peer| peer.parse().ok());
        let configured = status.configured_endpoint.as_ref();
        let stamp = status.last_initiation.as_ref().and_then(|at| at.parse::<Timestamp>().ok());
        let unix = stamp.and_then(|at| at.as_duration().try_into().ok());
        Self {
            peer,
            configured: configured.map(Endpoint::from),
            port: status.listen_port,
            stamp: unix.map(Tai64n::from_unix).unwrap_or_default(),
        }
    }

    /// Returns where a client found its server last, if it was by this endpoint.
    pub fn followed(&self, endpoint: &Endpoint) -> Option<SocketAddr> {
        self.peer.filter(|_| self.configured.as_ref() == Some(endpoint))
    }

    /// Returns whether a client found its server last by another endpoint than this.
    pub fn is_edited(&self, endpoint: &Endpoint) -> bool {
        self.peer.is_some() && self.configured.as_ref() != Some(endpoint)
    }
}

impl Input {
    /// Returns whether the newest config is the one in force.
    pub fn is_good(&self) -> bool {
        self.desired.is_some() && self.config_problems.is_empty() && self.unreadable.is_none()
    }

    /// True if the config is known to be gone.
    pub fn is_removed(&self) -> bool {
        self.synced && self.config.is_none()
    }

    /// Problems to show in the status.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        let key = self.key_problem.iter().map(|problem| match &self.key {
            Some(_) => format!("{problem}; running on the key it had, which a restart would lose"),
            None => format!("{problem}; expected the private key, without which nothing runs"),
        });
        self.config_problems.iter().cloned().chain(self.unreadable.clone()).chain(key)
    }

    /// True if there is something new: a status of our own making is not, and for one uid a lower
    /// generation than before is old news that arrives late.
    fn take_config(&mut self, config: GatewayConfig) -> bool {
        let version = |c: &GatewayConfig| (c.metadata.uid.clone(), c.metadata.generation);
        if let Some(known) = &self.config {
            let ((uid, generation), (known_uid, known_generation)) =
                (version(&config), version(known));
            if uid == known_uid && generation < known_generation {
                tracing::debug!(?generation, ?known_generation, "an old config, ignored");
                return false;
            }
            if uid == known_uid && generation == known_generation && config.spec == known.spec {
                return false;
            }
        } else if self.remembered == Remembered::default() {
            self.remembered = config.status.as_ref().map(Remembered::of).unwrap_or_default();
        }
        match Desired::parse(&config) {
            Ok(desired) => {
                self.desired = Some(Arc::new(desired));
                self.config_problems.clear();
            }
            Err(error) => {
                tracing::warn!(%error, "bad config, staying on the last good one");
                self.config_problems = error.lines();
            }
        }
        self.config = Some(Arc::new(config));
        true
    }

    /// Keeps a good config. There is no key material in it.
    async fn remember(&self, store: &Store, name: &ObjectRef) {
        let good = self.config.as_ref().filter(|_| self.config_problems.is_empty());
        let Some(good) = good else { return };
        let note = GatewayConfig { status: None, ..GatewayConfig::clone(good) };
        if let Err(error) = store.put_note(Note::Copy(&note_name(name)), &note).await {
            tracing::warn!(%error, "cannot keep the last good config");
        }
    }

    /// At the start, if the config is there and bad, or cannot be joined: the last good one. True if
    /// there is one.
    async fn recall(&mut self, store: &Store, name: &ObjectRef, lacks_records: bool) -> bool {
        let bad = lacks_records || self.config.is_some() || self.unreadable.is_some();
        if self.desired.is_some() || !bad {
            return false;
        }
        let name = note_name(name);
        let Ok(Some(good)) = store.note::<GatewayConfig>(Note::Copy(&name)).await else {
            return false;
        };
        let Ok(desired) = Desired::parse(&good) else { return false };
        tracing::warn!(generation = desired.generation, "running on the last good config");
        self.desired = Some(Arc::new(desired));
        self.config.get_or_insert_with(|| Arc::new(good));
        true
    }

    /// Takes the problem reported for the config's file. Returns whether it changed.
    fn take_problems(&mut self, name: &ObjectRef, problems: &[Problem]) -> bool {
        let of_config = problems.iter().find(|problem| problem.object.as_ref() == Some(name));
        let texts = of_config.map(|problem| Problem { object: None, ..problem.clone() });
        let now = texts.map(|problem| format!("{problem}; the last good one stands"));
        let before = std::mem::replace(&mut self.unreadable, now);
        before != self.unreadable
    }

    /// False if that failed.
    async fn read_key(&mut self, store: &Store, name: &ObjectRef) -> bool {
        let Some(desired) = &self.desired else { return true };
        let secret_name = desired.secret_name.clone();
        let namespace = name.namespace.as_deref().unwrap_or_default();
        match store.get(&ObjectRef::new(Kind::Secret, namespace, &secret_name)).await {
            Ok(object) => {
                let secret = object.and_then(|object| Secret::try_from(object).ok());
                self.set_key(&secret_name, secret.as_ref());
                true
            }
            Err(error) => {
                let error = anyhow::Error::new(error);
                self.key_problem = Some(format!("cannot read Secret {secret_name}: {error:#}"));
                false
            }
        }
    }

    fn take_secret(&mut self, name: &ObjectRef, secret: &Secret) -> bool {
        let Some(wanted) = self.secret_name() else { return false };
        let meta = &secret.metadata;
        if meta.name.as_deref() != Some(&wanted) || meta.namespace != name.namespace {
            return false;
        }
        self.set_key(&wanted, Some(secret))
    }

    fn lose_secret(&mut self, name: &ObjectRef, lost: &ObjectRef) -> bool {
        let Some(wanted) = self.secret_name() else { return false };
        let ours = lost.kind == Kind::Secret && lost.name == wanted;
        ours && lost.namespace == name.namespace && self.set_key(&wanted, None)
    }

    /// The last good key stays, like the last good config.
    fn set_key(&mut self, name: &str, secret: Option<&Secret>) -> bool {
        let before = (self.key.clone(), self.key_problem.clone());
        match private_key(name, secret) {
            Ok(key) => {
                self.key = Some(key);
                self.key_problem = None;
            }
            Err(error) => self.key_problem = Some(error.to_string()),
        }
        before != (self.key.clone(), self.key_problem.clone())
    }

    fn lose_config(&mut self) -> bool {
        tracing::info!("the config is gone");
        self.config.take().is_some()
    }

    fn secret_name(&self) -> Option<String> {
        self.desired.as_ref().map(|desired| desired.secret_name.clone())
    }
}

/// The published `status.active`, unless its epoch is none: a gateway's token may write any, and replicas go on from
/// the greatest. No gateway has been taken over more often than once a second since 1970.
fn named(config: &GatewayConfig) -> Option<ActiveReplica> {
    let active = config.status.as_ref()?.active?;
    let limit = Timestamp::now().as_second().unsigned_abs() + EPOCH_SLACK;
    if active.epoch > limit {
        tracing::warn!(
            epoch = active.epoch,
            "status.active.epoch of the GatewayConfig: expected at most {limit}; ignored, as no \
             gateway writes that"
        );
        return None;
    }
    Some(active)
}

#[cfg(test)]
mod tests;
