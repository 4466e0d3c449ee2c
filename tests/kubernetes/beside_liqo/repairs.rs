//! Addresses that Liqo stores unmapped while neither webhook nor controller of weft runs, and their repair.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Object, Request};
use weft_tests::{Kubernetes, Pod, wait_until};

use super::writes::WEFT;
use super::{
    DEMO, GONE, TENANT, VIRTUAL_KUBELET, leads, networking_is_off, offload, peer, play_on, reach,
};
use crate::calls::list;
use crate::pair::{HTTP, TIMEOUT};
use crate::stage::{each, step};

/// Selector of EndpointSlices that Liqo makes from those of the other cluster.
pub(super) const REFLECTED: &str = "liqo.io/managed-by=shadowendpointslice";
/// Name of the Service that is reflected in the gap.
const LATE: &str = "late";
/// A virtual kubelet is restarted a minute after its start, and then waits for two Leases.
const RESTARTED: Duration = Duration::from_secs(180);

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn addresses_stored_in_gap_are_repaired() -> Result<()> {
    play_on(["rome", "milan"], |_, clusters| {
        let [rome, milan] = clusters;
        step("liqoctl peers them", || peer(rome, milan, &[]))?;
        let [near, far] = step("a namespace is offloaded", || offload(rome, milan))?;
        step("pods reach each other", || reach(clusters, [&near, &far]))?;
        step("controllers are gone, and networking is off", || each(clusters, stop))?;
        step("a virtual kubelet starts, and maps nothing", || restart_kubelet(rome, &far))?;
        step("a Service is reflected unmapped", || reflect_unmapped(clusters, &near))?;
        step("controllers are back", || each(clusters, start))?;
        step("the Service is named and repaired", || slice_is_repaired(clusters, &near))?;
        step("the virtual kubelet is named and restarted", || {
            kubelet_is_repaired(rome, milan, &far)
        })?;
        step("pods reach each other again", || reach(clusters, [&near, &far]))
    })
}

pub(super) fn stop(cluster: &Kubernetes) -> Result<()> {
    scale(cluster, 0)?;
    wait_until("Liqo has cleared networking", TIMEOUT, || networking_is_off(cluster))
}

pub(super) fn start(cluster: &Kubernetes) -> Result<()> {
    scale(cluster, 2)?;
    cluster.wait_for_weft(TIMEOUT)
}

fn scale(cluster: &Kubernetes, replicas: u8) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    let controller = "deployment/liqo-fabric-controller";
    cluster.kubectl(&["scale", controller, "--namespace=liqo", &replicas]).map(drop)
}

fn restart_kubelet(rome: &Kubernetes, far: &Pod) -> Result<()> {
    rome.kubectl(&["delete", "pods", "--namespace", TENANT, VIRTUAL_KUBELET])?;
    leads(rome)?;
    wait_until("far has milan's address", GONE, || shadow_is_at(rome, far.addresses[0]))
}

pub(super) fn shadow_is_at(rome: &Kubernetes, address: IpAddr) -> Result<()> {
    let shadow = rome.get(Object::new("pod", DEMO, "far"))?;
    let expected = address.to_string();
    ensure!(shadow["status"]["podIP"] == expected.as_str(), "{}", shadow["status"]["podIP"]);
    Ok(())
}

fn reflect_unmapped([rome, milan]: &[Kubernetes; 2], near: &Pod) -> Result<()> {
    let metadata = json!({"name": LATE, "namespace": DEMO});
    let spec = json!({"selector": {"app": "near"}, "ports": [{"port": HTTP}]});
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec});
    rome.apply(&service.to_string())?;
    wait_until("milan has rome's address", GONE, || slice_has(milan, near.addresses[0]))
}

/// The slice of rome's Service in milan.
fn slice_has(milan: &Kubernetes, address: IpAddr) -> Result<()> {
    let of_late = format!("kubernetes.io/service-name={LATE},{REFLECTED}");
    let slices = list(milan, "endpointslices.discovery.k8s.io", Some(DEMO), &of_late)?;
    let found = addresses(&slices);
    ensure!(found == [address], "{found:?}");
    Ok(())
}

pub(crate) fn addresses(slices: &[Value]) -> Vec<IpAddr> {
    let endpoints = slices.iter().flat_map(|slice| slice["endpoints"].as_array());
    let addresses = endpoints.flatten().flat_map(|endpoint| endpoint["addresses"].as_array());
    addresses.flatten().filter_map(|address| address.as_str()?.parse().ok()).collect()
}

fn slice_is_repaired([rome, milan]: &[Kubernetes; 2], near: &Pod) -> Result<()> {
    let (own, seen) = (near.addresses[0], milan.view(&rome.spec)?.of(near.addresses[0])?);
    wait_until("it has the address as milan sees it", TIMEOUT, || slice_has(milan, seen))?;
    weft_has_repaired(milan, "patch shadowendpointslices")?;
    is_named(milan, DEMO, "ShadowEndpointSlice", &format!("had {own} of rome, expected {seen}"))
}

fn kubelet_is_repaired(rome: &Kubernetes, milan: &Kubernetes, far: &Pod) -> Result<()> {
    let (own, seen) = (far.addresses[0], rome.view(&milan.spec)?.of(far.addresses[0])?);
    is_named(rome, TENANT, "Pod", &format!("had {own} of milan, expected {seen}"))?;
    wait_until("far has its address as rome sees it", RESTARTED, || shadow_is_at(rome, seen))?;
    weft_has_repaired(rome, &format!("delete pods {TENANT}/"))?;
    leads(rome)
}

/// Once, and not Liqo by itself.
fn weft_has_repaired(cluster: &Kubernetes, what: &str) -> Result<()> {
    let requests = cluster.requests()?;
    let by_weft = |request: &&Request| request.account == WEFT && request.what.starts_with(what);
    let codes: Vec<_> = requests.iter().filter(by_weft).map(|request| request.code).collect();
    ensure!(codes == [200], "{what}: {codes:?}");
    Ok(())
}

/// By an Event, and in `weft status`.
fn is_named(cluster: &Kubernetes, namespace: &str, kind: &str, text: &str) -> Result<()> {
    wait_until("it is named", TIMEOUT, || {
        let events = list(cluster, "events.events.k8s.io", Some(namespace), "")?;
        let is_it = |event: &&Value| {
            let note = event["note"].as_str().unwrap_or_default();
            event["regarding"]["kind"] == kind && note.contains(text)
        };
        events.iter().find(is_it).context("no Event")?;
        let problems = cluster.status()?["problems"].to_string();
        ensure!(problems.contains(kind) && problems.contains(text), "{problems}");
        Ok(())
    })
}
