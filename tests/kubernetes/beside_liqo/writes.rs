//! Writes to ForeignClusters while nothing changes, and who they are from.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::Kubernetes;
use weft_tests::kubernetes::{Object, Request};

use crate::stage::{each, note};

/// Time for which writes are counted.
const WHILE: Duration = Duration::from_secs(60);
/// Requests to write a cluster's ForeignClusters in this time. Liqo's controller-manager makes one for each
/// Connection's latency and each heartbeat of a virtual node, whether anything differs or not.
const MAX_REQUESTS: usize = 10;
/// Time for which a killed controller is watched.
const KILLED: Duration = Duration::from_secs(8);
/// Service account of weft's controller.
pub(super) const WEFT: &str = "liqo:liqo-fabric-controller";

/// Requests to write a cluster's ForeignClusters so far, by account.
pub(super) type Writers = BTreeMap<String, usize>;

/// Networking stays on while a replica of weft's controller is killed, and then nothing is written.
pub(super) fn stays_on(clusters: &[Kubernetes; 2]) -> Result<()> {
    let held = each(clusters, |cluster| {
        watched(cluster, clusters, KILLED, || kill_controller(cluster))?;
        let before = cluster.requests()?.len();
        let versions = watched(cluster, clusters, WHILE, || Ok(()))?;
        let writers = writers(&cluster.requests()?.split_off(before));
        let id = &cluster.spec.id;
        note(&format!("{id}: requests to write ForeignClusters in {WHILE:?}: {writers:?}"));
        ensure!(versions == 1, "{id} had {versions} versions of one: {writers:?}");
        are_few(cluster, &writers)
    });
    held.map(drop)
}

/// Writes of [`WHILE`], none by weft.
pub(super) fn are_few(cluster: &Kubernetes, writers: &Writers) -> Result<()> {
    let id = &cluster.spec.id;
    ensure!(!writers.contains_key(WEFT), "{id}: {writers:?}");
    let count = writers.values().sum::<usize>();
    ensure!(count < MAX_REQUESTS, "{id}: {count} requests in {WHILE:?}");
    Ok(())
}

/// Versions of the ForeignCluster that were seen in this time, all with networking on.
pub(super) fn watched(
    cluster: &Kubernetes,
    clusters: &[Kubernetes],
    time: Duration,
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<usize> {
    let id = &cluster.spec.id;
    let field = r#"'{.status.modules.networking.enabled}{"\n"}'"#;
    let line = format!(
        "export KUBECONFIG=$PWD/{id}.yaml; \
         timeout {} kubectl get foreignclusters --watch --output=jsonpath={field} || [ $? = 124 ]",
        time.as_secs()
    );
    let seen = std::thread::scope(|scope| {
        let watched = scope.spawn(|| cluster.shell(clusters, &line));
        meanwhile()?;
        watched.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    ensure!(!seen.is_empty() && seen.lines().all(|line| line == "true"), "{id}: {seen:?}");
    Ok(seen.lines().count())
}

pub(super) fn writers(requests: &[Request]) -> Writers {
    let mut writers = Writers::new();
    for request in requests {
        let (verb, what) = request.what.split_once(' ').unwrap_or_default();
        if ["patch", "update"].contains(&verb) && what.starts_with("foreignclusters") {
            *writers.entry(request.account.clone()).or_default() += 1;
        }
    }
    writers
}

/// The one that works.
pub(super) fn kill_controller(cluster: &Kubernetes) -> Result<()> {
    let lease = cluster.get(Object::new("lease", "liqo", "weft-fabric-controller"))?;
    let pod = lease["spec"]["holderIdentity"].as_str().context("the Lease has no holder")?;
    let pod = pod.split(['/', '_']).next().unwrap_or(pod);
    cluster.kubectl(&["delete", "pod", pod, "--namespace=liqo", "--grace-period=0", "--force"])?;
    Ok(())
}
