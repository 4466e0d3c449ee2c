//! A node whose config follows from records.

use std::time::Duration;

use fabric_api::fabric::{
    ClusterRecord, FabricRecord, FabricRecordSpec, NodeConfigSpec, NodePeering, PeeringGateway,
    PeeringRecord, Record as _, RecordVersion, RefusedPrefix, digest,
};
use fabric_store::{Kind, Object, ObjectRef};
use futures::FutureExt as _;

use crate::node::{World, config, eventually, sh};

const SOON: Duration = Duration::from_secs(8);

fn put(world: &World, name: &str, spec: FabricRecordSpec) -> FabricRecord {
    let record = FabricRecord::new(name, spec);
    let stored = world.store.put(&record.into()).now_or_never().unwrap().unwrap();
    FabricRecord::try_from(stored).unwrap()
}

fn record_of(peering: &NodePeering) -> PeeringRecord {
    let gateway = peering.gateway.as_ref().unwrap();
    PeeringRecord {
        peer_cluster_id: peering.peer_cluster_id.clone(),
        prefixes: peering.prefixes.clone(),
        connected: peering.connected,
        mtu: peering.mtu,
        gateway: Some(PeeringGateway {
            overlay: gateway.overlay,
            mac: gateway.mac.clone(),
            node: None,
            underlay: vec![gateway.underlay],
            links: Vec::new(),
            listen_port: None,
            node_addresses: Vec::new(),
            probe: gateway.probe.clone(),
            replicas: gateway.replicas.clone(),
            epoch: gateway.epoch,
        }),
    }
}

/// Publishes the cluster's record over these of peerings.
fn put_cluster(world: &World, config: &NodeConfigSpec, peerings: &[FabricRecord]) -> RecordVersion {
    let cluster = ClusterRecord {
        digest: digest(peerings),
        pod_cidrs: config.pod_cidrs.clone(),
        internal_cidr: config.internal_cidr.clone(),
        ips: config.ips.clone(),
        refused: config.refused.clone(),
    };
    let spec = FabricRecordSpec { cluster: Some(cluster), peering: None };
    put(world, FabricRecord::CLUSTER, spec).version().unwrap()
}

fn put_peering(world: &World, record: PeeringRecord) -> FabricRecord {
    let name = FabricRecord::name_of(&record.peer_cluster_id);
    put(world, &name, FabricRecordSpec { cluster: None, peering: Some(record) })
}

fn acknowledged(world: &World) -> Option<RecordVersion> {
    world.status().and_then(|(_, status)| status.records)
}

fn delete(world: &World, record: &FabricRecord) {
    let reference = Object::from(record.clone()).reference();
    assert_eq!(reference.kind, Kind::FabricRecord);
    world.store.delete(&reference).now_or_never().unwrap().unwrap();
}

#[test]
fn missing_record_changes_nothing_on_the_node() {
    let whole = NodeConfigSpec { refuse_seconds: Some(1), ..config() };
    let [peering] = whole.peerings.as_slice() else { panic!("{whole:?}") };
    let mut world = World::new();
    world.configure(whole.clone());
    world.start(&[]);
    world.settle();
    let before = world.dump();
    assert_eq!(acknowledged(&world), None);

    let record = put_peering(&world, record_of(peering));
    let version = put_cluster(&world, &whole, std::slice::from_ref(&record));
    eventually("they are read", SOON, || acknowledged(&world).as_ref() == Some(&version));
    world.reconfigure(whole.own_part());
    assert_eq!(world.dump(), before);
    assert_eq!(world.dry_run(), "");

    // As an agent finds it that restarts meanwhile, too.
    delete(&world, &record);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((world.dump(), acknowledged(&world)), (before.clone(), Some(version.clone())));
    world.stop();
    world.start(&[]);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((world.dump(), acknowledged(&world)), (before.clone(), Some(version)));

    let record = put_peering(&world, PeeringRecord { connected: false, ..record_of(peering) });
    let version = put_cluster(&world, &whole, std::slice::from_ref(&record));
    eventually("it refuses", SOON, || acknowledged(&world).as_ref() == Some(&version));
    assert_ne!(world.dump(), before);

    // The prefixes of a peering that is gone stay refused, though the node's own part is the same.
    delete(&world, &record);
    let version = put_cluster(&world, &whole, &[]);
    eventually("it is taken away", SOON, || acknowledged(&world).as_ref() == Some(&version));
    let refused: Vec<_> = world.refused().into_iter().map(|traffic| traffic.prefix).collect();
    assert_eq!(refused, peering.prefixes);
    assert_eq!(own_generation(&world), 2, "it was written once");
}

#[test]
fn prefix_stays_refused_as_it_moves_to_the_record() {
    let whole = NodeConfigSpec { refuse_seconds: Some(1), ..config() };
    let [peering] = whole.peerings.as_slice() else { panic!("{whole:?}") };
    let prefix = |prefix: &String| RefusedPrefix {
        peer_cluster_id: peering.peer_cluster_id.clone(),
        prefix: prefix.clone(),
    };
    let refused: Vec<_> = peering.prefixes.iter().map(prefix).collect();
    let departed = NodeConfigSpec { peerings: vec![], refused, ..whole.clone() };
    let reported = |world: &World| -> Vec<_> {
        world.refused().into_iter().map(|traffic| traffic.prefix).collect()
    };
    let mut world = World::new();
    let version = put_cluster(&world, &departed, &[]);
    let own = NodeConfigSpec { refused: departed.refused.clone(), ..departed.own_part() };
    world.configure(own);
    world.start(&[]);
    world.settle();
    eventually("it is read", SOON, || acknowledged(&world).as_ref() == Some(&version));
    assert!(world.status().is_some_and(|(_, status)| status.refuses_recorded));
    let is_quiet = |world: &World| world.refused().iter().all(|traffic| traffic.quiet);
    eventually("nobody sends", SOON, || is_quiet(&world));
    assert_eq!(reported(&world), peering.prefixes);

    world.reconfigure(departed.own_part());
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(reported(&world), peering.prefixes);
    assert!(sh(&world.node, "nft list table inet weft_refused").contains("10.201.0.0"));

    let free = NodeConfigSpec { refused: vec![], ..departed };
    put_cluster(&world, &free, &[]);
    eventually("it is free", SOON, || reported(&world).is_empty());
}

fn own_generation(world: &World) -> i64 {
    let own = ObjectRef::new(Kind::NodeConfig, "", "n1");
    world.store.get(&own).now_or_never().unwrap().unwrap().unwrap().generation()
}
