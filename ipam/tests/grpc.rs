//! The program itself, over its unix socket, with a real store under a temporary folder.
//!
//!     test -- gRPC --> ipam --.
//!       \-- status (as the fabric-controller writes it) --> store

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric_api::ipam::{IP, IPSpec, IPStatus, Network, NetworkSpec, NetworkStatus};
use fabric_api::labels;
use fabric_store::{Store, StoreArgs};
use futures::FutureExt as _;
use ipam_proto::ipam_client::IpamClient;
use ipam_proto::{
    Address, IpAcquireRequest, IpReleaseRequest, NetworkAcquireRequest, NetworkAvailableRequest,
    NetworkReleaseRequest,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const TIMEOUT: Duration = Duration::from_secs(10);

/// A directory answers at once.
fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

/// A cluster's folders.
struct Cluster(tempfile::TempDir);

impl Cluster {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn store(&self) -> Store {
        let (run_dir, state_dir) = (self.path("run"), Some(self.path("state")));
        Store::open(&StoreArgs::directories(None, run_dir, state_dir)).unwrap()
    }

    fn put_network(&self, name: &str, granted: &str, shared: bool) {
        let spec = NetworkSpec { cidr: granted.to_owned(), pre_allocated: Some(1) };
        let mut network = Network::new(name, spec);
        network.metadata.namespace = Some(labels::LIQO_NAMESPACE.to_owned());
        if shared {
            let keys = [labels::NETWORK_NOT_REMAPPED, labels::NETWORK_SHARED];
            let pairs = keys.map(|key| (key.to_owned(), "true".to_owned()));
            network.metadata.labels = Some(pairs.into());
        }
        let Ok(mut stored) = Network::try_from(at_once(self.store().put(&network.into())).unwrap())
        else {
            panic!("a Network was put");
        };
        stored.status = Some(NetworkStatus { cidr: Some(granted.to_owned()) });
        at_once(self.store().put_status(&stored.into())).unwrap();
    }

    fn put_ip(&self, name: &str, granted: &str, prefix: &str) {
        let mut ip = IP::new(name, IPSpec { ip: "192.0.2.1".to_owned(), ..IPSpec::default() });
        ip.metadata.namespace = Some(labels::LIQO_NAMESPACE.to_owned());
        let Ok(mut stored) = IP::try_from(at_once(self.store().put(&ip.into())).unwrap()) else {
            panic!("an IP was put");
        };
        let (ip, cidr) = (Some(granted.to_owned()), Some(prefix.to_owned()));
        stored.status = Some(IPStatus { ip, cidr });
        at_once(self.store().put_status(&stored.into())).unwrap();
    }

    async fn start(&self, more: &[&str]) -> Ipam {
        let ipam = Ipam::spawn(self.0.path(), more);
        let deadline = Instant::now() + TIMEOUT;
        while ipam.health("IPAM").await != Ok(true) {
            assert!(Instant::now() < deadline, "ipam did not come up: {:?}", ipam.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        ipam
    }
}

/// A running ipam. Dies with its value.
struct Ipam {
    process: Child,
    address: Address,
    log: Arc<Mutex<Vec<String>>>,
}

impl Ipam {
    fn spawn(root: &Path, more: &[&str]) -> Self {
        let address = Address::Unix(root.join("run/ipam.sock"));
        // A test process that is killed takes its ipam with it.
        let mut process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_ipam")])
            .env_remove("RUST_LOG")
            .arg("--run-dir")
            .arg(root.join("run"))
            .arg("--state-dir")
            .arg(root.join("state"))
            .args(["--listen", &address.to_string(), "--log-format", "json"])
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(process.stderr.take().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = log.clone();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line));
        });
        Self { process, address, log }
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        self.address.endpoint().unwrap().connect().await
    }

    async fn client(&self) -> IpamClient<Channel> {
        IpamClient::new(self.channel().await.unwrap())
    }

    /// Returns whether a service is serving; an error if there is no answer.
    async fn health(&self, service: &str) -> Result<bool, String> {
        let channel = self.channel().await.map_err(|error| error.to_string())?;
        let request = HealthCheckRequest { service: service.to_owned() };
        let reply = HealthClient::new(channel).check(request).await;
        reply.map(|r| r.get_ref().status == 1).map_err(|status| status.message().to_owned())
    }

    async fn prefix(
        &self,
        cidr: &str,
        (immutable, exclusive): (bool, bool),
    ) -> Result<String, Status> {
        let cidr = cidr.to_owned();
        let request = NetworkAcquireRequest { cidr, immutable, pre_allocated: 1, exclusive };
        Ok(self.client().await.network_acquire(request).await?.into_inner().cidr)
    }

    async fn address(&self, cidr: &str) -> Result<String, Status> {
        self.address_from(cidr, false).await
    }

    async fn address_from(&self, cidr: &str, from_end: bool) -> Result<String, Status> {
        let request = IpAcquireRequest { cidr: cidr.to_owned(), from_end };
        Ok(self.client().await.ip_acquire(request).await?.into_inner().ip)
    }

    async fn available(&self, cidr: &str) -> bool {
        let request = NetworkAvailableRequest { cidr: cidr.to_owned() };
        self.client().await.network_is_available(request).await.unwrap().into_inner().available
    }

    async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds(self).await {
            assert!(Instant::now() < deadline, "not {what}: {:#?}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends it and gives its exit code.
    fn stop(&mut self, signal: Signal) -> Option<i32> {
        kill(Pid::from_raw(self.process.id() as i32), signal).unwrap();
        self.process.wait().unwrap().code()
    }
}

impl Drop for Ipam {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const MUTABLE: (bool, bool) = (false, false);
const SHARED: (bool, bool) = (true, false);
const EXCLUSIVE: (bool, bool) = (true, true);

#[tokio::test]
async fn prefixes_and_addresses_are_granted_and_given_back() {
    let cluster = Cluster::new();
    let ipam = cluster.start(&[]).await;
    assert_eq!(ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap(), "10.70.0.0/16");
    assert_eq!(ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap(), "10.71.0.0/16");
    assert_eq!(ipam.prefix("fd10:200::/56", MUTABLE).await.unwrap(), "fd10:200::/56");
    assert_eq!(ipam.prefix("fd10:200::/56", MUTABLE).await.unwrap(), "fd10:200:0:100::/56");
    assert_eq!(ipam.address("10.70.0.0/16").await.unwrap(), "10.70.0.1");
    assert_eq!(ipam.address("10.70.0.0/16").await.unwrap(), "10.70.0.2");
    assert_eq!(ipam.address_from("10.70.0.0/16", true).await.unwrap(), "10.70.255.254");
    assert_eq!(ipam.address("fd10:200::/56").await.unwrap(), "fd10:200::1");

    let mut client = ipam.client().await;
    for _ in 0..2 {
        let (ip, cidr) = ("10.70.0.1".to_owned(), "10.70.0.0/16".to_owned());
        client.ip_release(IpReleaseRequest { ip, cidr }).await.unwrap();
        let cidr = "10.71.0.0/16".to_owned();
        client.network_release(NetworkReleaseRequest { cidr }).await.unwrap();
    }
    assert!(ipam.available("10.71.0.0/16").await && !ipam.available("10.70.0.0/16").await);
    assert!(!ipam.available("100.64.0.0/10").await, "outside of the pools");
}

#[tokio::test]
async fn impossible_request_is_refused_with_reason() {
    let cluster = Cluster::new();
    let ipam = cluster.start(&[]).await;
    ipam.prefix("10.0.0.0/8", SHARED).await.unwrap();
    let cases = [
        (ipam.prefix("10.5.0.0/16", EXCLUSIVE).await, Code::AlreadyExists, "10.0.0.0/8 is taken"),
        (
            ipam.prefix("100.64.0.0/10", EXCLUSIVE).await,
            Code::FailedPrecondition,
            "none of the pools",
        ),
        (
            ipam.prefix("10.0.0.7/16", MUTABLE).await,
            Code::InvalidArgument,
            "did you mean 10.0.0.0/16?",
        ),
        (ipam.prefix("pod-cidr", MUTABLE).await, Code::InvalidArgument, "not a network prefix"),
        (ipam.prefix("0.0.0.0/4", MUTABLE).await, Code::ResourceExhausted, "no other /4 is free"),
        (ipam.address("10.5.0.0/16").await, Code::FailedPrecondition, "acquire it before"),
    ];
    for (outcome, code, reason) in cases {
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(reason), "{status}");
    }
}

#[tokio::test]
async fn store_written_again_is_read_before_a_refusal() {
    let cluster = Cluster::new();
    let ipam = cluster.start(&[]).await;
    cluster.put_network("internal", "10.80.0.0/16", false);
    ipam.until("read", async |ipam| ipam.address("10.80.0.0/16").await.is_ok()).await;
}

#[tokio::test]
async fn grants_and_refusals_are_counted() {
    let cluster = Cluster::new();
    let socket = cluster.path("http.sock");
    let ipam = cluster.start(&["--http", &format!("unix:{}", socket.display())]).await;
    ipam.prefix("10.0.0.0/8", SHARED).await.unwrap();
    ipam.prefix("0.0.0.0/4", MUTABLE).await.unwrap_err();
    ipam.address("10.5.0.0/16").await.unwrap_err();
    let mut stream = UnixStream::connect(socket).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    for line in [
        r#"weft_ipam_requests_total{method="NetworkAcquire"} 2"#,
        r#"weft_ipam_grants_total{kind="prefix"} 1"#,
        r#"weft_ipam_refusals_total{kind="prefix",reason="none_free"} 1"#,
        r#"weft_ipam_refusals_total{kind="address",reason="outside_pools"} 1"#,
        r#"weft_ipam_grants_total{kind="address"} 0"#,
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn a_restart_grants_nothing_twice() {
    let cluster = Cluster::new();
    let mut ipam = cluster.start(&[]).await;
    let external = ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap();
    let remapped = ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap();
    let (first, second) =
        (ipam.address(&external).await.unwrap(), ipam.address(&external).await.unwrap());
    cluster.put_network("external-cidr", &external, false);
    cluster.put_network("milan-external", &remapped, false);
    cluster.put_network("reserved-a", "10.200.0.0/16", true);
    cluster.put_network("reserved-b", "10.200.0.0/16", true);
    cluster.put_ip("node-1", &first, &external);
    cluster.put_ip("node-2", &second, &external);
    assert_eq!(ipam.stop(Signal::SIGKILL), None);

    let ipam = cluster.start(&[]).await;
    assert_eq!(ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap(), "10.68.0.0/16");
    assert_eq!(ipam.address(&external).await.unwrap(), "10.70.0.3");
    let cidr = "10.200.0.0/16".to_owned();
    ipam.client().await.network_release(NetworkReleaseRequest { cidr }).await.unwrap();
    assert!(!ipam.available("10.200.0.0/16").await, "the other reservation still counts");
    assert_eq!(ipam.health("IPAM/consistent").await, Ok(true));
}

/// It is the only program that is restarted: `weft up` restores nothing.
#[tokio::test]
async fn damaged_grant_is_restored_or_nothing_is_granted() {
    let cluster = Cluster::new();
    cluster.put_network("milan-pod", "10.70.0.0/16", false);
    let file = cluster.path("state/status/networks/liqo.milan-pod.yaml");
    std::fs::write(&file, "uid: [").unwrap();
    let mut ipam = cluster.start(&[]).await;
    assert_eq!(ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap(), "10.71.0.0/16");
    ipam.stop(Signal::SIGKILL);

    std::fs::write(&file, "uid: [").unwrap();
    std::fs::remove_dir_all(cluster.path("state/notes")).unwrap();
    let ipam = Ipam::spawn(cluster.0.path(), &[]);
    ipam.until("refused", async |ipam| ipam.log().join("").contains("is damaged")).await;
    let refusal = ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap_err();
    assert_eq!(refusal.code(), Code::Unavailable);
    for says in [file.to_str().unwrap(), "Restore it from a backup, or remove it"] {
        assert!(refusal.message().contains(says), "{refusal}");
    }
    std::fs::remove_file(&file).unwrap();
    ipam.until("serving", async |ipam| ipam.health("IPAM").await == Ok(true)).await;
    assert_eq!(ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap(), "10.70.0.0/16");
}

#[tokio::test]
async fn grant_of_killed_ipam_is_not_granted_again() {
    let cluster = Cluster::new();
    cluster.put_network("external-cidr", "10.70.0.0/16", false);
    let mut taken = std::collections::BTreeSet::new();
    for _ in 0..5 {
        let mut ipam = cluster.start(&["--sync-interval", "100ms"]).await;
        for _ in 0..3 {
            assert!(taken.insert(ipam.prefix("10.80.0.0/16", MUTABLE).await.unwrap()));
            assert!(taken.insert(ipam.address("10.70.0.0/16").await.unwrap()));
        }
        let fixed = ipam.prefix("10.200.0.0/16", EXCLUSIVE).await;
        assert_eq!(fixed.is_ok(), taken.insert("10.200.0.0/16".to_owned()), "{fixed:?}");
        tokio::time::sleep(Duration::from_millis(250)).await;
        ipam.stop(Signal::SIGKILL);
    }
    let flags = ["--sync-interval", "100ms", "--sync-grace-period", "1s"];
    let ipam = cluster.start(&flags).await;
    ipam.until("freed, as nobody ever claimed it", async |i| i.available("10.80.0.0/16").await)
        .await;
    assert!(!ipam.available("10.70.0.0/16").await, "the store knows this one");
}

#[tokio::test]
async fn inconsistent_store_is_reported_and_served() {
    let cluster = Cluster::new();
    cluster.put_network("left", "10.70.0.0/16", false);
    cluster.put_network("right", "10.70.0.0/17", false);
    cluster.put_ip("lost", "10.99.0.1", "10.99.0.0/16");
    cluster.put_network("unmasked", "10.30.0.7/16", false);
    let ipam = cluster.start(&["--sync-interval", "200ms"]).await;
    assert_eq!(ipam.health("IPAM/consistent").await, Ok(false));
    let log = ipam.log().join("\n");
    for reported in [
        "Network liqo/left holds 10.70.0.0/16 and Network liqo/right holds 10.70.0.0/17",
        "IP liqo/lost holds 10.99.0.1 of 10.99.0.0/16, which no Network holds",
        "10.30.0.7/16 has host bits set; did you mean 10.30.0.0/16?",
    ] {
        assert!(log.contains(reported), "{reported} is not in {log}");
    }
    assert!(!ipam.available("10.70.0.0/17").await);

    cluster.put_network("right", "10.71.0.0/17", false);
    ipam.until("mended", async |ipam| ipam.health("IPAM/consistent").await == Ok(true)).await;
    ipam.until("freed", async |ipam| !ipam.available("10.71.0.0/17").await).await;
}

#[tokio::test]
async fn unstored_grant_is_freed_after_grace_period() {
    let cluster = Cluster::new();
    let flags = ["--sync-interval", "100ms", "--sync-grace-period", "1s"];
    let ipam = cluster.start(&flags).await;
    ipam.prefix("10.70.0.0/16", MUTABLE).await.unwrap();
    ipam.prefix("10.80.0.0/16", MUTABLE).await.unwrap();
    cluster.put_network("internal-cidr", "10.80.0.0/16", false);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!ipam.available("10.70.0.0/16").await, "still within the grace period");
    ipam.until("freed", async |ipam| ipam.available("10.70.0.0/16").await).await;
    assert!(!ipam.available("10.80.0.0/16").await, "the store knows this one");
}

#[tokio::test]
async fn ipam_stops_cleanly_and_restarts_after_kill() {
    let cluster = Cluster::new();
    for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGINT] {
        let mut ipam = cluster.start(&[]).await;
        let clean = signal != Signal::SIGKILL;
        assert_eq!(ipam.stop(signal), clean.then_some(0));
        assert_eq!(cluster.path("run/ipam.sock").exists(), !clean);
    }
}

#[tokio::test]
async fn second_ipam_does_not_take_socket() {
    let cluster = Cluster::new();
    let first = cluster.start(&[]).await;
    let mut second = Ipam::spawn(cluster.0.path(), &[]);
    assert_eq!(second.process.wait().unwrap().code(), Some(1));
    assert_eq!(first.health("IPAM").await, Ok(true));
}
