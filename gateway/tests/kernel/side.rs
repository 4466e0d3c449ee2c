//! One cluster of one host with its gateway, and what joins two of them.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fabric_api::fabric::{GatewayConfig, GatewayConfigStatus, Role};
use fabric_api::networking::{Connection, ConnectionStatus, ConnectionValue};
use fabric_api::{Mac, PrivateKey};
use fabric_store::{Kind, Object, ObjectRef, Store, StoreArgs};
use futures::FutureExt as _;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use netlink::Netns;
use tempfile::TempDir;

use crate::world::{config, in_new_namespace, run, run_in};

pub(crate) const POD: &str = "10.200.1.5";
pub(crate) const SEEN_AS: &str = "10.201.1.5";
pub(crate) const POD6: &str = "fd20:1::5";
pub(crate) const SEEN_AS6: &str = "fd21:1::5";
pub(crate) const ATTEMPTS: &str = "weft_gateway_handshakes_total{outcome=\"attempted\"}";

/// One cluster of one host.
pub(crate) struct Side {
    pub(crate) netns: Netns,
    pub(crate) directory: TempDir,
    pub(crate) store: Store,
    pub(crate) config: GatewayConfig,
}

pub(crate) struct Gateway(Child);

/// A directory answers at once.
pub(crate) fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

/// A namespace as a path that another process can open.
pub(crate) fn path_of(netns: &Netns) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd())
}

/// One of three pings comes back: a busy machine may lose one.
pub(crate) fn reaches(side: &Side) -> bool {
    (0..3).any(|_| ping(side, POD, SEEN_AS).contains("1 received"))
}

pub(crate) fn ping(side: &Side, from: &str, to: &str) -> String {
    let ping = || Command::new("ping").args(["-c", "1", "-W", "1", "-I", from, to]).output();
    String::from_utf8(side.netns.run(ping).unwrap().unwrap().stdout).unwrap()
}

pub(crate) fn config_of(role: Role) -> GatewayConfig {
    let mut config = config();
    let spec = &mut config.spec;
    let own = match role {
        Role::Client => 1,
        Role::Server => 2,
    };
    spec.role = role;
    spec.nodes.truncate(1);
    spec.nodes[0].overlay = Ipv4Addr::new(10, 80, 0, own);
    spec.nodes[0].underlay = Ipv4Addr::new(192, 0, 2, own).into();
    if let Some(endpoint) = &mut spec.endpoint {
        endpoint.addresses = vec!["192.0.2.2".to_owned()];
    }
    if role == Role::Server {
        std::mem::swap(&mut spec.tunnel_address, &mut spec.peer_tunnel_address);
        std::mem::swap(&mut spec.cluster_id, &mut spec.peer_cluster_id);
        (spec.endpoint, spec.listen_port) = (None, Some(30742));
    }
    config
}

impl Gateway {
    pub(crate) fn id(&self) -> i32 {
        self.0.id().try_into().unwrap()
    }

    /// Thread that moves the packets.
    pub(crate) fn lane(&self) -> Option<i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.id())).unwrap();
        let is_lane = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "lane\n")
        };
        let lane = tasks.flatten().find(is_lane)?;
        lane.file_name().to_str()?.parse().ok()
    }

    pub(crate) fn stop(&mut self) {
        run(&format!("kill -TERM {}", self.0.id()));
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn in_two_hosts(test: impl Fn(&Side, &Side) + Send + Sync) {
    let milan_host = Netns::unnamed().unwrap();
    in_new_namespace(|| async {
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let rome = Side::new(Netns::current().unwrap(), Role::Client, &keys[0], &keys[1]);
        let milan = Side::new(milan_host.clone(), Role::Server, &keys[1], &keys[0]);
        wire(&rome.netns, &milan.netns);
        test(&rome, &milan);
    });
}

/// Joins the two hosts, and gives each a pod and a node's overlay device.
pub(crate) fn wire(rome: &Netns, milan: &Netns) {
    run(&format!("ip link add wire type veth peer name wire netns {}", path_of(milan)));
    for (host, i) in [(rome, 1), (milan, 2)] {
        let mac = |overlay| Mac::of_overlay(overlay);
        let node = mac(Ipv4Addr::new(10, 80, 0, i));
        let gateway = mac(Ipv4Addr::new(10, 80, 0, 9));
        for line in [
            "ip link set lo up".to_owned(),
            format!("ip address add 192.0.2.{i}/24 dev wire"),
            format!("ip -6 address add 2001:db8::{i}/64 dev wire nodad"),
            "ip link set wire up".to_owned(),
            format!("ip address add {POD}/32 dev lo"),
            "ip link add node4 type vxlan id 18952 dstport 4879 nolearning".to_owned(),
            format!("ip link set node4 address {node} up"),
            format!("bridge fdb add {gateway} dev node4 self dst 10.80.0.10"),
            format!("ip neigh add 10.80.0.9 lladdr {gateway} dev node4 nud permanent"),
            "ip rule add from all lookup 18952 priority 105".to_owned(),
            "ip route add 10.201.0.0/16 via 10.80.0.9 dev node4 onlink table 18952".to_owned(),
        ] {
            run_in(host, &line);
        }
    }
}

impl Side {
    pub(crate) fn new(netns: Netns, role: Role, key: &PrivateKey, peer: &PrivateKey) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [run, state] = ["run", "state"].map(|name| directory.path().join(name));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        let mut secret = Secret::default();
        secret.metadata.name = Some("keys".to_owned());
        secret.metadata.namespace = Some("tenant".to_owned());
        secret.data = Some([("privateKey".to_owned(), ByteString(key.expose().to_vec()))].into());
        at_once(store.put(&secret.into())).unwrap();
        let mut config = config_of(role);
        config.spec.peer_public_key = Some(peer.public().to_string());
        let stored = at_once(store.put(&config.into())).unwrap();
        let config = GatewayConfig::try_from(stored).unwrap();
        Self { netns, directory, store, config }
    }

    /// Another cluster of the same identity, elsewhere.
    pub(crate) fn copy(&self, netns: Netns) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [run, state] = ["run", "state"].map(|name| directory.path().join(name));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        let secret = at_once(self.store.get(&ObjectRef::new(Kind::Secret, "tenant", "keys")));
        at_once(store.put(&secret.unwrap().unwrap())).unwrap();
        let mut config = self.config.clone();
        config.metadata.resource_version = None;
        let config = at_once(store.put(&config.into())).unwrap();
        let config = GatewayConfig::try_from(config).unwrap();
        Self { netns, directory, store, config }
    }

    /// The gateway ends with the thread that this is called from, even if that is killed.
    pub(crate) fn start(&self) -> Gateway {
        self.start_under(&[])
    }

    /// Starts the gateway by way of another program, which becomes it.
    pub(crate) fn start_under(&self, wrapper: &[&str]) -> Gateway {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", path_of(&self.netns)))
            .args(["setpriv", "--pdeathsig", "KILL", "--"])
            .args(wrapper)
            .arg(env!("CARGO_BIN_EXE_gateway"))
            .args(["--standalone", "--namespace", "tenant", "--name", "gw", "--log-level", "info"])
            .args(["--run-dir", &path("run"), "--state-dir", &path("state")])
            .arg(format!("--http=unix:{}", self.socket().display()))
            .stdin(Stdio::null());
        Gateway(command.spawn().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("http.sock")
    }

    pub(crate) fn connection(&self) -> Option<ConnectionStatus> {
        let name = ObjectRef::new(Kind::Connection, "tenant", "gw-gw");
        let object = at_once(self.store.get(&name)).unwrap()?;
        Connection::try_from(object).unwrap().status
    }

    pub(crate) fn status(&self) -> GatewayConfigStatus {
        let object: Option<Object> =
            at_once(self.store.get(&ObjectRef::new(Kind::GatewayConfig, "tenant", "gw"))).unwrap();
        GatewayConfig::try_from(object.unwrap()).unwrap().status.unwrap_or_default()
    }

    pub(crate) fn wait_for(&self, value: ConnectionValue) {
        self.until(&format!("{value:?}"), || self.connection().is_some_and(|c| c.value == value));
    }

    pub(crate) fn until(&self, what: &str, done: impl Fn() -> bool) {
        self.until_within(Duration::from_secs(10), what, done);
    }

    pub(crate) fn until_within(&self, limit: Duration, what: &str, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() {
            let late = since.elapsed() > limit;
            assert!(!late, "waited for {what}; {:?} {:?}", self.connection(), self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn http(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Status code of the answer.
    pub(crate) fn probe(&self, path: &str) -> u16 {
        self.http(path).split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub(crate) fn is_ready(&self) -> bool {
        // Its file is there a moment before it listens.
        UnixStream::connect(self.socket()).is_ok() && self.probe("/readyz") == 200
    }

    /// Value of the one metric whose line starts with `name`.
    pub(crate) fn value(&self, name: &str) -> u64 {
        self.metric(name).rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub(crate) fn metrics(&self) -> String {
        self.http("/metrics")
    }

    pub(crate) fn metric(&self, name: &str) -> String {
        let metrics = self.metrics();
        let line = metrics.lines().find(|line| line.starts_with(name));
        line.unwrap_or_else(|| panic!("no {name} in {metrics}")).to_owned()
    }
}
