//! ```text
//!   rome-1 (node, gateway) --- VXLAN --- rome-2 (node)          milan-1
//! ```
//! rome-2 loses its path to the gateway in several ways, while the gateways stay connected.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use weft_tests::manifests::{self, Peering, join};
use weft_tests::{Cluster, ClusterSpec, bin_dir, stays_so, wait_until};

use crate::moving::{Address, NOT_THERE, SETTLED, pinned, readdress};
use crate::scene::{PORT, Scene, TIMEOUT, play};

/// From a fault or its end until `weft status` shows it, at default settings.
const NAMED: Duration = Duration::from_secs(3);
/// The same of loss, which is chance: of a hundred cases one takes longer than [`NAMED`].
const PARTIAL_NAMED: Duration = Duration::from_secs(4);
const HEALTHY: Duration = Duration::from_secs(5);
/// Until a gateway that starts names a node that has not probed it: 15 s, a grace, and its own start.
const FIRST_PROBES: Duration = Duration::from_secs(25);
const NODE: u8 = 2;
const PUBLISHED: &str = "/run/weft/rome/published";

/// Does something to rome-2.
type Act = fn(&mut Scene) -> Result<()>;

struct Fault {
    name: &'static str,
    begin: Act,
    end: Act,
    /// As `weft status -o json` names it.
    shown: &'static str,
    /// Part of one line of the problems: the cause.
    words: &'static str,
}

const FAULTS: [Fault; 10] = [
    Fault {
        name: "port down",
        begin: |scene| scene.lab.cut("rome-2"),
        end: |scene| scene.lab.restore("rome-2"),
        shown: "NoAnswer",
        words: "rome-2: no answer over VXLAN for ",
    },
    Fault {
        name: "replies dropped",
        begin: |scene| {
            node(scene).nft(
                "table inet test { chain input { type filter hook input priority -200; \
                 udp dport 4879 drop; }; }",
            )
        },
        end: |scene| node(scene).nft("delete table inet test"),
        shown: "OneWay",
        words: "rome-2: packets from it arrive over VXLAN, but none reach it",
    },
    Fault {
        name: "a rule of weft's kept deleted",
        begin: |scene| {
            shell(
                scene,
                "touch /run/undo; (for i in $(seq 100); do [ -e /run/undo ] || exit; \
                 ip rule del table 18952; sleep 0.2; done) >/dev/null 2>&1 &",
            )
        },
        end: |scene| shell(scene, "rm /run/undo"),
        shown: "Undone",
        words: "rome-2: another program keeps undoing what its route-agent sets: `ip rule add",
    },
    Fault {
        name: "published directory gone",
        begin: |scene| shell(scene, &format!("mount -t tmpfs none {PUBLISHED}")),
        end: |scene| shell(scene, &format!("umount {PUBLISHED}")),
        shown: "CutOff",
        words: "rome-2: its route-agent cannot read its NodeConfig",
    },
    Fault {
        name: "IPv4 forwarding off",
        begin: |scene| shell(scene, "sysctl -qw net.ipv4.ip_forward=0"),
        end: |scene| shell(scene, "sysctl -qw net.ipv4.ip_forward=1"),
        shown: "NotForwarding",
        words: "rome-2: net.ipv4.ip_forward is 0, so packets between its pods and peers are not",
    },
    Fault {
        name: "forwarding of the pods' device off",
        begin: |scene| shell(scene, "sysctl -qw net.ipv4.conf.cni0.forwarding=0"),
        end: |scene| shell(scene, "sysctl -qw net.ipv4.conf.cni0.forwarding=1"),
        shown: "NotForwarding",
        words: "rome-2: net.ipv4.conf.cni0.forwarding is 0, so packets between its pods and peers",
    },
    Fault {
        name: "a rule takes the peer's prefix",
        begin: |scene| {
            shell(
                scene,
                "ip rule add pref 50 unreachable to $(ip route show table 18952 | head -n1 | cut -d' ' -f1)",
            )
        },
        end: |scene| shell(scene, "ip rule del pref 50"),
        shown: "Diverted",
        words: "rome-2: a rule or route of another program takes packets between its pods and the peer",
    },
    Fault {
        name: "pinned address changed",
        begin: |scene| {
            let rome = scene.cluster("rome");
            rome.apply("cluster", &pinned(rome, NODE))?;
            std::thread::sleep(SETTLED);
            readdress(rome, NODE, Address::New)
        },
        end: |scene| readdress(scene.cluster("rome"), NODE, Address::Old),
        shown: "NoAnswer",
        words: NOT_THERE,
    },
    Fault {
        name: "agent dead",
        begin: kill_agent,
        end: |scene| scene.cluster_mut("rome").start_agent(NODE),
        shown: "NoAgent",
        words: "rome-2: no probes of its route-agent arrive, though its kernel answers over VXLAN",
    },
    Fault {
        name: "agent dead and device gone",
        begin: |scene| {
            kill_agent(scene)?;
            shell(scene, "ip link del weft4")
        },
        end: |scene| scene.cluster_mut("rome").start_agent(NODE),
        shown: "NoAnswer",
        words: "rome-2: no answer over VXLAN for ",
    },
];

/// Faults of some packets only.
const PARTIAL_FAULTS: [Fault; 2] = [
    Fault {
        name: "40 % loss",
        begin: |scene| {
            node(scene).nft(
                "table inet test { chain input { type filter hook input priority -200; \
                 udp dport 4879 numgen random mod 100 < 40 drop; }; chain output { type filter hook \
                 output priority -200; udp dport 4879 numgen random mod 100 < 40 drop; }; }",
            )
        },
        end: |scene| node(scene).nft("delete table inet test"),
        shown: "Lossy",
        words: " % of its probes over VXLAN or of the answers are lost for ",
    },
    Fault {
        name: "large packets lost",
        begin: |scene| {
            node(scene).nft(
                "table inet test { chain input { type filter hook input priority -200; \
                 udp dport 4879 ip length > 1300 drop; }; }",
            )
        },
        end: |scene| node(scene).nft("delete table inet test"),
        shown: "Cramped",
        words: "rome-2: packets of ",
    },
];

#[test]
fn each_fault_of_a_node_is_named_in_three_seconds() -> Result<()> {
    faults_are_named(&FAULTS, 1, NAMED)
}

#[test]
fn partial_faults_of_a_node_are_named_in_time() -> Result<()> {
    faults_are_named(&PARTIAL_FAULTS, 1, PARTIAL_NAMED)
}

#[test]
#[ignore = "minutes long: make soak"]
fn each_fault_of_a_node_is_named_five_times() -> Result<()> {
    faults_are_named(&FAULTS, 5, NAMED)?;
    faults_are_named(&PARTIAL_FAULTS, 5, NAMED)
}

fn faults_are_named(faults: &[Fault], rounds: usize, in_time: Duration) -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        for fault in faults.iter().cycle().take(faults.len() * rounds) {
            (fault.begin)(scene).context(fault.name)?;
            let named = time_until(|| {
                // One look: its time counts from when it began.
                let status = scene.cluster("rome").status()?;
                names(&status, fault.shown)?;
                let problems = status["problems"].to_string();
                ensure!(problems.contains(fault.words), "no {:?} in {problems}", fault.words);
                Ok(())
            });
            let named = named.context(fault.name)?;
            exits_with_three(scene.cluster("rome"))?;
            (fault.end)(scene).context(fault.name)?;
            let solved = time_until(|| is_healthy(scene.cluster("rome"))).context(fault.name)?;
            eprintln!("{}: named after {named:?}, solved after {solved:?}", fault.name);
            ensure!(named <= in_time, "{} was named after {named:?}", fault.name);
            ensure!(solved <= NAMED, "{}: solved after {solved:?}", fault.name);
        }
        Ok(())
    })
}

#[test]
fn node_cut_off_at_the_peer_shows_on_both_sides() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        milan.head().net().nft(
            "table inet test { chain output { type filter hook output priority 0; \
             udp dport 4879 drop; }; }",
        )?;
        let named = time_until(|| peer_nodes_are_named(rome))?;
        exits_with_three(rome)?;
        counts(rome, 2, 2)?;
        let own = milan.peering("rome")?;
        ensure!(own["state"] == "Degraded" && own["nodes"]["reachable"] == 0, "{own}");
        let faults = faults_of(milan)?;
        ensure!(faults.is_empty(), "what milan reports comes back to it: {faults:?}");
        milan.head().net().nft("delete table inet test")?;
        let both_are_healthy = || is_healthy(rome).and_then(|()| milan.is_connected("rome"));
        let solved = time_until(both_are_healthy)?;
        eprintln!("named after {named:?}, solved after {solved:?}");
        ensure!(named <= NAMED, "named after {named:?}");
        ensure!(solved <= NAMED, "solved after {solved:?}");
        stays_so("both are healthy", HEALTHY, both_are_healthy)
    })
}

/// A gateway that starts has not seen the node, and reports of the one before have not named it.
#[test]
fn node_that_failed_as_its_gateway_ended_is_named() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        scene.lab.cut("rome-2")?;
        std::thread::sleep(Duration::from_secs(1));
        signal(&rome.processes(0, "gateway"), Signal::SIGKILL)?;
        wait_until("both name it", FIRST_PROBES, || {
            one_of_two_is_named(milan)?;
            is_named(rome, "NoAnswer").and_then(|()| counts(rome, 1, 2))
        })?;
        scene.lab.restore("rome-2")?;
        wait_until("both are healthy", TIMEOUT, || {
            is_healthy(rome).and_then(|()| milan.is_connected("rome"))
        })
    })
}

/// Its agent refuses what is for peers then.
#[test]
fn node_without_its_config_shows_at_the_peer() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        shell(scene, &format!("mount -t tmpfs none {PUBLISHED}"))?;
        let named = time_until(|| one_of_two_is_named(milan))?;
        shell(scene, &format!("umount {PUBLISHED}"))?;
        let solved = time_until(|| is_healthy(rome).and_then(|()| milan.is_connected("rome")))?;
        eprintln!("named after {named:?}, solved after {solved:?}");
        ensure!(named <= NAMED, "named after {named:?}");
        ensure!(solved <= NAMED, "solved after {solved:?}");
        Ok(())
    })
}

fn one_of_two_is_named(milan: &Cluster) -> Result<()> {
    const MESSAGE: &str = "peer rome: 1 of 2 of its nodes reach its gateway without a fault";
    let faults = faults_of(milan)?;
    ensure!(faults.iter().any(|fault| fault["message"] == MESSAGE), "{faults:?}");
    Ok(())
}

fn faults_of(cluster: &Cluster) -> Result<Vec<Value>> {
    let status = cluster.status()?;
    Ok(status["peerings"][0]["faults"].as_array().cloned().unwrap_or_default())
}

fn peer_nodes_are_named(rome: &Cluster) -> Result<()> {
    const MESSAGE: &str = "peer milan: 0 of 1 of its nodes reach its gateway without a fault";
    let faults = faults_of(rome)?;
    ensure!(faults.iter().any(|fault| fault["message"] == MESSAGE), "{faults:?}");
    Ok(())
}

#[test]
fn dead_agent_is_cause_while_its_kernel_answers() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        kill_agent(scene)?;
        let rome = scene.cluster("rome");
        wait_until("it is named", TIMEOUT, || is_named(rome, "NoAgent"))?;
        stays_so("the cause", Duration::from_secs(15), || is_named(rome, "NoAgent"))
    })
}

#[test]
fn hung_program_is_the_only_cause_named() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let rome = scene.cluster("rome");
        let programs = [
            ("fabric-controller", "fabric-controller"),
            ("gateway", "gateway-liqo-tenant-milan-client"),
        ];
        for (program, process) in programs {
            let pids = rome.processes(0, program);
            signal(&pids, Signal::SIGSTOP)?;
            let words =
                format!("{process} does not answer; see `weft logs {process}`; if it hangs");
            let named = time_until(|| {
                let problems = rome.status()?["problems"].to_string();
                ensure!(problems.contains(&words), "{problems}");
                Ok(())
            })?;
            stays_so("the cause", HEALTHY, || {
                let problems = rome.status()?["problems"].to_string();
                ensure!(!problems.contains("over VXLAN"), "{problems}");
                Ok::<_, anyhow::Error>(())
            })?;
            signal(&pids, Signal::SIGCONT)?;
            wait_until("it is solved", TIMEOUT, || is_healthy(rome))?;
            ensure!(named <= NAMED, "{program} was named after {named:?}");
        }
        Ok(())
    })
}

#[test]
fn input_that_drops_established_degrades_nothing() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let chain = "chain input { type filter hook input priority 0; policy drop; }";
        node(scene).nft(&format!("table inet test {{ {chain}; }}"))?;
        never_degraded(scene.cluster("rome"))?;
        counts(scene.cluster("rome"), 2, 2)
    })
}

#[test]
fn overlapping_pod_cidr_degrades_and_names_both() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let rome = scene.cluster("rome");
        let own = manifests::own(&rome.spec);
        let [first, second] = [1, 2].map(|node| rome.spec.node_pod_cidrs(node)[0].to_string());
        rome.apply("cluster", &own.replace(&second, &first))?;
        wait_until("it is named", TIMEOUT, || is_named(rome, "PodCidrOverlap"))?;
        let problems = rome.status()?["problems"].to_string();
        let names = format!("rome-2: its pod CIDR {first} overlaps one of rome-1,");
        ensure!(problems.contains(&names), "{problems}");
        rome.apply("cluster", &own)?;
        wait_until("it is solved", TIMEOUT, || is_healthy(rome))
    })
}

#[test]
fn dead_gateways_host_is_named_on_a_further_host() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        for program in ["weft", "fabric-controller", "ipam", "route-agent", "gateway"] {
            for pid in scene.cluster("rome").processes(0, program) {
                kill(Pid::from_raw(pid), Signal::SIGKILL)?;
            }
        }
        let named = time_until(|| {
            let status = status_of_second(scene)?;
            let state = &status["peerings"][0]["state"];
            ensure!(state == "Error", "it says {state}");
            let problems = status["problems"].to_string();
            let words = "has not answered this host over VXLAN for";
            ensure!(
                problems.contains(words) && problems.contains("see whether rome-1"),
                "{problems}"
            );
            Ok(())
        })?;
        ensure!(named <= NAMED, "it was named after {named:?}");
        Ok(())
    })
}

fn status_of_second(scene: &Scene) -> Result<Value> {
    let weft = bin_dir()?.join("weft");
    let script = format!("{} status --run-dir /run/agent-2 -o json; [ $? -le 3 ]", weft.display());
    let host = &scene.cluster("rome").nodes[1].host;
    let text = host.command(Command::new("sh").args(["-c", &script]), "")?;
    serde_json::from_str(&text).with_context(|| format!("weft status printed {text:?}"))
}

#[test]
fn restarts_and_stalls_are_not_called_degraded() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let rome = scene.cluster("rome");
        signal(&rome.processes(1, "route-agent"), Signal::SIGTERM)?;
        never_degraded(rome).context("an agent is replaced")?;
        signal(&rome.processes(1, "route-agent"), Signal::SIGKILL)?;
        never_degraded(rome).context("an agent is killed and started again")?;
        signal(&rome.processes(0, "gateway"), Signal::SIGKILL)?;
        never_degraded(rome).context("a gateway is killed and started again")?;
        rome.wait_connected("milan", TIMEOUT)?;
        let all: Vec<_> = (0..2)
            .flat_map(|node| ["route-agent", "gateway"].map(|name| rome.processes(node, name)))
            .flatten()
            .collect();
        signal(&all, Signal::SIGSTOP)?;
        std::thread::sleep(Duration::from_secs(4));
        signal(&all, Signal::SIGCONT)?;
        never_degraded(rome).context("hosts stood still")
    })
}

#[test]
fn node_without_agent_degrades_until_it_has_one() -> Result<()> {
    let mut scene = Scene::build(&clusters())?;
    scene.cluster_mut("rome").start_up(&[])?;
    scene.cluster_mut("milan").start()?;
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let peering = Peering::new(&rome.spec, &milan.spec, PORT);
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    wait_until("a node probes", TIMEOUT, || counts(rome, 1, 2))?;
    wait_until("the other one is named", NAMED, || is_named(rome, "NotStarted"))?;
    stays_so("the count", HEALTHY, || counts(rome, 1, 2))?;
    scene.cluster_mut("rome").start_agent(NODE)?;
    scene.cluster("rome").wait_connected("milan", TIMEOUT)?;

    let weft = bin_dir()?.join("weft");
    shell(&scene, &format!("{} down --run-dir /run/agent-2", weft.display()))?;
    wait_until("it is named again", NAMED, || is_named(scene.cluster("rome"), "NotStarted"))
}

#[test]
fn read_only_published_directory_is_named() -> Result<()> {
    let mut scene = Scene::build(&clusters())?;
    scene.cluster_mut("rome").start_up(&[])?;
    scene.cluster_mut("milan").start()?;
    wait_until("the directory is published", TIMEOUT, || {
        shell(&scene, &format!("mount -o bind,ro {PUBLISHED} {PUBLISHED}"))
    })?;
    scene.cluster_mut("rome").start_agent(NODE)?;
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let peering = Peering::new(&rome.spec, &milan.spec, PORT);
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    let problem = "NodeConfig rome-2: its route-agent sends probes, but does not acknowledge";
    wait_until("weft status names it", 2 * TIMEOUT, || {
        rome.is_connected("milan")?;
        let problems = rome.status()?["problems"].to_string();
        let remedy = "share that with rome-2 for writing";
        ensure!(problems.contains(problem) && problems.contains(remedy), "{problems}");
        Ok::<_, anyhow::Error>(())
    })?;
    shell(&scene, &format!("umount {PUBLISHED}"))?;
    wait_until("weft status names it no longer", TIMEOUT, || {
        let problems = rome.status()?["problems"].to_string();
        ensure!(!problems.contains("acknowledge"), "{problems}");
        Ok::<_, anyhow::Error>(())
    })
}

pub(crate) fn clusters() -> [ClusterSpec; 2] {
    [ClusterSpec::new("rome", 1, 2), ClusterSpec::new("milan", 2, 1)]
}

fn node(scene: &Scene) -> &weft_tests::Netns {
    scene.cluster("rome").nodes[1].host.net()
}

pub(crate) fn shell(scene: &Scene, script: &str) -> Result<()> {
    let host = &scene.cluster("rome").nodes[1].host;
    host.command(Command::new("sh").args(["-ec", script]), "").map(drop)
}

fn kill_agent(scene: &mut Scene) -> Result<()> {
    let rome = scene.cluster_mut("rome");
    drop(rome.take_program("weft-agent-2")?);
    signal(&rome.processes(1, "route-agent"), Signal::SIGKILL)
}

fn signal(processes: &[i32], signal: Signal) -> Result<()> {
    ensure!(!processes.is_empty(), "no process to signal");
    processes.iter().try_for_each(|pid| Ok(kill(Pid::from_raw(*pid), signal)?))
}

pub(crate) fn all_probe(scene: &Scene) -> Result<()> {
    scene.peer("rome", "milan", PORT)?;
    let rome = scene.cluster("rome");
    wait_until("both nodes probe", TIMEOUT, || counts(rome, 2, 2))
}

fn counts(rome: &Cluster, reachable: u64, of: u64) -> Result<()> {
    let nodes = &rome.peering("milan")?["nodes"];
    ensure!(nodes["reachable"] == reachable && nodes["of"] == of, "{nodes}");
    Ok(())
}

pub(crate) fn is_named(rome: &Cluster, fault: &str) -> Result<()> {
    names(&rome.status()?, fault)
}

fn names(status: &Value, fault: &str) -> Result<()> {
    let peering = &status["peerings"][0];
    ensure!(peering["state"] == "Degraded", "it is {}", peering["state"]);
    let node = &peering["nodes"]["unreachable"][0];
    ensure!(node["node"] == "rome-2", "it says {node}");
    let shown = node["fault"].as_str().unwrap_or_default();
    ensure!(shown == fault, "it says {node}");
    ensure!(node["remedy"].as_str().is_some_and(|text| text.contains("rome-2")), "{node}");
    let problems = status["problems"].as_array().into_iter().flatten();
    let mut problems = problems.filter_map(Value::as_str);
    let is_timeless = ["NotStarted", "PodCidrOverlap"].contains(&fault);
    let lasts = |text: &str| text.contains(" s; ") || is_timeless;
    ensure!(problems.any(|text| text.contains(": rome-2: ") && lasts(text)), "{status}");
    Ok(())
}

pub(crate) fn is_healthy(rome: &Cluster) -> Result<()> {
    rome.is_connected("milan")?;
    counts(rome, 2, 2)
}

fn never_degraded(rome: &Cluster) -> Result<()> {
    stays_so("the peering", HEALTHY, || {
        let peering = rome.peering("milan")?;
        ensure!(peering["state"] != "Degraded", "{}", peering["nodes"]);
        Ok::<_, anyhow::Error>(())
    })
}

fn exits_with_three(rome: &Cluster) -> Result<()> {
    let script = format!("{} status >/dev/null; echo $?", bin_dir()?.join("weft").display());
    let code = rome.head().command(Command::new("sh").args(["-c", &script]), "")?;
    ensure!(code.trim() == "3", "weft status exits with {code}");
    Ok(())
}

/// The answer was true when reading began, or later.
fn time_until(mut ask: impl FnMut() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    wait_until("it is shown", TIMEOUT, || {
        let at = start.elapsed();
        ask().map(|()| at)
    })
}
