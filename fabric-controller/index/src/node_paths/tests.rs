use fabric_api::fabric::{
    CrampedGateway, CutOffGateway, ForwardingOff, LossyGateway, OverlappingPods, UndoneStep,
    UnreachableGateway,
};
use serde_json::json;

use super::*;

fn gateway(status: serde_json::Value) -> GatewayConfig {
    let remap = json!({"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.201.0.0/16"});
    let spec = json!({
        "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
        "secretName": "s", "mtu": 1340, "tunnelAddress": "169.254.18.2",
        "peerTunnelAddress": "169.254.18.1", "remaps": [remap], "podCidrs": [], "externalCidrs": [],
        "overlay": {"address": "10.80.0.7"}, "nodes": [],
        "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
    });
    let mut gateway = GatewayConfig::new("client", serde_json::from_value(spec).unwrap());
    gateway.status = Some(serde_json::from_value(status).unwrap());
    gateway
}

fn node(name: &str, unreachable_peer: &str) -> NodeConfig {
    let spec = json!({"clusterId": "rome", "underlay": [], "localPods": [], "podCidrs": [],
        "external": [], "peerings": [], "vxlanSources": []});
    let mut node = NodeConfig::new(name, serde_json::from_value(spec).unwrap());
    let since = "2026-01-31T12:00:00.000Z".to_owned();
    let peer_cluster_id = unreachable_peer.to_owned();
    node.status.get_or_insert_default().unreachable_gateways =
        vec![UnreachableGateway { peer_cluster_id, since }];
    node
}

#[test]
fn gateway_without_responder_has_no_paths() {
    assert_eq!(NodePaths::of(&gateway(json!({})), [&node("n2", "milan")]), None);
}

#[test]
fn nodes_are_counted_once_one_has_probed() {
    let of = |probing: u32, nodes: &[NodeConfig]| {
        let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": probing}));
        NodePaths::of(&gateway, nodes).map(|paths| (paths.nodes, paths.is_without_nodes))
    };
    let mut own = [node("n1", "turin")];
    own[0].status.as_mut().unwrap().applied_generation = 1;
    assert_eq!(of(0, &own), None);
    assert_eq!(of(1, &own), Some((1, false)));
    assert_eq!(of(0, &[]), Some((0, true)));
}

#[test]
fn reports_of_both_ends_name_each_node_once() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 3,
        "unreachableNodes": [{"node": "n2", "fault": "OneWay", "since": "2026-01-31T12:00:01Z"}]}));
    let nodes = [node("n2", "milan"), node("n3", "milan"), node("n4", "paris")];
    let paths = NodePaths::of(&gateway, &nodes).unwrap();
    let named: Vec<_> = paths.unreachable.iter().map(|u| (u.node.as_str(), u.fault)).collect();
    assert_eq!(named, [("n2", PathFault::OneWay), ("n3", PathFault::NoAnswer)]);
    assert_eq!((paths.reachable(), paths.nodes), (1, 3));
}

#[test]
fn lossy_path_is_named_unless_it_fails_altogether() {
    let mut status = json!({"overlayProbePort": 12346, "probingNodes": 2});
    let [mut first, second] = [node("n1", "paris"), node("n2", "paris")];
    let since = "2026-01-31T12:00:00.000Z".to_owned();
    let peer_cluster_id = "milan".to_owned();
    first.status.get_or_insert_default().lossy_gateways =
        vec![LossyGateway { peer_cluster_id, lost_percent: 40, since }];
    let of = |first: &NodeConfig, status: &serde_json::Value| {
        NodePaths::of(&gateway(status.clone()), [first, &second]).unwrap()
    };
    let paths = of(&first, &status);
    assert_eq!((paths.reachable(), paths.nodes), (1, 2));
    let text = describe(&paths.unreachable[0], "2026-01-31T12:00:02Z".parse().unwrap());
    let words = "n1: 40 % of its probes over VXLAN or of the answers are lost for 2 s; look for";
    assert!(text.starts_with(words), "{text}");
    first.status.get_or_insert_default().lossy_gateways.clear();
    let (peer_cluster_id, since) = ("milan".to_owned(), "2026-01-31T12:00:00.000Z".to_owned());
    first.status.get_or_insert_default().cramped_gateways =
        vec![CrampedGateway { peer_cluster_id, bytes: 1440, since }];
    let text =
        describe(&of(&first, &status).unreachable[0], "2026-01-31T12:00:02Z".parse().unwrap());
    let words = "n1: packets of 1440 bytes between it and the gateway are lost over VXLAN, smaller";
    assert!(text.starts_with(words) && text.contains("pass 1490 bytes"), "{text}");
    for (address, links) in
        [("2001:db8::1", "pass 1510 bytes"), ("192.0.2.1", "pass 1490 bytes (1510 over IPv6)")]
    {
        first.spec.underlay.push(address.parse().unwrap());
        let text = remedy(&of(&first, &status).unreachable[0]);
        assert!(text.contains(links), "{text}");
    }
    first.spec.underlay.clear();
    let (peer_cluster_id, since) = ("milan".to_owned(), "2026-01-31T12:00:00.000Z".to_owned());
    first.status.get_or_insert_default().cut_off_gateways =
        vec![CutOffGateway { peer_cluster_id, since }];
    let paths = of(&first, &status);
    assert_eq!((paths.reachable(), paths.nodes), (1, 2));
    let text = describe(&paths.unreachable[0], "2026-01-31T12:00:09Z".parse().unwrap());
    assert!(
        text.starts_with("n1: the gateway cannot report") && text.contains(" for 9 s; "),
        "{text}"
    );
    status["unreachableNodes"] =
        json!([{"node": "n1", "fault": "OneWay", "since": "2026-01-31T12:00:01Z"}]);
    assert_eq!(of(&first, &status).unreachable[0].fault, PathFault::OneWay);
}

#[test]
fn undone_step_is_the_cause_if_probes_pass_or_not() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 2}));
    let mut nodes = [node("n1", "milan"), node("n2", "paris")];
    for node in &mut nodes {
        let step = "ip rule add priority 105 lookup 18952".to_owned();
        let since = "2026-01-31T12:00:00Z".to_owned();
        node.status.get_or_insert_default().undone = Some(UndoneStep { step, since });
    }
    let paths = NodePaths::of(&gateway, &nodes).unwrap();
    assert_eq!((paths.reachable(), paths.nodes), (0, 2));
    assert!(paths.unreachable.iter().all(|node| node.fault == PathFault::Undone), "{paths:?}");
    let text = describe_steadily(&paths.unreachable[0]);
    let words = "n1: another program keeps undoing what its route-agent sets: `ip rule add pr";
    assert!(text.starts_with(words), "{text}");

    let since = "2026-01-31T12:00:01Z";
    let unreachable: Vec<_> =
        ["n1", "n2"].map(|node| json!({"node": node, "fault": "NoAnswer", "since": since})).into();
    let status = json!({"overlayProbePort": 12346, "probingNodes": 2,
        "unreachableNodes": unreachable});
    let paths = NodePaths::of(&self::gateway(status), &nodes).unwrap();
    let faults: Vec<_> = paths.unreachable.iter().map(|node| node.fault).collect();
    assert_eq!(faults, [PathFault::Undone, PathFault::NoAnswer], "n2 itself misses nothing");
}

#[test]
fn node_without_agent_is_named_unless_it_probes() {
    let mut nodes = [node("n1", "paris"), node("n2", "paris")];
    nodes[0].status.get_or_insert_default().applied_generation = 3;
    let of = |probing: u32| {
        let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": probing}));
        NodePaths::of(&gateway, &nodes).unwrap()
    };
    let paths = of(1);
    assert_eq!((paths.reachable(), paths.nodes), (1, 2));
    let text = describe_steadily(&paths.unreachable[0]);
    assert!(text.starts_with("n2: no route-agent of it has started"), "{text}");
    assert!(!text.contains("since"), "{text}");
    assert_eq!(of(2).reachable(), 2, "its agent cannot write, but probes");
}

#[test]
fn agent_taken_down_is_named_once_its_probes_end() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 2,
        "unreachableNodes": [{"node": "n2", "fault": "NoAnswer", "since": "2026-01-31T12:00:01Z"}]}));
    let [mut first, mut second] = [node("n1", "paris"), node("n2", "paris")];
    first.status.get_or_insert_default().applied_generation = 3;
    second.status = None;
    let paths = NodePaths::of(&gateway, [&first, &second]).unwrap();
    assert_eq!((paths.reachable(), paths.nodes), (1, 2));
    assert_eq!(paths.unreachable[0].fault, PathFault::NotStarted);
}

#[test]
fn node_that_forwards_nothing_is_named_per_family() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 1}));
    let mut node = node("n2", "paris");
    node.status.get_or_insert_default().applied_generation = 3;
    let off = |setting: &str, ipv6| {
        let since = "2026-01-31T12:00:00Z".to_owned();
        vec![ForwardingOff { setting: setting.to_owned(), ipv6, since }]
    };
    let of = |node: &NodeConfig| NodePaths::of(&gateway, [node]).unwrap();
    node.status.get_or_insert_default().forwarding_off = off("net.ipv6.conf.all.forwarding", true);
    assert_eq!(of(&node).reachable(), 1, "the peer has no IPv6");
    node.status.get_or_insert_default().forwarding_off = off("net.ipv4.ip_forward", false);
    let paths = of(&node);
    assert_eq!((paths.reachable(), paths.nodes), (0, 1));
    let text = describe(&paths.unreachable[0], "2026-01-31T12:00:02Z".parse().unwrap());
    assert!(text.starts_with("n2: net.ipv4.ip_forward is 0"), "{text}");
    assert!(text.contains("for 2 s; run `sysctl -w net.ipv4.ip_forward=1` on n2"), "{text}");
}

#[test]
fn diverted_packets_are_a_fault_of_their_peer_only() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 1}));
    let mut node = node("n2", "paris");
    node.status.get_or_insert_default().applied_generation = 3;
    let mut of = |prefix: &str| {
        node.status.get_or_insert_default().diversions = vec![Diversion {
            removal: "ip rule del priority 50 prohibit".to_owned(),
            cause: None,
            prefixes: vec![prefix.to_owned()],
            since: "2026-01-31T12:00:00Z".to_owned(),
        }];
        NodePaths::of(&gateway, [&node]).unwrap()
    };
    assert_eq!(of("10.202.0.0/16").reachable(), 1, "another peer's");
    let paths = of("10.201.0.0/16");
    assert_eq!((paths.reachable(), paths.nodes), (0, 1));
    let text = describe(&paths.unreachable[0], "2026-01-31T12:00:02Z".parse().unwrap());
    assert!(text.starts_with("n2: a rule or route of another program takes"), "{text}");
    assert!(text.contains("run `ip rule del priority 50 prohibit` on n2"), "{text}");
    let diversions = &mut node.status.get_or_insert_default().diversions;
    diversions[0].cause = Some("its pods are reached by table 7 only".to_owned());
    let paths = NodePaths::of(&gateway, [&node]).unwrap();
    let text = describe_steadily(&paths.unreachable[0]);
    assert_eq!(text, "n2: its pods are reached by table 7 only since 2026-01-31T12:00:00Z");
    assert_eq!(remedy(&paths.unreachable[0]), "run `ip rule del priority 50 prohibit` on n2");
}

#[test]
fn chain_that_drops_is_named_while_the_path_fails() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 2}));
    let [mut first, second] = [node("n1", "milan"), node("n2", "paris")];
    first.status.get_or_insert_default().packet_drops = vec![PacketDrop {
        cause: "chain inet f out (hook output): the rule with handle 4 drops packets".to_owned(),
        remedy: "have its owner except them; or remove it".to_owned(),
    }];
    let named = |nodes: &[&NodeConfig]| {
        let paths = NodePaths::of(&gateway, nodes.iter().copied()).unwrap();
        let text = paths.unreachable.first().map(|of| describe(of, Timestamp::UNIX_EPOCH));
        text.unwrap_or_default()
    };
    let text = named(&[&first, &second]);
    assert!(text.starts_with("n1: no answer over VXLAN: chain inet f out (hook output)"), "{text}");
    assert!(text.ends_with("; on n1, have its owner except them; or remove it"), "{text}");
    first.status.get_or_insert_default().unreachable_gateways.clear();
    first.status.get_or_insert_default().applied_generation = 3;
    assert!(!named(&[&first, &second]).contains("n1"));
}

#[test]
fn overlapping_pod_cidr_names_both_nodes() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 0}));
    let mut node = node("n2", "paris");
    node.status.get_or_insert_default().applied_generation = 3;
    let (cidr, other) = ("10.200.1.0/24".to_owned(), "n1".to_owned());
    node.spec.overlapping_pods = vec![OverlappingPods { cidr, node: other }];
    let paths = NodePaths::of(&gateway, [&node]).unwrap();
    assert_eq!((paths.reachable(), paths.nodes), (0, 1));
    let text = describe_steadily(&paths.unreachable[0]);
    assert!(text.starts_with("n2: its pod CIDR 10.200.1.0/24 overlaps one of n1, where"), "{text}");
}

#[test]
fn pod_cidr_outside_the_clusters_is_a_fault() {
    let gateway = gateway(json!({"overlayProbePort": 12346, "probingNodes": 1}));
    let mut node = node("n2", "paris");
    node.status.get_or_insert_default().applied_generation = 3;
    node.spec.outside_pods = vec!["10.9.1.0/24".to_owned()];
    let paths = NodePaths::of(&gateway, [&node]).unwrap();
    assert_eq!((paths.reachable(), paths.nodes), (0, 1));
    let text = describe_steadily(&paths.unreachable[0]);
    assert!(text.starts_with("n2: its pod CIDR 10.9.1.0/24 lies in none"), "{text}");
    node.spec.outside_pods = vec!["fd09::/64".to_owned()];
    assert_eq!(NodePaths::of(&gateway, [&node]).unwrap().reachable(), 1, "the peer has no IPv6");
}

#[test]
fn node_is_named_with_duration_and_remedy() {
    let node = UnreachableNode {
        node: "n2".to_owned(),
        fault: PathFault::NoAnswer,
        detail: None,
        since: "2026-01-31T12:00:00.000Z".to_owned(),
    };
    let text = describe(&node, "2026-01-31T12:00:04.9Z".parse().unwrap());
    assert!(text.starts_with("n2: no answer over VXLAN for 4 s; see whether n2 is up"), "{text}");
}

#[test]
fn fault_of_gateways_host_explains_silent_nodes() {
    let mut gateway =
        gateway(json!({"overlayProbePort": 12346, "probingNodes": 3, "unreachableNodes": [
        {"node": "n2", "fault": "NoAnswer", "since": "2026-01-31T12:00:01Z"},
        {"node": "n3", "fault": "OneWay", "since": "2026-01-31T12:00:01Z"}]}));
    gateway.spec.overlay.node = Some("n1".to_owned());
    let mut host = node("n1", "paris");
    host.status.get_or_insert_default().packet_drops = vec![PacketDrop {
        cause: "eth0 has no carrier".to_owned(),
        remedy: "connect it".to_owned(),
    }];
    let nodes = [host, node("n2", "milan"), node("n3", "milan")];
    let paths = NodePaths::of(&gateway, &nodes).unwrap();
    let described: Vec<_> = paths.unreachable.iter().map(|of| (cause(of), remedy(of))).collect();
    let expected = [
        "no answer over VXLAN: eth0 has no carrier",
        "packets from it arrive over VXLAN, but none reach it: eth0 has no carrier",
    ];
    assert_eq!(described, expected.map(|cause| (cause.to_owned(), "on n1, connect it".to_owned())));
    // One that is reached shows that the host's fault is not why another is not.
    gateway.status.as_mut().unwrap().unreachable_nodes.pop();
    let nodes = [&nodes[0], &nodes[1], &node("n3", "paris")];
    let paths = NodePaths::of(&gateway, nodes).unwrap();
    assert_eq!(cause(&paths.unreachable[0]), "no answer over VXLAN");
}
