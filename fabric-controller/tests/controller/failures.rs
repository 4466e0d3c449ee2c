//! Programs stop, files are wrong.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fabric_api::fabric::{FabricRecord, GatewayConfig, Remap};
use fabric_store::Kind;

use crate::ipam::FakeIpam;
use crate::{Cluster, client_of, external_network, until};

fn is_whole(cluster: &Cluster, peer: &str) -> bool {
    let Some(node) = cluster.node("n1") else { return false };
    let mut peerings = node.spec.peerings.iter();
    cluster.gateway(peer, "client").is_some_and(|config| config.spec.nodes.len() == 1)
        && peerings.any(|p| p.peer_cluster_id == peer && p.gateway.is_some())
}

#[tokio::test]
async fn restart_writes_nothing_and_requests_nothing() {
    let mut cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    cluster.write("turin.yaml", &client_of("turin", 30742));
    until("both", || is_whole(&cluster, "milan") && is_whole(&cluster, "turin")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.stop().await;
    let (written, requested) = (cluster.written(), cluster.ipam.taken.acquired());
    cluster.start();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(cluster.written(), written);
    assert_eq!(cluster.ipam.taken.acquired(), requested);
    // It was at work.
    cluster.write("milan.yaml", &client_of("milan", 31000));
    let port = || cluster.gateway("milan", "client").unwrap().spec.endpoint.unwrap().port;
    let took = until("an edit is published", || port() == 31000).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    // Nor did it begin to later on.
    let of_turin = |mut files: Vec<(PathBuf, SystemTime, String)>| {
        files.retain(|(path, ..)| path.to_string_lossy().contains("turin"));
        files
    };
    assert_eq!(of_turin(cluster.written()), of_turin(written));
    assert_eq!(cluster.ipam.taken.acquired(), requested);
}

#[tokio::test]
async fn objects_removed_while_stopped_go_at_start() {
    let mut cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    cluster.stop().await;
    cluster.remove("milan.yaml");
    cluster.start();
    until("gone", || cluster.gateway("milan", "client").is_none()).await;
    until("its statuses too", || {
        let statuses = fs::read_dir(cluster.path("run/published/status/configurations")).unwrap();
        statuses.count() == 0
    })
    .await;
}

#[tokio::test]
async fn without_ipam_published_objects_stay() {
    let mut cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    cluster.ipam.kill();
    cluster.write("turin.yaml", &client_of("turin", 30742));
    until("it is reported", || {
        cluster.problems().iter().any(|problem| problem.contains("ipam cannot be reached"))
    })
    .await;
    assert!(is_whole(&cluster, "milan"));
    cluster.write("milan.yaml", &client_of("milan", 31000));
    let port = || cluster.gateway("milan", "client").unwrap().spec.endpoint.unwrap().port;
    let took = until("edits need no ipam", || port() == 31000).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(cluster.gateway("turin", "client").is_none());
    cluster.ipam.start();
    until("made good", || is_whole(&cluster, "turin")).await;
    until("no problem is left", || cluster.problems().is_empty()).await;
}

#[tokio::test]
async fn absent_ipam_is_no_problem_once_unneeded() {
    let mut cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    cluster.ipam.kill();
    cluster.write("turin.yaml", &client_of("turin", 30742));
    let reported = || cluster.problems().iter().any(|p| p.contains("ipam cannot be reached"));
    until("it is reported", reported).await;
    cluster.remove("turin.yaml");
    until("nobody asks it for anything", || cluster.problems().is_empty()).await;
}

#[tokio::test]
async fn ipam_is_retried_despite_failing_writes() {
    let mut cluster = Cluster::new("rome");
    // No file can take the place of this.
    fs::create_dir_all(cluster.path("state/secrets/liqo-tenant-milan.gw-client.yaml/full"))
        .unwrap();
    cluster.write("milan.yaml", &client_of("milan", 30742));
    cluster.start();
    let is_reported = |what: &str| cluster.problems().iter().any(|problem| problem.contains(what));
    until("both", || is_reported("cannot write") && is_reported("ipam cannot be reached")).await;
    cluster.ipam.start();
    let node = || cluster.node("n1").is_some_and(|config| config.spec.overlay.is_some());
    let took = until("it is requested", node).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[tokio::test]
async fn ipam_may_come_last() {
    let mut cluster = Cluster::new("rome");
    cluster.write("milan.yaml", &client_of("milan", 30742));
    cluster.start();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(cluster.gateway("milan", "client").is_none());
    cluster.ipam.start();
    until("published", || is_whole(&cluster, "milan")).await;
}

#[tokio::test]
async fn manifests_of_cluster_may_come_last() {
    let mut cluster = Cluster::new("rome");
    cluster.remove("cluster.yaml");
    cluster.ipam.start();
    cluster.start();
    cluster.write("milan.yaml", &client_of("milan", 30742));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(cluster.gateway("milan", "client").is_none());
    assert_eq!(cluster.ipam.taken.acquired(), 0, "a peer must not get what the cluster will need");
    cluster.write("cluster.yaml", &crate::cluster_manifests("rome"));
    until("published", || is_whole(&cluster, "milan")).await;
}

#[tokio::test]
async fn fault_names_file_and_line_and_spares_others() {
    let cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    let before = cluster.gateway("milan", "client");
    cluster.write("turin.yaml", &client_of("turin", 0));
    cluster.write("half.yaml", &client_of("athens", 30742)[..420]);
    cluster.write("junk.yaml", "\u{0}\u{1}: [");
    until("reported", || cluster.problems().len() >= 3).await;
    let problems = cluster.problems();
    let port = "turin.yaml:38: GatewayClient liqo-tenant-turin/client: spec.endpoint.port: found 0; \
                expected a port, 1 to 65535";
    assert!(problems.contains(&port.to_owned()), "{problems:#?}");
    assert!(problems.iter().any(|problem| problem.starts_with("junk.yaml:1: ")), "{problems:#?}");
    cluster.write("turin.yaml", &client_of("turin", 30742));
    until("a good one beside them", || is_whole(&cluster, "turin")).await;
    let mut after = cluster.gateway("milan", "client");
    after.as_mut().unwrap().spec.egress.clear();
    assert_eq!(after.map(|config| config.spec), before.map(|config| config.spec));
    cluster.remove("turin.yaml");
    until("gone, broken neighbours or not", || cluster.gateway("turin", "client").is_none()).await;
    cluster.remove("half.yaml");
    cluster.remove("junk.yaml");
    until("all is well", || cluster.problems().is_empty()).await;
}

#[tokio::test]
async fn cut_published_file_is_rewritten_unchanged() {
    let cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    for below in [
        "run/published/gatewayconfigs/liqo-tenant-milan.client.yaml",
        "run/published/nodeconfigs/n1.yaml",
        "state/secrets/liqo-tenant-milan.gw-client.yaml",
    ] {
        let path = cluster.path(below);
        let whole = fs::read_to_string(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        until("rewritten", || fs::read_to_string(&path).unwrap() == whole).await;
    }
    until("no problem is left", || cluster.problems().is_empty()).await;
}

#[tokio::test]
async fn start_with_bad_manifests_uses_last_good_ones() {
    let mut cluster = Cluster::started("rome").await;
    let good = client_of("milan", 30742);
    cluster.write("milan.yaml", &good);
    until("published", || is_whole(&cluster, "milan")).await;
    let before = cluster.gateway("milan", "client").unwrap();
    let own = crate::cluster_manifests("rome");
    for bad in [
        good.replace("liqo.io/remote-cluster-id: milan", "liqo.io/remote-cluster-id: 'Milan?'"),
        good[..good.len() / 2].to_owned(),
        String::new(),
    ] {
        assert_ne!(bad, good);
        cluster.stop().await;
        cluster.write("milan.yaml", &bad);
        cluster.write("cluster.yaml", &own[..own.len() / 2]);
        let requested = cluster.ipam.taken.acquired();
        cluster.start();
        until("reported", || {
            let problems = cluster.problems();
            let of = |file: &str| problems.iter().any(|p| p.starts_with(file));
            of("milan.yaml") && of("cluster.yaml")
        })
        .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let after = cluster.gateway("milan", "client").unwrap();
        assert_eq!((&after.metadata, &after.spec), (&before.metadata, &before.spec), "{bad}");
        assert_eq!(cluster.ipam.taken.acquired(), requested);
        cluster.write("cluster.yaml", &own);
        cluster.write("milan.yaml", &good);
        until("all is well", || cluster.problems().is_empty()).await;
    }
}

#[tokio::test]
async fn removed_published_file_is_rewritten() {
    let cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    fs::remove_file(cluster.path("run/published/gatewayconfigs/liqo-tenant-milan.client.yaml"))
        .unwrap();
    until("back", || is_whole(&cluster, "milan")).await;
}

#[tokio::test]
async fn removed_grants_and_keys_are_written_again() {
    let cluster = Cluster::started("rome").await;
    let peers = ["milan", "turin"];
    for peer in peers {
        cluster.write(&format!("{peer}.yaml"), &client_of(peer, 30742));
    }
    until("published", || peers.iter().all(|peer| is_whole(&cluster, peer))).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let remaps = || peers.map(|peer| cluster.gateway(peer, "client").unwrap().spec.remaps);
    let is_kept = |path: &Path| {
        let mut names = path.components().map(|of| of.as_os_str());
        names.any(|name| name == "networks" || name == "ips" || name == "secrets")
    };
    let mut paths: Vec<PathBuf> = cluster.written().into_iter().map(|(path, ..)| path).collect();
    paths.retain(|path| path.starts_with(cluster.path("state")) && is_kept(path));
    let files = || paths.iter().map(|path| fs::read_to_string(path).ok()).collect::<Vec<_>>();
    let (before, kept) = (remaps(), files());
    assert!(paths.len() >= 10, "{paths:?}");
    let acquired = cluster.ipam.taken.acquired();
    for below in ["state/networks", "state/status/networks", "state/ips", "state/secrets", "state"]
    {
        let removed = paths.iter().filter(|path| path.starts_with(cluster.path(below)));
        removed.for_each(|path| fs::remove_file(path).unwrap());
        until(&format!("{below} is written again"), || files() == kept).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(remaps(), before, "{below}");
        assert_eq!(cluster.ipam.taken.acquired(), acquired, "{below}");
    }
    // Without the folders nothing is known to be gone, until one is there again.
    fs::remove_dir_all(cluster.path("state")).unwrap();
    cluster.write("lyon.yaml", &client_of("lyon", 30742));
    until("published", || is_whole(&cluster, "lyon")).await;
    until("all is written again", || files() == kept).await;
    assert_eq!(remaps(), before);
}

#[tokio::test]
async fn prefixes_outlast_a_moment_of_lost_manifests() {
    let cluster = Cluster::started("rome").await;
    // In another order than that of their names.
    let peers = ["turin", "milan"];
    for peer in peers {
        cluster.write(&format!("{peer}.yaml"), &client_of(peer, 30742));
        until("published", || is_whole(&cluster, peer)).await;
    }
    cluster.acknowledge("n1");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let prefixes = |peer| {
        let record = cluster.get(Kind::FabricRecord, "", &format!("peering-{peer}"))?;
        FabricRecord::try_from(record).ok()?.spec.peering.map(|peering| peering.prefixes)
    };
    let before = peers.map(prefixes);
    assert!(before.iter().all(Option::is_some), "{before:?}");
    let (manifests, aside) = (cluster.path("manifests"), cluster.path("aside"));
    for (away, is_empty) in [(50, false), (600, false), (2500, false), (2500, true)] {
        fs::rename(&manifests, &aside).unwrap();
        fs::create_dir(&manifests).unwrap();
        if !is_empty {
            cluster.write("other.yaml", "");
        }
        tokio::time::sleep(Duration::from_millis(away)).await;
        let stays = || peers.iter().all(|peer| cluster.gateway(peer, "client").is_some());
        assert!(stays() || !is_empty, "an empty folder takes nothing away");
        fs::remove_dir_all(&manifests).unwrap();
        fs::rename(&aside, &manifests).unwrap();
        let is_back = || {
            cluster.acknowledge("n1");
            let has_node = |config: GatewayConfig| config.spec.nodes.len() == 1;
            let is_back = |peer| cluster.gateway(peer, "client").is_some_and(has_node);
            peers.into_iter().all(|peer| is_back(peer) && prefixes(peer).is_some())
        };
        until("published again", is_back).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(peers.map(prefixes), before, "away for {away} ms");
    }
}

#[tokio::test]
async fn state_lost_while_stopped_changes_no_prefix() {
    let mut cluster = Cluster::started("rome").await;
    let peers = ["milan", "lyon", "turin"];
    // In another order than that of their names.
    for peer in ["turin", "milan", "lyon"] {
        cluster.write(&format!("{peer}.yaml"), &client_of(peer, 30742));
        until("published", || is_whole(&cluster, peer)).await;
    }
    let before = peers.map(|peer| cluster_remaps(&cluster, peer));
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.stop().await;
    fs::remove_dir_all(cluster.path("state")).unwrap();
    cluster.ipam.kill();
    cluster.ipam = FakeIpam::new(cluster.path("ipam.sock"));
    cluster.ipam.start();
    cluster.write("bari.yaml", &client_of("bari", 30742));
    cluster.start();
    until("all are published", || is_whole(&cluster, "bari")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let after = peers.map(|peer| cluster_remaps(&cluster, peer));
    assert_eq!(after, before);
    let networks = || fs::read_dir(cluster.path("state/networks")).unwrap().count();
    until("all are granted again", || networks() >= 4 * 2).await;
}

fn cluster_remaps(cluster: &Cluster, peer: &str) -> Vec<Remap> {
    cluster.gateway(peer, "client").unwrap().spec.remaps
}

#[tokio::test]
async fn ipam_that_forgets_grants_no_prefix_twice() {
    let cluster = Cluster::started("rome").await;
    for peer in ["milan", "lyon"] {
        cluster.write(&format!("{peer}.yaml"), &client_of(peer, 30742));
        until("published", || is_whole(&cluster, peer)).await;
    }
    // In which addresses of gateways are.
    cluster.ipam.taken.forget_all_but("10.80.0.0/16");
    cluster.write("turin.yaml", &client_of("turin", 30742));
    until("published", || is_whole(&cluster, "turin")).await;
    let peers = ["milan", "lyon", "turin"];
    let remaps = peers.into_iter().flat_map(|peer| cluster_remaps(&cluster, peer));
    let mut prefixes: Vec<String> = remaps.map(|remap| remap.local).collect();
    prefixes.extend(["10.200.0.0/16", "10.70.0.0/16"].map(str::to_owned));
    let distinct: BTreeSet<_> = prefixes.iter().collect();
    assert_eq!(distinct.len(), prefixes.len(), "{prefixes:?}");
}

#[tokio::test]
async fn peer_in_another_namespace_keeps_its_prefixes() {
    let cluster = Cluster::started("rome").await;
    cluster.ipam.taken.set_taken("10.64.0.0/14", true);
    for peer in ["milan", "turin"] {
        cluster.write(&format!("{peer}.yaml"), &client_of(peer, 30742));
        until("published", || is_whole(&cluster, peer)).await;
    }
    // Others would be granted now.
    cluster.ipam.taken.set_taken("10.64.0.0/14", false);
    let prefixes = |peer| {
        let record = cluster.get(Kind::FabricRecord, "", &format!("peering-{peer}"));
        let record = FabricRecord::try_from(record.unwrap()).ok().unwrap();
        record.spec.peering.unwrap().prefixes
    };
    let before = ["milan", "turin"].map(prefixes);
    let written = client_of("milan", 30742);
    // All but the gateway.
    let (first, gateway) = written.rsplit_once("---").unwrap();
    let other = first.replace("liqo-tenant-milan", "liqo-tenant-mlian") + "---" + gateway;
    let granted = |namespace: &str| {
        let folder = cluster.path("state/status/networks");
        let names = fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(namespace)).count()
    };
    for (text, namespace, left) in [
        (&other, "liqo-tenant-mlian", "liqo-tenant-milan"),
        (&written, "liqo-tenant-milan", "liqo-tenant-mlian"),
    ] {
        cluster.write("milan.yaml", text);
        until("granted", || granted(namespace) == 2 && granted(left) == 0).await;
        cluster.acknowledge("n1");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(["milan", "turin"].map(prefixes), before, "{namespace}");
    }
}

#[tokio::test]
async fn prefix_that_cannot_be_held_stays_its_peerings() {
    let cluster = Cluster::started("rome").await;
    let remaps = || {
        cluster.acknowledge("n1");
        cluster.gateway("milan", "client").map(|config| config.spec.remaps)
    };
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || remaps().is_some()).await;
    let is_from_records = || remaps().is_some() && cluster.node("n1").unwrap().spec.from_records;
    until("no prefixes but those of records", is_from_records).await;
    let before = remaps().unwrap();
    let holds = before.iter().map(|remap| remap.local.replace(['.', '/'], "-"));
    let holds =
        holds.map(|prefix| cluster.path(&format!("state/networks/liqo.refused-{prefix}.yaml")));
    let in_the_way: Vec<PathBuf> = holds.collect();
    in_the_way.iter().for_each(|path| fs::create_dir_all(path.join("full")).unwrap());
    cluster.remove("milan.yaml");
    until("gone", || cluster.gateway("milan", "client").is_none()).await;
    cluster.write("turin.yaml", &client_of("turin", 30742));
    until("another one is published", || cluster.gateway("turin", "client").is_some()).await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published again", || remaps().is_some()).await;
    in_the_way.iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    assert_eq!(remaps().unwrap(), before);
}

#[tokio::test]
async fn reverted_edit_leaves_no_refusal_of_ipam() {
    let cluster = Cluster::started("rome").await;
    cluster.write("external.yaml", &external_network("10.71.0.0/16"));
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || is_whole(&cluster, "milan")).await;
    cluster.write("external.yaml", &external_network("10.200.0.0/16"));
    let is_refused = || cluster.problems().iter().any(|problem| problem.contains("is taken"));
    until("refused", is_refused).await;
    cluster.write("external.yaml", &external_network("10.71.0.0/16"));
    let took = until("all is well", || cluster.problems().is_empty()).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
}
