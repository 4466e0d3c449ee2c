//! Reports that are repeated for ever: nothing follows from them.

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_objects::{Event, Kind, Object, ObjectRef};
use serde_json::{Value, json};

use super::world::{World, client_side};
use fabric_index::{compiles_alike, is_acknowledgement};

fn peered() -> (World, ObjectRef) {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    (world, ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client"))
}

fn config(world: &World, reference: &ObjectRef, status: Value) -> Object {
    let mut config = world.index.typed::<GatewayConfig>(reference).unwrap().clone();
    config.status = Some(serde_json::from_value(status).unwrap());
    config.into()
}

fn connection(world: &World, value: &str, latency: &str) -> Object {
    let uid = world.index.get(&ObjectRef::new(Kind::GatewayClient, "liqo-tenant-milan", "client"));
    let connection: fabric_api::networking::Connection = serde_json::from_value(json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": {"name": "client", "namespace": "liqo-tenant-milan", "uid": "c"},
        "spec": {"type": "Client", "gatewayRef": {"name": "client", "uid": uid.unwrap().uid()}},
        "status": {"value": value, "latency": {"value": latency, "timestamp": "2026-01-31T12:00:00Z"}},
    }))
    .unwrap();
    connection.into()
}

/// Applies both, one after the other; returns whether the second is claimed to change nothing, and
/// whether it does change nothing.
fn claim_and_result(world: &mut World, before: Object, after: Object) -> (bool, bool) {
    let claim = compiles_alike(&before, &after);
    world.index.apply(Event::Applied(before));
    world.settle();
    let published = world.last.clone();
    world.index.apply(Event::Applied(after));
    world.settle();
    (claim, published == world.last)
}

#[test]
fn counters_of_a_gateway_change_nothing() {
    let (mut world, reference) = peered();
    let status = |bytes: u64, mtu: u32| {
        json!({"appliedGeneration": bytes, "mtu": mtu, "receivedBytes": bytes, "transmittedBytes": bytes,
            "lastHandshake": format!("2026-01-31T12:00:{bytes:02}Z")})
    };
    let [a, b, c] = [(1, 1400), (2, 1400), (2, 1380)]
        .map(|(bytes, mtu)| config(&world, &reference, status(bytes, mtu)));
    assert_eq!(claim_and_result(&mut world, a, b.clone()), (true, true));
    assert_eq!(claim_and_result(&mut world, b, c), (false, false), "nodes need the MTU");
}

#[test]
fn written_conditions_change_nothing() {
    let (mut world, _) = peered();
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-milan", "milan");
    let after = world.index.get(&reference).unwrap().clone();
    let mut before = after.clone();
    assert!(!before.conditions_mut(true).unwrap().is_empty());
    before.conditions_mut(true).unwrap().clear();
    assert_eq!(claim_and_result(&mut world, before, after.clone()), (true, true));
    let mut without_prefixes = after.clone();
    without_prefixes.copy_status(None);
    assert!(!claim_and_result(&mut world, without_prefixes, after).0, "they are used");
}

#[test]
fn latency_changes_nothing_and_state_does() {
    let (mut world, _) = peered();
    let [a, b, c] = [("Connected", "1ms"), ("Connected", "2ms"), ("Error", "2ms")]
        .map(|(value, latency)| connection(&world, value, latency));
    assert_eq!(claim_and_result(&mut world, a, b.clone()), (true, true));
    assert_eq!(claim_and_result(&mut world, b, c), (false, false));
}

#[test]
fn acknowledgement_of_records_matters_once() {
    let (mut world, reference) = peered();
    let newest = world.gateway_records().version().unwrap();
    let status =
        |generation: i64| json!({"records": {"uid": newest.uid, "generation": generation}});
    let [none, first] =
        [json!({}), status(newest.generation)].map(|status| config(&world, &reference, status));
    assert_eq!(claim_and_result(&mut world, none, first), (false, false));
    let [first, second] = [newest.generation, newest.generation + 1]
        .map(|generation| config(&world, &reference, status(generation)));
    assert_eq!(claim_and_result(&mut world, first, second), (true, true));
}

#[test]
fn acknowledgement_reports_applied_versions_only() {
    let (world, _) = peered();
    let reference = ObjectRef::new(Kind::NodeConfig, "", "n1");
    let known = world.index.typed::<NodeConfig>(&reference).unwrap().clone();
    let read = json!({"uid": "u", "generation": 2});
    let reported = |status: Value| -> Object {
        let status = serde_json::from_value(status).unwrap();
        NodeConfig { status: Some(status), ..known.clone() }.into()
    };
    let before = reported(json!({"appliedGeneration": 1}));
    let is_only = |status: Value| is_acknowledgement(&before, &reported(status));
    assert!(is_only(json!({"appliedGeneration": 2})));
    assert!(is_only(json!({"appliedGeneration": 1, "records": read})));
    assert!(!is_only(json!({"appliedGeneration": 1})), "it is no news");
    assert!(!is_only(json!({"appliedGeneration": 2, "problems": ["no VXLAN"]})));
    let mut other: NodeConfig = known.clone();
    other.metadata.generation = Some(7);
    assert!(!is_acknowledgement(&before, &other.into()), "another version of the config");
}
