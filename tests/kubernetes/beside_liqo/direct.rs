//! Direct connections of two providers: a Service of rome's is reflected to milan, with the address of venice's
//! pod as milan sees it through its own peering with venice, and that of rome's pod.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, Request};
use weft_tests::{ClusterSpec, Kubernetes, stays_so, traffic, wait_until};

use super::network_test::{NAME, NAMESPACE, offload, run};
use super::repairs::{REFLECTED, addresses, start, stop};
use super::uninstall::connect;
use super::writes::WEFT;
use super::{GONE, peer, play_specs};
use crate::calls::list;
use crate::pair::{HTTP, SOON};
use crate::stage::{each, step};

/// Longer than weft waits until it repairs what Liqo has stored.
const SETTLED: Duration = Duration::from_secs(6);
/// Names of the Services that are reflected before the gap and in it.
const SERVICES: [&str; 2] = ["direct", "late"];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn providers_reach_each_other_directly() -> Result<()> {
    let mut specs = [("rome", 1), ("milan", 2), ("venice", 3)]
        .map(|(id, number)| ClusterSpec::new(id, number, 1));
    // Liqo maps addresses of such connections only if the consumer sees them as the provider does.
    specs[2].pod_cidrs = vec!["10.210.0.0/16".parse()?];
    play_specs(specs, |_, clusters| {
        let [rome, milan, venice] = clusters;
        let image = Image::netshoot()?;
        each(clusters, |cluster| cluster.load(&image))?;
        step("rome is peered with milan", || peer(rome, milan, &[]))?;
        step("a namespace is offloaded", || offload(rome))?;
        step("rome is peered with venice", || peer(rome, venice, &[]))?;
        step("pods run in all of them", || run(rome, &[rome, milan, venice]))?;
        step("liqoctl connects the providers", || connect(milan, venice))?;
        reflects(clusters)
    })
}

/// A part of a slice is wrong after a gap: milan repairs it.
fn reflects([rome, milan, venice]: &[Kubernetes; 3]) -> Result<()> {
    let [direct, late] = SERVICES;
    let [of_rome, of_venice] = [pod_of(rome)?, pod_of(venice)?].map(|(_, address)| address);
    let seen_rome = milan.view(&rome.spec)?.of(of_rome)?;
    let seen_venice = milan.view(&venice.spec)?.of(of_venice)?;
    let right = BTreeSet::from([seen_rome, seen_venice]);
    step("a Service of direct connections is reflected", || {
        offer(rome, direct)?;
        wait_until("milan has all of it mapped", GONE, || stored(milan, direct, &right))?;
        reaches(milan, &right)
    })?;
    step("milan repairs nothing of it", || {
        stays_so("no slice is touched", SETTLED, || {
            let repairs = repairs(milan)?;
            ensure!(repairs == 0, "{repairs} repairs");
            stored(milan, direct, &right)
        })
    })?;
    step("another is reflected while networking is off", || {
        stop(milan)?;
        offer(rome, late)?;
        let partly = BTreeSet::from([of_rome, seen_venice]);
        wait_until("rome's address is stored as it is", GONE, || stored(milan, late, &partly))
    })?;
    step("milan repairs the rest of it", || {
        start(milan)?;
        wait_until("all of it is mapped", GONE, || stored(milan, late, &right))?;
        let repairs = repairs(milan)?;
        ensure!((1..=SERVICES.len() + 1).contains(&repairs), "{repairs} repairs");
        stays_so("all slices are right", SETTLED, || {
            SERVICES.iter().try_for_each(|name| stored(milan, name, &right))
        })?;
        reaches(milan, &right)
    })
}

/// Name and own address of the pod behind Services in this cluster.
fn pod_of(cluster: &Kubernetes) -> Result<(String, IpAddr)> {
    let own = format!("app={NAME},liqo.io/shadowPod!=true");
    let pods = list(cluster, "pods", Some(NAMESPACE), &own)?;
    let [pod] = pods.as_slice() else { anyhow::bail!("expected one pod: {pods:?}") };
    let text = |value: &Value| value.as_str().map(str::to_owned).context("it has none yet");
    Ok((text(&pod["metadata"]["name"])?, text(&pod["status"]["podIP"])?.parse()?))
}

fn offer(rome: &Kubernetes, name: &str) -> Result<()> {
    let annotations = json!({"liqo.io/use-direct-connections": "true"});
    let metadata = json!({"name": name, "namespace": NAMESPACE, "annotations": annotations});
    let spec = json!({"selector": {"app": NAME}, "ports": [{"port": HTTP}]});
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec});
    rome.apply(&service.to_string()).map(drop)
}

fn stored(milan: &Kubernetes, service: &str, expected: &BTreeSet<IpAddr>) -> Result<()> {
    let reflected = format!("kubernetes.io/service-name={service},{REFLECTED}");
    let slices = list(milan, "endpointslices.discovery.k8s.io", Some(NAMESPACE), &reflected)?;
    let found: BTreeSet<_> = addresses(&slices).into_iter().collect();
    ensure!(found == *expected, "{service}: {found:?}, expected {expected:?}");
    Ok(())
}

fn reaches(milan: &Kubernetes, all: &BTreeSet<IpAddr>) -> Result<()> {
    let pod = milan.pod(NAMESPACE, &pod_of(milan)?.0)?;
    all.iter().try_for_each(|address| {
        traffic::connect(&pod.ns, SocketAddr::new(*address, HTTP), SOON)?;
        Ok::<_, Error>(())
    })
}

/// Number of ShadowEndpointSlices that weft has annotated so far.
fn repairs(milan: &Kubernetes) -> Result<usize> {
    let is_repair = |request: &&Request| {
        request.account == WEFT && request.what.starts_with("patch shadowendpointslices")
    };
    Ok(milan.requests()?.iter().filter(is_repair).count())
}
