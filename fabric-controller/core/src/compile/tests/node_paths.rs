//! Condition `NodesReachable`, and which gateways nodes are to probe.

use fabric_api::fabric::{GatewayConfig, GatewayProbe};
use fabric_api::networking::Connection;
use fabric_objects::{Event, Kind, ObjectRef};
use serde_json::{Value, json};

use super::world::{World, client_side, node, of as object};

fn peered() -> World {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    world
}

fn of(kind: Kind, name: &str) -> ObjectRef {
    ObjectRef::new(kind, "liqo-tenant-milan", name)
}

/// The gateway reports this, and all that follows is compiled.
fn report(world: &mut World, status: Value) {
    let reference = of(Kind::GatewayConfig, "client");
    let mut config = world.index.typed::<GatewayConfig>(&reference).unwrap().clone();
    config.status = Some(serde_json::from_value(status).unwrap());
    world.index.apply(Event::Applied(config.into()));
    world.settle();
}

fn condition(world: &World, reference: &ObjectRef) -> Option<Value> {
    let status = world.status(reference);
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "NodesReachable")
}

fn probe(world: &World) -> Option<GatewayProbe> {
    world.node("n1").unwrap().peerings[0].gateway.as_ref().unwrap().probe.clone()
}

#[test]
fn gateway_without_responder_is_not_probed() {
    let mut world = peered();
    report(&mut world, json!({"appliedGeneration": 1}));
    assert_eq!(probe(&world), None);
    assert_eq!(condition(&world, &of(Kind::GatewayClient, "client")), None);
    report(&mut world, json!({"overlayProbePort": 12346, "probingNodes": 1}));
    let expected = GatewayProbe { port: 12346, node: Some("n1".to_owned()) };
    assert_eq!(probe(&world), Some(expected));
}

#[test]
fn unreachable_node_is_named_in_the_conditions() {
    let mut world = peered();
    let lost = json!({"node": "n2", "fault": "NoAnswer", "since": "2026-01-31T12:00:00.000Z"});
    let status = json!({"overlayProbePort": 12346, "probingNodes": 2, "unreachableNodes": [lost]});
    report(&mut world, status);
    let objects = [of(Kind::GatewayClient, "client"), of(Kind::Configuration, "milan")];
    for object in &objects {
        let found = condition(&world, object).expect("the condition");
        assert_eq!(found["status"], "False", "{object}");
        assert_eq!(
            found["message"],
            "1 of 2 nodes reach the gateway; n2: no answer over VXLAN since 2026-01-31T12:00:00.000Z"
        );
    }
    report(&mut world, json!({"overlayProbePort": 12346, "probingNodes": 2}));
    for object in &objects {
        let found = condition(&world, object).expect("the condition");
        assert_eq!(
            (&found["status"], &found["message"]),
            (&"True".into(), &"2 of 2 nodes reach the gateway".into())
        );
    }
}

/// The Connection is that of the two gateways: it alone decides what nodes refuse, and the ForeignCluster.
#[test]
fn unreachable_node_leaves_foreign_cluster_alone() {
    let mut world = peered();
    world.index.settings.kubernetes = true;
    let uid = world.index.get(&of(Kind::GatewayClient, "client")).unwrap().uid().to_owned();
    let connection = of(Kind::Connection, "gw-client");
    world.apply(object!(Connection, Connection, {
        "metadata": {"name": "gw-client", "namespace": "liqo-tenant-milan"},
        "spec": {"type": "Client", "gatewayRef": {"name": "client", "uid": uid}},
        "status": {"value": "Connected"}
    }));
    report(&mut world, json!({"overlayProbePort": 12346, "probingNodes": 2}));
    let of_gateways = |world: &World| {
        let peering = world.node("n1").unwrap().peerings[0].connected;
        (world.last.peers.clone(), peering, world.index.get(&connection).cloned())
    };
    let before = of_gateways(&world);
    let of_peer = before.0.first_key_value().unwrap().1.conditions.last().unwrap();
    assert_eq!((of_peer.status, before.1), ("Established", true));
    let lost = |name: &str| json!({"node": name, "fault": "NoAnswer", "since": "2026-01-31T12:00:00.000Z"});
    for lost in [json!([lost("n2")]), json!([lost("n1"), lost("n2")])] {
        report(
            &mut world,
            json!({"overlayProbePort": 12346, "probingNodes": 2, "unreachableNodes": lost}),
        );
        let found = condition(&world, &of(Kind::GatewayClient, "client")).unwrap();
        assert_eq!(found["status"], "False", "{found}");
        assert_eq!(of_gateways(&world), before);
    }
}

#[test]
fn probing_node_that_acknowledges_nothing_is_named() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    assert_eq!(world.problems(), [""; 0], "it may take a while");
    world.index.lagging_nodes.insert("n2".to_owned());
    let named = |world: &World, cause: &str, remedy: &str| {
        let problems = world.problems();
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        assert!(problem.starts_with("NodeConfig n2: "), "{problem}");
        assert!(problem.contains(cause) && problem.contains(remedy), "{problem}");
    };
    world.settle();
    assert_eq!(world.problems(), [""; 0], "without probes it is shown as unreachable");
    report(&mut world, json!({"overlayProbePort": 12346, "probingNodes": 2}));
    named(&world, "it cannot write to the published directory", "share that with n2 for writing");
    world.agents.push("n2");
    world.settle();
    assert_eq!(world.problems(), [""; 0], "acknowledged");
}
