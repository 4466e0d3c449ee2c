use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::wait_until;

/// A running program of a test; killed with this value.
pub struct Program {
    child: Reaped,
    log: PathBuf,
}

impl Program {
    pub(crate) fn new(child: Child, log: PathBuf) -> Self {
        Self { child: Reaped::new(child), log }
    }

    /// Process ID as seen from outside.
    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// Output so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid()), signal).context("sending a signal")
    }

    /// Exit status, if it has ended.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child.ended()
    }

    /// Waits for its end.
    pub fn wait(&self, at_most: Duration) -> Result<ExitStatus> {
        wait_until("the program ends", at_most, || {
            self.ended().ok_or_else(|| "it still runs".to_owned())
        })
    }

    /// Signals it to stop and waits for its end.
    pub fn stop(self, at_most: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(at_most)
    }

    /// Lets it outlive this process.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended().is_none() {
            let _ = self.signal(Signal::SIGKILL);
            self.child.wait();
        }
    }
}

/// A child that a thread of its own waits for. The kernel ends a process namespace only when all
/// of it has been waited for, so that must not depend on the order in which others wait.
pub(crate) struct Reaped {
    pid: u32,
    status: Arc<OnceLock<ExitStatus>>,
}

impl Reaped {
    pub(crate) fn new(mut child: Child) -> Self {
        let (pid, status) = (child.id(), Arc::new(OnceLock::new()));
        let exit_status = Arc::clone(&status);
        std::thread::spawn(move || {
            let _ = exit_status.set(child.wait().expect("a child can be waited for once"));
        });
        Self { pid, status }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid.cast_signed()
    }

    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.status.get().copied()
    }

    pub(crate) fn wait(&self) -> ExitStatus {
        *self.status.wait()
    }
}

/// Folder of the built programs: `WEFT_BIN_DIR`, or else where this one was built.
pub fn bin_dir() -> Result<PathBuf> {
    let dir = match std::env::var_os("WEFT_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => profile_dir()?,
    };
    let missing: Vec<_> = PROGRAMS.into_iter().filter(|p| !dir.join(p).exists()).collect();
    if !missing.is_empty() {
        bail!(
            "{} has no {}; build the programs first (`cargo build`, or `cargo build --release`), or set WEFT_BIN_DIR",
            dir.display(),
            missing.join(", ")
        );
    }
    Ok(dir)
}

/// Folder of an earlier version's programs and chart, which `make previous` fills.
pub fn previous_dir() -> Result<PathBuf> {
    let dir = std::env::var_os("WEFT_PREVIOUS_DIR").map(|dir| PathBuf::from(dir).join("bin"));
    let found = dir.filter(|dir| dir.join("gateway").exists() && dir.join("deploy").exists());
    found.context("there is no earlier version; `make previous` builds it")
}

pub(crate) const PROGRAMS: [&str; 5] =
    ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];

/// `target/PROFILE`, of which test binaries are in `deps/`.
fn profile_dir() -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program")?;
    let dir = this.parent().context("this program is in no folder")?;
    let outside_deps = if dir.ends_with("deps") { dir.parent() } else { Some(dir) };
    outside_deps.map(Path::to_owned).context("this program is in the root folder")
}

/// Resident memory of a process, in bytes.
pub fn resident_bytes(pid: i32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("parsing VmRSS")?;
    Ok(kib * 1024)
}

/// Time that the hypervisor has taken from all cores together: the eighth number of `/proc/stat`'s
/// first line, in ticks of 10 ms.
pub fn stolen() -> Duration {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let steal = text.lines().next().and_then(|line| line.split_whitespace().nth(8));
    Duration::from_millis(10 * steal.and_then(|ticks| ticks.parse().ok()).unwrap_or(0))
}

/// Measures again, twice at most, what exceeds its limit by no more than the hypervisor took time meanwhile.
pub fn measured<T>(
    mut measure: impl FnMut() -> Result<T>,
    excess: impl Fn(&T) -> Duration,
) -> Result<T> {
    const TRIES: usize = 3;
    for _ in 1..TRIES {
        let before = stolen();
        let value = measure()?;
        let (over, taken) = (excess(&value), stolen() - before);
        if over.is_zero() || over > taken {
            return Ok(value);
        }
        eprintln!("once more: {over:?} too long, while the hypervisor took {taken:?}");
    }
    measure()
}
