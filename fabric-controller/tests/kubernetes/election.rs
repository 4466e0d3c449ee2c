//! Election: one of several controllers works.

use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::lease::Election;
use fabric_store::Store;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::cluster::{
    Cluster, client, cluster, cluster_alone, cluster_ip, peering, server, tenant,
};

const LEASE: &str = "weft-fabric-controller";

fn candidate(cluster: &Cluster, namespace: &str, name: &str) -> Election {
    let mut server =
        Store::kubernetes(Some(&cluster.server.admin())).unwrap().api_server().unwrap();
    server.namespace = namespace.to_owned();
    Election::new(&server, name)
}

fn holder(cluster: &Cluster, namespace: &str) -> serde_json::Value {
    cluster.get("lease", namespace, LEASE).unwrap()["spec"]["holderIdentity"].clone()
}

async fn wins_within(candidate: &mut Election, seconds: f64) -> Duration {
    let began = Instant::now();
    let won = timeout(Duration::from_secs_f64(seconds), candidate.won()).await;
    assert!(won.is_ok(), "not within {seconds} s");
    began.elapsed()
}

async fn stays_elected(first: &mut Election, other: &mut Election, time: Duration) {
    tokio::select! {
        () = first.lost() => panic!("lost"),
        () = other.won() => panic!("two of them"),
        () = tokio::time::sleep(time) => {}
    }
}

#[test]
fn killed_leader_is_replaced() {
    let Some(cluster) = cluster() else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(take_over(cluster));
}

async fn take_over(cluster: &Cluster) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "votes"}});
    cluster.apply(&namespace);
    let [mut first, mut second] = ["one", "two"].map(|name| candidate(cluster, "votes", name));
    wins_within(&mut first, 5.0).await;
    assert_eq!(holder(cluster, "votes"), "one");

    // While it is renewed, no other candidate gets it.
    stays_elected(&mut first, &mut second, Duration::from_secs(17)).await;
    // Killed. What counts is 15 s without a renewal, checked every two seconds by a machine that is busy.
    drop(first);
    wins_within(&mut second, 15.0 + 10.0).await;
    assert_eq!(holder(cluster, "votes"), "two");

    let mut third = candidate(cluster, "votes", "three");
    second.release().await;
    assert!(wins_within(&mut third, 5.0).await < Duration::from_secs(3));
    // A candidate that was held up finds that it has lost.
    assert!(timeout(Duration::from_secs(5), second.lost()).await.is_ok());
    assert_eq!(holder(cluster, "votes"), "three");
}

/// Unlike one that nobody can connect to.
#[test]
fn ended_leader_is_replaced_within_seconds() {
    let Some(cluster) = cluster() else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(replace_ended(cluster));
}

async fn replace_ended(cluster: &Cluster) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ended"}});
    cluster.apply(&namespace);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let [first, mut second] = ["one", "two"].map(|name| candidate(cluster, "ended", name));
    let mut first = first.listening_at(listener.local_addr().ok());
    wins_within(&mut first, 5.0).await;
    stays_elected(&mut first, &mut second, Duration::from_secs(6)).await;
    // Its process is there, but renews nothing.
    drop(first);
    assert!(timeout(Duration::from_secs(6), second.won()).await.is_err());
    drop(listener);
    wins_within(&mut second, 4.0).await;
    assert_eq!(holder(cluster, "ended"), "two");
}

#[test]
fn withdrawal_gets_lease_and_others_wait() {
    let Some(cluster) = cluster() else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(request_lease(cluster));
}

async fn request_lease(cluster: &Cluster) {
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "takeover"}});
    cluster.apply(&namespace);
    let [mut first, mut second, last] =
        ["one", "two", "last"].map(|name| candidate(cluster, "takeover", name));
    let mut last = last.taking_over();
    wins_within(&mut first, 5.0).await;
    let released = async {
        first.lost().await;
        first.release().await;
    };
    tokio::select! {
        () = async { tokio::join!(released, wins_within(&mut last, 8.0)); } => {}
        () = second.won() => panic!("that one did not request it"),
    }
    assert_eq!(holder(cluster, "takeover"), "last");

    last.leave_locked(Duration::from_secs(18)).await.unwrap();
    drop(last);
    let waited = wins_within(&mut second, 18.0 + 10.0).await;
    assert!(waited > Duration::from_secs(16), "{waited:?}");
}

#[test]
fn stopped_controller_is_replaced_at_once() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let first = Pid::from_raw(cluster.first.try_into().unwrap());
    let held = |name: &str| {
        let lease = cluster.get("lease", "liqo", LEASE)?;
        let holder = lease["spec"]["holderIdentity"].as_str()?.to_owned();
        holder.starts_with(&format!("{name}_")).then_some(())
    };
    cluster.until("the first one works", || held("first"));
    cluster.run_controller("second");
    std::thread::sleep(Duration::from_secs(3));
    held("first").expect("the second one waits");

    cluster.apply_all(&peering("bath"));
    cluster.apply(&server("bath", &cluster_ip()));
    for (pod, node, address) in [("a", "n1", "10.200.1.30"), ("b", "n2", "10.200.2.30")] {
        cluster.run_pod("bath", pod, node, address);
    }
    let has_tunnel = |address: &str| {
        let config = json!({"apiVersion": "fabric.weft.dev/v1alpha1", "kind": "GatewayConfig",
            "metadata": {"name": "server", "namespace": tenant("bath")}});
        cluster.set_status(&config, &json!({"active": {"address": address, "epoch": 7}}));
    };
    let is_labelled = |pod: &str, active: &str| {
        let pod = cluster.get("pod", &tenant("bath"), pod)?;
        (pod["metadata"]["labels"][labels::ACTIVE] == active).then_some(())
    };
    let uid = |pod: &str| {
        let pod = cluster.get("pod", &tenant("bath"), pod).unwrap();
        pod["metadata"]["uid"].clone()
    };
    let selects = |pod: &str| {
        let service = cluster.get("service", &tenant("bath"), "gw-server")?;
        (service["spec"]["selector"][labels::REPLICA] == uid(pod)).then_some(())
    };
    cluster.until("a config", || cluster.get("gatewayconfig", &tenant("bath"), "server"));
    has_tunnel("10.200.1.30");
    cluster.until("the other pod has no tunnel", || is_labelled("b", "false"));
    cluster.until("the Service leads to the one that has it", || selects("a"));
    kill(first, Signal::SIGSTOP).unwrap();
    let began = Instant::now();
    has_tunnel("10.200.2.30");
    cluster.until("it has the tunnel", || {
        is_labelled("a", "false").and_then(|()| is_labelled("b", "true"))
    });
    cluster.until("the Service leads there", || selects("b"));
    // After that another one would work.
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    held("first").expect("it has the Lease");
    kill(first, Signal::SIGCONT).unwrap();

    let began = Instant::now();
    kill(first, Signal::SIGTERM).unwrap();
    cluster.until("the second one works", || held("second"));
    // One that is not let go takes 15 s and more.
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    cluster.apply_all(&peering("wells"));
    cluster.apply(&client("wells"));
    cluster.until("a gateway", || cluster.get("deployment", &tenant("wells"), "gw-client"));

    let mut changed = server("bath", &cluster_ip());
    changed["spec"]["endpoint"]["port"] = json!(51999);
    cluster.apply(&changed);
    cluster.until("the Service has the other port", || {
        let service = cluster.get("service", &tenant("bath"), "gw-server")?;
        (service["spec"]["ports"][0]["port"] == 51999).then_some(())
    });
    assert!(selects("b").is_some(), "it leads where it did");
}
