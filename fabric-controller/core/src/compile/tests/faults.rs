//! Faults are reported, and disturb nothing else.

mod cases;

use std::sync::Arc;

use fabric_api::fabric::{GatewayConfig, GatewayConfigSpec};
use fabric_api::networking::Configuration;
use fabric_objects::{Kind, Object, ObjectRef};
use serde_json::{Value, json};

use self::cases::{cases, rome, secret_with, without_label};
use super::world::{
    World, client, client_side, cluster_id, either_side, network, node, of, public_key, secret,
    server, server_side,
};

/// A cluster with a peering that runs.
fn running() -> World {
    let mut world = World::new("milan");
    client_side("turin").into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    world
}

#[test]
fn fault_names_object_field_found_and_expected() {
    let before = running().gateway("liqo-tenant-turin", "client").cloned();
    for (broken, problem) in cases() {
        let mut world = running();
        let good = server_side("rome", 30742);
        let is_gateway = matches!(broken.kind(), Kind::GatewayClient);
        for object in good.into_iter().filter(|o| !is_gateway || o.kind() != Kind::GatewayServer) {
            world.apply(object);
        }
        world.apply(broken.clone());
        world.settle();
        let problems = world.problems();
        assert!(problems.iter().any(|found| found.contains(problem)), "{problem}: {problems:#?}");
        assert!(problems.iter().all(|found| !found.contains("YHzt")), "{problems:#?}");
        let mut after = world.gateway("liqo-tenant-turin", "client").cloned();
        if let Some(after) = &mut after {
            after.egress.clear(); // the new peer's prefixes, if it got any
        }
        assert_eq!(after, before, "{problem}");
    }
}

#[test]
fn config_map_of_another_program_is_no_cluster_id() {
    let mut world = running();
    let mut other = cluster_id("rome");
    other.metadata_mut().name = Some("settings".to_owned());
    world.apply(other);
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn fault_of_newest_version_hides_those_of_last_good() {
    let mut world = running();
    world.apply(node("n2", "192.0.2.11", 2));
    world.settle();
    assert!(world.problems()[0].contains("192.0.2.11 is n1's too"), "{:?}", world.problems());
    let fault = fabric_objects::Problem {
        source: "nodes.yaml:21".to_owned(),
        object: Some(ObjectRef::new(Kind::Node, "", "n2")),
        field: Some("status.addresses[0].address".to_owned()),
        message: "found 127.0.0.1; expected an address other nodes can reach".to_owned(),
    };
    let fault = fault.with_last_good_in_use();
    world.index.apply(fabric_objects::Event::Problems(vec![fault]));
    world.settle();
    let expected = "nodes.yaml:21: Node n2: status.addresses[0].address: found 127.0.0.1; expected an address other \
                    nodes can reach; the last good version stays in use";
    assert_eq!(world.problems(), [expected]);
    world.index.apply(fabric_objects::Event::Problems(Vec::new()));
    world.settle();
    assert!(world.problems()[0].contains("192.0.2.11 is n1's too"), "{:?}", world.problems());
}

#[test]
fn second_network_of_a_type_is_named() {
    for (kind, cidr, other) in [
        ("internal-cidr", "10.90.0.0/16", "10.91.0.0/16"),
        ("external-cidr", "10.92.0.0/16", "10.93.0.0/16"),
    ] {
        let mut world = running();
        world.apply(network("a", kind, cidr));
        world.settle();
        assert_eq!(world.problems(), [""; 0]);
        world.apply(network("b", kind, other));
        world.settle();
        let expected = format!(
            "Network liqo/b: metadata.labels.ipam.liqo.io/network-type: found a second Network of this type, {other}; \
             a, {cidr}, is used; expected one: delete the other"
        );
        assert_eq!(world.problems(), [expected]);
    }
}

#[test]
fn reserved_network_that_was_moved_is_named() {
    let mut world = running();
    world.apply(network("r", "reserved", "10.70.0.0/16"));
    world.settle();
    let expected = "Network liqo/r: spec.cidr: 10.2.0.0/16 stands for 10.70.0.0/16, and nothing here uses that; \
                    expected the label ipam.liqo.io/network-not-remapped: \"true\" and a prefix that is free";
    assert_eq!(world.problems(), [expected]);
}

#[test]
fn faulty_edit_keeps_published_objects() {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    let held = world.held();
    let before = world.gateway("liqo-tenant-rome", "server").cloned();
    let node = world.node("n1").cloned();
    let good: Vec<_> = server_side("rome", 30742);
    for (broken, problem) in cases() {
        if !good.iter().any(|object| object.reference() == broken.reference())
            || broken.kind() == Kind::Secret
        {
            continue;
        }
        world.apply(broken);
        world.settle();
        assert_eq!(world.gateway("liqo-tenant-rome", "server").cloned(), before, "{problem}");
        assert_eq!(
            (world.node("n1").cloned(), world.held()),
            (node.clone(), held.clone()),
            "{problem}"
        );
        good.iter().cloned().for_each(|object| world.apply(object));
        world.settle();
        assert_eq!(world.problems(), [""; 0], "{problem}");
    }
}

#[test]
fn invalid_configuration_has_condition() {
    let mut world = running();
    world.apply(rome(json!("10.1.0.1/16"), json!([])));
    world.settle();
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-rome", "rome");
    let condition = world.status(&reference)["conditions"][0].clone();
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("False"), &json!("InvalidConfiguration"))
    );
    assert!(
        condition["message"].as_str().unwrap().contains("did you mean 10.1.0.0/16?"),
        "{condition}"
    );
    world.apply(rome(json!("10.1.0.0/16"), json!([])));
    world.settle();
    assert_eq!(world.status(&reference)["conditions"][0]["status"], "True");
    assert_eq!(world.status(&reference)["conditions"].as_array().unwrap().len(), 1);
}

#[test]
fn invalid_gateway_has_condition_until_corrected() {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    let reference = ObjectRef::new(Kind::GatewayServer, "liqo-tenant-rome", "server");
    assert_eq!(world.status(&reference)["conditions"], Value::Null);
    // As the store reports a version that it did not take, which compile has never seen.
    let problem = fabric_objects::Problem {
        source: "rome.yaml:31".to_owned(),
        object: Some(reference.clone()),
        field: Some("spec.mtu".to_owned()),
        message: "found 10; expected 576 to 65535 bytes".to_owned(),
    };
    world.index.apply(fabric_objects::Event::Problems(vec![problem.clone()]));
    world.settle();
    let condition = world.status(&reference)["conditions"][0].clone();
    assert_eq!(
        (&condition["type"], &condition["status"], &condition["reason"]),
        (&json!("Accepted"), &json!("False"), &json!("Invalid"))
    );
    let message = "rome.yaml:31: spec.mtu: found 10; expected 576 to 65535 bytes";
    assert_eq!(condition["message"], message);
    // The same fault, found here as well, is reported once and with its place.
    let mut wrong = server("rome", 30742);
    let Object::GatewayServer(own) = &mut wrong else { panic!() };
    let own = Arc::make_mut(own);
    own.spec.mtu = Some(10);
    world.apply(wrong);
    world.settle();
    assert_eq!(world.problems(), [problem.to_string()]);
    assert_eq!(world.status(&reference)["conditions"][0]["message"], message);
    world.apply(server("rome", 30742));
    world.index.apply(fabric_objects::Event::Problems(Vec::new()));
    world.settle();
    assert_eq!(world.status(&reference)["conditions"], Value::Null);
}

#[test]
fn invalid_keys_are_in_gateway_condition() {
    let reference = ObjectRef::new(Kind::GatewayServer, "liqo-tenant-rome", "server");
    for (bad, message) in [
        (
            public_key("gw-publickey", "rome", "c2hvcnQ="),
            "PublicKey liqo-tenant-rome/gw-publickey: spec.publicKey: the key is 5 bytes long; expected 32",
        ),
        (
            without_label(public_key("gw-publickey", "rome", "c2hvcnQ=")),
            "PublicKey liqo-tenant-rome/gw-publickey: metadata.labels.liqo.io/remote-cluster-id: missing",
        ),
        (
            secret_with(json!({"privateKey": "c2hvcnQ="})),
            "Secret liqo-tenant-rome/gw-keys: data.privateKey: the key is 5 bytes long; expected 32",
        ),
    ] {
        let mut world = running();
        server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
        world.apply(bad);
        world.settle();
        let condition = world.status(&reference)["conditions"][0].clone();
        assert_eq!(
            (&condition["type"], &condition["status"]),
            (&json!("Accepted"), &json!("False"))
        );
        let found = condition["message"].as_str().unwrap();
        assert!(found.starts_with(message), "{found}");
        let other = ObjectRef::new(Kind::GatewayClient, "liqo-tenant-turin", "client");
        assert_eq!(world.status(&other)["conditions"], Value::Null);
        server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
        world.settle();
        assert_eq!(world.status(&reference)["conditions"], Value::Null);
    }
}

#[test]
fn invalid_configuration_keeps_last_conditions() {
    let mut world = running();
    let generation = |world: &World, type_: &str| {
        let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-rome", "rome");
        let conditions = world.status(&reference)["conditions"].clone();
        let mut all = conditions.as_array().into_iter().flatten();
        all.find(|of| of["type"] == type_).map(|of| of["observedGeneration"].clone())
    };
    let mut configuration = rome(json!("10.1.0.0/16"), json!([]));
    configuration.metadata_mut().generation = Some(1);
    world.apply(configuration.clone());
    world.settle();
    assert_eq!(generation(&world, "NetworkCIDRsConfigured"), Some(json!(1)));
    // The store keeps the last good one.
    let reference = configuration.reference();
    let (field, message) = (Some("spec.remote.cidr.pod[0]".to_owned()), "x; expected y".to_owned());
    let problem =
        fabric_objects::Problem { source: String::new(), object: Some(reference), field, message };
    world.index.apply(fabric_objects::Event::Problems(vec![problem]));
    configuration.metadata_mut().generation = Some(2);
    world.apply(configuration);
    world.settle();
    assert_eq!(generation(&world, "NetworkCIDRsConfigured"), Some(json!(1)));
    assert_eq!(generation(&world, "Accepted"), Some(json!(2)));
    world.index.apply(fabric_objects::Event::Problems(Vec::new()));
    world.settle();
    assert_eq!(generation(&world, "NetworkCIDRsConfigured"), Some(json!(2)));
    assert_eq!(generation(&world, "Accepted"), None);
}

#[test]
fn unreadable_key_is_not_regenerated() {
    let mut world = World::new("milan");
    let mut keyless = server("rome", 30742);
    let Object::GatewayServer(own) = &mut keyless else { panic!() };
    let own = Arc::make_mut(own);
    own.spec.secret_ref = None;
    let objects = server_side("rome", 30742).into_iter();
    objects.filter(|o| !matches!(o.kind(), Kind::Secret)).for_each(|object| world.apply(object));
    world.apply(keyless);
    world.settle();
    let secret = ObjectRef::new(Kind::Secret, "liqo-tenant-rome", "gw-server");
    assert!(world.index.get(&secret).is_some(), "made, as there was none");
    // A controller that starts while the Secret's file is damaged.
    let mut later = fabric_index::Index::new(world.index.settings.clone());
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Secret) {
        for (_, object) in world.index.of_kind(kind) {
            later.apply(fabric_objects::Event::Applied(object.clone()));
        }
    }
    let problem = fabric_objects::Problem {
        source: "liqo-tenant-rome.gw-server.yaml".to_owned(),
        object: Some(secret.clone()),
        field: None,
        message: "not as weft wrote it".to_owned(),
    };
    later.apply(fabric_objects::Event::Problems(vec![problem]));
    let keys = crate::compile(&later, jiff::Timestamp::UNIX_EPOCH).keys;
    assert!(keys.is_empty(), "{keys:?}");
    later.apply(fabric_objects::Event::Problems(Vec::new()));
    let keys = crate::compile(&later, jiff::Timestamp::UNIX_EPOCH).keys;
    assert!(keys.contains_key(&secret), "it is really gone");
}

#[test]
fn second_gateway_of_peer_is_reported_on_both() {
    let mut world = running();
    let before = world.gateway("liqo-tenant-turin", "client").cloned();
    world.apply(server("turin", 30742));
    world.settle();
    let problems = world.problems();
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(problems[0].starts_with("GatewayServer liqo-tenant-turin/server: "), "{problems:#?}");
    assert!(problems[1].ends_with("GatewayClient liqo-tenant-turin/client runs"), "{problems:#?}");
    assert_eq!(world.gateway("liqo-tenant-turin", "client").cloned(), before);
    assert_eq!(world.gateway("liqo-tenant-turin", "server"), None);
    world.delete(&client("turin").reference());
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-turin", "client"), None);
    assert!(world.gateway("liqo-tenant-turin", "server").is_some(), "now it is the only one");
}

#[test]
fn two_servers_cannot_have_one_port() {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    server_side("athens", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(
        world.problems(),
        ["GatewayServer liqo-tenant-athens/server: spec.endpoint: port 30742 is GatewayServer \
          liqo-tenant-rome/server's; expected another port"]
    );
    assert!(world.gateway("liqo-tenant-rome", "server").is_some());
    assert_eq!(world.gateway("liqo-tenant-athens", "server"), None);
}

#[test]
fn duplicate_configuration_or_key_is_reported() {
    let mut world = running();
    let before = world.gateway("liqo-tenant-turin", "client").cloned();
    world.apply(of!(Configuration, Configuration, {
        "metadata": {"name": "a", "namespace": "a", "labels": {"liqo.io/remote-cluster-id": "turin"}},
        "spec": {"remote": {"cidr": {"pod": "10.1.0.0/16"}}}
    }));
    world.settle();
    assert_eq!(world.problems().len(), 2, "{:#?}", world.problems());
    // Not the cluster's own, which is refused anyway.
    let other = fabric_api::PrivateKey::generate().public().to_string();
    world.apply(public_key("second", "turin", &other));
    world.settle();
    assert!(world.problems().iter().any(|p| p.contains("has another key of turin")));
    assert_eq!(world.gateway("liqo-tenant-turin", "client").cloned(), before);
}

#[test]
fn missing_object_is_awaited() {
    let mut world = World::new("milan");
    world.apply(server("rome", 30742));
    world.settle();
    let mut problems = world.problems();
    problems.sort();
    let of = "GatewayServer liqo-tenant-rome/server: ";
    assert_eq!(
        problems,
        [
            format!("{of}spec.secretRef.name: waits for Secret liqo-tenant-rome/gw-keys"),
            format!("{of}waits for a Configuration of rome"),
            format!("{of}waits for a PublicKey of rome in its namespace"),
        ]
    );
    assert_eq!(world.gateway("liqo-tenant-rome", "server"), None);
    world.apply(rome(json!("10.200.0.0/16"), json!("10.70.0.0/16")));
    world.settle();
    let config = world.gateway("liqo-tenant-rome", "server").expect("the tunnel itself can wait");
    assert_eq!(config.peer_public_key, None);
    world.apply(secret("rome"));
    world.apply(either_side("rome", json!("10.200.0.0/16"), json!("10.70.0.0/16")).remove(2));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn missing_cluster_id_keeps_objects_and_is_reported() {
    let mut world = running();
    let (before, held) = (world.gateway("liqo-tenant-turin", "client").cloned(), world.held());
    world.delete(&cluster_id("milan").reference());
    world.settle();
    let missing =
        "ConfigMap liqo/liqo-clusterid-configmap: missing; expected CLUSTER_ID: milan, by which";
    assert!(world.problems()[0].contains(missing), "{:?}", world.problems());
    let faults = crate::unshown_faults(&world.last.statuses, &world.last.problems);
    let shown = faults.get("ConfigMap liqo/liqo-clusterid-configmap");
    assert!(shown.is_some_and(|shown| shown.starts_with("missing; expected")), "{faults:?}");
    assert_eq!(world.gateway("liqo-tenant-turin", "client").cloned(), before);
    assert_eq!(world.held(), held);
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    let nodes = |config: &GatewayConfigSpec| config.nodes.len();
    let after = world.gateway("liqo-tenant-turin", "client").map(nodes);
    assert_eq!(after, before.as_ref().map(|config| nodes(config) + 1), "it goes on");
    world.apply(cluster_id("Not A Name"));
    world.settle();
    assert!(world.problems()[0].contains("data.CLUSTER_ID: \"Not A Name\" is not a cluster ID"));
    assert_eq!(world.gateway("liqo-tenant-turin", "client").map(nodes), after, "and still does");
    let before = world.gateway("liqo-tenant-turin", "client").cloned();
    world.apply(cluster_id("oslo"));
    world.settle();
    let other = "data.CLUSTER_ID: found oslo; expected milan, by which nodes and peers go on";
    assert!(world.problems()[0].contains(other), "{:?}", world.problems());
    assert_eq!(world.gateway("liqo-tenant-turin", "client").cloned(), before);
}

#[test]
fn nothing_at_all_is_no_fault_of_ours() {
    let mut world = World::empty();
    world.settle();
    assert_eq!(world.last.objects.len(), 0);
}

#[test]
fn ipam_refusal_is_reported_on_requester() {
    let mut world = running();
    world.apply(rome(json!("10.1.0.0/16"), json!([])));
    world.last = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    let own = world.last.objects.iter().find(|(r, _)| r.name == "rome-pod-10-1-0-0-16").unwrap();
    let (reference, object) = (own.0.clone(), own.1.clone());
    world.index.apply(fabric_objects::Event::Applied(object));
    world.index.deny(reference, "no room".to_owned());
    let published = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    let problems: Vec<_> = published.problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        problems,
        [
            "Configuration liqo-tenant-rome/rome: Network liqo-tenant-rome/rome-pod-10-1-0-0-16: no room"
        ]
    );
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-rome", "rome");
    let status = published.statuses[&reference].to_value()["status"].clone();
    assert_eq!(status["conditions"][0]["message"], "10.1.0.0/16: no room");
}

#[test]
fn faults_a_gateway_reports_become_conditions_and_go() {
    let mut world = running();
    let namespace = "liqo-tenant-turin";
    let gateway = ObjectRef::new(Kind::GatewayClient, namespace, "client");
    let configuration = ObjectRef::new(Kind::Configuration, namespace, "turin");
    let fault = |reason: &str| {
        json!({
            "reason": reason, "message": "cause", "remedy": "remedy", "since": "2026-01-31T12:00:00Z",
        })
    };
    let report = |world: &mut World, faults: Value| {
        let config = ObjectRef { kind: Kind::GatewayConfig, ..gateway.clone() };
        let mut config = world.index.typed::<GatewayConfig>(&config).unwrap().clone();
        config.status.get_or_insert_default().faults = serde_json::from_value(faults).unwrap();
        world.index.apply(fabric_objects::Event::Applied(config.into()));
        world.settle();
    };
    let of_peer = |world: &World, object: &ObjectRef| {
        let conditions = world.status(object)["conditions"].clone();
        let mut conditions = conditions.as_array().cloned().unwrap_or_default();
        conditions.retain(|condition| condition["type"] == "PeerHealthy");
        conditions.iter().map(|c| format!("{} {}", c["reason"], c["message"])).collect::<Vec<_>>()
    };
    report(&mut world, json!([fault("NoAnswer")]));
    assert_eq!(of_peer(&world, &gateway), [r#""NoAnswer" "cause; remedy""#]);
    assert_eq!(of_peer(&world, &configuration), [""; 0], "the fault is not in it");
    report(&mut world, json!([fault("CidrMismatch")]));
    assert_eq!(of_peer(&world, &configuration), [r#""CidrMismatch" "cause; remedy""#]);
    report(&mut world, json!([]));
    assert_eq!((of_peer(&world, &gateway), of_peer(&world, &configuration)), (vec![], vec![]));
}
