//! A published config, for the tests of this crate and of those that read configs.

use std::net::Ipv4Addr;

use fabric_api::fabric::{
    AddressMap, GatewayConfig, GatewayConfigSpec, GatewayOverlay, OverlayNode, PeerEndpoint,
    ProbeSettings, Remap, RemapKind, Role,
};

/// Returns the config of rome's client of milan.
pub(crate) fn config() -> GatewayConfig {
    let node = |name: &str, i: u8| OverlayNode {
        name: name.to_owned(),
        overlay: Ipv4Addr::new(10, 80, 0, i),
        mac: None,
        underlay: Ipv4Addr::new(192, 0, 2, i).into(),
        prefixes: vec![format!("10.200.{i}.0/24"), format!("10.70.0.{i}/32")],
    };
    let remap = |kind, remote: &str, local: &str| Remap {
        kind,
        remote: remote.to_owned(),
        local: local.to_owned(),
    };
    let mut config = GatewayConfig::new(
        "client",
        GatewayConfigSpec {
            cluster_id: "rome".to_owned(),
            peer_cluster_id: "milan".to_owned(),
            role: Role::Client,
            gateway_uid: "7c8f4e70-0000-4000-8000-000000000001".to_owned(),
            secret_name: "gw-keys".to_owned(),
            peer_public_key: Some("SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q=".to_owned()),
            listen_port: None,
            endpoint: Some(PeerEndpoint { addresses: vec!["192.0.2.20".to_owned()], port: 30742 }),
            mtu: 1340,
            tunnel_address: Ipv4Addr::new(169, 254, 18, 2),
            peer_tunnel_address: Ipv4Addr::new(169, 254, 18, 1),
            remaps: vec![
                remap(RemapKind::Pod, "10.200.0.0/16", "10.201.0.0/16"),
                remap(RemapKind::External, "10.70.0.0/16", "10.71.0.0/16"),
            ],
            from_records: false,
            pod_cidrs: vec!["10.200.0.0/16".to_owned()],
            external_cidrs: vec!["10.70.0.0/16".to_owned()],
            ips: vec![AddressMap {
                external: [10, 70, 0, 9].into(),
                target: [192, 168, 7, 7].into(),
            }],
            icmp_sources: vec![[10, 70, 0, 3].into()],
            egress: vec!["192.168.7.7/32".to_owned()],
            egress_node: Some("rome-2".to_owned()),
            overlay: GatewayOverlay {
                address: Ipv4Addr::new(10, 80, 0, 9),
                mac: None,
                link_address: Some(Ipv4Addr::new(10, 80, 0, 10)),
                link_address_v6: None,
                node: Some("rome-1".to_owned()),
                ip_families: Vec::new(),
            },
            nodes: vec![node("rome-1", 1), node("rome-2", 2)],
            probe: ProbeSettings::default(),
            replicas: Vec::new(),
            faulty_nodes: 0,
        },
    );
    config.metadata.namespace = Some("liqo-tenant-milan".to_owned());
    config.metadata.uid = Some("u1".to_owned());
    config.metadata.generation = Some(1);
    config
}
