use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::{Value, json};

use super::certificates::{Authority, Subject};
use super::control_plane::url;
use super::image::BUSYBOX;
use super::machine::{DIR, Machine, TIMEOUT};
use super::programs::built;
use super::{Network, network};
use crate::{ClusterSpec, wait_until};

const SOCKET: &str = "/run/containerd/containerd.sock";

/// Writes what a node's programs read; `group` is the control group of its pods.
pub(super) fn write_files(
    machine: &Machine,
    spec: &ClusterSpec,
    ca: &Authority,
    group: &str,
) -> Result<()> {
    let user = format!("system:node:{}", machine.name);
    let subject = Subject {
        name: &user,
        organization: Some("system:nodes"),
        dns: &[&machine.name],
        addresses: &machine.addresses,
    };
    let proxy = Subject { name: "system:kube-proxy", ..Subject::default() };
    let serving = ca.issue(&subject)?;
    machine.write("ca.crt", &ca.certificate())?;
    machine.write("kubelet.crt", &serving.certificate)?;
    machine.write("kubelet.key", &serving.key)?;
    let kubeconfig = |subject| ca.kubeconfig(&url(spec), subject);
    machine.write("kubelet.kubeconfig", &kubeconfig(&subject)?.to_string())?;
    machine.write("kube-proxy.kubeconfig", &kubeconfig(&proxy)?.to_string())?;
    machine.write("kubelet.json", &kubelet_config(group).to_string())?;
    machine.write("kube-proxy.json", &proxy_config(machine, spec).to_string())?;
    match spec.network {
        Network::Bridge => give_pods(machine, "cni0", &spec.node_pod_cidrs(machine.number))?,
        Network::Of(_) => network::write_plugins(machine)?,
    }
    machine.write("containerd.toml", &containerd_config(spec.network))
}

/// Gives pods that start on this node from now on addresses of these prefixes, behind a bridge.
pub(super) fn give_pods(machine: &Machine, bridge: &str, prefixes: &[IpNet]) -> Result<()> {
    machine.write("cni/10-pods.conflist", &cni_config(bridge, prefixes).to_string())
}

pub(super) fn containerd() -> Command {
    let mut containerd = Command::new("containerd");
    containerd.arg(format!("--config={DIR}/containerd.toml"));
    containerd
}

pub(super) fn kubelet(machine: &Machine, spec: &ClusterSpec) -> Command {
    let addresses: Vec<_> = machine.addresses.iter().map(ToString::to_string).collect();
    let mut kubelet = Command::new(built("kubelet"));
    kubelet
        .arg(format!("--config={DIR}/kubelet.json"))
        .arg(format!("--kubeconfig={DIR}/kubelet.kubeconfig"))
        .arg(format!("--hostname-override={}", machine.name))
        .arg(format!("--node-ip={}", addresses.join(",")));
    if spec.read_only {
        kubelet.arg(format!("--root-dir={DIR}/kubelet"));
    }
    kubelet
}

pub(super) fn proxy() -> Command {
    let mut proxy = Command::new(built("kube-proxy"));
    proxy.arg(format!("--config={DIR}/kube-proxy.json"));
    proxy
}

pub(super) fn wait_for_containerd(machine: &Machine) -> Result<()> {
    wait_until("containerd answers", TIMEOUT, || ctr(machine, &["version"]).map(drop))
}

/// Makes an image known to a node.
pub(super) fn import(machine: &Machine, archive: &Path) -> Result<()> {
    let path = archive.to_str().context("a path is text")?;
    ctr(machine, &["images", "import", path]).map(drop)
}

/// Makes an image that is there known by another name.
pub(super) fn tag(machine: &Machine, name: &str, other: &str) -> Result<()> {
    ctr(machine, &["images", "tag", "--force", name, other]).map(drop)
}

fn ctr(machine: &Machine, args: &[&str]) -> Result<String> {
    let mut ctr = Command::new("ctr");
    ctr.args(["--address", SOCKET, "--namespace", "k8s.io"]).args(args);
    machine.host.command(&mut ctr, "")
}

/// Here a process may lack the right to be spared by the kernel when memory runs out, and with it
/// the right to spare others; the pods do without. The plugin `opt` would leave a folder in /opt.
fn containerd_config(network: Network) -> String {
    let plugins = network.plugins();
    format!(
        r#"version = 2
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{BUSYBOX}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{DIR}/cni"
"#
    )
}

fn cni_config(bridge: &str, subnets: &[IpNet]) -> Value {
    let ranges: Vec<_> = subnets.iter().map(|cidr| json!([{"subnet": cidr.to_string()}])).collect();
    let default =
        |cidr: &IpNet| json!({"dst": if cidr.addr().is_ipv4() { "0.0.0.0/0" } else { "::/0" }});
    json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge", "bridge": bridge, "isGateway": true, "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": ranges,
                    "routes": subnets.iter().map(default).collect::<Vec<_>>(),
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

fn kubelet_config(group: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": format!("{DIR}/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": format!("{DIR}/kubelet.crt"),
        "tlsPrivateKeyFile": format!("{DIR}/kubelet.key"),
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "resolvConf": "",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": group,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        // A developer's disk may be full.
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    })
}

fn proxy_config(machine: &Machine, spec: &ClusterSpec) -> Value {
    let cidrs: Vec<_> = spec.pod_cidrs.iter().map(IpNet::to_string).collect();
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": spec.network.proxy_mode(),
        "clientConnection": {"kubeconfig": format!("{DIR}/kube-proxy.kubeconfig")},
        "clusterCIDR": cidrs.join(","),
        "hostnameOverride": machine.name,
        // The size of that table is the same for all machines of one kernel.
        "conntrack": {"maxPerCore": 0, "min": 0},
    })
}
