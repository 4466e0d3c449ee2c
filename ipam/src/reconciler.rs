//! Rebuilds the ledger from the store at start and compares the two every so often.

use std::time::{Duration, Instant};

use anyhow::bail;
use fabric_runtime::Readiness;
use fabric_store::{Snapshot, Store, StoreError};
use ipam_proto::ipam_server::IpamServer;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::claims::{Claims, Fault, KINDS};
use crate::ledger::{Ledger, OpenGrant};
use crate::pools::Pools;
use crate::service::Service;
use crate::shared::Shared;

/// The health service's name for "no two resources hold the same".
const CONSISTENT: &str = "IPAM/consistent";
/// Part of the [`Readiness`] that is there once the store has been read.
pub(crate) const STORE: &str = "store";
/// Time until the next try if the store could not be read.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps the ledger in step with the store.
pub(crate) struct Reconciler {
    pub(crate) store: Store,
    pub(crate) shared: Shared,
    pub(crate) health: HealthReporter,
    pub(crate) readiness: Readiness,
    /// Zero: only at start.
    pub(crate) interval: Duration,
    pub(crate) grace: Duration,
    /// Faults of the store when it was last looked at.
    pub(crate) known: Vec<String>,
}

impl Reconciler {
    /// Runs until `stop` is set. `pools` are still empty.
    pub(crate) async fn run(mut self, pools: Pools, mut stop: watch::Receiver<bool>) {
        self.health.set_not_serving::<IpamServer<Service>>().await;
        let mut fresh = Some(Ledger::new(pools, self.grace));
        loop {
            let wait = match self.read(fresh.is_some()).await {
                Some((snapshot, noted)) => {
                    self.reconcile(&snapshot, &noted, &mut fresh).await;
                    if self.interval.is_zero() { Duration::MAX } else { self.interval }
                }
                None => RETRY,
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Reads the store, and at the start what an earlier ipam noted.
    async fn read(&mut self, is_start: bool) -> Option<(Snapshot, Vec<OpenGrant>)> {
        match self.try_read(is_start).await {
            Ok(read) => Some(read),
            Err(error) => {
                let refusal = error.downcast_ref().and_then(StoreError::refusal);
                let why = refusal.unwrap_or_else(|| format!("{error:#}"));
                if is_start {
                    self.readiness.missing(STORE, why.as_str());
                    self.shared.lock().unread = Some(why.clone());
                }
                self.say(vec![format!("cannot read the store: {why}")]);
                None
            }
        }
    }

    async fn try_read(&self, is_start: bool) -> anyhow::Result<(Snapshot, Vec<OpenGrant>)> {
        if !is_start {
            return Ok((self.store.read(&KINDS).await?, Vec::new()));
        }
        for file in self.store.restore_grants()? {
            tracing::warn!(file = %file.display(), "was damaged or gone: restored from its copy");
        }
        // Grants of a lost file would be made again.
        if let Some(file) = self.store.lost_grants().first() {
            bail!(
                "{} is damaged and has no copy: nothing is granted. Restore it from a backup, or remove \
                 it, whereupon what it grants is granted anew",
                file.display()
            );
        }
        Ok((self.store.read(&KINDS).await?, self.shared.noted().await?))
    }

    /// The first time, the ledger becomes the shared one when it has been rebuilt.
    async fn reconcile(
        &mut self,
        snapshot: &Snapshot,
        noted: &[OpenGrant],
        fresh: &mut Option<Ledger>,
    ) {
        let claims = Claims::of(snapshot);
        let is_start = fresh.is_some();
        let faults = self.compare(&claims, noted, fresh).await;
        let unread = snapshot.problems.first().map(|problem| {
            format!("nothing is freed while manifests cannot be read, such as: {problem}")
        });
        self.say(unread.into_iter().chain(faults.iter().map(Fault::to_string)).collect());

        self.shared.metrics.set_taken(claims.prefixes.len(), claims.addresses.len());
        let consistent = !faults.iter().any(Fault::is_conflict);
        self.health.set_service_status(CONSISTENT, serving(consistent)).await;
        if is_start {
            let (prefixes, addresses) = (claims.prefixes.len(), claims.addresses.len());
            tracing::info!(prefixes, addresses, "what is taken has been read from the store");
            self.health.set_serving::<IpamServer<Service>>().await;
            self.readiness.fulfilled(STORE);
        }
    }

    async fn compare(
        &self,
        claims: &Claims,
        noted: &[OpenGrant],
        fresh: &mut Option<Ledger>,
    ) -> Vec<Fault> {
        let fresh = fresh.take();
        let is_start = fresh.is_some();
        let faults = {
            let mut state = self.shared.lock();
            state.ledger = state.ledger.take().or(fresh);
            let Some(ledger) = state.ledger.as_mut() else { return Vec::new() };
            let now = Instant::now();
            let faults = ledger.reconcile(claims, now);
            if is_start {
                ledger.reopen(noted, now);
            }
            faults
        };
        if !is_start && let Err(error) = self.shared.note().await {
            tracing::warn!(%error, "open grants cannot be noted");
        }
        faults
    }

    /// Logs what is newly wrong and what no longer is.
    fn say(&mut self, faults: Vec<String>) {
        for fault in faults.iter().filter(|fault| !self.known.contains(fault)) {
            tracing::warn!("{fault}");
        }
        for fault in self.known.iter().filter(|fault| !faults.contains(fault)) {
            tracing::info!("no longer: {fault}");
        }
        self.shared.metrics.set_faults(faults.len());
        self.known = faults;
    }
}

fn serving(is: bool) -> ServingStatus {
    if is { ServingStatus::Serving } else { ServingStatus::NotServing }
}
