//! One supervised process: started, found again, watched, stopped.
//!
//! It runs in its own session and is identified by its pid *and* the time it started, so that a
//! pid used again is never taken for it. Signals go through a pidfd, for the same reason.

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::bail;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::messages::say;
use super::rundir::{RunDir, replace};

/// Set in a process's environment, so that it can be found even without its pid file.
pub const MARK: &str = "WEFT_PROCESS";
/// Variables that the store's options read; a child gets them as arguments or not at all.
const NOT_INHERITED: [&str; 5] =
    ["WEFT_MANIFESTS", "WEFT_RUN_DIR", "WEFT_STATE_DIR", "WEFT_CLUSTER", "WEFT_KUBERNETES"];

/// Program to run, with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub program: PathBuf,
    /// Arguments that define its task.
    pub args: Vec<OsString>,
    /// Arguments for its logging, which come last on the command line.
    pub log_args: Vec<OsString>,
    pub role: Role,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// ipam or the controller: traffic does not need it.
    Control,
    /// The route-agent: its kernel state stays when it stops.
    Agent,
    /// Traffic stops with it.
    Gateway { namespace: String, name: String },
}

/// One process among all that ever ran since the host booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22).
    start: u64,
    boot: String,
}

/// Content of a pid file: the pid alone on the first line, the rest on the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PidFile {
    pub identity: Identity,
    /// Build of the program it runs.
    build: String,
}

#[derive(Debug)]
pub struct Process {
    pub identity: Identity,
    build: String,
    pub pidfd: OwnedFd,
    /// Absent for an adopted one, which init reaps.
    child: Option<Child>,
    pub since: Instant,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot open its log {}", path.display())]
    Log { path: PathBuf, source: io::Error },
    #[error("cannot run {}; expected it next to weft itself", program.display())]
    Run { program: PathBuf, source: io::Error },
    #[error("cannot watch it")]
    Watch { source: io::Error },
}

impl Identity {
    /// `None` if there is no such process, or only its corpse.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name, in parentheses, may hold anything, even parentheses.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        if matches!(state, "Z" | "X") {
            return None;
        }
        let start = fields.nth(18)?.parse().ok()?;
        Some(Self { pid, start, boot: boot_id() })
    }

    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// A handle on the process, if it still is the same one.
    pub fn open(&self) -> Option<OwnedFd> {
        let pidfd = pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        self.is_alive().then_some(pidfd)
    }

    fn command_line(&self) -> Vec<OsString> {
        use std::os::unix::ffi::OsStringExt as _;
        let bytes = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
        bytes.split(|&byte| byte == 0).map(|arg| OsString::from_vec(arg.to_vec())).collect()
    }
}

impl PidFile {
    pub fn read(path: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let pid = lines.next()?.trim().parse().ok()?;
        let mut rest = lines.next()?.split_ascii_whitespace();
        let mut value = |key: &str| Some(rest.next()?.strip_prefix(key)?.to_owned());
        let start = value("start=")?.parse().ok()?;
        let boot = value("boot=")?;
        let build = value("build=")?;
        Some(Self { identity: Identity { pid, start, boot }, build })
    }

    fn text(&self) -> String {
        let Identity { pid, start, boot } = &self.identity;
        format!("{pid}\nstart={start} boot={boot} build={}\n", self.build)
    }
}

impl Spec {
    /// True if a running process matches this. A gateway, which carries traffic, still matches at
    /// another place of the program or another log level.
    fn is_run_by(&self, identity: &Identity) -> bool {
        let line = identity.command_line();
        let mut wanted: Vec<&OsStr> = self.args.iter().map(AsRef::as_ref).collect();
        if matches!(self.role, Role::Gateway { .. }) {
            return line.windows(wanted.len()).any(|part| part == wanted);
        }
        wanted.insert(0, self.program.as_os_str());
        wanted.extend(self.log_args.iter().map(OsString::as_os_str));
        // A script runs with its interpreter in front.
        line.ends_with(&wanted.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
    }

    /// Identifies the build of the program.
    fn build(&self) -> String {
        fs::metadata(&self.program)
            .map(|meta| format!("{}-{}-{}", meta.ino(), meta.mtime(), meta.size()))
            .unwrap_or_else(|_| "unknown".to_owned())
    }
}

impl Process {
    /// Starts it in its own session, with its output in its log.
    pub fn start(name: &str, spec: &Spec, dir: &RunDir) -> Result<Self, StartError> {
        let path = dir.log_file(name);
        let log = OpenOptions::new().create(true).append(true).mode(0o640).open(&path);
        let log_error = |source| StartError::Log { path: path.clone(), source };
        let log = log.map_err(log_error)?;
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.args)
            .args(&spec.log_args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(log_error)?)
            .stderr(log)
            .current_dir("/")
            .env(MARK, dir.path())
            // Logs are files.
            .env("NO_COLOR", "1");
        for key in NOT_INHERITED {
            command.env_remove(key);
        }
        #[allow(unsafe_code)]
        // SAFETY: between fork and exec only setsid(2) is called, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into));
        }
        let child = command
            .spawn()
            .map_err(|source| StartError::Run { program: spec.program.clone(), source })?;
        Self::of_child(child, name, spec, dir)
    }

    fn of_child(
        mut child: Child,
        name: &str,
        spec: &Spec,
        dir: &RunDir,
    ) -> Result<Self, StartError> {
        let watched = watch_child(&child).map(|(pidfd, identity)| {
            let path = dir.pid_file(name);
            let file = PidFile { identity, build: spec.build() };
            // On a full disk a process without one is better than none; it is written again later.
            if let Err(error) = replace(&path, file.text().as_bytes()) {
                say(&format!("cannot write {}: {error}", path.display()));
            }
            (pidfd, file)
        });
        match watched {
            Ok((pidfd, PidFile { identity, build })) => {
                Ok(Self { identity, build, pidfd, child: Some(child), since: Instant::now() })
            }
            Err(error) => {
                // A process that cannot be watched must not run on unseen.
                drop(child.kill());
                drop(child.wait());
                Err(error)
            }
        }
    }

    /// The process that an earlier supervisor left, if it matches `spec`. One that does not is
    /// stopped first.
    pub fn adopt(name: &str, spec: &Spec, dir: &RunDir) -> Option<(Self, Freshness)> {
        let file = PidFile::read(&dir.pid_file(name))?;
        let pidfd = file.identity.open()?;
        let is_current = file.build == spec.build();
        // A gateway of an older build still carries traffic: only the user decides when to cut it.
        let keep = is_current || matches!(spec.role, Role::Gateway { .. });
        if !keep || !spec.is_run_by(&file.identity) {
            stop_and_wait(&pidfd, Duration::from_secs(5));
            return None;
        }
        let freshness = if is_current { Freshness::Current } else { Freshness::OlderBuild };
        let PidFile { identity, build } = file;
        let process = Self { identity, build, pidfd, child: None, since: Instant::now() };
        Some((process, freshness))
    }

    /// Writes its pid file again if that is damaged: nothing else shows that it runs.
    pub fn restore_pid_file(&self, path: &Path) {
        let PidFile { identity, build } = match PidFile::read(path) {
            Some(file) if file.identity == self.identity => return,
            Some(_) | None => {
                PidFile { identity: self.identity.clone(), build: self.build.clone() }
            }
        };
        let _ = fs::remove_dir(path);
        if replace(path, PidFile { identity, build }.text().as_bytes()).is_ok() {
            say(&format!("{} was missing or damaged: written again", path.display()));
        }
    }

    /// Returns the way it ended; to be called only once its pidfd reports the end.
    pub fn exit_reason(&mut self) -> String {
        match self.child.as_mut().map(Child::wait) {
            Some(Ok(status)) => status.to_string(),
            Some(Err(_)) | None => {
                "its exit status is not known: an earlier supervisor had started it".to_owned()
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        send(&self.pidfd, signal);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    Current,
    OlderBuild,
}

/// The processes of a run directory that run, by name, according to its pid files.
pub fn running(dir: &RunDir) -> Vec<(String, Identity)> {
    let Ok(entries) = fs::read_dir(dir.pids()) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.strip_suffix(".pid")?.to_owned();
            let identity = PidFile::read(&path)?.identity;
            identity.is_alive().then_some((name, identity))
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// Processes that carry the mark of a run directory but no pid file: a supervisor was killed
/// between starting one and writing that down. Another mount namespace may have a fabric of its own
/// at the same path.
pub fn strays(dir: &RunDir) -> Vec<Identity> {
    let known: Vec<_> = running(dir).into_iter().map(|(_, identity)| identity.pid).collect();
    let mark = format!("{MARK}={}", dir.path().display());
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| !known.contains(pid) && *pid != std::process::id().cast_signed())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|entry| entry == mark.as_bytes())
        })
        .filter(|pid| is_seen_alike(*pid, dir.path()))
        .filter_map(Identity::of)
        .collect()
}

/// Returns true if a path leads a process to the same place as this one, as far as it exists.
pub fn is_seen_alike(pid: i32, path: &Path) -> bool {
    let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let mut known = path.ancestors().filter_map(|path| Some((path, place(path).ok()?)));
    known.next().is_some_and(|(path, own)| {
        let theirs = Path::new("/proc").join(pid.to_string()).join("root");
        place(&theirs.join(path.strip_prefix("/").unwrap_or(path))).is_ok_and(|it| it == own)
    })
}

/// Processes of this network namespace, but for this one.
pub fn neighbours() -> impl Iterator<Item = i32> {
    let own = fs::read_link("/proc/self/ns/net").ok();
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(move |pid| {
        *pid != std::process::id().cast_signed()
            && fs::read_link(format!("/proc/{pid}/ns/net")).ok() == own
    })
}

/// Run directory that a process was started from.
pub fn marked(pid: i32) -> Option<PathBuf> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mut entries = environment.split(|&byte| byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="));
    Some(PathBuf::from(std::str::from_utf8(value?).ok()?))
}

/// Fails if another fabric runs in this network namespace: both would take the same devices, table
/// and nft tables from each other.
pub fn check_alone(own: &RunDir) -> anyhow::Result<()> {
    let mut others = neighbours().filter_map(marked).filter(|dir| dir != own.path());
    match others.next() {
        None => Ok(()),
        Some(other) => bail!(
            "another fabric runs on this host, of run directory {}; expected one a network \
             namespace: end it with `weft down --run-dir {0}`, or add the peering to its manifests",
            other.display()
        ),
    }
}

/// Only a process that is gone cannot be signalled, which is what every signal of ours is for.
pub fn send(pidfd: &OwnedFd, signal: Signal) {
    let _gone = pidfd_send_signal(pidfd, signal);
}

/// SIGTERM, and SIGKILL if that does not do it in time. True if SIGTERM did.
pub fn stop_and_wait(pidfd: &OwnedFd, grace: Duration) -> bool {
    send(pidfd, Signal::TERM);
    if ended(pidfd, grace) {
        return true;
    }
    send(pidfd, Signal::KILL);
    ended(pidfd, Duration::from_secs(5));
    false
}

/// Waits for the end of a process; false if it did not come in time.
pub fn ended(pidfd: &OwnedFd, within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

fn watch_child(child: &Child) -> Result<(OwnedFd, Identity), StartError> {
    let pid = child.id().cast_signed();
    let open = || {
        let raw = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        Ok(pidfd_open(raw, PidfdFlags::empty())?)
    };
    let pidfd = open().map_err(|source| StartError::Watch { source })?;
    // A child of ours, so the pid is its own even if it has ended by now.
    let identity = Identity::of(pid).unwrap_or_else(|| Identity { pid, start: 0, boot: boot_id() });
    Ok((pidfd, identity))
}

/// Changes with every boot, and with it the meaning of pids.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_round_trips_and_half_a_one_is_none() {
        let identity = Identity { pid: 7, start: 99, boot: "b-1".to_owned() };
        let file = PidFile { identity, build: "1-2-3".to_owned() };
        assert_eq!(PidFile::parse(&file.text()), Some(file.clone()));
        assert_eq!(file.text().lines().next(), Some("7"));
        assert_eq!(PidFile::parse("7\n"), None);
        assert_eq!(PidFile::parse("7\nstart=1 boot=b"), None);
    }

    #[test]
    fn a_pid_used_again_is_another_process() {
        let me = Identity::of(std::process::id().cast_signed()).unwrap();
        assert!(me.is_alive() && me.open().is_some());
        let earlier = Identity { start: me.start - 1, ..me.clone() };
        assert!(!earlier.is_alive() && earlier.open().is_none());
        let last_boot = Identity { boot: "another".to_owned(), ..me };
        assert!(!last_boot.is_alive());
    }
}
