//! IPv6 beside IPv4, and alone.

use std::net::IpAddr;

use fabric_api::link_v6;
use fabric_objects::Kind;
use serde_json::json;

use super::world::{World, client_side, configuration, network, of};

fn dual_stack_node(name: &str, addresses: &[&str]) -> fabric_objects::Object {
    let addresses: Vec<_> =
        addresses.iter().map(|a| json!({"type": "InternalIP", "address": a})).collect();
    of!(Node, k8s_openapi::api::core::v1::Node, {
        "metadata": {"name": name},
        "spec": {"podCIDRs": ["10.200.1.0/24", "fd00:200:0:1::/64"]},
        "status": {"addresses": addresses}
    })
}

fn dual_stack() -> World {
    let mut world = World::new("rome");
    world.apply(network("pod-cidr-6", "pod-cidr", "fd00:200::/48"));
    world.apply(network("external-4", "external-cidr", "10.70.0.0/16"));
    world.apply(network("external-6", "external-cidr", "fd00:70::/48"));
    world.apply(dual_stack_node("n1", &["192.0.2.11", "2001:db8::11"]));
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world
}

#[test]
fn both_families_side_by_side() {
    let mut world = dual_stack();
    let both = |four: &str, six: &str| json!([four, six]);
    world.apply(configuration(
        "milan",
        both("10.200.0.0/16", "fd00:200::/48"),
        both("10.70.0.0/16", "fd00:70::/48"),
    ));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    let pairs: Vec<_> =
        config.remaps.iter().map(|r| (r.remote.as_str(), r.local.as_str())).collect();
    assert_eq!(
        pairs.iter().map(|p| p.0).collect::<Vec<_>>(),
        ["10.200.0.0/16", "fd00:200::/48", "10.70.0.0/16", "fd00:70::/48"]
    );
    assert!(
        pairs
            .iter()
            .all(|(remote, local)| remote != local && remote.contains(':') == local.contains(':'))
    );
    let icmp: Vec<_> = config.icmp_sources.iter().map(ToString::to_string).collect();
    assert_eq!(icmp, ["10.70.0.0", "fd00:70::"]);
    let node = world.node("n1").unwrap();
    assert_eq!(node.external.len(), 2);
    assert_eq!(node.local_pods, ["10.200.1.0/24", "fd00:200:0:1::/64"]);
    assert_eq!(config.nodes[0].prefixes.len(), 4);
    let status = world.status(&fabric_objects::ObjectRef::new(
        Kind::Configuration,
        "liqo-tenant-milan",
        "milan",
    ));
    assert_eq!(status["remote"]["cidr"]["pod"], json!([pairs[0].1, pairs[1].1]));
}

#[test]
fn ipv6_only_peer_and_nodes_are_compiled() {
    let mut world = dual_stack();
    world.apply(dual_stack_node("n1", &["2001:db8::11"]));
    world.apply(dual_stack_node("n2", &["2001:db8::12", "192.0.2.12"]));
    world.apply(configuration("milan", json!("2001:db8:5::/48"), json!([])));
    world.settle();
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    assert_eq!(config.remaps.len(), 1);
    assert_eq!(config.nodes[0].underlay.to_string(), "2001:db8::11");
    let host = "2001:db8::11".parse().unwrap();
    let link = link_v6(config.overlay.link_address.unwrap(), host);
    assert_eq!(config.overlay.link_address_v6, Some(link));
    let [first, second] =
        ["n1", "n2"].map(|n| world.node(n).unwrap().peerings[0].gateway.clone().unwrap());
    assert_eq!((first.underlay, &first.links), (link.into(), &vec![link.into()]));
    assert_eq!((second.underlay, second.links.len()), (host.into(), 0));
    assert_eq!(world.node("n2").unwrap().vxlan_sources, [IpAddr::from(host)]);
}

const V4: &str = "192.0.2.1";
const V6: &str = "2001:db8::1";

/// Orders of a node's addresses, the last digit of each still missing.
const ORDERS: [&[&str]; 4] = [&[V4, V6], &[V6, V4], &[V4], &[V6]];

fn ordered(name: &str, order: &[&str]) -> fabric_objects::Object {
    let addresses: Vec<_> = order.iter().map(|start| format!("{start}{}", &name[1..])).collect();
    dual_stack_node(name, &addresses.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Both ends of the overlay between a node and a gateway: where the gateway sends to, and the node.
fn ends(world: &World, name: &str) -> (Option<IpAddr>, Option<IpAddr>) {
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    let to_node = config.nodes.iter().find(|node| node.name == name).map(|node| node.underlay);
    let peering = &world.node(name).unwrap().peerings[0];
    (to_node, peering.gateway.as_ref().map(|gateway| gateway.underlay))
}

#[test]
fn node_and_gateway_agree_on_family_in_every_order() {
    for host in ORDERS {
        for other in ORDERS {
            let mut world = dual_stack();
            world.apply(ordered("n1", host));
            world.apply(ordered("n2", other));
            world.apply(configuration("milan", json!("10.200.0.0/16"), json!([])));
            // Its status has an address of the gateway by then.
            world.settle();
            world.settle();
            let common = other.iter().find(|start| host.contains(start));
            for (name, family) in [("n1", host.first()), ("n2", common)] {
                let v4 = family.map(|start| *start == V4);
                let (to_node, to_gateway) = ends(&world, name);
                assert_eq!(to_node.map(|ip| ip.is_ipv4()), v4, "{name} of {host:?}, {other:?}");
                assert_eq!(to_gateway.map(|ip| ip.is_ipv4()), v4, "{name} of {host:?}, {other:?}");
            }
            let mut apart = world.problems();
            apart.retain(|problem| problem.contains("where gateways are"));
            assert_eq!(apart.len(), usize::from(common.is_none()), "{apart:?}");
            assert!(apart.iter().all(|problem| problem.contains("n2")), "{apart:?}");
        }
    }
}

#[test]
fn remapped_prefixes_keep_their_length() {
    let mut world = dual_stack();
    world.apply(configuration(
        "milan",
        json!(["10.200.32.0/19", "10.200.7.16/28", "fd00:200:0:40::/58"]),
        json!(["10.70.4.0/22", "fd00:70:0:1::/64"]),
    ));
    world.settle();
    let remaps = &world.gateway("liqo-tenant-milan", "client").unwrap().remaps;
    let mut seen: Vec<fabric_api::Cidr> = Vec::new();
    for remap in remaps {
        let [remote, local] = [&remap.remote, &remap.local].map(|text| text.parse().unwrap());
        let (remote, local): (fabric_api::Cidr, fabric_api::Cidr) = (remote, local);
        assert_eq!(local.len(), remote.len(), "{remap:?}");
        assert_ne!(local, remote, "it is taken here: {remap:?}");
        assert!(!seen.iter().any(|other| other.overlaps(&local)), "{remaps:?}");
        seen.push(local);
    }
    assert_eq!(seen.len(), 5);
}

/// In Kubernetes the second external CIDR has a type of its own: liqoctl expects one of the first.
#[test]
fn second_external_cidr_may_have_own_type() {
    let mut one = dual_stack();
    one.settle();
    let mut other = dual_stack();
    other.apply(network("external-6", "external-cidr-v6", "fd00:70::/48"));
    other.settle();
    assert_eq!(other.problems(), one.problems());
    assert_eq!(other.node("n1"), one.node("n1"));
    assert_eq!(other.node("n1").unwrap().external.len(), 2);
}
