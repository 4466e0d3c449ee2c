//! Prefixes of peerings that are gone.

use fabric_api::fabric::{FabricRecord, NodeConfig};
use fabric_api::labels;
use fabric_index::owner;
use fabric_objects::{Kind, Object, ObjectRef};

use serde_json::json;

use super::world::{World, cluster_id, configuration, server_side, tenant};

/// Refused prefixes of each node.
fn refused(world: &World) -> Vec<String> {
    let node = world.node("n1").unwrap();
    node.refused.iter().map(|r| format!("{} {}", r.peer_cluster_id, r.prefix)).collect()
}

fn prefixes(world: &World, peer: &str) -> Vec<String> {
    let node = world.node("n1").unwrap();
    let mut peerings = node.peerings.iter().filter(|p| p.peer_cluster_id == peer);
    peerings.next().map(|peering| peering.prefixes.clone()).unwrap_or_default()
}

fn peer_with(world: &mut World, peer: &str, port: u16) {
    server_side(peer, port).into_iter().for_each(|object| world.apply(object));
    world.settle();
}

fn unpeer(world: &mut World, peer: &str) {
    for object in server_side(peer, 1) {
        world.delete(&object.reference());
    }
    world.settle();
}

/// An agent that reports packets to all refused prefixes.
fn busy() -> World {
    let mut world = World::new("milan");
    world.quiet = Some(false);
    world.settle();
    world
}

#[test]
fn departed_prefix_is_refused_and_held_until_quiet() {
    let mut world = busy();
    let before = world.held();
    peer_with(&mut world, "rome", 30742);
    let seen = prefixes(&world, "rome");
    unpeer(&mut world, "rome");
    assert_eq!(prefixes(&world, "rome"), [""; 0]);
    assert_eq!(refused(&world), seen.iter().map(|p| format!("rome {p}")).collect::<Vec<_>>());
    peer_with(&mut world, "paris", 30743);
    let others = prefixes(&world, "paris");
    assert!(others.len() == 2 && others.iter().all(|p| !seen.contains(p)), "{others:?} {seen:?}");
    unpeer(&mut world, "paris");
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!((refused(&world).len(), world.held()), (0, before));
}

#[test]
fn restarted_controller_still_refuses_departed_prefix() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    unpeer(&mut world, "rome");
    let before = refused(&world);
    let node = ObjectRef::new(Kind::NodeConfig, "", "n1");
    let mut world = world.restart_without(&[node], Vec::new());
    world.settle();
    assert_eq!(refused(&world), before);
    assert_eq!(before.len(), 2);
}

/// After a restart of the host, which empties the run directory, without these objects as well.
fn restarted(world: World, gone: Vec<ObjectRef>) -> World {
    use Kind::{FabricRecord, GatewayConfig, GatewayRecord, NodeConfig};
    let published = [NodeConfig, FabricRecord, GatewayConfig, GatewayRecord];
    let lost = published.into_iter().flat_map(|kind| world.index.of_kind(kind));
    let lost: Vec<_> = lost.map(|(reference, _)| reference.clone()).chain(gone).collect();
    world.restart_without(&lost, Vec::new())
}

#[test]
fn prefix_changed_while_its_host_was_down_is_refused() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    let seen = prefixes(&world, "rome");
    let id = cluster_id("milan");
    let mut world = restarted(world, vec![id.reference()]);
    world.apply(configuration("rome", json!(["10.222.0.0/16"]), json!(["10.70.0.0/16"])));
    // Until the cluster's ID is readable, nothing is published.
    world.settle();
    world.apply(id);
    world.settle();
    let old = seen.iter().find(|prefix| !prefixes(&world, "rome").contains(prefix)).unwrap();
    assert_eq!(refused(&world), [format!("rome {old}")]);
    assert!(prefixes(&world, "rome").contains(&"10.222.0.0/16".to_owned()));
}

#[test]
fn peering_removed_while_its_host_was_down_is_refused() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    peer_with(&mut world, "paris", 30743);
    let seen = prefixes(&world, "rome");
    let gone: Vec<_> = server_side("rome", 1).iter().map(Object::reference).collect();
    let mut world = restarted(world, gone);
    world.settle();
    assert_eq!(refused(&world), seen.iter().map(|p| format!("rome {p}")).collect::<Vec<_>>());
    assert_eq!(seen.len(), 2);
    peer_with(&mut world, "oslo", 30744);
    let others = prefixes(&world, "oslo");
    assert!(others.len() == 2 && others.iter().all(|p| !seen.contains(p)), "{others:?} {seen:?}");
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!(refused(&world), [""; 0]);
}

#[test]
fn returned_peering_has_its_prefixes_at_once() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    let seen = prefixes(&world, "rome");
    let held = world.held();
    unpeer(&mut world, "rome");
    // Another peering takes none of them.
    peer_with(&mut world, "paris", 30743);
    unpeer(&mut world, "paris");
    peer_with(&mut world, "rome", 30742);
    assert_eq!(prefixes(&world, "rome"), seen);
    assert!(refused(&world).iter().all(|r| r.starts_with("paris")), "{:?}", refused(&world));
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!(world.held(), held, "{}", tenant("rome"));
}

#[test]
fn older_agents_hold_up_no_departed_prefix() {
    let mut world = World::new("milan");
    world.settle();
    let before = world.held();
    peer_with(&mut world, "rome", 30742);
    unpeer(&mut world, "rome");
    assert_eq!((refused(&world).len(), world.held()), (0, before));
}

#[test]
fn reverted_edit_has_its_old_prefix_at_once() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    let seen = prefixes(&world, "rome");
    let edit = |pod| configuration("rome", json!([pod]), json!(["10.70.0.0/16"]));
    world.apply(edit("10.222.0.0/16"));
    world.settle();
    assert!(prefixes(&world, "rome").contains(&"10.222.0.0/16".to_owned()));
    world.apply(edit("10.200.0.0/16"));
    world.settle();
    assert_eq!(prefixes(&world, "rome"), seen);
    assert_eq!(refused(&world), ["rome 10.222.0.0/16"], "pods may have learnt it");
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!(refused(&world), [""; 0]);
}

#[test]
fn peer_in_the_place_of_another_gets_other_prefixes() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    let (seen, held) = (prefixes(&world, "rome"), world.held());
    let relabel = |world: &mut World, peer: &str| {
        let mut edited = configuration("rome", json!(["10.200.0.0/16"]), json!(["10.70.0.0/16"]));
        let labels = edited.metadata_mut().labels.get_or_insert_default();
        labels.insert(labels::REMOTE_CLUSTER_ID.to_owned(), peer.to_owned());
        world.apply(edited);
        world.settle();
    };
    relabel(&mut world, "paris");
    let others = prefixes(&world, "paris");
    assert!(others.len() == 2 && others.iter().all(|p| !seen.contains(p)), "{others:?} {seen:?}");
    assert_eq!(refused(&world), seen.iter().map(|p| format!("rome {p}")).collect::<Vec<_>>());
    relabel(&mut world, "rome");
    assert_eq!(prefixes(&world, "rome"), seen);
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!((refused(&world).len(), world.held()), (0, held));
}

#[test]
fn prefixes_return_after_a_swap_in_any_order() {
    for order in [["rome", "paris"], ["paris", "rome"]] {
        let mut world = busy();
        peer_with(&mut world, "rome", 30742);
        peer_with(&mut world, "paris", 30743);
        let label = |world: &mut World, name: &str, peer: &str| {
            let external = if name == "rome" { "10.70.0.0/16" } else { "10.71.0.0/16" };
            let mut edited = configuration(name, json!(["10.200.0.0/16"]), json!([external]));
            let labels = edited.metadata_mut().labels.get_or_insert_default();
            labels.insert(labels::REMOTE_CLUSTER_ID.to_owned(), peer.to_owned());
            world.apply(edited);
        };
        ["rome", "paris"].iter().for_each(|peer| label(&mut world, peer, peer));
        world.settle();
        let seen = ["rome", "paris"].map(|peer| prefixes(&world, peer));
        label(&mut world, "rome", "paris");
        label(&mut world, "paris", "rome");
        world.settle();
        for name in order {
            label(&mut world, name, name);
            world.settle();
        }
        assert_eq!(["rome", "paris"].map(|peer| prefixes(&world, peer)), seen, "{order:?}");
    }
}

/// A folder of manifests may be away for a moment, in whole or in part.
#[test]
fn prefixes_outlast_a_moment_without_manifests() {
    let everything = ["ConfigMap", "Node", "Configuration", "Network"];
    let parts: [&[&str]; 5] = [
        &everything,
        &everything[..3],
        &["Node", "Configuration"],
        &["ConfigMap", "Configuration"],
        &["Configuration"],
    ];
    for (part, at_once) in parts.into_iter().flat_map(|part| [(part, false), (part, true)]) {
        let mut world = busy();
        // In this order another one would be granted the prefixes of the first.
        peer_with(&mut world, "turin", 30742);
        peer_with(&mut world, "rome", 30743);
        let seen = ["rome", "turin"].map(|peer| prefixes(&world, peer));
        assert!(seen.iter().all(|of| of.len() == 2), "{seen:?}");
        let objects = part.iter().map(|kind| Kind::ALL.into_iter().find(|of| of.as_str() == *kind));
        let objects = objects.flat_map(|kind| world.index.of_kind(kind.unwrap()));
        let objects = objects.filter(|(_, object)| !owner::is_own(object));
        let objects: Vec<Object> = objects.map(|(_, object)| object.clone()).collect();
        for object in &objects {
            world.delete(&object.reference());
            if !at_once {
                world.settle();
            }
        }
        world.settle();
        for object in objects {
            world.apply(object);
            if !at_once {
                world.settle();
            }
        }
        world.settle();
        let again = ["rome", "turin"].map(|peer| prefixes(&world, peer));
        assert_eq!(again, seen, "without {part:?}, {at_once}");
    }
}

#[test]
fn refused_prefix_outlasts_a_moment_without_nodes() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    unpeer(&mut world, "rome");
    let (before, held) = (refused(&world), world.held());
    let nodes: Vec<Object> =
        world.index.of_kind(Kind::Node).map(|(_, object)| object.clone()).collect();
    for node in &nodes {
        world.delete(&node.reference());
    }
    world.settle();
    nodes.into_iter().for_each(|node| world.apply(node));
    world.settle();
    assert_eq!((refused(&world), world.held()), (before, held));
}

/// Until ipam has granted the new one, nodes have routes for the old one.
#[test]
fn old_prefix_is_kept_until_new_one_is_granted() {
    let mut world = busy();
    peer_with(&mut world, "rome", 30742);
    let held = world.held();
    world.apply(configuration("rome", json!(["10.222.0.0/16"]), json!(["10.70.0.0/16"])));
    let compiled = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    assert_eq!(compiled.deleted, [].into());
    world.settle();
    assert_eq!(world.held().0.len(), held.0.len() + 1, "{:?}", world.held());
}

/// A world in which the agent reads records, and the prefixes of a peering of it that is gone.
fn departed(refuses_recorded: bool) -> (World, Vec<String>) {
    let mut world = busy();
    (world.with_records, world.refuses_recorded) = (true, refuses_recorded);
    peer_with(&mut world, "rome", 30742);
    let record = ObjectRef::new(Kind::FabricRecord, "", &FabricRecord::name_of("rome"));
    let record = world.index.typed::<FabricRecord>(&record).unwrap().spec.clone();
    let prefixes = record.peering.unwrap().prefixes;
    unpeer(&mut world, "rome");
    (world, prefixes.iter().map(|prefix| format!("rome {prefix}")).collect())
}

/// Prefixes that the agent refuses that reads records.
fn joined(world: &World) -> Vec<String> {
    let config = ObjectRef::new(Kind::NodeConfig, "", "n1");
    let config = world.index.typed::<NodeConfig>(&config).unwrap();
    let refused = config.joined(&world.records()).unwrap().spec.refused;
    refused.iter().map(|r| format!("{} {}", r.peer_cluster_id, r.prefix)).collect()
}

#[test]
fn refused_prefix_is_published_once_to_readers() {
    let (mut world, prefixes) = departed(true);
    assert!(world.node("n1").unwrap().from_records);
    assert_eq!((refused(&world), joined(&world)), (Vec::new(), prefixes.clone()));
    world.agents.clear();
    world.delete(&ObjectRef::new(Kind::Node, "", "n1"));
    world.settle();
    assert_eq!(refused(&world), prefixes, "a removed node reads no records");
}

#[test]
fn recorded_prefix_is_free_once_quiet() {
    let (mut world, prefixes) = departed(true);
    world.report();
    world.settle();
    assert_eq!(joined(&world), prefixes);
    world.quiet = Some(true);
    world.report();
    world.settle();
    assert_eq!(joined(&world), [""; 0]);
}

#[test]
fn older_reader_has_refused_prefixes_in_its_config() {
    let (world, prefixes) = departed(false);
    assert!(world.node("n1").unwrap().from_records);
    assert_eq!(refused(&world), prefixes);
}

#[test]
fn prefix_stays_refused_while_agents_are_replaced() {
    let (mut world, prefixes) = departed(false);
    world.refuses_recorded = true;
    world.report();
    for _ in 0..5 {
        world.round();
        assert_eq!(joined(&world), prefixes);
    }
    assert_eq!(refused(&world), [""; 0]);
    world.refuses_recorded = false;
    world.report();
    world.round();
    assert_eq!(refused(&world), prefixes, "an older agent is back");
}

#[test]
fn record_without_refused_prefixes_is_not_relied_on() {
    let (mut world, prefixes) = departed(false);
    // As an older controller left it.
    let cluster = ObjectRef::new(Kind::FabricRecord, "", "cluster");
    let mut record = world.index.typed::<FabricRecord>(&cluster).unwrap().clone();
    record.spec.cluster.as_mut().unwrap().refused.clear();
    record.metadata.generation = record.metadata.generation.map(|generation| generation + 1);
    world.index.apply(fabric_objects::Event::Applied(record.into()));
    world.refuses_recorded = true;
    let version = world.records().version();
    world.acknowledge("n1", version);
    world.report();
    for _ in 0..5 {
        world.round();
        assert_eq!(joined(&world), prefixes);
    }
    world.settle();
    assert_eq!((refused(&world), joined(&world)), (Vec::new(), prefixes));
}
