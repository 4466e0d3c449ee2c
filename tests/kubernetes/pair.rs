//! Two clusters that weft is installed in, and what joins them.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weft_tests::kubernetes::{Image, Object};
use weft_tests::manifests::{Peering, Spelling, join};
use weft_tests::traffic::{
    HeldConnection, Service, StreamReport, Streams, TcpServer, Way, connect, http_get, ping,
};
use weft_tests::{ClusterSpec, Kubernetes, Lab, Netns, Pod, View, scrape, wait_until};

use crate::inventory::Inventory;
use crate::stage::{all_of, each, note, rome_and_milan_specs, step};
use crate::status;

/// Timeout of what takes seconds where nothing else runs: two clusters share two processors with other tests.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// Time that installing may take, on a machine that starts four nodes' worth of pods at once.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
const NODE_PORT: u16 = 30742;
pub(crate) const HTTP: u16 = 80;
const ECHO: u16 = 7007;
/// Metrics port of a gateway in a pod.
const METRICS: u16 = 8084;
const SCRAPED: Duration = Duration::from_secs(2);
/// Port of streams, in which one datagram a millisecond goes each way.
const STREAM: u16 = 7001;
const OFTEN: Duration = Duration::from_millis(1);

/// The client is rome's, the server milan's.
pub(crate) struct Pair {
    pub(crate) clusters: [Kubernetes; 2],
    peering: Peering,
    /// Pods of each cluster, one on each node.
    pub(crate) pods: Vec<Vec<Pod>>,
    /// Inventory of each cluster, before weft was installed.
    pub(crate) before: Vec<Inventory>,
}

/// The gateways, in the order of their clusters.
pub(crate) const GATEWAYS: [Object<'static>; 2] = [
    Object { kind: "gatewayclient", namespace: "liqo-tenant-milan", name: "client" },
    Object { kind: "gatewayserver", namespace: "liqo-tenant-rome", name: "server" },
];

/// Addresses and namespaces for a stream each way.
pub(crate) struct Course {
    /// rome's view of milan, and the other way round.
    views: [View; 2],
    /// Namespaces of the gateways' pods.
    gateways: Vec<Netns>,
}

/// Result of a stream each way.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) streams: Vec<StreamReport>,
    /// Packets that the kernel has dropped meanwhile since a queue was full, as no process emptied it.
    overflowed: u64,
}

/// Two clusters on one small machine: while servers of Kubernetes start, a gateway may get no processor
/// for longer than its TUN's queue lasts. In all, of a stream: two API servers that start at once took it for 1.1 s.
const STARVED: Duration = Duration::from_secs(2);

impl Traffic {
    /// Checks that weft has cut nothing. What the machine had no time for is printed in any case.
    pub(crate) fn missed_nothing(&self) -> Result<()> {
        self.missed_at_most(0)
    }

    /// The same for so many packets of both streams.
    pub(crate) fn missed_at_most(&self, packets: u64) -> Result<()> {
        let lost: u64 = self.streams.iter().map(|stream| stream.lost).sum();
        if lost > 0 {
            note(&format!("lost: {self:?}"));
        }
        let is_whole = |stream: &StreamReport| {
            let missing = OFTEN * u32::try_from(stream.lost).unwrap_or(u32::MAX);
            stream.sent > 1000 && stream.duplicated == 0 && missing < STARVED
        };
        ensure!(lost <= self.overflowed + packets && self.streams.iter().all(is_whole), "{self:?}");
        Ok(())
    }

    pub(crate) fn longest_outage(&self) -> Duration {
        self.streams.iter().map(|stream| stream.longest_outage).max().unwrap_or_default()
    }
}

impl Course {
    /// Packets dropped so far since the queue of a processor, of a gateway's TUN or of its UDP socket was
    /// full.
    fn overflowed(&self) -> Result<u64> {
        let processors = fs::read_to_string("/proc/net/softnet_stat").context("reading drops")?;
        let drops = processors.lines().map(|line| {
            let dropped = line.split_whitespace().nth(1).context("no drops")?;
            Ok(u64::from_str_radix(dropped, 16)?)
        });
        let drops = drops.sum::<Result<u64>>()?;
        // One that is gone, or not there yet, excuses nothing.
        let gateways = self.gateways.iter().flat_map(|ns| {
            let sockets = ns.run(|| fs::read_to_string("/proc/thread-self/net/snmp"));
            // The second line that begins so has the numbers, the fifth of which are these.
            let sockets = sockets.ok().and_then(|text| {
                let udp = text.rsplit_once("\nUdp: ")?.1;
                udp.split_whitespace().nth(4)?.parse::<u64>().ok()
            });
            [sockets, tun_overflows(ns)].into_iter().flatten()
        });
        Ok(drops + gateways.sum::<u64>())
    }
}

/// Overflows as the gateway in that pod counts them; the TUN is in a namespace within its own.
fn tun_overflows(pod: &Netns) -> Option<u64> {
    // In the namespace of a pod that is gone even the loopback device takes no packet.
    let stream = connect(pod, SocketAddr::from(([127, 0, 0, 1], METRICS)), SCRAPED).ok()?;
    stream.set_read_timeout(Some(SCRAPED)).ok()?;
    let text = scrape(stream).ok()?;
    let line = |line: &str| line.strip_prefix("weft_gateway_tun_overflows_total ")?.parse().ok();
    text.lines().find_map(line)
}

impl Pair {
    pub(crate) fn install(lab: &Lab, weft: &Image) -> Result<Self> {
        Self::install_on(lab, weft, rome_and_milan_specs(2), &[("a", 1), ("b", 2)])
    }

    /// The same in clusters of these specs, with these pods, each on a node.
    pub(crate) fn install_on(
        lab: &Lab,
        weft: &Image,
        specs: [ClusterSpec; 2],
        pods: &[(&str, u8)],
    ) -> Result<Self> {
        let pair = Self::prepare(lab, weft, specs, pods)?;
        pair.explained(|| {
            step("the chart is installed", || pair.each(|cluster| cluster.install_weft(TIMEOUT)))
        })?;
        Ok(pair)
    }

    /// Clusters whose nodes have the image.
    pub(crate) fn prepare(
        lab: &Lab,
        weft: &Image,
        specs: [ClusterSpec; 2],
        pods: &[(&str, u8)],
    ) -> Result<Self> {
        let clusters = step("two clusters come up", || all_of(lab, specs))?;
        let pods = step("pods run", || {
            each(&clusters, |cluster| {
                cluster.run_pods(pods).inspect_err(|_| eprintln!("{}", cluster.report()))
            })
        })?;
        step("every node has the image", || each(&clusters, |cluster| cluster.load(weft)))?;
        let [rome, milan] = &clusters;
        let mut peering = Peering::new(&rome.spec, &milan.spec, NODE_PORT);
        // The older spelling of CIDRs on one side, the newer one on the other.
        if [&milan.spec.pod_cidrs, &milan.spec.external_cidrs].iter().all(|all| all.len() == 1) {
            peering.client_spelling = Spelling::Text;
        }
        let before = each(&clusters, Inventory::of)?;
        Ok(Self { clusters, peering, pods, before })
    }

    /// Runs a step, and prints everything that may explain its failure.
    pub(crate) fn explained<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        f().inspect_err(|_| self.clusters.iter().for_each(|one| eprintln!("{}", one.report())))
    }

    pub(crate) fn each<T: Send>(
        &self,
        f: impl Fn(&Kubernetes) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        each(&self.clusters, f)
    }

    pub(crate) fn connect(&self) -> Result<()> {
        let began = Instant::now();
        for (cluster, documents) in self.clusters.iter().zip(self.documents()) {
            // The API server registers the webhook a moment after that is ready.
            wait_until("plain strings are taken", SOON, || cluster.apply(&join(&documents)))?;
        }
        self.wait_connected(SOON.saturating_sub(began.elapsed()))
    }

    /// Takes away what joins them, but for the namespaces.
    pub(crate) fn part(&self) -> Result<()> {
        for (cluster, documents) in self.clusters.iter().zip(self.documents()) {
            let is_namespace = |text: &String| text.contains("kind: Namespace");
            let rest: Vec<_> = documents.into_iter().filter(|text| !is_namespace(text)).collect();
            cluster.delete(&join(&rest))?;
        }
        Ok(())
    }

    pub(crate) fn wait_connected(&self, at_most: Duration) -> Result<()> {
        let began = Instant::now();
        let [rome, milan] = &self.clusters;
        rome.wait_connected("milan", "client", at_most)?;
        milan.wait_connected("rome", "server", at_most.saturating_sub(began.elapsed()))
    }

    /// rome's view of milan, and the other way round.
    pub(crate) fn views(&self) -> Result<[View; 2]> {
        let [rome, milan] = &self.clusters;
        Ok([rome.view(&milan.spec)?, milan.view(&rome.spec)?])
    }

    pub(crate) fn all_reach_all(&self) -> Result<()> {
        let [of_milan, of_rome] = self.views()?;
        reach(&self.pods[0], &self.pods[1], (&of_milan, &of_rome))?;
        reach(&self.pods[1], &self.pods[0], (&of_rome, &of_milan))
    }

    pub(crate) fn course(&self) -> Result<Course> {
        let gateways = self.clusters.iter().zip(GATEWAYS).map(|(cluster, gateway)| {
            Ok(cluster.pod(gateway.namespace, &pod_of(cluster, gateway)?)?.ns)
        });
        Ok(Course { views: self.views()?, gateways: gateways.collect::<Result<_>>()? })
    }

    /// Cuts rome's gateway off from the peer and from its API server.
    pub(crate) fn gateway_cut_off_is_named(&self) -> Result<()> {
        let (rome, pod) = (&self.clusters[0], &self.course()?.gateways[0]);
        pod.nft(
            "table inet fault {
                chain in { type filter hook input priority 0; udp dport != 4879 drop; }
                chain out {
                    type filter hook output priority 0;
                    tcp dport { 443, 6443 } drop;
                    udp dport != 4879 drop;
                }
            }",
        )?;
        let began = Instant::now();
        let named = wait_until("it is named", SOON, || {
            let peering = &rome.status()?["peerings"][0];
            let text = peering.to_string();
            let is_named = text.contains("cannot report whether it is connected");
            ensure!(is_named && peering["state"] != "Connected", "{text}");
            Ok::<_, anyhow::Error>(())
        });
        note(&format!("named after {:.1} s", began.elapsed().as_secs_f64()));
        pod.nft("delete table inet fault")?;
        named?;
        self.wait_connected(SOON)?;
        wait_until("all is well", SOON, || status::is_well(rome))
    }

    /// Result of a stream each way while something happens.
    pub(crate) fn streaming(&self, f: impl FnOnce() -> Result<()>) -> Result<Traffic> {
        self.streaming_by(&self.course()?, f)
    }

    /// The same where no API server can be queried for the addresses.
    pub(crate) fn streaming_by(
        &self,
        course: &Course,
        f: impl FnOnce() -> Result<()>,
    ) -> Result<Traffic> {
        let [(rome, rome_last), (milan, milan_last)] = [self.ends(0)?, self.ends(1)?];
        let [of_milan, of_rome] = &course.views;
        let ways = [(rome, milan_last, of_milan), (milan, rome_last, of_rome)];
        let ways = ways.map(|(from, to, view)| {
            let address = SocketAddr::new(view.of(to.addresses[0])?, STREAM);
            Ok(Way { from: from.ns.clone(), to: address, at: to.ns.clone() })
        });
        let ways = ways.into_iter().collect::<Result<Vec<_>>>()?;
        let before = course.overflowed()?;
        let streams = Streams::start(&ways, OFTEN, 0)?;
        let result = f();
        let streams = streams.stop();
        result?;
        Ok(Traffic { streams, overflowed: course.overflowed()?.saturating_sub(before) })
    }

    /// A connection from a pod of rome to one of milan, and its server.
    pub(crate) fn hold(&self) -> Result<(HeldConnection, TcpServer)> {
        let [of_milan, _] = self.views()?;
        let ((_, from), (_, to)) = (self.ends(0)?, self.ends(1)?);
        let server = TcpServer::start(&to.ns, ECHO, Service::Echo)?;
        let to = SocketAddr::new(of_milan.of(to.addresses[0])?, ECHO);
        Ok((HeldConnection::open(&from.ns, to)?, server))
    }

    /// First and last pod of a cluster.
    fn ends(&self, cluster: usize) -> Result<(&Pod, &Pod)> {
        let pods = &self.pods[cluster];
        pods.first().zip(pods.last()).context("a cluster has pods")
    }

    /// Rome's manifests, and milan's.
    pub(crate) fn documents(&self) -> [Vec<String>; 2] {
        [self.peering.client_documents(), self.peering.server_documents()]
    }

    /// Documents with CIDRs written in another way.
    pub(crate) fn documents_in(&self, [rome, milan]: [Spelling; 2]) -> [Vec<String>; 2] {
        let mut peering = self.peering.clone();
        peering.client_spelling = rome;
        peering.server_spelling = milan;
        [peering.client_documents(), peering.server_documents()]
    }
}

/// The pod that is a gateway, or the last one to be.
pub(crate) fn pod_of(cluster: &Kubernetes, gateway: Object<'_>) -> Result<String> {
    let list = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let by_age = ["--sort-by=.metadata.creationTimestamp", "--output=name"];
    let names = cluster.kubectl(&[&list[..], &by_age].concat())?;
    let last = names.lines().last().with_context(|| format!("{gateway} has no pod"))?;
    Ok(last.trim_start_matches("pod/").to_owned())
}

pub(crate) fn selector(gateway: Object<'_>) -> String {
    format!("networking.liqo.io/gateway-name={}", gateway.name)
}

/// Ping, and HTTP with the right source, from each to each by every family that both have.
pub(crate) fn reach(from: &[Pod], to: &[Pod], (there, back): (&View, &View)) -> Result<()> {
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = to.iter().map(serve).collect::<Result<Vec<_>>>()?;
    for source in from {
        for target in to {
            for real in &target.addresses {
                let mut all = source.addresses.iter();
                if let Some(own) = all.find(|own| own.is_ipv4() == real.is_ipv4()) {
                    let what = format!("{} reaches {} by {real}", source.name, target.name);
                    reach_one(&source.ns, there.of(*real)?, back.of(*own)?).context(what)?;
                }
            }
        }
    }
    Ok(())
}

fn reach_one(source: &Netns, address: IpAddr, seen_as: IpAddr) -> Result<()> {
    wait_until(&format!("{address} answers pings"), SOON, || {
        let stats = ping(source, address, 3)?;
        ensure!(stats.lost == 0, "{stats:?}");
        Ok(())
    })?;
    let seen = http_get(source, SocketAddr::new(address, HTTP))?;
    ensure!(seen == seen_as, "the server at {address} saw {seen}, not {seen_as}");
    Ok(())
}
