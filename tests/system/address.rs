//! ```text
//!   rome: pods on two nodes --- rome-1 ======== milan-1 --- printer (no pod, knows no cluster)
//!                                               milan-2 --- pods
//!   milan: IP resources, addresses of its external CIDRs that stand for printer and for a pod
//! ```
//!
//! IPv4 and IPv6 everywhere.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use weft_tests::traffic::{Service, TcpServer, connect, http_get};
use weft_tests::{Cluster, Families, Host, Pod, manifests, on_segment, wait_until};

use crate::scene::{HTTP, PORT, SOON, Scene, TIMEOUT, first_pod, play, rome_and_milan};

#[test]
fn outside_host_is_reached_in_both_families() -> Result<()> {
    play(&dual_stack(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let printer = printer(scene)?;
        let _server = TcpServer::start(printer.net(), HTTP, Service::Http)?;
        let milan = scene.cluster("milan");
        let nodes: Vec<_> = milan.nodes.iter().flat_map(|node| node.addresses.clone()).collect();
        for target in printer_addresses() {
            let granted = grant(milan, target, true)?;
            let address = scene.cluster("rome").view(&milan.spec)?.of(granted)?;
            for pod in scene.cluster("rome").pods() {
                let seen = reaches(pod, address)?;
                ensure!(nodes.contains(&seen), "{target} saw {seen}, which is no node of milan");
            }
            for pod in milan.pods() {
                let seen = reaches(pod, granted)?;
                ensure!(nodes.contains(&seen), "{target} saw {seen}, which is no node of milan");
            }
            for node in &milan.nodes {
                let to = SocketAddr::new(granted, HTTP);
                http_get(node.host.net(), to).context(node.host.name().to_owned())?;
            }
        }
        Ok(())
    })
}

#[test]
fn routed_outside_host_sees_pod_address() -> Result<()> {
    play(&dual_stack(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let printer = printer(scene)?;
        let _server = TcpServer::start(printer.net(), HTTP, Service::Http)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let (there, back) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
        let targets = printer_addresses();
        for (i, target) in targets.into_iter().enumerate() {
            let via = milan.nodes[0].addresses[i];
            for (_, seen) in back.0.iter().filter(|(_, seen)| seen.is_ipv4() == via.is_ipv4()) {
                printer.ip(&format!("route add {seen} via {via}\n"))?;
            }
            let granted = grant(milan, target, false)?;
            for pod in rome.pods() {
                let (seen, expected) =
                    (reaches(pod, there.of(granted)?)?, back.of(pod.addresses[i])?);
                ensure!(seen == expected, "{target} saw {seen}, expected {expected}");
            }
            for pod in milan.pods() {
                reaches(pod, granted)?;
            }
        }
        Ok(())
    })
}

#[test]
fn pod_is_reached_by_two_more_addresses() -> Result<()> {
    play(&dual_stack(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let (there, back) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
        // The egress node is the first: the pod is on another one.
        let server = &milan.nodes[1].pods[0];
        let _server = TcpServer::start(&server.ns, HTTP, Service::Http)?;
        for (i, target) in server.addresses.iter().enumerate() {
            let two =
                [grant_as("one", milan, *target, false)?, grant_as("two", milan, *target, false)?];
            ensure!(two[0] != two[1], "{} was granted twice", two[0]);
            for granted in two {
                for pod in rome.pods() {
                    let (seen, expected) =
                        (reaches(pod, there.of(granted)?)?, back.of(pod.addresses[i])?);
                    ensure!(seen == expected, "{target} saw {seen}, expected {expected}");
                }
                let neighbour = first_pod(milan);
                let seen = reaches(neighbour, granted)?;
                ensure!(seen == neighbour.addresses[i], "{target} saw {seen}");
            }
        }
        Ok(())
    })
}

#[test]
fn changed_target_is_reached_within_a_second() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let printer = printer(scene)?;
        let _printer = TcpServer::start(printer.net(), HTTP, Service::Http)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let [nobody, target] = [[192, 0, 2, 201].into(), printer_addresses()[0]];
        let granted = grant(milan, nobody, true)?;
        ensure!(grant(milan, target, true)? == granted, "another was granted");
        let address = rome.view(&milan.spec)?.of(granted)?;
        std::thread::sleep(SOON);
        let (pod, to) = (first_pod(rome), SocketAddr::new(address, HTTP));
        // TCP would try again after a second.
        connect(&pod.ns, to, SOON / 2).context("its first packet")?;
        http_get(&pod.ns, to).map(drop)
    })
}

fn dual_stack() -> [weft_tests::ClusterSpec; 2] {
    rome_and_milan(2).map(|spec| {
        let mut spec = spec.dual_stack();
        spec.underlay = Families::Both;
        spec
    })
}

fn printer_addresses() -> [IpAddr; 2] {
    [[192, 0, 2, 200].into(), [0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x200].into()]
}

fn printer(scene: &Scene) -> Result<Host> {
    scene.lab.machine("printer", &printer_addresses().map(on_segment))
}

/// The address that a cluster gives to a target.
pub(crate) fn grant(cluster: &Cluster, target: IpAddr, masquerade: bool) -> Result<IpAddr> {
    grant_as("ip", cluster, target, masquerade)
}

fn grant_as(name: &str, cluster: &Cluster, target: IpAddr, masquerade: bool) -> Result<IpAddr> {
    let name = format!("{name}-v{}", if target.is_ipv4() { 4 } else { 6 });
    cluster.apply(&name, &manifests::ip(&name, target, masquerade))?;
    wait_until("an address is granted", TIMEOUT, || {
        let ip: serde_json::Value =
            serde_json::from_str(&cluster.weft(&["get", "ip", &name, "-o", "json"])?)?;
        let granted = ip["status"]["ip"].as_str().with_context(|| format!("none: {ip}"))?;
        Ok::<IpAddr, anyhow::Error>(granted.parse()?)
    })
}

/// Waits until a new address works; whom the server saw.
pub(crate) fn reaches(pod: &Pod, address: IpAddr) -> Result<IpAddr> {
    let what = format!("{} reaches {address}", pod.name);
    wait_until(&what, TIMEOUT, || {
        connect(&pod.ns, SocketAddr::new(address, HTTP), SOON).map(drop)
    })?;
    http_get(&pod.ns, SocketAddr::new(address, HTTP))
}
