use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::folder::is_manifest;
use super::layout::Layout;
use super::reader::{Reader, Scope};
use crate::{Event, Object, ObjectRef, Problem, Snapshot, StoreError};

/// Lets a writer finish what it is at.
const DEBOUNCE: Duration = Duration::from_millis(30);
/// Finds what the kernel did not tell (network file systems, a folder replaced as a whole).
const RESCAN: Duration = Duration::from_secs(30);
/// While a folder is not there to be watched.
const RESCAN_UNWATCHED: Duration = Duration::from_secs(1);

/// Weft's own files appear whole, by being renamed.
const IN_PLACE: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_DELETE);
/// Users' files are edited in any way. Being read is no change.
const IN_USE: AddWatchFlags = IN_PLACE
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CREATE);
const SELF: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF.union(AddWatchFlags::IN_MOVE_SELF);

/// Until what vanished from a file that is edited in place counts as gone.
pub(crate) const SETTLE: Duration = Duration::from_millis(500);

/// A running watch.
#[derive(Debug)]
pub(crate) struct Watch {
    layout: Arc<Layout>,
    reader: Reader,
    told: BTreeMap<ObjectRef, Object>,
    problems: Vec<Problem>,
    queue: VecDeque<Event>,
    folders: Folders,
    /// When to look next, for a change heard of.
    due: Option<Instant>,
    rescan: Instant,
}

impl Watch {
    pub(crate) fn start(layout: &Arc<Layout>, scope: Scope) -> Result<Self, StoreError> {
        let mut folders = Folders::new(layout, &scope).map_err(StoreError::Watch)?;
        let rescan = Instant::now() + folders.listen();
        let mut reader = Reader::new(layout, scope);
        let snapshot = read(&mut reader);
        let mut queue: VecDeque<_> =
            snapshot.objects.values().cloned().map(Box::new).map(Event::Applied).collect();
        queue.push_back(Event::Problems(snapshot.problems.clone()));
        queue.push_back(Event::Synced);
        let (told, problems) = (snapshot.objects, snapshot.problems);
        let layout = Arc::clone(layout);
        Ok(Self { layout, reader, told, problems, queue, folders, due: None, rescan })
    }

    pub(crate) async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if let Some(due) = self.due {
                tokio::time::sleep_until(due).await;
                self.due = None;
                if self.folders.drain() {
                    self.rescan = self.rescan.min(Instant::now() + RESCAN_UNWATCHED);
                }
                self.look();
                continue;
            }
            tokio::select! {
                () = self.folders.changed() => self.due = Some(Instant::now() + DEBOUNCE),
                () = tokio::time::sleep_until(self.rescan) => {
                    self.rescan = Instant::now() + self.folders.listen();
                    self.look();
                }
            }
        }
    }

    pub(crate) fn also(&mut self, object: &ObjectRef) {
        self.reader.also(&self.layout, object);
        self.folders.choose(&self.layout, self.reader.scope());
        self.rescan = Instant::now() + self.folders.listen();
        self.look();
    }

    pub(crate) fn remember(&mut self) {
        self.reader.remember();
    }

    pub(crate) fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        &self.told
    }

    pub(crate) fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
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
        if self.reader.is_unsettled() {
            self.due = Some(Instant::now() + SETTLE);
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

/// The folders that are listened to.
#[derive(Debug)]
struct Folders {
    inotify: AsyncFd<Listener>,
    roots: Vec<Root>,
    /// One of them has gone.
    lost: bool,
}

#[derive(Debug)]
struct Listener(Inotify);

#[derive(Debug)]
struct Root {
    path: PathBuf,
    /// Which events are told of it.
    events: AddWatchFlags,
    /// Whether a file of that name matters.
    matters: Matters,
    watched: Option<WatchDescriptor>,
}

#[derive(Debug)]
enum Matters {
    /// Users' folders may be links to links, swapped in ways of their own.
    Everything,
    /// Weft's own files, which appear by being renamed.
    Manifests,
    Only(String),
}

impl Folders {
    fn new(layout: &Layout, scope: &Scope) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // SAFETY: the descriptor is the listener's own and open for as long as it lives.
        #[allow(unsafe_code)]
        let inotify =
            unsafe { AsyncFd::register_with_interest(Listener(inotify), Interest::READABLE) }?;
        Ok(Self { inotify, roots: roots(layout, scope), lost: false })
    }

    /// Listens to what this scope needs, from the next [`Self::listen`] on.
    fn choose(&mut self, layout: &Layout, scope: &Scope) {
        let before = std::mem::replace(&mut self.roots, roots(layout, scope));
        for old in before {
            match self.roots.iter_mut().find(|root| root.path == old.path) {
                Some(root) => root.watched = old.watched,
                None => self.forget(old.watched),
            }
        }
    }

    fn forget(&self, watched: Option<WatchDescriptor>) {
        // An error means that it is gone.
        let _ = watched.map(|watched| self.inotify.get_ref().0.rm_watch(watched));
    }

    /// Returns after something changed. Can be cancelled without losing a change.
    async fn changed(&mut self) {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else {
                return std::future::pending().await;
            };
            match ready.get_inner().0.read_events() {
                Ok(events) => {
                    self.lost |= events.iter().any(|event| event.mask.intersects(SELF));
                    if events.iter().any(|event| matters(&self.roots, event)) {
                        return;
                    }
                }
                Err(_) => ready.clear_ready(),
            }
        }
    }

    /// Forgets what has been told: all of it is about to be read. True if a folder was lost.
    fn drain(&mut self) -> bool {
        while let Ok(events) = self.inotify.get_ref().0.read_events() {
            self.lost |= events.iter().any(|event| event.mask.intersects(SELF));
        }
        std::mem::take(&mut self.lost)
    }

    /// Listens to all folders, also to those that took the place of others, and says after what
    /// time to do so next.
    fn listen(&mut self) -> Duration {
        let mut next = RESCAN;
        for root in &mut self.roots {
            let watched = self.inotify.get_ref().0.add_watch(&root.path, root.events);
            if let Err(error) = watched {
                tracing::debug!(folder = %root.path.display(), %error, "cannot be watched yet");
                next = RESCAN_UNWATCHED;
            }
            let before = std::mem::replace(&mut root.watched, watched.ok());
            if let Some(before) = before.filter(|before| Some(*before) != root.watched) {
                // An error means that it is gone.
                let _ = self.inotify.get_ref().0.rm_watch(before);
            }
        }
        next
    }
}

fn roots(layout: &Layout, scope: &Scope) -> Vec<Root> {
    let of_user = scope.has_manifests().then(|| layout.manifests.clone()).flatten();
    let mut roots: Vec<_> =
        of_user.map(|path| Root::new(path, IN_USE, Matters::Everything)).into_iter().collect();
    for &kind in &scope.kinds {
        let only = scope.file_of(kind);
        // Whoever follows one object writes its status.
        let statuses = if only.is_some() { None } else { layout.statuses(kind) };
        for path in [layout.objects(kind), statuses].into_iter().flatten() {
            let matters = only.clone().map_or(Matters::Manifests, Matters::Only);
            roots.push(Root::new(path, IN_PLACE, matters));
        }
    }
    roots
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Root {
    fn new(path: PathBuf, events: AddWatchFlags, matters: Matters) -> Self {
        Self { path, events: events | SELF, matters, watched: None }
    }
}

/// What is about no file is about a folder itself, or says that too much happened to be told.
fn matters(roots: &[Root], event: &InotifyEvent) -> bool {
    let Some(root) = roots.iter().find(|root| root.watched == Some(event.wd)) else {
        return event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
    };
    let name = event.name.as_deref().and_then(OsStr::to_str);
    match (&root.matters, name) {
        (Matters::Everything, _) | (_, None) => true,
        (Matters::Manifests, Some(name)) => is_manifest(name),
        (Matters::Only(only), Some(name)) => name == only,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::timeout;

    use super::*;
    use crate::{Kind, ObjectRef};

    #[tokio::test]
    async fn files_of_others_statuses_and_readers_wake_nobody_who_follows_one_object() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout { manifests: None, published: dir.path().to_owned(), state: None };
        let own = ObjectRef::new(Kind::Connection, "t", "own");
        let folder = layout.objects(own.kind).unwrap();
        let statuses = layout.statuses(own.kind).unwrap();
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(&statuses).unwrap();
        let scope = Scope::follow(&own, &[]);
        let mut folders = Folders::new(&layout, &scope).unwrap();
        assert_eq!(folders.listen(), RESCAN);

        fs::write(folder.join("t.other.yaml"), "a: b").unwrap();
        fs::write(folder.join(".t.own.yaml.tmp"), "a: b").unwrap();
        fs::write(statuses.join("t.own.yaml"), "a: b").unwrap();
        let moment = Duration::from_millis(100);
        assert!(timeout(moment, folders.changed()).await.is_err());
        fs::rename(folder.join(".t.own.yaml.tmp"), folder.join("t.own.yaml")).unwrap();
        timeout(moment, folders.changed()).await.unwrap();
        fs::read(folder.join("t.own.yaml")).unwrap();
        assert!(timeout(moment, folders.changed()).await.is_err());
    }
}
