use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::netns::{Netns, finish, on_a_thread};
use crate::program::{Program, Reaped};

/// The first process of a machine: it lasts as long as its input does, and reaps orphans (the
/// kernel does that for one that ignores SIGCHLD). A new `/sys` shows the machine's own devices;
/// the control groups stay where programs expect them. `/var/lib` is the machine's own.
const INIT: &str = "mount -t tmpfs -o mode=755 none /var/lib
if mount --rbind /sys/fs/cgroup /mnt 2>/dev/null; then
  mount -t sysfs none /sys; mount --move /mnt /sys/fs/cgroup
else mount -t sysfs none /sys; fi
echo ready; exec env --ignore-signal=CHLD cat >/dev/null";

const FRESH_RUN: &str = "mount -t tmpfs -o mode=755 none /run; ";

/// Separate or shared `/run` of a nested machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    Own,
    Shared,
}

/// A machine, as far as the kernel lets one be made of namespaces: network, processes, mounts.
///
/// A holder process is the first of its process namespace. It reads a pipe of ours and ends when
/// that closes, so the machine, everything running on it and everything mounted there is gone with
/// this value and with this process, even if that is killed.
pub struct Host {
    name: String,
    net: Netns,
    pids: File,
    mounts: File,
    holder: Reaped,
    pipe: Option<ChildStdin>,
}

impl Host {
    /// A machine with a private, empty `/run`.
    pub fn new(group: &str, name: &str) -> Result<Self> {
        let holder = on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
            start_holder(FRESH_RUN, group, name)
        })?;
        Self::wait_for(holder, name)
    }

    /// A machine that cannot outlive this one.
    pub fn nested(&self, group: &str, name: &str, files: Files) -> Result<Self> {
        let holder = on_a_thread(|| {
            self.enter()?;
            unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
            let before = match files {
                Files::Shared => "",
                Files::Own => FRESH_RUN,
            };
            start_holder(before, group, name)
        })?;
        Self::wait_for(holder, name)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn net(&self) -> &Netns {
        &self.net
    }

    /// Process ID of what holds the machine, as seen from outside.
    pub fn holder(&self) -> i32 {
        self.holder.pid()
    }

    /// Path of a file of the machine, as seen from outside.
    pub fn outside(&self, path: impl AsRef<Path>) -> PathBuf {
        let inside = path.as_ref();
        let relative = inside.strip_prefix("/").unwrap_or(inside);
        PathBuf::from(format!("/proc/{}/root", self.holder.pid())).join(relative)
    }

    /// A namespace of this name, as `ip netns` on this machine lists it: a pod.
    pub fn add_netns(&self, name: &str) -> Result<Netns> {
        self.command(Command::new("ip").args(["netns", "add", name]), "")?;
        let ns = Netns::open(&self.outside("/run/netns").join(name))?;
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// Runs a command on the machine to its end and returns what it printed.
    pub fn command(&self, command: &mut Command, input: &str) -> Result<String> {
        on_a_thread(|| {
            self.enter()?;
            finish(command, input)
        })
    }

    /// Runs `ip -batch` on the machine: one command a line, without the leading `ip`.
    pub fn ip(&self, batch: &str) -> Result<()> {
        self.command(Command::new("ip").args(["-force", "-batch", "-"]), batch).map(drop)
    }

    /// Starts a long-lived program on the machine; what it prints goes to `log` (a path outside).
    pub fn start(&self, command: &mut Command, log: &Path) -> Result<Program> {
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let copy = file.try_clone().context("sharing a log file")?;
        // Ctrl-C on a terminal is for this process alone.
        command.stdin(Stdio::null()).stdout(copy).stderr(file).process_group(0);
        let name = command.get_program().to_string_lossy().into_owned();
        let child = on_a_thread(|| {
            self.enter()?;
            command.spawn().with_context(|| format!("starting {name} on {}", self.name))
        })?;
        Ok(Program::new(child, log.to_owned()))
    }

    /// Processes running on the machine: ID as seen from outside, and command line.
    pub fn processes(&self) -> Vec<(i32, String)> {
        let namespace = format!("/proc/{}/ns/pid_for_children", self.holder.pid());
        let Ok(ours) = fs::read_link(namespace) else { return Vec::new() };
        all_processes()
            .filter(|pid| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns == ours))
            .filter_map(|pid| Some((pid, command_line(pid)?.join(" "))))
            .collect()
    }

    /// Lets the machine outlive this process: something on it holds the pipe from now on.
    pub fn keep(mut self) -> Result<()> {
        let Some(pipe) = self.pipe.take() else { return Ok(()) };
        let mut sleep = Command::new("sleep");
        sleep.arg("infinity").stdin(Stdio::from(pipe)).stdout(Stdio::null()).stderr(Stdio::null());
        on_a_thread(|| {
            self.enter()?;
            sleep.spawn().map(drop).with_context(|| format!("keeping {}", self.name))
        })
    }

    /// Puts the calling thread on the machine, for good. Children it starts are processes of
    /// the machine; it must not start threads.
    pub(crate) fn enter(&self) -> Result<()> {
        unshare(CloneFlags::CLONE_FS).context("leaving the shared working directory")?;
        setns(self.mounts.as_fd(), CloneFlags::CLONE_NEWNS).context("entering the mounts")?;
        setns(self.pids.as_fd(), CloneFlags::CLONE_NEWPID).context("entering the processes")?;
        self.net.enter()
    }

    fn wait_for(mut holder: Child, name: &str) -> Result<Self> {
        let (pipe, out, err) = (holder.stdin.take(), holder.stdout.take(), holder.stderr.take());
        let mut line = String::new();
        BufReader::new(out.context("stdout is piped")?).read_line(&mut line)?;
        if line != "ready\n" {
            let mut errors = String::new();
            err.context("stderr is piped")?.read_to_string(&mut errors)?;
            bail!("the namespaces of {name} did not come up: {}", errors.trim());
        }
        let ns = |kind: &str| PathBuf::from(format!("/proc/{}/ns/{kind}", holder.id()));
        let open =
            |kind: &str| File::open(ns(kind)).with_context(|| format!("opening {kind} of {name}"));
        let net = Netns::open(&ns("net"))?;
        net.ip("link set lo up")?;
        let (pids, mounts) = (open("pid_for_children")?, open("mnt")?);
        Ok(Self { name: name.to_owned(), net, pids, mounts, holder: Reaped::new(holder), pipe })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.pipe.take().is_some() {
            self.holder.wait();
        }
    }
}

/// Ends every machine of a group that an earlier process left behind; how many there were.
pub fn remove_group(group: &str) -> usize {
    let holders = find_holders(group);
    for (pid, _) in &holders {
        let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
    }
    while holders.iter().any(|(pid, _)| is_alive(*pid)) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    holders.len()
}

/// Process ID and name of each machine of a group.
pub fn find_holders(group: &str) -> Vec<(i32, String)> {
    all_processes()
        .filter_map(|pid| {
            let words = command_line(pid)?;
            let [program, .., marker, name] = words.as_slice() else { return None };
            (program == "unshare" && marker == group).then(|| (pid, name.clone()))
        })
        .collect()
}

fn start_holder(before: &str, group: &str, name: &str) -> Result<Child> {
    Command::new("unshare")
        .args(["--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c"])
        .args([&format!("{before}{INIT}"), group, name])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("starting unshare (package util-linux)")
}

pub(crate) fn all_processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn command_line(pid: i32) -> Option<Vec<String>> {
    let raw = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let text = String::from_utf8_lossy(&raw);
    Some(text.trim_end_matches('\0').split('\0').map(str::to_owned).collect())
}

/// False once the process is gone or a zombie.
fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wait_until;

    #[test]
    fn processes_end_with_their_host() {
        let host = Host::new("weft-host-test", "a").unwrap();
        let nested = host.nested("weft-host-test", "b", Files::Own).unwrap();
        let log = host.outside("/run/sleep.log");
        let program = nested.start(Command::new("sleep").arg("60"), &log).unwrap();
        let pid = program.pid();
        // Between fork and exec it has another command line.
        wait_until("the program runs", Duration::from_secs(5), || {
            let processes = nested.processes();
            let runs = processes.iter().any(|(p, line)| *p == pid && line == "sleep 60");
            runs.then_some(()).ok_or_else(|| format!("{processes:?}"))
        })
        .unwrap();
        std::mem::forget(program);

        drop(host);

        assert!(!is_alive(pid));
        assert!(find_holders("weft-host-test").iter().all(|(pid, _)| !is_alive(*pid)));
    }

    #[test]
    fn machine_sees_own_processes_and_reaps_orphans() {
        let host = Host::new("weft-host-test-2", "a").unwrap();
        let script = "(sh -c 'exit 0' &) ; sleep 0.1; ls /proc | grep -c '^[0-9]'";
        let seen = host.command(Command::new("sh").args(["-c", script]), "").unwrap();
        let count: u32 = seen.trim().parse().unwrap();
        assert!(count <= 4, "init, sh, ls and grep, but saw {count}");
    }
}
