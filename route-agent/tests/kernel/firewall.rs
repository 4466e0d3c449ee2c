//! Sources, refusals, and who may speak VXLAN to the node.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use fabric_api::fabric::{NodeAddressMap, NodeConfigSpec, NodePeering};

use crate::node::{
    PEER, PEER_V6, World, config, connect, disconnected, eventually, passes, peering, sh,
};

#[test]
fn sources_survive_any_cni_masquerade() {
    for cni in [
        "true",
        "iptables-nft -t nat -A POSTROUTING -s 10.200.0.0/16 ! -d 10.200.0.0/16 -j MASQUERADE",
        "iptables-legacy -t nat -A POSTROUTING ! -d 10.200.0.0/16 -j MASQUERADE",
        "nft 'add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; }
              add rule ip cni post masquerade'",
    ] {
        for rp_filter in [0, 1, 2] {
            let mut world = World::new();
            sh(&world.node, cni);
            sh(
                &world.node,
                &format!(
                    "for c in all default eth0 pod0; do echo {rp_filter} \
                 > /proc/sys/net/ipv4/conf/$c/rp_filter; done"
                ),
            );
            world.configure(config());
            world.start(&[]);
            world.settle();
            let seen = |from| world.source_seen(from, PEER).unwrap().to_string();
            assert_eq!(seen(&world.pod), "10.200.1.2", "{cni}, rp_filter {rp_filter}");
            assert_eq!(seen(&world.node), "10.70.0.9", "{cni}, rp_filter {rp_filter}");
        }
    }
}

#[test]
fn ipv6_sources_are_treated_alike() {
    let world = World::running(config());
    let seen = |from| world.source_seen(from, PEER_V6).unwrap().to_string();
    assert_eq!(seen(&world.pod), "fd00:200:1::2");
    assert_eq!(seen(&world.node), "fd00:70::9");
}

#[test]
fn full_masquerade_gives_pods_the_nodes_address() {
    let world = World::running(NodeConfigSpec { full_masquerade: true, ..config() });
    assert_eq!(world.source_seen(&world.pod, PEER).unwrap().to_string(), "10.70.0.9");
}

#[test]
fn disconnected_peer_resets_new_connections() {
    let waiting = NodePeering { connected: false, gateway: None, ..peering() };
    let no_gateway = NodeConfigSpec { peerings: vec![waiting], ..config() };
    for config in [disconnected(), no_gateway] {
        let world = World::running(config);
        for peer in [PEER, PEER_V6] {
            let to = SocketAddr::new(peer.parse().unwrap(), 8080);
            // More than ICMP's rate limit would answer.
            for _ in 0..12 {
                let error = connect(&world.pod, to).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{peer}");
            }
            let error = connect(&world.node, to).unwrap_err();
            let refused = [ErrorKind::ConnectionRefused, ErrorKind::HostUnreachable];
            assert!(refused.contains(&error.kind()), "{peer}: {error}");
        }
    }
}

#[test]
fn datagrams_are_refused_while_not_connected() {
    let world = World::running(disconnected());
    let (client, _server) = world.datagrams(&world.pod);
    client.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    client.send(b"hi").unwrap();
    let error = client.recv(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
}

#[test]
fn an_established_connection_survives_a_short_cut() {
    let world = World::running(config());
    let mut connection = world.established();
    assert!(passes(&mut connection));
    world.reconfigure(disconnected());
    assert!(passes(&mut connection), "while refusing what is new");
    world.reconfigure(config());
    assert!(passes(&mut connection));
}

#[test]
fn vxlan_from_a_stranger_is_dropped() {
    let stranger = NodeConfigSpec { vxlan_sources: vec![[192, 0, 2, 99].into()], ..config() };
    let world = World::running(stranger);
    let to = SocketAddr::new(PEER.parse().unwrap(), 8080);
    let error = connect(&world.pod, to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    world.reconfigure(config());
    assert!(world.source_seen(&world.pod, PEER).is_ok());
}

/// Each of what weft has on a node keeps packets in, while all else of it is gone: its nftables table,
/// and the table of backstops.
#[test]
fn no_clear_text_without_rules_and_routes() {
    for lost in ["ip rule del priority 32765", "nft flush ruleset"] {
        let mut world = World::running(config());
        let (client, server) = world.datagrams(&world.pod);
        client.send(b"hi").unwrap();
        assert!(server.recv(&mut [0; 8]).is_ok());
        let (own, owns_server) = world.datagrams(&world.node);
        world.stop();
        sh(
            &world.node,
            &format!(
                "{lost}; ip rule del priority 105; ip route flush table 18952
                ip route add default via 192.0.2.7"
            ),
        );
        server.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        _ = client.send(b"hi");
        assert!(server.recv(&mut [0; 8]).is_err(), "{lost}: a pod's packet left in clear");
        owns_server.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        _ = own.send(b"hi");
        assert!(owns_server.recv(&mut [0; 8]).is_err(), "{lost}: one of the node left in clear");
    }
}

#[test]
fn early_tracked_connection_is_translated_later() {
    let mut world = World::running(config());
    world.stop();
    // The CNI's masquerade makes the kernel track connections without us, too.
    sh(
        &world.node,
        "nft delete table inet weft
        nft 'add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; }
             add rule ip cni post masquerade'",
    );
    let (client, server) = world.datagrams(&world.node);
    let source = || {
        // Refused for a moment while the agent starts.
        _ = client.send(b"hi");
        Some(server.recv_from(&mut [0; 8]).ok()?.1.ip().to_string())
    };
    assert!(source().is_some_and(|source| source != "10.70.0.9"));
    world.start(&[]);
    let is_translated = || source().as_deref() == Some("10.70.0.9");
    eventually("it is translated", Duration::from_secs(5), is_translated);
}

#[test]
fn kube_proxys_mark_does_not_reach_the_vxlan_packet() {
    let world = World::running(config());
    sh(
        &world.node,
        "nft 'add table ip kube
        add chain ip kube pre { type filter hook prerouting priority -150; }
        add rule ip kube pre iifname \"pod0\" meta mark set meta mark | 0x4000
        add chain ip kube post { type nat hook postrouting priority 100; }
        add chain ip kube see { type filter hook postrouting priority 300; }
        add rule ip kube see udp dport 4879 meta mark & 0x4000 != 0 drop'",
    );
    assert_eq!(world.source_seen(&world.pod, PEER).unwrap().to_string(), "10.200.1.2");
}

#[test]
fn an_ip_resource_leads_to_its_target() {
    let map = NodeAddressMap {
        external: [10, 70, 0, 20].into(),
        target: [10, 200, 1, 2].into(),
        masquerade: true,
    };
    let world = World::running(NodeConfigSpec { ips: vec![map], ..config() });
    let bind: SocketAddr = "10.200.1.2:8080".parse().unwrap();
    let listener = world.pod.run(|| std::net::TcpListener::bind(bind)).unwrap().unwrap();
    sh(&world.gw, "ip route add 10.70.0.20/32 via 10.80.0.5 dev overlay4 onlink src 10.201.0.1");
    let _client = connect(&world.gw, "10.70.0.20:8080".parse().unwrap()).unwrap();
    assert_eq!(listener.accept().unwrap().1.ip().to_string(), "10.200.1.1");
}
