//! The ledger, and the note of what it granted a moment ago.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fabric_store::{Note, Store, StoreError};
use tonic::Status;

use crate::ledger::{Ledger, OpenGrant};
use crate::metrics::Metrics;

/// Name of the note of what was granted a moment ago.
const OPEN_GRANTS: Note<'static> = Note::Only("ipam-open-grants");

/// The ledger, shared by the calls and the reconciler.
#[derive(Clone)]
pub(crate) struct Shared {
    state: Arc<Mutex<State>>,
    /// Number of the newest grant in the note. Locked while that is written: grants that come meanwhile
    /// share the next write.
    noted: Arc<tokio::sync::Mutex<u64>>,
    store: Store,
    pub(crate) metrics: Metrics,
}

#[derive(Default)]
pub(crate) struct State {
    /// Absent until it has been rebuilt.
    pub(crate) ledger: Option<Ledger>,
    /// Fault that keeps it from that.
    pub(crate) unread: Option<String>,
    /// Number of grants so far.
    grants: u64,
}

impl Shared {
    pub(crate) fn new(store: Store) -> Self {
        let (state, noted) = (Arc::default(), Arc::default());
        Self { state, noted, store, metrics: Metrics::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once the next grant could be answered.
    pub(crate) async fn wait_until_free(&self) {
        drop(self.noted.lock().await);
        drop(self.lock());
    }

    /// Notes what was granted a moment ago: an ipam that ends now must not grant it again.
    pub(crate) async fn note(&self) -> Result<(), StoreError> {
        let mut noted = self.noted.lock().await;
        self.write_note(&mut noted).await
    }

    pub(crate) async fn noted(&self) -> Result<Vec<OpenGrant>, StoreError> {
        Ok(self.store.note(OPEN_GRANTS).await?.unwrap_or_default())
    }

    /// Writes the note that has all grants so far, and their number into `noted`.
    async fn write_note(&self, noted: &mut u64) -> Result<(), StoreError> {
        let (open, newest) = {
            let state = self.lock();
            (state.ledger.as_ref().map(Ledger::open), state.grants)
        };
        if let Some(open) = open {
            self.store.put_note(OPEN_GRANTS, &open).await?;
            *noted = newest;
        }
        Ok(())
    }

    /// Grants, and notes the grant before it is returned. A grant that cannot be noted, or for
    /// which the caller does not wait, is undone.
    pub(crate) async fn grant<T: Copy>(
        &self,
        act: impl FnOnce(&mut Ledger, Instant) -> Result<T, Status>,
        undo: fn(&mut Ledger, T, Instant) -> bool,
    ) -> Result<T, Status> {
        let (granted, number) = {
            let mut state = self.lock();
            let ledger = state.ledger()?;
            let granted = act(ledger, Instant::now())?;
            state.grants += 1;
            (granted, state.grants)
        };
        let mut open = Open { shared: self, granted, undo: Some(undo) };
        let mut noted = self.noted.lock().await;
        if *noted < number {
            self.write_note(&mut noted).await.map_err(|error| {
                let error = anyhow::Error::from(error);
                Status::unavailable(format!("the grant cannot be noted, try again: {error:#}"))
            })?;
        }
        open.undo = None;
        Ok(granted)
    }

    pub(crate) fn ledger<T>(
        &self,
        act: impl FnOnce(&mut Ledger, Instant) -> T,
    ) -> Result<T, Status> {
        Ok(act(self.lock().ledger()?, Instant::now()))
    }
}

/// A grant that is taken back when it is dropped, unless there is nothing to undo any more.
struct Open<'a, T: Copy> {
    shared: &'a Shared,
    granted: T,
    undo: Option<fn(&mut Ledger, T, Instant) -> bool>,
}

impl<T: Copy> Drop for Open<'_, T> {
    fn drop(&mut self) {
        if let (Some(undo), Some(ledger)) = (self.undo, self.shared.lock().ledger.as_mut()) {
            undo(ledger, self.granted, Instant::now());
        }
    }
}

impl State {
    fn ledger(&mut self) -> Result<&mut Ledger, Status> {
        let unread = self.unread.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        self.ledger.as_mut().ok_or_else(|| {
            Status::unavailable(format!("ipam has not read yet what is taken; try again{unread}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fabric_api::Cidr;
    use fabric_store::StoreArgs;
    use futures::future::join_all;

    use super::*;
    use crate::pools::{Pools, Request, RequestMode};

    fn shared(dir: &std::path::Path) -> Shared {
        let [run, state] = ["run", "state"].map(|name| dir.join(name));
        let shared =
            Shared::new(Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap());
        let pools = Pools::new(vec!["10.0.0.0/8".parse().unwrap()]).unwrap();
        shared.lock().ledger = Some(Ledger::new(pools, Duration::from_secs(60)));
        shared
    }

    async fn grant(shared: &Shared, n: u8) -> Result<Cidr, Status> {
        let cidr: Cidr = format!("10.{n}.0.0/16").parse().unwrap();
        let request = Request { cidr, mode: RequestMode::Mutable, pre_allocated: 0 };
        let act = |ledger: &mut Ledger, now| Ok(ledger.acquire(request, now).unwrap());
        shared.grant(act, Ledger::release).await
    }

    #[tokio::test]
    async fn grants_during_a_write_share_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path());
        let writing = shared.noted.lock().await;
        let mut first = Box::pin(grant(&shared, 0));
        let mut others = Box::pin(join_all((1..20).map(|n| grant(&shared, n))));
        assert!(futures::poll!(&mut first).is_pending());
        assert!(futures::poll!(&mut others).is_pending(), "none is answered before it is noted");
        drop(writing);
        first.await.unwrap();
        assert_eq!(shared.noted().await.unwrap().len(), 20);
        let state = dir.path().join("state");
        std::fs::remove_dir_all(&state).unwrap();
        std::fs::write(&state, "").unwrap();
        assert!(others.await.iter().all(Result::is_ok), "they need no other write");
        assert!(grant(&shared, 20).await.is_err(), "it cannot be noted");
    }

    #[tokio::test]
    async fn abandoned_grant_is_undone() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path());
        let writing = shared.noted.lock().await;
        let mut abandoned = Box::pin(grant(&shared, 1));
        assert!(futures::poll!(&mut abandoned).is_pending());
        drop(abandoned);
        drop(writing);
        let again = grant(&shared, 1).await.unwrap();
        assert_eq!(again.to_string(), "10.1.0.0/16");
    }
}
