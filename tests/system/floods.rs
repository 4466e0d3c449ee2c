//! ```text
//!   pod --- rome-1 --------- milan-1 --- pod
//!                     |
//!       [ switch: sends whatever it likes to milan's gateway, or to rome's ]
//! ```

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fabric_api::Mac;
use fabric_api::fabric::VXLAN_PORT;
use fabric_api::networking::ConnectionType as Role;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use weft_tests::manifests::Peering;
use weft_tests::traffic::{FlowReport, udp_flow};
use weft_tests::{
    Capture, Cluster, ClusterSpec, Forger, Forgery, Netns, Pod, SWITCH_V4, Vxlan, flood, in_vxlan,
    resident_bytes, stolen, wait_until,
};

use crate::interop::World;
use crate::scene::{ECHO, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve};

/// Different datagrams of each kind.
const KINDS: usize = 2048;
/// Share of an established flow: of a thousand packets, and as many answers, a second.
const MAX_LOST: f64 = 0.01;
/// Time between two packets of that flow.
const PACE: Duration = Duration::from_millis(1);
/// Measurements of one kind, where the hypervisor takes time.
const TRIES: usize = 3;
/// From the start of the process to the first packet that passes.
const HANDSHAKE: Duration = Duration::from_millis(1500);
/// The same for a stock peer.
const STOCK_HANDSHAKE: Duration = Duration::from_secs(6);
const MAX_GROWTH: u64 = 10 << 20;
/// Payload of a stranger's inner packets.
const MARK: &[u8] = b"a stranger sent this";
const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];

/// Alone on the machine: sender, lane and flow need two cores for themselves.
#[test]
#[ignore = "minutes long: make soak"]
fn flood_disturbs_no_flow_and_no_restart() -> Result<()> {
    let seconds = std::env::var("WEFT_FLOOD_SECONDS").ok().and_then(|text| text.parse().ok());
    let for_long = Duration::from_secs(seconds.unwrap_or(20));
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let attack = Attack::prepare(scene, &peering)?;
        let before = resident(scene)?;
        let marked = Arc::new(AtomicUsize::new(0));
        let pods = ["rome", "milan"].map(|id| first_pod(scene.cluster(id)));
        let _captured =
            pods.map(|pod| listen(pod, &marked)).into_iter().collect::<Result<Vec<_>>>()?;
        attack.measure("nothing", &[vec![0; 60]], for_long)?;
        let outcomes = attack.kinds()?.into_iter();
        let outcomes = outcomes.map(|(name, frames)| attack.measure(&name, &frames, for_long));
        // All of them, whatever becomes of the first.
        let failures: Vec<_> = outcomes.filter_map(Result::err).collect();
        ensure!(failures.is_empty(), "{failures:#?}");
        let marked = marked.load(Ordering::Relaxed);
        ensure!(marked == 0, "{marked} packets of a stranger came to a pod");
        for (process, before) in before {
            // A program that was restarted meanwhile has no history.
            let Ok(now) = resident_bytes(process) else { continue };
            let growth = now.saturating_sub(before);
            ensure!(growth < MAX_GROWTH, "process {process} grew by {growth} bytes");
        }
        Ok(())
    })
}

/// A sender that can take a node's or a gateway's address on the link itself is indistinguishable
/// from it; packets of any other are dropped.
#[test]
fn foreign_vxlan_is_dropped_everywhere() -> Result<()> {
    let v4 = rome_and_milan(2);
    let v6 = v4.clone().map(ClusterSpec::on_ipv6);
    for specs in [v4, v6] {
        play(&specs, |scene| {
            scene.peer("rome", "milan", PORT)?;
            let milan = scene.cluster("milan");
            let marked = Arc::new(AtomicUsize::new(0));
            let pods = ["rome", "milan"].map(|id| first_pod(scene.cluster(id)));
            let captured = pods.map(|pod| listen(pod, &marked));
            let _captured = captured.into_iter().collect::<Result<Vec<_>>>()?;
            let to = milan.spec.node_address(1);
            let gateway = gateway_namespaces(milan)?;
            for (mac, inner, from_nodes) in ways_in(scene)? {
                let seen_from = |net: &Netns| -> Result<usize> {
                    let before = marked.load(Ordering::Relaxed);
                    wrap(net, to, &in_vxlan(mac, inner, MARK))?;
                    Ok(marked.load(Ordering::Relaxed) - before)
                };
                let strange = seen_from(scene.lab.switch().net())?;
                ensure!(strange == 0, "{strange} packets of a stranger passed {to}");
                let before = marked.load(Ordering::Relaxed);
                let link = link_of_gateway(milan, to.is_ipv4())?;
                // Without nodad it may be tentative for a moment.
                let kind = if to.is_ipv4() { "32 dev lo" } else { "128 dev lo nodad" };
                let stranger = scene.lab.switch().net();
                stranger.ip(&format!("address replace {link}/{kind}"))?;
                wrap_from(stranger, link, to, &in_vxlan(mac, inner, MARK))?;
                let forged = marked.load(Ordering::Relaxed) - before;
                ensure!(forged == 0, "{forged} packets passed {to} as if from {link}");
                // A node accepts from gateways only, a gateway from its nodes.
                let passes = |net: &Netns| seen_from(net).is_ok_and(|own| own > 0);
                let passes = match from_nodes {
                    true => passes(milan.nodes[1].host.net()),
                    false => gateway.iter().any(passes),
                };
                ensure!(passes, "what milan's own end sends to {to} does not pass: {from_nodes}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Namespaces that a cluster's gateway has open: the one with its VXLAN socket, and the inner one.
fn gateway_namespaces(cluster: &Cluster) -> Result<Vec<Netns>> {
    let pid = *cluster.processes(0, "gateway").first().context("no gateway runs")?;
    let files = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().map(|file| file.path());
    let is_namespace = |path: &Path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("net:["))
    };
    files.filter(|path| is_namespace(path)).map(|path| Netns::open(&path)).collect()
}

/// Address of the gateway's link to its host.
fn link_of_gateway(cluster: &Cluster, ipv4: bool) -> Result<IpAddr> {
    let config = ["get", "gatewayconfig", "server", "-n", "liqo-tenant-rome", "-o", "json"];
    let config: Value = serde_json::from_str(&cluster.weft(&config)?)?;
    let field = if ipv4 { "linkAddress" } else { "linkAddressV6" };
    let address = config["spec"]["overlay"][field].as_str();
    Ok(address.with_context(|| format!("no {field} in {config}"))?.parse()?)
}

/// Sends VXLAN a few times, and waits until it must have arrived.
fn wrap(net: &Netns, to: IpAddr, frame: &[u8]) -> Result<()> {
    let any =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    wrap_from(net, any, to, frame)
}

fn wrap_from(net: &Netns, from: IpAddr, to: IpAddr, frame: &[u8]) -> Result<()> {
    let socket = net.run(|| UdpSocket::bind((from, 0)))?;
    for _ in 0..20 {
        socket.send_to(frame, (to, VXLAN_PORT)).with_context(|| format!("sending to {to}"))?;
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(300));
    Ok(())
}

/// It is asked for a cookie, and shows it with its next attempt, five seconds later.
#[test]
fn stock_peer_connects_in_a_flood() -> Result<()> {
    // It has no probe and answers none.
    let world = World::with_any(Role::Server, &["--ping-enabled=false"])?;
    let Some(World { mut turin, scene }) = world else { return Ok(()) };
    let rome = scene.cluster("rome");
    turin.wait_until_up(rome)?;
    let to = v4(SocketAddr::new(rome.spec.node_address(1), PORT))?;
    let peer = rome.peering("turin")?["endpoint"].as_str().context("no endpoint")?.parse()?;
    let mut forger = Forger::new(rome.head(), (peer, to), turin.weft_key())?;
    let frames = forger.frames(Forgery::Initiations, KINDS);
    let _servers = serve(first_pod(rome))?;
    let pod = SocketAddr::new(first_pod(rome).addresses[0], ECHO);
    let (net, pace) = (turin.net().clone(), (Duration::from_millis(5), Duration::from_secs(10)));
    let (flooded, (flow, start)) = flood(&scene.lab, &frames, || {
        udp_flow(&net, pod, pace, || -> Result<Duration> {
            std::thread::sleep(Duration::from_millis(500));
            let killed = Instant::now();
            turin.restart()?;
            Ok(killed.elapsed())
        })
    })
    .and_then(|(report, flow)| Ok((report, flow?)))?;
    let outage = flow.longest_gap.saturating_sub(start?);
    eprintln!("{}: {outage:?} at {:.0} packets/s", turin.case.peer, flooded.per_second());
    ensure!(outage < STOCK_HANDSHAKE, "{outage:?} from the start of {}", turin.case.peer);
    Ok(())
}

/// Rome and milan, and who floods milan's gateway.
struct Attack<'a> {
    scene: &'a Scene,
    peering: &'a Peering,
    peer: SocketAddrV4,
    to: SocketAddrV4,
    seen: Vec<Vec<u8>>,
}

impl<'a> Attack<'a> {
    /// Captures the traffic between the two for a while.
    fn prepare(scene: &'a Scene, peering: &'a Peering) -> Result<Self> {
        let milan = scene.cluster("milan");
        let to = v4(SocketAddr::new(milan.spec.node_address(1), PORT))?;
        let peer = milan.peering("rome")?["endpoint"].as_str().context("no endpoint")?.parse()?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&seen);
        let capture = scene.lab.capture(move |frame| {
            let mut kept = kept.lock().expect("nobody panics while holding it");
            if let Some(payload) = udp_to(frame, PORT).filter(|_| kept.len() < KINDS) {
                kept.push(payload.to_vec());
            }
        })?;
        let mut attack = Self { scene, peering, peer, to, seen: Vec::new() };
        attack.flow(Duration::from_secs(1), || Ok(()))?;
        capture.finish()?;
        attack.seen = std::mem::take(&mut *seen.lock().expect("the capture is over"));
        ensure!(attack.seen.len() > 100, "captured only {} packets", attack.seen.len());
        Ok(attack)
    }

    /// Frames of every kind by name, and all of them mixed.
    fn kinds(&self) -> Result<Vec<(String, Vec<Vec<u8>>)>> {
        let milan = self.scene.cluster("milan");
        let ends = (self.peer, self.to);
        let mut forger = Forger::new(milan.head(), ends, &self.peering.server_key().public())?;
        let mut kinds: Vec<_> = Forgery::ALL
            .into_iter()
            .map(|kind| (format!("{kind:?}"), forger.frames(kind, KINDS)))
            .collect();
        kinds.push(("Replays".to_owned(), forger.replays(&self.seen)));
        kinds.push(("Vxlan".to_owned(), self.strangers(&mut forger)?));
        let longest = kinds.iter().map(|(_, frames)| frames.len()).max().unwrap_or(0);
        let mixed = (0..longest)
            .flat_map(|i| kinds.iter().map(move |(_, frames)| frames[i % frames.len()].clone()))
            .collect();
        kinds.push(("Mixed".to_owned(), mixed));
        Ok(kinds)
    }

    /// VXLAN from somebody who is no node.
    fn strangers(&self, forger: &mut Forger) -> Result<Vec<Vec<u8>>> {
        let ways = ways_in(self.scene)?;
        let node = self.scene.cluster("milan").spec.node_address(1);
        let IpAddr::V4(to) = node else { bail!("{node} is not IPv4") };
        let packets = (0..KINDS).map(|i| {
            let (inner_mac, inner, _) = ways[i % ways.len()];
            let nobody = Ipv4Addr::from_bits(0xc612_0000 + i as u32);
            let from = if i % 4 < 2 { SWITCH_V4 } else { nobody };
            Ok(forger.vxlan(&Vxlan { from, to, inner_mac, inner, payload: MARK.to_vec() }))
        });
        packets.collect()
    }

    /// Measures again where a measurement failed while the hypervisor took time: weft's own faults
    /// repeat themselves.
    fn measure(&self, name: &str, frames: &[Vec<u8>], for_long: Duration) -> Result<()> {
        for _ in 1..TRIES {
            let before = stolen();
            match self.measure_once(name, frames, for_long) {
                Err(e) if stolen() > before => eprintln!("once more: {e:#}"),
                outcome => return outcome,
            }
        }
        self.measure_once(name, frames, for_long)
    }

    /// Measures the effect of a flood on an established flow, and on a gateway that is killed in
    /// it.
    fn measure_once(&self, name: &str, frames: &[Vec<u8>], for_long: Duration) -> Result<()> {
        let milan = self.scene.cluster("milan");
        let lane = Lane::of(milan)?;
        let (lane_before, flow) = (lane.busy()?, || self.flow(for_long, || Ok(())));
        let start = stolen();
        let (report, flow) = flood(&self.scene.lab, frames, flow)?;
        let (flow, lane_busy) = (flow?, lane.busy()? - lane_before);
        let from_flow = stolen() - start;
        let (handshake, outage) = flood(&self.scene.lab, frames, || self.outage())?;
        let (outage, from_outage) = (outage?, stolen() - start - from_flow);
        eprintln!(
            "{name}: {:.0} packets/s with {:.0} % of a core, {} of {} lost, longest gap {:?}; \
             lane {:.0} %, {} ns a packet; restarted: {outage:?} at {:.0} packets/s; the hypervisor \
             took {from_flow:?} and {from_outage:?}",
            report.per_second(),
            100.0 * report.cpu.as_secs_f64() / report.took.as_secs_f64(),
            flow.lost.len(),
            flow.sent,
            flow.longest_gap,
            100.0 * lane_busy.as_secs_f64() / report.took.as_secs_f64(),
            lane_busy.as_nanos() / u128::from(report.sent.max(1)),
            handshake.per_second(),
        );
        let most = flow.sent as f64 * MAX_LOST + from_flow.as_secs_f64() / PACE.as_secs_f64();
        let lost = flow.lost.len();
        ensure!((lost as f64) < most, "{name}: {lost} of {} packets were lost", flow.sent);
        ensure!(flow.duplicated == 0, "{name}: {} came twice", flow.duplicated);
        ensure!(
            outage < HANDSHAKE + from_outage,
            "{name}: {outage:?} from the start of rome's gateway"
        );
        milan.wait_connected("rome", TIMEOUT).with_context(|| format!("after {name}"))?;
        let rome = self.scene.cluster("rome");
        rome.wait_connected("milan", TIMEOUT).with_context(|| format!("after {name}"))
    }

    fn flow(&self, for_long: Duration, during: impl FnOnce() -> Result<()>) -> Result<FlowReport> {
        let _servers = serve(first_pod(self.scene.cluster("milan")))?;
        let (pod, target) = self.scene.way("rome", "milan")?;
        let pace = (PACE, for_long);
        let (report, result) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, during)?;
        result?;
        Ok(report)
    }

    /// Kills rome's gateway; how long after its successor's start packets pass again.
    fn outage(&self) -> Result<Duration> {
        let rome = self.scene.cluster("rome");
        let mut without = Duration::ZERO;
        let report = self.flow(Duration::from_secs(3), || {
            std::thread::sleep(Duration::from_millis(200));
            let killed = Instant::now();
            let old = rome.processes(0, "gateway");
            kill(Pid::from_raw(*old.first().context("no gateway runs")?), Signal::SIGKILL)?;
            wait_until("another gateway runs", TIMEOUT, || {
                let new = rome.processes(0, "gateway");
                new.into_iter().find(|pid| !old.contains(pid)).ok_or("none does")
            })?;
            without = killed.elapsed();
            Ok(())
        })?;
        Ok(report.longest_gap.saturating_sub(without))
    }
}

/// The device behind a node's address, what would then go on, and whether nodes may send it.
type WayIn = ([u8; 6], (SocketAddrV4, SocketAddrV4), bool);

/// Milan's node, for its pod, as if from rome's; and milan's gateway, for rome's pod, as if from
/// milan's.
fn ways_in(scene: &Scene) -> Result<[WayIn; 2]> {
    let milan = scene.cluster("milan");
    let mac = |kind: &str, name: &str, address: &str| -> Result<[u8; 6]> {
        let object: Value = serde_json::from_str(&milan.weft(&["get", kind, name, "-o", "json"])?)?;
        let address = object.pointer(address).and_then(Value::as_str);
        let address = address.with_context(|| format!("no address in {object}"))?;
        Ok(Mac::of_overlay(address.parse()?).0)
    };
    let node = mac("gatewayrecord", "node-milan-1", "/spec/node/overlay")?;
    let gateway = mac("gatewayconfig", "server", "/spec/overlay/address")?;
    let (own, rome) = scene.way("milan", "rome")?;
    let own = v4(SocketAddr::new(own.addresses[0], ECHO))?;
    let rome = v4(SocketAddr::new(rome, ECHO))?;
    Ok([(node, (rome, own), false), (gateway, (own, rome), true)])
}

/// Counts the packets of strangers that a pod sees.
fn listen(pod: &Pod, marked: &Arc<AtomicUsize>) -> Result<Capture> {
    let marked = Arc::clone(marked);
    Capture::start(&pod.ns, move |frame| {
        let is_marked = frame.windows(MARK.len()).any(|window| window == MARK);
        marked.fetch_add(usize::from(is_marked), Ordering::Relaxed);
    })
}

/// The thread of a gateway that moves its packets.
struct Lane {
    path: String,
}

impl Lane {
    fn of(cluster: &Cluster) -> Result<Self> {
        let pid = *cluster.processes(0, "gateway").first().context("no gateway runs")?;
        let threads = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
        let paths = threads.map(|thread| thread.path().display().to_string());
        let path = paths
            .into_iter()
            .find(|path| fs::read_to_string(format!("{path}/comm")).is_ok_and(|n| n == "lane\n"));
        Ok(Self { path: path.context("the gateway has no lane")? })
    }

    /// CPU time that it has used (`schedstat` of proc(5)).
    fn busy(&self) -> Result<Duration> {
        let text = fs::read_to_string(format!("{}/schedstat", self.path))?;
        let nanos = text.split(' ').next().context("an empty schedstat")?.parse()?;
        Ok(Duration::from_nanos(nanos))
    }
}

/// Memory of each process of both clusters, in bytes.
fn resident(scene: &Scene) -> Result<Vec<(i32, u64)>> {
    let processes = scene
        .clusters
        .iter()
        .flat_map(|cluster| PROGRAMS.iter().flat_map(|program| cluster.processes(0, program)));
    processes.map(|pid| Ok((pid, resident_bytes(pid)?))).collect()
}

fn v4(address: SocketAddr) -> Result<SocketAddrV4> {
    match address {
        SocketAddr::V4(v4) => Ok(v4),
        SocketAddr::V6(_) => anyhow::bail!("{address} is not IPv4"),
    }
}

/// Payload of an Ethernet frame with an IPv4 UDP packet to a port.
fn udp_to(frame: &[u8], port: u16) -> Option<&[u8]> {
    let is_udp = frame.get(12..14)? == [8, 0] && *frame.get(23)? == 17;
    (is_udp && frame.get(36..38)? == port.to_be_bytes()).then(|| frame.get(42..)).flatten()
}
