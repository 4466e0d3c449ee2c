//! Networks that test clusters can have, each installed as its users do.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::image::Image;
use super::machine::{DIR, TIMEOUT};
use super::programs::{CNI, built, find};
use super::{Kubernetes, Machine};
use crate::ClusterSpec;

/// What connects the pods of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Debian's bridge plugin, with routes and a masquerade that the harness makes.
    Bridge,
    /// Routes over VXLAN (port 8472), and a masquerade by iptables.
    Flannel,
    /// Routes between nodes by BGP, network policies by iptables and ipset.
    KubeRouter,
}

/// Paths of nodes in manifests: a machine has its own ones below [`DIR`].
const FOLDERS: [(&str, &str); 3] =
    [("/opt/cni/bin", PLUGINS), ("/etc/cni/net.d", "cni"), ("/lib/modules", "modules")];
/// Folder of the plugins that a network may add one to.
const PLUGINS: &str = "plugins";
const IPTABLES: &str = "/usr/lib/x86_64-linux-gnu/xtables";

impl Network {
    /// Fails with what is missing here for this network, if anything is.
    pub fn require(self) -> Result<()> {
        let missing: Vec<_> = self.files().iter().filter(|name| !built(name).exists()).collect();
        ensure!(missing.is_empty(), "`make kubernetes` has not built {missing:?}");
        if self == Self::KubeRouter {
            crate::netns::require(&[("ipset", "ipset")])?;
        }
        Ok(())
    }

    /// True if it enforces network policies.
    pub fn has_policies(self) -> bool {
        self == Self::KubeRouter
    }

    /// Mode of kube-proxy beside it.
    pub(super) fn proxy_mode(self) -> &'static str {
        match self {
            Self::Bridge | Self::KubeRouter => "nftables",
            Self::Flannel => "iptables",
        }
    }

    /// Folder that containerd has plugins from.
    pub(super) fn plugins(self) -> String {
        if self == Self::Bridge { CNI.to_owned() } else { format!("{DIR}/{PLUGINS}") }
    }

    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Bridge => &[],
            Self::Flannel => &["flannel.yaml", "flanneld", "install-conf", "flannel"],
            Self::KubeRouter => &["kube-router.yaml", "kube-router"],
        }
    }

    fn daemon_set(self) -> [&'static str; 2] {
        match self {
            Self::Bridge | Self::Flannel => ["kube-flannel", "kube-flannel-ds"],
            Self::KubeRouter => ["kube-system", "kube-router"],
        }
    }

    fn image(self) -> Result<Image> {
        let image = Image::busybox()?.named(IMAGE);
        Ok(match self {
            Self::Bridge | Self::Flannel => {
                let image = image.file("/flannel", built("flannel"));
                ["flanneld", "install-conf"].into_iter().fold(iptables(image)?, |image, name| {
                    image.file(Path::new("/opt/bin").join(name), built(name))
                })
            }
            Self::KubeRouter => {
                let program = "/usr/local/bin/kube-router";
                let image = iptables(image.file(program, built("kube-router")))?;
                let image = image.file("/etc/nsswitch.conf", "/etc/nsswitch.conf");
                programs(image.entrypoint(program), &["ipset", "ip"])?
            }
        })
    }

    /// Its manifest, which names other folders, the cluster's pod CIDR and no image to pull.
    fn manifest(self, spec: &ClusterSpec) -> Result<String> {
        let path = built(self.files()[0]);
        let text = std::fs::read_to_string(&path);
        let text = text.with_context(|| format!("reading {}", path.display()))?;
        let pods = spec.pod_cidrs[0].to_string();
        let changes =
            FOLDERS.map(|(from, to)| (format!("path: {from}"), format!("path: {DIR}/{to}")));
        let others = [
            ("imagePullPolicy: Always".to_owned(), "imagePullPolicy: Never".to_owned()),
            ("10.244.0.0/16".to_owned(), pods),
            // That of the plugin.
            ("\"cniVersion\": \"1.0.0\"".to_owned(), "\"cniVersion\": \"0.4.0\"".to_owned()),
        ];
        let all = changes.into_iter().chain(others);
        Ok(all.fold(text, |text, (from, to)| text.replace(&from, &to)))
    }
}

const IMAGE: &str = "localhost/network:test";

/// Adds iptables in the way of today's distributions, over nftables.
fn iptables(image: Image) -> Result<Image> {
    let names = ["iptables", "ip6tables"];
    let names =
        names.iter().flat_map(|name| ["", "-save", "-restore"].map(|end| format!("{name}{end}")));
    let multi = find("xtables-nft-multi").context("iptables is not installed")?;
    let image = image.program("xtables-nft-multi", &multi)?;
    let image =
        names.fold(image, |image, name| image.link(&format!("/bin/{name}"), "xtables-nft-multi"));
    let extensions = std::fs::read_dir(IPTABLES).with_context(|| format!("reading {IPTABLES}"))?;
    extensions.flatten().try_fold(image, |image, file| Ok(image.file(file.path(), file.path())))
}

/// Adds programs in place of busybox's.
fn programs(image: Image, names: &[&str]) -> Result<Image> {
    names.iter().try_fold(image, |image, name| {
        let program = find(name).with_context(|| format!("{name} is not installed"))?;
        image.program(name, &program)
    })
}

/// Prepares the folder of plugins on a node.
pub(super) fn write_files(machine: &Machine) -> Result<()> {
    let folder = machine.host.outside(format!("{DIR}/{PLUGINS}"));
    std::fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
    for plugin in std::fs::read_dir(CNI).context("reading Debian's plugins")?.flatten() {
        let link = folder.join(plugin.file_name());
        std::os::unix::fs::symlink(plugin.path(), &link).context("linking a plugin")?;
    }
    Ok(())
}

impl Kubernetes {
    /// Installs the network of the cluster by its manifest.
    pub(super) fn install_network(&self) -> Result<()> {
        let network = self.spec.network;
        if network == Network::Bridge {
            return Ok(());
        }
        self.load(&network.image()?)?;
        let manifest = network.manifest(&self.spec)?;
        let images = manifest.lines().filter_map(|line| line.trim().strip_prefix("image: "));
        let images: Vec<_> = images.map(full_name).collect();
        self.name_image(IMAGE, &images)?;
        self.apply(&manifest)?;
        let [namespace, name] = network.daemon_set();
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let set = format!("daemonset/{name}");
        let status = ["rollout", "status", &set, "--namespace", namespace, &timeout];
        self.kubectl(&status).map(drop).with_context(|| {
            let logs = ["logs", &set, "--namespace", namespace, "--all-containers", "--tail=40"];
            format!("{:?}: {:?}", network, self.kubectl(&logs))
        })
    }
}

/// Name of an image as the kubelet asks for it.
fn full_name(image: &str) -> String {
    let path = PathBuf::from(image);
    let has_tag = path.file_name().is_some_and(|name| name.to_string_lossy().contains(':'));
    if has_tag { image.to_owned() } else { format!("{image}:latest") }
}
