//! Metrics and probes of the program.
//!
//! ```text
//! manifests/ --watch--> controller --HTTP, DIR/http.sock--> test
//!                            ^---- ptrace: its main thread hangs
//! ```

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::{Cluster, client_of, external_network, until};

/// Program that ends with the test.
struct Program(Child);

impl Program {
    fn start(cluster: &Cluster) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabric-controller"));
        for (flag, below) in
            [("--manifests", "manifests"), ("--run-dir", "run"), ("--state-dir", "state")]
        {
            command.arg(flag).arg(cluster.path(below));
        }
        command.args(["--ipam", &cluster.ipam.address().to_string(), "--node", "n1"]);
        command.arg(format!("--http=unix:{}", cluster.path("http.sock").display()));
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().try_into().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Status line and body; empty without a listener.
fn get(cluster: &Cluster, path: &str) -> String {
    let mut answer = String::new();
    let Ok(mut stream) = UnixStream::connect(cluster.path("http.sock")) else { return answer };
    write!(stream, "GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test]
async fn metrics_count_compilations_writes_and_grants() {
    let mut cluster = Cluster::new("rome");
    cluster.ipam.start();
    cluster.write("milan.yaml", &client_of("milan", 30742));
    let _program = Program::start(&cluster);
    until("ready", || get(&cluster, "/readyz").contains(" 200 ")).await;
    until("published", || cluster.gateway("milan", "client").is_some()).await;
    // The cluster's own pod CIDR, once more.
    cluster.write("external.yaml", &external_network("10.200.0.0/16"));
    until("refused", || cluster.problems().iter().any(|of| of.contains("is taken"))).await;
    let metrics = get(&cluster, "/metrics");
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name} is not in\n{metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!(value("weft_controller_compile_seconds_count") >= 2.0);
    assert!(value("weft_store_writes_total{kind=\"GatewayConfig\",outcome=\"written\"}") >= 1.0);
    assert!(value("weft_controller_ipam_requests_total{outcome=\"granted\"}") >= 1.0);
    assert!(value("weft_controller_ipam_requests_total{outcome=\"refused\"}") >= 1.0);
    assert!(value("weft_controller_queue_length") >= 1.0);
    assert!(value("weft_controller_elected") >= 1.0);
}

#[tokio::test]
async fn hung_controller_is_not_alive_until_it_goes_on() {
    let mut cluster = Cluster::new("rome");
    cluster.ipam.start();
    let program = Program::start(&cluster);
    until("ready", || get(&cluster, "/readyz").contains(" 200 ")).await;
    assert!(get(&cluster, "/healthz").contains(" 200 "));
    // Its main thread stands still, all others go on.
    ptrace::seize(program.pid(), ptrace::Options::empty()).unwrap();
    ptrace::interrupt(program.pid()).unwrap();
    waitpid(program.pid(), Some(WaitPidFlag::__WALL)).unwrap();
    let began = Instant::now();
    while get(&cluster, "/healthz").contains(" 200 ") {
        assert!(began.elapsed() < Duration::from_secs(60), "it still counts as alive");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(began.elapsed() > Duration::from_secs(20), "{:?} is no hang yet", began.elapsed());
    ptrace::detach(program.pid(), None).unwrap();
    until("alive again", || get(&cluster, "/healthz").contains(" 200 ")).await;
}
