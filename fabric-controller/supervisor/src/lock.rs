//! Locks of a run directory and of a state directory, held by their one supervisor.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::rundir::RunDir;

/// Held for as long as a supervisor runs.
#[derive(Debug)]
pub struct Lock {
    file: File,
    command: String,
    /// Number of times in a row that another process had it when it was to be restored.
    denials: u32,
}

/// Holder of a lock.
#[derive(Debug, thiserror::Error)]
#[error(
    "{command} (pid {pid}) is at work in {dir} already; stop it first (`kill {pid}`, or `weft down \
     --run-dir {dir}`)"
)]
pub struct Held {
    pub command: String,
    pub pid: i32,
    dir: String,
}

/// Time for which a lock may be held by a process that only looks at it, or by a supervisor that
/// was killed and has not exited yet.
const GOES_AWAY: Duration = Duration::from_secs(1);
const ATTEMPTS: usize = 200;
/// Same for a lock that is to be restored, in attempts.
const MAX_DENIALS: u32 = 3;

/// Takes the lock of a run directory that exists, as `command`.
pub fn lock(dir: &RunDir, command: &str) -> anyhow::Result<Lock> {
    let give_up = Instant::now() + GOES_AWAY;
    for _ in 0..ATTEMPTS {
        match attempt(dir, command)? {
            Attempt::Locked(lock) => return Ok(lock),
            Attempt::Held(held) if Instant::now() >= give_up => return Err(held.into()),
            Attempt::Held(_) => std::thread::sleep(Duration::from_millis(10)),
            Attempt::Replaced => {}
        }
    }
    let path = dir.lock_file();
    bail!("{} is made and removed again and again; is `weft down` at work?", path.display())
}

/// Takes the lock of a state directory, which one with another run directory may use, such as in another network
/// namespace. Makes it if it is not there; one that is may be read-only.
pub fn lock_state(state: &Path) -> anyhow::Result<File> {
    let opened = std::fs::create_dir_all(state).and_then(|()| File::open(state));
    let dir = opened.with_context(|| format!("cannot open {}", state.display()))?;
    let give_up = Instant::now() + GOES_AWAY;
    loop {
        match dir.try_lock() {
            Ok(()) => return Ok(dir),
            Err(TryLockError::WouldBlock) if Instant::now() >= give_up => bail!(
                "another `weft up` keeps its prefixes and keys in {} already; give each its own \
                 (`--state-dir DIR`), or stop that one first",
                state.display()
            ),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", state.display()));
            }
        }
    }
}

enum Attempt {
    Locked(Lock),
    Held(Held),
    /// `weft down` may have removed the file between opening and locking.
    Replaced,
}

/// Takes the lock unless another process has it. Never waits.
fn attempt(dir: &RunDir, command: &str) -> anyhow::Result<Attempt> {
    let path = dir.lock_file();
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o644);
    let opened = options.open(&path);
    let mut file = opened.with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) if is_at(&file, &path) => {
            let held = Lock::held(file, command);
            Ok(Attempt::Locked(held.with_context(|| format!("cannot write {}", path.display()))?))
        }
        Ok(()) => Ok(Attempt::Replaced),
        Err(TryLockError::WouldBlock) => Ok(Attempt::Held(holder(dir, &mut file))),
        Err(TryLockError::Error(error)) => {
            Err(anyhow::Error::new(error).context(format!("cannot lock {}", path.display())))
        }
    }
}

impl Lock {
    /// Writes the holder into the file that was locked.
    fn held(mut file: File, command: &str) -> io::Result<Self> {
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}\n{command}\n", std::process::id())?;
        Ok(Self { file, command: command.to_owned(), denials: 0 })
    }

    /// Takes the lock again if its file was removed or replaced; returns whether it did. If another process
    /// has it, a later call succeeds; the third in a row that does not is an error.
    pub fn restore(&mut self, dir: &RunDir) -> anyhow::Result<bool> {
        if is_at(&self.file, &dir.lock_file()) {
            return Ok(false);
        }
        match attempt(dir, &self.command)? {
            Attempt::Locked(lock) => {
                *self = lock;
                Ok(true)
            }
            Attempt::Held(held) => {
                self.denials = self.denials.saturating_add(1);
                if self.denials == MAX_DENIALS { Err(held.into()) } else { Ok(false) }
            }
            Attempt::Replaced => Ok(false),
        }
    }
}

/// True if the open file is the one of that path.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let there = std::fs::metadata(path).map(inode);
    there.is_ok_and(|there| file.metadata().is_ok_and(|own| inode(own) == there))
}

/// Returns the supervisor of a run directory, if there is one.
pub fn supervisor_of(dir: &RunDir) -> Option<Held> {
    let mut file = File::open(dir.lock_file()).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(holder(dir, &mut file)),
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}

fn holder(dir: &RunDir, file: &mut File) -> Held {
    let mut text = String::new();
    drop(file.read_to_string(&mut text));
    let mut lines = text.lines();
    let pid = lines.next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
    let command = lines.next().unwrap_or("another weft").to_owned();
    Held { command, pid, dir: dir.path().display().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_that_another_has_is_restored_without_waiting() {
        let place = std::env::temp_dir().join(format!("weft-lock-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let dir = RunDir::at(&place).unwrap();
        let mut lock = lock(&dir, "weft up").unwrap();
        std::fs::remove_file(dir.lock_file()).unwrap();
        let other = File::create(dir.lock_file()).unwrap();
        other.try_lock().unwrap();
        let began = Instant::now();
        assert_eq!([(); 2].map(|()| lock.restore(&dir).unwrap()), [false; 2]);
        lock.restore(&dir).unwrap_err();
        assert!(!lock.restore(&dir).unwrap(), "reported once");
        assert!(began.elapsed() < GOES_AWAY / 2, "{:?}", began.elapsed());
        drop(other);
        assert!(lock.restore(&dir).unwrap());
        assert!(supervisor_of(&dir).is_some_and(|held| held.command == "weft up"));
        std::fs::remove_dir_all(place).unwrap();
    }
}
