//! ```text
//!   pod --- rome-1 (gateway)  ---+
//!                                +--- switch (everyone's default route) --- milan-1
//!   pod --- rome-2            ---+
//! ```
//! A pod of rome-2 sends to milan all the time, or one of milan to all of rome's, while rome-1 or
//! rome-2 loses what it has of weft.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::traffic::udp_echo;
use weft_tests::{ClusterSpec, Pod, wait_until};

use crate::departed::reboot;
use crate::scene::{ECHO, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve};

const CANARY: &[u8] = b"this must not leave the fabric";
const VXLAN: u16 = 4879;
const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];
/// Between two datagrams, and how long after an event they go on by default.
const PACE: Duration = Duration::from_millis(5);
const AFTER: Duration = Duration::from_secs(4);
const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn down_on_the_gateways_host_leaks_nothing() -> Result<()> {
    both_families(outward, AFTER, down)
}

#[test]
fn down_leaks_nothing_of_a_host_behind_a_router() -> Result<()> {
    down_with_host_behind_a_router(AFTER)
}

#[test]
#[ignore = "takes minutes"]
fn down_of_a_routed_host_for_a_minute() -> Result<()> {
    down_with_host_behind_a_router(MINUTE)
}

fn down_with_host_behind_a_router(time: Duration) -> Result<()> {
    let [rome, milan] = sized();
    play(&[ClusterSpec { behind_router: Some(2), ..rome }, milan], |scene| {
        senders_meet(scene, outward, (time, down))
    })
}

#[test]
#[ignore = "takes minutes"]
fn down_on_the_gateways_host_for_a_minute() -> Result<()> {
    both_families(outward, MINUTE, down)
}

#[test]
fn down_quotes_no_packet_of_the_peer() -> Result<()> {
    both_families(inward, AFTER, down)
}

#[test]
#[ignore = "takes minutes"]
fn down_quotes_no_packet_for_a_minute() -> Result<()> {
    both_families(inward, MINUTE, down)
}

#[test]
fn dead_gateways_host_forwards_no_vxlan() -> Result<()> {
    both_families(outward, AFTER, lose_everything)
}

#[test]
#[ignore = "takes minutes"]
fn dead_gateways_host_forwards_none_for_a_minute() -> Result<()> {
    both_families(outward, MINUTE, lose_everything)
}

#[test]
fn rebooted_further_host_refuses_before_weft_runs() -> Result<()> {
    rebooted_further_host(AFTER)
}

#[test]
#[ignore = "takes minutes"]
fn rebooted_further_host_refuses_for_a_minute() -> Result<()> {
    rebooted_further_host(MINUTE)
}

/// Its agent runs as README.md describes, without a state directory named.
fn rebooted_further_host(time: Duration) -> Result<()> {
    play(&sized().map(ClusterSpec::dual_stack), |scene| {
        senders_meet(scene, outward, (time, |scene| reboot(scene, "rome", 1, true)))?;
        let host = &scene.cluster("rome").nodes[1].host;
        let list = |what: &str| host.command(Command::new("sh").args(["-c", what]), "");
        let table = list("nft list table inet weft_refused")?;
        let (pod, flows) = (&scene.cluster("rome").nodes[1].pods[0], outward(scene)?);
        for address in &pod.addresses {
            ensure!(table.contains(&address.to_string()), "{address} was not refused: {table}");
        }
        let (ns, targets) = (pod.ns.clone(), flows.into_iter().map(|(_, target)| target));
        scene.cluster_mut("rome").start_agent(2)?;
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        for target in targets {
            wait_until("its packets pass again", TIMEOUT, || udp_echo(&ns, target, CANARY))?;
        }
        let weft = weft_tests::bin_dir()?.join("weft").display().to_string();
        let host = &scene.cluster("rome").nodes[1].host;
        let script = format!("{weft} down --now --run-dir /run/agent-2; find /var/lib/weft");
        let left = host.command(Command::new("sh").args(["-c", &script]), "")?;
        ensure!(left.trim() == "/var/lib/weft", "after down there is {left}");
        Ok(())
    })
}

fn down(scene: &Scene) -> Result<()> {
    scene.cluster("rome").weft(&["down"]).map(drop)
}

/// As after a reboot into a system without weft.
fn lose_everything(scene: &Scene) -> Result<()> {
    let rome = scene.cluster("rome");
    for pid in PROGRAMS.iter().flat_map(|program| rome.processes(0, program)) {
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    }
    let host = rome.head();
    host.net().nft("delete table inet weft\n")?;
    let device = if rome.spec.node_address(1).is_ipv4() { "weft4" } else { "weft6" };
    let script = format!(
        "ip link del {device}
        for f in -4 -6; do ip $f rule flush protocol 119; ip $f route flush table all proto 119; done"
    );
    host.command(Command::new("sh").args(["-c", &script]), "").map(drop)
}

/// Does the event on each family of machines, while senders go on for `time` after it.
fn both_families(flows: Flows, time: Duration, event: Event) -> Result<()> {
    for specs in [sized(), sized().map(ClusterSpec::on_ipv6)] {
        play(&specs, |scene| senders_meet(scene, flows, (time, event)))?;
    }
    Ok(())
}

fn sized() -> [ClusterSpec; 2] {
    let [rome, _] = rome_and_milan(2);
    let [_, milan] = rome_and_milan(1);
    [rome, milan]
}

/// Loss of what rome has of weft.
type Event = fn(&Scene) -> Result<()>;

/// Sockets in pods, and the addresses that they send to.
type Flows = fn(&Scene) -> Result<Vec<(UdpSocket, SocketAddr)>>;

fn outward(scene: &Scene) -> Result<Vec<(UdpSocket, SocketAddr)>> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let view = rome.view(&milan.spec)?;
    let flow = |address: &IpAddr| {
        let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = rome.nodes[1].pods[0].ns.run(|| UdpSocket::bind(any))?;
        Ok((socket, SocketAddr::new(view.of(*address)?, ECHO)))
    };
    first_pod(milan).addresses.iter().map(flow).collect()
}

fn inward(scene: &Scene) -> Result<Vec<(UdpSocket, SocketAddr)>> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let view = milan.view(&rome.spec)?;
    let flow = |pod: &Pod| {
        let socket = milan.nodes[0].pods[0].ns.run(|| UdpSocket::bind("0.0.0.0:0"))?;
        Ok((socket, SocketAddr::new(view.of(pod.addresses[0])?, ECHO)))
    };
    rome.pods().map(flow).collect()
}

fn senders_meet(scene: &Scene, flows: Flows, (time, event): (Duration, Event)) -> Result<()> {
    scene.peer("rome", "milan", PORT)?;
    let seen = Arc::new(Seen::default());
    let (look, hosts) = (Arc::clone(&seen), hosts(scene));
    let capture = scene.lab.capture(move |frame| look.judge(frame, &hosts))?;
    let flows = flows(scene)?;
    let stop = AtomicBool::new(false);
    let happened = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for (socket, target) in &flows {
                    // Being refused is fine.
                    let _ = socket.send_to(CANARY, target);
                }
                std::thread::sleep(PACE);
            }
        });
        let happened = wait_until("the overlay is used", TIMEOUT, || {
            ensure!(seen.wrapped.load(Ordering::Relaxed) > 20, "nothing in VXLAN yet");
            Ok::<_, anyhow::Error>(())
        });
        let happened = happened.and_then(|()| event(scene));
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        drop(sender.join());
        happened
    });
    happened?;
    capture.finish()?;
    let first = seen.first.lock().expect("nobody panics").clone();
    let leaks = seen.leaks.load(Ordering::Relaxed);
    ensure!(leaks == 0, "{leaks} frames outside of VXLAN between hosts, the first: {first:?}");
    Ok(())
}

/// Addresses of all hosts.
fn hosts(scene: &Scene) -> BTreeSet<IpAddr> {
    let nodes = scene.clusters.iter().flat_map(|cluster| &cluster.nodes);
    nodes.flat_map(|node| node.addresses.iter().copied()).collect()
}

/// Frames with the pod's text that the switch saw.
#[derive(Default)]
struct Seen {
    leaks: AtomicU64,
    wrapped: AtomicU64,
    first: Mutex<Option<String>>,
}

impl Seen {
    fn judge(&self, frame: &[u8], hosts: &BTreeSet<IpAddr>) {
        if !frame.windows(CANARY.len()).any(|window| window == CANARY) {
            return;
        }
        match outer(frame) {
            Some(outer) if hosts.contains(&outer.to) && hosts.contains(&outer.from) => {
                let is_vxlan = outer.port == Some(VXLAN);
                // The rest are errors by which a host refuses VXLAN; they quote it.
                self.wrapped.fetch_add(u64::from(is_vxlan), Ordering::Relaxed);
            }
            Some(_) | None => {
                self.leaks.fetch_add(1, Ordering::Relaxed);
                let head: Vec<_> = frame.iter().take(80).map(|b| format!("{b:02x}")).collect();
                self.first.lock().expect("nobody panics").get_or_insert(head.concat());
            }
        }
    }
}

struct Outer {
    from: IpAddr,
    to: IpAddr,
    /// UDP destination port.
    port: Option<u16>,
}

fn outer(frame: &[u8]) -> Option<Outer> {
    let (protocol, from, to, transport): (u8, IpAddr, IpAddr, usize) = match frame.get(12..14)? {
        [8, 0] => {
            let at = |i: usize| <[u8; 4]>::try_from(frame.get(i..i + 4)?).ok();
            (*frame.get(23)?, at(26)?.into(), at(30)?.into(), 34)
        }
        [0x86, 0xdd] => {
            let at = |i: usize| <[u8; 16]>::try_from(frame.get(i..i + 16)?).ok();
            (*frame.get(20)?, at(22)?.into(), at(38)?.into(), 54)
        }
        _ => return None,
    };
    let port = frame.get(transport + 2..transport + 4).filter(|_| protocol == 17);
    Some(Outer { from, to, port: port.map(|p| u16::from_be_bytes([p[0], p[1]])) })
}
