//! Lock of a run directory, held by its one supervisor.

use std::fs::{File, OpenOptions};
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
}

/// Holder of a lock.
#[derive(Debug, thiserror::Error)]
#[error(
    "{command} (pid {pid}) is at work in {dir} already; stop it first (kill {pid}, or weft down)"
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

/// Takes the lock of a run directory that exists, as `command`.
pub fn lock(dir: &RunDir, command: &str) -> anyhow::Result<Lock> {
    let path = dir.lock_file();
    let give_up = Instant::now() + GOES_AWAY;
    for _ in 0..ATTEMPTS {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                if Instant::now() >= give_up {
                    return Err(holder(dir, &mut file).into());
                }
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            Err(std::fs::TryLockError::Error(error)) => {
                let error = anyhow::Error::new(error);
                return Err(error.context(format!("cannot lock {}", path.display())));
            }
        }
        // `weft down` may have removed the file between opening and locking.
        if is_at(&file, &path) {
            return Ok(Lock::held(file, command)?);
        }
    }
    bail!("{} is made and removed again and again; is `weft down` at work?", path.display())
}

impl Lock {
    /// Writes the holder into the file that was locked.
    fn held(mut file: File, command: &str) -> io::Result<Self> {
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}\n{command}\n", std::process::id())?;
        Ok(Self { file, command: command.to_owned() })
    }

    /// Takes the lock again if its file was removed or replaced; returns whether it was.
    pub fn restore(&mut self, dir: &RunDir) -> anyhow::Result<bool> {
        if is_at(&self.file, &dir.lock_file()) {
            return Ok(false);
        }
        *self = lock(dir, &self.command)?;
        Ok(true)
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
        Err(std::fs::TryLockError::WouldBlock) => Some(holder(dir, &mut file)),
        Ok(()) | Err(std::fs::TryLockError::Error(_)) => None,
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
