//! ```text
//!   pods --- rome-1 -----/ /---- milan-1 --- pods        IPv4 and IPv6 inside
//! ```

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weft_tests::traffic::{
    HeldConnection, PingError, Pinger, Service, StreamReport, Streams, TcpServer, UdpEcho, Way,
    connect, udp_connect, udp_refusal,
};
use weft_tests::{Cluster, ClusterSpec, Netns, Pod, stays_so, wait_until};

use crate::scene::{ECHO, HTTP, PORT, Scene, TIMEOUT, first_pod, play, play_with, rome_and_milan};

const SIDES: [(&str, &str); 2] = [("rome", "milan"), ("milan", "rome")];
/// Deadlines hold in so many of [`TRIES`].
const ENOUGH: usize = 9;
const TRIES: usize = 10;
/// Deadlines of the status, at Liqo's settings (2 s, 5 losses) and at the fastest (100 ms, 5
/// losses).
const NOTICED: Duration = Duration::from_secs(12);
const NOTICED_FAST: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(5);
const REFUSED: Duration = Duration::from_millis(50);
const RESTORED: Duration = Duration::from_secs(2);
/// TCP's own doing: from the first datagram on.
const RESUMED: Duration = Duration::from_secs(3);
/// Port of the flow of each family.
const FLOWS: [u16; 2] = [7001, 7002];

#[test]
fn fastest_cut_shows_within_half_a_second() -> Result<()> {
    let fastest = ["--ping-interval", "100ms", "--ping-loss-threshold", "5"];
    play_with(&clusters(), &fastest, |scene| {
        scene.peer("rome", "milan", PORT)?;
        let ways = ways(scene)?;
        let mut in_time = 0;
        for _ in 0..TRIES {
            // Traffic is a sign of life as good as a probe.
            let streams = Streams::start(&ways, Duration::from_millis(2), 0)?;
            let talks = talk(scene)?;
            std::thread::sleep(Duration::from_millis(300));
            scene.lab.cut("milan-1")?;
            let (times, late) = with_lateness(|| both(scene, Instant::now(), TIMEOUT));
            let times = times?;
            eprintln!(
                "last called Connected or Degraded after {times:?}, wakeups late by {late:?}"
            );
            in_time += usize::from(times.iter().all(|time| *time <= NOTICED_FAST + late));
            talks.iter().try_for_each(|talk| udp_refusal(talk, REFUSED).map(drop))?;
            SIDES.iter().try_for_each(|side| refuses(scene, side))?;
            scene.lab.restore("milan-1")?;
            connected(scene)?;
            drop(streams.stop());
        }
        ensure!(in_time >= ENOUGH, "only {in_time} of {TRIES} within {NOTICED_FAST:?}");
        Ok(())
    })
}

#[test]
fn minute_long_cut_is_refused_and_survived() -> Result<()> {
    // The first is over before it shows.
    cuts(&[Duration::from_secs(5), Duration::from_secs(60)])
}

#[test]
#[ignore = "minutes long: make soak"]
fn cut_longer_than_keys_recovers_as_soon() -> Result<()> {
    cuts(&[Duration::from_secs(200)])
}

fn clusters() -> [ClusterSpec; 2] {
    rome_and_milan(1).map(|spec| ClusterSpec { pods_per_node: 2, ..spec.dual_stack() })
}

fn cuts(lengths: &[Duration]) -> Result<()> {
    play(&clusters(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let pods = SIDES.map(|(id, _)| first_pod(scene.cluster(id)).ns.clone());
        let _servers = pods
            .iter()
            .map(|ns| TcpServer::start(ns, ECHO, Service::Echo))
            .collect::<Result<Vec<_>>>()?;
        let mut idle = hold(scene)?;
        let mut busy = hold(scene)?;
        for length in lengths {
            cut(scene, *length, &mut busy)?;
            for held in idle.iter_mut().chain(&mut busy) {
                let took = held.echoes(TIMEOUT).context("a connection of before the cut")?;
                eprintln!("echo after {took:?}");
                ensure!(took <= RESUMED, "an established connection took {took:?}");
            }
        }
        Ok(())
    })
}

/// Cuts the clusters off from each other for so long, while `busy` is in use.
fn cut(scene: &Scene, length: Duration, busy: &mut [HeldConnection]) -> Result<()> {
    let streams = Streams::start(&ways(scene)?, Duration::from_millis(5), 0)?;
    let talks = talk(scene)?;
    std::thread::sleep(Duration::from_millis(500));
    scene.lab.cut("milan-1")?;
    let start = Instant::now();
    busy.iter_mut().try_for_each(HeldConnection::send)?;
    if length > NOTICED {
        let times = both(scene, start, NOTICED)?;
        eprintln!("last called connected after {times:?}");
        ensure!(times.iter().all(|time| *time <= NOTICED), "{times:?}");
        talks.iter().try_for_each(|talk| udp_refusal(talk, REFUSED).map(drop))?;
        SIDES.iter().try_for_each(|side| refuses(scene, side))?;
        // By now the nodes have received the change, too.
        std::thread::sleep(Duration::from_secs(1));
        SIDES.iter().try_for_each(|side| refuses(scene, side))?;
        let left = length.saturating_sub(start.elapsed());
        stays_so("the peering", left, || SIDES.iter().try_for_each(|side| is_error(scene, side)))?;
    } else {
        std::thread::sleep(length);
    }
    scene.lab.restore("milan-1")?;
    let length = start.elapsed();
    connected(scene)?;
    std::thread::sleep(RESTORED);
    for StreamReport { longest_outage, .. } in streams.stop() {
        let late = longest_outage.saturating_sub(length);
        eprintln!("cut for {length:?}, traffic is back {late:?} later");
        ensure!(late <= RESTORED, "traffic was back {late:?} after a cut of {length:?}");
    }
    stays_so("the peering", Duration::from_secs(1), || {
        SIDES.iter().try_for_each(|(id, peer)| scene.cluster(id).is_connected(peer))
    })
}

/// In both families, from both sides.
fn ways(scene: &Scene) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    for (from, to) in SIDES {
        let at = first_pod(scene.cluster(to)).ns.clone();
        for (target, port) in targets(scene, from, to)?.into_iter().zip(FLOWS) {
            let from = first_pod(scene.cluster(from)).ns.clone();
            ways.push(Way { from, to: SocketAddr::new(target, port), at: at.clone() });
        }
    }
    Ok(ways)
}

fn hold(scene: &Scene) -> Result<Vec<HeldConnection>> {
    let mut held = Vec::new();
    for (from, to) in SIDES {
        for target in targets(scene, from, to)? {
            let pod = &first_pod(scene.cluster(from)).ns;
            held.push(HeldConnection::open(pod, SocketAddr::new(target, ECHO))?);
        }
    }
    Ok(held)
}

/// Nodes let packets of a flow pass that had answers before; then the gateway has to refuse them.
fn talk(scene: &Scene) -> Result<Vec<UdpSocket>> {
    let echoes = SIDES.map(|(id, _)| UdpEcho::start(&first_pod(scene.cluster(id)).ns, ECHO));
    let _echoes = echoes.into_iter().collect::<Result<Vec<_>>>()?;
    let mut talks = Vec::new();
    for (from, to) in SIDES {
        for target in targets(scene, from, to)? {
            let pod = &second_pod(scene.cluster(from)).ns;
            let talk = udp_connect(pod, SocketAddr::new(target, ECHO))?;
            talk.set_read_timeout(Some(TIMEOUT))?;
            talk.send(b"?")?;
            talk.recv(&mut [0; 8]).with_context(|| format!("no answer from {target}"))?;
            talks.push(talk);
        }
    }
    Ok(talks)
}

/// Linux rations the ICMP errors to one address, and the first pod's flows take all of its own.
fn second_pod(cluster: &Cluster) -> &Pod {
    &cluster.nodes[0].pods[1]
}

/// The first pod of a peer, as a cluster sees it in each family.
fn targets(scene: &Scene, from: &str, to: &str) -> Result<Vec<IpAddr>> {
    let (from, to) = (scene.cluster(from), scene.cluster(to));
    let view = from.view(&to.spec)?;
    first_pod(to).addresses.iter().map(|address| view.of(*address)).collect()
}

/// Times after `start` at which each status was last requested and was not yet Error.
fn both(scene: &Scene, start: Instant, at_most: Duration) -> Result<[Duration; 2]> {
    let left = |id, peer| -> Result<Duration> {
        let mut last = Duration::ZERO;
        wait_until("the status says Error", at_most, || {
            let asked = start.elapsed();
            let state = scene.cluster(id).peering(peer)?["state"].clone();
            // Degraded, with the time since the last answer, comes first.
            if state != "Error" {
                last = asked;
            }
            ensure!(state == "Error", "{state}");
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(last)
    };
    std::thread::scope(|scope| {
        let [first, second] = SIDES.map(|(id, peer)| scope.spawn(move || left(id, peer)));
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panic");
        Ok([join(first)?, join(second)?])
    })
}

/// Result of a measurement, and the lateness of all wake-ups of a sleeping thread meanwhile: the status
/// cannot be sooner on a machine that has other things to do.
fn with_lateness<T>(during: impl FnOnce() -> T) -> (T, Duration) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut late = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(PAUSE);
                late += start.elapsed() - PAUSE;
            }
            late
        });
        let value = during();
        is_over.store(true, Ordering::Relaxed);
        (value, sleeper.join().expect("no panic"))
    })
}

fn is_error(scene: &Scene, (id, peer): &(&str, &str)) -> Result<()> {
    let state = scene.cluster(id).peering(peer)?["state"].clone();
    ensure!(state == "Error", "{id} says {state}");
    Ok(())
}

fn connected(scene: &Scene) -> Result<()> {
    SIDES.iter().try_for_each(|(id, peer)| scene.cluster(id).wait_connected(peer, TIMEOUT))
}

/// TCP is reset at once; UDP and pings are answered with an ICMP error. From a pod in each family,
/// and from the node itself.
fn refuses(scene: &Scene, (id, peer): &(&str, &str)) -> Result<()> {
    let cluster: &Cluster = scene.cluster(id);
    let pod = &second_pod(cluster).ns;
    for target in targets(scene, id, peer)? {
        (0..10).try_for_each(|_| is_reset(pod, target))?;
        is_reset(cluster.head().net(), target)?;
        udp_refusal(&udp_connect(pod, SocketAddr::new(target, ECHO))?, REFUSED)?;
        let answer = Pinger::new(pod, target)?.echo(1, 56, REFUSED)?;
        ensure!(answer == Err(PingError::Unreachable), "a ping to {target}: {answer:?}");
    }
    Ok(())
}

fn is_reset(ns: &Netns, target: IpAddr) -> Result<()> {
    let start = Instant::now();
    let refused = connect(ns, SocketAddr::new(target, HTTP), TIMEOUT).map(drop);
    let took = start.elapsed();
    let kind = refused.err().map(|error| error.kind());
    ensure!(kind == Some(ErrorKind::ConnectionRefused), "TCP to {target}: {kind:?} after {took:?}");
    ensure!(took <= REFUSED, "TCP to {target} was refused after {took:?}");
    Ok(())
}
