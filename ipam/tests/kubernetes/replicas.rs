//! Two replicas, of which each answers.

use std::collections::BTreeSet;

use api_server::{ApiServer, skip};
use fabric_api::crds;
use futures::future::join_all;
use ipam_proto::ipam_client::IpamClient;
use ipam_proto::{NetworkAcquireRequest, NetworkAvailableRequest, NetworkReleaseRequest};
use tonic::Code;
use tonic::transport::Channel;

use crate::{Ipam, TIMEOUT};

const CIDR: &str = "10.200.0.0/16";

async fn acquire(mut ipam: IpamClient<Channel>) -> String {
    let began = std::time::Instant::now();
    loop {
        let wanted = NetworkAcquireRequest { cidr: CIDR.to_owned(), ..Default::default() };
        match ipam.network_acquire(wanted).await {
            Ok(granted) => return granted.into_inner().cidr,
            // Not read yet, or others were quicker.
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status}");
                assert!(began.elapsed() < TIMEOUT, "{status}");
            }
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

async fn is_available(ipam: &mut IpamClient<Channel>, cidr: &str) -> bool {
    let request = NetworkAvailableRequest { cidr: cidr.to_owned() };
    ipam.network_is_available(request).await.unwrap().into_inner().available
}

/// Writes of ConfigMaps that the API server has answered so far.
fn note_writes(server: &ApiServer) -> u64 {
    let text = server.kubectl(&["get", "--raw", "/metrics"], "").unwrap();
    let is_write = |line: &&str| {
        line.starts_with("apiserver_request_total")
            && line.contains("resource=\"configmaps\"")
            && ["APPLY", "PATCH", "POST", "PUT"].iter().any(|verb| line.contains(verb))
    };
    let count = |line: &str| line.rsplit_once(' ')?.1.parse::<u64>().ok();
    text.lines().filter(is_write).filter_map(count).sum()
}

#[tokio::test]
async fn replicas_grant_nothing_twice() {
    let dir = tempfile::tempdir().unwrap();
    let server = match ApiServer::start(dir.path().join("server")) {
        Ok(server) => server,
        Err(why) => return skip(&why),
    };
    for crd in crds::liqo() {
        let crd = serde_json::to_string(&crd).unwrap();
        server.kubectl(&["apply", "--server-side", "--filename=-"], &crd).unwrap();
    }
    server.kubectl(&["create", "namespace", "liqo"], "").unwrap();
    let [one, other] =
        ["one.sock", "other.sock"].map(|name| Ipam::start(&server, dir.path(), name, &[]));
    let clients = [one.client().await, other.client().await];

    let calls = (0..40).map(|n| acquire(clients[n % 2].clone()));
    let granted = join_all(calls).await;
    let all: BTreeSet<&String> = granted.iter().collect();
    assert_eq!(all.len(), granted.len(), "{granted:?}");

    // A release is visible to the other replica at once.
    let [mut first, mut second] = clients.clone();
    assert!(!is_available(&mut second, CIDR).await);
    first.network_release(NetworkReleaseRequest { cidr: CIDR.to_owned() }).await.unwrap();
    assert!(is_available(&mut second, CIDR).await);
    assert_eq!(acquire(second.clone()).await, CIDR);
    assert_ne!(acquire(first).await, CIDR);

    // A grant that no object has yet outlives the replica that made it.
    let last = acquire(clients[0].clone()).await;
    drop(one);
    let next = acquire(second.clone()).await;
    assert!(next != last && !all.contains(&next), "{next}, of {granted:?} and {last}");

    // Releases are noted together: one after the other, those of 50 peerings took minutes.
    let before = note_writes(&server);
    let releases = granted.iter().filter(|cidr| *cidr != CIDR).map(|cidr| {
        let mut ipam = second.clone();
        let request = NetworkReleaseRequest { cidr: cidr.clone() };
        async move { ipam.network_release(request).await.unwrap() }
    });
    let releases = join_all(releases).await.len();
    let writes = note_writes(&server) - before;
    assert!(releases == 39 && (1..20).contains(&writes), "{writes} writes");
}
