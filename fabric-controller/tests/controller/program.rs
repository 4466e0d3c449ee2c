//! The program itself.

use std::fs::OpenOptions;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{Cluster, client_of, until};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fabric-controller"))
}

fn start(cluster: &Cluster) -> Child {
    start_with(cluster, Stdio::null())
}

fn start_with(cluster: &Cluster, log: Stdio) -> Child {
    let dirs = [("--manifests", "manifests"), ("--run-dir", "run"), ("--state-dir", "state")];
    let mut command = program();
    for (flag, below) in dirs {
        command.arg(flag).arg(cluster.path(below));
    }
    let command = command.args(["--ipam", &cluster.ipam.address().to_string(), "--node", "n1"]);
    command.stderr(log).spawn().unwrap()
}

#[tokio::test]
async fn signals_stop_cleanly_and_keep_published() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut cluster = Cluster::new("rome");
        cluster.ipam.start();
        cluster.write("milan.yaml", &client_of("milan", 30742));
        let mut child = start(&cluster);
        until("published", || cluster.gateway("milan", "client").is_some()).await;
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        let status = tokio::time::timeout(Duration::from_secs(3), async {
            loop {
                if let Some(status) = child.try_wait().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(status.await.expect("it stops").success());
        assert!(cluster.gateway("milan", "client").is_some());
    }
}

#[tokio::test]
async fn full_disk_costs_log_lines_only() {
    let mut cluster = Cluster::new("rome");
    cluster.ipam.start();
    cluster.write("milan.yaml", &client_of("milan", 30742));
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut child = start_with(&cluster, full.into());
    until("published", || cluster.gateway("milan", "client").is_some()).await;
    cluster.write("milan.yaml", &client_of("milan", 31000));
    let port = || cluster.gateway("milan", "client").unwrap().spec.endpoint.unwrap().port;
    until("an edit is published", || port() == 31000).await;
    assert!(child.try_wait().unwrap().is_none(), "it ended");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn bad_arguments_name_expected_values() {
    let help = program().arg("--help").output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    for word in ["manifests", "problems.yaml", "--kubeconfig", "unix:PATH", "--log-format"] {
        assert!(text.contains(word), "{word}");
    }
    let nowhere = program().output().unwrap();
    let text = String::from_utf8(nowhere.stderr).unwrap();
    assert!(!nowhere.status.success() && text.contains("expected --run-dir DIR or --kubernetes"));
    let both = program().args(["--kubernetes", "--run-dir", "/tmp/x"]).output().unwrap();
    assert_eq!(both.status.code(), Some(2));
    let wrong = program().args(["--run-dir", "/tmp/x", "--ipam", "nowhere"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    let text = String::from_utf8(wrong.stderr).unwrap();
    assert!(text.contains("expected unix:PATH or HOST:PORT"), "{text}");
}
