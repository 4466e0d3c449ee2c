//! Observes a host: its store, and the processes that run.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use fabric_api::fabric::GatewayConfig;
use fabric_store::{Object, Snapshot};
use fabric_supervisor::health;
use fabric_supervisor::rundir::{Record, RunDir, nothing_published, state_option};
use fabric_supervisor::workloads::{self, gateways_of, names};
use fabric_supervisor::{lock, process};
use futures::future::join_all;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::observe::{self, Found, Life, Liveness, Observation};

/// Findings on the host, apart from the store.
#[derive(Clone, Debug, Default)]
struct Host {
    node: String,
    cluster_id: Option<String>,
    /// Option that names the run directory to commands.
    run_option: String,
    /// The processes that run, by name.
    running: BTreeMap<String, Liveness>,
    /// The processes that should.
    expected: Vec<String>,
    /// Holder of the lock of the run directory; absent if none runs.
    supervisor: Option<Supervisor>,
    /// Command line of the supervisor, without its optional arguments.
    start_command: String,
    /// Directories whose file system has no room left.
    full: Vec<PathBuf>,
    /// Directories that weft writes to, on a file system that takes no writes.
    read_only: Vec<PathBuf>,
    /// Files among the manifests that are not read, by their paths.
    ignored: Vec<PathBuf>,
}

/// Supervisor of a run directory.
#[derive(Clone, Debug)]
struct Supervisor {
    /// `weft up`, `weft agent`, or `weft down`, which takes its place.
    command: String,
    pid: i32,
    liveness: Liveness,
}

/// Observes the fabric of a run directory. `None` if no supervisor ever finished starting in it.
pub async fn look(dir: &RunDir) -> anyhow::Result<Option<Observation>> {
    let Some(record) = dir.record()? else { return Ok(None) };
    ensure!(
        !is_denied(&dir.pids()),
        "{} is not for this user: run it as root",
        dir.pids().display()
    );
    let store = dir.store(&record)?;
    let mut snapshot = store.read(&observe::KINDS).await.context("cannot read the store")?;
    snapshot.problems.extend(store.problems().await);
    if let Some(published) = &record.published {
        let is_node = |object: &Object| matches!(object, Object::NodeConfig(_));
        ensure!(snapshot.objects.values().any(is_node), "{}", nothing_published(published));
    }
    let host = host(dir, record).await;
    Ok(Some(observe::observe(&snapshot, &host.found(&snapshot))))
}

async fn host(dir: &RunDir, record: Record) -> Host {
    let mut expected = vec![workloads::agent_process(&record.node)];
    if record.published.is_none() {
        expected.extend(["ipam".to_owned(), "fabric-controller".to_owned()]);
    }
    let asked = process::running(dir).into_iter().map(|(name, _)| async move {
        let answer = health::get(&dir.http_socket(&name), "/healthz", health::ANSWER_TIMEOUT).await;
        let answers = match answer {
            Ok(_) => true,
            Err(error) if error.is_unanswered() => false,
            // Programs other than gateways report on what they cannot do themselves.
            Err(_) => !name.starts_with("gateway-"),
        };
        (name, if answers { Liveness::Answers } else { Liveness::Silent })
    });
    let (running, supervisor) = tokio::join!(join_all(asked), supervisor_of(dir));
    let own = || [Some(dir.path()), record.state_dir.as_deref()].into_iter().flatten();
    let shared = record.published.as_deref();
    let such = |dirs: &mut dyn Iterator<Item = &Path>, is_such: fn(&Path) -> bool| {
        dirs.filter(|dir| is_such(dir)).map(Path::to_owned).collect()
    };
    Host {
        full: such(&mut own().chain(shared), is_full),
        read_only: such(&mut own(), is_read_only),
        running: running.into_iter().collect::<BTreeMap<_, _>>(),
        ignored: record.manifests.as_deref().map(ignored).unwrap_or_default(),
        expected,
        supervisor,
        run_option: dir.option(),
        start_command: start_command(dir, &record),
        cluster_id: record.cluster_id,
        node: record.node,
    }
}

/// Returns whether this user may not read a folder: what is there would look as if it were not.
pub fn is_denied(folder: &Path) -> bool {
    fs::read_dir(folder).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Returns the holder of the lock. One that serves no socket is starting or stopping, or of an older release.
async fn supervisor_of(dir: &RunDir) -> Option<Supervisor> {
    let held = lock::supervisor_of(dir)?;
    let answer = health::get(&dir.supervisor_socket(), "/healthz", health::ANSWER_TIMEOUT).await;
    let is_silent = answer.is_err_and(|error| error.is_unanswered());
    let liveness = if is_silent { Liveness::Silent } else { Liveness::Answers };
    Some(Supervisor { command: held.command, pid: held.pid, liveness })
}

fn start_command(dir: &RunDir, record: &Record) -> String {
    let node = &record.node;
    let command = match (&record.published, &record.manifests) {
        (Some(published), _) => {
            format!("weft agent --node {node} --published {}", published.display())
        }
        (None, Some(manifests)) => format!("weft up --manifests {}", manifests.display()),
        (None, None) => "weft up".to_owned(),
    };
    let state = record.state_dir.as_deref().map(state_option).unwrap_or_default();
    format!("{command}{}{state}", dir.option())
}

fn ignored(manifests: &Path) -> Vec<PathBuf> {
    let names = fabric_store::ignored_manifests(manifests);
    names.into_iter().map(|name| manifests.join(name)).collect()
}

/// Returns whether a file system has no room for what weft writes into a directory of it.
fn is_full(dir: &Path) -> bool {
    statvfs(dir).is_ok_and(|of| {
        let free = of.blocks_free().saturating_mul(of.fragment_size());
        let has_limit = |total: u64| total > 0;
        has_limit(of.blocks()) && !has_room(free, longest_file(dir))
            || has_limit(of.files()) && of.files_free() == 0
    })
}

fn is_read_only(dir: &Path) -> bool {
    statvfs(dir).is_ok_and(|of| of.flags().contains(FsFlags::ST_RDONLY))
}

/// Returns whether the longest file fits beside itself, as a new version is whole before it takes the place of
/// the old one, or at least one of usual size. All are in bytes.
fn has_room(free: u64, longest: u64) -> bool {
    const USUAL: u64 = 16 * 1024;
    free >= longest.max(USUAL)
}

/// Length in bytes of the longest file in a folder and those in it, apart from logs, which only grow.
fn longest_file(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let entries = entries.filter(|entry| entry.file_name() != "log");
    let lengths = entries.map(|entry| match entry.metadata() {
        Ok(of) if of.is_dir() => longest_file(&entry.path()),
        Ok(of) => of.len(),
        Err(_) => 0,
    });
    lengths.max().unwrap_or_default()
}

impl Host {
    /// Gateways of other hosts are not seen.
    fn found(&self, snapshot: &Snapshot) -> Found {
        let configs = snapshot.objects.values().filter_map(|object| object.try_into().ok());
        Found {
            node: Some(self.node.clone()),
            cluster_id: self.cluster_id.clone(),
            run_option: self.run_option.clone(),
            gateways: self.gateways(configs),
            problems: self.problems(),
        }
    }

    fn gateways<'a>(
        &self,
        configs: impl Iterator<Item = &'a GatewayConfig>,
    ) -> BTreeMap<(String, String), Life> {
        let own = gateways_of(&self.node, configs).into_iter();
        let lives = own.map(|(process, config)| {
            let (namespace, name) = names(config);
            let liveness = self.running.get(&process).copied().unwrap_or(Liveness::Gone);
            let problem = match liveness {
                Liveness::Answers => None,
                Liveness::Silent => {
                    Some(format!("{process} does not answer; {}", self.hangs(&process)))
                }
                Liveness::Gone => {
                    Some(format!("{process} does not run; see `{}`", self.logs(&process)))
                }
            };
            ((namespace.to_owned(), name.to_owned()), Life { liveness, problem, node: None })
        });
        lives.collect()
    }

    fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        match &self.supervisor {
            None => found.push(format!(
                "no `weft up` or `weft agent` runs here: changes have no effect, and what dies \
                 stays dead; start it again with its options (`{}`): it takes over what runs",
                self.start_command
            )),
            Some(supervisor) => found.extend(supervisor.problem()),
        }
        found.extend(self.full.iter().map(|dir| {
            let dir = dir.display();
            format!(
                "the file system of {dir} is full: weft cannot write there, and what this shows may be \
                 old; make room (`df -h {dir}`, `df -i {dir}`)"
            )
        }));
        found.extend(self.read_only.iter().map(|dir| {
            let dir = dir.display();
            format!(
                "the file system of {dir} is read-only: changes have no effect, and what this shows may be \
                 old; make it writable (`findmnt -T {dir}`, `mount -o remount,rw`)"
            )
        }));
        found.extend(self.ignored.iter().map(|file| {
            format!(
                "{} is not read: expected a name in UTF-8 that does not begin with a dot and ends in \
                 .yaml, .yml or .json; rename it, or move it elsewhere",
                file.display()
            )
        }));
        let dead = self.expected.iter().filter(|process| !self.running.contains_key(*process));
        found.extend(dead.map(|process| format!("{process} does not run")));
        let silent = |process: &&String| self.running.get(*process) == Some(&Liveness::Silent);
        let silent = self.expected.iter().filter(silent);
        found.extend(
            silent.map(|process| format!("{process} does not answer; {}", self.hangs(process))),
        );
        found
    }

    fn logs(&self, process: &str) -> String {
        format!("weft logs {process}{}", self.run_option)
    }

    fn hangs(&self, process: &str) -> String {
        format!(
            "see `{}`; if it hangs, end its process (`kill -9`), and it is started anew",
            self.logs(process)
        )
    }
}

impl Supervisor {
    fn problem(&self) -> Option<String> {
        let Self { command, pid, liveness } = self;
        (*liveness == Liveness::Silent).then(|| {
            format!(
                "`{command}` (pid {pid}) does not answer: changes have no effect, and what dies stays \
                 dead; if it hangs, end it (`kill -9 {pid}`) and start it again, which takes over what \
                 runs"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use fabric_store::Object;

    use super::*;
    use crate::observe::tests::config;

    fn life(node: &str, running: &[(&str, Liveness)]) -> Option<Liveness> {
        let running = running.iter().map(|(name, how)| ((*name).to_owned(), *how)).collect();
        let host = Host { node: node.to_owned(), running, ..Host::default() };
        let config = Object::from(config("t", "client", "n1"));
        let objects = [(config.reference(), config)].into();
        let found = host.found(&Snapshot { objects, problems: Vec::new() });
        let life = found.gateways.get(&("t".to_owned(), "client".to_owned()))?;
        assert_eq!(life.problem.is_some(), life.liveness != Liveness::Answers);
        Some(life.liveness)
    }

    #[test]
    fn unresponsive_program_is_named_with_remedy() {
        let running = [("fabric-controller".to_owned(), Liveness::Silent)].into();
        let expected = vec!["fabric-controller".to_owned()];
        let command = "weft up".to_owned();
        let supervisor = Some(Supervisor { command, pid: 7, liveness: Liveness::Answers });
        let run_option = " --run-dir /srv/rome".to_owned();
        let host = Host { running, expected, supervisor, run_option, ..Host::default() };
        let problem = "fabric-controller does not answer; see `weft logs fabric-controller --run-dir \
                       /srv/rome`; if it hangs, end its process (`kill -9`), and it is started anew";
        assert_eq!(host.problems(), [problem]);
    }

    #[test]
    fn start_command_names_directories_that_are_not_found() {
        let record = |state: &str| Record {
            cluster_id: Some("rome".to_owned()),
            node: "n1".to_owned(),
            manifests: Some("/etc/weft/rome".into()),
            state_dir: Some(state.into()),
            published: None,
            netns: 0,
        };
        let command =
            |dir: &str, state| start_command(&RunDir::at(Path::new(dir)).unwrap(), &record(state));
        let usual = command("/run/weft/rome", "/var/lib/weft/rome");
        assert_eq!(usual, "weft up --manifests /etc/weft/rome");
        let other = command("/srv/run", "/srv/state");
        assert_eq!(other, format!("{usual} --run-dir /srv/run --state-dir /srv/state"));
    }

    #[test]
    fn file_system_with_room_for_longest_file_is_not_full() {
        assert!(has_room(64 << 10, 2 << 10), "a tmpfs may have no more");
        assert!(has_room(64 << 10, 64 << 10));
        assert!(!has_room(64 << 10, 65 << 10));
        assert!(!has_room(4 << 10, 0), "the first file may be longer");
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        let own = fs::metadata(source.join("src/host.rs")).unwrap().len();
        assert!(longest_file(source) >= own, "folders count");
    }

    #[test]
    fn manifest_that_is_not_read_is_named() {
        let (ignored, command) = (vec!["/etc/weft/rome/UP.YAML".into()], "weft up".to_owned());
        let supervisor = Some(Supervisor { command, pid: 7, liveness: Liveness::Answers });
        let problems = Host { ignored, supervisor, ..Host::default() }.problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("/etc/weft/rome/UP.YAML is not read:"), "{problems:?}");
    }

    #[test]
    fn a_gateway_of_this_host_is_as_its_process_is() {
        for liveness in [Liveness::Answers, Liveness::Silent] {
            assert_eq!(life("n1", &[("gateway-t-client", liveness)]), Some(liveness));
        }
        assert_eq!(life("n1", &[]), Some(Liveness::Gone));
        assert_eq!(life("n2", &[]), None, "it is another host's");
    }
}
