//! Two clusters of Liqo's own network, taken over by weft one after the other, and given back, by the
//! commands of deploy/LIQO.md.
//!
//! ```text
//!   a1 -- rome-1 --+--[ switch ]--+-- milan-1 -- a1
//!   a2 -- rome-2 --+              one gateway each, Liqo's, later weft's
//! ```

mod guide;
mod offloading;

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, Machine, Object, require_liqo_network};
use weft_tests::traffic::{HeldConnection, Service, Streams, TcpServer, Way, http_get};
use weft_tests::{ClusterSpec, Kubernetes, Lab, Pod, View, skip, wait_until};

use crate::calls::list;
use crate::liqoctl::on_both;
use crate::pair::{HTTP, SOON, TIMEOUT, reach};
use crate::stage::{all_of, each, note, note_time, play, step};
use guide::Guide;

/// Longest outage of a cluster that is taken over or given back, on a machine that has the images.
const OUTAGE: Duration = Duration::from_secs(30);
/// First port of the streams, of which each has its own, and that of an echo server.
const STREAM: u16 = 7010;
const ECHO: u16 = 7002;
/// Interval of a stream's datagrams.
const OFTEN: Duration = Duration::from_millis(10);
/// Kinds of Liqo's own network, and those of its objects that may stay.
const LIQOS: &str = "wggatewayservers,wggatewayclients,routeconfigurations,internalnodes,internalfabrics,\
    genevetunnels,firewallconfigurations";

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_of_liqo_are_taken_over_and_given_back() -> Result<()> {
    play_on([("rome", 1, 2), ("milan", 2, 1)], live)
}

/// Runs a test on clusters of these IDs, numbers and nodes, unless something is missing here.
fn play_on(
    specs: [(&str, u8, u8); 2],
    test: impl FnOnce(&[Kubernetes; 2], &Image) -> Result<()>,
) -> Result<()> {
    play(|| match require_liqo_network().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-from-liqo")?;
            let specs = specs.map(|(id, number, nodes)| ClusterSpec::new(id, number, nodes));
            let clusters = step("clusters come up", || all_of(&lab, specs))?;
            let result = test(&clusters, &image);
            if result.is_err() {
                clusters.iter().for_each(explain);
            }
            result
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

/// rome's gateway is the client.
fn live(clusters: &[Kubernetes; 2], image: &Image) -> Result<()> {
    let [rome, milan] = clusters;
    let pods = each(clusters, |cluster| {
        cluster.load(image)?;
        let pods = [("a1", 1), ("a2", 2)];
        cluster.run_pods(&pods[..usize::from(cluster.spec.nodes)])
    })?;
    let guide = Guide::read()?;
    step("Liqo with its network is installed", || {
        each(clusters, |cluster| cluster.install_liqo_network(TIMEOUT))
    })?;
    step("liqoctl connects them", || {
        let line = ["network", "connect", "--gw-server-service-type=NodePort", "--wait"];
        on_both(rome, milan, &[&line[..], &["--timeout=120s", "--skip-validation"]].concat())
    })?;
    let peers = Peers { pods: &pods, views: [rome.view(&milan.spec)?, milan.view(&rome.spec)?] };
    let change = Change { peers: &peers, guide: &guide };
    step("pods reach each other by Liqo's network", || peers.reach())?;
    let both = || step("both ends are well", || change.both_are_well(clusters));
    both()?;
    each(clusters, granted)?;
    let before = each(clusters, |cluster| Kept::of(cluster, &[&OF_PEERING]))?;
    let (mut held, _servers) = peers.hold()?;
    let mut is_held =
        || step("connections are held", || held.iter_mut().try_for_each(Held::echoes));
    let mut well = || is_held().and_then(|()| both());
    let mut outages = vec![change.take_over(rome)?];
    well()?;
    step("either gateway restarts", || change.restart_gateways(clusters))?;
    both()?;
    outages.push(change.take_over(milan)?);
    well()?;
    outages.push(change.give_back(rome)?);
    well()?;
    before[0].is_there(rome)?;
    step("either gateway restarts, in the other roles", || change.restart_gateways(clusters))?;
    both()?;
    outages.push(change.give_back(milan)?);
    well()?;
    before[1].is_there(milan)?;
    let are_short = outages.iter().all(|outage| *outage < OUTAGE);
    ensure!(are_short, "clusters were cut off for {outages:?}, expected less than {OUTAGE:?}");
    Ok(())
}

pub(crate) struct Peers<'a> {
    pub(crate) pods: &'a [Vec<Pod>],
    /// rome's view of milan, and the other way round.
    pub(crate) views: [View; 2],
}

/// A change of a cluster's network while pods send.
struct Change<'a> {
    peers: &'a Peers<'a>,
    guide: &'a Guide,
}

impl Change<'_> {
    /// Returns the longest outage.
    fn take_over(&self, cluster: &Kubernetes) -> Result<Duration> {
        let id = &cluster.spec.id;
        let before = Kept::of(cluster, &[&OF_PEERING, &OF_GATEWAYS])?;
        let outage = self.peers.outage(|| {
            step(&format!("Liqo's network is switched off in {id}"), || {
                self.guide.switch_liqo_off(cluster)
            })?;
            step("weft adopts the cluster", || self.guide.adopt(cluster))?;
            let began = Instant::now();
            step("weft is installed", || self.guide.install_weft(cluster))?;
            step("pods reach each other", || self.peers.reach())?;
            note_time(began.elapsed(), "from the beginning of the installation");
            Ok(())
        })?;
        note_time(outage, &format!("longest outage while {id} was taken over"));
        before.is_there(cluster)?;
        step("weft reports it", || {
            wait_until("its peering is connected", SOON, || {
                let status = cluster.status()?;
                let peering = &status["peerings"][0];
                ensure!(peering["state"] == "Connected", "{peering}");
                Ok(())
            })
        })?;
        step("nothing of Liqo's network is left", || nothing_left(cluster))?;
        Ok(outage)
    }

    /// Returns the longest outage.
    fn give_back(&self, cluster: &Kubernetes) -> Result<Duration> {
        let id = &cluster.spec.id;
        let outage = self.peers.outage(|| {
            step(&format!("weft gives {id} back"), || self.return_to_liqo(cluster))?;
            step("pods reach each other", || self.peers.reach())
        })?;
        note_time(outage, &format!("longest outage while {id} was given back"));
        step("nothing of weft is left", || nothing_of_weft_is_left(cluster))?;
        step("Liqo's controller starts again", || self.guide.restart_liqo(cluster))?;
        Ok(outage)
    }

    fn return_to_liqo(&self, cluster: &Kubernetes) -> Result<()> {
        let tenant = tenant(cluster);
        for server in list(cluster, "gatewayservers", Some(&tenant), "")? {
            let name = server["metadata"]["name"].as_str().context("it has a name")?;
            let port = server["status"]["endpoint"]["port"].to_string();
            self.guide.set_node_port(cluster, [name, &tenant, &port])?;
        }
        self.guide.give_back(cluster)
    }

    fn restart_gateways(&self, clusters: &[Kubernetes; 2]) -> Result<()> {
        clusters.iter().try_for_each(|cluster| {
            restart_gateway(cluster)?;
            self.peers.reach()
        })
    }

    /// Both report that they are connected, and nodes of either reach the other's pods.
    fn both_are_well(&self, clusters: &[Kubernetes; 2]) -> Result<()> {
        let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
        let pods = self.peers.pods.iter().flatten();
        let _servers = pods.map(serve).collect::<Result<Vec<_>>>()?;
        for (from, to) in [(0, 1), (1, 0)] {
            let cluster = &clusters[from];
            wait_until("its Connection is connected", SOON, || is_connected(cluster))?;
            for (node, pod) in cluster.machines.iter().zip(self.peers.pods[to].iter().cycle()) {
                let address = self.peers.views[from].of(pod.addresses[0])?;
                wait_until(&format!("{} reaches {address}", node.name), SOON, || {
                    http_get(node.host.net(), SocketAddr::new(address, HTTP)).map(drop)
                })?;
            }
        }
        Ok(())
    }
}

impl Peers<'_> {
    /// Longest outage of a stream from each pod to each of the other cluster while something happens.
    pub(crate) fn outage(&self, f: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let ways = self.pairs()?.into_iter().zip(STREAM..).map(|((from, to, address), port)| {
            let to_address = SocketAddr::new(address, port);
            Way { from: from.ns.clone(), to: to_address, at: to.ns.clone() }
        });
        let streams = Streams::start(&ways.collect::<Vec<_>>(), OFTEN, 0)?;
        let result = f();
        let reports = streams.stop();
        note(&format!("{reports:?}"));
        result?;
        Ok(reports.iter().map(|report| report.longest_outage).max().unwrap_or_default())
    }

    /// A TCP connection for each pair of pods and direction, and their servers.
    fn hold(&self) -> Result<(Vec<Held>, Vec<TcpServer>)> {
        let serve = |pod: &Pod| TcpServer::start(&pod.ns, ECHO, Service::Echo);
        let servers = self.pods.iter().flatten().map(serve).collect::<Result<_>>()?;
        let held = self.pairs()?.into_iter().map(|(from, to, address)| {
            let name = format!("{} to {}", from.name, to.name);
            let connection = HeldConnection::open(&from.ns, SocketAddr::new(address, ECHO));
            Ok(Held { connection: connection.with_context(|| name.clone())?, name })
        });
        Ok((held.collect::<Result<_>>()?, servers))
    }

    /// Each pod with each of the other cluster, and its address as the first one's cluster sees it.
    fn pairs(&self) -> Result<Vec<(&Pod, &Pod, IpAddr)>> {
        let mut pairs = Vec::new();
        for (from, to) in [(0, 1), (1, 0)] {
            for from_pod in &self.pods[from] {
                for to_pod in &self.pods[to] {
                    let address = self.views[from].of(to_pod.addresses[0])?;
                    pairs.push((from_pod, to_pod, address));
                }
            }
        }
        Ok(pairs)
    }

    pub(crate) fn reach(&self) -> Result<()> {
        let ([there, back], [of_rome, of_milan]) = (&self.views, [&self.pods[0], &self.pods[1]]);
        reach(of_rome, of_milan, (there, back))?;
        reach(of_milan, of_rome, (back, there))
    }
}

/// A connection that outlives all changes.
struct Held {
    /// Its pods.
    name: String,
    connection: HeldConnection,
}

impl Held {
    fn echoes(&mut self) -> Result<()> {
        self.connection.echoes(SOON).map(drop).with_context(|| self.name.clone())
    }
}

/// Deletes the pod of the gateway, and waits for another.
fn restart_gateway(cluster: &Kubernetes) -> Result<()> {
    let tenant = tenant(cluster);
    let pods = ["--namespace", &tenant, "--selector=networking.liqo.io/component=gateway"];
    cluster.kubectl(&[&["delete", "pods", "--grace-period=1"], &pods[..]].concat())?;
    wait_until("another pod", SOON, || {
        let ready = ["wait", "pods", "--for=condition=Ready", "--timeout=30s"];
        cluster.kubectl(&[&ready[..], &pods].concat()).map(drop)
    })
}

fn is_connected(cluster: &Kubernetes) -> Result<()> {
    let connections = list(cluster, "connections", Some(&tenant(cluster)), "")?;
    let values: Vec<_> = connections.iter().map(|one| &one["status"]["value"]).collect();
    ensure!(values == ["Connected"], "{}: {connections:?}", cluster.spec.id);
    Ok(())
}

/// The namespace of the peering.
fn tenant(cluster: &Kubernetes) -> String {
    let peer = if cluster.spec.id == "rome" { "milan" } else { "rome" };
    format!("liqo-tenant-{peer}")
}

/// Kind, selector, and fields.
type Fields = (&'static str, &'static str, [&'static str; 3]);

/// Remaps, and keys, of the namespace of the peering.
const OF_PEERING: [Fields; 3] = [
    ("configurations", "", ["/metadata/uid", "/spec/remote", "/status/remote"]),
    ("publickeies", "", ["/metadata/uid", "/spec", "/spec/publicKey"]),
    ("secrets", "networking.liqo.io/gateway-resource", ["/metadata/uid", "/data", "/type"]),
];
/// Ways to the server, of the same namespace.
const OF_GATEWAYS: [Fields; 3] = [
    ("services", "", ["/metadata/uid", "/spec/ports/0/nodePort", "/spec/clusterIP"]),
    ("gatewayservers", "", ["/metadata/uid", "/spec/endpoint", "/status/endpoint/port"]),
    ("gatewayclients", "", ["/metadata/uid", "/spec/endpoint", "/spec/mtu"]),
];
/// Prefixes and addresses of all namespaces.
const OF_IPAM: [Fields; 2] = [
    ("networks", "", ["/metadata/uid", "/spec", "/status"]),
    ("ips.ipam.liqo.io", "", ["/metadata/uid", "/spec", "/status"]),
];

/// Fields of objects that stay as they are.
struct Kept {
    of: Vec<&'static [Fields]>,
    objects: Vec<Value>,
}

impl Kept {
    /// Those of the namespace of the peering, and [`OF_IPAM`].
    fn of(cluster: &Kubernetes, of: &[&'static [Fields]]) -> Result<Self> {
        Ok(Self { of: of.to_vec(), objects: read(cluster, of)? })
    }

    /// Fails unless the same objects are there as before, and no other ones but weft's own Networks and IPs.
    fn is_there(&self, cluster: &Kubernetes) -> Result<()> {
        let (before, after) = (&self.objects, read(cluster, &self.of)?);
        let lost: Vec<_> = before.iter().filter(|object| !after.contains(object)).collect();
        let is_new = |object: &&Value| {
            !before.contains(object) && OF_IPAM.iter().all(|(kind, ..)| object[0] != *kind)
        };
        let new: Vec<_> = after.iter().filter(is_new).collect();
        ensure!(lost.is_empty() && new.is_empty(), "{}: {lost:#?}, {new:#?}", cluster.spec.id);
        Ok(())
    }
}

fn read(cluster: &Kubernetes, of: &[&[Fields]]) -> Result<Vec<Value>> {
    let tenant = tenant(cluster);
    let of_tenant = of.iter().copied().flatten().map(|fields| (Some(tenant.as_str()), fields));
    let mut objects = Vec::new();
    for (namespace, (kind, labels, pointers)) in
        of_tenant.chain(OF_IPAM.iter().map(|of| (None, of)))
    {
        for object in list(cluster, kind, namespace, labels)? {
            let fields = pointers.map(|pointer| object.pointer(pointer).cloned());
            let metadata = &object["metadata"];
            objects.push(json!([kind, metadata["namespace"], metadata["name"], fields]));
        }
    }
    Ok(objects)
}

/// Waits until all prefixes and addresses are granted.
fn granted(cluster: &Kubernetes) -> Result<()> {
    wait_until(&format!("all is granted in {}", cluster.spec.id), SOON, || {
        for (kind, labels, _) in OF_IPAM {
            let objects = list(cluster, kind, None, labels)?;
            let waits = objects.iter().find(|object| object["status"].is_null());
            ensure!(waits.is_none() && !objects.is_empty(), "{kind}: {waits:?}");
        }
        Ok(())
    })
}

fn nothing_left(cluster: &Kubernetes) -> Result<()> {
    let line = ["get", LIQOS, "--all-namespaces", "--output=name"];
    wait_until("Kubernetes has collected the rest", SOON, || {
        let left = cluster.kubectl(&line)?;
        // Liqo's chart has it with its network off, too.
        ensure!(left.lines().all(|name| name.ends_with("/gw-mss-clamping")), "{left}");
        cluster.machines.iter().try_for_each(nothing_left_on)
    })?;
    let again = cluster.adopt(&[])?;
    ensure!(again.is_empty(), "a second run: {again}");
    let tenant = cluster.get(Object::new("namespace", "", &tenant(cluster)))?;
    ensure!(tenant["status"]["phase"] == "Active", "{tenant}");
    Ok(())
}

fn nothing_left_on(node: &Machine) -> Result<()> {
    none_of(node, "nft list tables", |line| !is_not_liqos(line))
}

/// After weft is uninstalled. Definitions stay.
fn nothing_of_weft_is_left(cluster: &Kubernetes) -> Result<()> {
    let kinds = "nodeconfigs,gatewayconfigs,gatewayrecords,fabricrecords";
    wait_until("Kubernetes has collected the rest", SOON, || {
        let left = cluster.kubectl(&["get", kinds, "--all-namespaces", "--output=name"])?;
        ensure!(left.is_empty(), "{left}");
        let webhooks = ["get", "mutatingwebhookconfigurations", "--output=name"];
        let webhooks = cluster.kubectl(&webhooks)?;
        ensure!(!webhooks.contains("weft"), "{webhooks}");
        let mut nodes = cluster.machines.iter();
        nodes.try_for_each(|node| none_of(node, "nft list ruleset", is_wefts))
    })
}

/// Fails if a line of a node's rules, devices and routes is such a one.
fn none_of(node: &Machine, nft: &str, is_one: impl Fn(&str) -> bool) -> Result<()> {
    let mut shell = Command::new("sh");
    let script = format!(
        "set -e; {nft}; ip rule; ip -6 rule; ip -o link
         ip route show table all; ip -6 route show table all
         for save in iptables-save ip6tables-save iptables-legacy-save ip6tables-legacy-save; do
           if command -v $save >/dev/null; then $save; fi
         done"
    );
    let all = node.host.command(shell.args(["-c", &script]), "")?;
    let left: Vec<_> = all.lines().filter(|line| is_one(line)).collect();
    ensure!(left.is_empty(), "{}: {left:#?}", node.name);
    Ok(())
}

/// True for a table, rule, device or route of weft, Kubernetes or the kernel.
fn is_not_liqos(line: &str) -> bool {
    let is_of = |names: &[&str]| names.iter().any(|name| line.contains(name));
    if line.contains("lookup ") {
        is_of(&["lookup local", "lookup main", "lookup default", "lookup 18952", "lookup 18953"])
    } else if line.starts_with("table ") {
        is_of(&["weft", "kube-proxy", "cni"])
    } else if line.contains(" table ") {
        is_of(&["table local", "table 18952", "table 18953"])
    } else {
        !is_of(&[" liqo", "LIQO"])
    }
}

/// True for a table, rule, device or route of weft: routes have its protocol, rules in chains of others a comment.
fn is_wefts(line: &str) -> bool {
    let parts = ["weft", "proto 119", "lookup 18952", "lookup 18953", "table 18952", "table 18953"];
    parts.iter().any(|part| line.contains(part))
}

fn explain(cluster: &Kubernetes) {
    eprintln!("{}", cluster.report());
    let selectors = [
        "app.kubernetes.io/part-of=liqo",
        "networking.liqo.io/component=gateway",
        "offloading.liqo.io/component=virtual-kubelet",
    ];
    for namespace in ["liqo", &tenant(cluster)] {
        selectors.iter().for_each(|one| eprintln!("{}", cluster.logs(namespace, one)));
    }
    let kinds =
        "connections,networks,ips,foreignclusters,virtualnodes,shadowendpointslices,endpointslices";
    let all = cluster.kubectl(&["get", kinds, "--all-namespaces", "--output=yaml"]);
    eprintln!("{}", all.unwrap_or_else(|error| format!("{error:#}")));
}
