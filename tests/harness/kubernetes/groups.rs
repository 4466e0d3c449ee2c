use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};

const ROOT: &str = "/sys/fs/cgroup";
const MARK: &str = "weft";

/// Removes control groups once its input has ended and what was in them has, too. The kernel
/// ties everything else of a machine to the life of its first process, but not these.
const KEEPER: &str = "cat >/dev/null
for try in $(seq 200); do
  find \"$@\" -depth -type d -exec rmdir {} + 2>/dev/null
  ls -d \"$@\" >/dev/null 2>&1 || exit 0
  sleep 0.05
done";

/// The control groups of a cluster, `/weft-PID-CLUSTER` in every hierarchy. They are gone with
/// this value and with this process, even if that is killed.
pub(super) struct Groups {
    name: String,
    keeper: Child,
    pipe: Option<ChildStdin>,
}

impl Groups {
    pub(super) fn new(cluster: &str) -> Result<Self> {
        remove_abandoned();
        let name = format!("{MARK}-{}-{cluster}", std::process::id());
        add(&name)?;
        let mut keeper = start_keeper(&name)?;
        let pipe = keeper.stdin.take();
        Ok(Self { name, keeper, pipe })
    }

    /// Adds the group that all pods of a machine are in, and returns it in the kubelet's notation:
    /// every hierarchy must have it before that starts.
    pub(super) fn add_machine(&self, machine: &str) -> Result<String> {
        let name = format!("{}/{machine}", self.name);
        add(&name)?;
        Ok(format!("/{name}"))
    }

    /// Removes the groups of a machine's pods, which have ended.
    pub(super) fn empty(&self, machine: &str) {
        let all = hierarchies().into_iter().map(|hierarchy| hierarchy.join(&self.name));
        all.for_each(|group| subfolders(&group.join(machine)).iter().for_each(|pods| remove(pods)));
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.keeper.wait();
    }
}

fn start_keeper(name: &str) -> Result<Child> {
    use std::os::unix::process::CommandExt;
    Command::new("sh")
        .args(["-c", KEEPER, "keeper"])
        .args(hierarchies().iter().map(|hierarchy| hierarchy.join(name)))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("starting sh")
}

/// One folder with cgroup v2, one for each controller with v1.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(ROOT);
    if root.join("cgroup.controllers").exists() { vec![root] } else { subfolders(&root) }
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

fn add(name: &str) -> Result<()> {
    hierarchies().iter().try_for_each(|hierarchy| {
        let folder = hierarchy.join(name);
        pass_controllers_on(folder.parent().unwrap_or(hierarchy));
        fs::create_dir(&folder).with_context(|| format!("adding {}", folder.display()))?;
        inherit_cpus(&folder)
    })
}

/// With v2 a group has only the controllers that its parent passes on.
fn pass_controllers_on(parent: &Path) {
    let all = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
    for controller in all.split_whitespace() {
        // A controller that cannot be passed on is missed only by a process that needs it.
        let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// With v1 a new group may use no processor and no memory node, and so holds no process.
fn inherit_cpus(folder: &Path) -> Result<()> {
    let is_v1 = folder.join("cgroup.clone_children").exists();
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let (own, parent) = (folder.join(file), folder.join("..").join(file));
        if is_v1 && own.exists() {
            let value = fs::read_to_string(parent).with_context(|| format!("reading {file}"))?;
            fs::write(&own, value).with_context(|| format!("writing {}", own.display()))?;
        }
    }
    Ok(())
}

/// Removes groups of processes that were killed together with their owner.
fn remove_abandoned() {
    let groups = hierarchies().into_iter().flat_map(|hierarchy| subfolders(&hierarchy));
    groups.filter(|group| is_abandoned(group)).for_each(|group| remove(&group));
}

fn is_abandoned(group: &Path) -> bool {
    let name = group.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let mut words = name.split('-');
    let owner = (words.next() == Some(MARK)).then(|| words.next()?.parse::<u32>().ok()).flatten();
    owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

fn remove(group: &Path) {
    subfolders(group).iter().for_each(|inner| remove(inner));
    // Not empty yet: its processes are about to end, and the next one removes it.
    let _ = fs::remove_dir(group);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_removed_even_after_kill() {
        let name = format!("{MARK}-{}-groups", std::process::id());
        let exists = |name: &str| hierarchies().iter().any(|at| at.join(name).exists());
        let groups = Groups::new("groups").unwrap();
        groups.add_machine("a").unwrap();
        assert!(exists(&name));
        drop(groups);
        assert!(!exists(&name));

        let dead = Command::new("true").spawn().map(|mut child| (child.id(), child.wait()));
        let abandoned = format!("{MARK}-{}-groups", dead.unwrap().0);
        add(&abandoned).unwrap();
        add(&format!("{abandoned}/inner")).unwrap();
        drop(Groups::new("next").unwrap());
        assert!(!exists(&abandoned));
    }
}
