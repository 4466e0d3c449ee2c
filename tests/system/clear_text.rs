//! ```text
//!   pods, rome-1, rome-2 ---[ switch: every frame is looked at ]--- milan-1, pod
//! ```
//! Pods and nodes send a text all the time, in TCP, UDP and ICMP, to the peer as they see it, from
//! the moment on that its prefixes are published, while all sorts of things happen to both fabrics.
//! On the wire it may show up in VXLAN between machines of one cluster, and nowhere else.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::manifests::{Peering, ip, join};
use weft_tests::traffic::{Pinger, Service, TcpServer, UdpEcho, connect, udp_echo};
use weft_tests::{
    Cluster, ClusterSpec, Families, Machines, Netns, SWITCH_V4, SWITCH_V6, wait_until,
};

use crate::chance::{Chance, rounds};
use crate::departed::reboot;
use crate::scene::{ECHO, PORT, Scene, TIMEOUT, play};

const CANARY: &[u8] = b"this must stay encrypted";
/// A part of what every pinger sends.
const OF_PINGS: &[u8] = &[
    0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f,
];
const PING_BYTES: usize = 56;
/// Text sent in the clear on purpose, to see that it would be found.
const CONTROL: &[u8] = b"this is seen by everyone";
/// Number of events: [`ALWAYS`] once each, the rest by chance.
const EVENTS: usize = 12;
const PROGRAMS: [&str; 5] = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"];
/// Interval of every sender, of which there are some twenty.
const PACE: Duration = Duration::from_millis(50);

#[test]
fn no_event_lets_pod_traffic_out_in_clear() -> Result<()> {
    let specs = [("rome", 1, 2), ("milan", 2, 1)];
    // Machines of both families, or what is IPv6 inside would have no other way to leave by.
    let specs = specs.map(|(id, number, nodes)| ClusterSpec {
        underlay: Families::Both,
        ..ClusterSpec::new(id, number, nodes).dual_stack()
    });
    play(&specs, |scene| {
        let mut chance = Chance::new();
        let seen = Arc::new(Seen::default());
        let (look, machines) = (Arc::clone(&seen), scene.lab.machines());
        let capture = scene.lab.capture(move |frame| look.judge(frame, &machines))?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let stop = AtomicBool::new(false);
        let sent = AtomicU64::new(0);
        let lived = std::thread::scope(|scope| {
            let (stop, sent) = (&stop, &sent);
            let start = |sender: Sender| drop(scope.spawn(move || sender.run(stop, sent)));
            let begun = begin(scene, &peering, start);
            let lived = begun.and_then(|()| live(scene, &mut chance, &mut peering, &seen));
            stop.store(true, Ordering::Relaxed);
            lived
        });
        lived?;
        capture.finish()?;
        let [leaks, wrapped, control] =
            [&seen.leaks, &seen.wrapped, &seen.control].map(|count| count.load(Ordering::Relaxed));
        eprintln!(
            "{} texts sent, seen in VXLAN {wrapped} times, the control {control}",
            sent.load(Ordering::Relaxed)
        );
        ensure!(leaks == 0, "{leaks} frames in clear, the first: {:?}", seen.first());
        ensure!(wrapped > 100, "no overlay was on the wire, so nothing was tested");
        Ok(())
    })
}

#[test]
fn each_run_has_the_events_that_take_weft_away() {
    let mut chance = Chance::new();
    for _ in 0..100 {
        let events = drawn(&mut chance, EVENTS);
        assert_eq!(events.len(), EVENTS);
        assert!(ALWAYS.iter().all(|event| events.contains(event)), "{events:?}");
    }
}

/// Frames seen by the switch.
#[derive(Default)]
struct Seen {
    leaks: AtomicU64,
    wrapped: AtomicU64,
    control: AtomicU64,
    first_leak: Mutex<Option<String>>,
}

impl Seen {
    fn judge(&self, frame: &[u8], machines: &Machines) {
        if contains(frame, CONTROL) {
            self.control.fetch_add(1, Ordering::Relaxed);
        }
        if !contains(frame, CANARY) && !contains(frame, OF_PINGS) {
            return;
        }
        if machines.carrier(frame).is_some() {
            self.wrapped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.leaks.fetch_add(1, Ordering::Relaxed);
        let head: Vec<_> = frame.iter().take(120).map(|byte| format!("{byte:02x}")).collect();
        self.first_leak.lock().expect("nobody panics").get_or_insert(head.concat());
    }

    fn first(&self) -> Option<String> {
        self.first_leak.lock().expect("nobody panics").clone()
    }
}

pub(crate) fn contains(frame: &[u8], text: &[u8]) -> bool {
    let mut rest = frame;
    while let Some(at) = rest.iter().position(|byte| *byte == text[0]) {
        rest = &rest[at..];
        if rest.starts_with(text) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}

fn apply(scene: &Scene, peering: &Peering) -> Result<()> {
    scene.cluster("rome").apply("milan", &join(&peering.client_documents()))?;
    scene.cluster("milan").apply("rome", &join(&peering.server_documents()))
}

/// Sends the text from one namespace to one address, until stopped.
struct Sender {
    from: Netns,
    to: IpAddr,
}

/// Peers the two, and starts senders as soon as a cluster's status has its view of the other: from
/// every pod and node to every pod there, by every family, and to an address that nobody has.
fn begin(scene: &Scene, peering: &Peering, start: impl Fn(Sender)) -> Result<()> {
    apply(scene, peering)?;
    for (from, to) in [("rome", "milan"), ("milan", "rome")] {
        let (from, to) = (scene.cluster(from), scene.cluster(to));
        let view = wait_until("one sees the other somewhere", TIMEOUT, || from.view(&to.spec))?;
        let nodes = from.nodes.iter().map(|node| node.host.net());
        for ns in from.pods().map(|pod| &pod.ns).chain(nodes) {
            for pod in to.pods() {
                for address in &pod.addresses {
                    start(Sender { from: ns.clone(), to: view.of(*address)? });
                }
            }
            let nobody = view.of([10, 200, 99, 99].into())?;
            start(Sender { from: ns.clone(), to: nobody });
        }
    }
    Ok(())
}

impl Sender {
    /// Arrival does not matter.
    fn run(&self, stop: &AtomicBool, sent: &AtomicU64) {
        let any: IpAddr = if self.to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
        let udp = self.from.run(|| UdpSocket::bind((any, 0))).expect("a port is free");
        let pinger = Pinger::new(&self.from, self.to).expect("root may ping");
        let mut tcp = None;
        for number in (0..=u16::MAX).cycle() {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let _ = udp.send_to(CANARY, (self.to, ECHO));
            let _ = pinger.echo(number, PING_BYTES, Duration::from_millis(1));
            if tcp.is_none() && number % 8 == 0 {
                let to = SocketAddr::new(self.to, ECHO);
                tcp =
                    connect(&self.from, to, PACE).ok().filter(|s| s.set_nonblocking(true).is_ok());
            }
            // A stalled connection is given up, so that there is a new one to be refused or not.
            if tcp.as_mut().is_some_and(|stream| stream.write_all(CANARY).is_err()) {
                tcp = None;
            }
            sent.fetch_add(3, Ordering::Relaxed);
            std::thread::sleep(PACE);
        }
    }
}

/// Events that can happen while a peering lasts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Kill,
    KillNode,
    Restart,
    NewMtu,
    NewResource,
    NewKeys,
    NoGateway,
    Broken,
    Cut,
    CutNode,
    DownNode,
    NoPeering,
    Reboot,
    NoDevice,
    Calm,
}

const LIST: [Event; 16] = [
    Event::Kill,
    Event::Kill,
    Event::KillNode,
    Event::Restart,
    Event::NewMtu,
    Event::NewResource,
    Event::NewKeys,
    Event::NoGateway,
    Event::Broken,
    Event::Cut,
    Event::CutNode,
    Event::DownNode,
    Event::NoPeering,
    Event::Reboot,
    Event::NoDevice,
    Event::Calm,
];

/// A part of every run, however short.
const ALWAYS: [Event; 4] = [Event::DownNode, Event::NoPeering, Event::Reboot, Event::NoDevice];

/// So many events in random order, [`ALWAYS`] among them.
fn drawn(chance: &mut Chance, count: usize) -> Vec<Event> {
    let mut events = ALWAYS.to_vec();
    while events.len() < count {
        events.push(*chance.pick(&LIST));
    }
    for i in (1..events.len()).rev() {
        events.swap(i, chance.below(i + 1));
    }
    events
}

fn live(scene: &mut Scene, chance: &mut Chance, peering: &mut Peering, seen: &Seen) -> Result<()> {
    let _echoes = scene
        .clusters
        .iter()
        .flat_map(Cluster::pods)
        .map(|pod| {
            Ok((UdpEcho::start(&pod.ns, ECHO)?, TcpServer::start(&pod.ns, ECHO, Service::Echo)?))
        })
        .collect::<Result<Vec<_>>>()?;
    for (number, event) in (1..).zip(drawn(chance, rounds(EVENTS))) {
        happen(scene, chance, peering, event).with_context(|| format!("{event:?}"))?;
        std::thread::sleep(Duration::from_millis(chance.below(400) as u64));
        ensure!(
            seen.leaks.load(Ordering::Relaxed) == 0,
            "in clear after event {number}, {event:?}: {:?}",
            seen.first()
        );
        control(scene, chance, seen)?;
        if number % 10 == 0 {
            passes(scene).with_context(|| format!("after event {number}, {event:?}"))?;
        }
    }
    passes(scene)
}

/// Both fabrics are in order, and the text arrives.
fn passes(scene: &Scene) -> Result<()> {
    for (from, to) in [("rome", "milan"), ("milan", "rome")] {
        scene.cluster(from).wait_connected(to, TIMEOUT)?;
        // The other's prefixes are published once all nodes have routes.
        let (pod, target) = wait_until("the way is known", TIMEOUT, || scene.way(from, to))?;
        wait_until("the text arrives", TIMEOUT, || {
            udp_echo(&pod.ns, SocketAddr::new(target, ECHO), CANARY)
        })?;
    }
    Ok(())
}

/// A pod sends something to the switch, as any packet that is not for a peer leaves.
fn control(scene: &Scene, chance: &mut Chance, seen: &Seen) -> Result<()> {
    let before = seen.control.load(Ordering::Relaxed);
    let cluster = &scene.clusters[chance.below(2)];
    let (v4, v6) = (IpAddr::from(SWITCH_V4), IpAddr::from(SWITCH_V6));
    let (any, to) =
        if chance.percent(50) { (IpAddr::from([0; 4]), v4) } else { ([0u16; 8].into(), v6) };
    let Some(pod) = cluster.pods().next() else { return Ok(()) };
    let socket = pod.ns.run(|| UdpSocket::bind((any, 0)))?;
    wait_until("what is sent in clear is seen", TIMEOUT, || {
        // A cut cable may still be restored.
        let _ = socket.send_to(CONTROL, (to, ECHO));
        let now = seen.control.load(Ordering::Relaxed);
        ensure!(now > before, "the control was not seen by {to}");
        Ok::<_, anyhow::Error>(())
    })
}

fn happen(
    scene: &mut Scene,
    chance: &mut Chance,
    peering: &mut Peering,
    event: Event,
) -> Result<()> {
    let (id, node) = *chance.pick(&[("rome", 0), ("rome", 1), ("milan", 0)]);
    let machine = scene.cluster(id).spec.node_name(node as u8 + 1);
    let a_while = Duration::from_millis(100 + chance.below(900) as u64);
    match event {
        Event::Kill => {
            let program = chance.pick(&PROGRAMS);
            signal(scene.cluster(id), node, program, Signal::SIGKILL)?;
        }
        Event::KillNode => {
            for program in PROGRAMS {
                signal(scene.cluster(id), node, program, Signal::SIGKILL)?;
            }
        }
        Event::Restart => signal(scene.cluster(id), node, "weft", Signal::SIGTERM)?,
        Event::NewMtu => {
            peering.mtu = 1280 + chance.below(100) as u32;
            apply(scene, peering)?;
        }
        Event::NewResource => {
            let pod = scene.cluster(id).pods().next().context("there is a pod")?.addresses[0];
            let masquerade = chance.percent(50);
            scene.cluster(id).apply("resource", &ip("resource", pod, masquerade))?;
        }
        Event::NewKeys => {
            let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
            let mtu = std::mem::replace(peering, Peering::new(&rome.spec, &milan.spec, PORT)).mtu;
            peering.mtu = mtu;
            let documents = [
                (rome, "milan", peering.client_documents()),
                (milan, "rome", peering.server_documents()),
            ];
            let first = chance.below(2);
            for (cluster, peer, documents) in [&documents[first], &documents[1 - first]] {
                cluster.apply(peer, &join(documents))?;
                std::thread::sleep(a_while / 4);
            }
        }
        // The peer's CIDRs stay published.
        Event::NoGateway => {
            let documents = peering.client_documents();
            scene.cluster("rome").apply("milan", &join(&documents[..documents.len() - 1]))?;
            std::thread::sleep(a_while);
            apply(scene, peering)?;
        }
        Event::Broken => {
            let whole = join(&peering.client_documents());
            let broken = format!("{}\n\t: [", &whole[..chance.below(whole.len())]);
            scene.cluster("rome").apply("milan", &broken)?;
            std::thread::sleep(a_while / 2);
            apply(scene, peering)?;
        }
        Event::Cut | Event::CutNode => {
            let machine = if matches!(event, Event::Cut) { "milan-1".to_owned() } else { machine };
            scene.lab.cut(&machine)?;
            std::thread::sleep(a_while);
            scene.lab.restore(&machine)?;
        }
        // The fabric's other host goes on.
        Event::DownNode => {
            let weft = weft_tests::bin_dir()?.join("weft");
            let mut down = Command::new(weft);
            down.args(["down", "--run-dir", "/run/agent-2"]);
            scene.cluster("rome").nodes[1].host.command(&mut down, "")?;
            std::thread::sleep(a_while);
        }
        Event::NoPeering => {
            scene.cluster("rome").remove("milan")?;
            std::thread::sleep(a_while);
            apply(scene, peering)?;
        }
        Event::Reboot => {
            reboot(scene, id, node, true)?;
            std::thread::sleep(a_while);
        }
        // `weft` would start the agent again at once.
        Event::NoDevice => {
            for program in ["weft", "route-agent"] {
                signal(scene.cluster(id), node, program, Signal::SIGKILL)?;
            }
            let host = &scene.cluster(id).nodes[node].host;
            let mut delete = Command::new("sh");
            delete
                .args(["-c", "ip link del weft4 2>/dev/null; ip link del weft6 2>/dev/null; true"]);
            host.command(&mut delete, "")?;
            std::thread::sleep(a_while);
        }
        Event::Calm => std::thread::sleep(a_while),
    }
    start_again(scene)
}

fn signal(cluster: &Cluster, node: usize, program: &str, signal: Signal) -> Result<()> {
    let pids = cluster.processes(node, program);
    for pid in &pids {
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(*pid), signal);
    }
    wait_until("what was to end ends", TIMEOUT, || {
        let left = cluster.processes(node, program);
        ensure!(left.iter().all(|pid| !pids.contains(pid)), "{left:?} run");
        Ok::<_, anyhow::Error>(())
    })
}

/// As a service manager does.
fn start_again(scene: &mut Scene) -> Result<()> {
    for cluster in &mut scene.clusters {
        if cluster.processes(0, "weft").is_empty() {
            cluster.start_up(&[])?;
        }
        for number in 2..=cluster.spec.nodes {
            if cluster.processes(usize::from(number) - 1, "weft").is_empty() {
                cluster.start_agent(number)?;
            }
        }
    }
    Ok(())
}
