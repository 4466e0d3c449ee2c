//! Leftovers of Liqo's daemon on a node, removed on demand once weft serves the same prefixes; similar objects
//! stay. A bridge stands in for the Geneve device.

use std::time::Duration;

use crate::node::{PEER, World, config, eventually, peering, sh};

const SOON: Duration = Duration::from_secs(5);
const LIQO: &str = "ip link add liqo.a1b2c3d4e5 type bridge; ip link set liqo.a1b2c3d4e5 up
    ip route add 10.80.0.99/32 dev liqo.a1b2c3d4e5 scope link table 894649166
    ip route add 10.201.0.0/16 via 10.80.0.99 dev liqo.a1b2c3d4e5 onlink table 894649166
    ip rule add to 10.80.0.99/32 table 894649166
    ip rule add to 10.201.0.0/16 table 894649166
    nft add table ip milan-masquerade-bypass
    nft add chain ip milan-masquerade-bypass pre-postrouting '{ type nat hook postrouting priority 99; }'
    nft add rule ip milan-masquerade-bypass pre-postrouting ip daddr 10.201.0.0/16 snat to 10.70.0.0
    nft add table ip db-remap-ipmapping-fabric-default
    nft add chain ip db-remap-ipmapping-fabric-default postrouting '{ type nat hook postrouting priority 99; }'";
const OTHERS: &str = "ip link add liqo.mine type bridge; ip link set liqo.mine up
    ip route add 10.9.0.0/16 dev liqo.mine table 77; ip rule add to 10.9.0.0/16 table 77
    nft add table ip mine-masquerade-bypass; nft add chain ip mine-masquerade-bypass mine";

fn has_liqos(world: &World) -> bool {
    let marks = ["a1b2c3d4e5", "894649166", "milan-masquerade-bypass", "db-remap-ipmapping-fabric"];
    let dump = world.dump();
    marks.iter().any(|mark| dump.contains(mark))
}

fn has_others(world: &World) -> bool {
    let dump = world.dump();
    ["liqo.mine", "lookup 77", "mine-masquerade-bypass"].iter().all(|mark| dump.contains(mark))
}

#[test]
fn liqos_leftovers_go_on_demand_only() {
    let mut world = World::new();
    sh(&world.node, &format!("{LIQO}\n{OTHERS}"));
    world.configure(config());
    world.start(&[]);
    world.settle();
    assert!(has_liqos(&world), "not without the argument");
    world.stop();
    world.start(&["--remove-liqo"]);
    eventually("they are gone", SOON, || !has_liqos(&world));
    assert!(has_others(&world));
    assert_eq!(world.problems(), Vec::<String>::new());
    let seen = world.source_seen(&world.node, PEER).unwrap();
    assert_eq!(seen.to_string(), "10.70.0.9", "Liqo's rule made it 10.70.0.0");
    world.stop();
    sh(&world.node, LIQO);
    world.start(&["--remove-liqo"]);
    eventually("they are gone again", SOON, || !has_liqos(&world));
}

#[test]
fn liqos_routes_stay_until_weft_has_them() {
    let mut world = World::new();
    sh(&world.node, LIQO);
    let mut config = config();
    config.peerings.clear();
    world.configure(config.clone());
    world.start(&["--remove-liqo"]);
    let is_named = |problem: &String| problem.contains("10.201.0.0/16") && problem.contains("anew");
    eventually("it is a problem", SOON, || world.problems().iter().any(is_named));
    assert!(world.dump().contains("10.201.0.0/16 via 10.80.0.99"));
    config.peerings.push(peering());
    world.reconfigure(config);
    eventually("they are gone", SOON, || !has_liqos(&world) && world.problems().is_empty());
}
