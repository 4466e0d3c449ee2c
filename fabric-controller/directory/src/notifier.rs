//! Notifications of changes for one watch: from the supervisor, from inotify, or by polling.
//!
//! ```text
//!              supervisor answers            it is gone
//!   start --> Supervised ----------------> Polling --> Supervised, once one answers
//!     |  no supervisor ever
//!     +----> Inotify
//!     |  no supervisor, and the kernel refuses an instance
//!     +----> Polling
//! ```

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;

use crate::folders::{Folders, Interest, RESCAN};
use crate::limits;

/// Between two looks at the stamps of files, with as much again at random.
const POLL: Duration = Duration::from_millis(700);
/// The only subscriber of its own inotify instance.
const SELF: u64 = 0;

#[derive(Debug)]
pub(crate) struct Notifier {
    /// Socket of the supervisor's [`crate::ChangeServer`].
    socket: Option<PathBuf>,
    interests: Vec<Interest>,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Supervised(UnixStream),
    Inotify(Folders),
    /// The stamps of all that matters, when last looked at.
    Polling(u64),
}

/// Outcome of [`Notifier::renew`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Renewal {
    /// Something may have changed.
    pub(crate) look: bool,
    /// Time of the next renewal.
    pub(crate) next: Duration,
}

impl Notifier {
    /// Never fails: without a supervisor and without inotify it polls.
    pub(crate) fn new(socket: Option<PathBuf>, interests: Vec<Interest>) -> Self {
        let source = match socket.as_deref().filter(|socket| socket.exists()) {
            Some(socket) => connect(socket, &interests)
                .map_or_else(|_| Source::Polling(stamps(&interests)), Source::Supervised),
            None => inotify(&interests),
        };
        Self { socket, interests, source }
    }

    /// Replaces the interests. Returns when to renew, or nothing if they are the same.
    pub(crate) fn choose(&mut self, interests: Vec<Interest>) -> Option<Duration> {
        if self.interests == interests {
            return None;
        }
        self.interests = interests;
        match &mut self.source {
            Source::Supervised(stream) if send(stream, &self.interests).is_ok() => Some(RESCAN),
            Source::Inotify(folders) => {
                folders.choose(SELF, self.interests.clone());
                Some(folders.listen().1)
            }
            Source::Supervised(_) | Source::Polling(_) => {
                self.source = Source::Polling(stamps(&self.interests));
                Some(POLL)
            }
        }
    }

    /// Returns after a change. Can be cancelled without losing one.
    pub(crate) async fn changed(&mut self) {
        match &mut self.source {
            Source::Inotify(folders) => drop(folders.changed().await),
            Source::Polling(_) => std::future::pending().await,
            Source::Supervised(stream) => {
                if !notified(stream).await {
                    tracing::debug!("no supervisor: looking for changes once a second");
                    self.source = Source::Polling(stamps(&self.interests));
                }
            }
        }
    }

    /// Discards pending notifications before everything is read. True if a folder was lost, so
    /// that [`Self::renew`] is due soon.
    pub(crate) fn drain(&mut self) -> bool {
        match &mut self.source {
            Source::Inotify(folders) => {
                folders.drain();
                folders.take_lost()
            }
            // An end of the stream is left for `changed`.
            Source::Supervised(_) => false,
            Source::Polling(seen) => {
                *seen = stamps(&self.interests);
                true
            }
        }
    }

    pub(crate) fn renew(&mut self) -> Renewal {
        match &mut self.source {
            Source::Supervised(_) => Renewal { look: true, next: RESCAN },
            Source::Inotify(folders) => Renewal { look: true, next: folders.listen().1 },
            Source::Polling(seen) => {
                let now = stamps(&self.interests);
                let look = std::mem::replace(seen, now) != now;
                let socket = self.socket.as_deref();
                match socket.and_then(|socket| connect(socket, &self.interests).ok()) {
                    Some(stream) => {
                        self.source = Source::Supervised(stream);
                        Renewal { look: true, next: RESCAN }
                    }
                    None => Renewal { look, next: POLL + POLL.mul_f32(fastrand::f32()) },
                }
            }
        }
    }
}

/// The program's own inotify instance.
fn inotify(interests: &[Interest]) -> Source {
    match Folders::new() {
        Ok(mut folders) => {
            folders.choose(SELF, interests.to_vec());
            Source::Inotify(folders)
        }
        Err(error) => {
            let limit = limits::inotify_instance(error.raw_os_error());
            let why = limit.unwrap_or_else(|| format!("inotify does not work: {error}"));
            tracing::warn!("{why}; looking for changes once a second instead");
            Source::Polling(stamps(interests))
        }
    }
}

/// A listening server is connected to at once, whether it is busy or not.
fn connect(socket: &Path, interests: &[Interest]) -> io::Result<UnixStream> {
    let stream = StdUnixStream::connect(socket)?;
    stream.set_nonblocking(true)?;
    (&stream).write_all(&line(interests)?)?;
    UnixStream::from_std(stream)
}

fn send(stream: &UnixStream, interests: &[Interest]) -> io::Result<()> {
    let line = line(interests)?;
    if stream.try_write(&line)? == line.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

fn line(interests: &[Interest]) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(interests)?;
    line.push(b'\n');
    Ok(line)
}

/// False once the supervisor is gone.
async fn notified(stream: &UnixStream) -> bool {
    let mut bytes = [0; 64];
    loop {
        if stream.readable().await.is_err() {
            return false;
        }
        match stream.try_read(&mut bytes) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
}

/// Changes with every file that matters.
fn stamps(interests: &[Interest]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in interests.iter().flat_map(Interest::paths) {
        let stamp = fs::metadata(&path).ok();
        let stamp = stamp.map(|m| (m.ino(), m.size(), m.ctime(), m.ctime_nsec()));
        (path, stamp).hash(&mut hasher);
    }
    hasher.finish()
}
