//! Manifests come, change and go.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use fabric_api::fabric::NodeConfigStatus;
use fabric_store::{Kind, Object};

use crate::{Cluster, client_of, until};

#[tokio::test]
async fn peering_is_published_soon_after_its_manifests() {
    let cluster = Cluster::started("rome").await;
    until("the node's address is published", || {
        cluster.node("n1").is_some_and(|node| node.spec.overlay.is_some())
    })
    .await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    let took = until("published", || cluster.gateway("milan", "client").is_some()).await;
    // 300 ms is the aim; a machine at work on other things may take longer.
    assert!(took < Duration::from_secs(1), "{took:?}");
    let config = cluster.gateway("milan", "client").unwrap();
    assert_eq!(config.spec.remaps.len(), 2);
    assert!(config.spec.remaps.iter().all(|remap| remap.remote != remap.local));

    let status = || {
        let object = cluster.get(Kind::Configuration, "liqo-tenant-milan", "milan").unwrap();
        object.to_value()["status"].clone()
    };
    until("its condition names what it waits for", || {
        status()["conditions"][0]["message"]
            == "no routes yet on n1; run `weft agent --node n1` there, if it does not run"
    })
    .await;
    assert_eq!(status().get("remote"), None, "pods would send in clear");
    let mut node = cluster.node("n1").unwrap();
    let applied_generation = node.metadata.generation.unwrap();
    node.status = Some(NodeConfigStatus { applied_generation, ..NodeConfigStatus::default() });
    cluster.store.put_status(&node.into()).await.unwrap();
    until("its condition is True", || status()["conditions"][0]["status"] == "True").await;
    let object = cluster.get(Kind::Configuration, "liqo-tenant-milan", "milan").unwrap().to_value();
    assert_eq!(object["spec"]["local"]["cidr"]["pod"][0], "10.200.0.0/16");
    assert_eq!(object["status"]["remote"]["cidr"]["pod"][0], config.spec.remaps[0].local);
    assert_eq!(cluster.problems(), [""; 0]);
    assert_eq!(
        fs::read_to_string(cluster.path("manifests/milan.yaml")).unwrap(),
        client_of("milan", 30742)
    );
    assert_eq!(fs::read_dir(cluster.path("manifests")).unwrap().count(), 2);
}

#[tokio::test]
async fn edit_keeps_uid_and_increments_generation() {
    let cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    cluster.write("turin.yaml", &client_of("turin", 30742));
    let ready = |peer| cluster.gateway(peer, "client").is_some();
    until("both", || ready("milan") && ready("turin")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let before = ["milan", "turin"].map(|peer| cluster.gateway(peer, "client").unwrap());
    cluster.write("milan.yaml", &client_of("milan", 31000));
    let port = || cluster.gateway("milan", "client").unwrap().spec.endpoint.unwrap().port;
    until("the new port", || port() == 31000).await;
    let after = ["milan", "turin"].map(|peer| cluster.gateway(peer, "client").unwrap());
    assert_eq!(after[0].metadata.uid, before[0].metadata.uid);
    assert_eq!(after[0].metadata.generation.unwrap(), before[0].metadata.generation.unwrap() + 1);
    assert_eq!(after[1], before[1], "the other one stays");
}

#[tokio::test]
async fn removing_manifests_removes_what_was_made_for_them() {
    let cluster = Cluster::started("rome").await;
    let settled = || cluster.node("n1").is_some_and(|node| !node.spec.external.is_empty());
    until("the node", settled).await;
    let (held, files) = (cluster.ipam.taken.held(), cluster.written().len());
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || {
        cluster
            .node("n1")
            .is_some_and(|node| node.spec.peerings.iter().any(|p| p.gateway.is_some()))
    })
    .await;
    cluster.remove("milan.yaml");
    until("gone", || cluster.gateway("milan", "client").is_none()).await;
    until("given back", || cluster.ipam.taken.held() == held).await;
    until("nothing left but the key", || cluster.written().len() == files + 1).await;
    assert!(cluster.node("n1").unwrap().spec.peerings.is_empty());
}

#[tokio::test]
async fn corrected_cidr_has_the_prefix_it_had() {
    let cluster = Cluster::started("rome").await;
    let local = |remote: &str| {
        cluster.acknowledge("n1");
        let remaps = cluster.gateway("milan", "client")?.spec.remaps;
        remaps.into_iter().find(|remap| remap.remote == remote).map(|remap| remap.local)
    };
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || local("10.200.0.0/16").is_some()).await;
    let before = local("10.200.0.0/16");
    until("no prefixes but those of records", || {
        local("10.200.0.0/16");
        cluster.node("n1").unwrap().spec.from_records
    })
    .await;
    let mistaken = client_of("milan", 30742).replace("10.200.0.0/16", "10.222.0.0/16");
    cluster.write("milan.yaml", &mistaken);
    until("seen under another one", || local("10.222.0.0/16").is_some()).await;
    let refused = || {
        let node = cluster.node("n1").unwrap();
        node.spec.refused.into_iter().map(|refused| refused.prefix).collect::<Vec<_>>()
    };
    until("the old one is refused", || {
        local("10.222.0.0/16");
        refused().contains(before.as_ref().unwrap())
    })
    .await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("corrected", || local("10.200.0.0/16").is_some()).await;
    assert_eq!(local("10.200.0.0/16"), before);
}

#[tokio::test]
async fn generated_key_is_private_and_outlives_gateway() {
    let cluster = Cluster::started("rome").await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || cluster.gateway("milan", "client").is_some()).await;
    let path = cluster.path("state/secrets/liqo-tenant-milan.gw-client.yaml");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let Some(Object::Secret(secret)) = cluster.get(Kind::Secret, "liqo-tenant-milan", "gw-client")
    else {
        panic!()
    };
    let private =
        fabric_api::PrivateKey::from_bytes(&secret.data.as_ref().unwrap()["privateKey"].0).unwrap();
    assert_eq!(
        private.public().as_bytes().as_slice(),
        secret.data.as_ref().unwrap()["publicKey"].0
    );
    let text = fs::read_to_string(&path).unwrap();
    let line = text.lines().find(|line| line.contains("privateKey")).unwrap();
    let key = line.split_once(": ").unwrap().1.trim_matches(['"', '\'']);
    for (file, _, content) in cluster.written() {
        assert!(file == path || !content.contains(key), "{}", file.display());
    }
    cluster.remove("milan.yaml");
    until("gone", || cluster.gateway("milan", "client").is_none()).await;
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("back", || cluster.gateway("milan", "client").is_some()).await;
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[tokio::test]
async fn rapid_additions_and_removals_leak_nothing() {
    let cluster = Cluster::started("rome").await;
    let settled = || cluster.node("n1").is_some_and(|node| !node.spec.external.is_empty());
    until("the node", settled).await;
    let held = cluster.ipam.taken.held();
    for round in 0..30 {
        cluster.write("milan.yaml", &client_of("milan", 30000 + round));
        tokio::time::sleep(Duration::from_millis(u64::from(round) * 7 % 90)).await;
        cluster.remove("milan.yaml");
        tokio::time::sleep(Duration::from_millis(u64::from(round) * 11 % 70)).await;
    }
    cluster.write("milan.yaml", &client_of("milan", 30742));
    until("published", || cluster.gateway("milan", "client").is_some()).await;
    let want = |(prefixes, addresses): (Vec<String>, usize)| (prefixes.len() + 2, addresses + 2);
    until("exactly what is needed is held", || {
        let (prefixes, addresses) = cluster.ipam.taken.held();
        (prefixes.len(), addresses) == want(held.clone())
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (prefixes, _) = cluster.ipam.taken.held();
    let remaps = cluster.gateway("milan", "client").unwrap().spec.remaps;
    assert!(remaps.iter().all(|remap| prefixes.contains(&remap.local)), "{remaps:?} {prefixes:?}");
    cluster.remove("milan.yaml");
    until("all is given back", || cluster.ipam.taken.held() == held).await;
}
