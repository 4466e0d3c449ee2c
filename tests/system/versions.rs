//! Programs of an earlier version beside today's, as while a fabric is upgraded, or taken back.
//!
//! ```text
//!   pod --- rome-1 [weft up] ----+---- milan-1 --- pod     1,000 packets/s each way
//!   pod --- rome-2 [weft agent] -'
//! ```

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use weft_tests::traffic::{Streams, Way};
use weft_tests::{
    Cluster, ClusterSpec, bin_dir, manifests, previous_dir, skip, stays_so, wait_until,
};

use crate::scene::{PORT, Scene, TIMEOUT};

const INTERVAL: Duration = Duration::from_millis(1);
/// Longer than the controller publishes for, and waits for acknowledgements of, at a time.
const MIXED: Duration = Duration::from_secs(12);
const FLOW: u16 = 7100;

#[test]
fn newer_controller_serves_older_readers() -> Result<()> {
    let Some(earlier) = earlier_programs() else { return Ok(()) };
    let today = bin_dir()?;
    play([&earlier, &today], |scene| {
        let streams = Streams::start(&ways(scene)?, INTERVAL, 0)?;
        replace_up(scene, &today)?;
        let rome = scene.cluster("rome");
        runs(rome, 0, "gateway", &earlier)?;
        runs(rome, 1, "route-agent", &earlier)?;
        keeps_going(rome, "first")?;
        replace_agent(scene, &today)?;
        keeps_going(scene.cluster("rome"), "second")?;
        nothing_lost(streams)
    })
}

/// Rome with the programs of the first folder and milan with those of the second, connected.
fn play(programs: [&PathBuf; 2], test: impl FnOnce(&mut Scene) -> Result<()>) -> Result<()> {
    let specs = [ClusterSpec::new("rome", 1, 2), ClusterSpec::new("milan", 2, 1)];
    let mut scene = Scene::build(&specs)?;
    for (cluster, programs) in scene.clusters.iter_mut().zip(programs) {
        cluster.bin_dir.clone_from(programs);
        cluster.start()?;
    }
    let result = scene.peer("rome", "milan", PORT).and_then(|_| test(&mut scene));
    if result.is_err() {
        scene.clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
    }
    result
}

/// Folder of an earlier version's programs; none, with a note, where they have not been built.
fn earlier_programs() -> Option<PathBuf> {
    previous_dir().map_err(|why| skip(&format!("{why:#}"))).ok()
}

/// From the pods of both of rome's nodes to milan's pod and back.
fn ways(scene: &Scene) -> Result<Vec<Way>> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let (there, back) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
    let far = milan.pods().next().context("milan has a pod")?;
    let mut ways = Vec::new();
    for (port, near) in (FLOW..).step_by(2).zip(rome.pods()) {
        for (port, from, to, view) in [(port, near, far, &there), (port + 1, far, near, &back)] {
            let target = SocketAddr::new(view.of(to.addresses[0])?, port);
            ways.push(Way { from: from.ns.clone(), to: target, at: to.ns.clone() });
        }
    }
    Ok(ways)
}

/// Ends rome's `weft up`, whose gateways and agents run on, and starts that of another version.
fn replace_up(scene: &mut Scene, programs: &PathBuf) -> Result<()> {
    let rome = scene.cluster_mut("rome");
    ensure!(rome.take_program("weft-up")?.stop(TIMEOUT)?.success(), "weft up failed");
    rome.bin_dir.clone_from(programs);
    rome.start_up(&[])?;
    runs(rome, 0, "fabric-controller", programs)
}

/// Ends what runs on rome's second node and starts it with another version.
fn replace_agent(scene: &mut Scene, programs: &PathBuf) -> Result<()> {
    let rome = scene.cluster_mut("rome");
    ensure!(rome.take_program("weft-agent-2")?.stop(TIMEOUT)?.success(), "weft agent failed");
    rome.bin_dir.clone_from(programs);
    rome.start_agent(2)?;
    runs(rome, 1, "route-agent", programs)
}

/// Waits until the only process of this program on a node comes from this folder: for a moment, a child of it
/// that becomes another program looks like a second one.
fn runs(cluster: &Cluster, node: usize, program: &str, folder: &Path) -> Result<()> {
    let what = format!("{program} runs from {}", folder.display());
    wait_until(&what, TIMEOUT, || is_only(cluster, node, program, folder))
}

fn is_only(cluster: &Cluster, node: usize, program: &str, folder: &Path) -> Result<()> {
    let pids = cluster.processes(node, program);
    let [pid] = pids[..] else { anyhow::bail!("{} processes of {program}", pids.len()) };
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).context("its program")?;
    let expected = folder.join(program).canonicalize()?;
    ensure!(path == expected, "{program} is {}, not {}", path.display(), expected.display());
    ensure!(kill(Pid::from_raw(pid), None::<Signal>).is_ok(), "{program} has ended");
    Ok(())
}

/// The peering stays connected, and a change of a manifest reaches gateway and nodes.
fn keeps_going(rome: &Cluster, name: &str) -> Result<()> {
    rome.wait_connected("milan", TIMEOUT)?;
    stays_so("the peering is connected", MIXED, || rome.is_connected("milan"))?;
    let before = generations(rome)?;
    let target = rome.pods().next().context("rome has a pod")?.addresses[0];
    rome.apply(name, &manifests::ip(name, target, false))?;
    wait_until("gateway and nodes have applied the change", TIMEOUT, || {
        let now = generations(rome)?;
        let is_newer =
            now.iter().zip(&before).any(|(now, before)| now.published > before.published);
        ensure!(is_newer, "nothing is published: {now:?}");
        let lag = now.iter().find(|object| object.applied != object.published);
        ensure!(lag.is_none(), "{lag:?}");
        Ok::<_, anyhow::Error>(())
    })
}

/// Generations of a published object.
#[derive(Debug, PartialEq)]
struct Generations {
    name: String,
    published: [u64; 2],
    applied: [u64; 2],
}

/// Generations of configs, and of the records that they are joined with.
fn generations(cluster: &Cluster) -> Result<Vec<Generations>> {
    let get = |what: &[&str]| -> Result<Value> {
        let text = cluster.weft(&[&["get"], what, &["-o", "json"]].concat())?;
        Ok(serde_json::from_str(&text)?)
    };
    let mut all = Vec::new();
    for (kind, record) in [("gatewayconfig", "gatewayrecord"), ("nodeconfig", "fabricrecord")] {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let records = number(&get(&[record, "cluster"])?["metadata"]["generation"]);
        let list = get(&[kind])?;
        let one = || vec![list.clone()];
        for object in list["items"].as_array().cloned().unwrap_or_else(one) {
            let (published, status) = (&object["metadata"]["generation"], &object["status"]);
            all.push(Generations {
                name: format!("{kind} {}", object["metadata"]["name"]),
                published: [number(published), records],
                applied: [&status["appliedGeneration"], &status["records"]["generation"]]
                    .map(number),
            });
        }
    }
    Ok(all)
}

fn nothing_lost(streams: Streams) -> Result<()> {
    let reports = streams.stop();
    let lost: Vec<_> = reports.iter().map(|report| report.lost).collect();
    ensure!(lost.iter().all(|lost| *lost == 0), "lost {lost:?}: {reports:?}");
    ensure!(reports.iter().all(|report| report.sent > 10_000), "{reports:?}");
    Ok(())
}
