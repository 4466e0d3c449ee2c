//! Of several controllers one works, the others wait: a Lease says which. No clock but the own one
//! counts, and every write names the version that it takes the place of, so there are never two.
//!
//! Who takes weft away cannot wait for a controller to end: it asks for the Lease, and whoever holds
//! it lets go.

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

/// As Liqo has them: who is not heard of for so long has lost it, whoever cannot renew it for so
/// long gives up, and so often it is tried.
const DURATION: Duration = Duration::from_secs(15);
const DEADLINE: Duration = Duration::from_secs(10);
const PERIOD: Duration = Duration::from_secs(2);

pub const NAME: &str = "weft-fabric-controller";
/// Annotation: why the holder cannot read all that it needs.
const OBSTACLES: &str = "fabric.weft.dev/obstacles";
/// Annotation: who asks for the Lease. All others keep out, as long as it is heard of.
const WANTED_BY: &str = "fabric.weft.dev/wanted-by";

/// A candidate, and when it has been elected, the holder.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    /// Asks for it instead of waiting until it is let go.
    insists: bool,
    /// The version that was seen last, and when it was seen first.
    seen: Option<(String, Instant)>,
    /// Who was told of as the holder.
    told: Option<String>,
    /// As it was written last, by this one.
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

    /// Renews what was won, and returns when it is lost, or another asks for it. Cancel safe.
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

    /// Lets nobody in for so long, but one of the same name: whoever waits is to be gone by then.
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
        // Whether anybody else has written since, the write itself tells.
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

/// Why the holder cannot read all that it needs, as it last wrote that.
pub fn obstacles(lease: &Lease) -> Option<&str> {
    let annotations = lease.metadata.annotations.as_ref()?;
    annotations.get(OBSTACLES).map(String::as_str)
}

fn wanted_by(lease: &Lease) -> Option<&String> {
    lease.metadata.annotations.as_ref()?.get(WANTED_BY)
}

/// How long it must have been left alone before another may take it.
fn patience(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
    let said = seconds.and_then(|seconds| seconds.try_into().ok()).map(Duration::from_secs);
    said.unwrap_or_default().max(DURATION)
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}

/// Somebody else may have come first, or removed it.
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
