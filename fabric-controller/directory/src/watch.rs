use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use fabric_objects::{Event, Object, ObjectRef, Problem, Snapshot};
use tokio::time::Instant;

use crate::folders::{Interest, Matters, RESCAN_UNWATCHED};
use crate::layout::Layout;
use crate::manifests::SETTLE;
use crate::notifier::Notifier;
use crate::reader::{Reader, Scope};

/// Lets a writer finish what it is at.
const DEBOUNCE: Duration = Duration::from_millis(30);

/// A running watch. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    layout: Arc<Layout>,
    reader: Reader,
    reported: BTreeMap<ObjectRef, Object>,
    problems: Vec<Problem>,
    queue: VecDeque<Event>,
    notifier: Notifier,
    /// Time of the next read, after a notification of a change.
    due: Option<Instant>,
    rescan: Instant,
}

impl Watch {
    pub(crate) fn start(layout: &Arc<Layout>, scope: Scope) -> Self {
        let interests = Interest::of(layout, &scope, Matters::Everything);
        let mut notifier = Notifier::new(layout.changes.clone(), interests);
        let rescan = Instant::now() + notifier.renew().next;
        let mut reader = Reader::new(layout, scope);
        let snapshot = read(&mut reader);
        let mut queue: VecDeque<_> =
            snapshot.objects.values().cloned().map(Event::Applied).collect();
        queue.push_back(Event::Problems(snapshot.problems.clone()));
        queue.push_back(Event::Synced);
        let (reported, problems) = (snapshot.objects, snapshot.problems);
        let layout = Arc::clone(layout);
        let due = reader.is_unsettled().then(|| Instant::now() + SETTLE);
        Self { layout, reader, reported, problems, queue, notifier, due, rescan }
    }

    /// Returns the next event. Cancel safe: an event is either returned or still to come.
    pub async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if let Some(due) = self.due {
                tokio::time::sleep_until(due).await;
                self.due = None;
                if self.notifier.drain() {
                    self.rescan = self.rescan.min(Instant::now() + RESCAN_UNWATCHED);
                }
                self.look();
                continue;
            }
            tokio::select! {
                () = self.notifier.changed() => self.due = Some(Instant::now() + DEBOUNCE),
                () = tokio::time::sleep_until(self.rescan) => {
                    let renewal = self.notifier.renew();
                    self.rescan = Instant::now() + renewal.next;
                    if renewal.look {
                        self.look();
                    }
                }
            }
        }
    }

    /// Reports this one object, too, from now on, and no other of its kind.
    pub fn also(&mut self, object: &ObjectRef) {
        self.reader.also(&self.layout, object);
        self.look();
    }

    /// Remembers the last good version of each manifest in the state directory from now on.
    pub fn remember(&mut self) {
        self.reader.remember();
    }

    /// All objects as of the last read, those not reported yet included.
    pub fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.reported
    }

    /// Returns the position of an object's manifest, or of a field of it: `file:line`.
    pub fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.reader.locate(object, field)
    }

    /// Reads again and queues what is different.
    fn look(&mut self) {
        let snapshot = read(&mut self.reader);
        for gone in self.reported.keys().filter(|k| !snapshot.objects.contains_key(k)) {
            self.queue.push_back(Event::Deleted(gone.clone()));
        }
        for (reference, object) in &snapshot.objects {
            if self.reported.get(reference) != Some(object) {
                self.queue.push_back(Event::Applied(object.clone()));
            }
        }
        if self.problems != snapshot.problems {
            self.queue.push_back(Event::Problems(snapshot.problems.clone()));
        }
        (self.reported, self.problems) = (snapshot.objects, snapshot.problems);
        self.choose();
        if self.reader.is_unsettled() {
            self.due = Some(Instant::now() + SETTLE);
        }
    }

    /// Watches what the scope needs by now. Those of the user's files that hold nothing of it
    /// matter only at the next rescan, or once one that does changes.
    fn choose(&mut self) {
        let manifests = self.reader.manifests_in_use().map_or(Matters::Everything, Matters::Only);
        let interests = Interest::of(&self.layout, self.reader.scope(), manifests);
        if let Some(next) = self.notifier.choose(interests) {
            let now = Instant::now();
            self.rescan = self.rescan.min(now + next);
            // Something may have changed before it was watched.
            self.due = Some(now + DEBOUNCE);
        }
    }
}

fn read(reader: &mut Reader) -> Snapshot {
    let (snapshot, error) = reader.read();
    if let Some(error) = error {
        tracing::warn!(error = &error as &dyn std::error::Error, "keeping what was read before");
    }
    snapshot
}
