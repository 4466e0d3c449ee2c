//! Source of the node's config.
//!
//! A file may lie on another host, and a mount of that may hang. Whatever opens such a file has a
//! thread of its own, so that routes, refusals and probes never wait for it.

use std::fs::File;
use std::future::pending;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use fabric_store::{Event, ObjectRef, Store};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

/// Between two checks of the file.
const CHECK: Duration = Duration::from_millis(500);
/// Checks in a row that find the one before still under way, after which the file counts as lost.
const MAX_LATE: u32 = 2;
/// Events that wait for the agent.
const QUEUE: usize = 16;

/// Runs a task that reads or writes the store: beside all others, or if it opens files, apart.
pub(crate) fn spawn(
    store: &Store,
    name: &str,
    task: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    if store.api_server().is_some() {
        tokio::spawn(task);
        return Ok(());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(move || runtime.block_on(task)).context("cannot start a thread")?;
    Ok(())
}

/// Follows one object. The events end if that is not possible.
pub(crate) fn follow(store: &Store, object: ObjectRef) -> anyhow::Result<mpsc::Receiver<Event>> {
    let (events, followed) = mpsc::channel(QUEUE);
    let own = store.clone();
    let task = async move {
        match own.follow(&object, &[]) {
            Ok(mut watch) => while events.send(watch.next().await).await.is_ok() {},
            Err(error) => {
                tracing::error!("cannot watch the store: {}", crate::agent::chain(&error))
            }
        }
    };
    spawn(store, "config", task)?;
    Ok(followed)
}

/// Check that the config can still be read. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ConfigFile(Option<watch::Receiver<bool>>);

impl ConfigFile {
    /// Checks a file until all clones are dropped. Without one, as in Kubernetes, none is ever lost.
    pub(crate) fn watch(path: Option<PathBuf>) -> Self {
        Self(path.map(|path| {
            let (lost, watched) = watch::channel(false);
            tokio::spawn(check(path, lost));
            watched
        }))
    }

    /// It was there once, and is not, or whoever opens it waits.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.as_ref().is_some_and(|lost| *lost.borrow())
    }

    /// Returns when [`Self::is_lost`] is another.
    pub(crate) async fn changed(&mut self) {
        let Some(lost) = &mut self.0 else { return pending().await };
        if lost.changed().await.is_err() {
            pending().await
        }
    }
}

async fn check(path: PathBuf, lost: watch::Sender<bool>) {
    let mut ticks = interval(CHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut checks =
        Checks { path, running: None, late: 0, is_readable: false, was_readable: false };
    while !lost.is_closed() {
        ticks.tick().await;
        let is_lost = checks.next();
        lost.send_if_modified(|before| std::mem::replace(before, is_lost) != is_lost);
    }
}

/// Checks of a file, one at a time.
struct Checks {
    path: PathBuf,
    running: Option<thread::JoinHandle<bool>>,
    /// Number of checks that were due since the running one began.
    late: u32,
    is_readable: bool,
    was_readable: bool,
}

impl Checks {
    /// Begins a check unless one is running; returns whether the file is lost by what is known now. Time
    /// is not compared: while the whole host stands still, no check is due.
    fn next(&mut self) -> bool {
        match self.running.take() {
            Some(running) if !running.is_finished() => {
                self.late += 1;
                self.running = Some(running);
            }
            finished => {
                self.is_readable = finished.is_some_and(|check| check.join().is_ok_and(|ok| ok));
                self.was_readable |= self.is_readable;
                self.late = 0;
                let path = self.path.clone();
                let check = thread::Builder::new().name("check".to_owned());
                self.running = check.spawn(move || File::open(path).is_ok()).ok();
            }
        }
        self.late >= MAX_LATE || (self.was_readable && !self.is_readable)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    async fn becomes(file: &mut ConfigFile, is_lost: bool) -> Duration {
        let start = std::time::Instant::now();
        while file.is_lost() != is_lost {
            tokio::time::timeout(Duration::from_secs(5), file.changed()).await.unwrap();
        }
        start.elapsed()
    }

    #[tokio::test]
    async fn file_that_hangs_is_lost_until_it_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("n1.yaml"), dir.path().join("away"));
        std::fs::write(&path, "").unwrap();
        let mut file = ConfigFile::watch(Some(path.clone()));
        tokio::time::sleep(3 * CHECK).await;
        assert!(!file.is_lost());
        std::fs::rename(&path, &away).unwrap();
        becomes(&mut file, true).await;
        std::fs::rename(&away, &path).unwrap();
        becomes(&mut file, false).await;
        // A pipe without a writer blocks whoever opens it.
        mkfifo(&away, Mode::S_IRWXU).unwrap();
        std::fs::rename(&away, &path).unwrap();
        let took = becomes(&mut file, true).await;
        assert!(took < Duration::from_secs(2), "{took:?}");
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        std::fs::write(&away, "").unwrap();
        std::fs::rename(&away, &path).unwrap();
        becomes(&mut file, false).await;
        drop(writer);
    }
}
