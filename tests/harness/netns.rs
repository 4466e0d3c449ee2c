use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, setns, unshare};

/// A network namespace, held open by a file descriptor: it ends with its last clone, with the
/// sockets opened in it, or with the process, whatever kills that.
#[derive(Clone, Debug)]
pub struct Netns(Arc<File>);

impl Netns {
    /// A new, unnamed one, with its loopback device up.
    pub fn new() -> Result<Self> {
        let ns = on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
            Self::open(Path::new("/proc/thread-self/ns/net"))
        })?;
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// The one that a file stands for, such as `/proc/PID/ns/net` or `/run/netns/NAME`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Self(Arc::new(file)))
    }

    /// Calls `f` inside, on a thread of its own. Sockets it returns stay in the namespace, so
    /// they can be used from anywhere.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        on_a_thread(|| {
            self.enter().expect("an open namespace can be entered");
            f()
        })
    }

    /// Runs a command inside and returns its output; an error contains its stderr.
    pub fn command(&self, command: &mut Command, input: &str) -> Result<String> {
        self.run(|| finish(command, input))
    }

    /// Runs `ip -batch` inside: one command a line, without the leading `ip`.
    pub fn ip(&self, batch: &str) -> Result<()> {
        self.command(Command::new("ip").args(["-force", "-batch", "-"]), batch).map(drop)
    }

    /// Loads an nftables script inside, as one transaction.
    pub fn nft(&self, script: &str) -> Result<()> {
        self.command(Command::new("nft").args(["-f", "-"]), script).map(drop)
    }

    /// Writes sysctls, given as paths below `/proc/sys/net`.
    pub fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            settings.iter().try_for_each(|(key, value)| {
                let path = Path::new("/proc/sys/net").join(key);
                std::fs::write(&path, value).with_context(|| format!("writing {}", path.display()))
            })
        })
    }

    /// Puts the calling thread inside, for good.
    pub(crate) fn enter(&self) -> Result<()> {
        setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET).context("entering a network namespace")
    }
}

/// Runs a command to its end with `input` on its standard input, and returns what it printed.
pub(crate) fn finish(command: &mut Command, input: &str) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {name}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that ends early closes its input; its status shows the failure.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().with_context(|| format!("waiting for {name}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} failed ({}): {}", output.status, errors.trim());
    String::from_utf8(output.stdout)
        .with_context(|| format!("{name} printed something else than text"))
}

/// Calls `f` on a thread of its own, which may enter namespaces without touching its caller.
pub(crate) fn on_a_thread<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(f).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Fails unless all of these programs are installed, and names the packages that have them.
pub fn require(programs: &[(&str, &str)]) -> Result<()> {
    let dirs = program_dirs();
    let missing: Vec<_> = programs
        .iter()
        .filter(|(program, _)| !dirs.iter().any(|dir| dir.join(program).exists()))
        .map(|(program, package)| format!("{program} (package {package})"))
        .collect();
    if !missing.is_empty() {
        bail!("not installed: {}", missing.join(", "));
    }
    Ok(())
}

/// Folders in which programs are searched: root's, for every user.
pub(crate) fn program_dirs() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = std::env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin".into(), "/sbin".into()]);
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn two_namespaces_share_neither_devices_nor_ports() {
        let (a, b) = (Netns::new().unwrap(), Netns::new().unwrap());
        a.ip("link add br7 type bridge").unwrap();
        assert!(b.ip("link set br7 up").is_err());

        let bind = || TcpListener::bind("127.0.0.1:4711");
        let first = a.run(bind).unwrap();
        assert!(a.run(bind).is_err());
        assert!(b.run(bind).is_ok());
        drop(first);
    }

    #[test]
    fn failed_command_error_has_its_stderr() {
        let error = Netns::new().unwrap().ip("link set nosuch up").unwrap_err();
        assert!(error.to_string().contains("nosuch"), "{error}");
    }
}
