//! One line for each fault: how it is made and ended, and what is shown. Where a pod starts at its end, it ends when
//! that is ready: until then, that it is missed is no false alarm.

use std::net::{IpAddr, Ipv6Addr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_api::PrivateKey;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::kubernetes::Object;
use weft_tests::manifests::join;
use weft_tests::{Cluster, ClusterSpec, Kubernetes, on_segment, wait_until};

use super::{AT_MOST, MAX, Scene, Shown, print};
use crate::pair::{GATEWAYS, TIMEOUT, pod_of, selector};

/// Rome's node that faults are made on.
pub(super) const NODE: u8 = 2;
/// Node that runs the API server, and the gateway where the other one is to have none.
const OTHER: u8 = 1;
const CONFIGURATION: usize = 1;
const PUBLIC_KEY: usize = 3;
const GATEWAY: usize = 4;

type Act = fn(&Scene<'_>) -> Result<()>;

struct Fault {
    name: &'static str,
    begin: Act,
    end: Act,
    shown: &'static [Shown],
}

const fn fault(name: &'static str, [begin, end]: [Act; 2], shown: &'static [Shown]) -> Fault {
    Fault { name, begin, end, shown }
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
        &[(0, " % of probes to or from milan"), (1, " % of probes to or from rome")],
    ),
    fault(
        "UDP 4879 dropped on a node",
        [
            |scene| {
                place_gateway(scene, 0, OTHER)?;
                scene.node().nft(
                    "table inet fault { chain input { type filter hook input priority -400; \
                     udp dport 4879 drop; }; }",
                )
            },
            |scene| scene.node().nft("delete table inet fault"),
        ],
        &[(0, ": rome-2: packets from it arrive over VXLAN, but none reach it")],
    ),
];

const OTHERS: [Fault; 13] = [
    fault(
        "peer removed its side",
        [
            |scene| scene.cluster(1).delete(&join(&scene.pair.documents()[1][1..])).map(drop),
            |scene| {
                scene.cluster(1).apply(&join(&scene.pair.documents()[1]))?;
                gateway_is_ready(scene, 1)
            },
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
    fault(
        "one key in two gateways",
        [start_duplicate, |scene| {
            scene.replace_duplicate(None);
            Ok(())
        }],
        &[
            (1, "rome's key is used from two endpoints, "),
            (0, "milan receives packets with this gateway's key from another endpoint, too"),
        ],
    ),
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
    fault(
        "node's port down",
        [
            |scene| {
                place_gateway(scene, 0, OTHER)?;
                scene.lab.cut(&scene.cluster(0).spec.node_name(NODE))
            },
            |scene| scene.lab.restore(&scene.cluster(0).spec.node_name(NODE)),
        ],
        &[(0, ": rome-2: no answer over VXLAN")],
    ),
    fault(
        "agent dead",
        [end_agent, start_agent],
        &[(
            0,
            ": rome-2: no probes of its route-agent arrive, though its kernel answers over VXLAN",
        )],
    ),
    fault(
        "VXLAN device gone, agent dead",
        [
            |scene| {
                end_agent(scene)?;
                scene.node().ip("link del weft4\n")
            },
            start_agent,
        ],
        &[(0, ": rome-2: no answer over VXLAN")],
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
    fault(
        "gateway's node cut off",
        [
            |scene| {
                place_gateway(scene, 1, NODE)?;
                scene.lab.cut(&scene.cluster(1).spec.node_name(NODE))
            },
            |scene| scene.lab.restore(&scene.cluster(1).spec.node_name(NODE)),
        ],
        &[
            (1, "is ready, but no other node reaches it over VXLAN"),
            (0, "no answer from milan for "),
        ],
    ),
    fault(
        "node loses its API server",
        [
            |scene| {
                scene.node().nft(
                    "table inet fault { chain output { type filter hook output priority 0; \
                     tcp dport 6443 drop; }; }",
                )
            },
            |scene| scene.node().nft("delete table inet fault"),
        ],
        &[(0, ": rome-2: its route-agent cannot read its NodeConfig")],
    ),
];

/// Uninstalls milan's weft, which ends its gateway, and installs it again.
fn peer_goes_down(scene: &Scene<'_>) -> Result<Vec<String>> {
    const NAME: &str = "peer went down";
    let (milan, gateway) = (scene.cluster(1), GATEWAYS[1]);
    let list = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let named = std::thread::scope(|scope| {
        let uninstalled = scope.spawn(|| milan.uninstall_weft(TIMEOUT));
        let mut present_at = Instant::now();
        let named = wait_until("milan's gateway ends", TIMEOUT, || {
            let asked_at = Instant::now();
            let list = milan.kubectl(&[&list[..], &["--output=json"]].concat())?;
            if list.contains("\"Pod\"") && !list.contains("deletionTimestamp") {
                present_at = asked_at;
                anyhow::bail!("{list}");
            }
            Ok::<_, anyhow::Error>(())
        })
        .and_then(|()| {
            scene.time_until((0, "milan has removed its side of this peering"), present_at)
        });
        uninstalled.join().expect("no panic").and(named)
    })?;
    milan.install_weft(TIMEOUT)?;
    gateway_is_ready(scene, 1)?;
    let ready = Instant::now();
    scene.wait_well(TIMEOUT)?;
    Ok(late(NAME, &[("rome: milan has removed its side", named), ("(solved)", ready.elapsed())]))
}

/// Prints these times of a row. Returns those that are too long.
fn late(name: &str, times: &[(&str, Duration)]) -> Vec<String> {
    times.iter().for_each(|(what, time)| print(name, what, *time));
    let late = times.iter().filter(|(_, time)| *time > MAX);
    late.map(|(what, time)| format!("{name}: {what}: {time:?}")).collect()
}

/// Changes the address of a node: how long packets by that node stay away, and the time until the kubelet's address,
/// which it has no longer, is named. The kubelet itself takes longer to notice either change.
fn address_changes(scene: &Scene<'_>, name: &str) -> Result<Vec<String>> {
    let own = scene.cluster(0).machine(NODE).addresses[0];
    let stale = format!("status.addresses of the Node: found {own}, which no device");
    let wait_for = |is_shown: bool| {
        let start = Instant::now();
        wait_until(&stale, AT_MOST, || {
            let status = scene.cluster(0).status()?;
            ensure!(status["problems"].to_string().contains(&stale) == is_shown, "{status}");
            Ok::<_, anyhow::Error>(())
        })?;
        Ok::<_, anyhow::Error>(start.elapsed())
    };
    let mut named = Duration::ZERO;
    let traffic = scene.pair.streaming(|| {
        readdress(scene, own, elsewhere(own))?;
        named = wait_for(true)?;
        sleep(MAX);
        Ok(())
    });
    readdress(scene, elsewhere(own), own)?;
    let times = [
        ("named", named),
        ("packets are back", traffic?.longest_outage()),
        ("(solved)", wait_for(false)?),
    ];
    scene.wait_well(TIMEOUT)?;
    Ok(late(name, &times))
}

/// Another address on the same segment.
fn elsewhere(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            IpAddr::from([a, b, c, d + 100])
        }
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() + 0x100)),
    }
}

/// First of a node without a gateway, then of the gateway's.
pub(super) fn addresses_change(scene: &Scene<'_>) -> Result<Vec<String>> {
    let mut late = Vec::new();
    for (gateway, name) in [(OTHER, "address changed"), (NODE, "gateway's address changed")] {
        place_gateway(scene, 0, gateway)?;
        late.extend(address_changes(scene, name).context(name)?);
    }
    place_gateway(scene, 0, OTHER)?;
    Ok(late)
}

/// Makes each fault so many times, or those whose names contain `WEFT_FAULT`. Returns those that were named late,
/// or solved late.
pub(super) fn all(scene: &Scene<'_>, runs: usize) -> Result<Vec<String>> {
    let chosen = std::env::var("WEFT_FAULT").unwrap_or_default();
    let faults = CHEAP.iter().chain(&OTHERS).filter(|fault| fault.name.contains(&chosen));
    let mut late = each(scene, faults.flat_map(|fault| std::iter::repeat_n(fault, runs)))?;
    let others: [(_, fn(&Scene<'_>) -> _); 2] =
        [("address changed", addresses_change), ("peer went down", peer_goes_down)];
    for (name, row) in others.into_iter().filter(|(name, _)| name.contains(&chosen)) {
        for _ in 0..runs {
            late.extend(row(scene).context(name)?);
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
    let ending = Instant::now();
    (fault.end)(scene)?;
    let (ended, took) = (Instant::now(), ending.elapsed());
    for ((i, text), time) in times? {
        let what = format!("{}: {text}", scene.cluster(i).spec.id);
        // The time that it takes to make the fault is no delay of the status.
        let time = time.saturating_sub(made);
        print(fault.name, &what, time);
        if time > MAX {
            late.push(format!("{} {what}: {time:?}", fault.name));
        }
    }
    scene.wait_well(TIMEOUT)?;
    let solved = ended.elapsed();
    print(fault.name, &format!("(solved, its end took {} ms)", took.as_millis()), solved);
    if solved > MAX {
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
fn readdress(scene: &Scene<'_>, gone: IpAddr, come: IpAddr) -> Result<()> {
    // Routes by way of other machines stay.
    scene.node().sysctl(&[("ipv4/conf/eth0/promote_secondaries", "1")])?;
    let [add, del] = [on_segment(come), on_segment(gone)];
    let usable = if come.is_ipv6() { " nodad" } else { "" };
    scene.node().ip(&format!("addr add {add} dev eth0{usable}\naddr del {del} dev eth0\n"))
}

/// Moves the gateway of a cluster to a node (1 or 2), unless it is there. That takes no part in any time.
fn place_gateway(scene: &Scene<'_>, i: usize, number: u8) -> Result<()> {
    let (cluster, gateway) = (scene.cluster(i), GATEWAYS[i]);
    let name = pod_of(cluster, gateway)?;
    let pod = cluster.get(Object::new("pod", gateway.namespace, &name))?;
    if pod["spec"]["nodeName"] == cluster.spec.node_name(number).as_str() {
        return Ok(());
    }
    let other = cluster.spec.node_name(3 - number);
    cluster.kubectl(&["cordon", &other])?;
    cluster.kubectl(&["delete", "pod", &name, "--namespace", gateway.namespace])?;
    gateway_is_ready(scene, i)?;
    scene.wait_well(TIMEOUT)?;
    cluster.kubectl(&["uncordon", &other]).map(drop)
}

fn gateway_is_ready(scene: &Scene<'_>, i: usize) -> Result<()> {
    let (cluster, gateway) = (scene.cluster(i), GATEWAYS[i]);
    wait_until("its gateway is ready", TIMEOUT, || {
        let pod = cluster.get(Object::new("pod", gateway.namespace, &pod_of(cluster, gateway)?))?;
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let is_ready = conditions.any(|of| of["type"] == "Ready" && of["status"] == "True");
        ensure!(is_ready && pod["metadata"]["deletionTimestamp"].is_null(), "{pod}");
        Ok::<_, anyhow::Error>(())
    })
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
    wait_until("the duplicate has a tunnel", TIMEOUT, || {
        let state = duplicate.peering("milan")?["state"].clone();
        ensure!(state == "Connected" || state == "Degraded", "it is {state}");
        Ok::<_, anyhow::Error>(())
    })?;
    scene.replace_duplicate(Some(duplicate));
    Ok(())
}

/// Kills a node's agent while its kubelet does not start another.
fn end_agent(scene: &Scene<'_>) -> Result<()> {
    place_gateway(scene, 0, OTHER)?;
    let rome = scene.cluster(0);
    let pod = agent_of(rome, &rome.spec.node_name(NODE))?;
    let pid = rome.process_in("liqo", &pod, "route-agent")?;
    rome.stop_kubelet(NODE)?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("killing an agent")
}

/// Starts that kubelet, and waits until another agent is ready.
fn start_agent(scene: &Scene<'_>) -> Result<()> {
    let rome = scene.cluster(0);
    let pod = agent_of(rome, &rome.spec.node_name(NODE))?;
    let container = || {
        let pod = rome.get(Object::new("pod", "liqo", &pod))?;
        Ok::<_, anyhow::Error>(pod["status"]["containerStatuses"][0].clone())
    };
    let ended = container()?;
    rome.start_kubelet(NODE)?;
    wait_until("another agent is ready", TIMEOUT, || {
        let now = container()?;
        let is_another = now["containerID"] != ended["containerID"];
        ensure!(is_another && now["ready"] == true, "{now}");
        Ok::<_, anyhow::Error>(())
    })
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
