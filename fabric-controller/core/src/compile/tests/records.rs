//! FabricRecords, and nodes whose agents read them.

use fabric_api::fabric::{FabricRecord, NodeConfig};
use fabric_objects::{Kind, Object, ObjectRef};

use super::world::{World, client_side, node, server_side};

fn config(world: &World, node: &str) -> NodeConfig {
    let reference = ObjectRef::new(Kind::NodeConfig, "", node);
    world.index.typed::<NodeConfig>(&reference).unwrap().clone()
}

/// Two nodes, of which the agent of `n1` reads records.
fn reading() -> World {
    let mut world = World::new("rome");
    world.with_records = true;
    world.apply(node("n2", "192.0.2.12", 2));
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    world
}

fn is_published(world: &World) -> bool {
    let configuration = ObjectRef::new(Kind::Configuration, "liqo-tenant-paris", "paris");
    !world.status(&configuration)["remote"].is_null()
}

#[test]
fn reader_of_records_has_its_own_part_only() {
    let world = reading();
    let own = config(&world, "n1").spec;
    assert!(own.from_records && own.peerings.is_empty() && own.pod_cidrs.is_empty());
    let whole = config(&world, "n1").joined(&world.records()).unwrap().spec;
    assert_eq!(whole.peerings[0].prefixes.len(), 2);
    let other = config(&world, "n2").spec;
    assert_eq!((other.from_records, other.peerings.len()), (false, 1));
    assert_ne!(whole.peerings[0].gateway, other.peerings[0].gateway, "n1 hosts it");
    assert_eq!(whole.pod_cidrs, other.pod_cidrs);
}

#[test]
fn config_of_reader_is_invalid_without_records() {
    let world = reading();
    let own = Object::from(config(&world, "n1")).to_value();
    assert!(own["spec"].get("podCidrs").is_none(), "older agents require it");
    assert_eq!(config(&world, "n1").joined(&Default::default()), None);
}

#[test]
fn new_peering_writes_no_config_of_a_reader() {
    let mut world = reading();
    let before = config(&world, "n1").metadata.generation;
    server_side("paris", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(config(&world, "n1").metadata.generation, before);
    assert_eq!(config(&world, "n1").joined(&world.records()).unwrap().spec.peerings.len(), 2);
    assert_eq!(config(&world, "n2").spec.peerings.len(), 2);
}

#[test]
fn prefix_is_published_once_record_is_read() {
    let mut world = reading();
    world.delete(&ObjectRef::new(Kind::Node, "", "n2"));
    world.settle();
    let read = world.records().version();
    world.with_records = false;
    world.acknowledge("n1", read.clone());
    server_side("paris", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle_but_for_agents();
    assert!(config(&world, "n1").spec.from_records);
    assert!(!is_published(&world), "n1 has acknowledged older records");
    let newest = world.records().version();
    assert_ne!(newest, read);
    world.acknowledge("n1", newest);
    world.settle_but_for_agents();
    assert!(is_published(&world));
}

#[test]
fn stalled_reader_gets_its_config_in_whole() {
    let mut world = reading();
    world.index.lagging_nodes.insert("n1".to_owned());
    world.settle();
    assert!(config(&world, "n1").spec.from_records, "the API server may be slow");
    world.index.stalled_nodes.insert("n1".to_owned());
    world.settle();
    assert!(!config(&world, "n1").spec.from_records);
    world.index.stalled_nodes.clear();
    world.settle();
    assert!(config(&world, "n1").spec.from_records);
}

#[test]
fn record_of_a_departed_peering_goes() {
    let mut world = reading();
    let record = ObjectRef::new(Kind::FabricRecord, "", &FabricRecord::name_of("milan"));
    assert!(world.index.get(&record).is_some());
    let prefixes = config(&world, "n2").spec.peerings[0].prefixes.clone();
    client_side("milan").iter().for_each(|object| world.delete(&object.reference()));
    world.settle();
    assert!(world.index.get(&record).is_none());
    let refused: Vec<_> = config(&world, "n1").spec.refused;
    let refused: Vec<_> = refused.into_iter().map(|refused| refused.prefix).collect();
    assert_eq!(refused, prefixes);
}

#[test]
fn removed_reader_refuses_prefixes_of_all_peerings() {
    let mut world = reading();
    let prefixes = config(&world, "n2").spec.peerings[0].prefixes.clone();
    world.agents.clear();
    world.delete(&ObjectRef::new(Kind::Node, "", "n1"));
    world.settle();
    let removed = config(&world, "n1").spec;
    let refused: Vec<_> = removed.refused.into_iter().map(|refused| refused.prefix).collect();
    assert!(removed.removed);
    assert_eq!(refused, prefixes);
}

#[test]
fn unread_peering_of_nodes_gets_a_record() {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    let before = ["n1", "n2"].map(|name| config(&world, name).spec);
    // As an older controller left it, and the manifest turned bad meanwhile.
    let kind = Kind::FabricRecord;
    let records: Vec<_> = world.index.of_kind(kind).map(|(record, _)| record.clone()).collect();
    records.iter().for_each(|record| world.delete(record));
    world.spoil("milan");
    world.settle();
    assert_eq!(["n1", "n2"].map(|name| config(&world, name).spec), before);
}
