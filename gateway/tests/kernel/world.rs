//! Helpers that the tests share: a namespace to be in, commands, and a config.

use std::net::Ipv4Addr;
use std::process::Command;

use fabric_api::fabric::{
    GatewayConfig, GatewayConfigSpec, GatewayOverlay, OverlayNode, PeerEndpoint, ProbeSettings,
    Remap, RemapKind, Role,
};
use netlink::Netns;

/// Does `work` in a new namespace, with a runtime, as a program that runs there would.
pub(crate) fn in_new_namespace<F: Future<Output = ()>>(work: impl FnOnce() -> F + Send) {
    let netns = Netns::unnamed().unwrap();
    netns
        .run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(work());
        })
        .unwrap();
}

/// Runs a command line in the namespace that this thread is in; gives back what it printed.
pub(crate) fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn run_in(netns: &Netns, line: &str) -> String {
    netns.run(|| run(line)).unwrap()
}

/// rome's gateway towards milan, with two nodes of which the first is this host.
pub(crate) fn config() -> GatewayConfig {
    let node = |name: &str, i: u8| OverlayNode {
        name: name.to_owned(),
        overlay: Ipv4Addr::new(10, 80, 0, i),
        mac: None,
        underlay: Ipv4Addr::new(192, 0, 2, i).into(),
        prefixes: vec![format!("10.200.{i}.0/24"), format!("fd20:{i}::/64")],
    };
    let remap = |remote: &str, local: &str| Remap {
        kind: RemapKind::Pod,
        remote: remote.to_owned(),
        local: local.to_owned(),
    };
    let (remote, local) = ("10.70.0.0/16".to_owned(), "10.71.0.0/16".to_owned());
    let external = Remap { kind: RemapKind::External, remote, local };
    let spec = GatewayConfigSpec {
        cluster_id: "rome".to_owned(),
        peer_cluster_id: "milan".to_owned(),
        role: Role::Client,
        gateway_uid: "u".to_owned(),
        secret_name: "keys".to_owned(),
        peer_public_key: None,
        listen_port: None,
        endpoint: Some(PeerEndpoint { addresses: vec!["192.0.2.20".to_owned()], port: 30742 }),
        mtu: 1340,
        tunnel_address: Ipv4Addr::new(169, 254, 18, 2),
        peer_tunnel_address: Ipv4Addr::new(169, 254, 18, 1),
        remaps: vec![
            remap("10.200.0.0/16", "10.201.0.0/16"),
            remap("fd20::/16", "fd21::/16"),
            external,
        ],
        from_records: false,
        pod_cidrs: vec!["10.200.0.0/16".to_owned(), "fd20::/16".to_owned()],
        external_cidrs: vec!["10.70.0.0/16".to_owned()],
        ips: Vec::new(),
        icmp_sources: Vec::new(),
        egress: vec!["192.168.7.7/32".to_owned()],
        egress_node: Some("b".to_owned()),
        overlay: GatewayOverlay {
            address: Ipv4Addr::new(10, 80, 0, 9),
            mac: None,
            link_address: Some(Ipv4Addr::new(10, 80, 0, 10)),
            link_address_v6: None,
            node: Some("a".to_owned()),
            ip_families: Vec::new(),
        },
        nodes: vec![node("a", 1), node("b", 2)],
        probe: ProbeSettings { enabled: true, interval_ms: 100, loss_threshold: 5 },
        replicas: Vec::new(),
        faulty_nodes: 0,
    };
    let mut config = GatewayConfig::new("gw", spec);
    config.metadata.namespace = Some("tenant".to_owned());
    config.metadata.uid = Some("11111111-2222-4333-8444-555555555555".to_owned());
    config.metadata.generation = Some(1);
    config
}
