//! Two clusters of Liqo's own network, taken over by weft one after the other, and given back.
//!
//! ```text
//!   a -- Liqo's gateway, later weft's -- rome-1 --+--[ switch ]--+-- milan-1 -- the same -- a
//! ```

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{Image, Object, require_liqo_network};
use weft_tests::traffic::{HeldConnection, Service, Streams, TcpServer, Way};
use weft_tests::{ClusterSpec, Kubernetes, Lab, Pod, View, skip, wait_until};

use crate::calls::list;
use crate::liqoctl::on_both;
use crate::pair::{SOON, TIMEOUT, reach};
use crate::stage::{all_of, each, note, note_time, play, step};

/// Longest outage of a cluster that is taken over or given back, on a machine that has the images.
const OUTAGE: Duration = Duration::from_secs(30);
/// Ports of streams and of an echo server.
const STREAM: u16 = 7001;
const ECHO: u16 = 7002;
/// Interval of a stream's datagrams.
const OFTEN: Duration = Duration::from_millis(10);
/// Kinds of Liqo's own network, and those of its objects that may stay.
const LIQOS: &str = "wggatewayservers,wggatewayclients,routeconfigurations,internalnodes,internalfabrics,\
    genevetunnels,firewallconfigurations";

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_of_liqo_are_taken_over_and_given_back() -> Result<()> {
    play(|| match require_liqo_network().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-from-liqo")?;
            let specs = [("rome", 1), ("milan", 2)].map(|(id, n)| ClusterSpec::new(id, n, 1));
            let clusters = step("clusters come up", || all_of(&lab, specs))?;
            let result = live(&clusters, &image);
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
        cluster.run_pods(&[("a", 1)])
    })?;
    step("Liqo with its network is installed", || {
        each(clusters, |cluster| cluster.install_liqo_network(TIMEOUT))
    })?;
    step("liqoctl connects them", || {
        let line = ["network", "connect", "--gw-server-service-type=NodePort", "--wait"];
        on_both(rome, milan, &[&line[..], &["--timeout=120s", "--skip-validation"]].concat())
    })?;
    let peers = Peers { pods: &pods, views: [rome.view(&milan.spec)?, milan.view(&rome.spec)?] };
    step("pods reach each other by Liqo's network", || peers.reach())?;
    let peerings = each(clusters, |cluster| kept(cluster, &OF_PEERING))?;
    let (mut held, _server) = peers.hold()?;
    let mut is_held = || step("a connection is held", || held.echoes(SOON).map(drop));
    peers.take_over(rome)?;
    is_held()?;
    step("either gateway restarts", || peers.restart_gateways(clusters))?;
    peers.take_over(milan)?;
    is_held()?;
    peers.give_back(rome)?;
    is_held()?;
    unchanged(rome, &OF_PEERING, &peerings[0])?;
    step("either gateway restarts, in the other roles", || peers.restart_gateways(clusters))?;
    peers.give_back(milan)?;
    is_held()?;
    unchanged(milan, &OF_PEERING, &peerings[1])
}

pub(crate) struct Peers<'a> {
    pub(crate) pods: &'a [Vec<Pod>],
    /// rome's view of milan, and the other way round.
    pub(crate) views: [View; 2],
}

impl Peers<'_> {
    fn take_over(&self, cluster: &Kubernetes) -> Result<()> {
        let id = &cluster.spec.id;
        let before = [kept(cluster, &OF_PEERING)?, kept(cluster, &OF_GATEWAYS)?];
        let outage = self.outage(|| {
            step(&format!("Liqo's network is switched off in {id}"), || {
                cluster.switch_liqo_network(false)
            })?;
            step("weft adopts the cluster", || cluster.adopt(&[]))?;
            let began = Instant::now();
            let more = ["--set=networking.fabric.config.removeLiqo=true"];
            step("weft is installed", || cluster.install_weft_with(&more, TIMEOUT))?;
            step("pods reach each other", || self.reach())?;
            note_time(began.elapsed(), "from the beginning of the installation");
            Ok(())
        })?;
        note_time(outage, &format!("longest outage while {id} was taken over"));
        ensure!(outage < OUTAGE, "{id} was cut off for {outage:?}, longer than {OUTAGE:?}");
        unchanged(cluster, &OF_PEERING, &before[0])?;
        unchanged(cluster, &OF_GATEWAYS, &before[1])?;
        step("weft reports it", || {
            wait_until("its peering is connected", SOON, || {
                let status = cluster.status()?;
                let peering = &status["peerings"][0];
                ensure!(peering["state"] == "Connected", "{peering}");
                Ok(())
            })
        })?;
        step("nothing of Liqo's network is left", || nothing_left(cluster))
    }

    fn give_back(&self, cluster: &Kubernetes) -> Result<()> {
        let id = &cluster.spec.id;
        let outage = self.outage(|| {
            step(&format!("weft gives {id} back"), || give_back(cluster))?;
            step("pods reach each other", || self.reach())
        })?;
        note_time(outage, &format!("longest outage while {id} was given back"));
        ensure!(outage < OUTAGE, "{id} was cut off for {outage:?}, longer than {OUTAGE:?}");
        Ok(())
    }

    /// Longest outage of a stream each way while something happens.
    pub(crate) fn outage(&self, f: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let ways = [(0, 1), (1, 0)].map(|(from, to)| {
            let [from_pod, to_pod] = [&self.pods[from][0], &self.pods[to][0]];
            let address = SocketAddr::new(self.views[from].of(to_pod.addresses[0])?, STREAM);
            Ok(Way { from: from_pod.ns.clone(), to: address, at: to_pod.ns.clone() })
        });
        let ways = ways.into_iter().collect::<Result<Vec<_>>>()?;
        let streams = Streams::start(&ways, OFTEN, 0)?;
        let result = f();
        let reports = streams.stop();
        note(&format!("{reports:?}"));
        result?;
        Ok(reports.iter().map(|report| report.longest_outage).max().unwrap_or_default())
    }

    /// A TCP connection from rome to milan, and its server.
    fn hold(&self) -> Result<(HeldConnection, TcpServer)> {
        let [from, to] = [&self.pods[0][0], &self.pods[1][0]];
        let server = TcpServer::start(&to.ns, ECHO, Service::Echo)?;
        let to = SocketAddr::new(self.views[0].of(to.addresses[0])?, ECHO);
        Ok((HeldConnection::open(&from.ns, to)?, server))
    }

    pub(crate) fn reach(&self) -> Result<()> {
        let ([there, back], [of_rome, of_milan]) = (&self.views, [&self.pods[0], &self.pods[1]]);
        reach(of_rome, of_milan, (there, back))?;
        reach(of_milan, of_rome, (back, there))
    }

    fn restart_gateways(&self, clusters: &[Kubernetes; 2]) -> Result<()> {
        clusters.iter().try_for_each(|cluster| self.restart_gateway(cluster))
    }

    /// Deletes the pod of the gateway, and waits for another.
    fn restart_gateway(&self, cluster: &Kubernetes) -> Result<()> {
        let tenant = tenant(cluster);
        let pods = ["--namespace", &tenant, "--selector=networking.liqo.io/component=gateway"];
        cluster.kubectl(&[&["delete", "pods", "--grace-period=1"], &pods[..]].concat())?;
        wait_until("another pod", SOON, || {
            let ready = ["wait", "pods", "--for=condition=Ready", "--timeout=30s"];
            cluster.kubectl(&[&ready[..], &pods].concat()).map(drop)
        })?;
        self.reach()
    }
}

/// The namespace of the peering.
fn tenant(cluster: &Kubernetes) -> String {
    let peer = if cluster.spec.id == "rome" { "milan" } else { "rome" };
    format!("liqo-tenant-{peer}")
}

/// Kind, selector, and fields.
type Fields = (&'static str, &'static str, [&'static str; 3]);

/// Remapped prefixes, and keys.
const OF_PEERING: [Fields; 4] = [
    ("networks", "", ["/metadata/uid", "/spec/cidr", "/status/cidr"]),
    ("configurations", "", ["/metadata/uid", "/spec/remote", "/status/remote"]),
    ("publickeies", "", ["/metadata/uid", "/spec", "/spec/publicKey"]),
    ("secrets", "networking.liqo.io/gateway-resource", ["/metadata/uid", "/data", "/type"]),
];
/// Ways to the server.
const OF_GATEWAYS: [Fields; 3] = [
    ("services", "", ["/metadata/uid", "/spec/ports/0/nodePort", "/spec/clusterIP"]),
    ("gatewayservers", "", ["/metadata/uid", "/spec/endpoint", "/status/endpoint/port"]),
    ("gatewayclients", "", ["/metadata/uid", "/spec/endpoint", "/spec/mtu"]),
];

fn kept(cluster: &Kubernetes, fields: &[Fields]) -> Result<Vec<Value>> {
    let mut kept = Vec::new();
    for (kind, labels, pointers) in fields {
        for object in list(cluster, kind, Some(&tenant(cluster)), labels)? {
            let fields = pointers.map(|pointer| object.pointer(pointer).cloned());
            kept.extend(fields.into_iter().flatten());
        }
    }
    Ok(kept)
}

fn unchanged(cluster: &Kubernetes, fields: &[Fields], before: &[Value]) -> Result<()> {
    let after = kept(cluster, fields)?;
    ensure!(after == before, "{}: kept {before:#?}, now {after:#?}", cluster.spec.id);
    Ok(())
}

/// As deploy/LIQO.md has it.
fn give_back(cluster: &Kubernetes) -> Result<()> {
    let tenant = tenant(cluster);
    for server in list(cluster, "gatewayservers", Some(&tenant), "")? {
        let endpoint = json!({"nodePort": server["status"]["endpoint"]["port"]});
        let patch = json!({"spec": {"endpoint": endpoint}}).to_string();
        let name = server["metadata"]["name"].as_str().context("it has a name")?;
        let what = ["patch", "gatewayserver", name, "--namespace", &tenant, "--type=merge"];
        cluster.kubectl(&[&what[..], &["--patch", &patch]].concat())?;
    }
    let linger = "networking.fabric.pod.extraArgs={--linger=1}";
    cluster.set_weft(&format!("withdrawal.keepPrefixes=true,{linger}"))?;
    cluster.wait_for_weft(TIMEOUT)?;
    cluster.uninstall_weft(TIMEOUT)?;
    cluster.switch_liqo_network(true)
}

fn nothing_left(cluster: &Kubernetes) -> Result<()> {
    let line = ["get", LIQOS, "--all-namespaces", "--output=name"];
    wait_until("Kubernetes has collected the rest", SOON, || {
        let left = cluster.kubectl(&line)?;
        // Liqo's chart has it with its network off, too.
        ensure!(left.lines().all(|name| name.ends_with("/gw-mss-clamping")), "{left}");
        let of_node = cluster.shell(&[], "nft list tables; ip rule; ip -o link")?;
        let left: Vec<_> = of_node.lines().filter(|line| !is_not_liqos(line)).collect();
        ensure!(left.is_empty(), "{left:#?}");
        Ok(())
    })?;
    let again = cluster.adopt(&[])?;
    ensure!(again.is_empty(), "a second run: {again}");
    let tenant = cluster.get(Object::new("namespace", "", &tenant(cluster)))?;
    ensure!(tenant["status"]["phase"] == "Active", "{tenant}");
    Ok(())
}

/// True for a table, rule or device of weft, Kubernetes or the kernel.
fn is_not_liqos(line: &str) -> bool {
    let is_of = |names: &[&str]| names.iter().any(|name| line.contains(name));
    if line.contains("lookup ") {
        is_of(&["lookup local", "lookup main", "lookup default", "lookup 18952", "lookup 18953"])
    } else if line.starts_with("table ") {
        is_of(&["weft", "kube-proxy", "cni"])
    } else {
        !line.contains(" liqo.")
    }
}

fn explain(cluster: &Kubernetes) {
    eprintln!("{}", cluster.report());
    for namespace in ["liqo", &tenant(cluster)] {
        eprintln!("{}", cluster.logs(namespace, "app.kubernetes.io/part-of=liqo"));
        eprintln!("{}", cluster.logs(namespace, "networking.liqo.io/component=gateway"));
    }
    let all =
        cluster.kubectl(&["get", "connections,networks", "--all-namespaces", "--output=yaml"]);
    eprintln!("{}", all.unwrap_or_else(|error| format!("{error:#}")));
}
