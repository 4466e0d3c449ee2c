//! ```text
//!   rome-1 --[ switch ]-- x -- rome-2      weft is uninstalled, and its Job lands on the failed node
//! ```

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use weft_tests::kubernetes::Image;
use weft_tests::manifests::{Peering, join};
use weft_tests::{ClusterSpec, Kubernetes, Lab, skip, wait_until};

use crate::inventory::{Inventory, users};
use crate::pair::TIMEOUT;
use crate::stage::{note_time, play, step};

const TENANT: &str = "liqo-tenant-milan";
const JOB: &str = "--selector=job-name=liqo-withdrawal";
/// Helm's own timeout, and so the time that users wait.
const AT_MOST: Duration = Duration::from_secs(300);
/// Time until Kubernetes has given up what ran on a node that is no longer listed.
const COLLECTED: Duration = Duration::from_secs(180);

#[test]
#[ignore = "three minutes: make soak"]
fn dead_node_does_not_block_uninstall() -> Result<()> {
    play(|| {
        let image = match Image::weft() {
            Ok(image) => image,
            Err(why) => {
                skip(&format!("{why:#}"));
                return Ok(());
            }
        };
        let lab = Lab::new("weft-kubernetes-dead-node")?;
        let cluster = step("a cluster comes up", || {
            let cluster = Kubernetes::start(&lab, ClusterSpec::new("rome", 1, 2))?;
            cluster.load(&image)?;
            Ok(cluster)
        })?;
        uninstall_without(&cluster).inspect_err(|_| eprintln!("{}", cluster.report()))
    })
}

/// Uninstalls weft without the second node.
fn uninstall_without(cluster: &Kubernetes) -> Result<()> {
    let (alive, dead) = (&cluster.machines[0].name, &cluster.machines[1]);
    let before = Inventory::of(cluster)?.but_of(&dead.name);
    step("weft is installed", || cluster.install_weft(TIMEOUT))?;
    let milan = ClusterSpec::new("milan", 2, 1);
    cluster.apply(&join(&Peering::new(&cluster.spec, &milan, 30742).client_documents()))?;
    wait_until("both nodes have applied it", TIMEOUT, || has_applied(cluster))?;
    let users = users(cluster, TENANT)?;
    dead.host.ip("link set eth0 down")?;

    cluster.kubectl(&["cordon", alive])?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let uninstalled = scope.spawn(|| cluster.uninstall_weft(AT_MOST));
        wait_until("the Job is sent to the dead node", TIMEOUT, || {
            let nodes = ["get", "pods", "--namespace=liqo", JOB, NODES];
            let nodes = cluster.kubectl(&nodes)?;
            ensure!(nodes.trim() == dead.name, "it is on {nodes:?}");
            Ok(())
        })?;
        cluster.kubectl(&["uncordon", alive])?;
        uninstalled.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    note_time(began.elapsed(), "to uninstall weft");
    is_reported(cluster, &dead.name)?;

    // Pods of that node end for the API only when the node is given up.
    cluster.kubectl(&["delete", "node", &dead.name])?;
    wait_until("there is no more than before", COLLECTED, || {
        Inventory::of(cluster)?.but_of(&dead.name).ensure_no_more(&before, &users)
    })
}

const NODES: &str = "--output=jsonpath={.items[*].spec.nodeName}";

fn has_applied(cluster: &Kubernetes) -> Result<()> {
    let list = cluster.kubectl(&["get", "nodeconfigs", "--output=json"])?;
    let list: Value = serde_json::from_str(&list)?;
    let all = list["items"].as_array().cloned().unwrap_or_default();
    let is_applied = |config: &&Value| {
        let in_whole = config["spec"]["peerings"].as_array().is_some_and(|all| !all.is_empty());
        let from_records = config["spec"]["fromRecords"] == true;
        (in_whole || from_records && config["status"]["records"].is_object())
            && config["status"]["appliedGeneration"] == config["metadata"]["generation"]
    };
    ensure!(all.iter().filter(is_applied).count() == 2, "{all:#?}");
    Ok(())
}

/// Checks that one Event names the node left behind, and what to do there.
fn is_reported(cluster: &Kubernetes, node: &str) -> Result<()> {
    let list = ["get", "events", "--all-namespaces", "--output=json"];
    let selected = "--field-selector=reason=WeftLeftBehind";
    let list = cluster.kubectl(&[&list[..], &[selected]].concat())?;
    let list: Value = serde_json::from_str(&list)?;
    let [event] = list["items"].as_array().map_or(&[][..], Vec::as_slice) else {
        bail!("expected one Event: {list:#}")
    };
    ensure!(event["involvedObject"]["name"] == node, "{event:#}");
    let message = event["message"].as_str().unwrap_or_default();
    ensure!(message.contains("route-agent cleanup"), "{message}");
    Ok(())
}
