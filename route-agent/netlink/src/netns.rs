use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};

/// A network namespace, held by a file descriptor: without a name it lives exactly as long as its
/// last holder, whatever ends that.
#[derive(Clone, Debug)]
pub struct Netns {
    file: Arc<File>,
}

#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    #[error("cannot open network namespace {path}")]
    Open { path: String, source: io::Error },
    #[error("cannot make a network namespace (CAP_SYS_ADMIN is needed)")]
    Make(#[source] io::Error),
    #[error("cannot enter the network namespace (CAP_SYS_ADMIN is needed)")]
    Enter(#[source] io::Error),
    #[error("cannot start a thread for the network namespace")]
    Thread(#[source] io::Error),
}

const OWN: &str = "/proc/thread-self/ns/net";

impl Netns {
    /// The calling thread's.
    pub fn current() -> Result<Self, NetnsError> {
        Self::at(Path::new(OWN))
    }

    /// A new one without a name and with nothing but a `lo` that is down.
    pub fn unnamed() -> Result<Self, NetnsError> {
        on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|e| NetnsError::Make(e.into()))?;
            Self::current()
        })?
    }

    /// The one that a file stands for, such as /run/netns/NAME or /proc/PID/ns/net.
    pub fn at(path: &Path) -> Result<Self, NetnsError> {
        let file = File::open(path)
            .map_err(|source| NetnsError::Open { path: path.display().to_string(), source })?;
        Ok(Self { file: Arc::new(file) })
    }

    /// Does `work` inside, on a thread of its own, and waits for it. File descriptors that it
    /// opens there keep belonging to the namespace wherever they are used.
    ///
    /// On a thread that is inside already, `work` is done right there, which needs no rights.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        if self.is_current() {
            return Ok(work());
        }
        on_own_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|e| NetnsError::Enter(e.into()))?;
            Ok(work())
        })?
    }

    /// True if the calling thread is inside.
    pub fn is_current(&self) -> bool {
        let id = |m: std::fs::Metadata| (m.dev(), m.ino());
        match (self.file.metadata(), std::fs::metadata(OWN)) {
            (Ok(this), Ok(own)) => id(this) == id(own),
            (Err(_), _) | (_, Err(_)) => false,
        }
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A thread that has changed its namespace is not given back: it ends with its work.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, work)
            .map_err(NetnsError::Thread)?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
