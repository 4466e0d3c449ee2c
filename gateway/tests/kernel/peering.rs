//! Two gateways, each a process on its own host, both clusters with pod CIDR 10.200.0.0/16.
//!
//! ```text
//!  host rome                                              host milan
//!  lo 10.200.1.5 (a pod)                                  lo 10.200.1.5 (a pod)
//!  node4 ==VXLAN== weft-xxxxxxxx | gateway                gateway | weft-xxxxxxxx ==VXLAN== node4
//!  wire 192.0.2.1 ------------------WireGuard------------------ wire 192.0.2.2
//! ```
//!
//! The node's side, which is the route-agent's business, is made by hand here.

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

const POD: &str = "10.200.1.5";
const SEEN_AS: &str = "10.201.1.5";
const POD6: &str = "fd20:1::5";
const SEEN_AS6: &str = "fd21:1::5";
const ATTEMPTS: &str = "weft_gateway_handshakes_total{outcome=\"attempted\"}";

#[test]
fn two_clusters_with_the_same_pod_cidr_reach_each_other_and_outlive_restarts() {
    in_two_hosts(|rome, milan| {
        let (mut client, server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        for side in [rome, milan] {
            let metrics = side.metrics();
            assert!(reaches(side), "{metrics}");
            assert!(metrics.contains("liqo_peer_is_connected{driver=\"wireguard\""), "{metrics}");
            assert!(metrics.contains("} 1\n"), "{metrics}");
        }
        assert_eq!(rome.status().applied_generation, 1);
        assert_eq!(rome.status().problems, [] as [&str; 0]);
        assert_eq!(milan.status().mtu, 1340);
        assert!(milan.status().peer_endpoint.unwrap().starts_with("192.0.2.1:"));
        let latency = rome.connection().unwrap().latency.unwrap();
        assert!(latency.value.ends_with('s') && latency.timestamp.is_some(), "{latency:?}");

        // The server, killed, remembers its client and begins by itself.
        drop(server);
        let _server = milan.start();
        let since = Instant::now();
        while !reaches(rome) {
            assert!(since.elapsed() < Duration::from_secs(3), "no way back after a restart");
        }

        // An edit is applied without disturbing the session.
        let handshakes = rome.metric("weft_gateway_handshakes_total{outcome=\"completed\"}");
        let mut edited = rome.config.clone();
        edited.spec.mtu = 1300;
        at_once(rome.store.put(&edited.into())).unwrap();
        rome.until("the new MTU", || rome.status().mtu == 1300);
        assert_eq!(rome.status().applied_generation, 2);
        assert!(reaches(rome));
        assert_eq!(rome.metric("weft_gateway_handshakes_total{outcome=\"completed\"}"), handshakes);

        // A clean stop says that the connection is gone, and leaves nothing on the host.
        client.stop();
        assert_eq!(rome.connection().unwrap().value, ConnectionValue::Connecting);
        assert!(!run_in(&rome.netns, "ip link").contains("weft-"));
        milan.wait_for(ConnectionValue::Error);
    });
}

#[test]
fn a_cut_is_an_error_that_refuses_at_once_and_heals_by_itself() {
    in_two_hosts(|rome, milan| {
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        run_in(&milan.netns, "ip link set wire down");
        rome.wait_for(ConnectionValue::Error);
        milan.wait_for(ConnectionValue::Error);
        assert_eq!(rome.connection().unwrap().latency.unwrap().value, "N/A");
        rome.until("a refusal", || ping(rome, POD, SEEN_AS).contains("filtered"));
        run_in(&milan.netns, "ip link set wire up");
        run_in(&milan.netns, "ip -6 address replace 2001:db8::2/64 dev wire nodad");
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert!(reaches(rome) && reaches(milan));
    });
}

#[test]
fn a_server_that_ends_is_asked_for_its_successor_at_once_and_a_client_just_goes() {
    in_two_hosts(|rome, milan| {
        let (mut client, mut server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let (before, port) = (rome.metric(ATTEMPTS), rome.status().listen_port);
        server.stop();
        let since = Instant::now();
        while rome.metric(ATTEMPTS) == before {
            // Without the goodbye, after three probes.
            assert!(since.elapsed() < Duration::from_secs(2), "nobody is asked");
            std::thread::sleep(Duration::from_millis(20));
        }
        // Where nobody is, the next question comes from elsewhere.
        rome.until("another way", || rome.status().listen_port != port);

        let _server = milan.start();
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let before = milan.metric(ATTEMPTS);
        client.stop();
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(milan.metric(ATTEMPTS), before);
    });
}

#[test]
fn ipv6_works_inside_and_outside() {
    in_two_hosts(|rome, milan| {
        for (side, i) in [(rome, 1), (milan, 2)] {
            let mut config = side.config.clone();
            config.spec.nodes[0].underlay = format!("2001:db8::{i}").parse().unwrap();
            if let Some(endpoint) = &mut config.spec.endpoint {
                endpoint.addresses = vec!["2001:db8::2".to_owned()];
            }
            at_once(side.store.put(&config.into())).unwrap();
            let gateway = Mac::of_overlay(Ipv4Addr::new(10, 80, 0, 9));
            let (pod, next_hop) = (POD6, "fd77:6566:7400::a50:9");
            run_in(&side.netns, "ip link del node4");
            for line in [
                format!("ip -6 address add {pod}/128 dev lo"),
                format!(
                    "ip link add node6 type vxlan id 18952 dstport 4879 nolearning local 2001:db8::{i}"
                ),
                format!(
                    "ip link set node6 address {} up",
                    Mac::of_overlay(Ipv4Addr::new(10, 80, 0, i))
                ),
                format!("bridge fdb add {gateway} dev node6 self dst fd77:6566:7400::a50:a"),
                format!("ip -6 neigh add {next_hop} lladdr {gateway} dev node6 nud permanent"),
                "ip -6 rule add from all lookup 18952 priority 105".to_owned(),
                format!("ip -6 route add fd21::/16 via {next_hop} dev node6 onlink table 18952"),
            ] {
                run_in(&side.netns, &line);
            }
        }
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert!(milan.status().peer_endpoint.unwrap().starts_with("[2001:db8::1]:"));
        for side in [rome, milan] {
            let answer = ping(side, POD6, SEEN_AS6);
            assert!(answer.contains("1 received"), "{answer} {}", side.metrics());
        }
    });
}

#[test]
fn only_who_knows_its_mac_address_sends_to_the_peer_or_to_itself() {
    in_two_hosts(|rome, milan| {
        let mut config = rome.config.clone();
        let own = Mac::of_uid("nobody knows");
        config.spec.overlay.mac = Some(own.to_string());
        at_once(rome.store.put(&config.into())).unwrap();
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        for line in [
            "ip route add 10.80.0.9 dev node4 table 18952",
            // Whatever the MAC address.
            "bridge fdb append 00:00:00:00:00:00 dev node4 self dst 10.80.0.10",
        ] {
            run_in(&rome.netns, line);
        }
        let guessed = Mac::of_overlay(Ipv4Addr::new(10, 80, 0, 9));
        for (mac, is_its) in [(guessed, false), (Mac([0xff; 6]), false), (own, true)] {
            let line = format!("ip neigh replace 10.80.0.9 lladdr {mac} dev node4 nud permanent");
            run_in(&rome.netns, &line);
            assert_eq!(reaches(rome), is_its, "to {mac}");
            let answer = ping(rome, POD, "10.80.0.9");
            assert_eq!(answer.contains("1 received"), is_its, "to {mac}: {answer}");
        }
    });
}

#[test]
fn without_probing_the_handshake_tells() {
    in_two_hosts(|rome, milan| {
        for side in [rome, milan] {
            let mut config = side.config.clone();
            config.spec.probe.enabled = false;
            at_once(side.store.put(&config.into())).unwrap();
        }
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert_eq!(rome.connection().unwrap().latency.unwrap().value, "N/A");
        assert!(reaches(rome) && reaches(milan));
    });
}

#[test]
fn a_config_that_is_wrong_is_reported_and_the_old_one_stays_in_force() {
    in_two_hosts(|rome, milan| {
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        let mut wrong = rome.config.clone();
        wrong.spec.pod_cidrs = vec!["10.200.0.1/16".to_owned()];
        at_once(rome.store.put(&wrong.into())).unwrap();
        rome.until("the problem", || {
            rome.status().problems == ["spec.podCidrs[0]: 10.200.0.1/16 has host bits set; did you mean 10.200.0.0/16?"]
        });
        assert_eq!(rome.status().applied_generation, 1);
        assert!(reaches(rome));
    });
}

#[test]
fn a_gateway_without_peer_key_or_secret_is_idle_ready_and_says_what_is_missing() {
    in_two_hosts(|rome, _| {
        let mut config = rome.config.clone();
        config.spec.secret_name = "nowhere".to_owned();
        config.spec.peer_public_key = None;
        at_once(rome.store.put(&config.into())).unwrap();
        let _gateway = rome.start();
        let missing = "Secret nowhere does not exist";
        let says_so = |problems: &[String]| matches!(problems, [one] if one.starts_with(missing));
        rome.until("the problem", || says_so(&rome.status().problems));
        assert!(rome.http("/readyz").starts_with("HTTP/1.1 200"));
        assert!(rome.http("/metrics").contains("openmetrics-text"));
        assert_eq!(rome.connection(), None);
    });
}

/// One cluster of one host.
struct Side {
    netns: Netns,
    directory: TempDir,
    store: Store,
    config: GatewayConfig,
}

struct Gateway(Child);

/// A directory answers at once.
fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

/// A namespace as a path that another process can open.
fn path_of(netns: &Netns) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd())
}

fn reaches(side: &Side) -> bool {
    ping(side, POD, SEEN_AS).contains("1 received")
}

fn ping(side: &Side, from: &str, to: &str) -> String {
    let ping = || Command::new("ping").args(["-c", "1", "-W", "1", "-I", from, to]).output();
    String::from_utf8(side.netns.run(ping).unwrap().unwrap().stdout).unwrap()
}

fn config_of(role: Role) -> GatewayConfig {
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
    fn stop(&mut self) {
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

fn in_two_hosts(test: impl Fn(&Side, &Side) + Send + Sync) {
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
fn wire(rome: &Netns, milan: &Netns) {
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
    fn new(netns: Netns, role: Role, key: &PrivateKey, peer: &PrivateKey) -> Self {
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

    /// The gateway ends with the thread that this is called from, even if that is killed.
    fn start(&self) -> Gateway {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", path_of(&self.netns)))
            .args(["setpriv", "--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_gateway")])
            .args(["--standalone", "--namespace", "tenant", "--name", "gw", "--log-level", "info"])
            .args(["--run-dir", &path("run"), "--state-dir", &path("state")])
            .arg(format!("--http=unix:{}", self.socket().display()))
            .stdin(Stdio::null());
        Gateway(command.spawn().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("http.sock")
    }

    fn connection(&self) -> Option<ConnectionStatus> {
        let name = ObjectRef::new(Kind::Connection, "tenant", "gw-gw");
        let object = at_once(self.store.get(&name)).unwrap()?;
        Connection::try_from(object).unwrap().status
    }

    fn status(&self) -> GatewayConfigStatus {
        let object: Option<Object> =
            at_once(self.store.get(&ObjectRef::new(Kind::GatewayConfig, "tenant", "gw"))).unwrap();
        GatewayConfig::try_from(object.unwrap()).unwrap().status.unwrap_or_default()
    }

    fn wait_for(&self, value: ConnectionValue) {
        self.until(&format!("{value:?}"), || self.connection().is_some_and(|c| c.value == value));
    }

    fn until(&self, what: &str, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() {
            let late = since.elapsed() > Duration::from_secs(10);
            assert!(!late, "waited for {what}; {:?} {:?}", self.connection(), self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn http(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn metrics(&self) -> String {
        self.http("/metrics")
    }

    fn metric(&self, name: &str) -> String {
        let metrics = self.metrics();
        let line = metrics.lines().find(|line| line.starts_with(name));
        line.unwrap_or_else(|| panic!("no {name} in {metrics}")).to_owned()
    }
}
