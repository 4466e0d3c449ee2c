//! "Too big" that would make paths of the overlay smaller.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use fabric_api::fabric::NodeConfigSpec;

use crate::node::{World, config, eventually, sh};
use crate::policy::SOON;

const LINKS: [&str; 2] = ["10.80.0.8", "fd77:6566:7400::1:a50:8"];
/// Ports of VXLAN.
const VXLAN: [u16; 2] = [32_768, 4879];

/// Such an error needs no right but that to send ICMP, and would hold for ten minutes.
#[test]
fn pods_make_no_vxlan_smaller() {
    let mut config = config();
    config.vxlan_sources.push("2001:db8::7".parse().unwrap());
    let world = World::running(config);
    sh(
        &world.gw,
        "ip address add 2001:db8::7/64 dev eth0 nodad
        ip route add 198.51.100.5 via 192.0.2.5; ip route add 2001:db8:1::5 via 2001:db8::5",
    );
    for [node, node_of_pods, gateway] in
        [["192.0.2.5", "10.200.1.1", "192.0.2.7"], ["2001:db8::5", "fd00:200:1::1", "2001:db8::7"]]
    {
        let [node, node_of_pods, gateway] =
            [node, node_of_pods, gateway].map(|ip| ip.parse::<IpAddr>().unwrap());
        let send = |sender, ends, to| send(sender, &errors(ends, VXLAN), to);
        send(&world.pod, [node, gateway], node_of_pods);
        send(&world.pod, [node, gateway], node);
        assert!(!is_smaller(&world.node, gateway), "that of its own node to {gateway}");
        send(&world.pod, [gateway, node], gateway);
        assert!(!is_smaller(&world.gw, node), "that of another host to {node}");
        let further: IpAddr =
            if node.is_ipv4() { "198.51.100.5" } else { "2001:db8:1::5" }.parse().unwrap();
        send(&world.pod, [gateway, further], gateway);
        assert!(!is_smaller(&world.gw, further), "that of a host behind a router to {further}");
        send(&world.gw, [node, gateway], node);
        assert!(is_smaller(&world.node, gateway), "those of the network count: {gateway}");
    }
}

/// Those of the network belong to a flow that conntrack knows.
#[test]
fn firewalls_of_connections_let_errors_pass() {
    let mut world = World::new();
    sh(
        &world.node,
        "nft 'add table inet f; add chain inet f in { type filter hook input priority 0; };
        add rule inet f in ct state invalid drop'",
    );
    sh(&world.gw, "ip address add 2001:db8::7/64 dev eth0 nodad");
    world.configure(config());
    world.start(&[]);
    world.settle();
    for ends in [["192.0.2.5", "192.0.2.7"], ["2001:db8::5", "2001:db8::7"]] {
        let [node, gateway] = ends.map(|ip| ip.parse::<IpAddr>().unwrap());
        let own = SocketAddr::new(node, VXLAN[0]);
        let own = world.node.run(|| UdpSocket::bind(own)).unwrap().unwrap();
        send(&world.gw, &errors([node, gateway], VXLAN)[..1], node);
        assert!(!is_smaller(&world.node, gateway), "about nothing: {gateway}");
        own.send_to(b"vxlan", SocketAddr::new(gateway, VXLAN[1])).unwrap();
        send(&world.gw, &errors([node, gateway], VXLAN)[..1], node);
        assert!(is_smaller(&world.node, gateway), "{gateway}");
    }
}

/// Not even those of the network are about a gateway's link.
#[test]
fn nobody_makes_links_smaller() {
    let mut world = World::new();
    sh(
        &world.node,
        "ip link add weft-gw type veth peer name far; ip link set weft-gw up; ip link set far up
        for to in 10.80.0.8 fd77:6566:7400::1:a50:8; do
            ip route add $to dev weft-gw; ip route add $to dev weft-gw table 18952; done",
    );
    sh(&world.gw, "ip address add 2001:db8::7/64 dev eth0 nodad");
    let smaller = |world: &World, link: &str| {
        let node = if link.contains('.') { "192.0.2.5" } else { "2001:db8::5" };
        let [node, link] = [node, link].map(|ip| ip.parse::<IpAddr>().unwrap());
        send(&world.gw, &errors([node, link], VXLAN), node);
        is_smaller(&world.node, link)
    };
    for link in LINKS {
        // The kernel takes none of an address that is still tentative.
        eventually(&format!("without weft: {link}"), SOON, || smaller(&world, link));
    }
    sh(&world.node, "ip route flush cache; ip -6 route flush cache");
    world.configure(with_links());
    world.start(&[]);
    world.settle();
    let routes = LINKS.map(|link| sh(&world.node, &format!("ip route get {link}")));
    assert!(routes.iter().all(|route| route.contains("weft-gw table 18952")), "{routes:?}");
    for link in LINKS {
        assert!(!smaller(&world, link), "{link}");
    }
}

/// An error about an answer to a masqueraded packet is one about an answer to the node, once it is translated.
#[test]
fn masqueraded_errors_make_no_vxlan_smaller() {
    const NEAR: [[&str; 3]; 2] =
        [["10.200.1.2", "192.0.2.5", "192.0.2.7"], ["fd00:200:1::2", "2001:db8::5", "2001:db8::7"]];
    const BEHIND_A_ROUTER: [[&str; 3]; 2] = [
        ["10.200.1.2", "192.0.2.5", "198.51.100.7"],
        ["fd00:200:1::2", "2001:db8::5", "2001:db8:1::7"],
    ];
    let mut elsewhere = config();
    elsewhere.vxlan_sources.push("2001:db8::7".parse().unwrap());
    for (config, ends) in [(elsewhere, NEAR), (with_links(), NEAR), (with_links(), BEHIND_A_ROUTER)]
    {
        let mut world = World::new();
        sh(
            &world.gw,
            "ip address add 2001:db8::7/64 dev eth0 nodad
            ip address add 198.51.100.7 dev lo; ip address add 2001:db8:1::7 dev lo nodad",
        );
        sh(
            &world.node,
            "ip route add 198.51.100.7 via 192.0.2.7; ip route add 2001:db8:1::7 via 2001:db8::7
            nft 'add table inet cni; add chain inet cni post { type nat hook postrouting priority 100; };
            add rule inet cni post iifname pod0 oifname eth0 masquerade'",
        );
        let is_made_smaller = |world: &World| {
            ends.map(|ends| {
                let [pod, node, other] = ends.map(|ip| ip.parse::<IpAddr>().unwrap());
                let to = SocketAddr::new(other, 5353);
                let socket =
                    world.pod.run(|| UdpSocket::bind(SocketAddr::new(pod, 7))).unwrap().unwrap();
                let server = world.gw.run(|| UdpSocket::bind(to)).unwrap().unwrap();
                server.set_read_timeout(Some(SOON)).unwrap();
                socket.send_to(b"question", to).unwrap();
                let (_, from) = server.recv_from(&mut [0; 64]).unwrap();
                assert_eq!(from.ip(), node, "it is masqueraded");
                send(&world.pod, &errors([other, pod], [5353, 7])[..1], other);
                is_smaller(&world.gw, node)
            })
        };
        assert_eq!(is_made_smaller(&world), [true; 2], "without weft");
        sh(&world.gw, "ip route flush cache; ip -6 route flush cache");
        world.configure(config);
        world.start(&[]);
        world.settle();
        assert_eq!(is_made_smaller(&world), [false; 2], "{ends:?}");
    }
}

/// On a gateway's host not even those about hosts behind routers count, unless they are about a flow.
#[test]
fn pods_make_nothing_smaller_for_a_gateways_host() {
    let mut world = World::new();
    let hosts = [["192.0.2.5", "198.51.100.7"], ["2001:db8::5", "2001:db8:1::7"]];
    sh(
        &world.node,
        "ip route add 198.51.100.7 via 192.0.2.7; ip route add 2001:db8:1::7 via 2001:db8::7",
    );
    let is_made_smaller =
        |world: &World| hosts.map(|ends| is_made_smaller(world, &world.pod, ends));
    assert_eq!(is_made_smaller(&world), [true; 2], "without weft");
    sh(&world.node, "ip route flush cache; ip -6 route flush cache");
    world.configure(with_links());
    world.start(&[]);
    world.settle();
    assert_eq!(is_made_smaller(&world), [false; 2]);
}

/// Pods of other nodes reach a gateway's host by its address among its own pods.
#[test]
fn errors_to_other_addresses_of_hosts_need_a_flow() {
    let mut world = World::new();
    let hosts = [["203.0.113.1", "198.51.100.7"], ["2001:db8:2::1", "2001:db8:1::7"]];
    sh(
        &world.node,
        "ip route add 198.51.100.7 via 192.0.2.7; ip route add 2001:db8:1::7 via 2001:db8::7
        ip address add 203.0.113.1 dev lo; ip address add 2001:db8:2::1 dev lo nodad",
    );
    sh(
        &world.gw,
        "ip address add 2001:db8::7/64 dev eth0 nodad
        ip route add 203.0.113.1 via 192.0.2.5; ip route add 2001:db8:2::1 via 2001:db8::5",
    );
    let is_made_smaller = |world: &World| hosts.map(|ends| is_made_smaller(world, &world.gw, ends));
    assert_eq!(is_made_smaller(&world), [true; 2], "without weft");
    sh(&world.node, "ip route flush cache; ip -6 route flush cache");
    world.configure(with_links());
    world.start(&[]);
    world.settle();
    assert_eq!(is_made_smaller(&world), [false; 2]);
}

/// [`config`] with a gateway on this host.
fn with_links() -> NodeConfigSpec {
    let mut config = config();
    let gateway = config.peerings[0].gateway.as_mut().unwrap();
    gateway.links = LINKS.map(|ip| ip.parse().unwrap()).to_vec();
    gateway.underlay = gateway.links[0];
    config
}

/// True if the node, by that address of its own, accepts a sender's error about VXLAN to a host.
fn is_made_smaller(world: &World, sender: &netlink::Netns, ends: [&str; 2]) -> bool {
    let [node, host] = ends.map(|ip| ip.parse::<IpAddr>().unwrap());
    send(sender, &errors([node, host], VXLAN), node);
    is_smaller(&world.node, host)
}

/// True if an error has been accepted about packets to there.
fn is_smaller(of: &netlink::Netns, to: IpAddr) -> bool {
    sh(of, &format!("ip route get {to}")).contains("mtu")
}

fn send(sender: &netlink::Netns, errors: &[Vec<u8>], to: IpAddr) {
    use socket2::{Domain, Protocol, Socket, Type};
    let (domain, protocol) = match to.is_ipv4() {
        true => (Domain::IPV4, Protocol::ICMPV4),
        false => (Domain::IPV6, Protocol::ICMPV6),
    };
    let socket = sender.run(|| Socket::new(domain, Type::RAW, Some(protocol))).unwrap().unwrap();
    let to = SocketAddr::new(to, 0).into();
    errors.iter().for_each(|error| assert_eq!(socket.send_to(error, &to).unwrap(), error.len()));
}

/// "Too big" about packets between two hosts: UDP of these ports, the same behind options or another header, and ICMP.
fn errors([from, to]: [IpAddr; 2], [from_port, to_port]: [u16; 2]) -> Vec<Vec<u8>> {
    let ports = [from_port, to_port].map(u16::to_be_bytes).concat();
    let behind = [0x05, 0xc8, 0, 0, 8, 0, 0, 0, 0, 0x4a, 0x08, 0, 0, 0, 0, 0];
    let udp: &[u8] = &[&ports[..], &behind].concat();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let reply: &[u8] = &[0, 0, 0, 0, 0x12, 0x34, 0, 1];
            let quotes = [(17, udp, &[][..]), (17, udp, &[1, 1, 1, 0]), (1, reply, &[])];
            let errors = quotes.into_iter().map(|(protocol, payload, options)| {
                let length = u8::try_from(0x45 + options.len() / 4).unwrap();
                // Type, code, checksum, MTU; then the header of the packet.
                let mut error = vec![3, 4, 0, 0, 0, 0, 0x02, 0x40];
                error.extend([length, 0, 0x05, 0xdc, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
                error.extend(from.octets().into_iter().chain(to.octets()));
                error.extend(options.iter().chain(payload));
                let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair[1]]));
                let sum: u32 = error.chunks(2).map(word).sum();
                let sum = (sum & 0xffff) + (sum >> 16);
                error[2..4].copy_from_slice(&(!u16::try_from(sum).unwrap()).to_be_bytes());
                error
            });
            errors.collect()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let request: &[u8] = &[128, 0, 0, 0, 0x12, 0x34, 0, 1];
            // The second has an authentication header before UDP's.
            let authenticated = [&[17, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1][..], udp].concat();
            let quotes = [(17, udp), (51, &authenticated), (58, request)];
            let errors = quotes.into_iter().map(|(protocol, payload)| {
                let mut error = vec![2, 0, 0, 0, 0, 0, 0x05, 0x00];
                error.extend([0x60, 0, 0, 0, 0x05, 0xb4, protocol, 64]);
                error.extend(from.octets().into_iter().chain(to.octets()));
                error.extend(payload);
                error
            });
            errors.collect()
        }
        _ => unreachable!("of one family"),
    }
}
