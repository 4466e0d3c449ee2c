//! One line for each fault: how it is made and ended, and what is shown.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_api::PrivateKey;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::kubernetes::Object;
use weft_tests::manifests::join;
use weft_tests::{Cluster, ClusterSpec, Kubernetes, wait_until};

use super::{AT_MOST, MAX, Scene, Shown, print};
use crate::pair::{GATEWAYS, TIMEOUT, pod_of, selector};

/// Rome's node that faults are made on.
pub(super) const NODE: u8 = 2;
/// Time until a pod runs that its kubelet makes anew, and nothing is shown of its absence.
const STARTED: Duration = Duration::from_secs(60);
const CONFIGURATION: usize = 1;
const PUBLIC_KEY: usize = 3;
const GATEWAY: usize = 4;

type Act = fn(&Scene<'_>) -> Result<()>;

struct Fault {
    name: &'static str,
    begin: Act,
    end: Act,
    shown: &'static [Shown],
    /// Kubernetes itself reports it no sooner.
    at_most: Duration,
    /// Time from its end until nothing is shown of it.
    solved: Duration,
}

const fn fault(name: &'static str, [begin, end]: [Act; 2], shown: &'static [Shown]) -> Fault {
    Fault { name, begin, end, shown, at_most: MAX, solved: MAX }
}

/// Fault at whose end a pod starts, which is no part of the status.
const fn with_start(name: &'static str, acts: [Act; 2], shown: &'static [Shown]) -> Fault {
    Fault { solved: STARTED, ..fault(name, acts, shown) }
}

const CHEAP: [Fault; 4] = [
    fault(
        "link cut",
        [
            |scene| {
                on_switch(
                    scene,
                    &[
                        "ip saddr 192.0.2.16/28 ip daddr 192.0.2.32/28 drop",
                        "ip saddr 192.0.2.32/28 ip daddr 192.0.2.16/28 drop",
                    ],
                )
            },
            restore_switch,
        ],
        &[(0, "no answer from milan for "), (1, "no answer from rome for ")],
    ),
    fault(
        "one-way cut",
        [
            |scene| on_switch(scene, &["ip saddr 192.0.2.16/28 ip daddr 192.0.2.32/28 drop"]),
            restore_switch,
        ],
        &[
            (0, "milan is received, and receives nothing from here for "),
            (1, "no answer from rome for "),
        ],
    ),
    fault(
        "40 % loss",
        [
            |scene| {
                let loss = "ip saddr 192.0.2.16/28 ip daddr 192.0.2.32/28 meta l4proto udp \
                            numgen random mod 100 < 40 drop";
                on_switch(scene, &[loss])
            },
            restore_switch,
        ],
        &[(0, " % of probes to milan"), (1, " % of probes to rome")],
    ),
    fault(
        "UDP 4879 dropped on a node",
        [
            |scene| {
                scene.node().nft(
                    "table inet fault { chain input { type filter hook input priority -400; \
                     udp dport 4879 drop; }; }",
                )
            },
            |scene| scene.node().nft("delete table inet fault"),
        ],
        &[(0, ": rome-2: ")],
    ),
];

const OTHERS: [Fault; 12] = [
    with_start(
        "peer removed its side",
        [
            |scene| scene.cluster(1).delete(&join(&scene.pair.documents()[1][1..])).map(drop),
            |scene| scene.cluster(1).apply(&join(&scene.pair.documents()[1])).map(drop),
        ],
        &[(0, "milan has removed its side of this peering")],
    ),
    fault(
        "wrong CIDR at the peer",
        [
            |scene| edit(scene, CONFIGURATION, "10.200.0.0/16", "10.99.0.0/16"),
            |scene| restore(scene, CONFIGURATION),
        ],
        &[
            (0, "Configuration: found 10.99.0.0/16; expected 10.200.0.0/16"),
            (1, "rome has other CIDRs configured for milan"),
        ],
    ),
    fault(
        "wrong key",
        [
            |scene| {
                let key = format!("publicKey: {} #", PrivateKey::generate().public());
                edit(scene, PUBLIC_KEY, "publicKey: ", &key)
            },
            |scene| restore(scene, PUBLIC_KEY),
        ],
        &[
            (0, "milan does not answer handshakes with the new keys"),
            (1, "are not for this gateway's key "),
        ],
    ),
    fault(
        "wrong key at first",
        [wrong_key_at_first, |scene| restore(scene, PUBLIC_KEY)],
        &[(0, "no answer from milan to handshakes at "), (1, "are not for this gateway's key ")],
    ),
    Fault {
        // One of them has the session when the other one ends, and that is expected for a while.
        solved: Duration::from_secs(6),
        ..fault(
            "one key in two gateways",
            [start_duplicate, |scene| {
                scene.replace_duplicate(None);
                Ok(())
            }],
            &[
                (1, "rome's key is used from two endpoints, "),
                (0, "milan receives packets with this gateway's key from another endpoint, too"),
            ],
        )
    },
    fault(
        "endpoint is oneself",
        [
            |scene| edit(scene, GATEWAY, "[192.0.2.33]", "[192.0.2.18]"),
            |scene| restore(scene, GATEWAY),
        ],
        &[(0, "which is node rome-2 of this cluster itself")],
    ),
    fault(
        "name does not resolve",
        [
            |scene| edit(scene, GATEWAY, "[192.0.2.33]", "[gateway.milan.test]"),
            |scene| restore(scene, GATEWAY),
        ],
        &[(0, "the name gateway.milan.test does not resolve")],
    ),
    with_start(
        "agent dead",
        [end_agent, |scene| scene.cluster(0).start_kubelet(NODE)],
        &[(0, ": rome-2: ")],
    ),
    with_start(
        "VXLAN device gone, agent dead",
        [
            |scene| {
                end_agent(scene)?;
                scene.node().ip("link del weft4\n")
            },
            |scene| scene.cluster(0).start_kubelet(NODE),
        ],
        &[(0, ": rome-2: ")],
    ),
    // Its kubelet tries three times, a second each, until it is not ready: agents report it sooner.
    fault(
        "gateway hangs",
        [
            |scene| signal_gateway(scene, Signal::SIGSTOP),
            |scene| signal_gateway(scene, Signal::SIGCONT),
        ],
        &[(1, "no answer from rome for "), (0, "gateway liqo-tenant-milan/client: pod ")],
    ),
    Fault {
        // Its kubelet renews the Lease every 10 s.
        solved: Duration::from_secs(30),
        ..fault(
            "gateway's node cut off",
            [cut_gateways_node, |scene| scene.lab.restore(&scene.cluster(1).spec.node_name(NODE))],
            &[
                (1, "is ready, but no other node reaches it over VXLAN"),
                (0, "no answer from milan for "),
            ],
        )
    },
    Fault {
        name: "node loses its API server",
        begin: |scene| {
            scene.node().nft(
                "table inet fault { chain output { type filter hook output priority 0; \
                 tcp dport 6443 drop; }; }",
            )
        },
        end: |scene| scene.node().nft("delete table inet fault"),
        shown: &[(0, ": rome-2: its route-agent cannot read its NodeConfig")],
        at_most: MAX,
        // Its kubelet renews the Lease every 10 s.
        solved: Duration::from_secs(30),
    },
];

/// Times from the end of a gateway that is uninstalled with its cluster's weft.
pub(super) fn uninstalled(scene: &Scene<'_>) -> Result<Vec<String>> {
    let (milan, gateway) = (scene.cluster(1), GATEWAYS[1]);
    let list = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let time = std::thread::scope(|scope| {
        let uninstalled = scope.spawn(|| milan.uninstall_weft(TIMEOUT));
        let time = wait_until("milan's gateway ends", TIMEOUT, || {
            let list = milan.kubectl(&[&list[..], &["--output=json"]].concat())?;
            let is_gone = list.contains("deletionTimestamp") || !list.contains("\"Pod\"");
            ensure!(is_gone, "{list}");
            Ok::<_, anyhow::Error>(())
        })
        .and_then(|()| {
            scene.time_until((0, "milan has removed its side of this peering"), Instant::now())
        });
        uninstalled.join().expect("no panic").and(time)
    })?;
    print("peer is uninstalled", "rome: milan has removed its side of this peering", time);
    let late = (time > MAX).then(|| format!("peer is uninstalled: {time:?}"));
    Ok(late.into_iter().collect())
}

/// Changes the address of a node: how long packets by that node stay away, and the time until the kubelet's address,
/// which it has no longer, is named. The kubelet itself takes longer to notice either change.
fn address_changes(scene: &Scene<'_>) -> Result<Vec<String>> {
    const NAME: &str = "address changed";
    const STALE: &str = "status.addresses of the Node: found 192.0.2.18, which no device";
    let wait_for = |is_shown: bool| {
        let start = Instant::now();
        wait_until(STALE, AT_MOST, || {
            let status = scene.cluster(0).status()?;
            ensure!(status["problems"].to_string().contains(STALE) == is_shown, "{status}");
            Ok::<_, anyhow::Error>(())
        })?;
        Ok::<_, anyhow::Error>(start.elapsed())
    };
    let mut named = Duration::ZERO;
    let traffic = scene.pair.streaming(|| {
        readdress(scene, ["18", "120"])?;
        named = wait_for(true)?;
        sleep(MAX);
        Ok(())
    });
    readdress(scene, ["120", "18"])?;
    let times = [
        ("named", named),
        ("packets are back", traffic?.longest_outage()),
        ("(solved)", wait_for(false)?),
    ];
    scene.wait_well(TIMEOUT)?;
    times.iter().for_each(|(what, time)| print(NAME, what, *time));
    let late = times.into_iter().filter(|(_, time)| *time > MAX);
    Ok(late.map(|(what, time)| format!("{NAME}: {what}: {time:?}")).collect())
}

/// Makes each fault so many times, or those whose names contain `WEFT_FAULT`. Returns those that were named late,
/// or solved late.
pub(super) fn all(scene: &Scene<'_>, runs: usize) -> Result<Vec<String>> {
    let chosen = std::env::var("WEFT_FAULT").unwrap_or_default();
    let faults = CHEAP.iter().chain(&OTHERS).filter(|fault| fault.name.contains(&chosen));
    let mut late = each(scene, faults.flat_map(|fault| std::iter::repeat_n(fault, runs)))?;
    if "address changed".contains(&chosen) {
        for _ in 0..runs {
            late.extend(address_changes(scene)?);
        }
    }
    Ok(late)
}

pub(super) fn cheap(scene: &Scene<'_>) -> Result<Vec<String>> {
    each(scene, CHEAP.iter())
}

fn each<'f>(scene: &Scene<'_>, faults: impl Iterator<Item = &'f Fault>) -> Result<Vec<String>> {
    let mut late = Vec::new();
    for fault in faults {
        let ended = play(scene, fault, &mut late);
        ended.with_context(|| fault.name)?;
    }
    Ok(late)
}

fn play(scene: &Scene<'_>, fault: &Fault, late: &mut Vec<String>) -> Result<()> {
    // Not in step with the probes of either side.
    sleep(Duration::from_millis(1300));
    let start = Instant::now();
    (fault.begin)(scene)?;
    let made = start.elapsed();
    let times = std::thread::scope(|scope| {
        let wait = |shown: &Shown| {
            let shown = *shown;
            scope.spawn(move || Ok((shown, scene.time_until(shown, start)?)))
        };
        let threads: Vec<_> = fault.shown.iter().map(wait).collect();
        let threads = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        threads.collect::<Result<Vec<(Shown, Duration)>>>()
    });
    (fault.end)(scene)?;
    let ended = Instant::now();
    for ((i, text), time) in times? {
        let what = format!("{}: {text}", scene.cluster(i).spec.id);
        print(fault.name, &what, time);
        // The time that it takes to make the fault is no delay of the status.
        if time.saturating_sub(made) > fault.at_most {
            late.push(format!("{} {what}: {time:?}", fault.name));
        }
    }
    scene.wait_well(TIMEOUT)?;
    let solved = ended.elapsed();
    print(fault.name, "(solved)", solved);
    if solved > fault.solved {
        late.push(format!("{} is solved: {solved:?}", fault.name));
    }
    Ok(())
}

fn on_switch(scene: &Scene<'_>, rules: &[&str]) -> Result<()> {
    let rules = rules.join("; ");
    let chain = format!("chain pass {{ type filter hook forward priority 0; {rules}; }};");
    scene.lab.switch().net().nft(&format!("table bridge fault {{ {chain} }}"))
}

/// Replaces the node's address. Its kubelet goes on with the old one, and its agent has to connect anew to report
/// the new one.
fn readdress(scene: &Scene<'_>, [gone, come]: [&str; 2]) -> Result<()> {
    // Routes by way of other machines stay.
    scene.node().sysctl(&[("ipv4/conf/eth0/promote_secondaries", "1")])?;
    scene
        .node()
        .ip(&format!("addr add 192.0.2.{come}/24 dev eth0\naddr del 192.0.2.{gone}/24 dev eth0\n"))
}

/// Cuts the node of milan's gateway off, once that is one without the control plane.
fn cut_gateways_node(scene: &Scene<'_>) -> Result<()> {
    let (milan, gateway) = (scene.cluster(1), GATEWAYS[1]);
    let node = milan.spec.node_name(NODE);
    let pod = milan.get(Object::new("pod", gateway.namespace, &pod_of(milan, gateway)?))?;
    if pod["spec"]["nodeName"] != node.as_str() {
        let head = milan.spec.node_name(1);
        milan.kubectl(&["cordon", &head])?;
        let name = pod_of(milan, gateway)?;
        milan.kubectl(&["delete", "pod", &name, "--namespace", gateway.namespace])?;
        scene.wait_well(TIMEOUT)?;
        milan.kubectl(&["uncordon", &head])?;
    }
    scene.lab.cut(&node)
}

fn restore_switch(scene: &Scene<'_>) -> Result<()> {
    scene.lab.switch().net().nft("delete table bridge fault")
}

/// Applies one of rome's manifests with something else in it.
fn edit(scene: &Scene<'_>, document: usize, good: &str, bad: &str) -> Result<()> {
    let text = &scene.pair.documents()[0][document];
    assert!(text.contains(good), "no {good:?} in {text}");
    scene.cluster(0).apply(&text.replacen(good, bad, 1)).map(drop)
}

fn restore(scene: &Scene<'_>, document: usize) -> Result<()> {
    scene.cluster(0).apply(&scene.pair.documents()[0][document]).map(drop)
}

/// Makes rome's gateway anew, with another key for milan's. That it starts is no part of the time.
fn wrong_key_at_first(scene: &Scene<'_>) -> Result<()> {
    let rome = scene.cluster(0);
    let documents = &scene.pair.documents()[0];
    rome.delete(&documents[GATEWAY])?;
    let key = format!("publicKey: {} #", PrivateKey::generate().public());
    edit(scene, PUBLIC_KEY, "publicKey: ", &key)?;
    rome.apply(&documents[GATEWAY])?;
    let client = rome.get(GATEWAYS[0])?;
    // The one that ends reports Connecting, too.
    wait_until("rome's new gateway reports", TIMEOUT, || {
        let connection = rome.get(Object::new("connection", "liqo-tenant-milan", "gw-client"))?;
        let (value, owner) =
            (&connection["status"]["value"], &connection["metadata"]["ownerReferences"][0]["uid"]);
        let is_new = *owner == client["metadata"]["uid"];
        ensure!(*value == "Connecting" && is_new, "{value}, of {owner}");
        Ok::<_, anyhow::Error>(())
    })
}

/// Runs a gateway with the key of rome's, on a host of its own. That it starts is no part of the time.
fn start_duplicate(scene: &Scene<'_>) -> Result<()> {
    let mut duplicate = Cluster::new(scene.lab, ClusterSpec::new("duplicate", 3, 1))?;
    duplicate.start()?;
    duplicate.apply("milan", &join(&scene.pair.documents()[0]))?;
    wait_until("the duplicate is connected", TIMEOUT, || duplicate.is_connected("milan"))?;
    scene.replace_duplicate(Some(duplicate));
    Ok(())
}

/// Kills a node's agent while its kubelet does not start another.
fn end_agent(scene: &Scene<'_>) -> Result<()> {
    let rome = scene.cluster(0);
    let pod = agent_of(rome, &rome.spec.node_name(NODE))?;
    let pid = rome.process_in("liqo", &pod, "route-agent")?;
    rome.stop_kubelet(NODE)?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("killing an agent")
}

/// Name of the pod of a node's agent.
pub(super) fn agent_of(cluster: &Kubernetes, node: &str) -> Result<String> {
    let list = "get pods --namespace=liqo --selector=fabric.weft.dev/program=route-agent";
    let node = format!("--field-selector=spec.nodeName={node}");
    let list: Vec<_> = list.split(' ').chain([node.as_str(), "--output=name"]).collect();
    Ok(cluster.kubectl(&list)?.trim().trim_start_matches("pod/").to_owned())
}

fn signal_gateway(scene: &Scene<'_>, signal: Signal) -> Result<()> {
    let (rome, gateway): (_, Object<'_>) = (scene.cluster(0), GATEWAYS[0]);
    let pid = rome.process_in(gateway.namespace, &pod_of(rome, gateway)?, "gateway")?;
    kill(Pid::from_raw(pid), signal).context("signalling a gateway")
}
