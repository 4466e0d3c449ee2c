use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use super::machine::DIR;
use super::programs::built;
use super::weft::deploy;
use super::{ADMIN, Kubernetes, liqo, node};
use crate::bin_dir;

/// Command lines of a user who works with several clusters.
impl Kubernetes {
    /// Runs a line of shell on this cluster's first node, in a folder with each cluster's kubeconfig,
    /// `ID.yaml`, this project's `deploy`, and Liqo's chart where helm finds it as that of a repository;
    /// what it prints.
    pub fn shell(&self, clusters: &[Self], line: &str) -> Result<String> {
        for cluster in clusters {
            let theirs = cluster.head().host.outside(format!("{DIR}/{ADMIN}"));
            let text = fs::read_to_string(&theirs);
            let text = text.with_context(|| format!("reading {}", theirs.display()))?;
            self.head().write(&format!("{}.yaml", cluster.spec.id), &text)?;
        }
        let helm = built("helm");
        let tools = helm.parent().context("a program is in a folder")?;
        let here = std::env::var_os("PATH").unwrap_or_default();
        let dirs = [tools.to_owned(), bin_dir()?].into_iter().chain(std::env::split_paths(&here));
        let mut shell = Command::new("sh");
        shell.env("PATH", std::env::join_paths(dirs)?).env("HOME", format!("{DIR}/home"));
        let script = format!(
            "cd {DIR} && mkdir -p liqo && ln -sfn {} deploy && ln -sfn {} liqo/liqo && {line}",
            deploy()?.display(),
            liqo::chart().display()
        );
        self.head().host.command(shell.args(["-c", &script]), "").with_context(|| line.to_owned())
    }

    /// Makes an image that every node has known by other names as well.
    pub fn name_image(&self, name: &str, others: &[String]) -> Result<()> {
        self.on_all(|machine| others.iter().try_for_each(|other| node::tag(machine, name, other)))
    }
}
