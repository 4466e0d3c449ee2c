//! Programs of others, found and run.

use std::env;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread::{park, spawn};

/// Names the file that `make test` counts skipped tests by.
const SKIPPED: &str = "WEFT_SKIPPED";
/// Lets a test fail that would be skipped, where everything has to be there.
const NO_SKIP: &str = "WEFT_NO_SKIP";

/// Reports that the calling test does nothing here, and why. Past the test runner, which captures
/// the output of tests that pass.
///
/// # Panics
///
/// Panics if the environment has `WEFT_NO_SKIP`.
pub fn skip(why: &str) {
    assert!(env::var_os(NO_SKIP).is_none(), "{NO_SKIP} is set, but {why}");
    record(why);
}

/// Reports that what others do on this machine leaves the calling test nothing to judge. No setup mends that: unlike
/// [`skip`], it fails nowhere.
pub fn skip_disturbed(why: &str) {
    record(why);
}

fn record(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let line = format!("skipped: {test}: {why}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    let Some(list) = env::var_os(SKIPPED) else { return };
    let list = OpenOptions::new().create(true).append(true).open(list);
    let _ = list.and_then(|mut list| list.write_all(line.as_bytes()));
}

/// Path of what `make kubernetes` has built.
pub fn built(name: &str) -> PathBuf {
    let home = || PathBuf::from(env::var_os("HOME").unwrap_or_default());
    let dir = env::var_os("WEFT_KUBERNETES_DIR").map(PathBuf::from);
    dir.unwrap_or_else(|| home().join(".cache/weft/kubernetes/bin")).join(name)
}

/// True if the command is installed.
pub(crate) fn found(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| dir.join(name).exists())
}

/// A program that ends with the thread that starts it, even if that is killed.
pub(crate) fn command(program: &Path, log: &Path) -> Command {
    let log = File::create(log).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command
}

/// Starts a program that ends with this process at the latest, however that ends.
pub fn start_program(program: &Path, arguments: &[String], log: &Path) -> Child {
    let mut command = command(program, log);
    command.args(arguments);
    keep(command)
}

/// Starts it on a thread that lasts as long as this process.
pub(crate) fn keep(mut command: Command) -> Child {
    let (sender, child) = channel();
    spawn(move || {
        sender.send(command.spawn().unwrap()).unwrap();
        loop {
            park();
        }
    });
    child.recv().unwrap()
}

pub(crate) fn run(command: &mut Command, input: &str) -> Output {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_test_fails_where_none_may_be() {
        const CHILD: &str = "WEFT_TEST_CHILD";
        match env::var(CHILD).as_deref() {
            Ok("missing") => return skip("it is a child"),
            Ok(_) => return skip_disturbed("it is a child"),
            Err(_) => {}
        }
        let passes = |why: &str, settings: &[(&str, &str)]| {
            let mut child = Command::new(env::current_exe().unwrap());
            child.args(["--exact", "programs::tests::skipped_test_fails_where_none_may_be"]);
            child.env(CHILD, why).env_remove(NO_SKIP).env_remove(SKIPPED);
            run(child.envs(settings.iter().copied()), "").status.success()
        };
        assert!(passes("missing", &[]));
        assert!(!passes("missing", &[(NO_SKIP, "1")]));
        assert!(passes("disturbed", &[(NO_SKIP, "1")]));
    }
}
