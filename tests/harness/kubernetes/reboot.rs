//! Nodes whose kubelet stops, and nodes that start anew.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::control_plane::node_object;
use super::machine::TIMEOUT;
use super::{Kubernetes, Machine, node};
use crate::host::all_processes;
use crate::wait_until;

const KUBELET: &str = "kubelet";
const PROGRAMS: [&str; 3] = [KUBELET, "kube-proxy", "containerd"];

/// State that a kernel does not have when it starts: mounts, devices and namespaces of pods, rules and routes of
/// kube-proxy and of weft. The machine's own network stays, as if it was configured at once.
const FORGET: &str = r#"
awk '$2 ~ "^/(run/containerd|run/netns|var/lib/kubelet)/" { print $2 }' /proc/self/mounts | sort -r | xargs -r umount -l
rm -rf /run/containerd /run/netns
for device in cni0 weft4 weft6; do ip link del $device; done
for family in -4 -6; do ip $family rule flush protocol 119; ip $family route flush table all proto 119; done
nft list tables | grep -v 'inet cni$' | while read table; do nft delete $table; done
true"#;

impl Kubernetes {
    /// Kills a node's kubelet (nodes count from 1). What runs there runs on, and what ends is not
    /// started again.
    pub fn stop_kubelet(&self, node: u8) -> Result<()> {
        self.machine(node).stop(KUBELET)
    }

    pub fn start_kubelet(&self, node: u8) -> Result<()> {
        let machine = self.machine(node);
        machine.start(&mut node::kubelet(machine, &self.spec))
    }

    /// Makes a Node that was deleted anew, as its kubelet does when it starts.
    pub fn add_node(&self, name: &str) -> Result<()> {
        let at = self.machines.iter().position(|machine| machine.name == name);
        let number = at.and_then(|at| u8::try_from(at + 1).ok()).context("no such machine")?;
        self.apply(&node_object(&self.spec, number)?.to_string()).map(drop)
    }

    /// Cuts the power of a node that does not run the control plane, and starts it anew. Its disk stays.
    pub fn reboot(&self, node: u8) -> Result<()> {
        let machine = self.machine(node);
        PROGRAMS.iter().try_for_each(|program| machine.stop(program))?;
        wait_until("its pods have ended", TIMEOUT, || self.kill_pods(machine))?;
        self.groups.empty(&machine.name);
        let mut forget = Command::new("sh");
        machine.host.command(forget.args(["-c", FORGET]), "").context("emptying a kernel")?;
        machine.start(&mut node::containerd())?;
        node::wait_for_containerd(machine)?;
        machine.start(&mut node::kubelet(machine, &self.spec))?;
        machine.start(&mut node::proxy())
    }

    /// The n-th node, from 1.
    pub fn machine(&self, node: u8) -> &Machine {
        &self.machines[usize::from(node) - 1]
    }

    /// Fails until none is left.
    fn kill_pods(&self, machine: &Machine) -> Result<()> {
        let shims = machine.host.processes().into_iter();
        let shims = shims.filter(|(_, line)| line.contains("containerd-shim")).map(|(pid, _)| pid);
        let group = format!("-{}/{}/", self.spec.id, machine.name);
        let of_pods = all_processes().filter(|pid| {
            let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"));
            groups.is_ok_and(|groups| groups.contains(&group))
        });
        let all: Vec<_> = shims.chain(of_pods).collect();
        // One that has ended meanwhile is none.
        all.iter().for_each(|pid| _ = kill(Pid::from_raw(*pid), Signal::SIGKILL));
        ensure!(all.is_empty(), "there still are {all:?}");
        Ok(())
    }
}
