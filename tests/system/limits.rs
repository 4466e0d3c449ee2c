//! ```text
//!   rome --- 40 peers that do not answer        one gateway for each, all on one host
//! ```

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::{Cluster, ClusterSpec, wait_until};

use crate::scene::{PORT, play};

/// Per gateway, on a busy machine with a development build.
const TIME_EACH: Duration = Duration::from_secs(3);

#[test]
fn forty_peerings_use_one_inotify_instance() -> Result<()> {
    play(&[ClusterSpec::new("rome", 1, 1)], |scene| many_peerings(scene.cluster("rome"), 40))
}

#[test]
#[ignore = "takes minutes: make soak"]
fn three_hundred_peerings_start_without_a_storm() -> Result<()> {
    play(&[ClusterSpec::new("rome", 1, 1)], |scene| many_peerings(scene.cluster("rome"), 300))
}

fn many_peerings(rome: &Cluster, count: usize) -> Result<()> {
    let start = Instant::now();
    let text: Vec<_> = (0..count).map(|number| client_documents(rome, number)).collect();
    rome.apply("peerings", &text.join("---\n"))?;
    let time = TIME_EACH * u32::try_from(count)?;
    wait_until("every gateway runs", time, || {
        let gateways = rome.processes(0, "gateway").len();
        ensure!(gateways == count, "{gateways} of {count} run");
        let status = rome.status()?;
        let states = status["peerings"].as_array().context("no peerings")?;
        let connecting = states.iter().filter(|peering| peering["state"] == "Connecting").count();
        ensure!(connecting == count, "{connecting} of {count} are Connecting");
        Ok::<_, anyhow::Error>(())
    })?;
    eprintln!("{count} gateways run after {:?}", start.elapsed());
    let instances = inotify_instances(rome)?;
    ensure!(instances == 1, "{instances} inotify instances of {count} gateways and the rest");
    let log = rome.log("weft-up");
    ensure!(!log.contains("starting it again"), "gateways ended: {log}");
    ensure!(log.contains("gateways are started, "), "no line says how far it is: {log}");
    Ok(())
}

/// A peering of its own small prefixes with a cluster that is not there.
fn client_documents(rome: &Cluster, number: usize) -> String {
    let mut peer = ClusterSpec::new(&format!("peer{number}"), 15, 1);
    peer.pod_cidrs = vec!["10.200.0.0/24".parse().expect("a prefix")];
    peer.external_cidrs = vec!["10.70.0.0/24".parse().expect("a prefix")];
    join(&Peering::new(&rome.spec, &peer, PORT).client_documents())
}

/// Inotify instances of all processes of the cluster's first machine.
fn inotify_instances(cluster: &Cluster) -> Result<usize> {
    let mut count = 0;
    for (pid, _) in cluster.nodes[0].host.processes() {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        count += targets.filter(|target| target.as_os_str() == "anon_inode:inotify").count();
    }
    Ok(count)
}
