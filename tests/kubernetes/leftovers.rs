//! What clusters could leave on the host: processes and their namespaces, mounts, control groups,
//! folders. A run that is killed leaves no more than one that ends.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::{ClusterSpec, Kubernetes, Lab, wait_until};

use crate::stage::{play, step};

/// Everything there is of what clusters make.
pub(crate) struct Traces(BTreeSet<String>);

/// Where programs of Kubernetes keep things when nobody tells them otherwise.
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
        all.extend(processes().flat_map(|process| namespaces_of(&process)));
        all.extend(groups(Path::new("/sys/fs/cgroup")).map(|path| format!("group {path}")));
        Ok(Self(all))
    }

    pub(crate) fn namespaces(&self) -> usize {
        self.0.iter().filter(|trace| trace.starts_with("net:[")).count()
    }

    /// Until there is nothing that was not there before.
    pub(crate) fn wait_for_no_more(&self, at_most: Duration) -> Result<()> {
        wait_until("nothing is left on the host", at_most, || {
            let now = Self::of_the_host()?;
            let left: Vec<_> = now.0.difference(&self.0).collect();
            ensure!(left.is_empty(), "there still is {left:#?}");
            Ok::<_, anyhow::Error>(())
        })
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let number = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
    entries(Path::new("/proc")).filter(move |path| number(path).is_some())
}

/// A process itself is no trace, since anybody may start one; namespaces of its own are.
fn namespaces_of(process: &Path) -> Vec<String> {
    let of = |kind: &str| fs::read_link(process.join("ns").join(kind)).ok();
    let all = ["net", "mnt", "pid"].into_iter().filter_map(of);
    all.map(|link| link.display().to_string()).collect()
}

/// The groups of clusters, and one level below.
fn groups(root: &Path) -> impl Iterator<Item = String> + use<> {
    let all = entries(root).flat_map(|path| entries(&path).chain([path]));
    let is_ours = |path: &PathBuf| path.to_string_lossy().contains("/weft-");
    all.filter(is_ours).map(|path| path.display().to_string())
}

/// Tells the test below that it is to be killed.
const VICTIM: &str = "WEFT_VICTIM";
const READY: &str = "ready to be killed";

#[test]
fn a_killed_run_leaves_nothing() -> Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        return wait_to_be_killed();
    }
    play(|| {
        let before = Traces::of_the_host()?;
        let mut victim = Command::new(std::env::current_exe()?)
            .args(["--exact", "leftovers::a_killed_run_leaves_nothing", "--nocapture"])
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
        step("nothing is left of it once it is killed", || {
            victim.kill()?;
            victim.wait()?;
            before.wait_for_no_more(Duration::from_secs(20))
        })
    })
}

#[allow(clippy::print_stdout, reason = "the other process reads it")]
fn wait_to_be_killed() -> Result<()> {
    let lab = Lab::new("weft-kubernetes-victim")?;
    let cluster = Kubernetes::start(&lab, ClusterSpec::new("rome", 1, 1))?;
    cluster.run_pods(&[("a", 1)])?;
    println!("{READY}");
    // Ends when this process is killed, or that which started it.
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}
