//! The end of Liqo's other modules on a network that stays.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::Object;
use weft_tests::{Kubernetes, wait_until};

use super::{GONE, networking_is_off, play_on};
use crate::calls::list;
use crate::from_liqo::Peers;
use crate::liqoctl::{liqoctl, on_both};
use crate::pair::{SOON, TIMEOUT};
use crate::stage::{each, note_time, step};

/// Longest outage between pods while Liqo is uninstalled: none is expected, but the machine is small.
const OUTAGE: Duration = Duration::from_secs(1);
const PEERING_IS_THERE: &str = "disable networking for clusters";

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn network_outlives_uninstallation_of_liqo() -> Result<()> {
    play_on(["rome", "milan"], |_, clusters| {
        let [rome, milan] = clusters;
        let pods = each(clusters, |cluster| {
            cluster.apply(&ip_of_user())?;
            cluster.run_pods(&[("a", 1)])
        })?;
        let before = step("all has addresses", || each(clusters, granted))?;
        step("liqoctl connects them", || connect(rome, milan))?;
        let views = [rome.view(&milan.spec)?, milan.view(&rome.spec)?];
        let peers = Peers { pods: &pods, views };
        step("pods reach each other", || peers.reach())?;
        let outage = peers.outage(|| {
            step("Liqo refuses to be uninstalled", || is_refused(rome))?;
            step("helm uninstalls it all the same", || rome.uninstall_liqo(&["--no-hooks"]))?;
            step("nothing is lost in rome", || nothing_is_lost(rome, &before[0]))
        })?;
        note_time(outage, "longest outage");
        ensure!(outage < OUTAGE, "cut off for {outage:?}");
        step("pods reach each other", || peers.reach())?;

        step("liqoctl ends the peering", || disconnect(milan, rome))?;
        step("liqoctl uninstalls Liqo of milan", || {
            liqoctl(milan, &["uninstall", "--skip-confirm", "--timeout=150s"]).map(drop)
        })?;
        step("nothing is lost in milan", || nothing_is_lost(milan, &before[1]))?;
        step("weft is upgraded", || each(clusters, upgrade))?;
        step("liqoctl connects them again", || connect(rome, milan))?;
        let views = [rome.view(&milan.spec)?, milan.view(&rome.spec)?];
        step("pods reach each other", || Peers { pods: &pods, views }.reach())?;
        step("nothing is lost", || {
            let mut all = clusters.iter().zip(&before);
            all.try_for_each(|(cluster, before)| nothing_is_lost(cluster, before))
        })?;
        step("nothing shared outlives weft", || each(clusters, uninstall).map(drop))
    })
}

pub(super) fn connect(rome: &Kubernetes, milan: &Kubernetes) -> Result<()> {
    let line = ["network", "connect", "--gw-server-service-type=NodePort", "--wait"];
    on_both(rome, milan, &[&line[..], &["--timeout=120s", "--skip-validation"]].concat())
}

fn disconnect(milan: &Kubernetes, rome: &Kubernetes) -> Result<()> {
    on_both(milan, rome, &["network", "reset", "--skip-confirm"])?;
    wait_until("networking is off", GONE, || networking_is_off(milan))
}

/// By liqoctl, and by the hook of its chart, which runs until helm gives up.
fn is_refused(rome: &Kubernetes) -> Result<()> {
    let answer = rome.liqoctl(None, &["uninstall", "--skip-confirm", "--timeout=60s"])?;
    let text = format!("{}{}", answer.stdout, answer.stderr);
    ensure!(!answer.success && text.contains(PEERING_IS_THERE), "{answer:?}");
    rome.uninstall_liqo(&["--timeout=10s"]).err().context("its hook let helm go on")?;
    let hook = ["logs", "job/liqo-pre-delete", "--namespace=liqo"];
    let logs = rome.kubectl(&hook)?;
    ensure!(logs.contains(PEERING_IS_THERE), "{logs}");
    rome.kubectl(&["delete", "job", "liqo-pre-delete", "--namespace=liqo"]).map(drop)
}

fn ip_of_user() -> String {
    let metadata = json!({"name": "users", "namespace": "default"});
    json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP", "metadata": metadata,
        "spec": {"ip": "192.0.2.251"}})
    .to_string()
}

/// Objects that the cluster shares with Liqo, once ipam has granted all of them.
fn granted(cluster: &Kubernetes) -> Result<Vec<Value>> {
    wait_until("all is granted", SOON, || {
        let shared = shared(cluster)?;
        ensure!(shared.len() >= 6 && !shared.contains(&Value::Null), "{shared:?}");
        Ok(shared)
    })
}

/// The cluster's ID, its own Networks, and the user's IP.
fn shared(cluster: &Kubernetes) -> Result<Vec<Value>> {
    let id = cluster.get(Object::new("configmap", "liqo", "liqo-clusterid-configmap"))?;
    let networks = list(cluster, "networks", Some("liqo"), "ipam.liqo.io/network-type")?;
    let networks = networks.iter().flat_map(|network| {
        ["/metadata/name", "/spec", "/status/cidr"]
            .map(|field| network.pointer(field).cloned().unwrap_or_default())
    });
    let ip = cluster.get(Object::new("ip", "default", "users"))?;
    Ok([id["data"].clone(), ip["spec"].clone()].into_iter().chain(networks).collect())
}

fn nothing_is_lost(cluster: &Kubernetes, before: &[Value]) -> Result<()> {
    wait_until("all is there as before", SOON, || {
        let shared = shared(cluster)?;
        ensure!(shared == before, "{shared:?}, before {before:?}");
        Ok(())
    })
}

/// liqoctl finds the fabric-controller by a label that it has without Liqo only.
fn upgrade(cluster: &Kubernetes) -> Result<()> {
    cluster.set_weft("controllerManager.pod.annotations.after=liqo")?;
    cluster.wait_for_weft(TIMEOUT)
}

fn uninstall(cluster: &Kubernetes) -> Result<()> {
    cluster.uninstall_weft(TIMEOUT)?;
    let kinds = ["get", "networks,configmaps", "--namespace=liqo", "--output=name"];
    let left = cluster.kubectl(&kinds)?;
    ensure!(!left.contains("network") && !left.contains("clusterid"), "{left}");
    cluster.get(Object::new("ip", "default", "users")).map(drop)
}
