//! Run and state directories of the fabrics of this host.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use fabric_api::ClusterId;
use fabric_store::{Store, StoreArgs};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// File in a state directory that nft loads before the network of a starting host is up.
pub const REFUSAL_FILE: &str = "refusal.nft";
/// File of the state directory with the name of the node that this host is.
const NODE_FILE: &str = "node";
/// The same with the ID of the cluster.
const CLUSTER_FILE: &str = "cluster";
/// Run directories are `/run/weft/CLUSTER` unless an option names others, state directories
/// `/var/lib/weft/CLUSTER`, and `/var/lib/weft/agent-NODE` of a further host.
pub const RUN_ROOT: &str = "/run/weft";
pub const STATE_ROOT: &str = "/var/lib/weft";
/// The longest path of a Unix socket, without the closing zero (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Data lost at a reboot: published config, status, sockets, pid files, logs.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

/// Options of `weft up` or `weft agent`, so that other commands need not be given them again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Absent on a further host to which nothing was published when its agent started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// The node that this host is.
    pub node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifests: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_dir: Option<PathBuf>,
    /// Set by `weft agent`, which has nothing but the published directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<PathBuf>,
    /// The network namespace it runs in, by inode: what is in the kernel is there.
    #[serde(default)]
    pub netns: u64,
}

pub fn default_state_dir(cluster: &ClusterId) -> PathBuf {
    Path::new(STATE_ROOT).join(cluster.as_str())
}

/// State directory of `weft agent`, apart from those of clusters.
pub fn agent_state_dir(node: &str) -> PathBuf {
    Path::new(STATE_ROOT).join(format!("agent-{node}"))
}

/// Option that names a state directory to later commands, after a space; empty if it is where they look.
pub fn state_option(dir: &Path) -> String {
    option("--state-dir", dir, STATE_ROOT)
}

fn option(name: &str, dir: &Path, root: &str) -> String {
    match dir.parent() == Some(Path::new(root)) {
        true => String::new(),
        false => format!(" {name} {}", dir.display()),
    }
}

impl RunDir {
    pub fn of(cluster: &ClusterId) -> Self {
        Self(Path::new(RUN_ROOT).join(cluster.as_str()))
    }

    /// Absolute, since child processes get it as an argument. Of a link, the directory that it leads to, which is what
    /// `weft down` removes.
    pub fn at(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("{} cannot be a run directory", path.display());
        Ok(Self(resolved(path).with_context(cannot)?))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Option that names it to other commands, after a space; empty if it is where they look.
    pub fn option(&self) -> String {
        option("--run-dir", &self.0, RUN_ROOT)
    }

    /// Fails if there is anything that weft does not put into a run directory, which `weft down`
    /// removes with all that it holds. What is there may be less: part of it may have been removed,
    /// or a supervisor killed before it was complete.
    pub fn check_ours(&self) -> anyhow::Result<()> {
        const OURS: [&str; 10] = [
            "changes.sock",
            "http",
            "ipam.sock",
            "log",
            "pids",
            "published",
            "status",
            "weft.json",
            "weft.lock",
            "weft.tmp",
        ];
        let Some(other) = foreign(&self.0, &OURS) else { return Ok(()) };
        bail!("{} is not a run directory of weft: it holds {other}", self.0.display())
    }

    /// Makes the folders, in an empty directory or one that was a run directory before. Logs and pid
    /// files are root's alone.
    pub fn create(&self) -> anyhow::Result<()> {
        if !matches!(self.record(), Ok(Some(_))) {
            self.check_ours()?;
        }
        let make = |path: &Path, mode| {
            let made = DirBuilder::new().recursive(true).mode(mode).create(path);
            made.with_context(|| format!("cannot make folder {}", path.display()))
        };
        make(&self.0, 0o755)?;
        for folder in ["pids", "log", "http"] {
            make(&self.0.join(folder), 0o700)?;
        }
        Ok(())
    }

    /// Returns true if the folders are there that its supervisor has made before it started a process.
    pub fn is_complete(&self) -> bool {
        [self.pids(), self.logs()].iter().all(|folder| folder.exists())
    }

    pub fn pids(&self) -> PathBuf {
        self.0.join("pids")
    }

    pub fn pid_file(&self, process: &str) -> PathBuf {
        self.pids().join(format!("{process}.pid"))
    }

    pub fn logs(&self) -> PathBuf {
        self.0.join("log")
    }

    pub fn log_file(&self, process: &str) -> PathBuf {
        self.logs().join(format!("{process}.log"))
    }

    pub fn ipam_socket(&self) -> PathBuf {
        self.0.join("ipam.sock")
    }

    /// `<run>/http/<process>.sock`, or a hash in place of a name that no socket path can hold.
    pub fn http_socket(&self, process: &str) -> PathBuf {
        let path = self.0.join("http").join(format!("{process}.sock"));
        if path.as_os_str().len() <= SOCKET_PATH_MAX {
            return path;
        }
        self.0.join("http").join(format!("{}.sock", short_hash(process)))
    }

    /// The socket on which the supervisor answers, like its processes on theirs.
    pub fn supervisor_socket(&self) -> PathBuf {
        self.http_socket("weft")
    }

    /// The lock of the one supervisor of this directory.
    pub fn lock_file(&self) -> PathBuf {
        self.0.join("weft.lock")
    }

    fn record_file(&self) -> PathBuf {
        self.0.join("weft.json")
    }

    /// Writes nothing where the same is there: a full disk then prevents no new start.
    pub fn write_record(&self, record: &Record) -> anyhow::Result<()> {
        if self.record().ok().flatten().as_ref() == Some(record) {
            return Ok(());
        }
        let path = self.record_file();
        let text = serde_json::to_string_pretty(record)? + "\n";
        replace(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns the options of the supervisor; `None` if none ever ran here.
    pub fn record(&self) -> anyhow::Result<Option<Record>> {
        let path = self.record_file();
        let mut text = String::new();
        match File::open(&path).and_then(|mut file| file.read_to_string(&mut text)) {
            Ok(_) => serde_json::from_str(&text).map(Some).with_context(|| damaged(&path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(anyhow::Error::new(error).context(damaged(&path)))
            }
            Err(error) => {
                Err(anyhow::Error::new(error).context(format!("cannot read {}", path.display())))
            }
        }
    }

    /// The store as the supervisor of this directory sees it.
    pub fn store(&self, record: &Record) -> anyhow::Result<Store> {
        let opened = match &record.published {
            Some(published) if !published.is_dir() => bail!(nothing_published(published)),
            Some(published) => Store::open_published(published),
            None => Store::open(&StoreArgs::directories(
                record.manifests.clone(),
                self.0.clone(),
                record.state_dir.clone(),
            )),
        };
        opened.context("cannot open the store")
    }
}

/// Error about a published directory that is not there, or holds no NodeConfig.
pub fn nothing_published(dir: &Path) -> String {
    let what = if dir.is_dir() { "holds no NodeConfig" } else { "is not there" };
    format!(
        "the published directory {} {what}: the fabric was taken down on its host, or that has started anew, \
         or the share is not mounted here; mount it, run `weft up` on that host, or `weft down` on this one",
        dir.display()
    )
}

fn damaged(path: &Path) -> String {
    let path = path.display();
    format!("{path} is not what weft writes there; `weft up` or `weft agent` writes it anew")
}

/// Returns the node that the host was which wrote the state directory.
pub fn kept_node(state: &Path) -> Option<String> {
    fs::read_to_string(state.join(NODE_FILE)).ok().map(|node| node.trim().to_owned())
}

/// Keeps the node that this host is, for when none of its addresses shows that.
pub fn keep_node(state: &Path, node: &str) -> io::Result<()> {
    if kept_node(state).as_deref() == Some(node) {
        return Ok(());
    }
    fs::create_dir_all(state)?;
    replace(&state.join(NODE_FILE), format!("{node}\n").as_bytes())
}

/// Fails if a run directory or a state directory is another cluster's.
pub fn check_cluster(dir: &RunDir, state: &Path, cluster: &ClusterId) -> anyhow::Result<()> {
    let recorded = dir.record().ok().flatten().and_then(|record| record.cluster_id);
    let kept = kept_cluster(state);
    for (path, option, removal, id) in [
        (dir.path(), "--run-dir", "weft down", &recorded),
        (state, "--state-dir", "weft down --purge", &kept),
    ] {
        let Some(other) = id.as_ref().filter(|id| *id != cluster.as_str()) else { continue };
        let path = path.display();
        bail!(
            "{path} is of cluster {other}, and the manifests are of {cluster}: expected the manifests of {other}, or \
             another directory ({option}); `{removal} {option} {path}` takes {other} away"
        );
    }
    Ok(())
}

fn kept_cluster(state: &Path) -> Option<String> {
    let text = fs::read_to_string(state.join(CLUSTER_FILE)).ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

/// Keeps the cluster that a state directory is of.
pub fn keep_cluster(state: &Path, cluster: &ClusterId) -> io::Result<()> {
    if kept_cluster(state).is_some() {
        return Ok(());
    }
    fs::create_dir_all(state)?;
    replace(&state.join(CLUSTER_FILE), format!("{cluster}\n").as_bytes())
}

/// Fails if there is anything that weft does not put into a state directory.
pub fn check_state(path: &Path) -> anyhow::Result<()> {
    const OURS: [&str; 9] = [
        CLUSTER_FILE,
        "ips",
        "last-good",
        "networks",
        NODE_FILE,
        "notes",
        REFUSAL_FILE,
        "secrets",
        "status",
    ];
    let Some(other) = foreign(path, &OURS) else { return Ok(()) };
    bail!("{} is not a state directory of weft: it holds {other}", path.display())
}

/// The first entry of a folder that is none of `ours`, nor one that a program was killed at.
fn foreign(path: &Path, ours: &[&str]) -> Option<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_left = |name: &str| {
        let mut ours = ours.iter().map(|name| Path::new(name).with_extension("tmp"));
        ours.any(|temporary| temporary == Path::new(name))
    };
    names.find(|name| !ours.contains(&name.as_str()) && !is_left(name))
}

/// Absolute path; of a link, that of what it leads to.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let Ok(target) = path.read_link() else { return Ok(path) };
    path.canonicalize().or_else(|_| {
        // `weft down` has removed the directory, which is made again there.
        let parent = path.parent().unwrap_or_else(|| Path::new("/"));
        std::path::absolute(parent.join(target))
    })
}

/// Replaces a file, so that a reader sees the old text or the new.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// 16 hex digits that stand for a name.
pub fn short_hash(name: &str) -> String {
    Sha256::digest(name.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_run_directory_is_where_the_link_leads() {
        let folder = tempfile::tempdir().unwrap();
        let [real, link] = ["real", "link"].map(|name| folder.path().join(name));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let led_to = real.canonicalize().unwrap();
        assert_eq!(RunDir::at(&link).unwrap().path(), led_to);
        fs::remove_dir(&real).unwrap();
        assert_eq!(RunDir::at(&link).unwrap().path(), led_to);
        let later = folder.path().join("later");
        assert_eq!(RunDir::at(&later).unwrap().path(), later);
    }

    #[test]
    fn a_socket_path_always_fits() {
        let run = RunDir(PathBuf::from("/run/weft/rome"));
        let short = run.http_socket("gateway-liqo-tenant-milan-client");
        assert!(short.ends_with("http/gateway-liqo-tenant-milan-client.sock"));
        let long = run.http_socket(&"x".repeat(200));
        assert!(long.as_os_str().len() <= SOCKET_PATH_MAX);
        assert_ne!(long, run.http_socket(&"y".repeat(200)));
    }
}
