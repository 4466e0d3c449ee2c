//! The ledger, and the note of what it granted a moment ago.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric_api::Cidr;
use fabric_store::{Note, Snapshot, Store, StoreError};
use serde::{Deserialize, Serialize};
use tonic::Status;

use crate::claims::{Claims, Fault, KINDS};
use crate::ledger::{Ledger, OpenGrant};
use crate::metrics::Metrics;

/// Name of the note of what was granted a moment ago.
const OPEN_GRANTS: Note<'static> = Note::Only("ipam-open-grants");
/// Time after which a ledger that refuses something is made anew: files may have been written again by now.
const REREAD: Duration = Duration::from_secs(5);
/// Changes by other replicas during one of this one, after which the caller is to try again.
const MAX_TRIES: u32 = 5;

/// The ledger, shared by the calls and the reconciler.
///
/// Replicas have a ledger each. What one grants counts once it is in the note, and that can be written only by
/// a replica that knows all that the others have noted: one that does not rebuilds its ledger, and tries again.
#[derive(Clone)]
pub(crate) struct Shared {
    state: Arc<Mutex<State>>,
    /// Locked while the note is written: grants that come meanwhile share the next write.
    noted: Arc<tokio::sync::Mutex<Noted>>,
    store: Store,
    /// Ledger in which nothing is taken.
    empty: Arc<Ledger>,
    pub(crate) metrics: Metrics,
}

#[derive(Default)]
pub(crate) struct State {
    /// Absent until it has been rebuilt.
    pub(crate) ledger: Option<Ledger>,
    /// Fault that keeps it from that.
    pub(crate) unread: Option<String>,
    /// Numbers of grants, of releases in the note, and of times that the ledger was rebuilt.
    grants: u64,
    releases: u64,
    rebuilds: u64,
    rebuilt: Option<Instant>,
}

/// The note as it was written or read last.
#[derive(Default)]
struct Noted {
    /// Number of the newest grant in it.
    grants: u64,
    content: OpenNote,
}

/// Grants that the store may not know yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "AnyNote")]
struct OpenNote {
    /// Number of releases, which other replicas notice by it.
    releases: u64,
    grants: Vec<OpenGrant>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnyNote {
    /// As older versions write it.
    Grants(Vec<OpenGrant>),
    Whole {
        releases: u64,
        grants: Vec<OpenGrant>,
    },
}

impl From<AnyNote> for OpenNote {
    fn from(note: AnyNote) -> Self {
        match note {
            AnyNote::Grants(grants) => Self { releases: 0, grants },
            AnyNote::Whole { releases, grants } => Self { releases, grants },
        }
    }
}

/// Content and faults of the store at a rebuild of the ledger.
pub(crate) struct Rebuilt {
    pub(crate) snapshot: Snapshot,
    pub(crate) claims: Claims,
    pub(crate) faults: Vec<Fault>,
}

impl Shared {
    pub(crate) fn new(store: Store, empty: Ledger) -> Self {
        let (state, noted, empty) = (Arc::default(), Arc::default(), Arc::new(empty));
        Self { state, noted, store, empty, metrics: Metrics::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once the next grant could be answered.
    pub(crate) async fn wait_until_free(&self) {
        drop(self.noted.lock().await);
        drop(self.lock());
    }

    /// Makes the ledger from the store and the note.
    pub(crate) async fn rebuild(&self) -> Result<Rebuilt, StoreError> {
        self.rebuild_after(&mut *self.noted.lock().await).await
    }

    async fn rebuild_after(&self, noted: &mut Noted) -> Result<Rebuilt, StoreError> {
        // Before the store: what is granted later than this cannot be granted here, too.
        let content: OpenNote = self.store.note(OPEN_GRANTS).await?.unwrap_or_default();
        let snapshot = self.store.read(&KINDS).await?;
        let (claims, now) = (Claims::of(&snapshot), Instant::now());
        // Grants that cannot be read stay taken.
        let known = self.lock().ledger.clone().filter(|_| !claims.complete);
        let mut ledger = known.unwrap_or_else(|| Ledger::clone(&self.empty));
        let faults = ledger.reconcile(&claims, now);
        ledger.reopen(&content.grants, now);
        let mut state = self.lock();
        state.ledger = Some(ledger);
        state.rebuilds += 1;
        state.rebuilt = Some(now);
        state.releases = content.releases;
        *noted = Noted { grants: state.grants, content };
        Ok(Rebuilt { snapshot, claims, faults })
    }

    /// The same before something is refused: another replica may have released what is missing here. In directories
    /// every [`REREAD`] at most: this one may have read files that were lost and have been written again since.
    async fn rebuild_once(&self) -> Result<bool, StoreError> {
        if self.store.api_server().is_some() {
            return Ok(self.refresh().await?.is_some());
        }
        let mut noted = self.noted.lock().await;
        let is_due = self.lock().rebuilt.is_none_or(|at| at.elapsed() >= REREAD);
        if is_due {
            self.rebuild_after(&mut noted).await?;
        }
        Ok(is_due)
    }

    /// Rebuilds the ledger if another replica has granted or released something.
    pub(crate) async fn refresh(&self) -> Result<Option<Rebuilt>, StoreError> {
        let mut noted = self.noted.lock().await;
        if self.store.is_note_current(OPEN_GRANTS).await? {
            return Ok(None);
        }
        self.rebuild_after(&mut noted).await.map(Some)
    }

    /// Drops from the note what the store knows by now.
    pub(crate) async fn note(&self) -> Result<(), StoreError> {
        let mut noted = self.noted.lock().await;
        match self.content() {
            Some((content, _)) if content == noted.content => Ok(()),
            Some(_) => self.write_note(&mut noted).await,
            None => Ok(()),
        }
    }

    /// The note with all grants so far, and their number.
    fn content(&self) -> Option<(OpenNote, u64)> {
        let state = self.lock();
        let grants = state.ledger.as_ref()?.open();
        Some((OpenNote { releases: state.releases, grants }, state.grants))
    }

    async fn write_note(&self, noted: &mut Noted) -> Result<(), StoreError> {
        if let Some((content, grants)) = self.content() {
            self.store.put_note(OPEN_GRANTS, &content).await?;
            *noted = Noted { grants, content };
        }
        Ok(())
    }

    /// Grants, and notes the grant before it is returned: an ipam that ends now, or another one, must not
    /// grant it again. A grant that cannot be noted, or for which the caller does not wait, is undone.
    pub(crate) async fn grant<T: Copy>(
        &self,
        act: impl Fn(&mut Ledger, Instant) -> Result<T, Status>,
        undo: fn(&mut Ledger, T, Instant) -> bool,
    ) -> Result<T, Status> {
        for _ in 0..MAX_TRIES {
            if let Some(granted) = self.try_grant(&act, undo).await? {
                return Ok(granted);
            }
        }
        Err(contended())
    }

    /// `None` if the ledger had to be rebuilt.
    async fn try_grant<T: Copy>(
        &self,
        act: impl Fn(&mut Ledger, Instant) -> Result<T, Status>,
        undo: fn(&mut Ledger, T, Instant) -> bool,
    ) -> Result<Option<T>, Status> {
        let (granted, number, rebuilds) = {
            let mut state = self.lock();
            let granted = act(state.ledger()?, Instant::now());
            state.grants += u64::from(granted.is_ok());
            (granted, state.grants, state.rebuilds)
        };
        let granted = match granted {
            Ok(granted) => granted,
            Err(refusal) => {
                let is_anew = self.rebuild_once().await.map_err(unread)?;
                return if is_anew { Ok(None) } else { Err(refusal) };
            }
        };
        let mut open = Open { shared: self, granted, rebuilds, undo: Some(undo) };
        let mut noted = self.noted.lock().await;
        if self.lock().rebuilds != rebuilds {
            return Ok(None);
        }
        if noted.grants < number {
            match self.write_note(&mut noted).await {
                Ok(()) => {}
                Err(StoreError::NoteChanged(_)) => {
                    self.rebuild_after(&mut noted).await.map_err(unread)?;
                    return Ok(None);
                }
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    return Err(Status::unavailable(format!(
                        "the grant cannot be noted, try again: {error:#}"
                    )));
                }
            }
        }
        open.undo = None;
        Ok(Some(granted))
    }

    /// Releases, and notes that for other replicas. Returns false if nobody held it.
    pub(crate) async fn release(
        &self,
        act: impl Fn(&mut Ledger, Instant) -> bool,
    ) -> Result<bool, Status> {
        for _ in 0..MAX_TRIES {
            let (number, rebuilds) = {
                let mut state = self.lock();
                if !act(state.ledger()?, Instant::now()) {
                    return Ok(false);
                }
                state.releases += 1;
                (state.releases, state.rebuilds)
            };
            let mut noted = self.noted.lock().await;
            if self.lock().rebuilds != rebuilds {
                continue;
            }
            if noted.content.releases >= number {
                return Ok(true);
            }
            match self.write_note(&mut noted).await {
                Ok(()) => return Ok(true),
                Err(StoreError::NoteChanged(_)) => {
                    self.rebuild_after(&mut noted).await.map_err(unread)?;
                }
                // The store shows it sooner or later.
                Err(error) => {
                    let error = anyhow::Error::from(error);
                    tracing::warn!("a release cannot be noted: {error:#}");
                    return Ok(true);
                }
            }
        }
        Err(contended())
    }

    pub(crate) async fn is_available(&self, cidr: Cidr) -> Result<bool, Status> {
        self.refresh().await.map_err(unread)?;
        self.ledger(|ledger, _| ledger.is_available(cidr))
    }

    fn ledger<T>(&self, act: impl FnOnce(&mut Ledger, Instant) -> T) -> Result<T, Status> {
        Ok(act(self.lock().ledger()?, Instant::now()))
    }
}

/// A grant that is taken back when it is dropped, unless there is nothing to undo any more.
struct Open<'a, T: Copy> {
    shared: &'a Shared,
    granted: T,
    /// The ledger that it was granted by. A later one does not have it.
    rebuilds: u64,
    undo: Option<fn(&mut Ledger, T, Instant) -> bool>,
}

impl<T: Copy> Drop for Open<'_, T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let is_same = state.rebuilds == self.rebuilds;
        if let (Some(undo), Some(ledger), true) = (self.undo, state.ledger.as_mut(), is_same) {
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

fn unread(error: StoreError) -> Status {
    let error = anyhow::Error::from(error);
    Status::unavailable(format!(
        "what other ipams have granted cannot be read, try again: {error:#}"
    ))
}

fn contended() -> Status {
    Status::unavailable("other ipams grant and release at the same time; try again")
}

#[cfg(test)]
mod tests {
    use fabric_store::StoreArgs;
    use futures::future::join_all;

    use super::*;
    use crate::pools::{Pools, Request, RequestMode};

    fn shared(dir: &std::path::Path) -> Shared {
        let [run, state] = ["run", "state"].map(|name| dir.join(name));
        let pools = Pools::new(vec!["10.0.0.0/8".parse().unwrap()]).unwrap();
        let empty = Ledger::new(pools, Duration::from_secs(60));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        let shared = Shared::new(store, empty.clone());
        shared.lock().ledger = Some(empty);
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
        let note: OpenNote = shared.store.note(OPEN_GRANTS).await.unwrap().unwrap();
        assert_eq!(note.grants.len(), 20);
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
