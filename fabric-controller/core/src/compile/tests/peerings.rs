//! Peerings that are right.

use std::sync::Arc;

use fabric_api::fabric::{RemapKind, Role};
use fabric_api::networking::{Connection, GatewayServer};
use fabric_objects::{Kind, ObjectRef, Problem};
use serde_json::json;

use super::world::{
    World, client, client_side, cluster, configuration, network, node, of, server, server_side,
    shuffled, tenant,
};

fn remaps(world: &World, peer: &str, name: &str) -> Vec<(RemapKind, String, String)> {
    let config = world.gateway(&tenant(peer), name).expect("published");
    config.remaps.iter().map(|r| (r.kind, r.remote.clone(), r.local.clone())).collect()
}

#[test]
fn reference_peering_is_same_in_any_order() {
    let mut all = cluster("rome");
    all.extend(client_side("milan"));
    let mut first: Option<World> = None;
    for seed in 0..60 {
        let mut world = World::empty();
        for object in shuffled(all.clone(), seed) {
            world.apply(object);
            if seed % 2 == 0 {
                world.settle();
            }
        }
        if seed % 3 == 0 {
            world.apply(configuration("milan", json!(["10.200.0.0/16"]), json!(["10.70.0.0/16"])));
        }
        world.settle();
        assert_eq!(world.problems(), [""; 0], "seed {seed}");
        let first = first.get_or_insert_with(|| {
            let mut world = World::new("rome");
            client_side("milan").into_iter().for_each(|object| world.apply(object));
            world.settle();
            world
        });
        let (want, have) = (
            first.gateway("liqo-tenant-milan", "client"),
            world.gateway("liqo-tenant-milan", "client"),
        );
        let normal = |config: Option<&fabric_api::fabric::GatewayConfigSpec>| {
            // Overlay addresses depend on the order of the requests.
            let mut config = config.expect("published").clone();
            config.overlay.address = [0, 0, 0, 0].into();
            config.overlay.link_address = None;
            config.nodes.iter_mut().for_each(|node| node.overlay = [0, 0, 0, 0].into());
            config
        };
        assert_eq!(normal(have), normal(want), "seed {seed}");
    }
}

#[test]
fn client_config_is_complete() {
    let mut world = World::new("rome");
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    let config = world.gateway("liqo-tenant-milan", "client").unwrap();
    assert_eq!((config.cluster_id.as_str(), config.peer_cluster_id.as_str()), ("rome", "milan"));
    assert_eq!((config.role, config.listen_port), (Role::Client, None));
    let endpoint = config.endpoint.as_ref().unwrap();
    assert_eq!(
        (endpoint.addresses.as_slice(), endpoint.port),
        (["192.0.2.20".to_owned()].as_slice(), 30742)
    );
    assert_eq!(config.mtu, 65_535, "none is given: the path decides");
    assert_eq!(config.tunnel_address.to_string(), "169.254.18.2");
    assert_eq!(config.peer_tunnel_address.to_string(), "169.254.18.1");
    assert_eq!(config.secret_name, "gw-keys");
    assert_eq!(
        config.peer_public_key.as_deref(),
        Some("SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q=")
    );
    assert_eq!(config.pod_cidrs, ["10.200.0.0/16"]);
    assert_eq!(config.external_cidrs, ["10.70.0.0/16"]);
    assert_eq!(config.icmp_sources, ["10.70.0.0".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(config.egress_node.as_deref(), Some("n1"));
    assert_eq!(config.overlay.node.as_deref(), Some("n1"));
    for (_, remote, local) in remaps(&world, "milan", "client") {
        assert_ne!(remote, local, "both are taken here");
    }
    let node = &config.nodes[0];
    assert_eq!(node.underlay.to_string(), "192.0.2.11");
    assert_eq!(node.prefixes, ["10.200.1.0/24", "10.70.0.1/32"]);
    assert!(!format!("{:?}", world.last.objects).contains("YHztEzTrIe"), "keys are not published");
}

#[test]
fn server_listens_on_and_publishes_node_port() {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    let config = world.gateway("liqo-tenant-rome", "server").unwrap();
    assert_eq!((config.role, config.listen_port, config.mtu), (Role::Server, Some(30742), 1400));
    assert_eq!(
        (config.endpoint.clone(), config.tunnel_address.to_string()),
        (None, "169.254.18.1".to_owned())
    );
    let link = config.overlay.link_address.unwrap().to_string();

    let reference = ObjectRef::new(Kind::GatewayServer, "liqo-tenant-rome", "server");
    assert_eq!(
        world.status(&reference),
        json!({
            "serverRef": {"apiVersion": "fabric.weft.dev/v1alpha1", "kind": "GatewayConfig",
                "namespace": "liqo-tenant-rome", "name": "server"},
            "endpoint": {"addresses": ["192.0.2.11"], "port": 30742, "protocol": "UDP"},
            "secretRef": {"namespace": "liqo-tenant-rome", "name": "gw-keys"},
            "internalEndpoint": {"ip": link, "node": "n1"}
        })
    );
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-rome", "rome");
    let status = world.status(&reference);
    let remaps = remaps(&world, "rome", "server");
    assert_eq!(status["remote"]["cidr"], json!({"pod": [remaps[0].2], "external": [remaps[1].2]}));
    let condition = &status["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"]),
        (&json!("NetworkCIDRsConfigured"), &json!("True"))
    );
    assert_eq!(condition["observedGeneration"], 1);
    let object = world.index.get(&reference).unwrap().to_value();
    assert_eq!(
        object["spec"]["local"]["cidr"],
        json!({"pod": ["10.200.0.0/16"], "external": ["10.70.0.0/16"]})
    );
    let networks: Vec<_> = world.index.of_kind(Kind::Network).map(|(r, _)| r.to_string()).collect();
    assert!(
        networks.contains(&"Network liqo-tenant-rome/rome-pod-10-200-0-0-16".to_owned()),
        "{networks:?}"
    );
}

/// Each of hundreds of acknowledgements would else change the condition of each peering.
#[test]
fn condition_is_constant_above_three_slow_nodes() {
    let mut world = World::new("rome");
    for n in 2..8 {
        world.apply(node(&format!("n{n}"), &format!("192.0.2.1{n}"), n));
    }
    world.settle();
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-milan", "milan");
    let mut slow_message = |slow: &[&str]| {
        world.index.slow_nodes = slow.iter().map(|name| (*name).to_owned()).collect();
        world.settle();
        let message = &world.status(&reference)["conditions"][0]["message"];
        message.as_str().unwrap().split("; ").next().unwrap().to_owned()
    };
    let many = "no routes yet on more than three nodes";
    assert_eq!(slow_message(&["n2", "n3", "n4", "n5", "n6"]), many);
    assert_eq!(slow_message(&["n3", "n5", "n6", "n7"]), many);
    assert_eq!(slow_message(&["n2", "n4", "n6"]), "no routes yet on n2, n4, n6");
}

/// Packets of pods to a peer before that go out in clear.
#[test]
fn prefixes_are_published_once_nodes_have_routes() {
    let mut world = World::new("rome");
    world.apply(node("n2", "192.0.2.12", 2));
    world.settle();
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-milan", "milan");
    let status = |world: &World| {
        let status = world.status(&reference);
        let condition = &status["conditions"][0];
        let why = [&condition["status"], &condition["reason"], &condition["message"]];
        (status.get("remote").cloned(), json!(why))
    };
    let routing = json!(["False", "WaitingForNodes", "nodes are making routes"]);
    assert_eq!(status(&world), (None, routing), "agents take a moment");
    world.index.slow_nodes.insert("n2".to_owned());
    world.settle();
    let waits = json!([
        "False",
        "WaitingForNodes",
        "no routes yet on n2; run `weft agent --node n2` there, if it does not run"
    ]);
    assert_eq!(status(&world), (None, waits.clone()));
    assert!(world.gateway("liqo-tenant-milan", "client").is_some(), "it need not wait");

    // Another peering does not wait for a node that is down.
    world.index.lagging_nodes.insert("n2".to_owned());
    world.settle();
    let (remote, ready) = status(&world);
    assert_eq!((remote.is_some(), &ready[0]), (true, &json!("True")));

    // It is back, and behind again whenever a config changes. What is published stays published.
    world.index.lagging_nodes.clear();
    world.settle();
    assert_eq!(status(&world), (remote, ready));
    world.apply(configuration("milan", json!("10.220.0.0/16"), json!("10.70.0.0/16")));
    world.settle();
    assert_eq!(status(&world).1, waits, "other prefixes are others");
    world.agents.push("n2");
    world.settle();
    assert_eq!(status(&world).0.unwrap()["cidr"]["pod"], json!(["10.220.0.0/16"]));
}

#[test]
fn port_and_generated_key_are_defaults() {
    let mut world = World::new("milan");
    for object in server_side("rome", 30742)
        .into_iter()
        .filter(|o| o.kind() != Kind::Secret && o.kind() != Kind::GatewayServer)
    {
        world.apply(object);
    }
    world.apply(of!(GatewayServer, GatewayServer, {
        "metadata": {"name": "s", "namespace": "liqo-tenant-rome", "labels": {"liqo.io/remote-cluster-id": "rome"}},
        "spec": {"endpoint": {"serviceType": "LoadBalancer", "port": 51840, "nodePort": 7, "loadBalancerIP": "198.51.100.7"}}
    }));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let config = world.gateway("liqo-tenant-rome", "s").unwrap();
    assert_eq!((config.listen_port, config.secret_name.as_str()), (Some(51840), "gw-s"));
    let status = world.status(&ObjectRef::new(Kind::GatewayServer, "liqo-tenant-rome", "s"));
    assert_eq!(status["endpoint"]["addresses"], json!(["198.51.100.7"]));
}

/// The middle one of three clusters, all with the same prefixes.
fn middle() -> World {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    client_side("turin").into_iter().for_each(|object| world.apply(object));
    world.settle();
    world
}

#[test]
fn equal_prefixes_of_two_peers_become_different_ones() {
    let world = middle();
    assert_eq!(world.problems(), [""; 0]);
    let [rome, turin] = [remaps(&world, "rome", "server"), remaps(&world, "turin", "client")];
    let mut locals: Vec<_> = rome.iter().chain(&turin).map(|(_, _, local)| local.clone()).collect();
    locals.extend([
        "10.200.0.0/16".to_owned(),
        "10.70.0.0/16".to_owned(),
        "10.80.0.0/16".to_owned(),
    ]);
    locals.sort();
    locals.dedup();
    assert_eq!(locals.len(), 7, "{locals:?}");

    let mut others: Vec<_> = turin.iter().map(|(_, _, local)| local.clone()).collect();
    others.sort();
    assert_eq!(world.gateway("liqo-tenant-rome", "server").unwrap().egress, others);

    let node = world.node("n1").unwrap();
    let peers: Vec<_> = node.peerings.iter().map(|p| p.peer_cluster_id.as_str()).collect();
    assert_eq!(peers, ["rome", "turin"]);
    assert_eq!(node.vxlan_sources.len(), 2);
}

#[test]
fn removed_peering_returns_grants_and_spares_others() {
    let mut world = World::new("milan");
    server_side("rome", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    let (before, held) = (world.gateway("liqo-tenant-rome", "server").cloned(), world.held());
    client_side("turin").into_iter().for_each(|object| world.apply(object));
    world.settle();
    for object in client_side("turin") {
        world.delete(&object.reference());
    }
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-turin", "client"), None);
    assert_eq!(world.gateway("liqo-tenant-rome", "server").cloned(), before);
    assert_eq!(world.held(), held);
    assert_eq!(world.node("n1").unwrap().peerings.len(), 1);
}

#[test]
fn gateway_without_configuration_is_removed() {
    let mut world = middle();
    world.delete(&ObjectRef::new(Kind::Configuration, "liqo-tenant-rome", "rome"));
    world.settle();
    assert_eq!(world.gateway("liqo-tenant-rome", "server"), None);
    let problems = world.problems();
    assert_eq!(
        problems,
        ["GatewayServer liqo-tenant-rome/server: waits for a Configuration of rome"]
    );
    world.apply(configuration("rome", json!("10.9.0.0/16"), json!("10.8.0.0/16")));
    world.settle();
    let locals: Vec<_> =
        remaps(&world, "rome", "server").into_iter().map(|(_, _, local)| local).collect();
    assert_eq!(locals, ["10.9.0.0/16", "10.8.0.0/16"], "free, so not remapped");
}

#[test]
fn restart_changes_nothing() {
    let world = middle();
    let (held, objects) = (world.held(), world.last.objects.clone());
    let mut again = world.restart_without(&[], Vec::new());
    again.settle();
    assert_eq!((again.held(), again.last.objects.clone()), (held, objects));
}

#[test]
fn unreadable_file_at_restart_removes_nothing() {
    let world = middle();
    let (held, before) = (world.held(), world.last.objects.clone());
    let node = world.node("n1").cloned();
    let unread: Vec<_> = server_side("rome", 30742).iter().map(|o| o.reference()).collect();
    let problem = Problem {
        source: "rome.yaml:3".to_owned(),
        object: None,
        field: None,
        message: "bad".to_owned(),
    };
    let mut again = world.restart_without(&unread, vec![problem]);
    again.settle();
    assert_eq!((again.held(), again.node("n1").cloned()), (held, node));
    let config = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-rome", "server");
    let stays = again.index.get(&config).map(fabric_objects::Object::to_value);
    assert_eq!(stays.unwrap()["spec"], before[&config].to_value()["spec"]);

    again.delete(&client("turin").reference());
    again.settle();
    assert_eq!(again.gateway("liqo-tenant-turin", "client"), None, "that was seen to go");

    server_side("rome", 30742).into_iter().for_each(|object| again.apply(object));
    again.index.apply(fabric_objects::Event::Problems(Vec::new()));
    again.delete(&server("rome", 30742).reference());
    again.settle();
    assert_eq!(again.gateway("liqo-tenant-rome", "server"), None);
}

#[test]
fn each_object_unreadable_alone_takes_nothing_away() {
    let mut manifests = cluster("milan");
    manifests.extend(server_side("rome", 30742));
    manifests.push(node("n2", "192.0.2.12", 2));
    let cases = manifests.iter().flat_map(|unread| [(unread, false), (unread, true)]);
    for (unread, with_gateway_records) in cases {
        let mut world = middle();
        world.with_gateway_records = with_gateway_records;
        world.agents.push("n2");
        world.apply(node("n2", "192.0.2.12", 2));
        world.settle();
        let specs = |world: &World| {
            let gateway = world.whole_gateway("liqo-tenant-rome", "server");
            (gateway, world.node("n1").cloned(), world.node("n2").cloned())
        };
        let before = specs(&world);
        assert_eq!(before.0.as_ref().unwrap().nodes.len(), 2);
        let problem = Problem {
            source: "bad.yaml:3".to_owned(),
            object: None,
            field: None,
            message: "bad".to_owned(),
        };
        let unread = unread.reference();
        let mut again = world.restart_without(std::slice::from_ref(&unread), vec![problem]);
        again.settle();
        assert_eq!(specs(&again), before, "without {unread}");
    }
}

#[test]
fn only_shared_kept_networks_are_not_exclusive() {
    for (fixed, shared, exclusive) in
        [("true", "true", false), ("true", "false", true), ("false", "true", true)]
    {
        let mut world = World::new("milan");
        let mut network = network("more", "reserved", "172.20.0.0/16");
        network.metadata_mut().labels.get_or_insert_default().extend([
            ("ipam.liqo.io/network-not-remapped".to_owned(), fixed.to_owned()),
            ("ipam.liqo.io/network-shared".to_owned(), shared.to_owned()),
        ]);
        let reference = network.reference();
        world.apply(network);
        let ipam_requests = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH).ipam_requests;
        let ipam_request = ipam_requests
            .iter()
            .find(|ipam_request| ipam_request.object == reference)
            .expect("a request");
        let crate::Allocation::Network { exclusive: requested, .. } = ipam_request.allocation
        else {
            panic!("{ipam_request:?}")
        };
        assert_eq!(requested, exclusive, "not remapped: {fixed}, shared: {shared}");
    }
}

#[test]
fn node_config_has_connected_and_mtu() {
    let mut world = middle();
    let peering = |world: &World, i: usize| world.node("n1").unwrap().peerings[i].clone();
    assert!(!peering(&world, 0).connected);
    let gateway = peering(&world, 0).gateway.unwrap();
    let config = world.gateway("liqo-tenant-rome", "server").unwrap();
    assert_eq!(
        (gateway.overlay, Some(gateway.underlay)),
        (config.overlay.address, config.overlay.link_address.map(Into::into))
    );
    assert_eq!((gateway.links, peering(&world, 0).mtu), (vec![gateway.underlay], 1400));
    let mut connection = of!(Connection, Connection, {
        "metadata": {
            "name": "gw-server", "namespace": "liqo-tenant-rome",
            "ownerReferences": [{
                "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
                "name": "server", "uid": "s"
            }]
        },
        "spec": {"type": "Server", "gatewayRef": {"kind": "GatewayServer", "name": "server"}},
        "status": {"value": "Connected"}
    });
    let another = of!(Connection, Connection, {
        "metadata": {"name": "own", "namespace": "liqo-tenant-rome"},
        "spec": {"type": "Server", "gatewayRef": {"kind": "WgGatewayServer", "name": "own"}}
    });
    world.apply(another.clone());
    world.apply(connection.clone());
    world.settle();
    assert!(peering(&world, 0).connected && !peering(&world, 1).connected);
    if let fabric_objects::Object::Connection(connection) = &mut connection {
        let connection = Arc::make_mut(connection);
        connection.status.as_mut().unwrap().value = fabric_api::networking::ConnectionValue::Error;
    }
    world.apply(connection.clone());
    world.settle();
    assert!(!peering(&world, 0).connected);
    world.delete(&server("rome", 30742).reference());
    world.settle();
    assert_eq!(world.index.get(&connection.reference()), None, "no other program deletes it");
    assert!(world.index.get(&another.reference()).is_some(), "it is another program's");
}

/// `liqoctl generate configuration` lists a prefix as often as its cluster has Networks of it.
#[test]
fn prefix_listed_twice_is_one_prefix() {
    let mut world = World::new("rome");
    let pod = json!(["10.200.0.0/16", "10.201.0.0/16", "10.200.0.0/16"]);
    world.apply(network("pod-cidr-10-200-0-0-16", "pod-cidr", "10.200.0.0/16"));
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.apply(configuration("milan", pod, json!(["10.70.0.0/16"])));
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let remaps = remaps(&world, "milan", "client");
    let [(_, _, one), (_, _, other), _] = &remaps[..] else { panic!("{remaps:?}") };
    let status = world.status(&ObjectRef::new(Kind::Configuration, "liqo-tenant-milan", "milan"));
    assert_eq!(status["remote"]["cidr"]["pod"], json!([one, other, one]), "index by index");
    let own = world.whole_gateway("liqo-tenant-milan", "client").unwrap().pod_cidrs;
    assert_eq!(own, ["10.200.0.0/16"]);
}
