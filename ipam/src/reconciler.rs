//! Rebuilds the ledger from the store at start and compares the two every so often.

use std::time::{Duration, Instant};

use anyhow::bail;
use fabric_runtime::Readiness;
use fabric_store::{Store, StoreError};
use ipam_proto::ipam_server::IpamServer;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::claims::{Claims, Fault, KINDS};
use crate::service::Service;
use crate::shared::{Rebuilt, Shared};

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
    /// Faults of the store when it was last looked at.
    pub(crate) known: Vec<String>,
}

impl Reconciler {
    /// Runs until `stop` is set.
    pub(crate) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        self.health.set_not_serving::<IpamServer<Service>>().await;
        let mut is_start = true;
        loop {
            let wait = match self.reconcile(is_start).await {
                Ok(()) => {
                    is_start = false;
                    if self.interval.is_zero() { Duration::MAX } else { self.interval }
                }
                Err(error) => {
                    self.report(&error, is_start);
                    RETRY
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    fn report(&mut self, error: &anyhow::Error, is_start: bool) {
        let refusal = error.downcast_ref().and_then(StoreError::refusal);
        let why = refusal.unwrap_or_else(|| format!("{error:#}"));
        if is_start {
            self.readiness.missing(STORE, why.as_str());
            self.shared.lock().unread = Some(why.clone());
        }
        self.say(vec![format!("cannot read the store: {why}")]);
    }

    async fn reconcile(&mut self, is_start: bool) -> anyhow::Result<()> {
        let rebuilt = match is_start {
            true => {
                self.restore()?;
                Some(self.shared.rebuild().await?)
            }
            false => self.shared.refresh().await?,
        };
        let rebuilt = match rebuilt {
            Some(rebuilt) => rebuilt,
            None => self.compare().await?,
        };
        let Rebuilt { snapshot, claims, faults } = rebuilt;
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
        Ok(())
    }

    /// Restores files that were damaged. Grants of a lost one would be made again.
    fn restore(&self) -> anyhow::Result<()> {
        for file in self.store.restore_grants()? {
            tracing::warn!(file = %file.display(), "was damaged or gone: restored from its copy");
        }
        if let Some(file) = self.store.lost_grants().first() {
            bail!(
                "{} is damaged and has no copy: nothing is granted. Restore it from a backup, or remove \
                 it, whereupon what it grants is granted anew",
                file.display()
            );
        }
        Ok(())
    }

    /// Brings the ledger in step with the store.
    async fn compare(&self) -> anyhow::Result<Rebuilt> {
        let snapshot = self.store.read(&KINDS).await?;
        let claims = Claims::of(&snapshot);
        let faults = {
            let mut state = self.shared.lock();
            let ledger = state.ledger.as_mut();
            ledger.map(|ledger| ledger.reconcile(&claims, Instant::now())).unwrap_or_default()
        };
        if let Err(error) = self.shared.note().await {
            tracing::warn!(%error, "open grants cannot be noted");
        }
        Ok(Rebuilt { snapshot, claims, faults })
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
