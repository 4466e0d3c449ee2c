//! Several sources, merged into one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::stream::BoxStream;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event as Change;
use tokio::time::{Instant, sleep_until};
use tokio_stream::{StreamExt as _, StreamMap};

use super::content::content;
use super::intake::Stored;
use super::source::{Source, Told};
use super::{Kubernetes, intake};
use crate::{Event, Kind, Object, ObjectRef, Problem};

/// A source whose last failure is so long ago works again, with or without an event since: it would
/// have failed again by now.
const RECOVERED: Duration = Duration::from_secs(20);

/// A running watch.
pub(crate) struct Watch {
    store: Kubernetes,
    /// Never contended: the lock makes of streams something that can be shared.
    sources: Mutex<StreamMap<Source, BoxStream<'static, Told>>>,
    /// Objects that a source has named since it began to list all it has.
    lists: BTreeMap<Source, BTreeSet<ObjectRef>>,
    /// Sources that report an object. It is gone when none does.
    tellers: BTreeMap<ObjectRef, BTreeSet<Source>>,
    /// Opened by [`Self::name`].
    named: BTreeSet<Source>,
    /// Sources that never were at the end of such a list.
    unlisted: BTreeSet<Source>,
    told: BTreeMap<ObjectRef, Object>,
    versions: BTreeMap<ObjectRef, u64>,
    /// Problems of objects.
    wrong: BTreeMap<ObjectRef, Vec<Problem>>,
    /// Problems of sources, and until when they count.
    failing: BTreeMap<Source, (Problem, Instant)>,
    problems: BTreeSet<Problem>,
    queue: VecDeque<Event>,
    synced: bool,
}

impl Watch {
    pub(super) fn start(store: Kubernetes, kinds: &[Kind]) -> Self {
        let mut watch = Self {
            store,
            sources: Mutex::default(),
            lists: BTreeMap::new(),
            tellers: BTreeMap::new(),
            named: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            told: BTreeMap::new(),
            versions: BTreeMap::new(),
            wrong: BTreeMap::new(),
            failing: BTreeMap::new(),
            problems: BTreeSet::new(),
            queue: VecDeque::new(),
            synced: false,
        };
        let installation = watch.store.access.namespace.clone();
        kinds.iter().for_each(|kind| watch.open(Source::of(*kind, &installation)));
        watch
    }

    pub(crate) fn also(&mut self, object: &ObjectRef) {
        let sources = unlocked(&mut self.sources).keys();
        let before: Vec<Source> =
            sources.filter(|source| source.kind() == object.kind).cloned().collect();
        if before == [Source::One(object.clone())] {
            return;
        }
        let own = Source::One(object.clone());
        self.open(own.clone());
        if let Some(tellers) = self.tellers.get_mut(object) {
            tellers.insert(own.clone());
        }
        before.iter().filter(|source| **source != own).for_each(|source| self.close(source));
    }

    pub(crate) fn name(&mut self, objects: &BTreeSet<ObjectRef>) -> bool {
        let wanted: BTreeSet<Source> = objects.iter().cloned().map(Source::One).collect();
        let before = std::mem::replace(&mut self.named, wanted.clone());
        before.difference(&wanted).for_each(|source| self.close(source));
        wanted.difference(&before).for_each(|source| self.open(source.clone()));
        wanted.difference(&before).next().is_some()
    }

    fn open(&mut self, source: Source) {
        let events = source.open(&self.store.access);
        unlocked(&mut self.sources).insert(source.clone(), events);
        self.unlisted.insert(source);
    }

    fn close(&mut self, source: &Source) {
        unlocked(&mut self.sources).remove(source);
        self.lists.remove(source);
        self.unlisted.remove(source);
        self.failing.remove(source);
        self.lose_all_but(source, &BTreeSet::new());
    }

    /// Cancel safe: what the sources are at, they are at in themselves.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if self.unlisted.is_empty() && !self.synced {
                self.synced = true;
                self.queue.push_back(Event::Problems(self.problems.iter().cloned().collect()));
                self.queue.push_back(Event::Synced);
                continue;
            }
            let recovery = self.failing.values().map(|(_, until)| *until).min();
            let sources = unlocked(&mut self.sources);
            tokio::select! {
                Some((source, told)) = sources.next() => self.take(source, told),
                () = due(recovery) => {
                    let now = Instant::now();
                    self.failing.retain(|_, (_, until)| *until > now);
                }
            }
            self.tell_problems();
        }
    }

    pub(crate) fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.told
    }

    fn take(&mut self, source: Source, told: Told) {
        match told {
            Ok(Change::Init) => {
                self.lists.insert(source, BTreeSet::new());
                return;
            }
            Ok(Change::InitApply(object)) => {
                let reference = intake::reference(source.kind(), &object.metadata);
                self.lists.entry(source.clone()).or_default().insert(reference);
                self.apply(&source, object);
            }
            Ok(Change::InitDone) => self.listed(&source),
            Ok(Change::Apply(object)) => self.apply(&source, object),
            Ok(Change::Delete(object)) => {
                self.lose(&source, &intake::reference(source.kind(), &object.metadata));
            }
            Err(problem) => return self.failed(source, problem),
        }
        self.failing.remove(&source);
    }

    fn failed(&mut self, source: Source, problem: Option<Problem>) {
        self.store.metrics().count_watch_restart(source.kind().as_str());
        let Some(problem) = problem else { return };
        let until = Instant::now() + RECOVERED;
        let before = self.failing.insert(source, (problem.clone(), until));
        if before.is_none_or(|(before, _)| before != problem) {
            tracing::warn!("{problem}");
        }
    }

    /// Removes the objects that the list did not name.
    fn listed(&mut self, source: &Source) {
        let listed = self.lists.remove(source).unwrap_or_default();
        self.lose_all_but(source, &listed);
        self.unlisted.remove(source);
    }

    fn lose_all_but(&mut self, source: &Source, listed: &BTreeSet<ObjectRef>) {
        let told = self.tellers.iter().filter(|(_, tellers)| tellers.contains(source));
        let gone = told.map(|(object, _)| object).filter(|object| !listed.contains(object));
        let gone: Vec<ObjectRef> = gone.cloned().collect();
        gone.iter().for_each(|object| self.lose(source, object));
    }

    /// Takes a new version over, but a wrong one only if there is no good one.
    fn apply(&mut self, source: &Source, object: DynamicObject) {
        let reference = intake::reference(source.kind(), &object.metadata);
        self.tellers.entry(reference.clone()).or_default().insert(source.clone());
        let stored = match intake::take(source.kind(), object) {
            Ok(stored) => stored,
            Err(problem) => {
                self.store.lost(&reference);
                self.wrong.insert(reference, vec![*problem]);
                return;
            }
        };
        if self.is_known_better(&stored) {
            return;
        }
        self.store.saw(&stored);
        self.versions.insert(reference.clone(), stored.version);
        let faults = intake::faults(&stored.object);
        self.wrong.remove(&reference);
        if !faults.is_empty() {
            self.wrong.insert(reference.clone(), faults);
            let good = self.told.get(&reference).filter(|told| told.faults().is_empty());
            if let Some(good) = good.filter(|good| good.uid() == stored.object.uid()) {
                // Its problems are those of the newest version.
                let mut good = good.clone();
                good.metadata_mut().generation = Some(stored.object.generation());
                return self.tell(source, good);
            }
        }
        self.tell(source, stored.object);
    }

    /// True if another source has already reported a newer version.
    fn is_known_better(&self, stored: &Stored) -> bool {
        let reference = stored.object.reference();
        let known = self.told.get(&reference).filter(|known| known.uid() == stored.object.uid());
        let version = self.versions.get(&reference).filter(|_| known.is_some());
        version.is_some_and(|version| *version > stored.version)
    }

    /// Reports an object unless it was reported before. A follower of one object writes its status,
    /// and knows it; a Connection has other writers, too.
    fn tell(&mut self, source: &Source, object: Object) {
        let before = self.told.insert(object.reference(), object.clone());
        let Some(before) = before else {
            return self.queue.push_back(Event::Applied(Box::new(object)));
        };
        let same = match source {
            Source::One(of) if of.kind != Kind::Connection => {
                is_same_but_for_status(&before, &object)
            }
            Source::One(_) | Source::All(_) | Source::Labelled(_) => before == object,
        };
        if !same {
            self.queue.push_back(Event::Applied(Box::new(object)));
        }
    }

    fn lose(&mut self, source: &Source, object: &ObjectRef) {
        let Some(tellers) = self.tellers.get_mut(object) else { return };
        tellers.remove(source);
        if !tellers.is_empty() {
            return;
        }
        self.tellers.remove(object);
        self.versions.remove(object);
        self.store.lost(object);
        self.wrong.remove(object);
        if self.told.remove(object).is_some() {
            self.queue.push_back(Event::Deleted(object.clone()));
        }
    }

    fn tell_problems(&mut self) {
        let failing = self.failing.values().map(|(problem, _)| problem);
        let now: BTreeSet<Problem> =
            self.wrong.values().flatten().chain(failing).cloned().collect();
        if now != self.problems {
            self.queue.push_back(Event::Problems(now.iter().cloned().collect()));
            self.problems = now;
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("synced", &self.synced).finish_non_exhaustive()
    }
}

fn is_same_but_for_status(before: &Object, now: &Object) -> bool {
    let same = |object: &Object| {
        let identity = (object.uid().to_owned(), object.generation());
        (identity, content(object))
    };
    same(before) == same(now)
}

fn unlocked<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
