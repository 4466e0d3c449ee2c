//! Rebuilds the ledger from the store at start and compares the two every so often.

use std::time::{Duration, Instant};

use fabric_store::{Snapshot, Store};
use ipam_proto::ipam_server::IpamServer;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::claims::{Claims, Fault, KINDS};
use crate::ledger::Ledger;
use crate::pools::Pools;
use crate::service::{Service, Shared};

/// The health service's name for "no two resources hold the same".
const CONSISTENT: &str = "IPAM/consistent";
/// How soon to try again if the store could not be read.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps the ledger in step with the store.
pub(crate) struct Keeper {
    pub(crate) store: Store,
    pub(crate) shared: Shared,
    pub(crate) health: HealthReporter,
    /// Zero: only at start.
    pub(crate) interval: Duration,
    pub(crate) grace: Duration,
    /// What was wrong with the store when it was last looked at.
    pub(crate) known: Vec<String>,
}

impl Keeper {
    /// Runs until told to stop. `pools` are still empty.
    pub(crate) async fn run(mut self, pools: Pools, mut stop: watch::Receiver<bool>) {
        self.health.set_not_serving::<IpamServer<Service>>().await;
        self.health.set_service_status("", ServingStatus::NotServing).await;
        let mut fresh = Some(Ledger::new(pools, self.grace));
        loop {
            let wait = match self.read().await {
                Some(snapshot) => {
                    self.reconcile(&snapshot, &mut fresh).await;
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

    async fn read(&mut self) -> Option<Snapshot> {
        let store = self.store.clone();
        let outcome = tokio::task::spawn_blocking(move || store.read(&KINDS)).await;
        match outcome {
            Ok(Ok(snapshot)) => Some(snapshot),
            Ok(Err(error)) => {
                let error = anyhow::Error::from(error);
                self.say(vec![format!("cannot read the store: {error:#}")]);
                None
            }
            Err(error) => {
                self.say(vec![format!("reading the store failed: {error}")]);
                None
            }
        }
    }

    /// The first time, the ledger becomes the shared one when it has been rebuilt.
    async fn reconcile(&mut self, snapshot: &Snapshot, fresh: &mut Option<Ledger>) {
        let claims = Claims::of(snapshot);
        let now = Instant::now();
        let is_start = fresh.is_some();
        let faults = self.shared.with(|shared| {
            *shared = shared.take().or_else(|| fresh.take());
            let Some(ledger) = shared else { return Vec::new() };
            let faults = ledger.reconcile(&claims, now);
            if is_start {
                ledger.reopen(&self.shared.noted(), now);
            } else if let Err(error) = self.shared.note(ledger) {
                tracing::warn!(%error, "open grants cannot be noted");
            }
            faults
        });
        let unread = snapshot.problems.first().map(|problem| {
            format!("nothing is freed while manifests cannot be read, such as: {problem}")
        });
        self.say(unread.into_iter().chain(faults.iter().map(Fault::to_string)).collect());

        let consistent = !faults.iter().any(Fault::is_conflict);
        self.health.set_service_status(CONSISTENT, serving(consistent)).await;
        if is_start {
            let (prefixes, addresses) = (claims.prefixes.len(), claims.addresses.len());
            tracing::info!(prefixes, addresses, "what is taken has been read from the store");
            self.health.set_serving::<IpamServer<Service>>().await;
            self.health.set_service_status("", ServingStatus::Serving).await;
        }
    }

    /// Logs what is newly wrong and what no longer is.
    fn say(&mut self, faults: Vec<String>) {
        for fault in faults.iter().filter(|fault| !self.known.contains(fault)) {
            tracing::warn!("{fault}");
        }
        for fault in self.known.iter().filter(|fault| !faults.contains(fault)) {
            tracing::info!("no longer: {fault}");
        }
        self.known = faults;
    }
}

fn serving(is: bool) -> ServingStatus {
    if is { ServingStatus::Serving } else { ServingStatus::NotServing }
}
