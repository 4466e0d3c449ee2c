//! ```text
//!   rome (client) --------- milan (server)        all: pods 10.200.0.0/16, external 10.70.0.0/16
//!
//!   rome (client) --------- milan (server, client) --------- turin (server)
//!                           IP: an address of milan's for a pod of turin's
//! ```

use std::fs;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use weft_tests::manifests::{Peering, Spelling, configuration};
use weft_tests::traffic::{Service, TcpServer};
use weft_tests::{Cluster, ClusterSpec, MANIFESTS, wait_until};

use crate::address::{grant, reaches};
use crate::scene::{HTTP, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, traffic_passes};

#[test]
fn two_nodes_each_reach_each_other_from_everywhere() -> Result<()> {
    play(&rome_and_milan(2), |scene| {
        scene.peer("rome", "milan", PORT)?;
        traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;
        traffic_passes(scene.cluster("milan"), scene.cluster("rome"))
    })
}

#[test]
fn manifests_in_reverse_with_strings_connect() -> Result<()> {
    arrive((Spelling::Text, Spelling::List), |n| (0..n).rev().collect())
}

#[test]
fn shuffled_manifests_with_lists_connect() -> Result<()> {
    arrive((Spelling::List, Spelling::Text), |n| (0..n).map(|i| (i * 3 + 4) % n).collect())
}

/// Applies the documents of both sides in some order, each in a file of its own.
fn arrive(
    (client, server): (Spelling, Spelling),
    order: impl Fn(usize) -> Vec<usize>,
) -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let mut peering = Peering::new(&rome.spec, &milan.spec, PORT);
        (peering.client_spelling, peering.server_spelling) = (client, server);
        let mut documents: Vec<_> =
            peering.client_documents().into_iter().map(|d| (rome, d)).collect();
        documents.extend(peering.server_documents().into_iter().map(|d| (milan, d)));
        let order = order(documents.len());
        ensure!((0..documents.len()).all(|i| order.contains(&i)), "{order:?} leaves some out");
        for i in order {
            let (cluster, document) = &documents[i];
            cluster.apply(&format!("part-{i}"), document)?;
            // Long enough that the controller sees each one alone.
            std::thread::sleep(std::time::Duration::from_millis(60));
        }
        rome.wait_connected("milan", TIMEOUT)?;
        milan.wait_connected("rome", TIMEOUT)?;
        traffic_passes(rome, milan)?;
        traffic_passes(milan, rome)
    })
}

#[test]
fn middle_cluster_distinguishes_two_peers() -> Result<()> {
    let specs =
        ["rome", "milan", "turin"].iter().zip(1..).map(|(id, n)| ClusterSpec::new(id, n, 1));
    play(&specs.collect::<Vec<_>>(), |scene| {
        scene.peer("rome", "milan", PORT)?;
        scene.peer("milan", "turin", PORT)?;
        let milan = scene.cluster("milan");
        let views =
            [milan.view(&scene.cluster("rome").spec)?, milan.view(&scene.cluster("turin").spec)?];
        let overlap =
            |(_, a): &(_, fabric_api::Cidr)| views[1].0.iter().any(|(_, b)| a.overlaps(b));
        ensure!(!views[0].0.iter().any(overlap), "milan sees both in the same place: {views:?}");
        for peer in ["rome", "turin"] {
            traffic_passes(milan, scene.cluster(peer))?;
            traffic_passes(scene.cluster(peer), milan)?;
        }
        passes_through(milan, [scene.cluster("rome"), scene.cluster("turin")])
    })
}

/// The first peer reaches a pod of the second one, by an IP resource of the cluster between.
fn passes_through(middle: &Cluster, [from, to]: [&Cluster; 2]) -> Result<()> {
    let server = first_pod(to);
    let _server = TcpServer::start(&server.ns, HTTP, Service::Http)?;
    let target = middle.view(&to.spec)?.of(server.addresses[0])?;
    let external = grant(middle, target, false)?;
    let address = from.view(&middle.spec)?.of(external)?;
    reaches(first_pod(from), address)?;
    wait_until("weft status shows who is reached so", TIMEOUT, || {
        let status = middle.status()?;
        let peerings = status["peerings"].as_array().into_iter().flatten();
        let transits: Vec<_> = peerings.map(|of| (&of["cluster"], &of["transit"])).collect();
        let expected = json!([{"external": external, "target": target}]);
        let found = transits.contains(&(&json!(to.spec.id), &expected));
        ensure!(found && transits.contains(&(&json!(from.spec.id), &Value::Null)), "{transits:?}");
        let text = middle.weft(&["status"])?;
        let line = format!("{}: at {external} ({target})\n", to.spec.id);
        ensure!(text.contains(&line), "{text}");
        Ok::<_, anyhow::Error>(())
    })
}

#[test]
fn init_and_keys_suffice_for_a_peering() -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(1))?;
    for cluster in &scene.clusters {
        cluster.remove("cluster")?;
        let spec = &cluster.spec;
        let node = format!("{}={}=10.200.1.0/24", spec.node_name(1), spec.node_address(1));
        cluster.weft(&["init", "--cluster-id", &spec.id, "--node", &node, "--out", MANIFESTS])?;
    }
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;

    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    for (own, peer) in [(rome, milan), (milan, rome)] {
        let (id, other) = (&own.spec.id, &peer.spec.id);
        own.weft(&["keys", "--cluster-id", id, "--peer", other, "--out", "/run/cluster/keys"])?;
        let read = |file: &str| fs::read_to_string(own.outside("/run/cluster/keys").join(file));
        own.apply("secret", &read(&format!("{other}.gw-keys.secret.yaml"))?)?;
        peer.apply("publickey", &read(&format!("{id}-for-{other}.publickey.yaml"))?)?;
        own.apply("configuration", &configuration(&peer.spec, Spelling::List))?;
    }
    let peering = Peering::new(&rome.spec, &milan.spec, PORT);
    rome.apply("gateway", &peering.gateway_client())?;
    milan.apply("gateway", &peering.gateway_server())?;
    let result = rome.wait_connected("milan", TIMEOUT);
    let result = result.and_then(|()| milan.wait_connected("rome", TIMEOUT));
    if result.is_err() {
        eprintln!("{}\n{}", rome.report(), milan.report());
    }
    result?;
    traffic_passes(rome, milan)
}

#[test]
fn statuses_are_as_in_liqo() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let milan = scene.cluster("milan");
        let of = |kind: &str| -> Result<Value> {
            let text = milan.weft(&["get", kind, "-n", "liqo-tenant-rome", "-o", "json"])?;
            Ok(serde_json::from_str(&text)?)
        };
        wait_until("the status of the server is complete", TIMEOUT, || {
            let server = of("gatewayserver")?;
            let endpoint = &server["status"]["endpoint"];
            ensure!(endpoint["addresses"][0] == "192.0.2.33", "{server}");
            ensure!(endpoint["port"] == PORT && endpoint["protocol"] == "UDP", "{server}");
            ensure!(server["status"]["secretRef"]["name"] == "gw-keys", "{server}");
            ensure!(server["status"]["internalEndpoint"]["node"] == "milan-1", "{server}");
            let connection = of("connection")?;
            ensure!(connection["status"]["value"] == "Connected", "{connection}");
            ensure!(connection["metadata"]["name"] == "gw-server", "{connection}");
            let configuration = of("configuration")?;
            let condition = &configuration["status"]["conditions"][0];
            ensure!(condition["type"] == "NetworkCIDRsConfigured", "{configuration}");
            ensure!(condition["status"] == "True", "{configuration}");
            ensure!(
                configuration["spec"]["remote"]["cidr"]["pod"][0] == "10.200.0.0/16",
                "{configuration}"
            );
            Ok::<_, anyhow::Error>(())
        })
    })
}
