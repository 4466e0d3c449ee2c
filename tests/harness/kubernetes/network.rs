//! Networks that test clusters can have, each installed as its users do.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

use super::image::{Image, libraries};
use super::machine::{DIR, TIMEOUT};
use super::programs::{CNI, built, find};
use super::{Kubernetes, Machine};
use crate::ClusterSpec;
use crate::netns::require;

/// Network that connects the pods of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Debian's bridge plugin, with routes and a masquerade that the harness makes.
    Bridge,
    /// Installed by the manifest of its project.
    Of(&'static Project),
}

/// Manifest of a network, and the programs in its images.
#[derive(Debug, PartialEq, Eq)]
pub struct Project {
    /// Name of the manifest among the built programs.
    manifest: &'static str,
    namespace: &'static str,
    daemon_set: &'static str,
    /// Programs as they are built, and their paths in an image.
    programs: &'static [(&'static str, &'static str)],
    /// Program of an image whose container names none.
    entrypoint: &'static str,
    /// Texts of the manifest that a user would change.
    changes: &'static [(&'static str, &'static str)],
    /// Mode of kube-proxy beside it.
    proxy_mode: &'static str,
    /// Families whose network policies it holds, IPv4 first.
    pub policies: usize,
    pub has_ipv6: bool,
}

/// Changes of flannel's manifest: the version of the plugin, and the cluster's prefixes.
const FLANNEL_CHANGES: [(&str, &str); 2] = [
    ("\"cniVersion\": \"1.0.0\"", "\"cniVersion\": \"0.4.0\""),
    (
        "\"Network\": \"10.244.0.0/16\",",
        "\"Network\": \"PODS4\", \"EnableIPv6\": true, \"IPv6Network\": \"PODS6\",",
    ),
];

/// Routes over VXLAN (port 8472), and a masquerade by iptables.
pub const FLANNEL: Project = Project {
    manifest: "flannel.yaml",
    namespace: "kube-flannel",
    daemon_set: "kube-flannel-ds",
    programs: &[
        ("flannel", "/flannel"),
        ("flanneld", "/opt/bin/flanneld"),
        ("install-conf", "/opt/bin/install-conf"),
    ],
    entrypoint: "",
    changes: &FLANNEL_CHANGES,
    proxy_mode: "iptables",
    policies: 0,
    has_ipv6: true,
};

/// Routes between nodes on one segment, without a tunnel.
pub const FLANNEL_HOST_GW: Project = Project {
    changes: &[
        FLANNEL_CHANGES[0],
        FLANNEL_CHANGES[1],
        ("\"Type\": \"vxlan\"", "\"Type\": \"host-gw\""),
    ],
    ..FLANNEL
};

/// Routes between nodes by BGP, network policies by iptables and ipset.
pub const KUBE_ROUTER: Project = Project {
    manifest: "kube-router.yaml",
    namespace: "kube-system",
    daemon_set: "kube-router",
    programs: &[("kube-router", "/usr/local/bin/kube-router")],
    entrypoint: "/usr/local/bin/kube-router",
    changes: &[
        ("imagePullPolicy: Always", "imagePullPolicy: Never"),
        (
            "        - \"--run-router=true\"\n",
            "        - --run-router=true\n        - --enable-ipv6=true\n        - --service-cluster-ip-range=SERVICES\n",
        ),
    ],
    proxy_mode: "nftables",
    // With a policy for what a pod sends, it drops neighbour solicitations, too (issue 1895 of the project).
    policies: 1,
    has_ipv6: true,
};

/// Routes of flannel, and network policies by Calico's Felix, with iptables and ipset.
pub const CANAL: Project = Project {
    manifest: "canal.yaml",
    namespace: "kube-system",
    daemon_set: "canal",
    programs: &[
        ("flanneld", "/opt/bin/flanneld"),
        ("calico-node", "/bin/calico-node"),
        ("calico", "/opt/cni/bin/calico"),
        ("calico-install", "/opt/cni/bin/install"),
    ],
    entrypoint: "/bin/start-calico",
    changes: &[
        (
            "\"Network\": \"10.244.0.0/16\"",
            "\"Network\": \"PODS4\", \"EnableIPv6\": true, \"IPv6Network\": \"PODS6\"",
        ),
        (
            "\"subnet\": \"usePodCidr\"\n",
            "\"ranges\": [[{\"subnet\": \"usePodCidr\"}], [{\"subnet\": \"usePodCidrIPv6\"}]]\n",
        ),
        (
            "- name: FELIX_IPV6SUPPORT\n              value: \"false\"",
            "- name: FELIX_IPV6SUPPORT\n              value: \"true\"",
        ),
        CNI_FOLDER,
        NO_CONTROLLERS,
    ],
    proxy_mode: "iptables",
    policies: 2,
    has_ipv6: true,
};

/// Calico's own routes over VXLAN (port 4789), its addresses for pods, and its network policies.
pub const CALICO: Project = Project {
    manifest: "calico.yaml",
    namespace: "kube-system",
    daemon_set: "calico-node",
    programs: &[
        ("calico-node", "/bin/calico-node"),
        ("calico", "/opt/cni/bin/calico"),
        ("calico", "/opt/cni/bin/calico-ipam"),
        ("calico-install", "/opt/cni/bin/install"),
    ],
    entrypoint: "/bin/start-calico",
    changes: &[
        CNI_FOLDER,
        NO_CONTROLLERS,
        (
            "            - name: CALICO_IPV4POOL_IPIP\n",
            "            - {name: CALICO_IPV4POOL_CIDR, value: PODS4}\n            - name: CALICO_IPV4POOL_IPIP\n",
        ),
        // Even where nodes are neighbours.
        (
            "- name: CALICO_IPV4POOL_VXLAN\n              value: \"CrossSubnet\"",
            "- name: CALICO_IPV4POOL_VXLAN\n              value: \"Always\"",
        ),
    ],
    proxy_mode: "iptables",
    policies: 2,
    has_ipv6: false,
};

/// Folder of the CNI's configuration, for Calico.
const CNI_FOLDER: (&str, &str) = (
    "            # The CNI network config to install on each node.\n",
    "            - {name: CNI_NET_DIR, value: FOLDER/cni}\n",
);
/// Calico's controllers only clean up after nodes that are gone.
const NO_CONTROLLERS: (&str, &str) = ("  replicas: 1\n", "  replicas: 0\n");

/// Paths of nodes in manifests: a machine has its own ones below [`DIR`].
const FOLDERS: [(&str, &str); 3] =
    [("/opt/cni/bin", PLUGINS), ("/etc/cni/net.d", "cni"), ("/lib/modules", "modules")];
/// Folder of the plugins that a network may add one to.
const PLUGINS: &str = "plugins";
const IMAGE: &str = "localhost/network:test";
const TOOLS: [(&str, &str); 3] =
    [("ipset", "ipset"), ("conntrack", "conntrack"), ("xtables-nft-multi", "iptables")];

impl Network {
    /// Mode of kube-proxy beside it.
    pub(super) fn proxy_mode(self) -> &'static str {
        match self {
            Self::Bridge => "nftables",
            Self::Of(project) => project.proxy_mode,
        }
    }

    /// Folder that containerd has plugins from.
    pub(super) fn plugins(self) -> String {
        match self {
            Self::Bridge => CNI.to_owned(),
            Self::Of(_) => format!("{DIR}/{PLUGINS}"),
        }
    }
}

impl Project {
    /// Fails with what is missing here for this network, if anything is.
    pub fn require(&self) -> Result<()> {
        let programs = self.programs.iter().map(|(name, _)| *name).chain([self.manifest]);
        let missing: Vec<_> = programs.filter(|name| !built(name).exists()).collect();
        ensure!(missing.is_empty(), "`make kubernetes` has not built {missing:?}");
        require(&TOOLS)
    }

    /// One image in place of all that the manifest names.
    fn image(&self) -> Result<Image> {
        let start = fs::canonicalize("harness/kubernetes/calico/start");
        let image = Image::busybox()?.named(IMAGE).entrypoint(self.entrypoint);
        let image = image
            .file("/etc/nsswitch.conf", "/etc/nsswitch.conf")
            // ipset looks up the names of protocols there.
            .file("/etc/protocols", "/etc/protocols")
            .file("/bin/start-calico", start.context("not started in the folder `tests`")?);
        let image = with_iptables(image)?;
        let image = ["ipset", "conntrack", "ip"].iter().try_fold(image, |image, name| {
            image.program(name, &find(name).with_context(|| format!("{name} is not installed"))?)
        })?;
        Ok(self.programs.iter().fold(image, |image, (name, path)| image.file(path, built(name))))
    }

    /// The manifest with this cluster's prefixes and a machine's folders.
    fn manifest(&self, spec: &ClusterSpec) -> Result<String> {
        let path = built(self.manifest);
        let text = fs::read_to_string(&path);
        let mut text = text.with_context(|| format!("reading {}", path.display()))?;
        for (from, to) in self.changes {
            ensure!(text.contains(from), "{} has no {from:?}", self.manifest);
            text = text.replace(from, to);
        }
        let prefix = |is_v6| spec.pod_cidrs.iter().find(|cidr| cidr.addr().is_ipv6() == is_v6);
        let prefix = |is_v6| prefix(is_v6).map(IpNet::to_string).unwrap_or_default();
        let text = text.replace("PODS4", &prefix(false)).replace("PODS6", &prefix(true));
        let services: Vec<_> = spec.service_cidrs.iter().map(IpNet::to_string).collect();
        let text = text.replace("SERVICES", &services.join(",")).replace("FOLDER", DIR);
        Ok(FOLDERS.iter().fold(text, |text, (from, to)| {
            text.replace(&format!("path: {from}\n"), &format!("path: {DIR}/{to}\n"))
        }))
    }
}

/// Adds iptables, with nftables under it and without, and its extensions, one of which needs a library.
fn with_iptables(image: Image) -> Result<Image> {
    let mut image = image;
    for (multi, infixes) in
        [("xtables-nft-multi", ["", "-nft"]), ("xtables-legacy-multi", ["-legacy"; 2])]
    {
        image = image.program(multi, &find(multi).context("iptables is not installed")?)?;
        for (family, infix) in
            ["iptables", "ip6tables"].iter().flat_map(|f| infixes.map(|i| (f, i)))
        {
            for verb in ["", "-save", "-restore"] {
                image = image.link(&format!("/bin/{family}{infix}{verb}"), multi);
            }
        }
    }
    let extensions =
        Path::new("/usr/lib").join(format!("{}-linux-gnu/xtables", std::env::consts::ARCH));
    let statistic = extensions.join("libxt_statistic.so");
    let libraries = libraries(&statistic)?.into_iter().map(|path| (path.clone(), path));
    let files = fs::read_dir(&extensions).context("reading xtables' extensions")?.flatten();
    let files = files.map(|file| (file.path(), file.path())).chain(libraries);
    Ok(files.fold(image, |image, (path, source)| image.file(path, source)))
}

/// Prepares the folder of plugins on a node.
pub(super) fn write_plugins(machine: &Machine) -> Result<()> {
    let folder = machine.host.outside(format!("{DIR}/{PLUGINS}"));
    fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
    for plugin in fs::read_dir(CNI).context("reading Debian's plugins")?.flatten() {
        symlink(plugin.path(), folder.join(plugin.file_name())).context("linking a plugin")?;
    }
    Ok(())
}

impl Kubernetes {
    /// Installs the network of the cluster by its manifest.
    pub(super) fn install_network(&self) -> Result<()> {
        let Network::Of(project) = self.spec.network else { return Ok(()) };
        self.load(&project.image()?)?;
        let manifest = project.manifest(&self.spec)?;
        let images = manifest.lines().filter_map(|line| line.trim().strip_prefix("image: "));
        let images: Vec<_> = images.map(full_name).collect();
        self.name_image(IMAGE, &images)?;
        self.apply(&manifest)?;
        let set = format!("daemonset/{}", project.daemon_set);
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let status = ["rollout", "status", &set, "--namespace", project.namespace, &timeout];
        self.kubectl(&status).map(drop).with_context(|| {
            let containers = ["install-cni", "calico-node", "kube-flannel", "kube-router"];
            let logs = containers.map(|name| {
                let log = ["logs", &set, "--namespace", project.namespace, "--tail=20", "-c", name];
                self.kubectl(&log).unwrap_or_default()
            });
            format!("{}; {logs:?}", self.report())
        })
    }
}

/// Name of an image as the kubelet asks for it.
fn full_name(image: &str) -> String {
    let has_tag = image.rsplit('/').next().is_some_and(|name| name.contains(':'));
    if has_tag { image.to_owned() } else { format!("{image}:latest") }
}
