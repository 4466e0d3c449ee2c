//! Direct connections of two providers: a Service of rome has addresses of venice's pod in milan that are
//! mapped by what joins these two, and addresses of rome's pod.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::Request;
use weft_tests::traffic::connect;
use weft_tests::{Kubernetes, stays_so, wait_until};

use super::GONE;
use super::network_test::{NAME, NAMESPACE};
use super::repairs::{REFLECTED, addresses, start, stop};
use super::writes::WEFT;
use crate::calls::list;
use crate::liqoctl::on_both;
use crate::pair::{HTTP, SOON};
use crate::stage::step;

/// Longer than something that is wrong is left to Liqo.
const SETTLED: Duration = Duration::from_secs(6);
/// Name of the Service of before the gap, and of that which is reflected in it.
const SERVICES: [&str; 2] = ["direct", "late"];

/// Connects the providers, and has milan repair the part of a slice that is wrong after a gap.
pub(super) fn providers_connect(clusters: &[Kubernetes; 3]) -> Result<()> {
    let [rome, milan, venice] = clusters;
    let [direct, late] = SERVICES;
    step("liqoctl connects the providers", || {
        let line = ["network", "connect", "--gw-server-service-type=NodePort", "--wait"];
        on_both(milan, venice, &[&line[..], &["--timeout=120s", "--skip-validation"]].concat())
    })?;
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
        wait_until("only venice's address is mapped", GONE, || stored(milan, late, &partly))
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

/// The pod of this cluster in which Services end, and its own address.
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
        connect(&pod.ns, SocketAddr::new(*address, HTTP), SOON)?;
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
