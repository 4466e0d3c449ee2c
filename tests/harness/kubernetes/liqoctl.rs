use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::machine::DIR;
use super::programs::{built, find};
use super::{ADMIN, Kubernetes};
use crate::Host;
use crate::netns::on_a_thread;

/// Liqo's own command-line tool.
const LIQOCTL: &str = "liqoctl";
/// Time limit of calls that have none of their own, in seconds.
const TIMEOUT: &str = "180";

/// Result of one call of liqoctl.
#[derive(Debug)]
pub struct Answer {
    pub success: bool,
    pub stdout: String,
    /// Progress, warnings, errors.
    pub stderr: String,
}

/// Fails if there is no liqoctl here.
pub fn require_liqoctl() -> Result<()> {
    let where_built = built(LIQOCTL);
    ensure!(program().is_some(), "no liqoctl, neither on PATH nor as {}", where_built.display());
    Ok(())
}

fn program() -> Option<PathBuf> {
    Some(built(LIQOCTL)).filter(|path| path.exists()).or_else(|| find(LIQOCTL))
}

impl Kubernetes {
    /// Calls liqoctl as an administrator of this cluster, and of the remote one if there is one.
    ///
    /// # Errors
    ///
    /// If it panics, which it does where it misses something. All else is in the answer.
    pub fn liqoctl(&self, remote: Option<&Self>, args: &[&str]) -> Result<Answer> {
        let mut call = Command::new("timeout");
        call.arg(TIMEOUT).arg(program().context("there is no liqoctl")?).args(args);
        call.env("KUBECONFIG", format!("{DIR}/{ADMIN}")).env("HOME", format!("{DIR}/home"));
        if let Some(remote) = remote {
            call.arg(format!("--remote-kubeconfig={}", self.kubeconfig_of(remote)?));
        }
        answer(&self.head().host, &mut call)
    }

    /// A copy of another cluster's kubeconfig on this one's first node.
    pub fn kubeconfig_of(&self, other: &Self) -> Result<String> {
        let theirs = other.head().host.outside(format!("{DIR}/{ADMIN}"));
        let text = fs::read_to_string(&theirs);
        let text = text.with_context(|| format!("reading {}", theirs.display()))?;
        let name = format!("{}.kubeconfig", other.spec.id);
        self.head().write(&name, &text)?;
        Ok(format!("{DIR}/{name}"))
    }
}

fn answer(host: &Host, command: &mut Command) -> Result<Answer> {
    let output = on_a_thread(|| {
        host.enter()?;
        command.stdin(Stdio::null()).output().context("running liqoctl")
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let answer = Answer {
        success: output.status.success(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    };
    ensure!(!answer.stderr.contains("panic:"), "liqoctl panicked: {}", answer.stderr);
    Ok(answer)
}
