//! Common beginning of most tests.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{Pinger, Service, TcpServer, UdpEcho, bulk, http_get};
use weft_tests::{Cluster, ClusterSpec, Lab, Netns, Pod, wait_until};

/// No peering takes longer to come up, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
/// Time within which a changed manifest must be in the kernel.
pub(crate) const SOON: Duration = Duration::from_secs(1);

pub(crate) const HTTP: u16 = 80;
pub(crate) const SINK: u16 = 9000;
pub(crate) const ECHO: u16 = 7;
pub(crate) const PORT: u16 = 30742;

/// Clusters on one segment. Fields are dropped in this order: the switch last.
pub(crate) struct Scene {
    pub(crate) clusters: Vec<Cluster>,
    pub(crate) lab: Lab,
}

/// Builds the clusters, starts weft on all of them, and runs a test. If that fails, everything that
/// may help is printed first.
pub(crate) fn play(
    specs: &[ClusterSpec],
    test: impl FnOnce(&mut Scene) -> Result<()>,
) -> Result<()> {
    play_with(specs, &[], test)
}

/// Runs the test with these options for `weft up`.
pub(crate) fn play_with(
    specs: &[ClusterSpec],
    options: &[&str],
    test: impl FnOnce(&mut Scene) -> Result<()>,
) -> Result<()> {
    let mut scene = Scene::build(specs)?;
    let result = scene.clusters.iter_mut().try_for_each(|cluster| cluster.start_with(options));
    let result = result.and_then(|()| test(&mut scene));
    if result.is_err() {
        scene.clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
    }
    result
}

/// Rome and milan with so many nodes each, and the same addresses.
pub(crate) fn rome_and_milan(nodes: u8) -> [ClusterSpec; 2] {
    [ClusterSpec::new("rome", 1, nodes), ClusterSpec::new("milan", 2, nodes)]
}

impl Scene {
    pub(crate) fn build(specs: &[ClusterSpec]) -> Result<Self> {
        let lab = Lab::new(&format!("weft-test-{}", std::process::id()))?;
        let clusters = specs.iter().map(|spec| Cluster::new(&lab, spec.clone()));
        Ok(Self { clusters: clusters.collect::<Result<_>>()?, lab })
    }

    pub(crate) fn cluster(&self, id: &str) -> &Cluster {
        self.clusters.iter().find(|cluster| cluster.spec.id == id).expect("the scene has it")
    }

    pub(crate) fn cluster_mut(&mut self, id: &str) -> &mut Cluster {
        self.clusters.iter_mut().find(|cluster| cluster.spec.id == id).expect("the scene has it")
    }

    /// Peers two clusters and waits until both are connected.
    pub(crate) fn peer(&self, client: &str, server: &str, port: u16) -> Result<Peering> {
        let (client, server) = (self.cluster(client), self.cluster(server));
        let peering = Peering::new(&client.spec, &server.spec, port);
        client.apply(&server.spec.id, &join(&peering.client_documents()))?;
        server.apply(&client.spec.id, &join(&peering.server_documents()))?;
        client.wait_connected(&server.spec.id, TIMEOUT)?;
        server.wait_connected(&client.spec.id, TIMEOUT)?;
        Ok(peering)
    }

    /// The first pod of a cluster, and the address by which it sees the first pod of another.
    pub(crate) fn way(&self, from: &str, to: &str) -> Result<(Pod, IpAddr)> {
        let (from, to) = (self.cluster(from), self.cluster(to));
        let target = from.view(&to.spec)?.of(first_pod(to).addresses[0])?;
        Ok((first_pod(from).clone(), target))
    }
}

pub(crate) fn first_pod(cluster: &Cluster) -> &Pod {
    &cluster.nodes[0].pods[0]
}

/// An HTTP server, a sink and a UDP echo in a pod.
pub(crate) struct Servers {
    _http: TcpServer,
    _sink: TcpServer,
    _echo: UdpEcho,
}

pub(crate) fn serve(pod: &Pod) -> Result<Servers> {
    Ok(Servers {
        _http: TcpServer::start(&pod.ns, HTTP, Service::Http)?,
        _sink: TcpServer::start(&pod.ns, SINK, Service::Sink)?,
        _echo: UdpEcho::start(&pod.ns, ECHO)?,
    })
}

/// Ping, HTTP with the right source, and a bulk transfer from every pod of one cluster to every
/// pod of the other, in every family they have; then ping from every node itself.
pub(crate) fn traffic_passes(from: &Cluster, to: &Cluster) -> Result<()> {
    let (there, back) = (from.view(&to.spec)?, to.view(&from.spec)?);
    let _servers = to.pods().map(serve).collect::<Result<Vec<_>>>()?;
    for source in from.pods() {
        for target in to.pods() {
            for (own, real) in source.addresses.iter().zip(&target.addresses) {
                let address = there.of(*real)?;
                pod_reaches(source, address, back.of(*own)?)
                    .with_context(|| format!("{} to {} by {address}", source.name, target.name))?;
            }
        }
    }
    let target = there.of(first_pod(to).addresses[0])?;
    from.nodes.iter().try_for_each(|node| answers(node.host.net(), target))
}

fn pod_reaches(source: &Pod, address: IpAddr, seen_as: IpAddr) -> Result<()> {
    answers(&source.ns, address)?;
    let client = http_get(&source.ns, SocketAddr::new(address, HTTP))?;
    ensure!(client == seen_as, "the server saw {client}, expected {seen_as}");
    bulk(&source.ns, SocketAddr::new(address, SINK), 3_000_000).map(drop)
}

/// Three pings in a row come back, within a second of Connected at the latest.
pub(crate) fn answers(ns: &Netns, address: IpAddr) -> Result<()> {
    answers_within(ns, address, SOON)
}

/// The same behind another WireGuard, which repeats a handshake every five seconds.
pub(crate) fn answers_in_time(ns: &Netns, address: IpAddr) -> Result<()> {
    answers_within(ns, address, TIMEOUT)
}

fn answers_within(ns: &Netns, address: IpAddr, time: Duration) -> Result<()> {
    let pinger = Pinger::new(ns, address)?;
    let mut sequence = 0;
    wait_until(&format!("{address} answers three pings in a row"), time, || {
        for _ in 0..3 {
            sequence += 1;
            // One that is lost while a gateway starts must not take the time of all.
            let result = pinger.echo(sequence, 56, SOON / 4)?;
            ensure!(result.is_ok(), "{result:?}");
        }
        Ok::<_, anyhow::Error>(())
    })
}
