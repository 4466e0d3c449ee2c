//! Keeps a set of processes running. The set changes, the processes die, the supervisor itself may
//! be killed and find them again.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use super::limits;
use super::log_file;
use super::messages::say;
use super::process::{self, Freshness, Process, Role, Spec};
use super::rundir::RunDir;
use super::workloads::{Gateways, Wanted};

/// Time a process has to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Run time after which a process that ends is started again at once: traffic waits for a gateway.
const MIN_STEADY_RUN: Duration = Duration::from_secs(1);
const SHORTEST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A gateway counts as starting until it answers, for at most this long.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks whether another gateway may start.
const TURN: Duration = Duration::from_millis(20);
/// Between two lines about gateways that wait for their turn.
const PROGRESS: Duration = Duration::from_secs(2);

/// That a process ended: its name, and which start of it.
#[derive(Debug)]
pub(crate) struct Ended {
    name: String,
    start: u64,
}

/// Published state of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub role: Role,
    /// Absent while it does not run.
    pub pid: Option<i32>,
    pub restarts: u64,
    /// Socket on which a gateway answers HTTP.
    pub http: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Supervisor {
    dir: RunDir,
    slots: BTreeMap<String, Slot>,
    ended: mpsc::Sender<Ended>,
    starts: u64,
    /// Time at which the last line about waiting gateways was printed, while any wait.
    progress: Option<Instant>,
    /// True once the processes left by an earlier supervisor have been looked at.
    inherited: bool,
}

#[derive(Debug)]
struct Slot {
    /// Absent once nobody wants it any more.
    spec: Option<Spec>,
    role: Role,
    state: State,
    backoff: Backoff,
    restarts: u64,
    /// Its first start was announced.
    announced: bool,
    /// A gateway that was connected when it ended, and has not started since.
    preferred: bool,
}

#[derive(Debug)]
enum State {
    /// `up` once a gateway answers.
    Running {
        process: Process,
        start: u64,
        up: bool,
    },
    Stopping {
        process: Process,
        start: u64,
        kill_at: Instant,
    },
    Waiting {
        until: Instant,
    },
}

/// Backoff: at once after a steady run, then 0.1 s, 0.2 s, ... 10 s, each a quarter more or less at
/// random, so that many that fail together do not start together.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff {
    failures: u32,
}

impl Backoff {
    fn next(&mut self, lived: Duration) -> Duration {
        self.failures = if lived >= MIN_STEADY_RUN { 1 } else { self.failures.saturating_add(1) };
        match self.failures {
            0 | 1 => Duration::ZERO,
            n => jittered(LONGEST_WAIT.min(SHORTEST_WAIT * 2_u32.saturating_pow((n - 2).min(16)))),
        }
    }

    /// The first few failures in a row, then fewer and fewer.
    fn is_worth_a_line(self) -> bool {
        self.failures <= 3 || self.failures.is_power_of_two()
    }
}

/// A random wait of three to five quarters of the one given, in whole milliseconds.
fn jittered(wait: Duration) -> Duration {
    let spread = wait.mul_f64(0.75 + fastrand::f64() / 2.0).as_millis();
    Duration::from_millis(u64::try_from(spread).unwrap_or(u64::MAX))
}

/// Gateways that may be starting at a time: each keeps a core busy for a moment, and the kernel's
/// lock of network settings is one for all.
fn max_starting() -> usize {
    2 * std::thread::available_parallelism().map_or(2, usize::from)
}

impl Supervisor {
    /// Writes damaged pid files of running processes again.
    pub(crate) fn restore_pid_files(&self) {
        for (name, slot) in &self.slots {
            if let State::Running { process, .. } | State::Stopping { process, .. } = &slot.state {
                process.restore_pid_file(&self.dir.pid_file(name));
            }
        }
    }

    /// Also gives the end where the ends of processes arrive, for [`Self::ended`].
    pub(crate) fn new(dir: RunDir) -> (Self, mpsc::Receiver<Ended>) {
        let (ended, receiver) = mpsc::channel(64);
        let slots = BTreeMap::new();
        let (starts, progress, inherited) = (0, None, false);
        (Self { dir, slots, ended, starts, progress, inherited }, receiver)
    }

    /// Makes `wanted` what is to run: adopts what runs, stops the rest. [`Self::tick`] starts what
    /// is missing.
    pub(crate) fn want(&mut self, mut wanted: Wanted) {
        if !std::mem::replace(&mut self.inherited, true) {
            self.stop_leftovers(&wanted);
        }
        for (name, slot) in &mut self.slots {
            let spec = wanted.remove(name);
            if slot.spec != spec {
                slot.change(name, spec);
            }
        }
        self.slots
            .retain(|_, slot| slot.spec.is_some() || !matches!(slot.state, State::Waiting { .. }));
        for (name, spec) in wanted {
            let slot = Slot {
                role: spec.role.clone(),
                spec: Some(spec),
                state: State::Waiting { until: Instant::now() },
                backoff: Backoff::default(),
                restarts: 0,
                announced: false,
                preferred: false,
            };
            self.slots.insert(name.clone(), slot);
            self.adopt(&name);
        }
    }

    /// Has these gateways start before others.
    pub(crate) fn prefer(&mut self, gateways: &Gateways) {
        for slot in self.slots.values_mut() {
            if let Role::Gateway { namespace, name } = &slot.role {
                slot.preferred |= gateways.contains(&(namespace.clone(), name.clone()));
            }
        }
    }

    /// Handles the end of a process: reports it and plans its next start.
    pub(crate) fn ended(&mut self, ended: &Ended) {
        let Some(slot) = self.slots.get_mut(&ended.name) else { return };
        let (process, asked) = match &mut slot.state {
            State::Running { process, start, .. } if *start == ended.start => (process, false),
            State::Stopping { process, start, .. } if *start == ended.start => (process, true),
            State::Running { .. } | State::Stopping { .. } | State::Waiting { .. } => return,
        };
        let (how, lived) = (process.exit_reason(), process.since.elapsed());
        drop(std::fs::remove_file(self.dir.pid_file(&ended.name)));
        if slot.spec.is_none() {
            self.slots.remove(&ended.name);
            return;
        }
        let wait = if asked { Duration::ZERO } else { slot.backoff.next(lived) };
        slot.state = State::Waiting { until: Instant::now() + wait };
        if asked {
            return;
        }
        slot.restarts += 1;
        if slot.backoff.is_worth_a_line() {
            let last = log_file::last_line(&self.dir.log_file(&ended.name));
            let limit = last.as_deref().and_then(limits::remedy);
            let last = last.map(|line| format!("; its last words: {line}")).unwrap_or_default();
            let limit = limit.map(|limit| format!("; {limit}")).unwrap_or_default();
            let when = if wait.is_zero() { "now".to_owned() } else { format!("in {wait:?}") };
            say(&format!("{} ended ({how}); starting it again {when}{last}{limit}", ended.name));
        }
    }

    /// Starts and kills whatever is due.
    pub(crate) fn tick(&mut self) {
        let now = Instant::now();
        let mut due = Vec::new();
        for (name, slot) in &mut self.slots {
            match &mut slot.state {
                State::Waiting { until } if *until <= now => due.push(name.clone()),
                State::Stopping { process, kill_at, .. } if *kill_at <= now => {
                    process.signal(Signal::KILL);
                    *kill_at = now + STOP_TIMEOUT;
                }
                State::Running { .. } | State::Stopping { .. } | State::Waiting { .. } => {}
            }
        }
        let is_gateway = |name: &String| self.slots.get(name).is_some_and(Slot::is_gateway);
        let (mut gateways, others): (Vec<_>, Vec<_>) = due.into_iter().partition(is_gateway);
        // Those that carried traffic, and then by name.
        gateways.sort_by_key(|name| self.slots.get(name).is_some_and(|slot| !slot.preferred));
        let free = if gateways.is_empty() { 0 } else { self.free_starts() };
        let waiting = gateways.split_off(free.min(gateways.len()));
        others.iter().chain(&gateways).for_each(|name| self.start(name));
        self.show_progress(waiting.len());
    }

    /// Number of gateways that may start now.
    fn free_starts(&mut self) -> usize {
        let mut starting = 0;
        for (name, slot) in self.slots.iter_mut().filter(|(_, slot)| slot.is_gateway()) {
            let State::Running { process, up, .. } = &mut slot.state else { continue };
            *up = *up
                || process.since.elapsed() > START_TIMEOUT
                || UnixStream::connect(self.dir.http_socket(name)).is_ok();
            starting += usize::from(!*up);
        }
        max_starting().saturating_sub(starting)
    }

    /// Prints a line now and then while gateways wait for their turn.
    fn show_progress(&mut self, waiting: usize) {
        let gateways = self.slots.values().filter(|slot| slot.is_gateway());
        let all = gateways.count();
        match self.progress {
            None if waiting == 0 => {}
            Some(_) if waiting == 0 => {
                say(&format!("all {all} gateways are started"));
                self.progress = None;
            }
            Some(before) if before.elapsed() < PROGRESS => {}
            None | Some(_) => {
                let (started, most) = (all - waiting, max_starting());
                say(&format!("{started} of {all} gateways are started, {most} at a time"));
                self.progress = Some(Instant::now());
            }
        }
    }

    /// Time at which [`Self::tick`] has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let of = |slot: &Slot| match &slot.state {
            State::Running { .. } => None,
            State::Stopping { kill_at, .. } => Some(*kill_at),
            // One that is due waits for its turn.
            State::Waiting { until } => Some((*until).max(Instant::now() + TURN)),
        };
        self.slots.values().filter_map(of).min()
    }

    pub(crate) fn reports(&self) -> BTreeMap<String, Report> {
        let report = |(name, slot): (&String, &Slot)| {
            let pid = match &slot.state {
                State::Running { process, .. } | State::Stopping { process, .. } => {
                    Some(process.identity.pid)
                }
                State::Waiting { .. } => None,
            };
            let http = self.dir.http_socket(name);
            (name.clone(), Report { role: slot.role.clone(), pid, restarts: slot.restarts, http })
        };
        self.slots.iter().map(report).collect()
    }

    /// Forgets the agent and the gateways, which run on, and asks the rest to stop. Gives the
    /// names of those that run on.
    pub(crate) fn stop_controls(&mut self) -> Vec<String> {
        let keeps = |slot: &Slot| slot.role != Role::Control;
        let kept = self
            .slots
            .iter()
            .filter(|(_, slot)| keeps(slot) && matches!(slot.state, State::Running { .. }));
        let kept = kept.map(|(name, _)| name.clone()).collect();
        self.slots.retain(|_, slot| !keeps(slot));
        self.want(Wanted::new());
        kept
    }

    /// True once nothing runs that is this supervisor's.
    pub(crate) fn is_idle(&self) -> bool {
        self.slots.is_empty()
    }

    /// Processes that an earlier supervisor left and nobody wants any more: a gateway's config may
    /// have gone meanwhile.
    fn stop_leftovers(&self, wanted: &Wanted) {
        let all = process::running(&self.dir);
        for (name, identity) in all.into_iter().filter(|(name, _)| !wanted.contains_key(name)) {
            if let Some(pidfd) = identity.open() {
                say(&format!("stopping {name} (pid {}), which nothing asks for", identity.pid));
                process::stop_and_wait(&pidfd, STOP_TIMEOUT);
            }
            drop(std::fs::remove_file(self.dir.pid_file(&name)));
        }
        for stray in process::strays(&self.dir) {
            if let Some(pidfd) = stray.open() {
                say(&format!("stopping pid {}, which has no pid file", stray.pid));
                process::stop_and_wait(&pidfd, STOP_TIMEOUT);
            }
        }
    }

    /// Takes over a process that runs; one that does not is started in its turn.
    fn adopt(&mut self, name: &str) {
        let Some(spec) = self.slots.get(name).and_then(|slot| slot.spec.clone()) else { return };
        let Some((process, freshness)) = Process::adopt(name, &spec, &self.dir) else { return };
        let pid = process.identity.pid;
        say(&match freshness {
            Freshness::Current => format!("took over {name} (pid {pid})"),
            Freshness::OlderBuild => format!(
                "took over {name} (pid {pid}), which runs an older build; `kill {pid}` has it \
                 start again with the new one"
            ),
        });
        self.run(name, Ok(process));
        if let Some(Slot { state: State::Running { up, .. }, .. }) = self.slots.get_mut(name) {
            *up = true;
        }
    }

    fn start(&mut self, name: &str) {
        let Some(slot) = self.slots.get_mut(name) else { return };
        let Some(spec) = slot.spec.clone() else { return };
        slot.preferred = false;
        if !std::mem::replace(&mut slot.announced, true) && self.progress.is_none() {
            say(&format!("starting {name}"));
        }
        let started = Process::start(name, &spec, &self.dir);
        self.run(name, started);
    }

    fn run(&mut self, name: &str, started: Result<Process, process::StartError>) {
        let Some(slot) = self.slots.get_mut(name) else { return };
        self.starts += 1;
        let start = self.starts;
        let watched = started.map_err(anyhow::Error::new).and_then(|process| {
            watch(&process, Ended { name: name.to_owned(), start }, self.ended.clone())?;
            Ok(process)
        });
        slot.state = match watched {
            Ok(process) => State::Running { process, start, up: false },
            Err(error) => {
                let wait = slot.backoff.next(Duration::ZERO).max(SHORTEST_WAIT);
                if slot.backoff.is_worth_a_line() {
                    let error = format!("{error:#}");
                    let limit = limits::remedy(&error).map(|limit| format!("; {limit}"));
                    let limit = limit.unwrap_or_default();
                    say(&format!("cannot start {name}: {error}; trying again in {wait:?}{limit}"));
                }
                State::Waiting { until: Instant::now() + wait }
            }
        };
    }
}

impl Slot {
    fn is_gateway(&self) -> bool {
        matches!(self.role, Role::Gateway { .. })
    }

    /// Takes a new spec, or none; what runs by the old one is asked to stop.
    fn change(&mut self, name: &str, spec: Option<Spec>) {
        if spec.is_none() && self.role != Role::Control {
            say(&format!("stopping {name}, which nothing asks for any more"));
        }
        self.spec = spec;
        let waiting = State::Waiting { until: Instant::now() };
        self.state = match std::mem::replace(&mut self.state, waiting) {
            State::Running { process, start, .. } => {
                process.signal(Signal::TERM);
                State::Stopping { process, start, kill_at: Instant::now() + STOP_TIMEOUT }
            }
            other @ (State::Stopping { .. } | State::Waiting { .. }) => other,
        };
    }
}

/// Reports the end of a process, whether it is a child or not.
fn watch(process: &Process, ended: Ended, tell: mpsc::Sender<Ended>) -> anyhow::Result<()> {
    let pidfd = process.pidfd.try_clone()?;
    #[allow(unsafe_code)]
    // SAFETY: the AsyncFd owns the descriptor, which therefore stays open and the same until it
    // is taken off the kernel's poll set.
    let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
    tokio::spawn(async move {
        // An error here would be a broken pidfd; the supervisor then looks for itself.
        drop(pidfd.readable().await);
        drop(tell.send(ended).await);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn restart_waits_double_and_are_jittered() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.next(Duration::ZERO), Duration::ZERO);
        for expected in [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000] {
            let wait = backoff.next(Duration::ZERO).as_millis();
            assert!((expected * 3 / 4..=expected * 5 / 4).contains(&wait), "{wait} for {expected}");
        }
        let waits: BTreeSet<_> = (0..20).map(|_| backoff.next(Duration::ZERO)).collect();
        assert!(waits.len() > 10, "failing gateways restart in step: {waits:?}");
        assert_eq!(backoff.next(MIN_STEADY_RUN), Duration::ZERO);
    }

    #[tokio::test]
    async fn connected_gateways_start_first() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::at(folder.path()).unwrap();
        dir.create().unwrap();
        let (mut supervisor, _ended) = Supervisor::new(dir);
        let names: Vec<_> = (0..4 * max_starting()).map(|n| format!("gateway-{n:03}")).collect();
        let spec = |name: &String| Spec {
            program: "true".into(),
            args: Vec::new(),
            log_args: Vec::new(),
            role: Role::Gateway { namespace: "t".to_owned(), name: name.clone() },
        };
        supervisor.want(names.iter().map(|name| (name.clone(), spec(name))).collect());
        let last = names.last().unwrap();
        supervisor.prefer(&Gateways::from([("t".to_owned(), last.clone())]));
        supervisor.tick();
        let reports = supervisor.reports();
        let started: Vec<_> =
            reports.iter().filter(|(_, r)| r.pid.is_some()).map(|(name, _)| name).collect();
        assert_eq!(started.len(), max_starting());
        assert!(started.contains(&last), "{started:?}");
    }
}
