//! Properties of every plan, checked against a model of what Linux does with each step.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_primitives::{Cidr, Mac};
use netplan::{
    Address, Device, Family, Op, Route, RouteKey, Rule, RuleAction, State, Sysctl, Vxlan, plan,
};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_plan_reaches_its_goal_and_then_has_nothing_to_do(
        have in any_state(true), want in any_state(false)
    ) {
        let mut kernel = have.clone();
        for op in plan(&have, &want) {
            step(&mut kernel, op);
        }
        // Settings are never undone.
        let set: Vec<_> = want.sysctls.keys().cloned().collect();
        kernel.sysctls.retain(|sysctl, _| set.contains(sysctl));
        prop_assert_eq!(&kernel, &want);
        prop_assert_eq!(plan(&kernel, &want), vec![]);
    }

    #[test]
    fn a_kept_prefix_is_never_without_a_route(
        have in any_state(true), want in any_state(false)
    ) {
        let kept: Vec<RouteKey> = want
            .routes
            .keys()
            .filter(|key| have.routes.contains_key(key) && !must_break(&have, &want, key))
            .copied()
            .collect();
        let mut kernel = have.clone();
        for op in plan(&have, &want) {
            let what = op.to_string();
            step(&mut kernel, op);
            for key in &kept {
                prop_assert!(kernel.routes.contains_key(key), "{what}: {key:?} lost its route");
            }
        }
    }

    #[test]
    fn a_prefix_with_a_backstop_never_leaves_another_way(
        have in any_state(true), mut want in any_state(false)
    ) {
        let prefixes: BTreeSet<(u32, Cidr)> = want.routes.keys().map(|k| (k.table, k.to)).collect();
        for (table, to) in &prefixes {
            want.routes.insert(RouteKey::backstop(*table, *to), Route::unreachable(119));
        }
        let mut kernel = have.clone();
        let covered = |state: &State, prefix: &(u32, Cidr)| {
            state.routes.keys().any(|key| (key.table, key.to) == *prefix)
        };
        for op in plan(&have, &want) {
            step(&mut kernel, op);
            for prefix in &prefixes {
                prop_assert!(covered(&kernel, prefix) || !covered(&have, prefix));
            }
        }
    }

    #[test]
    fn changed_rules_leave_no_moment_without_any(
        have in any_state(true), want in any_state(false)
    ) {
        prop_assume!(!have.rules.is_empty() && !want.rules.is_empty());
        let mut kernel = have.clone();
        for op in plan(&have, &want) {
            let taken = op.to_string();
            step(&mut kernel, op);
            prop_assert!(!kernel.rules.is_empty(), "{taken}: packets pass our table by");
        }
    }

    #[test]
    fn cleanup_leaves_nothing(have in any_state(true)) {
        let mut kernel = have.clone();
        for op in plan(&have, &State::default()) {
            step(&mut kernel, op);
        }
        kernel.sysctls.clear();
        kernel.devices.clear();
        prop_assert_eq!(kernel, State::default());
    }
}

/// True for a route whose device, before and after, is one that loses its routes for a moment.
fn must_break(have: &State, want: &State, key: &RouteKey) -> bool {
    let disturbed = |dev: &str| {
        let rebuilt = match (have.links.get(dev), want.links.get(dev)) {
            (Some(have), Some(want)) => !have.can_become(want),
            (None, _) | (_, None) => false,
        };
        let has_ipv4 = |s: &State| s.addresses.iter().any(|a| a.dev == dev && a.address.is_ipv4());
        rebuilt || (has_ipv4(have) && !has_ipv4(want))
    };
    let dev = |state: &State| state.routes[key].hop.device().map(str::to_owned);
    dev(have).is_some_and(|d| disturbed(&d)) && dev(want).is_some_and(|d| disturbed(&d))
}

/// Does to `kernel` what Linux would, and panics where Linux would return an error.
fn step(kernel: &mut State, op: Op) {
    let there = |kernel: &State, dev: &str| {
        assert!(kernel.links.contains_key(dev) || kernel.devices.contains_key(dev), "ENODEV");
    };
    match op {
        Op::AddLink(name, link) => {
            assert!(kernel.links.values().all(|old| !old.can_become(&link)), "EEXIST");
            assert!(kernel.links.insert(name, link).is_none(), "EEXIST");
        }
        Op::DelLink(name) => {
            kernel.links.remove(&name).expect("ENODEV");
            kernel.addresses.retain(|a| a.dev != name);
            kernel.neighbours.retain(|(dev, _), _| *dev != name);
            kernel.fdb.retain(|(dev, _), _| *dev != name);
            kernel.routes.retain(|_, route| route.hop.device() != Some(&name));
            kernel.sysctls.retain(|sysctl, _| sysctl.dev() != Some(&name));
        }
        Op::SetMtu(name, mtu) => match kernel.links.get_mut(&name) {
            Some(link) => link.mtu = mtu,
            None => kernel.devices.get_mut(&name).expect("ENODEV").mtu = mtu,
        },
        Op::SetNoLinkLocal(name) => there(kernel, &name),
        Op::SetMac(name, mac) => {
            kernel.links.get_mut(&name).expect("ENODEV").mac = mac;
            kernel.neighbours.retain(|(dev, _), _| *dev != name);
        }
        Op::SetUp(name) => match kernel.links.get_mut(&name) {
            Some(link) => link.up = true,
            None => kernel.devices.get_mut(&name).expect("ENODEV").up = true,
        },
        Op::AddAddress(address) => {
            there(kernel, &address.dev);
            assert!(kernel.addresses.insert(address), "EEXIST");
        }
        Op::DelAddress(address) => {
            assert!(kernel.addresses.remove(&address), "EADDRNOTAVAIL");
            let dev = &address.dev;
            let last = !kernel.addresses.iter().any(|a| a.dev == *dev && a.address.is_ipv4());
            if address.address.is_ipv4() && last {
                kernel.neighbours.retain(|(d, ip), _| d != dev || ip.is_ipv6());
                let stays = |key: &RouteKey, route: &Route| {
                    route.hop.device() != Some(dev) || !key.to.is_ipv4()
                };
                kernel.routes.retain(|key, route| stays(key, route));
            }
        }
        Op::PutNeighbour(dev, ip, mac) => {
            there(kernel, &dev);
            kernel.neighbours.insert((dev, ip), mac);
        }
        Op::DelNeighbour(dev, ip) => {
            kernel.neighbours.remove(&(dev, ip)).expect("ENOENT");
        }
        Op::PutFdb(dev, mac, to) => {
            there(kernel, &dev);
            kernel.fdb.insert((dev, mac), to);
        }
        Op::DelFdb(dev, mac, _) => {
            kernel.fdb.remove(&(dev, mac)).expect("ENOENT");
        }
        Op::PutRoute(key, route) => {
            route.hop.device().inspect(|dev| there(kernel, dev));
            kernel.routes.insert(key, route);
        }
        Op::DelRoute(key, route) => {
            assert_eq!(kernel.routes.remove(&key), Some(route), "ESRCH");
        }
        Op::AddRule(rule) => assert!(kernel.rules.insert(rule), "EEXIST"),
        Op::DelRule(rule) => assert!(kernel.rules.remove(&rule), "ENOENT"),
        Op::SetSysctl(sysctl, value) => {
            sysctl.dev().inspect(|dev| there(kernel, dev));
            kernel.sysctls.insert(sysctl, value);
        }
    }
}

const TUN: &str = "tun0";

/// One that the kernel could be in: nothing hangs on a device that is not there.
fn any_state(observed: bool) -> impl Strategy<Value = State> {
    btree_map(0u8..3, (0u32..2, 0u8..2, any::<bool>()), 0..4)
        .prop_flat_map(move |links| {
            let links: BTreeMap<String, Vxlan> = links
                .iter()
                .map(|(n, how)| (format!("vx{n}"), vxlan(*n, *how, observed)))
                .collect();
            let mut devs: Vec<String> = links.keys().cloned().collect();
            devs.push(TUN.to_owned());
            let dev = || proptest::sample::select(devs.clone());
            (
                Just(links),
                btree_set((dev(), 0u8..3, any::<bool>()), 0..4),
                btree_map((dev(), 0u8..3, any::<bool>()), 0u8..2, 0..5),
                btree_map((dev(), 0u8..3), 0u8..2, 0..4),
                btree_map((0u8..4, any::<bool>()), (proptest::option::of(dev()), 0u8..3), 0..6),
                (btree_set(0u32..3, 0..3), vec((dev(), 0u32..2), 0..3), 1400u32..1402),
            )
        })
        .prop_map(|(links, addresses, neighbours, fdb, routes, (rules, sysctls, mtu))| State {
            links,
            devices: BTreeMap::from([(TUN.to_owned(), Device { mtu, up: true })]),
            addresses: addresses.into_iter().map(|(dev, n, v6)| address(dev, n, v6)).collect(),
            neighbours: neighbours
                .into_iter()
                .map(|((dev, n, v6), to)| ((dev, ip(n, v6)), mac(to)))
                .collect(),
            fdb: fdb.into_iter().map(|((dev, n), to)| ((dev, mac(n)), ip(to, false))).collect(),
            routes: routes.into_iter().map(|(key, hop)| route(key, hop)).collect(),
            rules: rules.into_iter().map(rule).collect(),
            sysctls: sysctls
                .into_iter()
                .map(|(dev, value)| (Sysctl::of_device(Family::Ipv4, &dev, "rp_filter"), value))
                .collect(),
        })
}

fn vxlan(n: u8, (vni, change, down): (u32, u8, bool), observed: bool) -> Vxlan {
    Vxlan {
        vni: u32::from(n) * 10 + vni,
        port: 4879,
        family: Family::Ipv4,
        elsewhere: false,
        checksum: true,
        mtu: 1400 + u32::from(change),
        mac: mac(change),
        up: !(observed && down),
    }
}

fn mac(n: u8) -> Mac {
    Mac::of_overlay([10, 80, 0, n].into())
}

fn ip(n: u8, v6: bool) -> IpAddr {
    if v6 { format!("fd00::{n}").parse().unwrap() } else { [10, 80, 0, n].into() }
}

fn address(dev: String, n: u8, v6: bool) -> Address {
    Address { dev, address: ip(n, v6), len: if v6 { 128 } else { 32 } }
}

fn route((n, v6): (u8, bool), (dev, via): (Option<String>, u8)) -> (RouteKey, Route) {
    let to = if v6 { format!("fd{n:02x}::/16") } else { format!("10.{n}.0.0/16") };
    let route = match dev {
        Some(dev) => Route::onlink(ip(via, v6), &dev, 119),
        None => Route::unreachable(119),
    };
    (RouteKey::new(7, to.parse().unwrap()), route)
}

fn rule(n: u32) -> Rule {
    let action = RuleAction::Lookup(7);
    Rule { priority: n, family: Family::Ipv4, iif: None, to: None, action, protocol: 119 }
}
