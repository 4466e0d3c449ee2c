//! Writes the status whenever the store takes it; the kernel's tables do not wait for that.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fabric_api::fabric::{MovedAddress, NodeConfig};
use fabric_runtime::chain;
use fabric_store::Store;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::config_source;

/// After it could not be written.
const RETRY: Duration = Duration::from_secs(2);

/// Writes the latest reported status, until it is dropped.
pub(crate) struct Reporter {
    latest: watch::Sender<Option<NodeConfig>>,
    has_written: Arc<AtomicBool>,
}

impl Reporter {
    pub(crate) fn start(store: &Store) -> anyhow::Result<Self> {
        let (latest, news) = watch::channel(None);
        let has_written = Arc::default();
        config_source::spawn(
            store,
            "report",
            write(store.clone(), news, Arc::clone(&has_written)),
        )?;
        Ok(Self { latest, has_written })
    }

    /// True once the store has a status of this agent.
    pub(crate) fn has_written(&self) -> bool {
        self.has_written.load(Ordering::Relaxed)
    }

    pub(crate) fn report(&self, config: NodeConfig) {
        self.latest.send_replace(Some(config));
    }
}

async fn write(
    store: Store,
    mut news: watch::Receiver<Option<NodeConfig>>,
    has_written: Arc<AtomicBool>,
) {
    let mut failed = false;
    loop {
        tokio::select! {
            changed = news.changed() => if changed.is_err() { return },
            () = retry(failed) => {}
        }
        let Some(config) = news.borrow_and_update().clone() else { continue };
        let moved = config.status.as_ref().map(|status| status.moved.clone()).unwrap_or_default();
        let written = store.put_status(&config.into()).await;
        if let (false, Err(error)) = (failed, &written) {
            tracing::warn!("cannot write the status: {}", chain(error));
            for MovedAddress { declared, found } in &moved {
                tracing::warn!(%declared, %found, "the node's address has changed: edit its Node manifest");
            }
        }
        has_written.fetch_or(written.is_ok(), Ordering::Relaxed);
        // A config that takes the place of one that is gone is news.
        failed = written.is_err_and(|error| !error.is_gone());
    }
}

async fn retry(failed: bool) {
    if !failed {
        pending::<()>().await;
    }
    sleep(RETRY).await;
}
