//! All that there is in a cluster's API and in its nodes' kernels.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::Kubernetes;
use weft_tests::kubernetes::Machine;

/// Kinds whose objects come and go by themselves.
const RESTLESS: [&str; 3] = ["events", "events.events.k8s.io", "componentstatuses"];
/// Objects that stay of a chart, or that Kubernetes makes for those.
const STAY: [&str; 4] = [
    "CustomResourceDefinition ",
    "APIService ",
    "ServiceAccount default ",
    "ConfigMap kube-root-ca.crt ",
];
/// Kinds that users make.
const KINDS: &str = "configurations,gatewayservers,gatewayclients,publickeies";
/// Devices, rules, routes, tables: what weft could make. kube-proxy removes its chains of Services that
/// are gone at a time of its own.
const LOOK: &str = "ip -o link show type vxlan | cut -d: -f2; ip rule; ip -6 rule; nft list tables; \
    for f in -4 -6; do for t in 18952 18953; do ip $f route show table $t 2>/dev/null; done; done; \
    nft list tables | grep -v kube-proxy | while read table; do nft list $table; done | grep -i weft; true";

pub(crate) struct Inventory(BTreeSet<String>);

impl Inventory {
    pub(crate) fn of(cluster: &Kubernetes) -> Result<Self> {
        let kinds = cluster.kubectl(&["api-resources", "--verbs=list", "--output=name"])?;
        let kinds = kinds.lines().filter(|kind| !RESTLESS.contains(kind));
        let kinds = kinds.collect::<Vec<_>>().join(",");
        let columns = "--output=custom-columns=K:.kind,N:.metadata.name,I:.metadata.namespace,F:.metadata.finalizers";
        let list = ["get", &kinds, "--all-namespaces", "--no-headers", columns];
        let list = cluster.kubectl(&list)?;
        let one_space = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut all: BTreeSet<String> = list.lines().map(one_space).collect();
        for machine in &cluster.machines {
            all.extend(kernel(machine)?);
        }
        Ok(Self(all))
    }

    /// The inventory without the kernel of a machine.
    pub(crate) fn but_of(self, machine: &str) -> Self {
        self.without(&format!("{machine}: "))
    }

    /// The inventory without lines that begin so.
    pub(crate) fn without(mut self, start: &str) -> Self {
        self.0.retain(|line| !line.starts_with(start));
        self
    }

    /// Checks that there is no more than before, but for what users have made, without finalizers.
    pub(crate) fn ensure_no_more(&self, before: &Self, users: &[String]) -> Result<()> {
        let stays = |line: &str| STAY.iter().any(|kind| line.starts_with(kind));
        let users: Vec<String> = users.iter().map(|line| format!("{line} <none>")).collect();
        let is_users =
            |line: &str| line.starts_with("Namespace ") || users.iter().any(|u| u == line);
        let more = self.0.difference(&before.0);
        let more: Vec<_> = more.filter(|line| !stays(line) && !is_users(line)).collect();
        ensure!(more.is_empty(), "there still is {more:#?}");
        let lost: Vec<_> = users.iter().filter(|line| !self.0.contains(*line)).collect();
        ensure!(lost.is_empty(), "users have lost {lost:#?}");
        Ok(())
    }
}

fn kernel(machine: &Machine) -> Result<Vec<String>> {
    let text = machine.host.command(Command::new("sh").args(["-c", LOOK]), "")?;
    Ok(text.lines().map(|line| format!("{}: {}", machine.name, line.trim())).collect())
}

/// Objects that users have made in a namespace, as they are listed.
pub(crate) fn users(cluster: &Kubernetes, namespace: &str) -> Result<Vec<String>> {
    let line = |item: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!("{} {} {namespace}", text(&item["kind"]), text(&item["metadata"]["name"]))
    };
    Ok(objects(cluster, &format!("{KINDS},secrets"), namespace)?.iter().map(line).collect())
}

/// Checks that no object has a stale status.
pub(crate) fn ensure_no_leftovers(cluster: &Kubernetes, namespace: &str) -> Result<()> {
    for object in objects(cluster, KINDS, namespace)? {
        let status = object["status"].as_object().cloned().unwrap_or_default();
        ensure!(status.is_empty() && object["spec"]["local"].is_null(), "{object}");
    }
    Ok(())
}

fn objects(cluster: &Kubernetes, kinds: &str, namespace: &str) -> Result<Vec<Value>> {
    let list = cluster.kubectl(&["get", kinds, "--namespace", namespace, "--output=json"])?;
    let list: Value = serde_json::from_str(&list).context("kubectl prints JSON")?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}
