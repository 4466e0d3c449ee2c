//! ```text
//!   pod --- rome-1 (client) --------- milan-1 (server) --- pod
//! ```
//!
//! Both limits are for the programs that users run, built for release. A development build has
//! several times the code, unoptimised, so there less is checked; each test states its limits.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use weft_tests::traffic::bulk;
use weft_tests::{Cluster, Netns, bin_dir, wait_until};

use crate::scene::{ECHO, PORT, SINK, TIMEOUT, first_pod, play, rome_and_milan, serve};

/// Resident memory: 2 MB of a gateway's own, the rest pages of the program's file, which all
/// gateways of a host share. Those of one and the same file differ by 0.8 MB with the size of the pieces
/// in which the kernel has it cached (measured).
const MAX_BYTES: u64 = 19_000_000;
/// A gateway's own part of that, after packets of all sizes.
const MOST_BUSY_BYTES: u64 = 2_500_000;
const PACKETS: u64 = 1_000_000;
/// Limit from the start of a gateway's process to the first packet through it.
const SOON: Duration = Duration::from_millis(300);
/// In a development build, where code of all sorts takes several times as long.
const LATER: Duration = Duration::from_millis(1500);
/// Half of them in each role; so many are in time, since others at work on the same machine make it slower.
const TRIES: usize = 20;
const ENOUGH: usize = 16;

#[test]
fn a_gateway_stays_small_after_a_million_packets() -> Result<()> {
    let _alone = alone();
    let released = is_release_build()?;
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let start = Instant::now();
        while packets(rome).min(packets(milan)) < PACKETS {
            ensure!(start.elapsed() < Duration::from_secs(300), "only {} passed", packets(rome));
            bulk(&pod.ns, SocketAddr::new(target, SINK), 100_000_000)?;
        }
        for cluster in [rome, milan] {
            let gateway = pid(cluster)?;
            let (all, own) =
                (memory(gateway, "status", "VmRSS")?, memory(gateway, "status", "RssAnon")?);
            eprintln!(
                "gateway of {}: {:.1} MB resident, {:.1} MB of them its own, after {} packets in {:?}",
                cluster.spec.id,
                all as f64 / 1e6,
                own as f64 / 1e6,
                packets(cluster),
                start.elapsed()
            );
            // The rest are pages of the program's file.
            let (checked, what) = if released { (all, "") } else { (own, " of its own") };
            ensure!(checked <= MAX_BYTES, "{checked} bytes{what}; promised: {MAX_BYTES}");
            ensure!(
                !released || own < MOST_BUSY_BYTES,
                "{own} bytes of its own; promised: {MOST_BUSY_BYTES}"
            );
        }
        Ok(())
    })
}

/// Limit for an idle gateway: of its own, which is what each further one on a host costs, and with
/// its share of the pages of files that others map, too (`Pss`), of which the other one here has half. Of pages
/// of files those count that it has used since it was idle: the kernel maps as many more of a file as it has
/// cached in one piece (16.5 to 18.5 MB in all of one and the same program, measured).
const MOST_OWN_BYTES: u64 = 2_100_000;
const MOST_IDLE_BYTES: u64 = 8_000_000;

#[test]
fn idle_gateway_takes_less_than_eight_megabytes() -> Result<()> {
    let _alone = alone();
    if !is_release_build()? {
        return Ok(());
    }
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let clusters = [scene.cluster("rome"), scene.cluster("milan")];
        for cluster in clusters {
            // Pages that only its start has used do not count (proc(5), clear_refs).
            fs::write(format!("/proc/{}/clear_refs", pid(cluster)?), "1")?;
        }
        std::thread::sleep(Duration::from_secs(10));
        for cluster in clusters {
            let gateway = pid(cluster)?;
            let of = |line| memory(gateway, "smaps_rollup", line);
            let (all, mapped, own, used) =
                (of("Rss")?, of("Pss")?, of("Anonymous")?, of("Referenced")?);
            let share = own + (mapped - own) * used.min(all) / all;
            eprintln!(
                "idle gateway of {}: {all} bytes resident, {used} of them used, {mapped} its share, {share} \
                 of what it used, {own} its own",
                cluster.spec.id
            );
            ensure!(own < MOST_OWN_BYTES, "{own} bytes of its own; promised: {MOST_OWN_BYTES}");
            ensure!(share < MOST_IDLE_BYTES, "{share} bytes; promised: {MOST_IDLE_BYTES}");
        }
        Ok(())
    })
}

#[test]
#[ignore = "measures the machine: make soak"]
fn restarted_gateway_passes_packets_soon() -> Result<()> {
    let _alone = alone();
    let most = if is_release_build()? { SOON } else { LATER };
    let took = first_packets()?;
    let load = fs::read_to_string("/proc/loadavg")?;
    eprintln!("from start to first packet: {took:?}; load: {}", load.trim());
    let in_time = took.iter().filter(|time| **time <= most).count();
    ensure!(in_time >= ENOUGH, "{in_time} of {TRIES} within {most:?}, expected {ENOUGH}: {took:?}");
    Ok(())
}

fn first_packets() -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let sides = [("rome", "milan"), ("milan", "rome")];
        for (killed, _) in sides.into_iter().cycle().take(TRIES) {
            for (id, peer) in sides {
                scene.cluster(id).wait_connected(peer, TIMEOUT)?;
            }
            let killed = scene.cluster(killed);
            took.push(first_packet(&pod.ns, SocketAddr::new(target, ECHO), killed)?);
        }
        Ok(())
    })?;
    Ok(took)
}

/// Each test of this file loads the machine or measures time: never both at once.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills a gateway; how long after its successor's start the first packet of an established flow
/// is back.
fn first_packet(pod: &Netns, to: SocketAddr, cluster: &Cluster) -> Result<Duration> {
    let socket = pod.run(|| UdpSocket::bind(SocketAddr::new(IpAddr::from([0; 4]), 0)))?;
    socket.set_read_timeout(Some(Duration::from_millis(2)))?;
    first_echo(&socket, to, 0)?;
    let old = pid(cluster)?;
    kill(Pid::from_raw(old), Signal::SIGKILL)?;
    wait_until("the gateway is gone", TIMEOUT, || match cluster.processes(0, "gateway") {
        pids if pids.contains(&old) => Err("it runs"),
        _ => Ok(()),
    })?;
    let passed = first_echo(&socket, to, 1)?;
    let started = start_of(pid(cluster)?)?;
    Ok(passed.saturating_duration_since(started))
}

/// Sends datagrams with this number until one is back.
fn first_echo(socket: &UdpSocket, to: SocketAddr, number: u8) -> Result<Instant> {
    let start = Instant::now();
    let mut buffer = [0; 8];
    while start.elapsed() < TIMEOUT {
        // Refused while there is no gateway.
        let _ = socket.send_to(&[number], to);
        if socket.recv_from(&mut buffer).is_ok() && buffer[0] == number {
            return Ok(Instant::now());
        }
    }
    anyhow::bail!("nothing passed within {TIMEOUT:?}")
}

fn pid(cluster: &Cluster) -> Result<i32> {
    let found = cluster.processes(0, "gateway");
    found.first().copied().with_context(|| format!("no gateway of {} runs", cluster.spec.id))
}

/// Start time of a process, to a hundredth of a second, early rather than late (proc(5), `starttime`).
fn start_of(pid: i32) -> Result<Instant> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: f64 = after_name.split_whitespace().nth(19).context("no start time")?.parse()?;
    let rate = sysconf(SysconfVar::CLK_TCK)?.context("no clock rate")? as f64;
    let uptime = fs::read_to_string("/proc/uptime")?;
    let uptime: f64 = uptime.split_whitespace().next().context("no uptime")?.parse()?;
    let age = Duration::try_from_secs_f64((uptime - ticks / rate).max(0.0))?;
    Instant::now().checked_sub(age).context("the process is older than the clock")
}

/// Inner packets that the gateway has taken on in either direction.
fn packets(cluster: &Cluster) -> u64 {
    let (given, taken) = cluster.tunnelled();
    given + taken
}

/// A line of a file of `/proc/PID`, in bytes.
fn memory(pid: i32, file: &str, line: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let found = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':'));
    let kib: u64 =
        found.with_context(|| format!("no {line}"))?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

/// Development builds carry debug information, released programs none.
fn is_release_build() -> Result<bool> {
    let program = fs::read(bin_dir()?.join("gateway"))?;
    let section: &[u8] = b"\0.debug_info\0";
    Ok(!program.windows(section.len()).any(|window| window == section))
}
