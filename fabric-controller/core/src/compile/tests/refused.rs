//! Prefixes of peerings that are gone.

use fabric_objects::{Kind, ObjectRef};

use serde_json::json;

use super::world::{World, configuration, server_side, tenant};

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
