//! ```text
//!   rome-1, rome-2 --------- milan-1        connected, and nothing to do
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use weft_tests::{ClusterSpec, bin_dir};

use crate::scene::{PORT, Scene, play};

/// Longer than agents and gateways go without looking at everything.
const MEASURED: Duration = Duration::from_secs(32);
/// Other programs on the machine only add to the time of a wake-up: the smallest share counts.
const ROUNDS: usize = 6;
/// Share of one core that agents and gateways may take, and all else as gateways.
const MAX_SHARE_OF_AGENT: f64 = 0.005;
const MAX_SHARE: f64 = 0.002;
/// Time of a bare wake-up on the machine that these shares are for. On one that others share it takes four
/// times as long at times, as do those of weft: then their share may be so much larger.
const WAKE_UP: Duration = Duration::from_micros(45);
const MAX_SLOWER: f64 = 4.0;
const WAKE_UP_INTERVAL: Duration = Duration::from_millis(50);
const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];

/// Alone on the machine: other programs at work would make it a measurement of theirs.
#[test]
#[ignore = "measures the machine: make soak"]
fn idle_processes_take_no_time() -> Result<()> {
    read_programs_anew()?;
    let specs = [ClusterSpec::new("rome", 1, 2), ClusterSpec::new("milan", 2, 1)];
    play(&specs, |scene| {
        scene.peer("rome", "milan", PORT)?;
        let mut busy = BTreeMap::<_, Vec<f64>>::new();
        for round in 0..ROUNDS {
            for (process, share) in shares_of_a_core(scene)? {
                if round == 0 || busy.contains_key(&process) {
                    busy.entry(process).or_default().push(share);
                }
            }
            busy.retain(|process, shares| {
                let max =
                    if process.starts_with("route-agent") { MAX_SHARE_OF_AGENT } else { MAX_SHARE };
                shares.iter().all(|share| *share >= max)
            });
            if busy.is_empty() {
                return Ok(());
            }
        }
        bail!("not idle: {busy:?}")
    })
}

/// Drops the programs from the page cache, into which the kernel then reads them in large pieces. What was just built is
/// there in single pages: code that seldom runs takes up to three times as long to look them all up (measured).
fn read_programs_anew() -> Result<()> {
    for program in PROGRAMS {
        let file = File::open(bin_dir()?.join(program))?;
        file.sync_all()?;
        posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    }
    Ok(())
}

/// Share of a core of each process in one round, as it were with wake-ups of [`WAKE_UP`] or, if they take less,
/// as it is.
fn shares_of_a_core(scene: &Scene) -> Result<BTreeMap<String, f64>> {
    // Work that the peering's start has caused ends.
    std::thread::sleep(Duration::from_secs(2));
    let before = times_of_all(scene)?;
    let wake_up = wake_up()?;
    let slower = (wake_up.as_secs_f64() / WAKE_UP.as_secs_f64()).clamp(1.0, MAX_SLOWER);
    let load = fs::read_to_string("/proc/loadavg")?;
    eprintln!("a wake-up takes {wake_up:?}; load: {}", load.trim());
    let mut shares = BTreeMap::new();
    for (pid, name, after) in times_of_all(scene)? {
        let used = before.iter().find(|(p, ..)| *p == pid).map(|(.., before)| after - *before);
        let share =
            used.context("it has been started anew")?.as_secs_f64() / MEASURED.as_secs_f64();
        let percent = share * 100.0;
        eprintln!(
            "idle {name}: {percent:.3} % of a core, {:.3} % at {WAKE_UP:?}",
            percent / slower
        );
        shares.insert(format!("{name} {pid}"), share / slower);
    }
    Ok(shares)
}

/// Time of a bare wake-up of this machine, over [`MEASURED`]: a timer, and a datagram sent and received.
fn wake_up() -> Result<Duration> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let (address, mut datagram) = (socket.local_addr()?, [0; 64]);
    let used = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let (before, began, mut count) = (used()?, Instant::now(), 0);
    while began.elapsed() < MEASURED {
        std::thread::sleep(WAKE_UP_INTERVAL);
        socket.send_to(&datagram, address)?;
        socket.recv(&mut datagram)?;
        count += 1;
    }
    Ok((used()? - before) / count)
}

#[test]
fn idle_fabric_writes_nothing_to_kernel() -> Result<()> {
    play(&[ClusterSpec::new("rome", 1, 2), ClusterSpec::new("milan", 2, 1)], |scene| {
        scene.peer("rome", "milan", PORT)?;
        std::thread::sleep(Duration::from_secs(2));
        // Longer than agents and gateways go without looking at everything.
        let watch = "timeout 32 ip monitor link address route rule & timeout 32 nft monitor; wait";
        std::thread::scope(|scope| {
            let nodes = scene.clusters.iter().flat_map(|cluster| &cluster.nodes);
            let captured = nodes.map(|node| {
                let ask = || {
                    let mut shell = Command::new("sh");
                    node.host.net().command(shell.args(["-c", watch]), "")
                };
                (node, scope.spawn(ask))
            });
            let captured: Vec<_> = captured.collect();
            captured.into_iter().try_for_each(|(node, captured)| {
                let captured = captured.join().expect("a shell does not panic")?;
                ensure!(captured.trim().is_empty(), "on {}: {captured}", node.host.name());
                Ok(())
            })
        })
    })
}

/// Process ID, name and time used up of every process of weft.
fn times_of_all(scene: &Scene) -> Result<Vec<(i32, String, Duration)>> {
    let mut all = Vec::new();
    for cluster in &scene.clusters {
        for (number, node) in cluster.nodes.iter().enumerate() {
            for program in PROGRAMS {
                for pid in cluster.processes(number, program) {
                    let clock = clock_getcpuclockid(Pid::from_raw(pid))?;
                    let used = clock_gettime(clock)?.into();
                    all.push((pid, format!("{program} on {}", node.host.name()), used));
                }
            }
        }
    }
    Ok(all)
}
