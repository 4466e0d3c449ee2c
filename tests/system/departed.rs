//! ```text
//!   pods, rome-1, rome-2 ---[ switch: every frame is looked at ]--- milan-1, pod
//! ```
//! Pods that never stop to send, while what carries their packets goes away: peering, fabric,
//! published directory, everything at a reboot.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::manifests::own;
use weft_tests::traffic::{connect, udp_echo};
use weft_tests::{
    Capture, Cluster, ClusterSpec, Families, Host, Netns, STATE, bin_dir, wait_until,
};

use crate::clear_text::contains;
use crate::kernel::Kernel;
use crate::scene::{
    ECHO, HTTP, PORT, Scene, TIMEOUT, first_pod, play, play_with, rome_and_milan, serve,
};

const MARK: &[u8] = b"nobody outside may ever read this";
/// Short, for what lasts five minutes by default.
const QUIET: &[&str] = &["--refuse-for", "3"];

/// Time for which senders go on.
const SHORT: Duration = Duration::from_secs(2);
const MINUTE: Duration = Duration::from_secs(60);

/// Machines of both families, or IPv6 packets of pods would have no other way to leave by.
fn of_both_families() -> [ClusterSpec; 2] {
    rome_and_milan(2).map(|spec| ClusterSpec { underlay: Families::Both, ..spec.dual_stack() })
}

#[test]
fn deleted_peering_is_refused_until_quiet() -> Result<()> {
    play_with(&of_both_families(), QUIET, |scene| deleted_peering(scene, Duration::from_secs(4)))
}

#[test]
#[ignore = "takes minutes"]
fn deleted_peering_is_refused_for_a_minute() -> Result<()> {
    play_with(&of_both_families(), QUIET, |scene| deleted_peering(scene, MINUTE))
}

fn deleted_peering(scene: &Scene, time: Duration) -> Result<()> {
    scene.peer("rome", "milan", PORT)?;
    let rome = scene.cluster("rome");
    let manifests = std::fs::read_to_string(rome.outside("/run/cluster/manifests/milan.yaml"))?;
    let view = rome.view(&scene.cluster("milan").spec)?;
    let (pod, target) = scene.way("rome", "milan")?;
    let load = Load::start(scene)?;
    rome.remove("milan")?;
    std::thread::sleep(time);
    load.ensure_sealed().context("after the peering was deleted")?;
    // On every node, by each family.
    for pod in rome.pods() {
        for address in &first_pod(scene.cluster("milan")).addresses {
            let to = SocketAddr::new(view.of(*address)?, HTTP);
            let kind = connect(&pod.ns, to, Duration::from_secs(1)).err().map(|error| error.kind());
            let is_reset = kind == Some(std::io::ErrorKind::ConnectionRefused);
            ensure!(is_reset, "a connection of {} to {to} ended in {kind:?}", pod.name);
        }
    }
    wait_until("weft status shows who still sends", TIMEOUT, || {
        let refused = rome.status()?["refused"].to_string();
        let sender = pod.addresses[0].to_string();
        ensure!(refused.contains("milan") && refused.contains(&sender), "refused: {refused}");
        Ok::<_, anyhow::Error>(())
    })?;
    let prefix = view.0[0].1;
    ensure!(networks(rome)?.contains(&prefix.to_string()), "ipam may grant {prefix} to others");

    rome.apply("milan", &manifests)?;
    rome.wait_connected("milan", TIMEOUT)?;
    ensure!(rome.view(&scene.cluster("milan").spec)? == view, "it has other prefixes than before");
    let _servers = serve(first_pod(scene.cluster("milan")))?;
    wait_until("the peering that is back carries packets", TIMEOUT, || {
        udp_echo(&pod.ns, SocketAddr::new(target, ECHO), MARK)
    })?;
    rome.remove("milan")?;
    std::thread::sleep(Duration::from_secs(1));
    load.finish()?;
    wait_until("the prefix is free once nobody sends", TIMEOUT, || {
        let refused = rome.status()?["refused"].clone();
        let held = networks(rome)?;
        ensure!(refused.is_null() && !held.contains("refused-"), "{refused}, {held}");
        ensure!(!is_refusing(rome.nodes[0].host.net())?, "rome-1 still has the table");
        Ok::<_, anyhow::Error>(())
    })
}

#[test]
fn down_with_senders_leaves_the_refusal_alone() -> Result<()> {
    down_with_senders(SHORT)
}

#[test]
#[ignore = "takes minutes"]
fn down_with_senders_is_refused_for_a_minute() -> Result<()> {
    down_with_senders(MINUTE)
}

fn down_with_senders(time: Duration) -> Result<()> {
    let mut scene = Scene::build(&of_both_families())?;
    let nodes = scene.clusters[0].nodes.iter();
    let before: Vec<_> = nodes.map(|n| Kernel::of(n.host.net())).collect::<Result<_>>()?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;
    scene.peer("rome", "milan", PORT)?;
    let rome = scene.cluster("rome");
    let load = Load::start(&scene)?;
    let printed = weft_on(&rome.nodes[0].host, &["down"])?;
    let sender = first_pod(rome).addresses[0].to_string();
    ensure!(printed.contains(&sender) && printed.contains("down --now"), "down printed {printed}");
    std::thread::sleep(time);
    load.ensure_sealed().context("after `weft down`")?;
    for node in &rome.nodes {
        ensure!(is_refusing(node.host.net())?, "{} refuses nothing", node.host.name());
    }
    load.finish()?;
    weft_on(&rome.nodes[1].host, &["down", "--now", "--run-dir", "/run/agent-2"])?;
    let printed = weft_on(&rome.nodes[0].host, &["down", "--now", "--state-dir", STATE])?;
    let removed = ["removed the nftables table `inet weft_refused`", "/refusal.nft"];
    ensure!(removed.iter().all(|text| printed.contains(text)), "down --now printed {printed}");
    let file = rome.outside(STATE).join("refusal.nft");
    ensure!(!file.exists(), "the next start of the host would refuse again");
    for (number, node) in rome.nodes.iter().enumerate() {
        let now = Kernel::of(node.host.net())?;
        before[number].ensure_same(&now).context(node.host.name().to_owned())?;
    }
    Ok(())
}

#[test]
fn host_without_node_refuses_peers() -> Result<()> {
    play_with(&rome_and_milan(2), QUIET, |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let (pod, host) = (&rome.nodes[1].pods[0], &rome.nodes[1].host);
        let target = rome.view(&milan.spec)?.of(first_pod(milan).addresses[0])?;
        rome.apply("cluster", &own(&ClusterSpec { nodes: 1, ..rome.spec.clone() }))?;
        wait_until("the agent has taken its devices away", TIMEOUT, || {
            let links = run(host, &["ip", "link"])?;
            ensure!(!links.contains("weft4"), "{links}");
            Ok::<_, anyhow::Error>(())
        })?;
        // Longer than prefixes without senders are refused.
        std::thread::sleep(Duration::from_secs(6));
        let refusal = connect(&pod.ns, SocketAddr::new(target, HTTP), Duration::from_secs(1));
        let kind = refusal.err().map(|error| error.kind());
        ensure!(kind == Some(std::io::ErrorKind::ConnectionRefused), "it ended in {kind:?}");
        let status =
            weft_on(host, &["status", "--run-dir", "/run/agent-2;", "echo", "exit code $?"])?;
        let expected = ["this host, rome-2, is no node of rome", "exit code 3"];
        ensure!(expected.iter().all(|text| status.contains(text)), "{status}");
        rome.apply("cluster", &own(&ClusterSpec { nodes: 0, ..rome.spec.clone() }))?;
        wait_until("the peer knows that there is no node", TIMEOUT, || {
            let status = weft_on(&milan.nodes[0].host, &["status;", "echo", "exit code $?"])?;
            let expected = ["peer rome: its cluster has no node", "exit code 3"];
            ensure!(expected.iter().all(|text| status.contains(text)), "{status}");
            Ok(())
        })?;
        rome.apply("cluster", &own(&rome.spec))?;
        let _servers = serve(first_pod(milan))?;
        wait_until("the host that is a node again reaches the peer", TIMEOUT, || {
            udp_echo(&pod.ns, SocketAddr::new(target, ECHO), MARK)
        })?;
        ensure!(!is_refusing(host.net())?, "it still refuses");
        Ok(())
    })
}

#[test]
fn idle_fabric_goes_without_refusal() -> Result<()> {
    play(&rome_and_milan(2), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        // Nodes probe their gateway meanwhile.
        std::thread::sleep(Duration::from_secs(2));
        let printed = weft_on(&rome.nodes[0].host, &["down"])?;
        ensure!(!printed.contains("still send"), "down printed {printed}");
        for node in &rome.nodes {
            ensure!(!is_refusing(node.host.net())?, "{} still refuses", node.host.name());
        }
        Ok(())
    })
}

#[test]
fn lost_published_directory_refuses_peers() -> Result<()> {
    without_published(SHORT, |host, published| {
        run(host, &["mount", "-t", "tmpfs", "none", published])
    })
}

#[test]
#[ignore = "takes minutes"]
fn lost_published_directory_refuses_for_a_minute() -> Result<()> {
    without_published(MINUTE, |host, published| {
        run(host, &["mount", "-t", "tmpfs", "none", published])
    })
}

/// A reader of the mount waits for a file system that never answers.
#[test]
fn hung_published_directory_refuses_peers() -> Result<()> {
    without_published(SHORT, |host, published| {
        let options = "fd=3,rootmode=40000,user_id=0,group_id=0";
        let script = format!(
            "exec 3<>/dev/fuse; mount -i -n -t fuse -o {options} none {published}; exec sleep 60"
        );
        let log = host.outside("/run/fuse.log");
        let hangs = host.start(Command::new("sh").args(["-ec", &script]), &log)?;
        wait_until("it is mounted", TIMEOUT, || {
            let mounts = run(host, &["cat", "/proc/mounts"])?;
            ensure!(mounts.contains(" fuse "), "{}", hangs.log());
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(hangs)
    })
}

/// Takes the published directory from rome-2 by a mount over it, and gives it back. Pods never stop
/// to send.
fn without_published<T>(time: Duration, take: impl FnOnce(&Host, &str) -> Result<T>) -> Result<()> {
    play_with(&of_both_families(), &[], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let pod = &rome.nodes[1].pods[0];
        let target = rome.view(&milan.spec)?.of(first_pod(milan).addresses[0])?;
        let _servers = serve(first_pod(milan))?;
        let opens = || connect(&pod.ns, SocketAddr::new(target, HTTP), Duration::from_secs(1));
        wait_until("rome-2 reaches the peer", TIMEOUT, opens)?;
        let second = &rome.nodes[1].host;
        let published = format!("{}/published", rome.run_dir());
        let load = Load::start(scene)?;
        let taken = take(second, &published)?;
        wait_until("rome-2 refuses new connections", Duration::from_secs(3), || {
            let kind = opens().err().map(|error| error.kind());
            ensure!(kind == Some(std::io::ErrorKind::ConnectionRefused), "it ended in {kind:?}");
            Ok::<_, anyhow::Error>(())
        })?;
        let routes = || run(second, &["ip", "route", "show", "table", "18952"]);
        let before = routes()?;
        run(second, &["ip", "route", "flush", "table", "18952"])?;
        wait_until("the agent puts the routes back", Duration::from_secs(3), || {
            let now = routes()?;
            ensure!(now == before, "{now} instead of {before}");
            Ok::<_, anyhow::Error>(())
        })?;
        std::thread::sleep(time);
        load.finish().context("without the published directory")?;
        drop(taken);
        run(second, &["umount", "-l", &published])?;
        wait_until("rome-2 reaches the peer again", TIMEOUT, opens).map(drop)
    })
}

#[test]
fn rebooted_host_refuses_before_weft_runs() -> Result<()> {
    rebooted_host(SHORT)
}

#[test]
#[ignore = "takes minutes"]
fn rebooted_host_refuses_for_a_minute() -> Result<()> {
    rebooted_host(MINUTE)
}

fn rebooted_host(time: Duration) -> Result<()> {
    play_with(&of_both_families(), &[], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (pod, target) = scene.way("rome", "milan")?;
        let load = Load::start(scene)?;
        reboot(scene, "rome", 0, true)?;
        std::thread::sleep(time);
        load.ensure_sealed().context("before weft runs again")?;
        scene.cluster_mut("rome").start_up(&[])?;
        scene.cluster("rome").wait_connected("milan", TIMEOUT)?;
        let _servers = serve(first_pod(scene.cluster("milan")))?;
        wait_until("packets pass again", TIMEOUT, || {
            udp_echo(&pod.ns, SocketAddr::new(target, ECHO), MARK)
        })?;
        load.finish()
    })
}

#[test]
fn peering_removed_while_its_host_was_down_is_refused() -> Result<()> {
    play_with(&rome_and_milan(2), &[], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let prefix = scene.cluster("rome").view(&scene.cluster("milan").spec)?.0[0].1;
        let load = Load::start(scene)?;
        reboot(scene, "rome", 0, true)?;
        scene.cluster("rome").remove("milan")?;
        scene.cluster_mut("rome").start_up(&[])?;
        let rome = scene.cluster("rome");
        wait_until("weft status shows what is refused", TIMEOUT, || {
            let refused = rome.status()?["refused"].to_string();
            ensure!(
                refused.contains("milan") && refused.contains(&prefix.to_string()),
                "refused: {refused}"
            );
            Ok::<_, anyhow::Error>(())
        })?;
        std::thread::sleep(SHORT);
        load.ensure_sealed().context("once weft runs again")?;
        ensure!(networks(rome)?.contains(&prefix.to_string()), "ipam may grant {prefix} to others");
        load.finish()
    })
}

/// A node of Kubernetes has no such unit: what its pods send before the agent runs is in clear.
#[test]
fn rebooted_host_without_unit_leaks_until_agent_runs() -> Result<()> {
    play_with(&rome_and_milan(2), &[], |scene| {
        scene.peer("rome", "milan", PORT)?;
        let load = Load::start(scene)?;
        reboot(scene, "rome", 0, false)?;
        wait_until("packets leave in clear", TIMEOUT, || {
            ensure!(load.ensure_sealed().is_err(), "none did");
            Ok::<_, anyhow::Error>(())
        })?;
        let start = std::time::Instant::now();
        scene.cluster_mut("rome").start_up(&[])?;
        let count = || load.leaked.load(Ordering::Relaxed);
        let mut seen = (count(), start.elapsed());
        while start.elapsed() < seen.1 + Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(20));
            if count() != seen.0 {
                seen = (count(), start.elapsed());
            }
            ensure!(start.elapsed() < TIMEOUT, "it never ends: {} packets", seen.0);
        }
        eprintln!("in clear until {:?} after the start of weft: {} packets", seen.1, seen.0);
        load.capture_only()
    })
}

#[test]
fn damaged_refusal_spares_those_of_other_fabrics() -> Result<()> {
    let host = Host::new(&format!("weft-test-{}", std::process::id()), "rome-1")?;
    let script = "cd /var/lib; mkdir -p weft/milan weft/rome
        echo garbage >weft/milan/refusal.nft
        echo 'table inet weft_refused {}' >weft/rome/refusal.nft";
    run(&host, &["sh", "-ec", script])?;
    let started = run(&host, &["sh", "-ec", &refuse_command()?]);
    ensure!(is_refusing(host.net())?, "that of rome is not in force");
    ensure!(started.is_err(), "nothing shows that milan's could not be loaded");
    Ok(())
}

#[test]
fn refusal_unit_runs_before_the_network() -> Result<()> {
    let unit = refuse_unit()?;
    let has = |key: &str, value: &str| {
        let mut lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines.any(|values| values.split(' ').any(|one| one == value))
    };
    for (key, value) in [
        ("DefaultDependencies", "no"),
        ("Before", "network-pre.target"),
        ("WantedBy", "sysinit.target"),
    ] {
        ensure!(has(key, value), "no {key}={value} in {unit}");
    }
    Ok(())
}

fn refuse_unit() -> Result<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/systemd/weft-refuse.service");
    std::fs::read_to_string(path).with_context(|| format!("reading {path}"))
}

/// Command of deploy/systemd/weft-refuse.service.
fn refuse_command() -> Result<String> {
    let unit = refuse_unit()?;
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/bin/sh -ec '"));
    let start = start.and_then(|line| line.strip_suffix('\''));
    start.map(str::to_owned).context("the unit has no command")
}

/// Takes away what a host that restarts does not keep, but for files.
const WIPE: &str = "nft delete table inet weft
    for f in -4 -6; do ip $f rule flush protocol 119; ip $f route flush table all proto 119; done
    for d in $(ip -o link | sed -n 's/.*: \\(weft[^:@]*\\).*/\\1/p'); do ip link del $d; done; true";

/// State that a reboot takes from a host, and that deploy/systemd/weft-refuse.service brings
/// before the network is up, if it is `enabled`.
pub(crate) fn reboot(scene: &Scene, id: &str, node: usize, enabled: bool) -> Result<()> {
    let cluster = scene.cluster(id);
    let host = &cluster.nodes[node].host;
    let machine = cluster.spec.node_name(node as u8 + 1);
    scene.lab.cut(&machine)?;
    for program in ["weft", "fabric-controller", "ipam", "route-agent", "gateway"] {
        for pid in cluster.processes(node, program) {
            // It may have ended by itself.
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
    let start = refuse_command()?;
    // `weft up` runs with a state directory of the test.
    let start = if node == 0 { start.replace("/var/lib/weft/*", STATE) } else { start };
    let start = if enabled { format!("({start})") } else { ":".to_owned() };
    let run_dir = if node == 0 { cluster.run_dir() } else { format!("/run/agent-{}", node + 1) };
    let wipe = format!("rm -r {run_dir}; {WIPE}");
    // No pod runs before the unit has.
    run(host, &["sh", "-c", &format!("{start}\n{{ {wipe}\n}} 2>/dev/null")])?;
    scene.lab.restore(&machine)
}

/// Senders of every family in all pods, and a look at every frame on the switch.
struct Load {
    stop: Arc<AtomicBool>,
    senders: Vec<std::thread::JoinHandle<()>>,
    leaked: Arc<AtomicUsize>,
    capture: Capture,
}

impl Load {
    fn start(scene: &Scene) -> Result<Self> {
        let [leaked, wrapped] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let counts = (Arc::clone(&leaked), Arc::clone(&wrapped));
        let machines = scene.lab.machines();
        let capture = scene.lab.capture(move |frame| {
            if contains(frame, MARK) {
                let is_wrapped = machines.carrier(frame).is_some();
                let count = if is_wrapped { &counts.1 } else { &counts.0 };
                count.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        let mut load = Self { stop: Arc::default(), senders: Vec::new(), leaked, capture };
        for (from, to) in [("rome", "milan"), ("milan", "rome")] {
            let (from, to) = (scene.cluster(from), scene.cluster(to));
            let view = wait_until("one sees the other", TIMEOUT, || from.view(&to.spec))?;
            // The last node has no gateway, so packets for its pods leave in VXLAN.
            let target = to.pods().last().context("there is a pod")?;
            for address in &target.addresses {
                let address = view.of(*address)?;
                load.senders.extend(from.pods().map(|pod| {
                    let (ns, stop) = (pod.ns.clone(), Arc::clone(&load.stop));
                    std::thread::spawn(move || send(&ns, address, &stop))
                }));
            }
        }
        wait_until("the overlay carries it", TIMEOUT, || {
            let wrapped = wrapped.load(Ordering::Relaxed);
            ensure!(wrapped > 20, "{wrapped} frames in VXLAN between hosts of a cluster");
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(load)
    }

    fn ensure_sealed(&self) -> Result<()> {
        let leaked = self.leaked.load(Ordering::Relaxed);
        ensure!(leaked == 0, "{leaked} frames carried the text in clear");
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let leaked = Arc::clone(&self.leaked);
        self.capture_only()?;
        let leaked = leaked.load(Ordering::Relaxed);
        ensure!(leaked == 0, "{leaked} frames carried the text in clear");
        Ok(())
    }

    /// The same, whatever was seen in clear.
    fn capture_only(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for sender in self.senders {
            sender.join().ok().context("a sender panicked")?;
        }
        self.capture.finish()
    }
}

/// Arrival does not matter.
fn send(ns: &Netns, target: IpAddr, stop: &AtomicBool) {
    let any: IpAddr = if target.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = ns.run(|| UdpSocket::bind((any, 0))).expect("a port is free");
    while !stop.load(Ordering::Relaxed) {
        let _ = socket.send_to(MARK, (target, ECHO));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_refusing(ns: &Netns) -> Result<bool> {
    let tables = ns.command(Command::new("nft").args(["-j", "list", "tables"]), "")?;
    let tables: Value = serde_json::from_str(&tables)?;
    Ok(tables.to_string().contains("\"weft_refused\""))
}

fn networks(cluster: &Cluster) -> Result<String> {
    cluster.weft(&["get", "network", "-o", "json"])
}

/// Output of a command of weft for people, which is on standard error.
fn weft_on(host: &Host, args: &[&str]) -> Result<String> {
    let weft = bin_dir()?.join("weft");
    run(host, &["sh", "-c", &format!("{} {} 2>&1", weft.display(), args.join(" "))])
}

fn run(host: &Host, command: &[&str]) -> Result<String> {
    host.command(Command::new(command[0]).args(&command[1..]), "")
}
