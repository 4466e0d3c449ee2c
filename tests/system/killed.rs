//! ```text
//!   pod --- rome-1 --------- milan-1 --- pod        what is killed
//!              \------------ paris-1 --- pod        what must not notice
//! ```
//!
//! Rome is milan's client and paris's server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::traffic::{HeldConnection, Service, StreamReport, Streams, TcpServer, Way};
use weft_tests::{Cluster, ClusterSpec, stays_so, wait_until};

use crate::scene::{ECHO, PORT, Scene, TIMEOUT, first_pod, play, play_with, rome_and_milan};

/// From the kill to the first packet.
const BACK: Duration = Duration::from_secs(1);
/// Time for which a status may be wrong.
const STALE: Duration = Duration::from_secs(3);
/// Time until a gateway that hangs is no longer published to nodes as connected.
const HUNG: Duration = Duration::from_secs(18);
/// Within this time each gateway is asked whether it is well.
const ASKED: Duration = Duration::from_millis(2300);
const CONTROLS: [&str; 3] = ["fabric-controller", "ipam", "route-agent"];
const PAIRS: [(&str, &str); 4] =
    [("rome", "milan"), ("milan", "rome"), ("rome", "paris"), ("paris", "rome")];
const FLOW: u16 = 7001;

/// Processes killed at one blow: a cluster, and a program or the peer of a gateway.
type Victims = &'static [(&'static str, &'static str)];

#[test]
fn killed_program_is_back_within_a_second() -> Result<()> {
    const BLOWS: [Victims; 9] = [
        &[("rome", "milan")],
        &[("milan", "rome")],
        &[("rome", "milan"), ("milan", "rome")],
        // Again before it has lived for long.
        &[("rome", "milan")],
        &[("rome", "fabric-controller")],
        &[("rome", "ipam"), ("rome", "route-agent")],
        &[("rome", "milan"), ("rome", "fabric-controller"), ("rome", "route-agent")],
        &[("milan", "ipam"), ("milan", "rome"), ("milan", "fabric-controller")],
        &[("milan", "rome"), ("rome", "route-agent"), ("rome", "milan"), ("rome", "ipam")],
    ];
    three_clusters(|scene| {
        let mut held = hold(scene)?;
        let (before, mut in_time) = (granted(scene.cluster("rome"))?, 0);
        for victims in BLOWS {
            let to_milan = strike(scene, victims)?;
            let outage =
                to_milan.iter().map(|report| report.longest_outage).max().unwrap_or_default();
            eprintln!("killed {victims:?}: nothing passed for {outage:?}");
            in_time += usize::from(outage <= BACK);
            if !victims.iter().any(|(_, what)| ["rome", "milan"].contains(what)) {
                ensure!(
                    to_milan.iter().all(|report| report.lost == 0),
                    "{victims:?}: {to_milan:?}"
                );
            }
            held.all_echo()?;
        }
        ensure!(in_time + 1 >= BLOWS.len(), "only {in_time} of {} within {BACK:?}", BLOWS.len());
        ensure!(granted(scene.cluster("rome"))? == before, "something was granted anew");
        Ok(())
    })
}

#[test]
fn controller_ipam_and_agent_may_be_down_for_any_time() -> Result<()> {
    three_clusters(|scene| {
        let mut held = hold(scene)?;
        let before = granted(scene.cluster("rome"))?;
        let gateways = scene.cluster("rome").processes(0, "gateway");
        let streams = Streams::start(&ways(scene)?, Duration::from_millis(2), 0)?;
        let up = scene.cluster_mut("rome").take_program("weft-up")?;
        up.signal(Signal::SIGKILL)?;
        for program in CONTROLS {
            kill_one(pid(scene.cluster("rome"), program)?)?;
        }
        stays_so("the peering", STALE, || {
            let state = scene.cluster("rome").peering("milan")?["state"].clone();
            ensure!(state == "Connected" || state == "Degraded", "{state}");
            Ok(())
        })?;
        let problems = scene.cluster("rome").status()?["problems"].to_string();
        let missed = ["no `weft up`", "ipam does not run", "fabric-controller does not run"];
        for problem in missed.into_iter().chain(["no probes of its route-agent arrive"]) {
            ensure!(problems.contains(problem), "{problem} is not in {problems}");
        }
        scene.cluster_mut("rome").start_up(&[])?;
        scene.cluster("rome").wait_connected("milan", TIMEOUT)?;
        wait_until("all of it runs again", TIMEOUT, || {
            CONTROLS.iter().try_for_each(|p| pid(scene.cluster("rome"), p).map(drop))
        })?;
        std::thread::sleep(Duration::from_secs(1));
        let reports = streams.stop();
        ensure!(reports.iter().all(|report| report.lost == 0), "{reports:?}");
        held.all_echo()?;
        let rome = scene.cluster("rome");
        ensure!(rome.processes(0, "gateway") == gateways, "a gateway was replaced");
        ensure!(granted(rome)? == before, "something was granted anew");
        let _gone = up;
        Ok(())
    })
}

#[test]
fn unsupervised_dead_gateway_is_down_until_up() -> Result<()> {
    three_clusters(|scene| {
        let mut held = hold(scene)?;
        let up = scene.cluster_mut("rome").take_program("weft-up")?;
        up.signal(Signal::SIGKILL)?;
        kill_one(pid(scene.cluster("rome"), "milan")?)?;
        let killed = Instant::now();
        wait_until("the status says so", STALE, || is(scene.cluster("rome"), "milan", "Down"))?;
        stays_so("the status", STALE, || is(scene.cluster("rome"), "milan", "Down"))?;
        scene.cluster("rome").is_connected("paris")?;

        // The rest as well, in another order.
        for victim in ["route-agent", "paris", "ipam", "fabric-controller"] {
            kill_one(pid(scene.cluster("rome"), victim)?)?;
        }
        wait_until("the status says so", STALE, || is(scene.cluster("rome"), "paris", "Down"))?;
        scene.cluster_mut("rome").start_up(&[])?;
        connected(scene)?;
        eprintln!("back {:?} after the first kill", killed.elapsed());
        held.all_echo()?;
        let _gone = up;
        Ok(())
    })
}

#[test]
fn hung_gateway_is_not_connected_and_recovers() -> Result<()> {
    three_clusters(|scene| {
        let rome = scene.cluster("rome");
        let gateway = Pid::from_raw(pid(rome, "milan")?);
        kill(gateway, Signal::SIGSTOP)?;
        wait_until("the status says so", STALE, || is(rome, "milan", "Error"))?;
        rome.is_connected("paris")?;
        wait_until("the nodes have it", HUNG, || {
            let open = rome.nodes_open_to("milan")?;
            ensure!(open == 0, "{open} nodes still use it");
            Ok::<_, anyhow::Error>(())
        })?;
        kill(gateway, Signal::SIGCONT)?;
        let continued = Instant::now();
        rome.wait_connected("milan", STALE)?;
        eprintln!("connected {:?} after it went on", continued.elapsed());
        Ok(())
    })
}

/// As a virtual machine that is moved: all of it stops, and `weft up` may be the first that goes on.
#[test]
fn a_host_that_stood_still_takes_no_gateway_for_dead() -> Result<()> {
    // Without probes nothing else has a reason to.
    play_with(&rome_and_milan(1), &["--ping-enabled=false"], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let gateway = Pid::from_raw(pid(rome, "milan")?);
        let up = rome.program("weft-up")?;
        let published = || rome.weft(&["get", "nodeconfig", "-o", "json"]);
        // Nodes acknowledge a new peering after both ends are connected.
        let before = wait_until("nothing more is published to nodes", TIMEOUT, || {
            let before = published()?;
            std::thread::sleep(Duration::from_secs(1));
            ensure!(published()? == before, "NodeConfigs changed");
            Ok(before)
        })?;
        kill(gateway, Signal::SIGSTOP)?;
        std::thread::sleep(ASKED);
        up.signal(Signal::SIGSTOP)?;
        std::thread::sleep(HUNG);
        up.signal(Signal::SIGCONT)?;
        std::thread::sleep(Duration::from_millis(300));
        kill(gateway, Signal::SIGCONT)?;
        std::thread::sleep(STALE);
        rome.is_connected("milan")?;
        let after = published()?;
        ensure!(after == before, "something new was published: {after}, before {before}");
        Ok(())
    })
}

fn three_clusters(test: impl FnOnce(&mut Scene) -> Result<()>) -> Result<()> {
    let specs = [("rome", 1), ("milan", 2), ("paris", 3)];
    play(&specs.map(|(id, number)| ClusterSpec::new(id, number, 1)), |scene| {
        scene.peer("rome", "milan", PORT)?;
        scene.peer("paris", "rome", PORT + 1)?;
        test(scene)
    })
}

/// Kills at one blow while datagrams flow everywhere; what became of those to and from milan. All
/// others have to arrive, and the status has to be right in time and stay so.
fn strike(scene: &Scene, victims: Victims) -> Result<Vec<StreamReport>> {
    let streams = Streams::start(&ways(scene)?, Duration::from_millis(2), 0)?;
    std::thread::sleep(Duration::from_millis(300));
    let pids = victims.iter().map(|(cluster, what)| pid(scene.cluster(cluster), what));
    let pids: Vec<i32> = pids.collect::<Result<_>>()?;
    pids.iter().try_for_each(|pid| kill_one(*pid))?;
    std::thread::sleep(STALE);
    PAIRS.iter().try_for_each(|(id, peer)| scene.cluster(id).is_connected(peer))?;
    let mut reports = streams.stop();
    let to_paris = reports.split_off(2);
    ensure!(to_paris.iter().all(|report| report.lost == 0), "killed {victims:?}: {to_paris:?}");
    connected(scene)?;
    Ok(reports)
}

fn kill_one(pid: i32) -> Result<()> {
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("killing")
}

/// The process of a cluster's first node that runs a program, or the gateway to a peer.
fn pid(cluster: &Cluster, what: &str) -> Result<i32> {
    let gateway = format!("--namespace liqo-tenant-{what} ");
    let program = format!("/{what} ");
    let all = cluster.head().processes();
    let found = all.iter().find(|(_, line)| {
        let first = line.split_inclusive(' ').next().unwrap_or_default();
        first.ends_with(&program) || first.ends_with("/gateway ") && line.contains(&gateway)
    });
    found.map(|(pid, _)| *pid).with_context(|| format!("no {what} runs in {}", cluster.spec.id))
}

fn is(cluster: &Cluster, peer: &str, expected: &str) -> Result<()> {
    let state = cluster.peering(peer)?["state"].clone();
    ensure!(state == expected, "{} says that its peering with {peer} is {state}", cluster.spec.id);
    Ok(())
}

fn connected(scene: &Scene) -> Result<()> {
    PAIRS.iter().try_for_each(|(id, peer)| scene.cluster(id).wait_connected(peer, TIMEOUT))
}

/// In the order of [`PAIRS`].
fn ways(scene: &Scene) -> Result<Vec<Way>> {
    let way = |(i, (from, to)): (u16, &(&str, &str))| {
        let (pod, target) = scene.way(from, to)?;
        let at = first_pod(scene.cluster(to)).ns.clone();
        Ok(Way { from: pod.ns, to: SocketAddr::new(target, FLOW + i), at })
    };
    (0..).zip(&PAIRS).map(way).collect()
}

/// Connections that none of this may break.
struct Held {
    connections: Vec<HeldConnection>,
    _servers: Vec<TcpServer>,
}

impl Held {
    fn all_echo(&mut self) -> Result<()> {
        self.connections.iter_mut().try_for_each(|held| held.echoes(TIMEOUT).map(drop))
    }
}

fn hold(scene: &Scene) -> Result<Held> {
    let pods = scene.clusters.iter().map(first_pod);
    let servers = pods.map(|pod| TcpServer::start(&pod.ns, ECHO, Service::Echo));
    let _servers = servers.collect::<Result<_>>()?;
    let open = |(from, to): &(&str, &str)| {
        let (pod, target) = scene.way(from, to)?;
        HeldConnection::open(&pod.ns, SocketAddr::new(target, ECHO))
    };
    let connections = PAIRS.iter().map(open).collect::<Result<_>>()?;
    Ok(Held { connections, _servers })
}

/// Every prefix and address granted in a cluster, one a line.
fn granted(cluster: &Cluster) -> Result<String> {
    let mut lines = Vec::new();
    for kind in ["network", "ip"] {
        let text = cluster.weft(&["get", kind, "-o", "json"])?;
        let list: serde_json::Value = serde_json::from_str(&text)?;
        for item in list["items"].as_array().into_iter().flatten() {
            lines.push(format!("{kind} {} {}", item["metadata"]["name"], item["status"]));
        }
    }
    lines.sort();
    Ok(lines.join("\n"))
}
