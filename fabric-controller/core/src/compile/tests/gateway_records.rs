//! GatewayRecords, which all gateways share.

use std::sync::Arc;

use fabric_api::fabric::{
    GatewayConfig, GatewayConfigStatus, GatewayRecord, Record as _, RecordVersion,
};
use fabric_objects::{Event, Kind, Object, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::world::{World, client_side, node, server_side};

fn peered() -> World {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    server_side("paris", 30742).into_iter().for_each(|object| world.apply(object));
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    world
}

fn record(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::GatewayRecord, "", name)
}

#[test]
fn records_have_each_node_and_peer_once() {
    let world = peered();
    let of = |name: &str| world.index.typed::<GatewayRecord>(&record(name)).unwrap().spec.clone();
    assert_eq!(of("node-n2").node.unwrap().prefixes[0], "10.200.2.0/24");
    let cluster = of(GatewayRecord::CLUSTER).cluster.unwrap();
    let peers: Vec<_> = cluster.peers.iter().map(|peer| peer.peer_cluster_id.as_str()).collect();
    assert_eq!(peers, ["milan", "paris"]);
    let milan = world.gateway("liqo-tenant-milan", "client").unwrap();
    assert_eq!(milan.egress, cluster.peers[1].prefixes);
}

#[test]
fn records_have_no_address_of_a_gateway() {
    let mut world = peered();
    world.index.settings.kubernetes = true;
    world.settle();
    let records: String = world
        .index
        .of_kind(Kind::GatewayRecord)
        .map(|(_, record)| record.to_value().to_string())
        .collect();
    assert!(records.contains(&world.node("n2").unwrap().mac.clone().unwrap()));
    for (namespace, name) in [("liqo-tenant-milan", "client"), ("liqo-tenant-paris", "server")] {
        let overlay = &world.gateway(namespace, name).unwrap().overlay;
        assert!(!records.contains(overlay.mac.as_ref().unwrap()));
        assert!(!records.contains(&overlay.address.to_string()));
    }
}

#[test]
fn record_of_a_departed_node_goes() {
    let mut world = peered();
    assert!(world.index.get(&record("node-n2")).is_some());
    world.delete(&ObjectRef::new(Kind::Node, "", "n2"));
    world.settle();
    assert!(world.index.get(&record("node-n2")).is_none());
    assert!(world.gateway_records().version().is_some());
}

#[test]
fn unread_node_of_gateways_gets_a_record() {
    let mut world = peered();
    let before = world.gateway("liqo-tenant-milan", "client").cloned();
    // As an older controller left it, and the manifest turned bad meanwhile.
    let kind = Kind::GatewayRecord;
    let records: Vec<_> = world.index.of_kind(kind).map(|(record, _)| record.clone()).collect();
    records.iter().for_each(|record| world.delete(record));
    let mut bad = node("n2", "192.0.2.12", 2);
    if let Object::Node(node) = &mut bad {
        let node = Arc::make_mut(node);
        node.status = None;
    }
    world.apply(bad);
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-milan", "client").cloned(), before);
    assert!(world.index.get(&record("node-n2")).is_some());
}

/// The gateways of two peerings, which read records.
fn reading() -> World {
    let mut world = peered();
    world.with_gateway_records = true;
    world.settle();
    world
}

fn config(world: &World) -> GatewayConfig {
    let reference = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
    world.index.typed::<GatewayConfig>(&reference).unwrap().clone()
}

fn acknowledge(world: &mut World, read: Option<RecordVersion>) {
    let mut config = config(world);
    config.status.get_or_insert_default().records = read;
    world.index.apply(Event::Applied(config.into()));
    world.settle_but_for_agents();
}

#[test]
fn gateway_that_reads_records_has_its_own_part_only() {
    let world = reading();
    let own = config(&world);
    assert!(own.spec.from_records && own.spec.nodes.is_empty() && own.spec.egress.is_empty());
    assert_eq!(own.joined(&world.gateway_records()).unwrap().spec, config(&peered()).spec);
    let text = Object::from(own.clone()).to_value();
    assert!(text["spec"].get("podCidrs").is_none(), "older gateways require it");
    assert_eq!(own.joined(&Default::default()), None);
}

#[test]
fn new_node_or_peering_writes_no_config_of_a_reader() {
    let mut world = reading();
    let before = config(&world).metadata.generation;
    world.apply(node("n3", "192.0.2.13", 3));
    server_side("turin", 30743).into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(config(&world).metadata.generation, before);
    let whole = config(&world).joined(&world.gateway_records()).unwrap().spec;
    assert_eq!((whole.nodes.len(), whole.egress.len()), (3, 4));
}

#[test]
fn config_is_whole_until_records_are_acknowledged() {
    let mut world = peered();
    let newest = world.gateway_records().version().unwrap();
    let older = RecordVersion { generation: newest.generation - 1, ..newest.clone() };
    acknowledge(&mut world, Some(older.clone()));
    assert!(!config(&world).spec.from_records);
    acknowledge(&mut world, Some(newest));
    assert!(config(&world).spec.from_records);
    acknowledge(&mut world, Some(older));
    assert!(config(&world).spec.from_records, "late, but a reader");
}

#[test]
fn gateway_that_reads_no_records_gets_all_again() {
    let mut world = reading();
    world.with_gateway_records = false;
    let version = world.gateway_records().version().unwrap();
    let other = RecordVersion { uid: "another".to_owned(), ..version };
    for read in [None, Some(other)] {
        acknowledge(&mut world, read);
        assert!(!config(&world).spec.from_records);
        let version = world.gateway_records().version();
        acknowledge(&mut world, version);
        assert!(config(&world).spec.from_records);
    }
}

#[test]
fn gateway_in_kubernetes_starts_from_records() {
    let mut world = World::new("rome");
    world.index.settings.kubernetes = true;
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert!(config(&world).spec.from_records);
    let mut is_own_part = |applied_generation: i64, age: i64| {
        let mut new = config(&world);
        new.spec.from_records = true;
        let created = jiff::Timestamp::UNIX_EPOCH - jiff::SignedDuration::from_secs(age);
        new.metadata.creation_timestamp = Some(Time(created));
        new.status = Some(GatewayConfigStatus { applied_generation, ..Default::default() });
        world.index.apply(Event::Applied(new.into()));
        let wanted = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH).objects;
        let reference = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        matches!(&wanted[&reference], Object::GatewayConfig(config) if config.spec.from_records)
    };
    assert!(is_own_part(0, 59), "it may not have read them yet");
    assert!(!is_own_part(1, 59), "it reads none");
    assert!(!is_own_part(0, 60), "it may not read them");
}
