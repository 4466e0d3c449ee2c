//! Common part of `weft up` and `weft agent`: one supervisor a run directory, its loop, its end.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::health::{self, Reports};
use super::logs;
use super::output::say;
use super::process::Role;
use super::rundir::RunDir;
use super::supervisor::{Ended, Report, Supervisor};
use super::workloads::Wanted;

/// Held for as long as a supervisor runs.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Holder of a lock.
#[derive(Debug, thiserror::Error)]
#[error(
    "{command} (pid {pid}) is at work in {dir} already; stop it first (kill {pid}, or weft down)"
)]
pub(crate) struct Held {
    pub(crate) command: String,
    pub(crate) pid: i32,
    dir: String,
}

/// Corrects what is published of gateways that cannot be carrying traffic.
pub(crate) trait OnSilence {
    /// `gateways` by namespace and name; not empty.
    async fn silent(&mut self, gateways: &BTreeSet<(String, String)>);
}

/// Time for which a lock may be held by a process that only looks at it, or by a supervisor that
/// was killed and has not exited yet.
const GOES_AWAY: Duration = Duration::from_secs(1);
const ATTEMPTS: usize = 200;

/// Checks, one a second, that find the run directory incomplete before it counts as lost: a user who
/// removes it may run `weft down` next.
const MAX_INCOMPLETE: u32 = 3;

/// Takes the lock of a run directory that exists, as `command`.
pub(crate) fn lock(dir: &RunDir, command: &str) -> anyhow::Result<Lock> {
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
        let same =
            |there: std::fs::Metadata| Ok::<_, io::Error>(there.ino() == file.metadata()?.ino());
        if std::fs::metadata(&path).and_then(same).unwrap_or(false) {
            file.set_len(0)?;
            file.rewind()?;
            write!(file, "{}\n{command}\n", std::process::id())?;
            return Ok(Lock { _file: file });
        }
    }
    bail!("{} is made and removed again and again; is `weft down` at work?", path.display())
}

/// Returns the supervisor of a run directory, if there is one.
pub(crate) fn supervisor_of(dir: &RunDir) -> Option<Held> {
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

/// The signals that end a supervisor: SIGTERM, Ctrl-C, and its terminal going away.
#[derive(Debug)]
pub(crate) struct StopSignals([Signal; 3]);

impl StopSignals {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self([
            on(SignalKind::terminate())?,
            on(SignalKind::interrupt())?,
            on(SignalKind::hangup())?,
        ]))
    }

    async fn next(&mut self) {
        let [term, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Inputs and outputs of the loop.
#[derive(Debug)]
pub(crate) struct Loop<S> {
    pub(crate) dir: RunDir,
    pub(crate) wanted: watch::Receiver<Wanted>,
    pub(crate) reports: watch::Sender<Reports>,
    pub(crate) on_silence: S,
    pub(crate) stop: StopSignals,
}

/// End of a supervisor's loop.
#[derive(Debug)]
pub(crate) enum End {
    /// Stopped by a signal. Has the names of the processes that run on.
    Stopped(Vec<String>),
    /// Something has removed the run directory, or a part of it.
    RunDirLost,
}

/// Begins anew, as the same process: makes the run directory again and starts in it whatever runs
/// without one, since sockets, pid files and what was published went with it. Returns on failure only.
pub(crate) fn start_anew(dir: &RunDir) -> anyhow::Error {
    say(&format!(
        "{} is not complete any more: making it again and restarting all processes",
        dir.path().display()
    ));
    let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let error = Command::new(program).args(std::env::args_os().skip(1)).exec();
    anyhow::Error::new(error).context("cannot start anew")
}

impl<S: OnSilence> Loop<S> {
    /// Runs until a signal comes or the run directory is lost.
    pub(crate) async fn run(mut self) -> End {
        let (mut supervisor, mut ended) = Supervisor::new(self.dir.clone());
        let (silent_to, mut silent) = watch::channel(BTreeSet::new());
        tokio::spawn(health::watch_gateways(self.reports.subscribe(), silent_to));
        let (mut known_silent, mut incomplete) = (BTreeSet::new(), 0);
        let mut housekeeping = interval(Duration::from_secs(1));
        housekeeping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let first = self.wanted.borrow_and_update().clone();
        supervisor.want(first);
        say("running; `weft status` shows the peerings, Ctrl-C stops");
        loop {
            self.reports.send_replace(supervisor.reports());
            let deadline = supervisor.deadline().unwrap_or_else(far);
            tokio::select! {
                // Who stops everything at one blow does not want what has ended to start again.
                biased;
                () = self.stop.next() => break,
                Ok(()) = self.wanted.changed() => {
                    let wanted = self.wanted.borrow_and_update().clone();
                    supervisor.want(wanted);
                }
                Some(end) = ended.recv() => self.ended(&mut supervisor, &end).await,
                () = sleep_until(deadline.into()) => supervisor.tick(),
                _ = housekeeping.tick() => {
                    incomplete = if self.dir.is_complete() { 0 } else { incomplete + 1 };
                    if incomplete == MAX_INCOMPLETE {
                        return End::RunDirLost;
                    }
                    logs::bound(&self.dir);
                    self.mark_dead(&supervisor.reports()).await;
                }
                Ok(()) = silent.changed() => {
                    let silent = silent.borrow_and_update().clone();
                    for name in silent.difference(&known_silent) {
                        say(&format!("{name} runs but does not answer; `weft logs {name}` may say why"));
                    }
                    self.mark_silent(&silent).await;
                    known_silent = silent;
                }
            }
        }
        let kept = supervisor.stop_controls();
        drain(supervisor, ended).await;
        End::Stopped(kept)
    }

    /// Corrects its status before its successor starts, which then writes the true one.
    async fn ended(&mut self, supervisor: &mut Supervisor, end: &Ended) {
        supervisor.ended(end);
        self.mark_dead(&supervisor.reports()).await;
        supervisor.tick();
    }

    async fn mark_dead(&mut self, reports: &Reports) {
        let dead = reports.values().filter(|report| report.pid.is_none());
        self.mark(gateways(dead)).await;
    }

    async fn mark(&mut self, gateways: BTreeSet<(String, String)>) {
        if !gateways.is_empty() {
            self.on_silence.silent(&gateways).await;
        }
    }

    /// Not more often than they are found so: one that is merely slow writes its Connection again.
    async fn mark_silent(&mut self, silent: &BTreeSet<String>) {
        let reports = self.reports.borrow().clone();
        self.mark(gateways(silent.iter().filter_map(|name| reports.get(name)))).await;
    }
}

/// Gateways among reports, by namespace and name.
fn gateways<'a>(reports: impl Iterator<Item = &'a Report>) -> BTreeSet<(String, String)> {
    let gateway = |report: &Report| match &report.role {
        Role::Gateway { namespace, name } => Some((namespace.clone(), name.clone())),
        Role::Control | Role::Agent => None,
    };
    reports.filter_map(gateway).collect()
}

/// Raises the soft limit of open files to the hard one: a supervisor has four for each gateway, and
/// 1024 is what most hosts begin with.
pub(crate) fn raise_open_files() {
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let raised = limit.and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        say(&format!("cannot raise the limit of open files: {error}"));
    }
}

async fn drain(mut supervisor: Supervisor, mut ended: mpsc::Receiver<Ended>) {
    while !supervisor.is_idle() {
        let deadline = supervisor.deadline().unwrap_or_else(far);
        tokio::select! {
            Some(end) = ended.recv() => supervisor.ended(&end),
            () = sleep_until(deadline.into()) => supervisor.tick(),
        }
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
