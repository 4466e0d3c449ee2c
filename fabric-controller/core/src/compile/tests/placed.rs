//! Gateways in pods.

use std::sync::Arc;

use fabric_api::Mac;
use fabric_api::fabric::{ActiveReplica, FabricRecord, GatewayConfig, GatewayReplica, NodeConfig};
use fabric_api::networking::{Connection, EndpointStatus, InternalEndpoint};
use fabric_objects::{Event, Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Value, json};

use super::world::{World, client_side, node, of, server, server_side};
use fabric_index::placement::{Placement, Placements};

const UID: &str = "uid of GatewayServer liqo-tenant-milan/server";

fn gateway() -> ObjectRef {
    ObjectRef::new(Kind::GatewayServer, "liqo-tenant-milan", "server")
}

fn peered() -> World {
    let mut world = World::new("rome");
    world.index.settings.node = None;
    world.index.settings.kubernetes = true;
    world.apply(node("n2", "192.0.2.12", 2));
    world.agents.push("n2");
    server_side("milan", 30742).into_iter().for_each(|object| world.apply(object));
    world.settle();
    world
}

fn on(node: &str, ip: &str, address: &str) -> Placement {
    Placement {
        uid: UID.to_owned(),
        workload: Some(ObjectReference {
            kind: Some("Deployment".to_owned()),
            name: Some("gw-server".to_owned()),
            ..ObjectReference::default()
        }),
        endpoint: Some(EndpointStatus {
            addresses: vec![address.to_owned()],
            port: Some(30742),
            ports: Vec::new(),
            protocol: Some("UDP".to_owned()),
        }),
        internal: Some(InternalEndpoint { ip: Some(ip.to_owned()), node: Some(node.to_owned()) }),
        ready: 1,
        ..Placement::default()
    }
}

fn place(world: &mut World, placement: Placement) {
    let of = [(gateway(), placement)].into();
    world.index.place(Placements { of, ..Placements::default() });
    world.settle();
}

/// The replica at that address reports that it has the tunnel.
fn report_active(world: &mut World, address: &str, epoch: u64) {
    let name = ObjectRef { kind: Kind::GatewayConfig, ..gateway() };
    let mut config = world.index.typed::<GatewayConfig>(&name).unwrap().clone();
    let active = ActiveReplica { address: address.parse().unwrap(), epoch };
    config.status.get_or_insert_default().active = Some(active);
    world.index.apply(Event::Applied(config.into()));
    world.settle();
}

fn underlay(world: &World) -> Option<String> {
    underlay_of(world, "n2")
}

fn underlay_of(world: &World, node: &str) -> Option<String> {
    let gateway = world.node(node).unwrap().peerings[0].gateway.clone()?;
    assert!(gateway.links.is_empty());
    Some(gateway.underlay.to_string())
}

#[test]
fn gateway_in_kubernetes_listens_on_its_port() {
    let world = peered();
    let config = world.gateway("liqo-tenant-milan", "server").unwrap();
    assert_eq!(config.listen_port, Some(51840), "the node port is the node's");
    assert_eq!(config.overlay.link_address, None);
    assert_eq!((&config.overlay.node, &config.egress_node), (&None, &None));
    assert_eq!(underlay(&world), None);
    let planned = &world.last.gateways[&gateway()];
    assert_eq!((planned.peer.as_str(), planned.secret_name.as_str()), ("milan", "gw-keys"));
    assert_eq!(planned.object.to_value().get("status"), None);
}

#[test]
fn nodes_follow_gateway_pod_and_survive_its_absence() {
    let mut world = peered();
    place(&mut world, on("n1", "10.200.1.7", "192.0.2.11"));
    assert_eq!(underlay(&world).as_deref(), Some("10.200.1.7"));
    let sources = &world.node("n2").unwrap().vxlan_sources;
    let sources: Vec<_> = sources.iter().map(ToString::to_string).collect();
    assert_eq!(sources, ["10.200.1.7", "192.0.2.11"], "its own or, by masquerade, its node's");
    let status = world.status(&gateway());
    assert_eq!(status["serverRef"]["name"], "gw-server");
    assert_eq!(status["secretRef"]["name"], "gw-keys");
    assert_eq!(status["secretRef"]["namespace"], "liqo-tenant-milan");
    assert_eq!(status["internalEndpoint"], json!({"ip": "10.200.1.7", "node": "n1"}));
    let endpoint = json!({"addresses": ["192.0.2.11"], "port": 30742, "protocol": "UDP"});
    assert_eq!(status["endpoint"], endpoint);
    let config = world.gateway("liqo-tenant-milan", "server").unwrap();
    assert_eq!(config.egress_node.as_deref(), Some("n1"));

    let nowhere = Placement { endpoint: None, internal: None, ..on("", "", "") };
    place(&mut world, nowhere.clone());
    assert_eq!(world.status(&gateway()), status);
    assert_eq!(underlay(&world).as_deref(), Some("10.200.1.7"));

    place(&mut world, Placement { is_lost: true, ..nowhere });
    let lost = world.status(&gateway());
    assert_eq!((&lost["internalEndpoint"], &lost["endpoint"]), (&Value::Null, &endpoint));
    let node = world.node("n2").unwrap();
    assert_eq!((&node.peerings[0].gateway, node.vxlan_sources.len()), (&None, 0));
    assert_eq!(node.peerings[0].prefixes.len(), 2, "nothing for the peer leaves another way");

    place(&mut world, on("n2", "10.200.2.9", "192.0.2.12"));
    assert_eq!(world.status(&gateway())["endpoint"]["addresses"], json!(["192.0.2.12"]));
    assert_eq!(underlay(&world).as_deref(), Some("10.200.2.9"));
}

/// Kubernetes takes the newest pod that is ready for the one with the tunnel, until one reports that.
#[test]
fn nodes_follow_replica_that_has_tunnel() {
    let mut world = peered();
    let replica = |address: &str, node: &str| GatewayReplica {
        address: address.parse().unwrap(),
        node: node.to_owned(),
    };
    let replicas = vec![replica("10.200.1.7", "n1"), replica("10.200.2.9", "n2")];
    let newest = Placement { replicas: replicas.clone(), ..on("n2", "10.200.2.9", "192.0.2.12") };
    place(&mut world, newest);
    assert_eq!(underlay(&world).as_deref(), Some("10.200.2.9"));
    let config = world.gateway("liqo-tenant-milan", "server").unwrap();
    assert_eq!(config.replicas, replicas);

    for (address, node, epoch) in [("10.200.1.7", "n1", 7), ("10.200.2.9", "n2", 8)] {
        report_active(&mut world, address, epoch);
        assert_eq!(underlay(&world).as_deref(), Some(address));
        let config = world.gateway("liqo-tenant-milan", "server").unwrap();
        assert_eq!(config.overlay.node.as_deref(), Some(node));
        assert_eq!(config.egress_node.as_deref(), Some("n2"), "it has the connections");
        let sources = &world.node("n1").unwrap().vxlan_sources;
        let sources: Vec<_> = sources.iter().map(ToString::to_string).collect();
        let all = ["10.200.1.7", "10.200.2.9", "192.0.2.11", "192.0.2.12"];
        assert_eq!(sources, all, "the other one may have the tunnel next");
    }

    let without_node = Placement {
        replicas: vec![replica("10.200.1.7", "n1")],
        ..on("n2", "10.200.2.9", "192.0.2.12")
    };
    place(&mut world, without_node);
    let at = world.node("n1").unwrap().peerings[0].gateway.clone().unwrap();
    let next: Vec<_> = at.replicas.iter().map(ToString::to_string).collect();
    let active = (at.underlay.to_string(), at.epoch);
    assert_eq!(active, ("10.200.2.9".to_owned(), Some(8)), "it has the tunnel for a moment");
    assert_eq!(next, ["10.200.1.7"], "a notice may choose it");

    let all = Placement { replicas, ..on("n2", "10.200.2.9", "192.0.2.12") };
    place(&mut world, all);
    world.index.lagging_nodes.insert("n2".to_owned());
    report_active(&mut world, "10.200.1.7", 9);
    let config = world.gateway("liqo-tenant-milan", "server").unwrap();
    assert_eq!(config.egress_node.as_deref(), Some("n1"), "the node is gone");
    report_active(&mut world, "10.200.3.9", 10);
    assert_eq!(underlay(&world).as_deref(), Some("10.200.2.9"), "a pod that is gone");
}

/// A record that follows the stored config is written once more when that is.
#[test]
fn probed_node_is_recorded_with_its_gateway() {
    let mut world = peered();
    let name = ObjectRef { kind: Kind::GatewayConfig, ..gateway() };
    let mut config = world.index.typed::<GatewayConfig>(&name).unwrap().clone();
    config.status.get_or_insert_default().overlay_probe_port = Some(12_346);
    world.index.apply(Event::Applied(config.into()));
    let of = [(gateway(), on("n1", "10.200.1.7", "192.0.2.11"))].into();
    world.index.place(Placements { of, ..Placements::default() });
    let wanted = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH).objects;
    let record = ObjectRef::new(Kind::FabricRecord, "", &FabricRecord::name_of("milan"));
    let record = wanted[&record].to_value();
    assert_eq!(record["spec"]["peering"]["gateway"]["probe"]["node"], "n1");
}

#[test]
fn vxlan_macs_are_unpredictable_for_pods() {
    let mut world = peered();
    place(&mut world, on("n1", "10.200.1.7", "192.0.2.11"));
    let of = |uid: &str| Some(Mac::of_uid(uid).to_string());
    let config = world.whole_gateway("liqo-tenant-milan", "server").unwrap();
    let of_nodes: Vec<_> = config.nodes.iter().map(|node| node.mac.clone()).collect();
    assert_eq!(of_nodes, [of("uid of Node n1"), of("uid of Node n2")]);
    assert_eq!(config.overlay.mac, of(UID));
    let node = world.node("n2").unwrap();
    assert_eq!(node.mac, of("uid of Node n2"));
    assert_eq!(node.peerings[0].gateway.as_ref().unwrap().mac, of(UID));
}

#[test]
fn node_without_the_pods_family_has_no_gateway() {
    let mut world = peered();
    world.apply(node("n1", "2001:db8::11", 1));
    place(&mut world, on("n1", "fd00:200::7", "192.0.2.11"));
    let config = world.whole_gateway("liqo-tenant-milan", "server").unwrap();
    let nodes: Vec<_> = config.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!((nodes, underlay_of(&world, "n2")), (vec!["n1"], None));
    assert_eq!(underlay_of(&world, "n1").as_deref(), Some("fd00:200::7"));
    let problems = world.problems();
    let expected = "found 192.0.2.12; expected one of the family of fd00:200::7";
    assert!(problems.iter().any(|problem| problem.contains(expected)), "{problems:?}");
}

#[test]
fn overlay_has_family_of_gateway_pod() {
    let mut world = peered();
    for (name, ipv6, ipv4) in
        [("n1", "2001:db8::11", "192.0.2.11"), ("n2", "2001:db8::12", "192.0.2.12")]
    {
        let mut node = node(name, ipv6, 1 + u8::from(name == "n2"));
        if let Object::Node(node) = &mut node {
            let node = Arc::make_mut(node);
            let addresses = &mut node.status.as_mut().unwrap().addresses;
            let second = k8s_openapi::api::core::v1::NodeAddress {
                type_: "InternalIP".to_owned(),
                address: ipv4.to_owned(),
            };
            addresses.as_mut().unwrap().push(second);
        }
        world.apply(node);
    }
    for (pod, expected) in [
        ("10.200.1.7", ["192.0.2.11", "192.0.2.12"]),
        ("fd00:200::7", ["2001:db8::11", "2001:db8::12"]),
    ] {
        place(&mut world, on("n1", pod, "192.0.2.11"));
        let config = world.whole_gateway("liqo-tenant-milan", "server").unwrap();
        let underlays: Vec<_> = config.nodes.iter().map(|n| n.underlay.to_string()).collect();
        assert_eq!(underlays, expected);
        assert_eq!(underlay(&world).as_deref(), Some(pod));
    }
}

#[test]
fn made_objects_are_owned_by_their_peering() {
    let world = peered();
    let owners = |object: &Object| {
        let all = object.metadata().owner_references.clone().unwrap_or_default();
        all.into_iter().map(|owner| (owner.kind, owner.name, owner.uid)).collect::<Vec<_>>()
    };
    let owner = |kind: &str, name: &str| {
        let uid = format!("uid of {kind} liqo-tenant-milan/{name}");
        vec![(kind.to_owned(), name.to_owned(), uid)]
    };
    let mut seen = 0;
    for object in world.last.objects.values() {
        let of_peering = object.namespace() == Some("liqo-tenant-milan");
        let expected = match (of_peering, object.kind()) {
            (true, Kind::GatewayConfig | Kind::Ip) => owner("GatewayServer", "server"),
            (true, Kind::Network) => owner("Configuration", "milan"),
            (_, _) => Vec::new(),
        };
        seen += usize::from(!expected.is_empty());
        assert_eq!(owners(object), expected, "{}", object.reference());
    }
    assert_eq!(seen, 4, "one GatewayConfig, two Networks, one address");
}

#[test]
fn generated_key_pair_is_deleted_with_gateway() {
    let mut world = peered();
    let mut other = server("milan", 30742);
    if let Object::GatewayServer(server) = &mut other {
        let server = Arc::make_mut(server);
        server.spec.secret_ref = None;
    }
    world.apply(other);
    let wanted = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    let (secret, key_pair) = wanted.keys.first_key_value().unwrap();
    assert_eq!(secret.name, "gw-server");
    let owner = key_pair.owner.as_ref().unwrap();
    assert_eq!((owner.kind.as_str(), owner.controller), ("GatewayServer", Some(true)));
    assert_eq!(wanted.gateways[&gateway()].secret_name, "gw-server");
}

#[test]
fn secret_gets_labels_or_is_refused_for_other_peer() {
    let mut world = peered();
    let keys = ObjectRef::new(Kind::Secret, "liqo-tenant-milan", "gw-keys");
    assert_eq!(world.last.secrets.keys().collect::<Vec<_>>(), [&keys]);
    let mut secret = world.index.get(&keys).unwrap().clone();
    let set = secret.metadata_mut().labels.get_or_insert_default();
    set.insert("networking.liqo.io/gateway-resource".to_owned(), "true".to_owned());
    world.apply(secret.clone());
    world.settle();
    assert!(world.last.secrets.is_empty());
    let set = secret.metadata_mut().labels.get_or_insert_default();
    set.insert("liqo.io/remote-cluster-id".to_owned(), "oslo".to_owned());
    world.apply(secret);
    world.settle();
    let wrong = world.problems();
    assert!(wrong.iter().any(|problem| problem.contains("that of the peer oslo")), "{wrong:?}");
}

#[test]
fn gateway_with_deletion_timestamp_is_removed() {
    let mut world = peered();
    place(&mut world, on("n1", "10.200.1.7", "192.0.2.11"));
    let mut leaving = world.index.get(&gateway()).unwrap().clone();
    leaving.metadata_mut().deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    world.index.apply(Event::Applied(leaving));
    world.settle();
    assert!(world.last.gateways.is_empty());
    assert_eq!(world.gateway("liqo-tenant-milan", "server"), None);
}

#[test]
fn two_gateways_for_one_peer_never_both_run() {
    let mut world = peered();
    client_side("milan").into_iter().for_each(|object| world.apply(object));
    world.settle();
    assert_eq!(world.last.gateways.keys().collect::<Vec<_>>(), [&gateway()]);
}

#[test]
fn failed_creation_is_condition_of_gateway() {
    let mut world = peered();
    let fault = fabric_api::check::Fault {
        field: "spec.serverTemplateRef".to_owned(),
        message: "there is none".to_owned(),
    };
    place(
        &mut world,
        Placement { uid: UID.to_owned(), faults: vec![fault], ..Placement::default() },
    );
    let conditions = world.status(&gateway())["conditions"].clone();
    assert_eq!(conditions[0]["type"], "Accepted");
    assert_eq!(conditions[0]["message"], "spec.serverTemplateRef: there is none");
    assert!(world.last.gateways.contains_key(&gateway()), "it may be there any moment");
}

#[test]
fn foreign_cluster_modules_are_as_in_liqo() {
    let mut world = peered();
    let conditions = |world: &World| -> Value {
        let peer = world.last.peers.first_key_value().unwrap();
        assert_eq!(peer.0.as_str(), "milan");
        assert!(peer.1.enabled);
        let all = peer.1.conditions.iter();
        all.map(|condition| (condition.type_.to_owned(), json!(condition.status))).collect()
    };
    assert_eq!(
        conditions(&world),
        json!({
            "NetworkConfigurationStatus": "Ready", "NetworkGatewayPresence": "Ready",
            "NetworkGatewayServerStatus": "NotReady", "NetworkConnectionStatus": "NotReady",
        })
    );
    place(&mut world, on("n1", "10.200.1.7", "192.0.2.11"));
    assert_eq!(conditions(&world)["NetworkGatewayServerStatus"], "Ready");
    world.delete(&gateway());
    world.settle();
    assert_eq!(
        conditions(&world),
        json!({
            "NetworkConfigurationStatus": "Ready", "NetworkGatewayPresence": "NotReady",
            "NetworkConnectionStatus": "NotReady",
        })
    );
}

#[test]
fn networking_is_enabled_once_prefixes_are_remapped() {
    let mut world = peered();
    let enabled = |world: &World| world.last.peers.first_key_value().unwrap().1.enabled;
    let reference = ObjectRef::new(Kind::Configuration, "liqo-tenant-milan", "milan");
    let mut configuration = world.index.get(&reference).unwrap().clone();
    if let Object::Configuration(configuration) = &mut configuration {
        let configuration = Arc::make_mut(configuration);
        configuration.status = None;
    }
    world.index.apply(Event::Applied(configuration));
    let first = crate::compile(&world.index, jiff::Timestamp::UNIX_EPOCH);
    assert!(!first.peers.first_key_value().unwrap().1.enabled, "its status is still to be written");
    world.settle();
    assert!(enabled(&world));
    world.delete(&reference);
    world.settle();
    assert!(enabled(&world), "there is none to be read");
}

#[test]
fn placement_of_namesake_is_ignored() {
    let mut world = peered();
    let before = on("n1", "10.200.1.7", "192.0.2.11");
    place(&mut world, Placement { uid: "of one that is gone".to_owned(), ..before.clone() });
    let status = world.status(&gateway());
    assert_eq!((&status["endpoint"], &status["serverRef"]), (&Value::Null, &Value::Null));
    assert_eq!(world.last.peers.first_key_value().unwrap().1.conditions[2].status, "NotReady");
    place(&mut world, before);
    assert_eq!(world.status(&gateway())["endpoint"]["port"], 30742);
}

#[test]
fn connection_of_namesake_is_ignored() {
    let mut world = peered();
    for (uid, expected) in [("of one that is gone", "NotReady"), (UID, "Established")] {
        world.apply(of!(Connection, Connection, {
            "metadata": {"name": "gw-server", "namespace": "liqo-tenant-milan"},
            "spec": {"type": "Server", "gatewayRef": {"name": "server", "uid": uid}},
            "status": {"value": "Connected"}
        }));
        world.settle();
        let peer = world.last.peers.first_key_value().unwrap().1;
        assert_eq!(peer.conditions.last().unwrap().status, expected);
        assert_eq!(world.node("n2").unwrap().peerings[0].connected, uid == UID);
    }
}

fn keys_of(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::Secret, "liqo-tenant-milan", name)
}

#[test]
fn secret_is_published_once_it_has_public_key() {
    let mut world = peered();
    let keys = keys_of("gw-keys");
    assert_eq!(world.status(&gateway())["secretRef"]["name"], "gw-keys");
    let mut secret = world.index.get(&keys).unwrap().clone();
    if let Object::Secret(secret) = &mut secret {
        let secret = Arc::make_mut(secret);
        secret.data.as_mut().unwrap().remove("publicKey");
    }
    world.apply(secret);
    world.settle();
    assert_eq!(world.status(&gateway())["secretRef"], Value::Null);
    let public = world.index.own_key(&keys).unwrap().unwrap();
    assert_eq!(world.last.secrets[&keys].public_key, Some(public));
}

#[test]
fn key_pair_of_namesake_changes_owner_first() {
    let mut world = peered();
    let mut own = server("milan", 30742);
    if let Object::GatewayServer(server) = &mut own {
        let server = Arc::make_mut(server);
        server.spec.secret_ref = None;
    }
    world.apply(own);
    let mut secret = world.index.get(&keys_of("gw-keys")).unwrap().clone();
    let metadata = secret.metadata_mut();
    metadata.name = Some("gw-server".to_owned());
    metadata
        .labels
        .get_or_insert_default()
        .insert("app.kubernetes.io/managed-by".to_owned(), "weft".to_owned());
    let mut owner = fabric_index::owner::reference_to(world.index.get(&gateway()).unwrap());
    owner.uid = "of one that is gone".to_owned();
    metadata.owner_references = Some(vec![owner.clone()]);
    world.apply(secret.clone());
    world.settle();
    assert_eq!(world.status(&gateway())["secretRef"], Value::Null);
    owner.uid = UID.to_owned();
    assert_eq!(world.last.secrets[&keys_of("gw-server")].owner, Some(owner.clone()));
    secret.metadata_mut().owner_references = Some(vec![owner]);
    world.apply(secret);
    world.settle();
    assert_eq!(world.status(&gateway())["secretRef"]["name"], "gw-server");
    let gap = world.last.secrets.get(&keys_of("gw-server"));
    assert!(gap.is_none_or(|gap| gap.owner.is_none()), "{gap:?}");
}

#[test]
fn node_with_agent_is_awaited_before_removal() {
    let mut world = peered();
    let config = ObjectRef::new(Kind::NodeConfig, "", "n2");
    let mut object = world.index.typed::<NodeConfig>(&config).unwrap().clone();
    object.status.get_or_insert_default().applied_generation = 1;
    world.index.apply(Event::Applied(object.into()));
    world.index.apply(Event::Deleted(ObjectRef::new(Kind::Node, "", "n2")));
    let later = |world: &World, seconds| {
        let now = jiff::Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_secs(seconds);
        crate::compile(&world.index, now)
    };
    let mut removed = later(&world, 0).objects[&config].clone();
    removed.metadata_mut().generation = Some(2);
    world.apply(removed);
    let soon = later(&world, 110);
    assert!(later(&world, 0).objects == soon.objects, "nothing new is published meanwhile");
    assert!(soon.objects[&config].to_value()["spec"]["removed"] == true);
    let then = later(&world, 130);
    assert!(then.deleted.contains(&config) && !then.objects.contains_key(&config));
}

#[test]
fn pod_cidr_that_the_cni_does_not_use_is_no_fault() {
    let mut world = peered();
    let mut unused: k8s_openapi::api::core::v1::Node =
        node("n2", "192.0.2.12", 2).try_into().unwrap();
    unused.spec.get_or_insert_default().pod_cidrs = Some(vec!["10.9.2.0/24".to_owned()]);
    world.apply(unused.into());
    world.settle();
    assert_eq!(world.node("n2").unwrap().outside_pods, ["10.9.2.0/24"]);
    let pods = [("n1".to_owned(), [std::net::IpAddr::from([10, 200, 9, 9])].into())].into();
    world.index.place(Placements { pods, ..Placements::default() });
    world.settle();
    assert_eq!(world.node("n2").unwrap().outside_pods, [] as [String; 0]);
}

#[test]
fn outside_pods_have_host_routes() {
    let mut world = peered();
    let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap();
    let pods = ["10.200.2.7", "10.200.9.9", "10.200.1.3", "192.0.2.200"].map(address);
    let pods = [("n1".to_owned(), pods.into()), ("gone".to_owned(), pods.into())].into();
    world.index.place(Placements { pods, ..Placements::default() });
    world.settle();
    // One in the prefix of another node; none that is in its own, or in none of the cluster's.
    let expected = ["10.200.1.0/24", "10.200.2.7/32", "10.200.9.9/32"];
    assert_eq!(world.node("n1").unwrap().local_pods, expected);
    assert_eq!(world.node("n2").unwrap().local_pods, ["10.200.2.0/24"]);
    let config = world.whole_gateway("liqo-tenant-milan", "server").unwrap();
    let prefixes = |name: &str| {
        let node = config.nodes.iter().find(|node| node.name == name).unwrap();
        node.prefixes.iter().filter(|p| p.starts_with("10.200.")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(prefixes("n1"), expected);
    assert_eq!(prefixes("n2"), ["10.200.2.0/24"]);
}
