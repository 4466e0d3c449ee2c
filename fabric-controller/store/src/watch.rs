use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::layout::Layout;
use crate::reader::Reader;
use crate::{Event, Kind, Object, ObjectRef, Problem, Snapshot, StoreError};

/// Lets a writer finish what it is at.
const DEBOUNCE: Duration = Duration::from_millis(30);
/// Finds what the kernel did not tell (network file systems, a folder replaced as a whole).
const RESCAN: Duration = Duration::from_secs(30);
/// While a folder is not there to be watched.
const RESCAN_UNWATCHED: Duration = Duration::from_secs(1);

/// A running watch. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    reader: Reader,
    told: BTreeMap<ObjectRef, Object>,
    problems: Vec<Problem>,
    queue: VecDeque<Event>,
    folders: Folders,
    /// When to look next, for a change heard of.
    due: Option<Instant>,
    rescan: Instant,
}

#[derive(Debug)]
struct Folders {
    watcher: RecommendedWatcher,
    changed: Arc<Notify>,
    roots: Vec<(PathBuf, RecursiveMode)>,
}

impl Watch {
    pub(crate) fn start(layout: &Layout, kinds: &[Kind]) -> Result<Self, StoreError> {
        let mut folders = Folders::new(layout)?;
        let rescan = Instant::now() + folders.listen();
        let mut reader = Reader::new(layout, kinds);
        let snapshot = read(&mut reader);
        let mut queue: VecDeque<_> =
            snapshot.objects.values().cloned().map(Box::new).map(Event::Applied).collect();
        queue.push_back(Event::Problems(snapshot.problems.clone()));
        queue.push_back(Event::Synced);
        let (told, problems) = (snapshot.objects, snapshot.problems);
        Ok(Self { reader, told, problems, queue, folders, due: None, rescan })
    }

    /// The next event. Cancel safe: an event is either returned or still to come.
    pub async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if let Some(due) = self.due {
                tokio::time::sleep_until(due).await;
                self.due = None;
                self.look();
                continue;
            }
            tokio::select! {
                () = self.folders.changed.notified() => self.due = Some(Instant::now() + DEBOUNCE),
                () = tokio::time::sleep_until(self.rescan) => {
                    self.rescan = Instant::now() + self.folders.listen();
                    self.look();
                }
            }
        }
    }

    /// All objects as they were when it last looked; what it has not told yet included.
    pub fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.told
    }

    /// Where the manifest of an object, or a field of it, stands: `file:line`.
    pub fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.reader.locate(object, field)
    }

    /// Reads again and queues what is different.
    fn look(&mut self) {
        let snapshot = read(&mut self.reader);
        for gone in self.told.keys().filter(|k| !snapshot.objects.contains_key(k)) {
            self.queue.push_back(Event::Deleted(gone.clone()));
        }
        for (reference, object) in &snapshot.objects {
            if self.told.get(reference) != Some(object) {
                self.queue.push_back(Event::Applied(Box::new(object.clone())));
            }
        }
        if self.problems != snapshot.problems {
            self.queue.push_back(Event::Problems(snapshot.problems.clone()));
        }
        (self.told, self.problems) = (snapshot.objects, snapshot.problems);
    }
}

fn read(reader: &mut Reader) -> Snapshot {
    let (snapshot, error) = reader.read();
    if let Some(error) = error {
        tracing::warn!(error = &error as &dyn std::error::Error, "keeping what was read before");
    }
    snapshot
}

impl Folders {
    fn new(layout: &Layout) -> Result<Self, StoreError> {
        let changed = Arc::new(Notify::new());
        let heard = Arc::clone(&changed);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading a file is an event too, and must not cause another reading.
            if !matches!(event, Ok(notify::Event { kind: EventKind::Access(_), .. })) {
                heard.notify_one();
            }
        });
        let below = |path: &Option<PathBuf>, mode| path.clone().map(|path| (path, mode));
        let roots = [
            below(&layout.manifests, RecursiveMode::NonRecursive),
            below(&layout.state, RecursiveMode::Recursive),
            Some((layout.published.clone(), RecursiveMode::Recursive)),
        ];
        let roots = roots.into_iter().flatten().collect();
        Ok(Self { watcher: watcher.map_err(StoreError::Watch)?, changed, roots })
    }

    /// Watches all folders, again if they were watched (another may have taken their place), and
    /// says after what time to do so next.
    fn listen(&mut self) -> Duration {
        let mut next = RESCAN;
        for (path, mode) in &self.roots {
            if let Err(error) = rewatch(&mut self.watcher, path, *mode) {
                tracing::debug!(folder = %path.display(), %error, "cannot be watched yet");
                next = RESCAN_UNWATCHED;
            }
        }
        next
    }
}

fn rewatch(
    watcher: &mut RecommendedWatcher,
    path: &Path,
    mode: RecursiveMode,
) -> notify::Result<()> {
    // An error here means that it was not watched.
    let _ = watcher.unwatch(path);
    watcher.watch(path, mode)
}
