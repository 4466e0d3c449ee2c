//! Common part of `weft up` and `weft agent`: its loop and its end.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::health::{self, Reports, Responder};
use super::lock::Lock;
use super::log_file;
use super::messages::say;
use super::process::Role;
use super::rundir::{Record, RunDir};
use super::supervisor::{Ended, Report, Supervisor};
use super::workloads::{Gateways, Wanted};

/// Corrects what is published of gateways that cannot be carrying traffic.
#[allow(async_fn_in_trait)] // the loop that calls it is not spawned
pub trait MarkUnresponsive {
    /// Returns those of `gateways`, which are not empty, that were published as connected.
    async fn mark_unresponsive(&mut self, gateways: &Gateways) -> Gateways;
}

/// Checks, one a second, that find the run directory incomplete before it counts as lost: a user who
/// removes it may run `weft down` next.
const MAX_INCOMPLETE: u32 = 3;

/// The signals that end a supervisor: SIGTERM, Ctrl-C, and its terminal going away.
#[derive(Debug)]
pub struct StopSignals([Signal; 3]);

impl StopSignals {
    pub fn new() -> anyhow::Result<Self> {
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

/// Files of a run directory that are its supervisor's own.
#[derive(Debug)]
pub struct OwnFiles {
    pub dir: RunDir,
    pub lock: Lock,
    pub record: Record,
}

impl OwnFiles {
    /// Writes again what was removed, replaced or damaged, in a directory that is otherwise complete.
    fn restore(&mut self) {
        match self.lock.restore(&self.dir) {
            Ok(true) => say("weft.lock was removed or replaced: written again"),
            Ok(false) => {}
            Err(error) => say(&format!("weft.lock was removed or replaced: {error:#}")),
        }
        if self.dir.record().ok().flatten().as_ref() == Some(&self.record) {
            return;
        }
        match self.dir.write_record(&self.record) {
            Ok(()) => say("weft.json was removed, replaced or damaged: written again"),
            Err(error) => say(&format!("weft.json was removed, replaced or damaged: {error:#}")),
        }
    }
}

/// Inputs and outputs of the loop.
#[derive(Debug)]
pub struct Loop<S> {
    pub own: OwnFiles,
    pub wanted: watch::Receiver<Wanted>,
    pub reports: watch::Sender<Reports>,
    pub connections: S,
    pub stop: StopSignals,
}

/// End of a supervisor's loop.
#[derive(Debug)]
pub enum End {
    /// Stopped by a signal. Has the names of the processes that run on.
    Stopped(Vec<String>),
    /// Something has removed the run directory, or a part of it.
    RunDirLost,
}

/// Begins anew, as the same process: makes the run directory again and starts in it whatever runs
/// without one, since sockets, pid files and what was published went with it. Returns on failure only.
pub fn start_anew(dir: &RunDir) -> anyhow::Error {
    say(&format!(
        "{} is not complete any more: making it again and restarting all processes",
        dir.path().display()
    ));
    let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let error = Command::new(program).args(std::env::args_os().skip(1)).exec();
    anyhow::Error::new(error).context("cannot start anew")
}

impl<S: MarkUnresponsive> Loop<S> {
    /// Runs until a signal comes or the run directory is lost.
    pub async fn run(mut self) -> End {
        let dir = self.own.dir.clone();
        let (mut supervisor, mut ended) = Supervisor::new(dir.clone());
        let (silent_to, mut silent) = watch::channel(BTreeSet::new());
        tokio::spawn(health::watch_gateways(self.reports.subscribe(), silent_to));
        let (mut known_silent, mut incomplete) = (BTreeSet::new(), 0);
        let mut housekeeping = interval(Duration::from_secs(1));
        housekeeping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let first = self.wanted.borrow_and_update().clone();
        supervisor.want(first);
        self.start_due(&mut supervisor).await;
        let responder = self.responder();
        let option = dir.option();
        say(&format!("running; `weft status{option}` shows the peerings, Ctrl-C stops"));
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
                    self.start_due(&mut supervisor).await;
                }
                Some(end) = ended.recv() => {
                    supervisor.ended(&end);
                    // Many that end at once are known before the first of them starts again.
                    while let Ok(end) = ended.try_recv() {
                        supervisor.ended(&end);
                    }
                    self.start_due(&mut supervisor).await;
                }
                () = sleep_until(deadline.into()) => supervisor.tick(),
                _ = housekeeping.tick() => {
                    incomplete = if dir.is_complete() { 0 } else { incomplete + 1 };
                    if incomplete == MAX_INCOMPLETE {
                        return End::RunDirLost;
                    }
                    if incomplete == 0 {
                        self.own.restore();
                    }
                    supervisor.restore_pid_files();
                    log_file::bound(&dir);
                    let connected = self.mark_dead(&supervisor.reports()).await;
                    supervisor.prefer(&connected);
                }
                Ok(()) = silent.changed() => {
                    let silent = silent.borrow_and_update().clone();
                    for name in silent.difference(&known_silent) {
                        say(&format!(
                            "{name} runs but does not answer; `weft logs {name}{option}` may say why"
                        ));
                    }
                    let connected = self.mark_unresponsive(&silent).await;
                    supervisor.prefer(&connected);
                    known_silent = silent;
                }
                () = answer(responder.as_ref()) => {}
            }
        }
        // The end may take a while, in which it does not hang.
        drop(responder);
        let kept = supervisor.stop_controls();
        drain(supervisor, ended).await;
        End::Stopped(kept)
    }

    /// Socket of the loop. Without it, `weft status` does not see a loop that hangs.
    fn responder(&self) -> Option<Responder> {
        let socket = self.own.dir.supervisor_socket();
        let failed = |error: &_| say(&format!("cannot listen on {}: {error}", socket.display()));
        Responder::listen(&socket).inspect_err(failed).ok()
    }

    /// Starts what is due, gateways that were connected before others. Their status is corrected
    /// before; each then writes the true one.
    async fn start_due(&mut self, supervisor: &mut Supervisor) {
        let connected = self.mark_dead(&supervisor.reports()).await;
        supervisor.prefer(&connected);
        supervisor.tick();
    }

    async fn mark_dead(&mut self, reports: &Reports) -> Gateways {
        let dead = reports.values().filter(|report| report.pid.is_none());
        self.mark(gateways(dead)).await
    }

    /// Returns those that were published as connected.
    async fn mark(&mut self, gateways: Gateways) -> Gateways {
        if gateways.is_empty() {
            gateways
        } else {
            self.connections.mark_unresponsive(&gateways).await
        }
    }

    /// Not more often than they are found so: one that is merely slow writes its Connection again.
    async fn mark_unresponsive(&mut self, silent: &BTreeSet<String>) -> Gateways {
        let reports = self.reports.borrow().clone();
        self.mark(gateways(silent.iter().filter_map(|name| reports.get(name)))).await
    }
}

/// Gateways among reports.
fn gateways<'a>(reports: impl Iterator<Item = &'a Report>) -> Gateways {
    let gateway = |report: &Report| match &report.role {
        Role::Gateway { namespace, name } => Some((namespace.clone(), name.clone())),
        Role::Control | Role::Agent => None,
    };
    reports.filter_map(gateway).collect()
}

/// Raises the soft limit of open files to the hard one: a supervisor has four for each gateway, and
/// 1024 is what most hosts begin with.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::RLIMIT_NOFILE);
    let raised = limit.and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        say(&format!("cannot raise the limit of open files: {error}"));
    }
}

async fn answer(responder: Option<&Responder>) {
    match responder {
        Some(responder) => responder.answer().await,
        None => std::future::pending().await,
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
