//! Folders watched by inotify, for one or many subscribers.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use serde::{Deserialize, Serialize};
use tokio::io::Interest as Readiness;
use tokio::io::unix::AsyncFd;

use crate::folder::is_manifest;
use crate::layout::Layout;
use crate::limits;
use crate::reader::Scope;

/// Finds changes without an event (network file systems, a folder replaced as a whole).
pub(crate) const RESCAN: Duration = Duration::from_secs(30);
/// Interval of reads while a folder cannot be watched.
pub(crate) const RESCAN_UNWATCHED: Duration = Duration::from_secs(1);

/// Weft's own files appear whole, by being renamed.
const IN_PLACE: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_DELETE)
    .union(SELF);
/// Users' files are edited in any way. Being read is no change.
const IN_USE: AddWatchFlags = IN_PLACE
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_CREATE);
const SELF: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF.union(AddWatchFlags::IN_MOVE_SELF);

/// A folder, and which changes in it matter to a subscriber.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interest {
    pub(crate) path: PathBuf,
    /// Files are the user's, and may be edited in place.
    pub(crate) in_use: bool,
    pub(crate) matters: Matters,
}

/// File names that matter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Matters {
    /// Users' folders may be links to links, swapped in ways of their own.
    Everything,
    /// Weft's own files, which appear by being renamed.
    Manifests,
    Only(BTreeSet<String>),
}

/// Identifies a subscriber.
pub(crate) type Subscriber = u64;

/// The folders of all subscribers, on one inotify instance.
#[derive(Debug)]
pub(crate) struct Folders {
    inotify: AsyncFd<Listener>,
    roots: Vec<Root>,
    /// A folder was deleted or moved.
    lost: bool,
}

#[derive(Debug)]
struct Listener(Inotify);

#[derive(Debug)]
struct Root {
    subscriber: Subscriber,
    interest: Interest,
    watched: Option<WatchDescriptor>,
}

impl Interest {
    /// Interests of a scope. `manifests` are the files of the user's that hold all of it, if that
    /// is known.
    pub(crate) fn of(layout: &Layout, scope: &Scope, manifests: Matters) -> Vec<Self> {
        let of_user = scope.has_manifests().then(|| layout.manifests.clone()).flatten();
        let of_user = of_user.map(|path| Self { path, in_use: true, matters: manifests });
        let mut interests: Vec<_> = of_user.into_iter().collect();
        for &kind in &scope.kinds {
            let only = scope.file_of(kind);
            // The follower of a single object writes its status itself.
            let statuses = if only.is_some() { None } else { layout.statuses(kind) };
            for path in [layout.objects(kind), statuses].into_iter().flatten() {
                let only = only.clone().map(|only| Matters::Only(BTreeSet::from([only])));
                let matters = only.unwrap_or(Matters::Manifests);
                interests.push(Self { path, in_use: false, matters });
            }
        }
        interests
    }

    /// Paths whose stamps change with everything that matters.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        match &self.matters {
            Matters::Only(names) => names.iter().map(|name| self.path.join(name)).collect(),
            Matters::Everything | Matters::Manifests => {
                let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
                let entries = entries.map(|entry| entry.path());
                entries.chain([self.path.clone()]).collect()
            }
        }
    }
}

impl Folders {
    pub(crate) fn new() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // SAFETY: the descriptor is the listener's own and open for as long as it lives.
        #[allow(unsafe_code)]
        let inotify =
            unsafe { AsyncFd::register_with_interest(Listener(inotify), Readiness::READABLE) }?;
        Ok(Self { inotify, roots: Vec::new(), lost: false })
    }

    /// Replaces the interests of a subscriber; watched from the next [`Self::listen`] on.
    pub(crate) fn choose(&mut self, subscriber: Subscriber, interests: Vec<Interest>) {
        let root = |interest| Root { subscriber, interest, watched: None };
        let (mut before, mut roots): (Vec<_>, Vec<_>) =
            self.roots.drain(..).partition(|root| root.subscriber == subscriber);
        for mut root in interests.into_iter().map(root) {
            let known = before.iter_mut().find(|old| old.interest.path == root.interest.path);
            root.watched = known.and_then(|old| old.watched.take());
            roots.push(root);
        }
        self.roots = roots;
        before.into_iter().filter_map(|old| old.watched).for_each(|watched| self.release(watched));
    }

    /// Subscribers with a change. Can be cancelled without losing one.
    pub(crate) async fn changed(&mut self) -> BTreeSet<Subscriber> {
        loop {
            let Ok(mut ready) = self.inotify.readable().await else {
                return std::future::pending().await;
            };
            match ready.get_inner().0.read_events() {
                Ok(events) => {
                    self.lost |= events.iter().any(|event| event.mask.intersects(SELF));
                    let changed: BTreeSet<_> =
                        events.iter().flat_map(|event| concerned(&self.roots, event)).collect();
                    if !changed.is_empty() {
                        return changed;
                    }
                }
                Err(_) => ready.clear_ready(),
            }
        }
    }

    /// Discards pending events, for a subscriber that is about to read everything.
    pub(crate) fn drain(&mut self) {
        while let Ok(events) = self.inotify.get_ref().0.read_events() {
            self.lost |= events.iter().any(|event| event.mask.intersects(SELF));
        }
    }

    /// Returns and clears whether a folder was lost, so that [`Self::listen`] is due soon.
    pub(crate) fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// Watches all folders, replaced ones included. Returns the subscribers with a folder that was
    /// not watched before, or cannot be watched, and when to call again.
    pub(crate) fn listen(&mut self) -> (BTreeSet<Subscriber>, Duration) {
        let (mut next, mut unsure, mut stale) = (RESCAN, BTreeSet::new(), Vec::new());
        for root in &mut self.roots {
            let events = if root.interest.in_use { IN_USE } else { IN_PLACE };
            let watched = self.inotify.get_ref().0.add_watch(&root.interest.path, events);
            if let Err(error) = watched {
                not_watched(&root.interest.path, error);
                next = RESCAN_UNWATCHED;
            }
            let before = std::mem::replace(&mut root.watched, watched.ok());
            if root.watched.is_none() || before != root.watched {
                unsure.insert(root.subscriber);
                stale.extend(before);
            }
        }
        stale.into_iter().for_each(|before| self.release(before));
        (unsure, next)
    }

    /// Ends a watch that no root uses.
    fn release(&self, watched: WatchDescriptor) {
        if self.roots.iter().all(|root| root.watched != Some(watched)) {
            // An error means that it is gone.
            let _ = self.inotify.get_ref().0.rm_watch(watched);
        }
    }
}

fn not_watched(folder: &Path, error: nix::Error) {
    let folder = folder.display();
    match limits::inotify_watch(error) {
        Some(limit) => tracing::warn!(%folder, "{limit}; looking once a second instead"),
        None => tracing::debug!(%folder, %error, "cannot be watched yet"),
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Subscribers that an event concerns. An event without a file name is about a folder itself; an
/// overflow is about all of them.
fn concerned<'a>(
    roots: &'a [Root],
    event: &'a InotifyEvent,
) -> impl Iterator<Item = Subscriber> + 'a {
    let overflow = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
    let name = event.name.as_deref().and_then(OsStr::to_str);
    let concerned = roots.iter().filter(move |root| {
        overflow || (root.watched == Some(event.wd) && root.interest.matters.includes(name))
    });
    concerned.map(|root| root.subscriber)
}

impl Matters {
    fn includes(&self, name: Option<&str>) -> bool {
        match (self, name) {
            (Self::Everything, _) | (_, None) => true,
            (Self::Manifests, Some(name)) => is_manifest(name),
            (Self::Only(only), Some(name)) => only.contains(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fabric_objects::{Kind, ObjectRef};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn follower_of_one_object_ignores_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout {
            manifests: None,
            published: dir.path().to_owned(),
            state: None,
            changes: None,
        };
        let own = ObjectRef::new(Kind::Connection, "t", "own");
        let folder = layout.objects(own.kind).unwrap();
        let statuses = layout.statuses(own.kind).unwrap();
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(&statuses).unwrap();
        let scope = Scope::follow(&own, &[]);
        let mut folders = Folders::new().unwrap();
        folders.choose(7, Interest::of(&layout, &scope, Matters::Everything));
        assert_eq!(folders.listen(), (BTreeSet::from([7]), RESCAN));
        assert_eq!(folders.listen(), (BTreeSet::new(), RESCAN));

        fs::write(folder.join("t.other.yaml"), "a: b").unwrap();
        fs::write(folder.join(".t.own.yaml.tmp"), "a: b").unwrap();
        fs::write(statuses.join("t.own.yaml"), "a: b").unwrap();
        let moment = Duration::from_millis(100);
        assert!(timeout(moment, folders.changed()).await.is_err());
        fs::rename(folder.join(".t.own.yaml.tmp"), folder.join("t.own.yaml")).unwrap();
        assert_eq!(timeout(moment, folders.changed()).await.unwrap(), BTreeSet::from([7]));
        fs::read(folder.join("t.own.yaml")).unwrap();
        assert!(timeout(moment, folders.changed()).await.is_err());
    }

    #[tokio::test]
    async fn leaving_subscriber_keeps_others_watched() {
        let dir = tempfile::tempdir().unwrap();
        let everything =
            Interest { path: dir.path().to_owned(), in_use: true, matters: Matters::Everything };
        let mut folders = Folders::new().unwrap();
        folders.choose(1, vec![everything.clone()]);
        folders.choose(2, vec![everything]);
        assert_eq!(folders.listen().0, BTreeSet::from([1, 2]));
        folders.choose(1, Vec::new());
        fs::write(dir.path().join("a.yaml"), "a: b").unwrap();
        let moment = Duration::from_secs(1);
        assert_eq!(timeout(moment, folders.changed()).await.unwrap(), BTreeSet::from([2]));
    }
}
