use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use ipnet::IpNet;

use super::audit;
use super::certificates::{Authority, Subject, key_pair};
use super::machine::{DIR, Machine, TIMEOUT};
use super::programs::built;
use crate::{ClusterSpec, wait_until};

const ETCD: &str = "http://127.0.0.1:2379";
const PORT: u16 = 6443;
pub(super) const API_SERVER: &str = "kube-apiserver";

/// URL of the API server: on the first node.
pub(super) fn url(spec: &ClusterSpec) -> String {
    format!("https://{}", SocketAddr::new(spec.node_address(1), PORT))
}

/// Writes what the control plane's programs read.
pub(super) fn write_files(head: &Machine, spec: &ClusterSpec, ca: &Authority) -> Result<()> {
    let identity = ca.issue(&Subject {
        name: API_SERVER,
        dns: &["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"],
        addresses: &api_addresses(spec),
        ..Subject::default()
    })?;
    let kubelet_client = ca.issue(&admin())?;
    head.write("apiserver.crt", &identity.certificate)?;
    head.write("apiserver.key", &identity.key)?;
    head.write("kubelet-client.crt", &kubelet_client.certificate)?;
    head.write("kubelet-client.key", &kubelet_client.key)?;
    let (private, public) = key_pair()?;
    head.write("accounts.key", &private)?;
    head.write("accounts.pub", &public)?;
    head.write("ca.key", &ca.key())?;
    head.write(audit::POLICY, &audit::policy().to_string())?;
    for name in CONTROLLING {
        let user = format!("system:{name}");
        let subject = Subject { name: &user, ..Subject::default() };
        let kubeconfig = ca.kubeconfig(&url(spec), &subject)?;
        head.write(&format!("{name}.kubeconfig"), &kubeconfig.to_string())?;
    }
    Ok(())
}

/// Subject with all rights.
pub(super) fn admin() -> Subject<'static> {
    Subject { name: "admin", organization: Some("system:masters"), ..Subject::default() }
}

pub(super) fn etcd() -> Command {
    let mut etcd = Command::new("etcd");
    etcd.args(["--data-dir", "/var/lib/etcd", "--unsafe-no-fsync"])
        .args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD])
        .args(["--listen-peer-urls", "http://127.0.0.1:2380"]);
    etcd
}

pub(super) fn api_server(spec: &ClusterSpec) -> Command {
    let file = |flag: &str, name: &str| format!("--{flag}={DIR}/{name}");
    let services: Vec<_> = spec.service_cidrs.iter().map(IpNet::to_string).collect();
    let mut server = Command::new(built(API_SERVER));
    server
        .arg(format!("--etcd-servers={ETCD}"))
        .arg(format!("--advertise-address={}", spec.node_address(1)))
        .arg(format!("--service-cluster-ip-range={}", services.join(",")))
        .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
        .arg("--allow-privileged")
        .arg(file("client-ca-file", "ca.crt"))
        .arg(file("tls-cert-file", "apiserver.crt"))
        .arg(file("tls-private-key-file", "apiserver.key"))
        .arg(file("kubelet-client-certificate", "kubelet-client.crt"))
        .arg(file("kubelet-client-key", "kubelet-client.key"))
        // Names of nodes are in no DNS.
        .arg("--kubelet-preferred-address-types=InternalIP")
        .arg("--service-account-issuer=https://kubernetes.default.svc")
        .arg(file("service-account-key-file", "accounts.pub"))
        .arg(file("service-account-signing-key-file", "accounts.key"))
        .args(audit::flags());
    server
}

const CONTROLLERS: &str = "kube-controller-manager";
const SCHEDULER: &str = "kube-scheduler";
/// Programs that decide, and run nothing.
pub(super) const CONTROLLING: [&str; 2] = [CONTROLLERS, SCHEDULER];

pub(super) fn controllers() -> Command {
    let mut controllers = Command::new(built(CONTROLLERS));
    controllers
        .arg(format!("--kubeconfig={DIR}/{CONTROLLERS}.kubeconfig"))
        .arg(format!("--root-ca-file={DIR}/ca.crt"))
        .arg(format!("--service-account-private-key-file={DIR}/accounts.key"))
        // For certificates that clients request from the API.
        .arg(format!("--cluster-signing-cert-file={DIR}/ca.crt"))
        .arg(format!("--cluster-signing-key-file={DIR}/ca.key"))
        .args(["--use-service-account-credentials", "--leader-elect=false"]);
    controllers
}

pub(super) fn scheduler() -> Command {
    let mut scheduler = Command::new(built(SCHEDULER));
    scheduler.arg(format!("--kubeconfig={DIR}/{SCHEDULER}.kubeconfig")).arg("--leader-elect=false");
    scheduler
}

/// Waits until the API server takes connections. kubectl would keep it from starting meanwhile.
pub(super) fn wait_for_port(head: &Machine) -> Result<()> {
    let address = SocketAddr::new(head.addresses[0], PORT);
    wait_until("the API server listens", TIMEOUT, || {
        let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(1));
        head.host.net().run(connect).map(drop)
    })
}

/// Addresses of the API server, from inside and from outside.
fn api_addresses(spec: &ClusterSpec) -> Vec<IpAddr> {
    // In IPv6 the prefix itself is a host's address, too.
    let first = |cidr: &IpNet| cidr.hosts().find(|address| *address != cidr.addr());
    let services = spec.service_cidrs.iter().filter_map(first);
    let loopback = IpAddr::from([127, 0, 0, 1]);
    spec.node_addresses(1).into_iter().chain(services).chain([loopback]).collect()
}

/// The prefix of a node's pods, as in its Node.
pub(super) fn node_object(spec: &ClusterSpec, number: u8) -> Result<serde_json::Value> {
    let cidrs: Vec<_> = spec.node_pod_cidrs(number).iter().map(IpNet::to_string).collect();
    let first = cidrs.first().context("a cluster has a pod CIDR")?;
    Ok(serde_json::json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.node_name(number)},
        "spec": {"podCIDR": first, "podCIDRs": cidrs},
    }))
}
