//! Nodes and IP resources.

use std::net::IpAddr;

use fabric_api::fabric::{MovedAddress, NodeConfig};
use fabric_api::ipam::IP;
use fabric_objects::{Event, Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use super::world::{World, client_side, network, node, object, of};
use crate::compile::Allocation;

fn peered() -> World {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    world
}

fn n(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::Node, "", name)
}

#[test]
fn vxlan_of_other_hosts_goes_to_the_gateways_host() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    let there = world.node("n2").unwrap();
    let gateway = there.peerings[0].gateway.as_ref().unwrap();
    let host = "192.0.2.11".parse::<IpAddr>().unwrap();
    assert_eq!((gateway.underlay, &gateway.links), (host, &Vec::new()));
    assert_eq!(there.vxlan_sources, [host]);
    assert_eq!(there.local_pods, ["10.200.2.0/24"]);
    assert_eq!(there.pod_cidrs, ["10.200.0.0/16"]);
    let here = world.node("n1").unwrap();
    let link = here.peerings[0].gateway.as_ref().unwrap();
    assert_eq!((&link.links, &here.vxlan_sources), (&vec![link.underlay], &vec![link.underlay]));
    assert_ne!(link.underlay, host);
    assert_ne!(here.external, there.external);
    assert_ne!(here.overlay.unwrap(), there.overlay.unwrap());
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    let nodes: Vec<_> = config.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(nodes, ["n1", "n2"]);
}

#[test]
fn only_nodes_external_addresses_are_from_the_end() {
    let mut world = peered();
    let of_user = json!({"metadata": {"name": "database", "namespace": "shop"},
        "spec": {"ip": "192.0.2.7"}});
    world.apply(object::<IP>(Kind::Ip, of_user));
    let ips: Vec<IP> = world.index.all::<IP>(Kind::Ip).map(|(_, ip)| ip.clone()).collect();
    for mut ip in ips {
        ip.status = None;
        world.index.apply(Event::Applied(ip.into()));
    }
    let requests = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH).ipam_requests;
    let from_end = requests.into_iter().filter_map(|request| match request.allocation {
        Allocation::Address { from_end, .. } => Some((request.object.name, from_end)),
        Allocation::Network { .. } => None,
    });
    let (from_end, from_start): (Vec<_>, Vec<_>) = from_end.partition(|(_, from_end)| *from_end);
    assert_eq!(from_end, [("node-n1-external-ipv4".to_owned(), true)]);
    let has = |name: &str| from_start.iter().any(|(other, _)| other == name);
    assert!(has("database") && has("node-n1-overlay"), "{from_start:?}");
}

#[test]
fn network_put_back_waits_until_its_stand_in_is_gone() {
    let mut world = peered();
    let internal = network("internal-cidr", "internal-cidr", "10.80.0.0/16");
    let [own, stand_in] = ["internal-cidr", "default-internal-cidr"]
        .map(|name| world.index.settings.own(Kind::Network, name));
    assert_eq!(world.status(&stand_in)["cidr"], "10.80.0.0/16");
    world.apply(internal);
    let compiled = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    assert!(compiled.deleted.contains(&stand_in));
    let is_requested = compiled.ipam_requests.iter().any(|request| request.object == own);
    assert!(!is_requested, "the stand-in still has its prefix");
    let problems: Vec<_> = compiled.problems.iter().map(ToString::to_string).collect();
    assert!(problems[0].ends_with("waits for Network liqo/default-internal-cidr to go"));
    world.settle();
    assert_eq!(world.status(&own)["cidr"], "10.80.0.0/16");
    assert_eq!(world.index.get(&stand_in), None);
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn network_named_like_a_stand_in_is_the_users() {
    let mut world = World::new("rome");
    world.apply(network("default-external-cidr", "external-cidr", "10.90.0.0/16"));
    world.settle();
    let own = world.index.settings.own(Kind::Network, "default-external-cidr");
    assert_eq!(world.status(&own)["cidr"], "10.90.0.0/16");
}

/// Address and prefix of an IP as they are granted.
fn grant_of(world: &World, ip: &ObjectRef) -> [String; 2] {
    ["ip", "cidr"].map(|field| world.status(ip)[field].as_str().unwrap_or_default().to_owned())
}

#[test]
fn addresses_outlive_a_network_that_comes_back() {
    let mut world = World::new("rome");
    let internal = network("internal-cidr", "internal-cidr", "10.90.0.0/16");
    world.apply(internal.clone());
    world.settle();
    world.index.settings.kubernetes = true;
    let own = world.index.settings.own(Kind::Ip, "node-n1-overlay");
    let before = grant_of(&world, &own);
    assert_eq!(before[1], "10.90.0.0/16");
    world.delete(&internal.reference());
    world.settle();
    assert_eq!(grant_of(&world, &own), before, "a stand-in is there for a moment");
    world.apply(internal);
    world.settle();
    assert_eq!(grant_of(&world, &own), before);
}

#[test]
fn address_of_another_prefix_goes_with_its_ip() {
    let mut world = World::new("rome");
    world.apply(network("internal-cidr", "internal-cidr", "10.90.0.0/16"));
    let of_user = json!({"metadata": {"name": "database", "namespace": "shop"},
        "spec": {"ip": "192.0.2.7"}});
    world.apply(object::<IP>(Kind::Ip, of_user));
    world.settle();
    world.index.settings.kubernetes = true;
    let own = world.index.settings.own(Kind::Ip, "node-n1-overlay");
    let of_user = ObjectRef::new(Kind::Ip, "shop", "database");
    let external = grant_of(&world, &of_user);
    assert_eq!(grant_of(&world, &own)[1], "10.90.0.0/16");
    for (old, new, kind) in [
        ("internal-cidr", "10.91.0.0/16", "internal-cidr"),
        ("default-external-cidr", "10.92.0.0/16", "external-cidr"),
    ] {
        world.delete(&world.index.settings.own(Kind::Network, old));
        world.apply(network(&format!("another-{kind}"), kind, new));
    }
    world.settle();
    assert_eq!(grant_of(&world, &own)[1], "10.91.0.0/16");
    assert_eq!(grant_of(&world, &of_user), external, "that is for its user to replace");
    let expected = format!(
        "IP shop/database: status.ip: found {} of {}; expected one of 10.92.0.0/16: delete this IP",
        external[0], external[1]
    );
    assert!(world.problems().iter().any(|of| of.starts_with(&expected)), "{:?}", world.problems());
}

/// Reports a moved address as the agent of `n2` does.
fn report_moved(world: &mut World, declared: &str, found: &str) {
    let reference = ObjectRef::new(Kind::NodeConfig, "", "n2");
    let mut config = world.index.typed::<NodeConfig>(&reference).unwrap().clone();
    let moved = MovedAddress { declared: declared.parse().unwrap(), found: found.parse().unwrap() };
    config.status.get_or_insert_default().moved = vec![moved];
    world.index.apply(Event::Applied(config.into()));
    world.settle();
}

fn underlay_of_n2(world: &World) -> [String; 2] {
    let gateway = world.gateway("liqo-tenant-milan", "client").unwrap();
    let at_gateway = gateway.nodes.iter().find(|node| node.name == "n2").unwrap().underlay;
    [world.node("n2").unwrap().underlay[0].to_string(), at_gateway.to_string()]
}

#[test]
fn reported_address_takes_the_declared_ones_place() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    report_moved(&mut world, "192.0.2.12", "192.0.2.99");
    assert_eq!(underlay_of_n2(&world), ["192.0.2.99"; 2]);
    assert_eq!(world.node("n2").unwrap().declared, ["192.0.2.12".parse::<IpAddr>().unwrap()]);
    assert_eq!(world.problems(), [""; 0]);

    world.apply(node("n2", "192.0.2.13", 2));
    world.settle();
    assert_eq!(underlay_of_n2(&world), ["192.0.2.13"; 2], "the report was about another one");
}

#[test]
fn address_that_a_kubelet_has_not_reported_is_used() {
    let mut world = peered();
    world.index.settings.kubernetes = true;
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    report_moved(&mut world, "192.0.2.12", "192.0.2.99");
    assert_eq!(world.node("n2").unwrap().underlay, ["192.0.2.99".parse::<IpAddr>().unwrap()]);
}

#[test]
fn pinned_address_stays_and_the_report_is_a_problem() {
    let mut world = peered();
    let mut pinned = node("n2", "192.0.2.12", 2);
    let pin = ("fabric.weft.dev/pin-addresses".to_owned(), "true".to_owned());
    pinned.metadata_mut().annotations = Some([pin].into());
    world.apply(pinned);
    world.settle();
    report_moved(&mut world, "192.0.2.12", "192.0.2.99");
    assert_eq!(underlay_of_n2(&world), ["192.0.2.12"; 2]);
    let problems = world.problems();
    let expected = "status.addresses: found 192.0.2.12, which no device of the node has; expected \
                    192.0.2.99";
    assert!(problems.len() == 1 && problems[0].contains("n2"), "{problems:?}");
    assert!(problems[0].contains(expected), "{problems:?}");
}

#[test]
fn removed_node_cleans_up_before_its_config_goes() {
    let mut world = peered();
    let held = world.held();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    let applied = |world: &mut World, generation| {
        let reference = ObjectRef::new(Kind::NodeConfig, "", "n2");
        let mut config = world.index.typed::<NodeConfig>(&reference).unwrap().clone();
        config.status.get_or_insert_default().applied_generation = generation;
        world.index.apply(Event::Applied(config.into()));
        world.settle();
    };
    applied(&mut world, 1);
    world.delete(&n("n2"));
    world.settle();
    assert!(world.node("n2").unwrap().removed);
    assert_eq!(world.gateway("liqo-tenant-milan", "client").unwrap().nodes.len(), 1);
    assert_eq!(world.held(), held);
    let reference = ObjectRef::new(Kind::NodeConfig, "", "n2");
    let generation = world.index.get(&reference).unwrap().generation();
    applied(&mut world, generation);
    assert_eq!(world.node("n2"), None);
}

#[test]
fn removed_node_refuses_prefixes_of_its_peerings() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    let peering = world.node("n2").unwrap().peerings[0].clone();
    let reference = ObjectRef::new(Kind::NodeConfig, "", "n2");
    let mut config = world.index.typed::<NodeConfig>(&reference).unwrap().clone();
    config.status.get_or_insert_default().applied_generation = 1;
    world.index.apply(Event::Applied(config.into()));
    world.delete(&n("n2"));
    world.settle();
    let refused = &world.node("n2").unwrap().refused;
    assert!(!peering.prefixes.is_empty());
    for prefix in &peering.prefixes {
        assert!(refused.iter().any(|r| r.prefix == *prefix && r.peer_cluster_id == "milan"));
    }
    assert_eq!(world.node("n1").unwrap().refused, []);
}

#[test]
fn node_without_agent_is_removed_at_once() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    world.delete(&n("n2"));
    world.settle();
    assert_eq!(world.node("n2"), None);
}

#[test]
fn virtual_nodes_and_node_addresses_are_excluded() {
    let mut world = World::new("rome");
    let mut ghost = node("liqo-milan", "192.0.2.99", 9);
    ghost.metadata_mut().labels =
        Some([("liqo.io/type".to_owned(), "virtual-node".to_owned())].into());
    world.apply(ghost);
    world.apply(node("n2", "10.33.0.5", 2));
    let mut side = client_side("milan");
    side[0] = super::world::configuration("milan", json!("10.33.0.0/16"), json!([]));
    side.into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(world.node("liqo-milan"), None);
    let remap = &world.gateway("liqo-tenant-milan", "client").unwrap().remaps[0];
    assert_ne!(remap.local, "10.33.0.0/16", "a node's address is in it");
}

#[test]
fn two_nodes_cannot_have_the_same_pods_or_address() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.11", 1));
    world.settle();
    assert_eq!(
        world.problems(),
        [
            "Node n2: spec.podCIDRs: 10.200.1.0/24 overlaps n1's; it is left out; expected one of its own",
            "Node n2: status.addresses: 192.0.2.11 is n1's too; expected one of its own",
        ]
    );
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    assert_eq!(config.nodes[1].prefixes.len(), 1);
}

#[test]
fn running_node_keeps_its_pod_cidr_from_a_new_one() {
    let mut world = peered();
    world.apply(node("n0", "192.0.2.10", 1));
    world.settle();
    let overlaps = "Node n0: spec.podCIDRs: 10.200.1.0/24 overlaps n1's; it is left out; expected one of its own";
    assert_eq!(world.problems(), [overlaps]);
    assert_eq!(world.node("n1").unwrap().local_pods, ["10.200.1.0/24"]);
    assert_eq!(world.node("n0").unwrap().local_pods, [] as [String; 0]);
    let mut without_address: Node = node("n1", "192.0.2.11", 1).try_into().unwrap();
    without_address.status.as_mut().unwrap().addresses = None;
    world.apply(without_address.into());
    world.settle();
    assert!(world.problems().contains(&overlaps.to_owned()), "{:?}", world.problems());
    world.delete(&n("n1"));
    world.settle();
    assert_eq!(world.node("n0").unwrap().local_pods, ["10.200.1.0/24"]);
    world.apply(node("n1", "192.0.2.11", 1));
    world.settle();
    assert_eq!(world.node("n0").unwrap().local_pods, ["10.200.1.0/24"]);
}

#[test]
fn node_with_an_address_in_a_peers_prefix_is_left_out() {
    let mut world = peered();
    let prefix = world.gateway("liqo-tenant-milan", "client").unwrap().remaps[0].local.clone();
    let inside = prefix.replace(".0.0/16", ".2.3");
    world.apply(node("n2", &inside, 2));
    world.settle();
    assert_eq!(world.node("n2"), None);
    let expected = format!(
        "Node n2: status.addresses: found {inside}, which is in {prefix}, where milan is reached; expected an \
         address outside of peers' prefixes"
    );
    assert_eq!(world.problems(), [expected]);
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn address_of_a_pod_is_no_nodes_address() {
    let mut world = peered();
    world.apply(node("n2", "10.200.1.7", 2));
    world.settle();
    let expected = "Node n2: status.addresses: found 10.200.1.7, which is in 10.200.1.0/24, whose addresses n1's \
                    pods have; expected the host's own";
    assert_eq!(world.problems(), [expected]);
}

#[test]
fn address_of_a_peers_gateway_is_no_nodes_address() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.20", 2));
    world.settle();
    let expected = "Node n2: status.addresses: found 192.0.2.20, which is the peer's gateway in \
                    spec.endpoint.addresses of GatewayClient liqo-tenant-milan/client; expected the host's own";
    assert_eq!(world.problems(), [expected]);
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn peers_gateway_may_be_on_the_nodes_own_host() {
    let mut world = peered();
    world.agents = vec!["n1", "n2"];
    world.apply(node("n2", "192.0.2.20", 2));
    world.settle();
    let mut config = world.index.typed::<NodeConfig>(&node_config("n2")).unwrap().clone();
    let by = json!({"host": "n2", "process": 7, "started": "2026-01-31T12:00:00Z"});
    let status = config.status.get_or_insert_default();
    status.reported_by = Some(serde_json::from_value(by).unwrap());
    world.index.apply(Event::Applied(config.into()));
    world.settle();
    assert_eq!(world.problems(), [""; 0], "its agent has found the address on a device");
    report_moved(&mut world, "192.0.2.20", "192.0.2.12");
    assert!(world.problems()[0].contains("found 192.0.2.20, which is the peer's gateway"));
}

fn node_config(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::NodeConfig, "", name)
}

#[test]
fn declared_address_of_two_nodes_is_named_once_found() {
    let mut world = peered();
    world.apply(node("n2", "192.0.2.11", 2));
    world.settle();
    report_moved(&mut world, "192.0.2.11", "192.0.2.12");
    let problems = world.problems();
    assert!(
        problems.len() == 1 && problems[0].contains("found 192.0.2.11, which n1's Node has, too"),
        "{problems:?}"
    );
}

#[test]
fn pod_cidr_outside_the_clusters_is_published() {
    let mut world = peered();
    let mut outside: Node = node("n2", "192.0.2.12", 2).try_into().unwrap();
    outside.spec.get_or_insert_default().pod_cidrs = Some(vec!["10.9.2.0/24".to_owned()]);
    world.apply(outside.into());
    world.settle();
    assert_eq!(world.node("n2").unwrap().outside_pods, ["10.9.2.0/24"]);
    assert_eq!(world.node("n1").unwrap().outside_pods, [] as [String; 0]);
}

fn ip(name: &str, address: &str, more: serde_json::Value) -> Object {
    let mut spec = json!({"ip": address});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    of!(Ip, IP, {"metadata": {"name": name, "namespace": "t"}, "spec": spec})
}

#[test]
fn ip_with_a_fault_is_rewritten_nowhere() {
    let mut world = peered();
    world.apply(ip("local", "127.0.0.1", json!({})));
    world.apply(ip("mapped", "::ffff:192.168.7.7", json!({})));
    world.settle();
    let problems = world.problems();
    assert!(problems.iter().any(|of| of.starts_with("IP t/local: spec.ip: found")), "{problems:?}");
    assert!(
        problems.iter().any(|of| of.starts_with("IP t/mapped: spec.ip: found")),
        "{problems:?}"
    );
    assert_eq!(world.gateway("liqo-tenant-milan", "client").unwrap().ips, []);
    assert_eq!(world.node("n1").unwrap().ips, []);
}

#[test]
fn ips_are_rewritten_by_gateway_or_by_node() {
    let mut world = peered();
    world.apply(ip("db", "192.168.7.7", json!({})));
    world.apply(ip("pod", "10.200.1.9", json!({})));
    world.apply(ip("twice-a", "192.168.7.8", json!({})));
    world.apply(ip("twice-b", "192.168.7.8", json!({})));
    world.apply(ip("masked", "192.168.7.9", json!({"masquerade": true})));
    let mut unreachable = ip("unreachable", "192.168.7.10", json!({}));
    unreachable.metadata_mut().labels =
        Some([("networking.liqo.io/host-unreachable".to_owned(), "true".to_owned())].into());
    world.apply(unreachable);
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let granted = |name| world.index.ip_grant(&ObjectRef::new(Kind::Ip, "t", name)).unwrap();
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    assert_eq!(config.ips.len(), 1);
    assert_eq!(
        (config.ips[0].external, config.ips[0].target.to_string()),
        (granted("db"), "192.168.7.7".to_owned())
    );
    assert!(config.egress.contains(&"192.168.7.7/32".to_owned()));
    assert!(config.egress.contains(&format!("{}/32", granted("masked"))));
    let pod = format!("{}/32", granted("pod"));
    assert!(config.nodes[0].prefixes.contains(&pod) && !config.egress.contains(&pod));
    assert!(!config.egress.iter().any(|e| e.contains("192.168.7.8") || e.contains("7.10")));
    let node = world.node("n1").unwrap();
    let mut targets: Vec<_> =
        node.ips.iter().map(|m| (m.target.to_string(), m.masquerade)).collect();
    targets.sort();
    let want = [
        ("10.200.1.9", false),
        ("192.168.7.7", false),
        ("192.168.7.8", false),
        ("192.168.7.8", false),
        ("192.168.7.9", true),
    ];
    assert_eq!(targets, want.map(|(target, masquerade)| (target.to_owned(), masquerade)));

    world.delete(&ObjectRef::new(Kind::Ip, "t", "twice-b"));
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-milan", "client").unwrap().ips.len(), 2);
}

/// On nodes kube-proxy translates what is for a Service, unless that was translated there before.
#[test]
fn one_ip_of_a_service_is_rewritten_by_gateways() {
    let mut world = peered();
    world.apply(network("services", "service-cidr", "10.96.0.0/16"));
    world.apply(ip("masked", "10.96.0.7", json!({"masquerade": true})));
    world.settle();
    let ips = |world: &World| world.gateway("liqo-tenant-milan", "client").unwrap().ips.clone();
    let before = ips(&world);
    assert_eq!(before.len(), 1);
    assert_eq!(before[0].target.to_string(), "10.96.0.7");
    assert_eq!(world.problems(), [""; 0]);

    world.apply(ip("second", "10.96.0.7", json!({})));
    world.settle();
    assert_eq!(ips(&world), before, "the first one is as it was");
    let problems = world.problems();
    let expected = "spec.ip: found 10.96.0.7, which IP t/masked has, too; expected one IP";
    assert!(problems.len() == 1 && problems[0].contains(expected), "{problems:?}");
}

#[test]
fn renumbered_network_renumbers_its_addresses() {
    let mut world = peered();
    world.apply(network("ext", "external-cidr", "10.60.0.0/24"));
    world.settle();
    assert_eq!(
        world.gateway("liqo-tenant-milan", "client").unwrap().external_cidrs,
        ["10.60.0.0/24"]
    );
    let external = world.node("n1").unwrap().external[0];
    assert!(external.to_string().starts_with("10.60.0."), "{external}");
    assert!(!world.held().0.contains(&"10.70.0.0/16".to_owned()), "the default gave way");
}

#[test]
fn own_objects_are_in_installation_namespace() {
    let mut world = World::empty();
    world.index.settings.namespace = "weft-system".to_owned();
    for mut object in super::world::cluster("rome") {
        if object.namespace().is_some() {
            object.metadata_mut().namespace = Some("weft-system".to_owned());
        }
        world.apply(object);
    }
    world.apply(network("of-others", "pod-cidr", "10.99.0.0/16"));
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let node = world.node("n1").unwrap();
    assert_eq!(node.pod_cidrs, ["10.200.0.0/16"]);
    assert!(node.overlay.is_some() && node.external.len() == 1);
    let own = world.index.of_kind(Kind::Ip).filter(|(ip, _)| ip.name.starts_with("node-n1"));
    assert!(own.into_iter().all(|(ip, _)| ip.namespace.as_deref() == Some("weft-system")));
}
