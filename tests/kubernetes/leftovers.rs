//! Possible leftovers of clusters on the host: processes and their namespaces, mounts, control
//! groups, folders. A run that is killed leaves no more than one that ends.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::{ClusterSpec, Kubernetes, Lab, find_holders, wait_until};

use crate::stage::{play, step};

/// Objects on the host of the kinds that clusters could make there.
pub(crate) struct Traces(BTreeSet<String>);

/// Default folders of the programs of Kubernetes.
const FOLDERS: [&str; 7] =
    ["/run", "/run/netns", "/var/lib", "/var/log", "/etc/cni", "/opt", "/root"];

impl Traces {
    pub(crate) fn of_the_host() -> Result<Self> {
        let mut all = BTreeSet::new();
        let mounts = fs::read_to_string("/proc/self/mounts").context("reading the mounts")?;
        all.extend(mounts.lines().map(|line| format!("mount {line}")));
        for folder in FOLDERS.map(Path::new) {
            all.extend(entries(folder).map(|path| format!("path {}", path.display())));
        }
        all.extend(groups(Path::new("/sys/fs/cgroup")).map(|path| format!("group {path}")));
        Ok(Self(all))
    }

    /// Waits until there is nothing that was not there before, and no process in these namespaces.
    pub(crate) fn wait_for_no_more(&self, gone: &Namespaces, at_most: Duration) -> Result<()> {
        wait_until("nothing is left on the host", at_most, || {
            let now = Self::of_the_host()?;
            let left: Vec<_> = now.0.difference(&self.0).collect();
            let held = Namespaces::of(processes());
            let held: Vec<_> = held.0.intersection(&gone.0).collect();
            ensure!(left.is_empty() && held.is_empty(), "there still is {left:#?} {held:#?}");
            Ok::<_, anyhow::Error>(())
        })
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// The groups of clusters, and one level below.
fn groups(root: &Path) -> impl Iterator<Item = String> + use<> {
    let all = entries(root).flat_map(|path| entries(&path).chain([path]));
    let is_ours = |path: &PathBuf| path.to_string_lossy().contains("/weft-");
    all.filter(is_ours).map(|path| path.display().to_string())
}

/// Namespaces that processes are in.
pub(crate) struct Namespaces(BTreeSet<String>);

impl Namespaces {
    /// Namespaces of the machines of a lab, and of the pods on them.
    pub(crate) fn of_lab(group: &str) -> Self {
        let inside = |(holder, _)| link(holder, "pid_for_children");
        let machines: BTreeSet<_> = find_holders(group).into_iter().filter_map(inside).collect();
        Self::of(processes().filter(|process| is_on(&machines, *process)))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    fn of(processes: impl Iterator<Item = i32>) -> Self {
        let kinds = ["net", "mnt", "pid"];
        Self(
            processes.flat_map(|pid| kinds.into_iter().filter_map(move |k| link(pid, k))).collect(),
        )
    }
}

fn processes() -> impl Iterator<Item = i32> {
    entries(Path::new("/proc")).filter_map(|path| path.file_name()?.to_str()?.parse().ok())
}

fn link(process: i32, namespace: &str) -> Option<String> {
    let link = fs::read_link(format!("/proc/{process}/ns/{namespace}")).ok()?;
    Some(link.display().to_string())
}

/// True if a process, or an ancestor of it, runs on one of these machines.
fn is_on(machines: &BTreeSet<String>, process: i32) -> bool {
    link(process, "pid").is_some_and(|pid| machines.contains(&pid))
        || parent(process).is_some_and(|parent| is_on(machines, parent))
}

fn parent(process: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok().filter(|parent| *parent > 0)
}

/// Environment variable that makes the test below the run to be killed.
const VICTIM: &str = "WEFT_VICTIM";
/// Its lab.
const VICTIMS: &str = "weft-kubernetes-victim";
const READY: &str = "ready to be killed";

#[test]
fn killed_run_leaves_nothing() -> Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        return wait_to_be_killed();
    }
    play(|| {
        let before = Traces::of_the_host()?;
        let mut victim = Command::new(std::env::current_exe()?)
            .args(["--exact", "leftovers::killed_run_leaves_nothing", "--nocapture"])
            .env(VICTIM, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting this test again")?;
        let output = BufReader::new(victim.stdout.take().context("stdout is piped")?);
        let mut lines = output.lines().map_while(Result::ok);
        let ready = step("another process starts a cluster", || {
            Ok(lines.any(|line| line.ends_with(READY)))
        })?;
        ensure!(ready, "the other process ended too early");
        let during = Namespaces::of_lab(VICTIMS);
        ensure!(during.count() > 5, "the check sees {} namespaces", during.count());
        step("nothing is left of it once it is killed", || {
            victim.kill()?;
            victim.wait()?;
            before.wait_for_no_more(&during, Duration::from_secs(20))
        })
    })
}

#[allow(clippy::print_stdout, reason = "the other process reads it")]
fn wait_to_be_killed() -> Result<()> {
    let lab = Lab::new(VICTIMS)?;
    let cluster = Kubernetes::start(&lab, ClusterSpec::new("rome", 1, 1))?;
    cluster.run_pods(&[("a", 1)])?;
    println!("{READY}");
    // Ends when this process is killed, or that which started it.
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
