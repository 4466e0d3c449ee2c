//! Kubernetes itself, on machines that are namespaces: API server, kubelets, pods that run.

mod access;
mod audit;
mod certificates;
mod control_plane;
mod groups;
mod image;
mod liqo;
mod liqoctl;
mod machine;
mod network;
mod node;
mod object;
mod pod;
mod programs;
mod reboot;
mod shell;
mod weft;

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use certificates::Authority;
use groups::Groups;

use crate::cluster::pod_routes_to;
use crate::{ClusterSpec, Lab, wait_until};

pub use access::access_review;
pub use audit::Request;
pub use image::{BUSYBOX, Image, NETSHOOT, WEFT};
pub use liqo::{require_liqo, require_liqo_network};
pub use liqoctl::{Answer, require_liqoctl};
pub use machine::{DIR, Machine};
pub use network::{CALICO, CANAL, FLANNEL, FLANNEL_HOST_GW, KUBE_ROUTER, Network, Project};
pub use object::Object;
pub use programs::require_kubernetes;
pub use weft::{LINGER, deploy};

/// A cluster of real nodes on one segment of a lab. The control plane runs on the first of them.
///
/// ```text
///   pod eth0 -- veth -- cni0 (10.200.1.1/24) -- rome-1 eth0 (192.0.2.17/24) -- switch
///   pod eth0 -- veth -- cni0 (10.200.2.1/24) -- rome-2 eth0 (192.0.2.18/24) -- switch
/// ```
///
/// Everything is gone with this value and with this process, even if that is killed: processes
/// and mounts with the machines, control groups after them.
pub struct Kubernetes {
    pub spec: ClusterSpec,
    /// Machines in order, so node number 1 comes first.
    pub machines: Vec<Machine>,
    /// The one that weft is installed in.
    pub namespace: String,
    // The last field, since a control group can only be removed once it is empty.
    groups: Groups,
}

impl Kubernetes {
    /// Starts everything and waits until all nodes are ready.
    pub fn start(lab: &Lab, spec: ClusterSpec) -> Result<Self> {
        require_kubernetes()?;
        let groups = Groups::new(&spec.id)?;
        let numbers = 1..=spec.nodes;
        let machines = numbers.map(|number| Machine::new(lab, &spec, number));
        let machines = machines.collect::<Result<Vec<_>>>()?;
        let namespace = weft::NAMESPACE.to_owned();
        let cluster = Self { spec, machines, namespace, groups };
        cluster.boot().with_context(|| {
            let failures: Vec<_> = cluster.machines.iter().flat_map(Machine::failures).collect();
            format!("starting {}; ended: {failures:?}", cluster.spec.id)
        })?;
        Ok(cluster)
    }

    /// The first node, where the control plane runs.
    pub fn head(&self) -> &Machine {
        &self.machines[0]
    }

    /// Runs `kubectl` as an administrator; what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.head().host.command(self.tool("kubectl").args(args), "")
    }

    /// Runs `helm` as an administrator; what it prints.
    pub fn helm(&self, args: &[&str]) -> Result<String> {
        self.head().host.command(self.tool("helm").args(args), "")
    }

    /// Applies manifests, YAML or JSON; what `kubectl` prints.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.head().host.command(self.tool("kubectl").args(["apply", "--filename=-"]), manifests)
    }

    /// Deletes what manifests describe, and waits until it is gone.
    pub fn delete(&self, manifests: &str) -> Result<String> {
        self.head().host.command(self.tool("kubectl").args(["delete", "--filename=-"]), manifests)
    }

    /// Makes an image known to every node.
    pub fn load(&self, image: &Image) -> Result<()> {
        let folder = tempfile::tempdir().context("making a folder")?;
        let archive = folder.path().join("image.tar");
        image.write(&archive)?;
        self.on_all(|machine| node::import(machine, &archive))
    }

    /// Gives pods that start on a node from now on addresses of another part of the pod CIDRs than the
    /// node's own, as networks do that manage addresses themselves. All nodes have a route to it.
    pub fn move_pods(&self, node: u8, part: u8) -> Result<()> {
        let there = &self.machines[usize::from(node) - 1];
        let prefixes = self.spec.node_pod_cidrs(part);
        let routes = pod_routes_to(&self.spec, node, &prefixes);
        let others = self.machines.iter().filter(|machine| machine.number != node);
        for machine in others {
            machine.host.ip(&routes)?;
        }
        node::give_pods(there, &format!("cni{part}"), &prefixes)
    }

    /// The opposite of [`Self::move_pods`].
    pub fn move_pods_back(&self, node: u8) -> Result<()> {
        let there = &self.machines[usize::from(node) - 1];
        node::give_pods(there, "cni0", &self.spec.node_pod_cidrs(node))
    }

    /// Kills the API server; everything else runs on.
    pub fn stop_api_server(&self) -> Result<()> {
        self.head().stop(control_plane::API_SERVER)
    }

    /// Starts it again and waits until it is ready. Kubernetes' own controllers start again with it, as
    /// where several of them elect one: without an API server the elected one ends.
    pub fn start_api_server(&self) -> Result<()> {
        self.head().start(&mut control_plane::api_server(&self.spec))?;
        self.wait_for_api_server()?;
        control_plane::CONTROLLING.iter().try_for_each(|name| self.head().stop(name))?;
        self.start_controllers()
    }

    fn boot(&self) -> Result<()> {
        let ca = Authority::new()?;
        self.write_files(&ca)?;
        self.head().start(&mut control_plane::etcd())?;
        self.head().start(&mut control_plane::api_server(&self.spec))?;
        self.on_all(|machine| machine.start(&mut node::containerd()))?;
        self.on_all(node::wait_for_containerd)?;
        self.load(&Image::busybox()?)?;
        self.wait_for_api_server()?;
        self.start_controllers()?;
        self.join_nodes()
    }

    fn start_controllers(&self) -> Result<()> {
        self.head().start(&mut control_plane::controllers())?;
        self.head().start(&mut control_plane::scheduler())
    }

    fn write_files(&self, ca: &Authority) -> Result<()> {
        for machine in &self.machines {
            let group = self.groups.add_machine(&machine.name)?;
            node::write_files(machine, &self.spec, ca, &group)?;
        }
        let admin = ca.kubeconfig(&control_plane::url(&self.spec), &control_plane::admin())?;
        self.head().write(ADMIN, &admin.to_string())?;
        control_plane::write_files(self.head(), &self.spec, ca)
    }

    fn wait_for_api_server(&self) -> Result<()> {
        control_plane::wait_for_port(self.head())?;
        wait_until("the API server is ready", machine::TIMEOUT, || {
            self.kubectl(&["get", "--raw=/readyz"])
        })
        .map(drop)
    }

    /// The kubelets take over Nodes that are there already, so every node's pods have the prefix
    /// that routes lead to.
    fn join_nodes(&self) -> Result<()> {
        let nodes = (1..=self.spec.nodes).map(|n| control_plane::node_object(&self.spec, n));
        let nodes = nodes.collect::<Result<Vec<_>>>()?;
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": nodes}).to_string())?;
        self.on_all(|machine| {
            machine.start(&mut node::kubelet(machine, &self.spec))?;
            machine.start(&mut node::proxy())
        })?;
        self.install_network()?;
        let ready = ["wait", "--for=condition=Ready", "node", "--all", "--timeout=120s"];
        self.kubectl(&ready)?;
        let account = Object::new("serviceaccount", "default", "default");
        self.wait_for(account, "create", machine::TIMEOUT)
    }

    /// Does something on all nodes at once.
    fn on_all(&self, f: impl Fn(&Machine) -> Result<()> + Sync) -> Result<()> {
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                self.machines.iter().map(|machine| scope.spawn(|| f(machine))).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    }

    /// A command-line tool; it keeps its caches on the machine.
    fn tool(&self, name: &str) -> Command {
        let mut tool = Command::new(programs::built(name));
        tool.env("KUBECONFIG", format!("{DIR}/{ADMIN}")).env("HOME", format!("{DIR}/home"));
        tool
    }
}

/// The administrator's kubeconfig, on the first node.
const ADMIN: &str = "admin.kubeconfig";
