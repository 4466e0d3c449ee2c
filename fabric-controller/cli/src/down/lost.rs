//! Processes whose run directory someone removed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use fabric_supervisor::process::{Identity, is_seen_alike, marked, neighbours};
use fabric_supervisor::rundir::RunDir;

use crate::host;
use crate::selection::{Selection, all};

/// Suffix that the kernel adds to the path of an open file that has been removed.
const REMOVED: &str = " (deleted)";

/// Run directories, of those that are meant, that are gone although processes of this network
/// namespace were started from them.
pub(super) fn dirs(selection: &Selection) -> anyhow::Result<Vec<RunDir>> {
    let named = selection.run_dir.is_some() || selection.cluster.is_some();
    let place = std::path::absolute(selection.place())?;
    let mut dirs: BTreeSet<PathBuf> = BTreeSet::new();
    for pid in neighbours() {
        let locks = removed_locks(pid);
        let locked = locks.iter().filter_map(|lock| lock.parent()).map(Path::to_owned);
        let named = marked(pid).into_iter().chain(locked);
        dirs.extend(named.filter(|dir| is_seen_alike(pid, dir)));
    }
    let is_meant = |dir: &PathBuf| {
        let is_there = if named { *dir == place } else { dir.starts_with(&place) };
        is_there && !dir.join("weft.json").exists()
    };
    dirs.into_iter().filter(is_meant).map(|dir| RunDir::at(&dir)).collect()
}

/// Supervisors of a directory whose lock is no longer in it.
pub(super) fn supervisors(dir: &Path) -> Vec<Identity> {
    let holds = |pid: &i32| {
        removed_locks(*pid).iter().any(|lock| lock.parent() == Some(dir))
            && is_seen_alike(*pid, dir)
    };
    neighbours().filter(holds).filter_map(Identity::of).collect()
}

/// True if a fabric that was not meant uses this network namespace.
pub(super) fn others_are_here() -> anyhow::Result<bool> {
    if neighbours().filter_map(marked).any(|dir| dir.join("weft.json").exists()) {
        return Ok(true);
    }
    for dir in all()? {
        // Nothing was ever started from one without a record.
        let netns = dir.record()?.map(|record| record.netns);
        if netns.is_some_and(|netns| netns == 0 || netns == host::netns()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The locks of run directories that a process still holds open.
fn removed_locks(pid: i32) -> Vec<PathBuf> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let paths = files.filter_map(|entry| fs::read_link(entry.path()).ok());
    paths
        .filter_map(|path| Some(PathBuf::from(path.to_str()?.strip_suffix(REMOVED)?)))
        .filter(|path| path.ends_with("weft.lock"))
        .collect()
}
