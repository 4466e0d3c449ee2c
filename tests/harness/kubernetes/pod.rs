use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::image::BUSYBOX;
use super::{Kubernetes, Object};
use crate::host::all_processes;
use crate::{Netns, Pod};

impl Kubernetes {
    /// Runs pods of busybox that sleep, each under a name and on a node (from 1), and waits until
    /// all of them are ready. Their label `app` is their name.
    pub fn run_pods(&self, pods: &[(&str, u8)]) -> Result<Vec<Pod>> {
        let items: Vec<_> = pods.iter().map(|(name, node)| self.busybox(name, *node)).collect();
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
        let names: Vec<_> = pods.iter().map(|(name, _)| format!("pod/{name}")).collect();
        let mut wait = vec!["wait", "--for=condition=Ready", "--timeout=120s"];
        wait.extend(names.iter().map(String::as_str));
        self.kubectl(&wait)?;
        pods.iter().map(|(name, _)| self.pod("default", name)).collect()
    }

    /// A running pod, as the rest of the harness has pods. With a pod of the host's network
    /// that is the node's namespace.
    pub fn pod(&self, namespace: &str, name: &str) -> Result<Pod> {
        let pod = self.get(Object::new("pod", namespace, name))?;
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a uid")?;
        let pid = processes_of(uid).next();
        let pid = pid.with_context(|| format!("no process is in pod {uid}"))?;
        let addresses = pod["status"]["podIPs"].as_array().into_iter().flatten();
        let addresses = addresses.filter_map(|entry| entry["ip"].as_str()?.parse::<IpAddr>().ok());
        Ok(Pod {
            name: format!("{}/{name}", self.spec.id),
            ns: Netns::open(Path::new(&format!("/proc/{pid}/ns/net")))?,
            addresses: addresses.collect(),
        })
    }

    /// The process of a program in a pod, as this machine numbers it.
    pub fn process_in(&self, namespace: &str, pod: &str, program: &str) -> Result<i32> {
        let pod = self.get(Object::new("pod", namespace, pod))?;
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a uid")?;
        let runs_it = |pid: &i32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.trim() == program)
        };
        let found = processes_of(uid).find(runs_it);
        found.with_context(|| format!("{program} does not run in pod {uid}"))
    }

    /// Runs a command in the first container of a pod; what it prints.
    pub fn exec(&self, namespace: &str, pod: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["exec", "--namespace", namespace, pod, "--"];
        args.extend(command);
        self.kubectl(&args)
    }

    fn busybox(&self, name: &str, node: u8) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
            "spec": {
                "nodeName": self.spec.node_name(node),
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never"}],
            },
        })
    }
}

/// The processes of a pod, by the control group that the kubelet has put them in.
fn processes_of(uid: &str) -> impl Iterator<Item = i32> {
    let group = format!("/pod{uid}/");
    all_processes().filter(move |pid| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"));
        groups.is_ok_and(|groups| groups.contains(&group))
    })
}
