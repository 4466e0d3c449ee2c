//! The directory store against real directories.

#![allow(clippy::unwrap_used)]

mod changes;
mod faults;
mod last_good;
mod notified;
mod own;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fabric_directory::{Directory, Places, Watch};
use fabric_objects::{Event, Kind, Object, ObjectRef, Problem};
use tempfile::TempDir;

/// A cluster's directories.
struct Place {
    dir: TempDir,
    store: Directory,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        let store = Directory::open(places(dir.path())).unwrap();
        Self { dir, store }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.path("manifests").join(file), text).unwrap();
    }

    /// As an editor does it.
    fn replace(&self, file: &str, text: &str) {
        let swap = self.path("manifests").join(format!(".{file}.swp.yaml"));
        fs::write(&swap, text).unwrap();
        fs::rename(&swap, self.path("manifests").join(file)).unwrap();
    }

    fn remove(&self, file: &str) {
        fs::remove_file(self.path("manifests").join(file)).unwrap();
    }

    /// Problems of the manifests, one line each.
    fn problems(&self) -> Vec<String> {
        lines(&self.store.read(&Kind::ALL).unwrap().problems)
    }

    fn names(&self) -> Vec<String> {
        let snapshot = self.store.read(&Kind::ALL).unwrap();
        snapshot.objects.keys().map(ToString::to_string).collect()
    }
}

fn places(dir: &Path) -> Places {
    let (manifests, state_dir) = (Some(dir.join("manifests")), Some(dir.join("state")));
    Places { manifests, run_dir: dir.join("run"), state_dir }
}

fn lines(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

fn network(name: &str, cidr: &str) -> String {
    format!(
        "apiVersion: ipam.liqo.io/v1alpha1\nkind: Network\nmetadata:\n  name: {name}\n  \
         namespace: liqo\nspec:\n  cidr: {cidr}\n"
    )
}

fn network_ref(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::Network, "liqo", name)
}

fn cidr_of(object: &Object) -> &str {
    let Object::Network(network) = object else { panic!("{object:?}") };
    &network.spec.cidr
}

/// All events up to `Synced`.
async fn sync(watch: &mut Watch) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        match next(watch).await {
            Event::Synced => return events,
            event @ (Event::Applied(_) | Event::Deleted(_) | Event::Problems(_)) => {
                events.push(event);
            }
        }
    }
}

async fn next(watch: &mut Watch) -> Event {
    tokio::time::timeout(Duration::from_secs(3), watch.next()).await.expect("an event")
}

/// Nothing happens.
async fn quiet(watch: &mut Watch) {
    let event = tokio::time::timeout(Duration::from_millis(250), watch.next()).await;
    assert!(event.is_err(), "{event:?}");
}
