//! Several sources, merged into one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use fabric_kube_client::reflector::{Change, Reflector};
use fabric_kube_client::requests::Name;
use fabric_objects::{Event, Kind, Object, ObjectRef, Problem};
use kube::api::DynamicObject;

use super::content::content;
use super::intake::Stored;
use super::keys::{self, Held};
use super::source::Source;
use super::{Kubernetes, intake};

/// A running watch.
pub(crate) struct Watch {
    store: Kubernetes,
    reflector: Reflector<Source, DynamicObject>,
    /// Sources that report an object. It is gone when none does.
    reporters: BTreeMap<ObjectRef, BTreeSet<Source>>,
    /// Opened by [`Self::name`].
    named: BTreeSet<Source>,
    known: BTreeMap<ObjectRef, Object>,
    versions: BTreeMap<ObjectRef, u64>,
    /// Problems of objects.
    wrong: BTreeMap<ObjectRef, Vec<Problem>>,
    problems: BTreeSet<Problem>,
    queue: VecDeque<Event>,
    /// `None` if Secrets are read wherever they are.
    held: Option<Held>,
    synced: bool,
}

impl Watch {
    pub(super) fn start(store: Kubernetes, kinds: &[Kind]) -> Self {
        let reflector = Reflector::new(store.server.client.clone(), store.metrics().clone());
        let mut watch = Self {
            store,
            reflector,
            reporters: BTreeMap::new(),
            named: BTreeSet::new(),
            known: BTreeMap::new(),
            versions: BTreeMap::new(),
            wrong: BTreeMap::new(),
            problems: BTreeSet::new(),
            queue: VecDeque::new(),
            held: keys::are_read_by_gateways(kinds).then(Held::new),
            synced: false,
        };
        let installation = watch.store.server.namespace.clone();
        let by_gateways = watch.held.is_some();
        let kinds = kinds.iter().filter(|kind| !by_gateways || **kind != Kind::Secret);
        kinds.for_each(|kind| watch.open(Source::of(*kind, &installation)));
        watch
    }

    pub(crate) fn also(&mut self, object: &ObjectRef) {
        let sources = self.reflector.keys();
        let before: Vec<Source> =
            sources.filter(|source| source.kind() == object.kind).cloned().collect();
        if before == [Source::One(object.clone())] {
            return;
        }
        let own = Source::One(object.clone());
        self.open(own.clone());
        if let Some(reporters) = self.reporters.get_mut(object) {
            reporters.insert(own.clone());
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
        let selection = source.selection();
        self.reflector.open(source, selection);
    }

    fn close(&mut self, source: &Source) {
        self.reflector.close(source);
        self.lose_all_but(source, &BTreeSet::new());
    }

    /// Cancel safe: what the sources are at, they are at in themselves.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if self.reflector.is_synced() && !self.synced {
                self.synced = true;
                self.queue.push_back(Event::Problems(self.problems.iter().cloned().collect()));
                self.queue.push_back(Event::Synced);
                continue;
            }
            match self.reflector.next().await {
                Change::Applied(source, object) => self.apply(&source, object),
                Change::Deleted(source, object) => {
                    self.lose(&source, &intake::reference(source.kind(), &object.metadata));
                }
                Change::Listed(source, names) => self.lose_all_but(&source, &names),
                Change::Problems => {}
            }
            self.release();
            self.report_problems();
        }
    }

    pub(crate) fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.known
    }

    fn lose_all_but(&mut self, source: &Source, listed: &BTreeSet<Name>) {
        let name = |object: &ObjectRef| {
            (object.namespace.clone().unwrap_or_default(), object.name.clone())
        };
        let reported = self.reporters.iter().filter(|(_, reporters)| reporters.contains(source));
        let gone =
            reported.map(|(object, _)| object).filter(|object| !listed.contains(&name(object)));
        let gone: Vec<ObjectRef> = gone.cloned().collect();
        gone.iter().for_each(|object| self.lose(source, object));
    }

    /// Takes a new version over, but a wrong one only if there is no good one.
    fn apply(&mut self, source: &Source, object: DynamicObject) {
        let reference = intake::reference(source.kind(), &object.metadata);
        self.reporters.entry(reference.clone()).or_default().insert(source.clone());
        let written = self.store.cache().written(&reference, &object.metadata);
        let mut stored = match written.map_or_else(|| intake::take(source.kind(), object), Ok) {
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
        self.store.saw(&mut stored);
        self.versions.insert(reference.clone(), stored.version);
        let faults = intake::faults(&stored.object);
        self.wrong.remove(&reference);
        if !faults.is_empty() {
            self.wrong.insert(reference.clone(), faults);
            let good = self.known.get(&reference).filter(|known| known.faults().is_empty());
            if let Some(good) = good.filter(|good| good.uid() == stored.object.uid()) {
                // Its problems are those of the newest version.
                let mut good = good.clone();
                good.metadata_mut().generation = Some(stored.object.generation());
                return self.report(source, good);
            }
        }
        self.report(source, stored.object);
    }

    /// True if another source has already reported a newer version.
    fn is_known_better(&self, stored: &Stored) -> bool {
        let reference = stored.object.reference();
        let known = self.known.get(&reference).filter(|known| known.uid() == stored.object.uid());
        let version = self.versions.get(&reference).filter(|_| known.is_some());
        version.is_some_and(|version| *version > stored.version)
    }

    /// Reports an object unless it was reported before. A follower of one object writes its status,
    /// and has it already; a Connection has other writers, too.
    fn report(&mut self, source: &Source, object: Object) {
        self.open_keys(&object);
        let before = self.known.insert(object.reference(), object.clone());
        let Some(before) = before else {
            return self.push(object.reference(), Event::Applied(object));
        };
        let same = match source {
            Source::One(of) if of.kind != Kind::Connection => {
                is_same_but_for_status(&before, &object)
            }
            Source::One(_) | Source::All(_) | Source::Labelled(_) | Source::Keys(_) => {
                before == object
            }
        };
        if !same {
            self.push(object.reference(), Event::Applied(object));
        }
    }

    /// Opens the source of the Secrets in a gateway's namespace.
    fn open_keys(&mut self, gateway: &Object) {
        let reference = gateway.reference();
        let Some(namespace) = keys::namespace_of_gateway(&reference) else { return };
        let source = Source::Keys(namespace.to_owned());
        if self.held.is_some() && !self.reflector.keys().any(|open| *open == source) {
            self.reflector.open(source, keys::selection(&self.store.server, gateway, namespace));
        }
    }

    /// Closes it with the last gateway there. The right goes with the gateway that it was acquired for, so
    /// another one acquires it again.
    fn close_keys(&mut self, gone: &ObjectRef) {
        let Some(namespace) = keys::namespace_of_gateway(gone).filter(|_| self.held.is_some())
        else {
            return;
        };
        let source = Source::Keys(namespace.to_owned());
        let is_there = |of: &ObjectRef| keys::namespace_of_gateway(of) == Some(namespace);
        let other = self.known.iter().find(|(of, _)| is_there(of)).map(|(_, other)| other.clone());
        match other {
            Some(other) => {
                self.reflector.close(&source);
                self.open_keys(&other);
            }
            None => self.close(&source),
        }
    }

    /// Queues an event, or holds it back while the Secrets of a gateway's namespace are not known: its
    /// keys would be taken for missing.
    fn push(&mut self, of: ObjectRef, event: Event) {
        let namespace = keys::namespace_of_gateway(&of);
        if let Some((held, namespace)) = self.held.as_mut().zip(namespace)
            && !self.reflector.is_listed(&Source::Keys(namespace.to_owned()))
        {
            held.entry(namespace.to_owned()).or_default().push_back(event);
        } else {
            self.queue.push_back(event);
        }
    }

    /// Queues the events that no longer have to be held back.
    fn release(&mut self) {
        let Some(held) = &mut self.held else { return };
        let listed =
            |namespace: &String| self.reflector.is_listed(&Source::Keys(namespace.clone()));
        let released: Vec<String> =
            held.keys().filter(|namespace| listed(namespace)).cloned().collect();
        for namespace in released {
            self.queue.extend(held.remove(&namespace).unwrap_or_default());
        }
    }

    fn lose(&mut self, source: &Source, object: &ObjectRef) {
        let Some(reporters) = self.reporters.get_mut(object) else { return };
        reporters.remove(source);
        if !reporters.is_empty() {
            return;
        }
        self.reporters.remove(object);
        self.versions.remove(object);
        self.store.lost(object);
        self.wrong.remove(object);
        if self.known.remove(object).is_some() {
            self.push(object.clone(), Event::Deleted(object.clone()));
            self.close_keys(object);
        }
    }

    fn report_problems(&mut self) {
        let failing = self.reflector.problems();
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
