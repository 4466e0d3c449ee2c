//! Leader election: one of several controllers works, the others wait for its Lease. Only the own
//! clock counts, and every write names the version that it replaces, so there are never two.
//!
//! The withdrawal cannot wait for a controller to end: it requests the Lease, and the holder
//! releases it.

use std::time::Duration;

use fabric_store::ApiServer;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::writer::within;
use fabric_store::obstacles::Obstacles;

/// Lease times, as in Liqo: it is lost after `DURATION` without renewal, its holder gives up after
/// `DEADLINE` of failed renewals, and renews every `PERIOD`.
const DURATION: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_secs(10);
const PERIOD: Duration = Duration::from_secs(2);

pub const NAME: &str = "weft-fabric-controller";
/// Annotation: why the holder cannot read all that it needs.
const OBSTACLES: &str = "fabric.weft.dev/obstacles";
/// Annotation: identity that requests the Lease. All others keep out while it is renewed.
const WANTED_BY: &str = "fabric.weft.dev/wanted-by";

/// A candidate, and when it has been elected, the holder.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    /// Requests it instead of waiting until it is released.
    insists: bool,
    /// The version that was seen last, and when it was seen first.
    seen: Option<(String, Instant)>,
    /// Holder logged last.
    told: Option<String>,
    /// Lease as this one wrote it last.
    held: Option<Lease>,
    /// Written into the Lease, for `weft status`.
    obstacles: Obstacles,
    /// True if another holds it.
    stands_by: watch::Sender<bool>,
}

impl Election {
    /// Programs of one `identity` are one holder: each may go on with what another has won.
    pub fn new(server: &ApiServer, identity: &str) -> Self {
        let api = Api::namespaced(server.client.clone(), &server.namespace);
        let identity = identity.to_owned();
        Self {
            api,
            identity,
            insists: false,
            seen: None,
            told: None,
            held: None,
            obstacles: Obstacles::default(),
            stands_by: watch::Sender::default(),
        }
    }

    /// The holder, if it lives, lets go within a few seconds.
    pub fn insisting(self) -> Self {
        Self { insists: true, ..self }
    }

    /// Writes these into the Lease while it is held.
    pub fn reporting(self, obstacles: Obstacles) -> Self {
        Self { obstacles, ..self }
    }

    /// Returns true if another holds the Lease.
    pub fn stands_by(&self) -> watch::Receiver<bool> {
        self.stands_by.subscribe()
    }

    /// Returns when elected. Cancel safe.
    pub async fn won(&mut self) {
        loop {
            match attempt(self.acquire()).await {
                Ok(true) => return tracing::info!(identity = self.identity, "elected"),
                Ok(false) => _ = self.stands_by.send_replace(true),
                Err(error) => tracing::debug!(%error, "cannot stand for election; tried again"),
            }
            sleep(PERIOD).await;
        }
    }

    /// Renews what was won, and returns when it is lost, or another requests it. Cancel safe.
    pub async fn lost(&mut self) {
        let mut renewed = Instant::now();
        loop {
            sleep(PERIOD).await;
            match attempt(self.acquire()).await {
                Ok(true) => renewed = Instant::now(),
                Ok(false) => return,
                Err(error) => tracing::debug!(%error, "cannot renew the Lease"),
            }
            if renewed.elapsed() > DEADLINE {
                return;
            }
        }
    }

    /// Lets the next one in at once.
    pub async fn release(&self) {
        let released = self.amend(|spec| {
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
        });
        if let Err(error) = released.await {
            tracing::debug!(%error, "the Lease is not released; it runs out");
        }
    }

    /// Locks the Lease for that time against all but one of the same name: others are to be gone by
    /// then.
    pub async fn leave_locked(&self, time: Duration) -> kube::Result<()> {
        let seconds = i32::try_from(time.as_secs()).ok();
        self.amend(|spec| spec.lease_duration_seconds = seconds).await
    }

    /// Changes a Lease that is held.
    async fn amend(&self, change: impl Fn(&mut LeaseSpec)) -> kube::Result<()> {
        attempt(async {
            let Some(mut lease) = self.api.get_opt(NAME).await? else { return Ok(()) };
            if holder(&lease) == Some(&self.identity) {
                change(lease.spec.get_or_insert_default());
                self.api.replace(NAME, &PostParams::default(), &lease).await?;
            }
            Ok(())
        })
        .await
    }

    /// True if it is ours now.
    async fn acquire(&mut self) -> kube::Result<bool> {
        // The write itself fails if anybody else has written since.
        if let Some(lease) = self.held.take()
            && self.take(lease).await?
        {
            return Ok(true);
        }
        let Some(mut lease) = self.api.get_opt(NAME).await? else {
            let lease = self.taken(Lease::default());
            return is_taken(self.api.create(&PostParams::default(), &lease).await);
        };
        if self.may_take(&lease) {
            return self.take(lease).await;
        }
        if self.insists && wanted_by(&lease) != Some(&self.identity) {
            let annotations = lease.metadata.annotations.get_or_insert_default();
            annotations.insert(WANTED_BY.to_owned(), self.identity.clone());
            is_taken(self.api.replace(NAME, &PostParams::default(), &lease).await)?;
        }
        Ok(false)
    }

    async fn take(&mut self, lease: Lease) -> kube::Result<bool> {
        let lease = self.taken(lease);
        let written = self.api.replace(NAME, &PostParams::default(), &lease).await;
        self.held = written.as_ref().ok().cloned();
        is_taken(written)
    }

    fn may_take(&mut self, lease: &Lease) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let first = match self.seen.take() {
            Some((known, first)) if known == version => first,
            Some(_) | None => Instant::now(),
        };
        self.seen = Some((version, first));
        let silent = first.elapsed() >= patience(lease);
        if !self.insists && wanted_by(lease).is_some_and(|by| *by != self.identity) {
            return silent;
        }
        let Some(holder) = holder(lease) else { return true };
        if self.told.as_ref() != Some(holder) && *holder != self.identity {
            tracing::info!(holder, "waiting; it has the Lease");
            self.told = Some(holder.clone());
        }
        *holder == self.identity || silent
    }

    fn taken(&self, mut lease: Lease) -> Lease {
        let now = Some(MicroTime(Timestamp::now()));
        let ours = holder(&lease) == Some(&self.identity);
        let spec = lease.spec.get_or_insert_default();
        if !ours {
            let before = spec.lease_transitions.unwrap_or_default();
            spec.lease_transitions = Some(before + i32::from(spec.acquire_time.is_some()));
            spec.acquire_time.clone_from(&now);
        }
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            renew_time: now,
            ..spec.clone()
        };
        let mut metadata = ObjectMeta { name: Some(NAME.to_owned()), ..lease.metadata };
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.remove(WANTED_BY);
        match self.obstacles.text() {
            Some(text) => _ = annotations.insert(OBSTACLES.to_owned(), text),
            None => _ = annotations.remove(OBSTACLES),
        }
        Lease { metadata, spec: Some(spec) }
    }
}

/// Reason why the holder cannot read all that it needs, as it last wrote it.
pub fn obstacles(lease: &Lease) -> Option<&str> {
    let annotations = lease.metadata.annotations.as_ref()?;
    annotations.get(OBSTACLES).map(String::as_str)
}

fn wanted_by(lease: &Lease) -> Option<&String> {
    lease.metadata.annotations.as_ref()?.get(WANTED_BY)
}

/// Time without a renewal after which another may take it.
fn patience(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    let said = seconds.and_then(|seconds| seconds.try_into().ok()).map(Duration::from_secs);
    said.unwrap_or_default().max(DURATION)
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}

/// False if another was first, or it was removed.
fn is_taken(written: kube::Result<Lease>) -> kube::Result<bool> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(error) => Err(error),
    }
}

/// An answer that is late is none: the Lease may have run out meanwhile.
async fn attempt<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    within(PERIOD, request).await
}
