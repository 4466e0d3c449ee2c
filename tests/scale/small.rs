//! The control plane with 20 nodes and 10 peerings: the benchmark's cluster, small.
//!
//! ```text
//! 20 route-agents, 10 gateways, kubelets --> kube-apiserver <-- fabric-controller --gRPC--> ipam
//! ```

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use scale::{Endpoint, Lab, Peer, Size, User};

/// Bounds are those of a machine that runs other tests, too.
const AT_MOST: Duration = Duration::from_secs(300);
const SIZE: Size = Size { nodes: 20, peerings: 10 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_cluster_is_published_and_stays_quiet() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("server");
    let started = tokio::task::spawn_blocking(|| ApiServer::start_audited(at)).await.unwrap();
    let server = match started {
        Ok(server) => Arc::new(server),
        Err(why) => return skip(&why),
    };
    let lab = Lab::start(Arc::clone(&server), dir.path(), SIZE).await.unwrap();
    let peers: Vec<Peer> = (0..SIZE.peerings).map(Peer).collect();
    lab.apply_peerings(&peers).await.unwrap();
    let published = lab.board.all_acknowledged(&peers, SIZE.nodes, AT_MOST).await;
    published.map_err(|error| lab.explain(error)).unwrap();
    let connected = lab.board.all_connected(&peers, SIZE.nodes, AT_MOST).await;
    connected.map_err(|error| lab.explain(error)).unwrap();

    let endpoint = Endpoint { address: "198.18.255.1".to_owned(), port: 4500 };
    lab.set_endpoint(peers[0], &endpoint).await.unwrap();
    let arrived = lab.board.has_endpoint(peers[0], &endpoint, AT_MOST).await;
    arrived.map_err(|error| lab.explain(error)).unwrap();

    until_quiet(&lab).await;
    let of_configs = "--output=jsonpath={.items[*].spec.fromRecords}";
    for (kind, count) in [("gatewayconfigs", SIZE.peerings), ("nodeconfigs", SIZE.nodes)] {
        let own_parts = server.kubectl(&["get", kind, "--all-namespaces", of_configs], "").unwrap();
        assert_eq!(own_parts, vec!["true"; count].join(" "), "{kind} that follow from records");
    }
    lab.set_heartbeats(true);
    let from = lab.audit().position().unwrap();
    // Each gateway writes its Connection, each kubelet its Lease.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let window = lab.audit().between(from, lab.audit().position().unwrap()).unwrap();
    let connections = window.writes_of(User::Gateway(peers[0]));
    assert!(connections.len() >= SIZE.peerings, "{connections:?}");
    assert_eq!(window.writes_of(User::Controller), [""; 0], "heartbeats change nothing");
    // A status that meets a write of the controller is written again.
    let errors = lab.board.errors().into_iter().filter(|(error, _)| !error.contains("(409)"));
    assert_eq!(errors.collect::<Vec<_>>(), []);
}

/// Waits until the controller has written nothing for three seconds.
async fn until_quiet(lab: &Lab) {
    let start = Instant::now();
    loop {
        let from = lab.audit().position().unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let window = lab.audit().between(from, lab.audit().position().unwrap()).unwrap();
        let writes = window.writes_of(User::Controller);
        if writes.is_empty() {
            return;
        }
        assert!(start.elapsed() < AT_MOST, "the controller still writes: {writes:?}");
    }
}
