//! Source of the node's config.
//!
//! A file may lie on another host, and a mount of that may hang. Whatever opens such a file has a
//! thread of its own, so that routes, refusals and probes never wait for it.

use std::fs::File;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use fabric_store::{ApiServer, Event, Kind, ObjectRef, Store};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, watch};

/// Time between two reads of the file, and between two checks whether they go on.
const CHECK: Duration = Duration::from_millis(500);
/// Most checks since the last read: with one more the file counts as lost, 1.5 s after that read at the latest.
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

/// Follows a NodeConfig and all records. The events end if that is not possible.
pub(crate) fn follow(store: &Store, config: ObjectRef) -> anyhow::Result<mpsc::Receiver<Event>> {
    let (events, followed) = mpsc::channel(QUEUE);
    let own = store.clone();
    let task = async move {
        match own.follow(&config, &[Kind::FabricRecord]) {
            Ok(mut watch) => while events.send(watch.next().await).await.is_ok() {},
            Err(error) => {
                tracing::error!("cannot watch the store: {}", fabric_runtime::chain(&error))
            }
        }
    };
    spawn(store, "config", task)?;
    Ok(followed)
}

/// Check that the config can still be read. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSource(Option<Watched>);

#[derive(Clone, Debug)]
struct Watched {
    lost: watch::Receiver<bool>,
    /// Thread that reads a file; an API server needs none.
    monitor: Option<Arc<Monitor>>,
}

impl ConfigSource {
    /// Checks a file until all clones are dropped. Without one, none is ever lost.
    pub(crate) fn watch(path: Option<PathBuf>) -> anyhow::Result<Self> {
        let start = |path| {
            let (sender, lost) = watch::channel(false);
            let monitor = Monitor::start(path, sender).context("cannot start a thread")?;
            anyhow::Ok(Watched { lost, monitor: Some(monitor) })
        };
        path.map(start).transpose().map(Self)
    }

    /// The config of an API server, which is lost while that cannot be reached.
    pub(crate) fn of_server(server: ApiServer) -> Self {
        Self(Some(Watched { lost: server.unreachable, monitor: None }))
    }

    /// It was there once, and is not, or opening it blocks.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.as_ref().is_some_and(|watched| *watched.lost.borrow())
    }

    /// The config has just been read, perhaps between two checks.
    pub(crate) fn handle_read(&self) {
        if let Some(monitor) = self.0.as_ref().and_then(|watched| watched.monitor.as_ref()) {
            monitor.update(Checks::handle_read);
        }
    }

    /// Returns when [`Self::is_lost`] is another.
    pub(crate) async fn changed(&mut self) {
        let Some(watched) = &mut self.0 else { return pending().await };
        if watched.lost.changed().await.is_err() {
            pending().await
        }
    }
}

/// State of one file, shared by two threads: one reads the file, the other notices that the first one
/// is stuck. Timers of the agent's runtime would wake up all of that several times a second.
#[derive(Debug)]
struct Monitor {
    checks: Mutex<Checks>,
    lost: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Checks {
    is_readable: bool,
    was_readable: bool,
    /// Number of checks since the last read. Time is not compared: while the whole host stands still,
    /// no check is due.
    late: u32,
}

impl Checks {
    fn handle_read(&mut self) {
        (self.is_readable, self.was_readable, self.late) = (true, true, 0);
    }
}

impl Monitor {
    fn start(path: PathBuf, lost: watch::Sender<bool>) -> io::Result<Arc<Self>> {
        let monitor = Arc::new(Self { checks: Mutex::default(), lost });
        let [reader, checker] = [(); 2].map(|()| Arc::clone(&monitor));
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        thread("config-read").spawn(move || reader.read_repeatedly(&path))?;
        thread("config-check").spawn(move || checker.check_repeatedly())?;
        Ok(monitor)
    }

    fn read_repeatedly(&self, path: &Path) {
        while !self.lost.is_closed() {
            let is_readable = File::open(path).is_ok();
            self.update(|checks| match is_readable {
                true => checks.handle_read(),
                false => (checks.is_readable, checks.late) = (false, 0),
            });
            thread::sleep(CHECK);
        }
    }

    fn check_repeatedly(&self) {
        while !self.lost.is_closed() {
            thread::sleep(CHECK);
            self.update(|checks| checks.late = checks.late.saturating_add(1));
        }
    }

    fn update(&self, change: impl FnOnce(&mut Checks)) {
        let mut checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut checks);
        let is_gone = checks.was_readable && !checks.is_readable;
        let is_lost = is_gone || checks.late > MAX_LATE;
        self.lost.send_if_modified(|before| std::mem::replace(before, is_lost) != is_lost);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    async fn becomes(file: &mut ConfigSource, is_lost: bool) -> Duration {
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
        let mut file = ConfigSource::watch(Some(path.clone())).unwrap();
        tokio::time::sleep(3 * CHECK).await;
        assert!(!file.is_lost());
        std::fs::rename(&path, &away).unwrap();
        becomes(&mut file, true).await;
        std::fs::rename(&away, &path).unwrap();
        becomes(&mut file, false).await;
        // A pipe without a writer blocks the process that opens it.
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

    #[tokio::test]
    async fn file_that_was_there_between_two_checks_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = ConfigSource::watch(Some(dir.path().join("n1.yaml"))).unwrap();
        tokio::time::sleep(3 * CHECK).await;
        assert!(!file.is_lost(), "there was none yet");
        file.handle_read();
        assert!(!file.is_lost());
        becomes(&mut file, true).await;
    }
}
