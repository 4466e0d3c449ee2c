//! ```text
//!   rome --- 40 peers that do not answer        one gateway for each, all on one host
//! ```

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::connect;
use weft_tests::{Cluster, ClusterSpec, scrape, wait_until};

use crate::scene::{PORT, TIMEOUT, answers_in_time, first_pod, play, play_with, traffic_passes};

/// Per gateway, on a busy machine with a development build.
const TIME_EACH: Duration = Duration::from_secs(3);
/// Longest time that a program of nothing may take to run while all gateways start.
const MAX_RESPONSE: Duration = Duration::from_secs(1);
/// Share of one core, for an idle gateway and its part of all other processes.
const MAX_IDLE_LOAD: f64 = 0.002;
/// Memory for a gateway and its part of all other processes, shared pages divided by their users.
const MAX_BYTES_EACH: u64 = 5_000_000;
const MEASURED: Duration = Duration::from_secs(20);
const METRICS: &str = "127.0.0.1:9100";
const OPTIONS: [&str; 2] = ["--metrics", METRICS];
/// Timeout of the metrics of all gateways.
const SCRAPED: Duration = Duration::from_secs(20);

#[test]
fn forty_peerings_use_one_inotify_instance() -> Result<()> {
    let specs = [ClusterSpec::new("rome", 1, 1)];
    play_with(&specs, &OPTIONS, |scene| many_peerings(scene.cluster("rome"), 40))
}

#[test]
fn fabric_starts_with_a_full_state_directory() -> Result<()> {
    play(&[ClusterSpec::new("rome", 1, 1), ClusterSpec::new("milan", 2, 1)], |scene| {
        scene.peer("rome", "milan", PORT)?;
        drop(scene.cluster_mut("rome").take_program("weft-up")?);
        // Moved there when it is as it is to be: an empty directory has no resources.
        let full = "cd /run/cluster && mkdir full && mount -t tmpfs -o size=1m full full &&
            cp -a state/. full/ &&
            find full -name copies -prune -exec rm -r {} + && ! dd if=/dev/zero of=full/rest &&
            mount --move full state";
        let rome = scene.cluster("rome");
        rome.head().command(Command::new("sh").args(["-c", full]), "")?;
        for program in ["gateway", "fabric-controller", "ipam", "route-agent"] {
            for pid in rome.processes(0, program) {
                kill(Pid::from_raw(pid), Signal::SIGKILL)?;
            }
        }
        scene.cluster_mut("rome").start()?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        wait_until("weft up has no room for copies", TIMEOUT, || {
            let log = rome.log("weft-up");
            ensure!(log.contains("cannot copy what was granted"), "{log}");
            Ok::<_, anyhow::Error>(())
        })?;
        rome.wait_connected("milan", TIMEOUT)?;
        // The status on a full file system is that of the gateway before.
        let address = rome.view(&milan.spec)?.of(first_pod(milan).addresses[0])?;
        answers_in_time(&first_pod(rome).ns, address)?;
        traffic_passes(rome, milan)
    })
}

#[test]
#[ignore = "takes minutes: make soak"]
fn three_hundred_peerings_start_without_a_storm() -> Result<()> {
    play_with(&[ClusterSpec::new("rome", 1, 1)], &OPTIONS, |scene| {
        let rome = scene.cluster("rome");
        let is_over = AtomicBool::new(false);
        let (started, response) = scope(|scope| {
            let response = scope.spawn(|| longest_response(&is_over));
            let started = many_peerings(rome, 300);
            is_over.store(true, Ordering::Relaxed);
            (started, response.join().expect("no panic"))
        });
        started?;
        let response = response?;
        let before = usage(rome)?;
        sleep(MEASURED);
        let after = usage(rome)?;
        let load = (after.time - before.time).as_secs_f64() / MEASURED.as_secs_f64();
        eprintln!(
            "300 gateways: {:.1} MB each, {:.3} % of a core each, {response:?} for a program of nothing",
            after.bytes as f64 / 300e6,
            load / 3.0,
        );
        no_process_was_restarted(rome, 300)?;
        ensure!(response < MAX_RESPONSE, "the host was not usable for {response:?}");
        ensure!(after.bytes < 300 * MAX_BYTES_EACH, "{} bytes", after.bytes);
        ensure!(load < 300.0 * MAX_IDLE_LOAD, "{load} cores");
        Ok(())
    })
}

fn many_peerings(rome: &Cluster, count: usize) -> Result<()> {
    let start = Instant::now();
    for number in 0..count {
        rome.apply(&format!("peer{number}"), &client_documents(rome, number))?;
    }
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
    no_process_was_restarted(rome, count)?;
    let log = rome.log("weft-up");
    ensure!(log.contains("gateways are started, "), "no line says how far it is: {log}");
    Ok(())
}

/// Checks the counter of each gateway's process.
fn no_process_was_restarted(rome: &Cluster, gateways: usize) -> Result<()> {
    let stream = connect(rome.head().net(), METRICS.parse()?, SCRAPED)?;
    stream.set_read_timeout(Some(SCRAPED))?;
    let text = scrape(stream)?;
    let counters = text.lines().filter(|line| line.starts_with("weft_process_restarts_total{"));
    let counters: Vec<_> = counters.collect();
    ensure!(counters.len() > gateways, "{} counters of {gateways} gateways", counters.len());
    let restarted: Vec<_> = counters.iter().filter(|line| !line.ends_with(" 0")).collect();
    ensure!(restarted.is_empty(), "{restarted:?}: {}", rome.log("weft-up"));
    Ok(())
}

/// A peering of its own small prefixes with a cluster that is not there.
fn client_documents(rome: &Cluster, number: usize) -> String {
    let mut peer = ClusterSpec::new(&format!("peer{number}"), 15, 1);
    peer.pod_cidrs = vec!["10.200.0.0/24".parse().expect("a prefix")];
    peer.external_cidrs = vec!["10.70.0.0/24".parse().expect("a prefix")];
    join(&Peering::new(&rome.spec, &peer, PORT).client_documents())
}

/// The longest time that a program of nothing took to run.
fn longest_response(is_over: &AtomicBool) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    while !is_over.load(Ordering::Relaxed) {
        let start = Instant::now();
        Command::new("true").status().context("running `true`")?;
        longest = longest.max(start.elapsed());
        sleep(Duration::from_millis(200));
    }
    Ok(longest)
}

/// Memory and processor time of all processes of a cluster's first machine.
struct Usage {
    bytes: u64,
    time: Duration,
}

fn usage(cluster: &Cluster) -> Result<Usage> {
    let mut usage = Usage { bytes: 0, time: Duration::ZERO };
    for (pid, _) in cluster.nodes[0].host.processes() {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
        let kib = text.lines().find_map(|line| line.strip_prefix("Pss:")?.strip_suffix(" kB"));
        usage.bytes += kib.context("no Pss")?.trim().parse::<u64>()? * 1024;
        let clock = clock_getcpuclockid(Pid::from_raw(pid))?;
        usage.time += Duration::from(clock_gettime(clock)?);
    }
    Ok(usage)
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
