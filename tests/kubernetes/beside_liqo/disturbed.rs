//! Networking in ForeignClusters while weft's controllers and Liqo's virtual kubelets restart, and while no
//! packets pass between the gateways.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use weft_tests::{Kubernetes, Lab, wait_until};

use super::repairs::{REFLECTED, addresses};
use super::{DEMO, TENANT, VIRTUAL_KUBELET, join, play_on, writes};
use crate::calls::list;
use crate::pair::SOON;
use crate::stage::{each, note, step};

/// Minutes of the run, unless `WEFT_MINUTES` overrides it.
const MINUTES: u32 = 10;
const MINUTE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
/// Rules of the switch while gateways do not reach each other: TCP passes, so API servers do.
const CUT: &str = "table bridge cut { chain pass { type filter hook forward priority 0; \
                   ip protocol udp drop; }; }";

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn networking_stays_on_for_ten_minutes() -> Result<()> {
    let minutes = std::env::var("WEFT_MINUTES").ok().and_then(|minutes| minutes.parse().ok());
    let minutes = minutes.unwrap_or(MINUTES);
    play_on(["rome", "milan"], |lab, clusters| {
        join(clusters, &[])?;
        let what = format!("networking stays on for {minutes} minutes of restarts");
        step(&what, || stays_on(lab, clusters, minutes))
    })
}

fn stays_on(lab: &Lab, clusters: &[Kubernetes; 2], minutes: u32) -> Result<()> {
    std::thread::scope(|scope| {
        let watch =
            |cluster| move || writes::watched(cluster, clusters, MINUTE * minutes, || Ok(()));
        let watches = clusters.each_ref().map(|cluster| scope.spawn(watch(cluster)));
        for minute in 0..minutes {
            let before = each(clusters, |cluster| Ok(cluster.requests()?.len()))?;
            let is_cut = minute % 4 == 2;
            if is_cut {
                cut(lab, clusters)?;
            }
            disturbed(clusters, minute, minute == minutes / 2)?;
            for (cluster, before) in clusters.iter().zip(before) {
                let written = writes::writers(&cluster.requests()?.split_off(before));
                let id = &cluster.spec.id;
                note(&format!(
                    "{id}, minute {minute}: requests to write ForeignClusters: {written:?}"
                ));
                // Conditions follow a Connection, and Liqo writes for each of its versions.
                if !is_cut {
                    writes::are_few(cluster, &written)?;
                }
            }
        }
        for (watch, cluster) in watches.into_iter().zip(clusters) {
            let seen = watch.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            note(&format!("{}: {seen} versions, all with networking on", cluster.spec.id));
        }
        Ok(())
    })
}

/// Either Connection is lost, and is connected again.
fn cut(lab: &Lab, clusters: &[Kubernetes; 2]) -> Result<()> {
    let all_are = |connected: bool| {
        wait_until(&format!("Connections are connected: {connected}"), SOON, || {
            clusters.iter().try_for_each(|cluster| {
                let connections = list(cluster, "connections", None, "")?;
                let mut values = connections.iter().map(|one| &one["status"]["value"]);
                let is_as_expected = values.all(|value| (value == "Connected") == connected);
                ensure!(is_as_expected && !connections.is_empty(), "{connections:?}");
                Ok(())
            })
        })
    };
    lab.switch().net().nft(CUT)?;
    let lost = all_are(false);
    lab.switch().net().nft("delete table bridge cut")?;
    lost.and_then(|()| all_are(true))
}

/// One minute, in which a controller of each cluster is killed, and each virtual kubelet in every other.
fn disturbed(clusters: &[Kubernetes; 2], minute: u32, upgrade: bool) -> Result<()> {
    let began = Instant::now();
    each(clusters, writes::kill_controller)?;
    if upgrade {
        let value = format!("controllerManager.pod.annotations.turn=t{minute}");
        each(clusters, |cluster| cluster.set_weft(&value))?;
    }
    if minute % 2 == 1 {
        clusters[0].kubectl(&["delete", "pods", "--namespace", TENANT, VIRTUAL_KUBELET])?;
    }
    while began.elapsed() < MINUTE {
        all_is_mapped(clusters)?;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Both clusters have the same pod CIDR, and each sees the other's as another.
fn all_is_mapped([rome, milan]: &[Kubernetes; 2]) -> Result<()> {
    let slices = list(milan, "endpointslices.discovery.k8s.io", Some(DEMO), REFLECTED)?;
    let shadows = list(rome, "pods", Some(DEMO), "liqo.io/shadowPod=true")?;
    let shadows = shadows.iter().filter_map(|pod| pod["status"]["podIP"].as_str()?.parse().ok());
    let all: Vec<_> = addresses(&slices).into_iter().chain(shadows).collect();
    ensure!(all.len() >= 2, "{all:?}");
    let unmapped = all.iter().find(|address| rome.spec.pod_cidrs[0].contains(*address));
    ensure!(unmapped.is_none(), "{unmapped:?} is not mapped");
    Ok(())
}
