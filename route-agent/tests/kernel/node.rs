//! ```text
//!  pod                    node                          gw: gateway and peer in one
//!  eth0 10.200.1.2 ---- pod0 10.200.1.1
//!                         eth0 192.0.2.5 ============== eth0 192.0.2.7
//!                         weft4 (10.80.0.5)    VXLAN    overlay4 10.80.0.7
//!                                                       lo 10.201.0.1, fd00:201::1
//! ```

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fabric_api::fabric::{
    NodeConfig, NodeConfigSpec, NodeConfigStatus, NodeGateway, NodePeering, RefusedTraffic,
};
use fabric_store::{Kind, Object, ObjectRef, Store, StoreArgs};
use futures::FutureExt as _;
use netlink::Netns;
use serde_json::Value;

pub(crate) const PEER: &str = "10.201.0.1";
pub(crate) const PEER_V6: &str = "fd00:201::1";
/// Bound for what must have happened "within a second".
const SOON: Duration = Duration::from_secs(5);

/// A directory answers at once.
fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

/// A node with a pod and a gateway, and the agent that runs on it.
pub(crate) struct World {
    pub(crate) node: Netns,
    pub(crate) pod: Netns,
    pub(crate) gw: Netns,
    pub(crate) store: Store,
    agent: Option<Child>,
    dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let [node, pod, gw] = [(); 3].map(|()| Netns::unnamed().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().to_owned();
        let store = Store::open(&StoreArgs::directories(None, run_dir, None)).unwrap();
        let world = Self { node, pod, gw, store, agent: None, dir };
        world.wire();
        world
    }

    /// With the agent running on `config`, and done with it.
    pub(crate) fn running(config: NodeConfigSpec) -> Self {
        let mut world = Self::new();
        world.configure(config);
        world.start(&[]);
        world.settle();
        world
    }

    fn wire(&self) {
        let (node, pod, gw) = (fd_path(&self.node), fd_path(&self.pod), fd_path(&self.gw));
        let root = Netns::current().unwrap();
        for (near, far, near_name) in [(&node, &pod, "pod0"), (&node, &gw, "eth0")] {
            sh(
                &root,
                &format!(
                    "ip link add {near_name} netns {near} type veth peer name eth0 netns {far}"
                ),
            );
        }
        sh(&self.node, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
            ip link set lo up; ip link set pod0 addrgenmode none up
            ip link set eth0 addrgenmode none up; ip address add 192.0.2.5/24 dev eth0; ip address add 2001:db8::5/64 dev eth0 nodad
            ip address add 10.200.1.1/24 dev pod0; ip address add fd00:200:1::1/64 dev pod0 nodad");
        sh(
            &self.pod,
            "ip link set lo up; ip link set eth0 up
            ip address add 10.200.1.2/24 dev eth0; ip route add default via 10.200.1.1
            ip address add fd00:200:1::2/64 dev eth0 nodad; ip route add default via fd00:200:1::1",
        );
        sh(&self.gw, "ip link set lo up; ip link set eth0 up; ip address add 192.0.2.7/24 dev eth0
            ip link add overlay4 address 0e:77:0a:50:00:07 type vxlan id 18952 dstport 4879 nolearning
            ip link set overlay4 up mtu 1450; ip address add 10.80.0.7/32 dev overlay4
            bridge fdb add 0e:77:0a:50:00:05 dev overlay4 dst 192.0.2.5
            ip neigh add 10.80.0.5 lladdr 0e:77:0a:50:00:05 dev overlay4
            ip neigh add fd77:6566:7400::a50:5 lladdr 0e:77:0a:50:00:05 dev overlay4
            for to in 10.200.1.0/24 10.70.0.9/32; do
                ip route add $to via 10.80.0.5 dev overlay4 onlink; done
            for to in fd00:200:1::/64 fd00:70::9/128; do
                ip -6 route add $to via fd77:6566:7400::a50:5 dev overlay4 onlink; done
            ip address add 10.201.0.1/32 dev lo; ip address add fd00:201::1/128 dev lo");
    }

    /// Publishes `config`, and returns at once.
    pub(crate) fn configure(&self, config: NodeConfigSpec) {
        at_once(self.store.put(&NodeConfig::new("n1", config).into())).unwrap();
    }

    /// Publishes `config`, and waits for the agent to have it applied.
    pub(crate) fn reconfigure(&self, config: NodeConfigSpec) {
        self.configure(config);
        self.settle();
    }

    pub(crate) fn start(&mut self, more: &[&str]) {
        self.spawn(|agent| _ = agent.args(more));
    }

    /// With an environment variable.
    pub(crate) fn start_with(&mut self, name: &str, value: &std::path::Path) {
        self.spawn(|agent| _ = agent.env(name, value));
    }

    /// On a machine that has no program but this.
    pub(crate) fn start_bare(&mut self) {
        self.spawn(|agent| _ = agent.env("PATH", "/nonexistent"));
    }

    /// A file beside the agent's own.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn spawn(&mut self, adapt: impl FnOnce(&mut Command)) {
        let mut agent = self.agent(&["run", "--node", "n1"]);
        agent.arg("--run-dir").arg(self.dir.path());
        adapt(&mut agent);
        self.agent = Some(agent.spawn().unwrap());
    }

    /// Sends SIGTERM, and waits for the agent to end well.
    pub(crate) fn stop(&mut self) {
        let mut agent = self.agent.take().unwrap();
        let pid = nix::unistd::Pid::from_raw(agent.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(agent.wait().unwrap().success());
    }

    pub(crate) fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    pub(crate) fn cleanup(&self) {
        assert!(self.agent(&["cleanup"]).status().unwrap().success());
    }

    /// Output of a `route-agent cleanup` that fails.
    pub(crate) fn refused_cleanup(&self) -> String {
        let mut agent = self.agent(&["cleanup"]);
        let output = agent.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        assert!(!output.status.success());
        [output.stdout, output.stderr]
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat()
    }

    /// Output of `route-agent cleanup`.
    pub(crate) fn clean_up(&self, more: &[&str]) -> String {
        let mut agent = self.agent(&["cleanup"]);
        let output = agent.args(more).stdout(Stdio::piped()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Prefixes that the agent reports as refused.
    pub(crate) fn refused(&self) -> Vec<RefusedTraffic> {
        self.status().and_then(|(_, status)| status.refused).unwrap_or_default()
    }

    /// The agent has applied the newest config.
    pub(crate) fn is_settled(&self) -> bool {
        self.status().is_some_and(|(newest, status)| status.applied_generation == newest)
    }

    pub(crate) fn status(&self) -> Option<(i64, NodeConfigStatus)> {
        let reference = ObjectRef::new(Kind::NodeConfig, "", "n1");
        match at_once(self.store.get(&reference)) {
            Ok(Some(Object::NodeConfig(config))) => {
                Some((config.metadata.generation?, config.status.clone().unwrap_or_default()))
            }
            _ => None,
        }
    }

    pub(crate) fn dry_run(&self) -> String {
        let mut agent = self.agent(&["run", "--node", "n1", "--dry-run"]);
        let agent = agent.arg("--run-dir").arg(self.dir.path()).stdout(Stdio::piped());
        let output = agent.output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    fn agent(&self, args: &[&str]) -> Command {
        let mut command = inside(&self.node, env!("CARGO_BIN_EXE_route-agent"));
        command.args(args).args(["--log-level", "warn"]);
        command
    }

    /// Waits until the newest config is applied; returns the reported problems.
    pub(crate) fn settle(&self) -> Vec<String> {
        let reference =
            ObjectRef { kind: Kind::NodeConfig, namespace: None, name: "n1".to_owned() };
        let mut problems = Vec::new();
        eventually("the agent has applied the config", SOON, || {
            let Ok(Some(Object::NodeConfig(config))) = at_once(self.store.get(&reference)) else {
                return false;
            };
            let status = config.status.clone().unwrap_or_default();
            problems = status.problems;
            status.applied_generation == config.metadata.generation.unwrap()
        });
        problems
    }

    /// Problems of the newest status.
    pub(crate) fn problems(&self) -> Vec<String> {
        let own = ObjectRef { kind: Kind::NodeConfig, namespace: None, name: "n1".to_owned() };
        let Ok(Some(Object::NodeConfig(config))) = at_once(self.store.get(&own)) else {
            return Vec::new();
        };
        config.status.clone().unwrap_or_default().problems
    }

    /// The address that the peer sees when `from` connects.
    pub(crate) fn source_seen(&self, from: &Netns, peer: &str) -> io::Result<IpAddr> {
        let any = SocketAddr::new(peer.parse().unwrap(), 0);
        let listener = self.gw.run(|| TcpListener::bind(any)).unwrap()?;
        let _client = connect(from, listener.local_addr()?)?;
        Ok(listener.accept()?.1.ip())
    }

    /// A connection from the pod to the peer, both ends.
    pub(crate) fn established(&self) -> (TcpStream, TcpStream) {
        let any = SocketAddr::new(PEER.parse().unwrap(), 0);
        let listener = self.gw.run(|| TcpListener::bind(any)).unwrap().unwrap();
        let client = connect(&self.pod, listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Two sockets: one in `from`, connected to the peer's.
    pub(crate) fn datagrams(&self, from: &Netns) -> (UdpSocket, UdpSocket) {
        let any = SocketAddr::new(PEER.parse().unwrap(), 0);
        let server = self.gw.run(|| UdpSocket::bind(any)).unwrap().unwrap();
        server.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let client = from.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        (client, server)
    }

    /// All of the node's tables, as text.
    pub(crate) fn dump(&self) -> String {
        sh(&self.node, "ip -d link | grep -v -e qdisc -e 'link/' ; ip address | grep inet
            ip route show table all; ip -6 route show table all; ip rule; ip -6 rule
            ip neigh show nud permanent; bridge fdb; nft list ruleset; iptables-legacy-save -t filter | cut -d'[' -f1
            grep -rs . /proc/sys/net/ipv[46]/conf/weft* || true")
            .lines()
            .filter(|line| !line.starts_with('#') && !line.contains("packets"))
            .map(|line| format!("{line}\n"))
            .collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            _ = agent.kill();
            _ = agent.wait();
        }
    }
}

/// With one peering, connected.
pub(crate) fn config() -> NodeConfigSpec {
    NodeConfigSpec {
        cluster_id: "rome".to_owned(),
        overlay: Some([10, 80, 0, 5].into()),
        mac: None,
        underlay: vec![[192, 0, 2, 5].into(), "2001:db8::5".parse().unwrap()],
        declared: Vec::new(),
        local_pods: vec!["10.200.1.0/24".to_owned(), "fd00:200:1::/64".to_owned()],
        overlapping_pods: Vec::new(),
        outside_pods: Vec::new(),
        pod_cidrs: vec!["10.200.0.0/16".to_owned(), "fd00:200::/32".to_owned()],
        external: vec![[10, 70, 0, 9].into(), "fd00:70::9".parse().unwrap()],
        from_records: false,
        peerings: vec![peering()],
        ips: vec![],
        internal_cidr: None,
        vxlan_sources: vec![[192, 0, 2, 7].into()],
        full_masquerade: false,
        removed: false,
        refused: Vec::new(),
        refuse_seconds: None,
    }
}

pub(crate) fn peering() -> NodePeering {
    NodePeering {
        peer_cluster_id: "milan".to_owned(),
        prefixes: vec!["10.201.0.0/16".to_owned(), "fd00:201::/32".to_owned()],
        connected: true,
        mtu: 1340,
        gateway: Some(NodeGateway {
            overlay: [10, 80, 0, 7].into(),
            mac: None,
            underlay: [192, 0, 2, 7].into(),
            links: Vec::new(),
            listen_port: None,
            probe: None,
            replicas: Vec::new(),
            epoch: None,
        }),
    }
}

/// [`config`] while the tunnel is down.
pub(crate) fn disconnected() -> NodeConfigSpec {
    NodeConfigSpec { peerings: vec![NodePeering { connected: false, ..peering() }], ..config() }
}

pub(crate) fn connect(from: &Netns, to: SocketAddr) -> io::Result<TcpStream> {
    from.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(1))).unwrap()
}

pub(crate) fn passes((client, server): &mut (TcpStream, TcpStream)) -> bool {
    server.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut buffer = [0; 2];
    client.write_all(b"hi").is_ok() && server.read_exact(&mut buffer).is_ok()
}

/// Runs a shell script in a namespace; returns what it prints.
pub(crate) fn sh(netns: &Netns, script: &str) -> String {
    let output = inside(netns, "sh").args(["-ec", script]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Output of a program, parsed as JSON.
pub(crate) fn json(netns: &Netns, script: &str) -> Value {
    let text = sh(netns, script);
    serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).unwrap()
}

pub(crate) fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < end, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A program that runs in a namespace and ends with the test.
pub(crate) fn inside(netns: &Netns, program: &str) -> Command {
    let netns = netns.clone();
    let mut command = Command::new(program);
    let enter = move || {
        nix::sched::setns(&netns, nix::sched::CloneFlags::CLONE_NEWNET)?;
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        Ok(())
    };
    // SAFETY: two system calls, which allocate nothing and take no lock.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(enter)
    };
    command
}

/// Names a namespace to `ip`, which takes the path of a descriptor of ours.
fn fd_path(netns: &Netns) -> String {
    let fd = std::os::fd::AsFd::as_fd(netns).as_raw_fd();
    format!("/proc/{}/fd/{fd}", std::process::id())
}
