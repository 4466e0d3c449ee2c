//! ```text
//!   rome-1 (client, 192.0.2.17, then 192.0.2.29) --------- milan-1 (server, maybe known by name)
//! ```

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use weft_tests::manifests::{self, Peering, join};
use weft_tests::traffic::udp_flow;
use weft_tests::{Cluster, ClusterSpec, Pod, SWITCH_V4, SWITCH_V6, on_segment, wait_until};

use crate::scene::{
    ECHO, PORT, Scene, TIMEOUT, first_pod, play, play_with, rome_and_milan, serve, traffic_passes,
};

/// Time in which packets may be lost after a host's address changed.
const BACK: Duration = Duration::from_secs(3);
/// Time until the agent of a host whose address changed has published the new one.
const PUBLISHED: Duration = Duration::from_secs(2);
/// From the start of all programs until a server is found that is not where it was last: 2 s are for that.
const RETURNED: Duration = Duration::from_secs(8);
/// The same if its client was killed as well.
const FOUND: Duration = Duration::from_secs(5);
/// Time for which a server is away, and after which it is found elsewhere.
const AWAY: Duration = Duration::from_secs(15);
const RETURNED_ELSEWHERE: Duration = Duration::from_secs(40);
/// Until a manifest that changes no config is in force.
pub(crate) const SETTLED: Duration = Duration::from_millis(500);
/// Problem of rome-2, which has moved away from the address that its Node pins.
pub(crate) const NOT_THERE: &str = "status.addresses: found 192.0.2.18, which no device of the node has; expected \
                                    192.0.2.112 (the annotation fabric.weft.dev/pin-addresses keeps weft from \
                                    using it)";

#[test]
fn a_node_that_moves_keeps_its_peerings() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let pace = (Duration::from_millis(5), Duration::from_secs(3));
        let (report, moved) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
            std::thread::sleep(Duration::from_millis(500));
            rome.head().ip("addr del 192.0.2.17/24 dev eth0\naddr add 192.0.2.29/24 dev eth0\n\
                 route add default via 192.0.2.1\n")?;
            // As a kubelet would report it.
            rome.apply("cluster", &manifests::own(&rome.spec).replace("192.0.2.17", "192.0.2.29"))
        })?;
        moved?;
        ensure!(
            report.longest_gap < Duration::from_millis(1500),
            "{:?} without an answer",
            report.longest_gap
        );
        wait_until("the server knows the new address", TIMEOUT, || {
            let peering = milan.peering("rome")?;
            let endpoint = peering["endpoint"].as_str().unwrap_or_default();
            ensure!(endpoint.starts_with("192.0.2.29:"), "{peering}");
            ensure!(peering["state"] == "Connected", "{peering}");
            Ok::<_, anyhow::Error>(())
        })
    })
}

/// No manifest is touched. First a host without a gateway moves, then the gateway's.
#[test]
fn changed_address_of_a_host_is_found_by_its_agent() -> Result<()> {
    for specs in [rome_and_milan(2), rome_and_milan(2).map(ClusterSpec::on_ipv6)] {
        play(&specs, |scene| {
            scene.peer("rome", "milan", PORT)?;
            let milan = scene.cluster("milan");
            let _servers = serve(first_pod(milan))?;
            let (_, target) = scene.way("rome", "milan")?;
            for number in [2, 1] {
                for (sender, address) in [(2, Address::New), (1, Address::Old)] {
                    let pod = &scene.cluster("rome").nodes[sender - 1].pods[0];
                    let host = (scene.cluster("rome"), number);
                    let gap = gap_while_moving(host, (pod, target), address)?;
                    ensure!(
                        gap < BACK,
                        "rome-{number} moved to its {address:?} address, {gap:?} without an \
                         answer for the pod of rome-{sender}"
                    );
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// As where DHCP gives another address: for a second, only another uplink of the host has one.
#[test]
fn renumbered_host_does_not_move_to_another_uplink() -> Result<()> {
    play(&rome_and_milan(2), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let host = &rome.nodes[0].host;
        host.ip(
            "link add up2 type veth peer name up2-end\nlink set up2 up\nlink set up2-end up\n\
             addr add 172.16.9.2/24 dev up2\n\
             route add default via 172.16.9.1 dev up2 metric 500\n",
        )?;
        host.ip(&format!("addr del {} dev eth0\n", on_segment(rome.nodes[0].addresses[0])))?;
        std::thread::sleep(Duration::from_secs(1));
        host.ip(&format!(
            "addr add 192.0.2.111/24 dev eth0\nroute replace default via {SWITCH_V4}\n"
        ))?;
        // A host that is not back is named by then.
        std::thread::sleep(BACK);
        both_reachable(rome)
    })
}

/// The client has a fixed address for its server: it follows the server's own packets, which do not
/// wait for the next probe.
#[test]
fn moved_server_host_is_followed_by_its_client() -> Result<()> {
    for specs in [rome_and_milan(2), rome_and_milan(2).map(ClusterSpec::on_ipv6)] {
        play_with(&specs, &["--ping-interval=10s"], |scene| {
            scene.peer("rome", "milan", PORT)?;
            for (from, to) in [("rome", "milan"), ("milan", "rome")] {
                let _servers = serve(first_pod(scene.cluster(to)))?;
                let (_, target) = scene.way(from, to)?;
                let pod = &scene.cluster(from).nodes[1].pods[0];
                for address in [Address::New, Address::Old] {
                    let server = (scene.cluster("milan"), 1);
                    let gap = gap_while_moving(server, (pod, target), address)?;
                    eprintln!("{from} to {to}, {address:?} address: {gap:?} without an answer");
                    ensure!(
                        gap < BACK,
                        "milan-1 moved to its {address:?} address, {gap:?} without an answer for \
                         a pod of {from}"
                    );
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// As after a reboot or with DHCP: the client has tried other source ports meanwhile.
#[test]
fn server_back_elsewhere_after_a_while_is_found() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let [old, new] = addresses(milan, 1);
        milan.head().ip("link set eth0 down\n")?;
        std::thread::sleep(AWAY);
        let state = &rome.peering("milan")?["state"];
        ensure!(state == "Error", "after {AWAY:?} {state}");
        milan.head().ip(&format!(
            "addr del {old} dev eth0\naddr add {new} dev eth0\nlink set eth0 up\n\
             route replace default via {SWITCH_V4}\n"
        ))?;
        let start = Instant::now();
        rome.wait_connected("milan", RETURNED_ELSEWHERE)?;
        eprintln!("connected after {:?}", start.elapsed());
        Ok(())
    })
}

/// The client's gateway is killed after it has followed its server away from spec.endpoint, and again
/// while the server moves back there.
#[test]
fn restarted_client_finds_its_server_where_it_moved() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let configured = rome.peering("milan")?["endpoint"].clone();
        readdress(milan, 1, Address::New)?;
        wait_until("the client has followed", TIMEOUT, || {
            let peering = rome.peering("milan")?;
            let is_well = peering["state"] == "Connected" && peering["endpoint"] != configured;
            ensure!(is_well, "{peering}");
            Ok::<_, anyhow::Error>(())
        })?;
        let pace = (Duration::from_millis(10), Duration::from_secs(4));
        let (report, killed) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
            std::thread::sleep(Duration::from_millis(500));
            kill_gateways(rome)
        })?;
        killed?;
        eprintln!("killed: {:?} without an answer", report.longest_gap);
        ensure!(report.longest_gap < BACK, "{:?} without an answer", report.longest_gap);
        let state = &rome.peering("milan")?["state"];
        ensure!(state == "Connected", "followed without a fault, but {state}");

        let rome = scene.cluster_mut("rome");
        rome.take_program("weft-up")?.signal(Signal::SIGKILL)?;
        kill_gateways(rome)?;
        readdress(scene.cluster("milan"), 1, Address::Old)?;
        let rome = scene.cluster_mut("rome");
        let start = Instant::now();
        rome.start_up(&[])?;
        rome.wait_connected("milan", RETURNED)?;
        eprintln!("moved back: connected after {:?}", start.elapsed());
        Ok(())
    })
}

/// The client's new process knows the old address only; the server initiates from its new one, at the
/// port that the client had.
#[test]
fn restarted_client_is_found_by_its_moved_server() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let _servers = serve(first_pod(milan))?;
        let (pod, target) = scene.way("rome", "milan")?;
        let pace = (Duration::from_millis(10), Duration::from_secs(12));
        for (delay_ms, address) in [(0, Address::New), (300, Address::Old)] {
            let (report, moved) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
                std::thread::sleep(Duration::from_millis(500));
                kill_gateways(rome)?;
                std::thread::sleep(Duration::from_millis(delay_ms));
                readdress(milan, 1, address)
            })?;
            moved?;
            eprintln!("{address:?} address: {:?} without an answer", report.longest_gap);
            ensure!(report.longest_gap < FOUND, "{:?} without an answer", report.longest_gap);
            rome.wait_connected("milan", TIMEOUT)?;
            milan.wait_connected("rome", TIMEOUT)?;
        }
        Ok(())
    })
}

/// Both gateways start again, and only the server still knows where the other one is.
#[test]
fn edited_endpoint_is_named_after_a_restart() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let mut peering = scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let right = join(&peering.client_documents());
        peering.endpoint = vec!["192.0.2.250".to_owned()];
        rome.apply("milan", &join(&peering.client_documents()))?;
        let named = || {
            let (status, peering) = (rome.status()?, rome.peering("milan")?);
            let words = "spec.endpoint of the GatewayClient leads to 192.0.2.250:30742";
            ensure!(status["problems"].to_string().contains(words), "{status}");
            ensure!(peering["state"] == "Degraded", "{peering}");
            Ok::<_, anyhow::Error>(())
        };
        wait_until("it is named", TIMEOUT, named)?;
        let before = rome.processes(0, "gateway");
        kill_gateways(rome)?;
        wait_until("another gateway runs", TIMEOUT, || {
            let gateways = rome.processes(0, "gateway");
            ensure!(!gateways.is_empty() && gateways != before, "{gateways:?}");
            Ok::<_, anyhow::Error>(())
        })?;
        kill_gateways(milan)?;
        wait_until("it is named after the restart", TIMEOUT, named)?;
        rome.apply("milan", &right)?;
        rome.wait_connected("milan", TIMEOUT)
    })
}

fn kill_gateways(cluster: &Cluster) -> Result<()> {
    let kill_one = |pid| kill(Pid::from_raw(pid), Signal::SIGKILL);
    Ok(cluster.processes(0, "gateway").into_iter().try_for_each(kill_one)?)
}

/// Followed without a fault that stays; named at once if the Node's annotation forbids to follow it.
#[test]
fn pinned_address_is_named_with_its_remedy() -> Result<()> {
    play(&rome_and_milan(2), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        wait_until("both nodes are reachable", TIMEOUT, || both_reachable(rome))?;
        readdress(rome, 2, Address::New)?;
        std::thread::sleep(BACK);
        both_reachable(rome).context("its agent has not found the new address")?;
        readdress(rome, 2, Address::Old)?;
        std::thread::sleep(BACK);
        both_reachable(rome).context("its agent has not found the old address")?;

        rome.apply("cluster", &pinned(rome, 2))?;
        std::thread::sleep(SETTLED);
        readdress(rome, 2, Address::New)?;
        wait_until("the pinned address is named", BACK, || {
            let status = rome.status()?;
            let state = &status["peerings"][0]["state"];
            ensure!(state == "Degraded", "it is {state}");
            let problems = status["problems"].to_string();
            ensure!(problems.contains(NOT_THERE), "{problems}");
            Ok::<_, anyhow::Error>(())
        })?;
        readdress(rome, 2, Address::Old)?;
        wait_until("nothing is shown of it", BACK, || {
            both_reachable(rome)?;
            let problems = rome.status()?["problems"].to_string();
            ensure!(!problems.contains("192.0.2.112"), "{problems}");
            Ok::<_, anyhow::Error>(())
        })
    })
}

fn both_reachable(rome: &Cluster) -> Result<()> {
    let peering = rome.peering("milan")?;
    let is_well = peering["state"] == "Connected" && peering["nodes"]["reachable"] == 2;
    ensure!(is_well, "{peering}");
    Ok(())
}

/// A cluster's own manifests with the address of this node pinned.
pub(crate) fn pinned(cluster: &Cluster, number: u8) -> String {
    let name = format!("  name: {}\n", cluster.spec.node_name(number));
    let pin = "  annotations: {fabric.weft.dev/pin-addresses: \"true\"}\n";
    manifests::own(&cluster.spec).replace(&name, &format!("{name}{pin}"))
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Address {
    New,
    Old,
}

/// Longest time without an answer for a pod while a host takes another address.
fn gap_while_moving(
    (cluster, number): (&Cluster, u8),
    (pod, target): (&Pod, IpAddr),
    address: Address,
) -> Result<Duration> {
    let pace = (Duration::from_millis(10), Duration::from_secs(4));
    let to = SocketAddr::new(target, ECHO);
    let (report, moved) = udp_flow(&pod.ns, to, pace, || {
        std::thread::sleep(Duration::from_millis(500));
        readdress(cluster, number, address)?;
        let what = format!("the agent of {} has published it", cluster.spec.node_name(number));
        wait_until(&what, PUBLISHED, || is_published(cluster, number, address))
    })?;
    moved?;
    Ok(report.longest_gap)
}

/// Fails until the agent has published that its host has that address.
fn is_published(cluster: &Cluster, number: u8, address: Address) -> Result<()> {
    let [old, new] = addresses(cluster, number).map(|address| address.addr());
    let expected = match address {
        Address::New => json!([{"declared": old, "found": new}]),
        Address::Old => Value::Null,
    };
    let (nodes, name) = (cluster.published("nodeconfig")?, cluster.spec.node_name(number));
    let node = nodes.iter().find(|node| node["metadata"]["name"] == name.as_str());
    let moved = &node.context("it has a NodeConfig")?["status"]["moved"];
    ensure!(*moved == expected, "{moved}, not {expected}");
    Ok(())
}

/// Gives a host another address, or the one back that it had.
pub(crate) fn readdress(cluster: &Cluster, number: u8, address: Address) -> Result<()> {
    let node = &cluster.nodes[usize::from(number) - 1];
    let [old, new] = addresses(cluster, number);
    let (gone, come) = match address {
        Address::New => (old, new),
        Address::Old => (new, old),
    };
    let (default, nodad) = match old.addr() {
        IpAddr::V4(_) => (SWITCH_V4.to_string(), ""),
        IpAddr::V6(_) => (SWITCH_V6.to_string(), " nodad"),
    };
    node.host.ip(&format!(
        "addr del {gone} dev eth0\naddr add {come} dev eth0{nodad}\n\
         route replace default via {default}\n"
    ))
}

/// The address of a host, and the other one.
fn addresses(cluster: &Cluster, number: u8) -> [IpNet; 2] {
    let old = on_segment(cluster.nodes[usize::from(number) - 1].addresses[0]);
    let last = 100 + 10 * cluster.spec.number + number;
    let new = match old.addr() {
        IpAddr::V4(_) => [192, 0, 2, last].into(),
        IpAddr::V6(_) => [0x2001, 0xdb8, 2, 0, 0, 0, 0, last.into()].into(),
    };
    [old, on_segment(new)]
}

#[test]
fn the_server_may_be_known_by_a_name() -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(1))?;
    let hosts = scene.clusters[0].outside("/run/cluster/hosts");
    std::fs::write(hosts, "127.0.0.1 localhost\n192.0.2.33 gateway.milan.test\n")?;
    let bind = ["--bind", "/run/cluster/hosts", "/etc/hosts"];
    scene.clusters[0].head().command(Command::new("mount").args(bind), "")?;
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;

    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
    peering.endpoint = vec!["gateway.milan.test".to_owned()];
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    rome.wait_connected("milan", TIMEOUT)?;
    milan.wait_connected("rome", TIMEOUT)?;
    traffic_passes(rome, milan)
}
