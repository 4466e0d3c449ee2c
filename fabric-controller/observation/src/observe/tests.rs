use fabric_api::fabric::{FabricRecord, NodeConfig, PacketDrop, PeeringFault, UnreachableGateway};
use fabric_api::networking::GatewayClient;

use super::*;

/// A config as a controller would publish it, in namespace `namespace`, for node `node`.
pub(crate) fn config(namespace: &str, name: &str, node: &str) -> GatewayConfig {
    let spec = serde_json::from_value(serde_json::json!({
        "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
        "secretName": "gw-keys", "mtu": 1340,
        "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1",
        "remaps": [{"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.201.0.0/16"}],
        "podCidrs": ["10.200.0.0/16"], "externalCidrs": ["10.70.0.0/16"],
        "overlay": {"address": "10.80.0.2", "node": node},
        "nodes": [],
        "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
    }));
    let mut config = GatewayConfig::new(name, spec.unwrap());
    config.metadata.namespace = Some(namespace.to_owned());
    config
}

fn connection(value: ConnectionValue) -> Connection {
    let mut connection: Connection = serde_json::from_value(serde_json::json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": {"name": "gw-client", "namespace": "t"},
        "spec": {"type": "Client", "gatewayRef": {"name": "client"}},
        "status": {"value": "Connected", "latency": {"value": "3ms"}},
    }))
    .unwrap();
    connection.status.as_mut().unwrap().value = value;
    connection
}

fn node(name: &str, removed: bool) -> Object {
    let spec = serde_json::json!({"clusterId": "rome", "underlay": [], "localPods": [],
        "podCidrs": [], "external": [], "peerings": [], "vxlanSources": [], "removed": removed});
    NodeConfig::new(name, serde_json::from_value(spec).unwrap()).into()
}

/// These objects, in a cluster with node n1.
fn snapshot(objects: impl IntoIterator<Item = Object>) -> Snapshot {
    let nodes = [node("n1", false)].into_iter();
    only(nodes.chain(objects))
}

fn only(objects: impl IntoIterator<Item = Object>) -> Snapshot {
    let objects = objects.into_iter().map(|object| (object.reference(), object)).collect();
    Snapshot { objects, problems: Vec::new() }
}

fn found(liveness: Option<Liveness>) -> Found {
    let life = |liveness| Life { liveness, problem: None, node: None };
    let key = ("t".to_owned(), "client".to_owned());
    let gateways = liveness.map(|liveness| (key, life(liveness))).into_iter().collect();
    Found { node: Some("n1".to_owned()), gateways, ..Found::default() }
}

#[test]
fn peering_without_its_process_is_down() {
    let objects = snapshot([
        config("t", "client", "n1").into(),
        connection(ConnectionValue::Connected).into(),
    ]);
    for (liveness, expected) in [
        (Liveness::Answers, State::Connected),
        (Liveness::Silent, State::Error),
        (Liveness::Gone, State::Down),
    ] {
        let seen = observe(&objects, &found(Some(liveness)));
        assert_eq!(seen.peerings[0].state, expected);
        assert_eq!(seen.peerings[0].latency.is_some(), expected == State::Connected);
    }
}

#[test]
fn unreachable_node_makes_connected_degraded() {
    for (value, expected) in
        [(ConnectionValue::Connected, State::Degraded), (ConnectionValue::Error, State::Error)]
    {
        let mut gateway = config("t", "client", "n1");
        let status = serde_json::json!({"overlayProbePort": 12346, "probingNodes": 2,
            "unreachableNodes": [
                {"node": "n2", "fault": "NoAnswer", "since": "2026-01-31T12:00:00Z"}]});
        gateway.status = Some(serde_json::from_value(status).unwrap());
        let objects = snapshot([gateway.into(), connection(value).into()]);
        let seen = observe(&objects, &found(Some(Liveness::Answers)));
        assert_eq!(seen.peerings[0].state, expected);
        let named = |p: &String| p.contains("gateway t/client: n2: no answer over VXLAN for");
        assert!(seen.problems.iter().any(named), "{seen:?}");
    }
}

#[test]
fn hung_gateway_is_the_only_cause_named() {
    let mut gateway = config("t", "client", "n1");
    let status = serde_json::json!({"overlayProbePort": 12346, "probingNodes": 2,
        "unreachableNodes": [
            {"node": "n2", "fault": "NoAnswer", "since": "2026-01-31T12:00:00Z"}]});
    gateway.status = Some(serde_json::from_value(status).unwrap());
    let objects = snapshot([gateway.into(), connection(ConnectionValue::Connected).into()]);
    let seen = observe(&objects, &found(Some(Liveness::Silent)));
    assert!(!seen.problems.iter().any(|p| p.contains("over VXLAN")), "{:?}", seen.problems);
    assert_eq!(seen.peerings[0].nodes, None);
}

#[test]
fn a_gateway_that_has_just_started_is_connecting() {
    let objects = snapshot([config("t", "client", "n1").into()]);
    let seen = observe(&objects, &found(Some(Liveness::Silent)));
    assert_eq!(seen.peerings[0].state, State::Connecting);
}

#[test]
fn no_state_but_connected_is_without_a_problem() {
    for (value, expected, problem) in [
        (None, State::Waiting, "there is no Connection gw-client;"),
        (Some(ConnectionValue::Connecting), State::Connecting, "no packet of milan"),
        (Some(ConnectionValue::Error), State::Error, "milan has not answered"),
    ] {
        let connection = value.map(|value| Object::from(connection(value)));
        let keyed = || {
            let mut gateway = config("t", "client", "n1");
            gateway.spec.peer_public_key = Some("k".to_owned());
            gateway
        };
        let life = Some(Liveness::Answers);
        let seen = observe(
            &snapshot([keyed().into()].into_iter().chain(connection.clone())),
            &found(life),
        );
        let [shown] = &seen.problems[..] else { panic!("{seen:?}") };
        assert_eq!(seen.peerings[0].state, expected);
        assert!(shown.starts_with("gateway t/client: ") && shown.contains(problem), "{shown}");

        let mut named = keyed();
        named.status.get_or_insert_default().problems = vec!["it misses much".to_owned()];
        for gateway in [named, config("t", "client", "n1")] {
            let seen = observe(
                &snapshot([gateway.into()].into_iter().chain(connection.clone())),
                &found(life),
            );
            assert_eq!(seen.problems.len(), 1, "one cause is enough: {:?}", seen.problems);
        }
    }
}

#[test]
fn gateway_without_config_waits_for_the_controller() {
    let client: GatewayClient = serde_json::from_value(serde_json::json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayClient",
        "metadata": {"name": "client", "namespace": "t"},
        "spec": {"endpoint": {"addresses": ["192.0.2.1"], "port": 1}},
    }))
    .unwrap();
    let seen = observe(&snapshot([client.into()]), &found(None));
    assert_eq!(seen.peerings[0].state, State::Waiting);
    assert_eq!(
        seen.problems,
        ["gateway t/client: the fabric-controller has published no GatewayConfig of it yet"]
    );
}

#[test]
fn stale_gateway_of_other_host_is_error() {
    let ago =
        |seconds: i64| Timestamp::from_second(Timestamp::now().as_second() - seconds).unwrap();
    let observed = |node: &str, unanswered: Option<i64>, reported: i64, drops: &[PacketDrop]| {
        let mut connection = connection(ConnectionValue::Connected);
        let latency = connection.status.as_mut().unwrap().latency.as_mut().unwrap();
        latency.timestamp = Some(ago(reported).to_string());
        let spec = serde_json::json!({"clusterId": "rome", "underlay": [], "localPods": [],
            "podCidrs": [], "external": [], "peerings": [], "vxlanSources": []});
        let mut own = NodeConfig::new("n2", serde_json::from_value(spec).unwrap());
        let gateway = config("t", "client", "n1");
        let peer_cluster_id = gateway.spec.peer_cluster_id.clone();
        own.status.get_or_insert_default().unreachable_gateways = unanswered
            .map(|seconds| UnreachableGateway { peer_cluster_id, since: ago(seconds).to_string() })
            .into_iter()
            .collect();
        own.status.get_or_insert_default().packet_drops = drops.to_vec();
        let objects = snapshot([gateway.into(), connection.into(), own.into()]);
        observe(&objects, &Found { node: Some(node.to_owned()), ..Found::default() })
    };
    assert_eq!(observed("n2", None, 12, &[]).peerings[0].state, State::Connected);
    for (unanswered, reported, problem) in [
        (Some(4), 6, "gateway t/client has not answered this host over VXLAN for 4 s"),
        (None, 40, "gateway t/client has reported nothing for 40 s"),
    ] {
        let seen = observed("n2", unanswered, reported, &[]);
        assert_eq!(seen.peerings[0].state, State::Error);
        let is_named = |p: &String| p.starts_with(problem) && p.contains("see whether n1");
        assert!(seen.problems.iter().any(is_named), "{:?}", seen.problems);
    }
    let drop = PacketDrop {
        cause: "chain inet f c drops packets of this node".to_owned(),
        remedy: "let its owner accept them".to_owned(),
    };
    let seen = observed("n2", Some(4), 6, &[drop]);
    let named = "; chain inet f c drops packets of this node: on this host, let its owner accept them; else";
    assert!(seen.problems.iter().any(|p| p.contains(named)), "{:?}", seen.problems);
}

#[test]
fn host_without_node_has_no_peering() {
    let observed = |own: Option<&str>, nodes: &[Object]| {
        let mut gateway = config("t", "client", "n1");
        let status = serde_json::json!({"overlayProbePort": 12346, "probingNodes": 2});
        gateway.status = Some(serde_json::from_value(status).unwrap());
        let connection = connection(ConnectionValue::Connected).into();
        let objects = only([gateway.into(), connection].into_iter().chain(nodes.to_vec()));
        let cluster_id = Some("rome".to_owned());
        let found = found(Some(Liveness::Answers));
        observe(&objects, &Found { node: own.map(str::to_owned), cluster_id, ..found })
    };
    let nodes = |removed: bool| [node("n1", removed), node("n2", removed)];
    assert_eq!(observed(Some("n2"), &nodes(false)).peerings[0].state, State::Connected);
    assert_eq!(observed(None, &nodes(false)).peerings[0].state, State::Connected);
    let none = "rome has no node: ";
    for (own, nodes, state, expected) in [
        (Some("n3"), &nodes(false)[..], State::Error, "this host, n3, is no node of rome: its"),
        (Some("n2"), &nodes(true), State::Error, none),
        (Some("n2"), &[], State::Error, none),
        (None, &nodes(true), State::Degraded, none),
        (None, &[], State::Degraded, none),
    ] {
        let seen = observed(own, nodes);
        assert_eq!(seen.peerings[0].state, state);
        assert!(seen.problems.iter().any(|p| p.starts_with(expected)), "{:?}", seen.problems);
    }
}

#[test]
fn outdated_report_of_own_gateway_is_an_error() {
    let reported = |seconds: i64| {
        let mut connection = connection(ConnectionValue::Connected);
        let latency = connection.status.as_mut().unwrap().latency.as_mut().unwrap();
        let at = Timestamp::from_second(Timestamp::now().as_second() - seconds).unwrap();
        latency.timestamp = Some(at.to_string());
        let objects = snapshot([config("t", "client", "n1").into(), connection.into()]);
        observe(&objects, &found(Some(Liveness::Answers)))
    };
    assert_eq!(reported(12).peerings[0].state, State::Connected);
    let seen = reported(20);
    assert_eq!(seen.peerings[0].state, State::Error);
    let is_named = |p: &String| p.starts_with("gateway t/client has reported nothing for 20 s");
    assert!(seen.problems.iter().any(is_named), "{:?}", seen.problems);
}

#[test]
fn gateway_that_misses_its_peer_is_not_silent() {
    let ago =
        |seconds: i64| Timestamp::from_second(Timestamp::now().as_second() - seconds).unwrap();
    let mut connection = connection(ConnectionValue::Connected);
    let latency = connection.status.as_mut().unwrap().latency.as_mut().unwrap();
    latency.timestamp = Some(ago(18).to_string());
    let mut gateway = config("t", "client", "n1");
    gateway.status.get_or_insert_default().faults.push(PeeringFault {
        reason: PeeringFault::NO_ANSWER.to_owned(),
        message: "no answer from milan".to_owned(),
        remedy: "check it".to_owned(),
        since: ago(8).to_string(),
    });
    let objects = snapshot([gateway.into(), connection.into()]);
    let seen = observe(&objects, &found(Some(Liveness::Answers)));
    assert_eq!(seen.peerings[0].state, State::Degraded);
    let silent = |p: &String| p.contains("has reported nothing");
    assert!(!seen.problems.iter().any(silent), "{:?}", seen.problems);
}

#[test]
fn findings_of_nodes_come_first() {
    let spec = serde_json::json!({"clusterId": "rome", "underlay": [], "localPods": [],
        "podCidrs": [], "external": [], "peerings": [], "vxlanSources": []});
    let mut node = NodeConfig::new("n1", serde_json::from_value(spec).unwrap());
    node.status.get_or_insert_default().problems = vec!["eth0 has no carrier".to_owned()];
    let mut gateway = config("t", "client", "n1");
    gateway.status.get_or_insert_default().problems = vec!["it misses much".to_owned()];
    let problems = observe(&snapshot([gateway.into(), node.into()]), &found(None)).problems;
    assert_eq!(problems[0], "node n1: eth0 has no carrier");
    assert!(problems.contains(&"gateway t/client: it misses much".to_owned()), "{problems:?}");
}

#[test]
fn a_gateway_of_another_host_is_believed() {
    let objects = snapshot([
        config("t", "client", "n1").into(),
        connection(ConnectionValue::Connected).into(),
    ]);
    assert_eq!(observe(&objects, &found(None)).peerings[0].state, State::Connected);
}

#[test]
fn problem_that_a_condition_repeats_is_shown_once() {
    let server: fabric_api::networking::GatewayServer = serde_json::from_value(serde_json::json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
        "metadata": {"name": "server", "namespace": "t"},
        "spec": {"endpoint": {"port": 0}},
        "status": {"conditions": [{
            "type": "Accepted", "status": "False", "reason": "Invalid",
            "message": "spec.endpoint.port: found 0; expected 1 to 65535; spec.mtu: found 1",
            "lastTransitionTime": "2026-01-31T12:00:00Z"}]},
    }))
    .unwrap();
    let object = Object::from(server);
    let problem = Problem {
        source: String::new(),
        object: Some(object.reference()),
        field: Some("spec.endpoint.port".to_owned()),
        message: "found 0; expected 1 to 65535".to_owned(),
    };
    let snapshot = Snapshot { problems: vec![problem], ..snapshot([object]) };
    assert_eq!(
        observe(&snapshot, &found(None)).problems,
        [
            "GatewayServer t/server: spec.endpoint.port: found 0; expected 1 to 65535",
            "GatewayServer t/server: spec.mtu: found 1"
        ]
    );
}

#[test]
fn manifest_error_is_one_problem_line() {
    let object = |value| Object::from(serde_json::from_value::<GatewayClient>(value).unwrap());
    let object = object(serde_json::json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayClient",
        "metadata": {"name": "client", "namespace": "t"},
        "spec": {"endpoint": {"addresses": ["192.0.2.1"], "port": 1}, "mtu": 1340},
        "status": {"conditions": [{
            "type": "Accepted", "status": "False", "reason": "Invalid",
            "message": "a.yaml:13: spec.mtu: found 1; expected 2; a.yaml:20: \
                PublicKey t/gw-publickey: spec.publicKey: found 3; spec.mtu: found 17",
            "lastTransitionTime": "2026-01-31T12:00:00Z"}]},
    }));
    let problem = |line, object, field: &str, message: &str| Problem {
        source: format!("a.yaml:{line}"),
        object: Some(object),
        field: Some(field.to_owned()),
        message: message.to_owned(),
    };
    let key = ObjectRef::new(Kind::PublicKey, "t", "gw-publickey");
    let problems = vec![
        problem(13, object.reference(), "spec.mtu", "found 1; expected 2"),
        problem(20, key, "spec.publicKey", "found 3"),
    ];
    let snapshot = Snapshot { problems, ..snapshot([object]) };
    assert_eq!(
        observe(&snapshot, &found(None)).problems,
        [
            "GatewayClient t/client: spec.mtu: found 17",
            "a.yaml:13: GatewayClient t/client: spec.mtu: found 1; expected 2",
            "a.yaml:20: PublicKey t/gw-publickey: spec.publicKey: found 3",
        ]
    );
}

#[test]
fn empty_texts_make_no_empty_problem_lines() {
    let mut config = config("t", "client", "n1");
    config.status = Some(
        serde_json::from_value(serde_json::json!({
            "appliedGeneration": 1, "problems": ["", "two\nlines"],
        }))
        .unwrap(),
    );
    let client: GatewayClient = serde_json::from_value(serde_json::json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayClient",
        "metadata": {"name": "client", "namespace": "t"},
        "spec": {"endpoint": {"addresses": [], "port": 1}},
        "status": {"conditions": [{
            "type": "Accepted", "status": "False", "reason": "Invalid", "message": "",
            "lastTransitionTime": "2026-01-31T12:00:00Z"}]},
    }))
    .unwrap();
    let problems = observe(&snapshot([config.into(), client.into()]), &found(None)).problems;
    assert_eq!(
        problems,
        [
            "GatewayClient t/client: Accepted is False (Invalid), no message given",
            "gateway t/client: no PublicKey of cluster milan yet",
            "gateway t/client: two lines",
        ]
    );
}

#[test]
fn waiting_peering_names_missing_object() {
    let mut configuration = Configuration::new("paris", Default::default());
    configuration.metadata.namespace = Some("liqo-tenant-paris".to_owned());
    configuration.metadata.labels =
        Some([(labels::REMOTE_CLUSTER_ID.to_owned(), "paris".to_owned())].into());
    let seen = observe(&snapshot([configuration.into()]), &found(None));
    assert_eq!(
        (seen.peerings[0].cluster.as_str(), seen.peerings[0].state),
        ("paris", State::Waiting)
    );
    assert!(seen.problems[0].contains("no GatewayServer or GatewayClient yet"), "{seen:?}");
}

#[test]
fn refused_prefix_of_the_record_has_its_senders() {
    let prefix = serde_json::json!({"peerClusterId": "paris", "prefix": "10.72.0.0/16"});
    let spec = serde_json::json!({"cluster": {"digest": "", "podCidrs": [], "refused": [prefix]}});
    let record = FabricRecord::new("cluster", serde_json::from_value(spec).unwrap());
    let spec = serde_json::json!({"clusterId": "rome", "underlay": [], "localPods": [],
        "external": [], "fromRecords": true, "peerings": [], "vxlanSources": [], "refuseSeconds": 15});
    let mut node = NodeConfig::new("n1", serde_json::from_value(spec).unwrap());
    let traffic =
        serde_json::json!({"prefix": "10.72.0.0/16", "quiet": false, "senders": ["10.200.1.2"]});
    let status = serde_json::json!({"refused": [traffic], "refusesRecorded": true});
    node.status = Some(serde_json::from_value(status).unwrap());
    let seen = observe(&snapshot([record.into(), node.into()]), &Found::default()).refused;
    let [refused] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((refused.cluster.as_str(), refused.senders.len()), ("paris", 1));
    assert_eq!(refused.refuse_seconds, 15);
}

#[test]
fn peers_reached_through_this_cluster_are_shown() {
    let gateway = |peer: &str, remaps: serde_json::Value| {
        let mut gateway = config(peer, "client", "n1");
        gateway.spec.peer_cluster_id = peer.to_owned();
        gateway.spec.remaps = serde_json::from_value(remaps).unwrap();
        Object::from(gateway)
    };
    let turin = serde_json::json!([
        {"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.202.0.0/16"},
        {"kind": "External", "remote": "10.70.0.0/16", "local": "10.72.0.0/16"}]);
    let milan = serde_json::json!([
        {"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.201.0.0/16"}]);
    let ip = |external: &str, target: &str| serde_json::json!({"external": external, "target": target, "masquerade": false});
    let [of_pod, of_ip] = [("10.70.0.3", "10.202.1.2"), ("10.70.0.4", "10.72.0.3")];
    let ips = [of_pod, of_ip, ("10.70.0.1", "10.72.0.0"), ("10.70.0.2", "192.0.2.7")];
    let ips = ips.map(|(external, target)| ip(external, target));
    let cluster = serde_json::json!({"cluster": {"digest": "d", "podCidrs": [], "ips": ips}});
    let record = FabricRecord::new("cluster", serde_json::from_value(cluster).unwrap());
    let [milan, turin] = [gateway("milan", milan), gateway("turin", turin)];
    let alone = observe(&snapshot([turin.clone(), record.clone().into()]), &Found::default());
    assert_eq!(alone.peerings[0].transit, [], "there is no other peer");

    let all = observe(&snapshot([milan, turin, record.into()]), &Found::default());
    let [milan, turin] = all.peerings.as_slice() else { panic!("{:?}", all.peerings) };
    assert_eq!(milan.transit, []);
    let expected = [of_pod, of_ip].map(|(external, target)| Transit {
        external: external.parse().unwrap(),
        target: target.parse().unwrap(),
    });
    assert_eq!(turin.transit, expected, "neither unknown sources nor what is of no peer");
}
