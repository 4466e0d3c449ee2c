//! Packets get through, from everywhere to everywhere.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use weft_tests::traffic::{Service, TcpServer, bulk, http_get, ping};
use weft_tests::{Cluster, Netns, Pod, View, wait_until};

use crate::TIMEOUT;

const HTTP: u16 = 8080;
const SINK: u16 = 9000;

/// Ping, HTTP and a bulk transfer between all pods, both ways, then from the nodes themselves.
pub(crate) fn prove(rome: &Cluster, milan: &Cluster, bytes: u64) -> Result<()> {
    let view = |cluster: &Cluster, peer: &Cluster| {
        let what = format!("how {} sees {}", cluster.spec.id, peer.spec.id);
        wait_until(&what, TIMEOUT, || cluster.view(&peer.spec))
    };
    let views = (view(rome, milan)?, view(milan, rome)?);
    println!();
    for (cluster, peer, view) in [(rome, milan, &views.0), (milan, rome, &views.1)] {
        for (remote, local) in &view.0 {
            println!("  {} sees {}'s {remote} as {local}", cluster.spec.id, peer.spec.id);
        }
    }
    for (_, local) in &views.0.0 {
        let clash = views.1.0.iter().find(|(_, other)| other.overlaps(local));
        ensure!(clash.is_none(), "both see the other as {local}, so that addresses prove nothing");
    }
    let _servers = rome.pods().chain(milan.pods()).map(serve).collect::<Result<Vec<_>>>()?;
    println!(
        "\n  {:<18}{:<18}{:<16}{:>9}  {:<16}{:>13}",
        "FROM", "TO", "BY ADDRESS", "PING", "IS SEEN AS", "BULK TCP"
    );
    let sides = [(rome, milan, &views.0, &views.1), (milan, rome, &views.1, &views.0)];
    for (from, to, there, back) in sides {
        for source in from.pods() {
            for target in to.pods() {
                let seen_as = back.of(source.addresses[0])?;
                pod_to_pod(source, target, (there, seen_as), bytes)
                    .with_context(|| format!("from {} to {}", source.name, target.name))?;
            }
        }
    }
    for (from, to, there, back) in sides {
        for node in &from.nodes {
            for target in to.pods() {
                let name = node.host.name();
                host_to_pod(name, node.host.net(), target, (there, back))
                    .with_context(|| format!("from node {name} to {}", target.name))?;
            }
        }
    }
    Ok(())
}

fn serve(pod: &Pod) -> Result<[TcpServer; 2]> {
    Ok([
        TcpServer::start(&pod.ns, HTTP, Service::Http)?,
        TcpServer::start(&pod.ns, SINK, Service::Sink)?,
    ])
}

fn pod_to_pod(
    source: &Pod,
    target: &Pod,
    (there, seen_as): (&View, IpAddr),
    bytes: u64,
) -> Result<()> {
    let address = there.of(target.addresses[0])?;
    let round_trip = ping_all(&source.ns, address)?;
    let client = http_get(&source.ns, SocketAddr::new(address, HTTP)).context("HTTP")?;
    ensure!(client == seen_as, "{} was seen as {client}, expected {seen_as}", source.name);
    let report = bulk(&source.ns, SocketAddr::new(address, SINK), bytes).context("bulk TCP")?;
    println!(
        "  {:<18}{:<18}{:<16}{:>6.2} ms  {:<16}{:>6.0} Mbit/s",
        source.name,
        target.name,
        address,
        round_trip,
        client,
        report.megabits_per_second()
    );
    Ok(())
}

/// A node is no pod: its peer sees it by an address of the external CIDR.
fn host_to_pod(
    name: &str,
    host: &Netns,
    target: &Pod,
    (there, back): (&View, &View),
) -> Result<()> {
    let address = there.of(target.addresses[0])?;
    let round_trip = ping_all(host, address)?;
    let client = http_get(host, SocketAddr::new(address, HTTP)).context("HTTP")?;
    let (_, external) = back.0.last().context("the peer has no external CIDR")?;
    ensure!(external.contains(client), "{name} was seen as {client}, expected one of {external}");
    println!(
        "  {:<18}{:<18}{:<16}{:>6.2} ms  {:<16}{:>13}",
        format!("{name} itself"),
        target.name,
        address,
        round_trip,
        client,
        "-"
    );
    Ok(())
}

/// Median in milliseconds of five that all came back. On a machine that is busy otherwise, the
/// fabric may need a second attempt.
fn ping_all(ns: &Netns, to: IpAddr) -> Result<f64> {
    let stats = wait_until(&format!("{to} answers"), TIMEOUT, || {
        let stats = ping(ns, to, 5).context("ping")?;
        ensure!(stats.lost == 0, "{} of {} pings were lost", stats.lost, stats.sent);
        Ok::<_, anyhow::Error>(stats)
    })?;
    Ok(stats.median.as_secs_f64() * 1e3)
}
