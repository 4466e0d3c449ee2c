use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::netns::{program_dirs, require};

/// Folder in which `make kubernetes` puts its programs.
const DIR: &str = "WEFT_KUBERNETES_DIR";
const BUILT: [&str; 7] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "helm",
];
const INSTALLED: [(&str, &str); 5] = [
    ("etcd", "etcd-server"),
    ("containerd", "containerd"),
    ("containerd-shim-runc-v2", "containerd"),
    ("runc", "runc"),
    ("busybox", "busybox-static"),
];
/// Debian's folder of the plugins that connect pods.
pub(super) const CNI: &str = "/usr/lib/cni";

/// Fails with what is missing here for a cluster, if anything is.
pub fn require_kubernetes() -> Result<()> {
    require(&INSTALLED)?;
    let plugin = Path::new(CNI).join("bridge");
    ensure!(plugin.exists(), "not installed: containernetworking-plugins");
    let missing: Vec<_> = BUILT.into_iter().filter(|name| !built(name).exists()).collect();
    ensure!(missing.is_empty(), "`make kubernetes` has not built {}", missing.join(", "));
    Ok(())
}

pub(super) fn built(name: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let dir = std::env::var_os(DIR).map(PathBuf::from);
    dir.unwrap_or_else(|| home().join(".cache/weft/kubernetes/bin")).join(name)
}

pub(super) fn find(program: &str) -> Option<PathBuf> {
    program_dirs().iter().map(|dir| dir.join(program)).find(|path| path.exists())
}
