//! GatewayRecords, which all gateways share.

use fabric_api::fabric::{GatewayRecord, Record as _};
use fabric_store::{Kind, Object, ObjectRef};

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
        node.status = None;
    }
    world.apply(bad);
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-milan", "client").cloned(), before);
    assert!(world.index.get(&record("node-n2")).is_some());
}
