use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fabric_api::Cidr;
use ipnet::IpNet;
use serde_json::Value;

use crate::lab::{ROUTER_V4, ROUTER_V6};
use crate::{ClusterSpec, Host, Lab, Netns, Program, bin_dir, manifests, on_segment, wait_until};

/// Directories on the machines of a cluster; all of them see the same files.
pub const MANIFESTS: &str = "/run/cluster/manifests";
pub const STATE: &str = "/run/cluster/state";

/// A cluster without Kubernetes: machines with a bridge for their pods, as the simplest of CNIs
/// sets them up.
///
/// ```text
///   pod-1-1 eth0 -- veth -- cni0 (10.200.1.1/24) -- rome-1 eth0 (192.0.2.17/24) -- switch
///   pod-2-1 eth0 -- veth -- cni0 (10.200.2.1/24) -- rome-2 eth0 (192.0.2.18/24) -- switch
/// ```
pub struct Cluster {
    pub spec: ClusterSpec,
    pub nodes: Vec<Node>,
    /// Folder of the programs that are started from now on.
    pub bin_dir: PathBuf,
    _router: Option<Host>,
    programs: BTreeMap<String, Program>,
}

pub struct Node {
    pub host: Host,
    pub addresses: Vec<IpAddr>,
    pub pods: Vec<Pod>,
}

#[derive(Clone, Debug)]
pub struct Pod {
    /// `CLUSTER/NAME`, for messages; `ip netns` on the node lists it by the second half.
    pub name: String,
    pub ns: Netns,
    pub addresses: Vec<IpAddr>,
}

/// A cluster's view of a peer: prefix as the peer has it, prefix as it is seen here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View(pub Vec<(Cidr, Cidr)>);

impl View {
    /// The address under which `address` of the peer is reached.
    pub fn of(&self, address: IpAddr) -> Result<IpAddr> {
        let found = self.0.iter().find_map(|(remote, local)| local.translate(address, remote));
        found.with_context(|| format!("{address} is in no remapped prefix of {:?}", self.0))
    }

    /// Reads the view from the status of a Configuration.
    pub(crate) fn read(configuration: &Value, peer: &ClusterSpec) -> Result<Self> {
        let mut pairs = Vec::new();
        for (kind, remote) in [("pod", &peer.pod_cidrs), ("external", &peer.external_cidrs)] {
            let local = configuration["status"]["remote"]["cidr"][kind].as_array();
            let Some(local) = local.filter(|local| local.len() == remote.len()) else {
                bail!("its {kind} CIDRs are not remapped yet: {configuration}")
            };
            for (remote, local) in remote.iter().zip(local) {
                let local = local.as_str().unwrap_or_default().parse();
                pairs.push((remote.to_string().parse()?, local?));
            }
        }
        Ok(Self(pairs))
    }
}

impl Cluster {
    /// Machines, pods and the cluster's own manifests; nothing of weft runs yet.
    pub fn new(lab: &Lab, spec: ClusterSpec) -> Result<Self> {
        let router = spec.behind_router.map(|_| lab.router()).transpose()?;
        let mut nodes: Vec<Node> = Vec::new();
        for number in 1..=spec.nodes {
            let first = nodes.first().map(|node| &node.host);
            let on_eth0: Vec<_> = spec.node_addresses(number).into_iter().map(on_segment).collect();
            let name = spec.node_name(number);
            let host = match (first, &router) {
                (None, _) => lab.machine(&name, &on_eth0)?,
                (Some(first), Some(router)) if spec.behind_router == Some(number) => {
                    lab.machine_behind(router, first, (&name, &on_eth0))?
                }
                (Some(first), _) => lab.machine_beside(first, &name, &on_eth0)?,
            };
            nodes.push(node(host, &spec, number)?);
        }
        let (bin_dir, programs) = (bin_dir()?, BTreeMap::new());
        let cluster = Self { spec, nodes, bin_dir, _router: router, programs };
        fs::create_dir_all(cluster.outside(MANIFESTS))?;
        cluster.apply("cluster", &manifests::own(&cluster.spec))?;
        Ok(cluster)
    }

    /// The first machine, where `weft up` runs.
    pub fn head(&self) -> &Host {
        &self.nodes[0].host
    }

    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.nodes.iter().flat_map(|node| &node.pods)
    }

    /// Runs `weft up` on the first node and `weft agent` on the others.
    pub fn start(&mut self) -> Result<()> {
        self.start_with(&[])
    }

    /// Starts the cluster with more options for `weft up`.
    pub fn start_with(&mut self, options: &[&str]) -> Result<()> {
        self.start_up(options)?;
        (2..=self.spec.nodes).try_for_each(|number| self.start_agent(number))
    }

    /// Runs `weft up`, again if it ran before.
    pub fn start_up(&mut self, more: &[&str]) -> Result<()> {
        let name = self.spec.node_name(1);
        let mut command = Command::new(self.bin_dir.join("weft"));
        command.args(["up", "--manifests", MANIFESTS, "--state-dir", STATE, "--node", &name]);
        self.run("weft-up", 1, command.args(more))
    }

    /// Runs `weft agent` on a further node. What it needs is shared by the first one.
    pub fn start_agent(&mut self, number: u8) -> Result<()> {
        self.start_agent_as(number, &self.spec.node_name(number))
    }

    /// The same for the node of this name, which may be another host's.
    pub fn start_agent_as(&mut self, number: u8, name: &str) -> Result<()> {
        let published = format!("{}/published", self.run_dir());
        wait_until("weft up shares its published directory", Duration::from_secs(20), || {
            let there = self.outside(&published).is_dir();
            there.then_some(()).ok_or_else(|| self.log("weft-up"))
        })?;
        let run_dir = format!("/run/agent-{number}");
        let mut command = Command::new(self.bin_dir.join("weft"));
        command.args(["agent", "--node", name, "--published", &published, "--run-dir", &run_dir]);
        self.run(&format!("weft-agent-{number}"), number, &mut command)
    }

    /// A started program: `weft-up`, `weft-agent-2`, ...
    pub fn program(&self, name: &str) -> Result<&Program> {
        self.programs.get(name).with_context(|| format!("{name} was not started"))
    }

    pub fn take_program(&mut self, name: &str) -> Result<Program> {
        self.programs.remove(name).with_context(|| format!("{name} was not started"))
    }

    /// Writes a manifest file as an editor does: beside it, then renamed.
    pub fn apply(&self, file: &str, text: &str) -> Result<()> {
        let dir = self.outside(MANIFESTS);
        let (draft, path) = (dir.join(format!(".{file}.draft")), dir.join(format!("{file}.yaml")));
        fs::write(&draft, text).with_context(|| format!("writing {}", draft.display()))?;
        fs::rename(&draft, &path).with_context(|| format!("renaming to {}", path.display()))
    }

    pub fn remove(&self, file: &str) -> Result<()> {
        let path = self.outside(MANIFESTS).join(format!("{file}.yaml"));
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))
    }

    /// Runs `weft` with these arguments on the first node; what it prints.
    pub fn weft(&self, args: &[&str]) -> Result<String> {
        self.head().command(Command::new(bin_dir()?.join("weft")).args(args), "")
    }

    /// Output of `weft status -o json`, whatever its exit code.
    pub fn status(&self) -> Result<Value> {
        self.status_and_code().map(|(status, _)| status)
    }

    /// The same with the exit code: 0, or 3 unless every peering is Connected.
    pub fn status_and_code(&self) -> Result<(Value, u8)> {
        let script = "\"$0\" status -o json; code=$?; echo; echo $code; [ $code -le 3 ]";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(bin_dir()?.join("weft"));
        let text = self.head().command(&mut shell, "")?;
        let (status, code) = text.trim_end().rsplit_once('\n').context("no exit code")?;
        let status = serde_json::from_str(status)
            .with_context(|| format!("weft status printed {text:?}"))?;
        Ok((status, code.parse()?))
    }

    /// `weft status` of one peering.
    pub fn peering(&self, peer: &str) -> Result<Value> {
        let status = self.status()?;
        let peerings = status["peerings"].as_array().cloned().unwrap_or_default();
        let found = peerings.into_iter().find(|peering| peering["cluster"] == peer);
        found.with_context(|| format!("weft status has no peering with {peer}: {status}"))
    }

    /// Fails until this cluster's status reports a connection to the peer.
    pub fn is_connected(&self, peer: &str) -> Result<()> {
        let peering = self.peering(peer)?;
        ensure!(
            peering["state"] == "Connected",
            "in {} the peering with {peer} is {}, problems: {}",
            self.spec.id,
            peering["state"],
            self.status()?["problems"]
        );
        Ok(())
    }

    /// Number of nodes that let packets to the peer pass.
    pub fn nodes_open_to(&self, peer: &str) -> Result<usize> {
        let records = self.published("fabricrecord")?;
        let record = |name: &str| records.iter().find(|record| record["metadata"]["name"] == name);
        let peering = record(&format!("peering-{peer}"));
        let is_connected = peering.is_some_and(|of| of["spec"]["peering"]["connected"] == true);
        let version = record("cluster").map(|cluster| &cluster["metadata"]["generation"]);
        let is_open = |config: &&Value| {
            let mut peerings = config["spec"]["peerings"].as_array().into_iter().flatten();
            let lets_pass = if config["spec"]["fromRecords"] == true {
                is_connected && Some(&config["status"]["records"]["generation"]) == version
            } else {
                peerings.any(|p| p["peerClusterId"] == peer && p["connected"] == true)
            };
            lets_pass && config["status"]["appliedGeneration"] == config["metadata"]["generation"]
        };
        Ok(self.published("nodeconfig")?.iter().filter(is_open).count())
    }

    /// Objects of a kind that weft publishes.
    pub fn published(&self, kind: &str) -> Result<Vec<Value>> {
        let list: Value = serde_json::from_str(&self.weft(&["get", kind, "-o", "json"])?)?;
        let items = list["items"].as_array().cloned();
        Ok(items.unwrap_or_else(|| vec![list]))
    }

    /// Waits until the tunnel is up, every node uses it and the peer's remapped prefixes are in the status.
    pub fn wait_connected(&self, peer: &str, at_most: Duration) -> Result<()> {
        let what = format!("{} is connected to {peer}", self.spec.id);
        wait_until(&what, at_most, || {
            self.is_connected(peer)?;
            let open = self.nodes_open_to(peer)?;
            ensure!(open == self.nodes.len(), "only {open} of its nodes use the tunnel");
            let configuration = self.configuration(peer)?;
            let is_ready = configuration["status"]["remote"].is_object();
            ensure!(is_ready, "the controller has not seen its nodes ready: {configuration}");
            Ok::<_, anyhow::Error>(())
        })
    }

    /// This cluster's view of the peer, from the status of its Configuration.
    pub fn view(&self, peer: &ClusterSpec) -> Result<View> {
        View::read(&self.configuration(&peer.id)?, peer)
            .with_context(|| format!("how {} sees {}", self.spec.id, peer.id))
    }

    /// The Configuration of a peer.
    fn configuration(&self, peer: &str) -> Result<Value> {
        let namespace = format!("liqo-tenant-{peer}");
        let text = self.weft(&["get", "configuration", peer, "-n", &namespace, "-o", "json"])?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Processes of weft on a node by the name of their program; ID as seen from outside.
    pub fn processes(&self, node: usize, program: &str) -> Vec<i32> {
        let is_it = |line: &str| {
            let first = line.split(' ').next().unwrap_or_default();
            Path::new(first).file_name().is_some_and(|name| name == program)
        };
        let all = self.nodes[node].host.processes();
        all.into_iter().filter(|(_, line)| is_it(line)).map(|(pid, _)| pid).collect()
    }

    /// Path of a file of the machines, as seen from outside.
    pub fn outside(&self, path: impl AsRef<Path>) -> PathBuf {
        self.head().outside(path)
    }

    pub fn run_dir(&self) -> String {
        format!("/run/weft/{}", self.spec.id)
    }

    /// Output of a program that the harness started.
    pub fn log(&self, name: &str) -> String {
        self.programs.get(name).map(Program::log).unwrap_or_default()
    }

    /// Lets the machines and all that runs on them outlive this process.
    pub fn keep(self) -> Result<()> {
        self.programs.into_values().for_each(Program::keep);
        self.nodes.into_iter().try_for_each(|node| node.host.keep())
    }

    fn run(&mut self, name: &str, number: u8, command: &mut Command) -> Result<()> {
        let host = &self.nodes[usize::from(number) - 1].host;
        let log = host.outside(format!("/run/cluster/{name}.log"));
        let program = host.start(command, &log)?;
        self.programs.insert(name.to_owned(), program);
        Ok(())
    }
}

fn node(host: Host, spec: &ClusterSpec, number: u8) -> Result<Node> {
    let addresses = spec.node_addresses(number);
    host.net().sysctl(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
    host.net().sysctl(&NO_DAD)?;
    host.ip(&node_routes(spec, number))?;
    host.ip(&cni(spec, number))?;
    join_pod_network(&host, spec, number)?;
    let pods = (1..=spec.pods_per_node).map(|pod| add_pod(&host, spec, number, pod));
    let pods = pods.collect::<Result<_>>()?;
    Ok(Node { host, addresses, pods })
}

/// A node forwards IPv6 to a pod only once its bridge's link-local address has been found unique,
/// which takes two seconds: longer than a whole cluster here.
const NO_DAD: [(&str, &str); 2] =
    [("ipv6/conf/all/accept_dad", "0"), ("ipv6/conf/default/accept_dad", "0")];

/// Setup of a simple CNI on a node besides its bridge: routes to the pods of the other nodes,
/// and a masquerade for what leaves the cluster.
pub(crate) fn join_pod_network(host: &Host, spec: &ClusterSpec, number: u8) -> Result<()> {
    host.ip(&pod_routes(spec, number))?;
    host.net().nft(&cni_masquerade(spec))
}

/// Bridge of this node's pods.
fn cni(spec: &ClusterSpec, number: u8) -> String {
    let mut batch = String::from(
        "link add cni0 type bridge mcast_snooping 0 forward_delay 0\nlink set cni0 up\n",
    );
    for address in spec.pod_addresses(number, 0) {
        batch += &format!("addr add {} dev cni0{}\n", pod_net(address), nodad(address));
    }
    batch
}

/// The way to a node behind the router.
fn node_routes(spec: &ClusterSpec, number: u8) -> String {
    let routed = spec.behind_router.filter(|routed| *routed != number);
    let addresses = routed.map(|node| spec.node_addresses(node)).unwrap_or_default();
    let via = |to: &IpAddr| if to.is_ipv4() { IpAddr::from(ROUTER_V4) } else { ROUTER_V6.into() };
    addresses.iter().map(|to| format!("route add {to} via {}\n", via(to))).collect()
}

fn pod_routes(spec: &ClusterSpec, number: u8) -> String {
    let is_routed = |node| spec.behind_router == Some(node);
    // The router's subnet has no other node as a next hop.
    let others = (1..=spec.nodes)
        .filter(|other| *other != number && !is_routed(*other) && !is_routed(number));
    others.map(|other| pod_routes_to(spec, other, &spec.node_pod_cidrs(other))).collect()
}

/// The way from other nodes to pods of a node.
pub(crate) fn pod_routes_to(spec: &ClusterSpec, node: u8, prefixes: &[IpNet]) -> String {
    let mut batch = String::new();
    for cidr in prefixes {
        let same_family = |a: &&IpAddr| a.is_ipv4() == cidr.addr().is_ipv4();
        if let Some(via) = spec.node_addresses(node).iter().find(same_family) {
            batch += &format!("route add {cidr} via {via}\n");
        }
    }
    batch
}

/// Rules of most CNIs for packets that leave the cluster.
fn cni_masquerade(spec: &ClusterSpec) -> String {
    let rules: String = spec
        .pod_cidrs
        .iter()
        .map(|cidr| {
            let family = if cidr.addr().is_ipv4() { "ip" } else { "ip6" };
            format!("    {family} saddr {cidr} {family} daddr != {cidr} oifname != \"cni0\" masquerade\n")
        })
        .collect();
    format!(
        "table inet cni {{\n  chain postrouting {{\n    type nat hook postrouting priority 100;\n{rules}  }}\n}}\n"
    )
}

fn add_pod(host: &Host, spec: &ClusterSpec, node: u8, pod: u8) -> Result<Pod> {
    let name = format!("pod-{node}-{pod}");
    let ns = host.add_netns(&name)?;
    ns.sysctl(&NO_DAD)?;
    host.ip(&format!(
        "link add name veth{pod} type veth peer name eth0 netns {name}\nlink set dev veth{pod} master cni0 up\n"
    ))?;
    let addresses = spec.pod_addresses(node, pod);
    let mut batch = String::from("link set eth0 up\n");
    for address in &addresses {
        batch += &format!("addr add {} dev eth0{}\n", pod_net(*address), nodad(*address));
    }
    for gateway in spec.pod_addresses(node, 0) {
        batch += &format!("route add default via {gateway}\n");
    }
    ns.ip(&batch)?;
    Ok(Pod { name: format!("{}/{name}", spec.id), ns, addresses })
}

fn pod_net(address: IpAddr) -> String {
    on_segment(address).to_string()
}

fn nodad(address: IpAddr) -> &'static str {
    if address.is_ipv6() { " nodad" } else { "" }
}
