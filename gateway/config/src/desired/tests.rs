use super::*;
use crate::test_config::config;

#[test]
fn a_published_config_is_understood() {
    let desired = Desired::parse(&config()).unwrap();
    assert_eq!(desired.peer.as_str(), "milan");
    assert_eq!(desired.remaps[0].local, "10.201.0.0/16".parse().unwrap());
    assert_eq!(desired.egress_node, Some(Ipv4Addr::new(10, 80, 0, 2)));
    assert_eq!(desired.probe_interval(), Duration::from_secs(2));
}

#[test]
fn fault_names_its_field() {
    type Edit = fn(&mut fabric::GatewayConfigSpec);
    let cases: [(Edit, &str); 19] = [
        (|s| s.cluster_id = "Rome".into(), "spec.clusterId"),
        (|s| s.peer_public_key = Some("abc".into()), "spec.peerPublicKey"),
        (|s| s.mtu = 100, "spec.mtu"),
        (|s| s.endpoint = None, "spec.endpoint"),
        (
            |s| s.endpoint.as_mut().unwrap().addresses = vec![String::new()],
            "spec.endpoint.addresses",
        ),
        (|s| s.remaps[0].remote = "10.200.0.1/16".into(), "spec.remaps[0].remote"),
        (|s| s.remaps[0].local = "10.201.0.0/17".into(), "spec.remaps[0].local"),
        (|s| s.remaps[1].local = "10.201.4.0/24".into(), "spec.remaps[1].local"),
        (|s| s.remaps[0].local = "10.200.0.0/16".into(), "spec.remaps[0].local"),
        (|s| s.remaps[0].local = "10.70.0.0/16".into(), "spec.remaps[0].local"),
        (|s| s.pod_cidrs = vec!["10.0.0.0".into()], "spec.podCidrs[0]"),
        (|s| s.egress = vec!["0.0.0.0/0".into()], "spec.egress[0]"),
        (|s| s.nodes[0].prefixes = vec!["x".into()], "spec.nodes[0].prefixes[0]"),
        (|s| s.nodes[1].overlay = s.nodes[0].overlay, "spec.nodes[1].overlay"),
        (|s| s.nodes[1].mac = Some("0e:77".into()), "spec.nodes[1].mac"),
        (|s| s.overlay.mac = Some("0e:77".into()), "spec.overlay.mac"),
        (|s| s.probe.interval_ms = 10, "spec.probe.intervalMs"),
        (|s| s.role = Role::Server, "spec.listenPort"),
        (
            |s| s.icmp_sources = vec![[10, 70, 0, 3].into(), [10, 70, 0, 4].into()],
            "spec.icmpSources[1]",
        ),
    ];
    for (edit, field) in cases {
        let mut config = config();
        edit(&mut config.spec);
        let error = Desired::parse(&config).unwrap_err();
        assert!(error.0.iter().any(|p| p.field == field), "expected {field} in: {error}");
    }
}

#[test]
fn all_faults_are_reported_together() {
    let mut config = config();
    config.spec.mtu = 1;
    config.spec.pod_cidrs = vec!["a".into(), "b".into()];
    assert_eq!(Desired::parse(&config).unwrap_err().0.len(), 3);
}

#[test]
fn a_missing_key_or_egress_node_is_no_error() {
    let mut config = config();
    config.spec.peer_public_key = None;
    config.spec.egress_node = Some("gone".into());
    let desired = Desired::parse(&config).unwrap();
    assert_eq!((desired.peer_key, desired.egress_node), (None, None));
}
