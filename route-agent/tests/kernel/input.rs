//! Firewalls of others where hosts' own packets, IPv6 or only some devices' packets are dropped.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use fabric_api::fabric::{GatewayProbe, NodeConfigSpec, OVERLAY_PROBE_PORT, OverlayProbe};

use crate::node::{PEER_V6, World, config, eventually, sh};
use crate::policy::{BACKENDS, DENIED, SOON, guarded, reached_from_peer, reaches, reaches_at};

#[test]
fn input_catch_all_lets_vxlan_pass_and_its_drop_holds() {
    for chains in [
        "add chain inet f in { type filter hook input priority 0; policy drop; }",
        "add chain inet f in { type filter hook input priority 0; }; add rule inet f in reject",
    ] {
        let mut world = World::new();
        sh(&world.node, &format!("nft 'add table inet f; {chains}'"));
        world.configure(config());
        world.start(&[]);
        world.settle();
        eventually("VXLAN passes", SOON, || reaches(&world, 8080));
        sh(&world.node, "nft insert rule inet f in udp dport 4879 drop");
        assert!(!reaches(&world, 8080), "{chains}");
    }
}

/// Answers to overlay probes come in by weft's devices, established or not.
#[test]
fn input_that_drops_all_passes_probe_answers() {
    const PROBING: Duration = Duration::from_secs(4);
    let filters = [
        "nft 'add table inet f; add chain inet f in { type filter hook input priority 0; policy drop; }'",
        "iptables-nft -P INPUT DROP",
        "iptables-legacy -P INPUT DROP",
    ];
    for filter in filters {
        let mut world = World::new();
        sh(&world.node, filter);
        let mut config = config();
        config.peerings[0].gateway.as_mut().unwrap().probe =
            Some(GatewayProbe { port: OVERLAY_PROBE_PORT, node: None });
        world.configure(config);
        world.start(&[]);
        world.settle();
        let gateway = world.gw.run(|| UdpSocket::bind("10.80.0.7:12346")).unwrap().unwrap();
        gateway.set_read_timeout(Some(SOON)).unwrap();
        let (end, mut last) = (Instant::now() + PROBING, None);
        while Instant::now() < end {
            let mut buffer = [0; 1024];
            let (length, from) = gateway.recv_from(&mut buffer).unwrap();
            let probe = OverlayProbe::parse(&buffer[..length]).unwrap();
            let reply = OverlayProbe { reply: true, ..probe.clone() };
            gateway.send_to(&reply.encode(), from).unwrap();
            last = Some(probe);
        }
        // A probe reports whether answers arrive.
        assert!(last.is_some_and(|probe| !probe.unanswered), "{filter}");
        let reach = |port: &str| {
            let to = format!("10.200.1.1:{port}");
            let server = world.node.run(|| UdpSocket::bind(&to)).unwrap().unwrap();
            server.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            gateway.send_to(b"not asked for", &to).unwrap();
            server.recv_from(&mut [0; 64]).is_ok()
        };
        assert!(!reach("5353"), "{filter}: more than answers pass");
    }
}

/// A node that masquerades packets of its pods would send it under its own address.
#[test]
fn vxlan_of_pods_stays_on_their_node() {
    let mut world = World::new();
    sh(
        &world.node,
        "nft 'add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; };
        add rule ip cni post ip saddr 10.200.1.0/24 ip daddr != 10.200.0.0/16 masquerade'",
    );
    let device = "$(ip -o -4 addr show to 192.0.2.7 | awk '{print $2}')";
    sh(&world.gw, &format!("ip addr add 192.0.2.8/24 dev {device}"));
    let host = world.gw.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
    host.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let port = host.local_addr().unwrap().port();
    let arrives = |world: &World, to: &str, port: u16| {
        let pod = world.pod.run(|| UdpSocket::bind("10.200.1.2:0")).unwrap().unwrap();
        pod.send_to(b"datagram", (to, port)).unwrap();
        host.recv_from(&mut [0; 64]).is_ok()
    };
    let vxlan =
        "nft 'add table ip t; add chain ip t pre { type filter hook prerouting priority -300; };
        add rule ip t pre udp dport 4879 udp dport set PORT'";
    sh(&world.gw, &vxlan.replace("PORT", &port.to_string()));
    let (gateway, other) = ("192.0.2.7", "192.0.2.8");
    assert!(arrives(&world, gateway, 4879) && arrives(&world, other, 4879), "without weft");
    world.configure(config());
    world.start(&[]);
    world.settle();
    assert!(arrives(&world, gateway, port), "other datagrams pass");
    assert!(!arrives(&world, gateway, 4879));
    assert!(!arrives(&world, other, 4879), "a host that trusts this one, if it has a gateway");
}

/// A pod may bind to an address that it does not have: over IPv6 by `IPV6_FREEBIND`, which needs no right.
#[test]
fn pods_send_no_vxlan_from_addresses_of_others() {
    let mut config = config();
    config.vxlan_sources.push("2001:db8::7".parse().unwrap());
    let world = World::running(config);
    sh(
        &world.node,
        "nft 'add table inet see; add chain inet see in { type filter hook input priority 0; };
        add chain inet see post { type filter hook postrouting priority 400; };
        add counter inet see seen; add rule inet see in udp sport 7 counter name seen;
        add rule inet see post iifname pod0 udp sport 7 counter name seen'",
    );
    let seen = || {
        sh(&world.node, "nft list counter inet see seen | grep -c 'packets 0' || true").trim()
            == "0"
    };
    let send = |from: &str, to: &str, port: u16| {
        sh(&world.node, "nft reset counter inet see seen >&2");
        let [from, to] =
            [(from, 7), (to, port)].map(|(ip, port)| SocketAddr::new(ip.parse().unwrap(), port));
        world.pod.run(|| send_from(from, to)).unwrap();
        seen()
    };
    for (gateway, host, node, other) in [
        ("192.0.2.7", "192.0.2.8", "192.0.2.5", "192.0.2.9"),
        ("2001:db8::7", "2001:db8::8", "2001:db8::5", "2001:db8::9"),
    ] {
        eventually("other datagrams pass", SOON, || send(gateway, node, 4878));
        for (from, to) in [(gateway, node), (host, other), (node, other), (node, gateway)] {
            assert!(!send(from, to, 4879), "VXLAN from {from} to {to}");
        }
    }
}

/// Sends from any address.
fn send_from(from: SocketAddr, to: SocketAddr) {
    use socket2::{Domain, Protocol, Socket, Type};
    let domain = if from.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    match from {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true).unwrap(),
        SocketAddr::V6(_) => socket.set_freebind_v6(true).unwrap(),
    }
    socket.bind(&from.into()).unwrap();
    socket.send_to(b"datagram", &to.into()).unwrap();
}

/// Packets of containers that are no pods leave under the node's address, too. A gateway's are the only ones that may.
#[test]
fn masqueraded_vxlan_is_a_gateways_only() {
    let mut config = config();
    let gateway = "172.17.0.3";
    config.vxlan_sources.push(gateway.parse().unwrap());
    let mut world = World::new();
    sh(
        &world.node,
        "ip address add 172.17.0.1/16 dev pod0
        nft 'add table ip docker; add chain ip docker post { type nat hook postrouting priority 100; };
        add rule ip docker post ip saddr 172.17.0.0/16 oifname eth0 masquerade'",
    );
    sh(&world.pod, "ip address add 172.17.0.2/16 dev eth0; ip address add 172.17.0.3/16 dev eth0");
    let see =
        "nft 'add table ip t; add chain ip t pre { type filter hook prerouting priority -300; };
        add rule ip t pre ip saddr 192.0.2.5 udp dport 4879 udp dport set 7'";
    sh(&world.gw, see);
    let host = world.gw.run(|| UdpSocket::bind("192.0.2.7:7")).unwrap().unwrap();
    host.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let arrives = |world: &World, from: &str| {
        let pod = world.pod.run(|| UdpSocket::bind((from, 0))).unwrap().unwrap();
        pod.send_to(b"datagram", "192.0.2.7:4879").unwrap();
        host.recv_from(&mut [0; 64]).is_ok()
    };
    assert!(arrives(&world, "172.17.0.2"), "without weft");
    world.configure(config);
    world.start(&[]);
    world.settle();
    assert!(arrives(&world, gateway), "a gateway's");
    assert!(!arrives(&world, "172.17.0.2"));
    // A container answers what seems to come from a gateway's VXLAN port.
    sh(
        &world.node,
        "nft 'add chain ip docker pre { type nat hook prerouting priority -100; };
        add rule ip docker pre iifname eth0 udp dport 5353 dnat to 172.17.0.2'",
    );
    let container = world.pod.run(|| UdpSocket::bind("172.17.0.2:5353")).unwrap().unwrap();
    container.set_read_timeout(Some(SOON)).unwrap();
    // The gateway's device has that port.
    sh(&world.gw, "nft delete table ip t; ip link del overlay4");
    for (port, passes) in [(4878, true), (4879, false)] {
        let sender = world.gw.run(|| UdpSocket::bind(("192.0.2.7", port))).unwrap().unwrap();
        sender.send_to(b"question", "192.0.2.5:5353").unwrap();
        let (_, from) = container.recv_from(&mut [0; 64]).unwrap();
        container.send_to(b"answer", from).unwrap();
        sender.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let answered = sender.recv_from(&mut [0; 64]).is_ok();
        assert_eq!(answered, passes, "{port}");
    }
}

/// A program on a node would send a node VXLAN by answering what seems to come from there.
#[test]
fn pods_send_nothing_from_vxlan_ports_of_others() {
    let world = World::running(config());
    let program = world.node.run(|| UdpSocket::bind("0.0.0.0:5355")).unwrap().unwrap();
    program.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let arrives = |from: &str, to: &str| {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        world.pod.run(|| send_from(from, SocketAddr::new(to, 5355))).unwrap();
        program.recv_from(&mut [0; 64]).is_ok()
    };
    eventually("other ports pass", SOON, || arrives("192.0.2.7:4878", "192.0.2.5"));
    assert!(arrives("10.200.1.2:4879", "10.200.1.1"), "answers go to that pod");
    assert!(arrives("10.200.1.2:4879", "192.0.2.5"));
    for to in ["192.0.2.5", "10.200.1.1"] {
        assert!(!arrives("192.0.2.7:4879", to), "{to}");
    }
    // As VXLAN of the node itself does, if its source port is that of the program.
    program.send_to(b"datagram", "192.0.2.7:4879").unwrap();
    assert!(!arrives("192.0.2.7:4879", "192.0.2.5"), "an answer, for conntrack");
}

/// Answers of a program on another node come from that node, and go to the port that a masquerade has chosen.
#[test]
fn nothing_is_masqueraded_to_the_port_of_vxlan() {
    let mut world = World::new();
    sh(&world.gw, "ip link del overlay4");
    let other = world.gw.run(|| UdpSocket::bind("192.0.2.7:5353")).unwrap().unwrap();
    other.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let arrives = |world: &World, from: (&str, u16)| {
        let pod = world.pod.run(|| UdpSocket::bind(from)).unwrap().unwrap();
        pod.send_to(b"question", "192.0.2.7:5353").unwrap();
        other.recv_from(&mut [0; 64]).ok().map(|(_, from)| from.port())
    };
    // The flow of another port is older than weft's rules.
    sh(
        &world.node,
        "nft 'add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; };
        add rule ip cni post udp sport 7 oifname eth0 masquerade to :4879;
        add rule ip cni post oifname eth0 masquerade'",
    );
    assert_eq!(arrives(&world, ("10.200.1.2", 7)), Some(4879), "without weft");
    world.configure(config());
    world.start(&[]);
    world.settle();
    assert_eq!(arrives(&world, ("10.200.1.2", 8)), Some(8), "other ports pass");
    assert_eq!(arrives(&world, ("10.200.1.2", 7)), None);
}

/// To conntrack, VXLAN for a node is the answer to what a masqueraded container has sent from that port, and a source
/// port of the node's own VXLAN taken by what one has sent to it.
#[test]
fn flows_older_than_the_rules_change_no_vxlan() {
    let mut world = World::new();
    sh(
        &world.node,
        "nft 'add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; };
        add rule ip cni post ip saddr 10.200.1.0/24 oifname eth0 masquerade'",
    );
    sh(&world.gw, "ip link del overlay4");
    let bound = |netns: &netlink::Netns, to: &str| {
        let socket = netns.run(|| UdpSocket::bind(to)).unwrap().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        socket
    };
    let gateway = bound(&world.gw, "192.0.2.7:5353");
    let pod = bound(&world.pod, "10.200.1.2:4879");
    pod.send_to(b"datagram", "192.0.2.7:5353").unwrap();
    let receives = || {
        gateway.send_to(b"vxlan", "192.0.2.5:4879").unwrap();
        pod.recv_from(&mut [0; 64]).is_ok()
    };
    let vxlan = bound(&world.gw, "192.0.2.7:4879");
    bound(&world.pod, "10.200.1.2:40000").send_to(b"datagram", "192.0.2.7:4879").unwrap();
    let source = |of: &UdpSocket| {
        of.send_to(b"vxlan", "192.0.2.7:4879").unwrap();
        vxlan.recv_from(&mut [0; 64]).unwrap().1.port()
    };
    assert_eq!(vxlan.recv_from(&mut [0; 64]).unwrap().1.port(), 40_000, "as the pod chose it");
    let node = bound(&world.node, "192.0.2.5:40000");
    assert!(receives() && source(&node) != 40_000, "without weft");
    drop(node);
    sh(&world.node, "sysctl -qw net.netfilter.nf_conntrack_udp_timeout=30");
    world.configure(config());
    world.start(&[]);
    world.settle();
    assert!(!receives());
    assert_eq!(source(&bound(&world.node, "192.0.2.5:40000")), 40_000);
}

/// Neither VXLAN nor the errors about it are strangers to conntrack.
#[test]
fn firewalls_of_connections_let_vxlan_pass() {
    let rules = "ct state { invalid, untracked } drop";
    let hooks = ["input", "output"].map(|hook| {
        format!(
            "add chain inet f {hook} {{ type filter hook {hook} priority 0; }}; add rule inet f {hook} {rules}"
        )
    });
    let world = guarded(&format!("nft 'add table inet f; {}'", hooks.join("; ")), &[]);
    assert!(reaches(&world, 8080));
    let reached = || reached_from_peer(&world, 8081);
    eventually("the pod is reached", SOON, reached);
    assert_eq!(world.problems(), [""; 0]);
}

#[test]
fn published_ports_lead_to_no_vxlan_of_nodes() {
    let world = World::running(config());
    sh(
        &world.node,
        "nft 'add table ip docker; add chain ip docker pre { type nat hook prerouting priority -100; };
        add chain ip docker post { type nat hook postrouting priority 100; };
        add rule ip docker pre udp dport 6000 dnat to 192.0.2.7:4879;
        add rule ip docker pre udp dport 6001 dnat to 192.0.2.7:4878;
        add rule ip docker pre udp dport 6002 dnat to 10.200.1.2:4879;
        add rule ip docker pre udp dport 6003 dnat to 10.200.1.1:4879;
        add rule ip docker post iifname eth0 oifname eth0 masquerade'",
    );
    sh(&world.gw, "ip link del overlay4");
    let arrives = |published: u16, to: (&str, u16), of: &netlink::Netns| {
        let receiver = of.run(|| UdpSocket::bind(to)).unwrap().unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let sender = world.gw.run(|| UdpSocket::bind("192.0.2.7:0")).unwrap().unwrap();
        sender.send_to(b"datagram", ("192.0.2.5", published)).unwrap();
        receiver.recv_from(&mut [0; 64]).is_ok()
    };
    eventually("other ports pass", SOON, || arrives(6001, ("192.0.2.7", 4878), &world.gw));
    assert!(arrives(6002, ("10.200.1.2", 4879), &world.pod), "a pod's own port");
    assert!(!arrives(6000, ("192.0.2.7", 4879), &world.gw));
    // The node's own address among those of its pods: weft4 has that port.
    sh(
        &world.node,
        "nft 'add table inet see; add chain inet see in { type filter hook input priority 400; };
        add rule inet see in udp dport 4879 ct status dnat udp dport set 4878'",
    );
    assert!(!arrives(6003, ("10.200.1.1", 4878), &world.node));
}

/// An IP resource may lead a peer to a node, by way of one whose packets other nodes take for VXLAN.
#[test]
fn peers_send_no_vxlan() {
    let mut world = World::new();
    world.configure(config());
    world.start(&[]);
    world.settle();
    let arrives = |port: u16| {
        let receiver = world.pod.run(|| UdpSocket::bind(("10.200.1.2", port))).unwrap().unwrap();
        receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let sender = world.gw.run(|| UdpSocket::bind("10.201.0.1:0")).unwrap().unwrap();
        sender.send_to(b"datagram", ("10.200.1.2", port)).unwrap();
        receiver.recv_from(&mut [0; 64]).is_ok()
    };
    eventually("other datagrams pass", SOON, || arrives(4878));
    assert!(!arrives(4879));
}

#[test]
fn input_lets_wireguard_of_a_server_on_this_host_pass() {
    for filter in ["iptables-nft -P INPUT DROP", "iptables-legacy -P INPUT DROP"] {
        let mut world = World::new();
        sh(&world.node, filter);
        world.configure(with_listen_port(51840));
        world.start(&[]);
        world.settle();
        let socket = world.node.run(|| UdpSocket::bind("192.0.2.5:51840")).unwrap().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let arrives = || {
            let peer = world.gw.run(|| UdpSocket::bind("192.0.2.7:0")).unwrap().unwrap();
            peer.send_to(b"initiation", "192.0.2.5:51840").unwrap();
            socket.recv_from(&mut [0; 64]).is_ok()
        };
        eventually("an initiation arrives", SOON, arrives);
        world.reconfigure(with_listen_port(51841));
        eventually("the former port is closed", SOON, || !arrives());
    }
}

#[test]
fn wireguard_drop_is_named_without_accept_rules() {
    let mut world = World::new();
    sh(
        &world.node,
        "iptables-nft -P INPUT DROP; iptables-nft -A INPUT -p udp --dport 4879 -j ACCEPT",
    );
    world.configure(with_listen_port(51840));
    world.start(&["--no-accept-rules"]);
    world.settle();
    let remedy = "let its owner accept UDP port 51840 (WireGuard)";
    eventually("it is named", SOON, || world.problems().iter().any(|p| p.contains(remedy)));
    sh(&world.node, "iptables-nft -A INPUT -p udp --dport 51840 -j ACCEPT");
    eventually("the problem is gone", SOON, || world.problems().is_empty());
}

/// Drops of some packets to the port of WireGuard, each in a chain of its own or behind others that spare it.
const GUARDS: [&str; 18] = [
    "nft add rule inet f a udp dport 51840 ip saddr != 203.0.113.0/24 drop",
    "nft add rule inet f a udp dport 51840 ip saddr != { 203.0.113.0/24, 198.51.100.7 } drop",
    "nft add rule inet f a udp dport 51840 ip saddr != 192.0.2.0/24 drop",
    "nft add rule inet f a ip6 saddr != 2001:db8:5::/48 udp dport 51840 reject",
    "nft add rule inet f a ip saddr @bad udp dport { 53, 51840 } drop",
    "nft add rule inet f b udp dport 51840 ip saddr != 203.0.113.0/24 drop",
    "nft add rule inet f b udp dport 51840 ct state new drop",
    "nft add rule inet f c udp dport 51840 drop",
    "nft add rule inet f d udp dport 51840 drop",
    "nft add rule inet f a udp dport 50000-52000 ip saddr != 203.0.113.0/24 drop",
    "nft add rule inet f a ip saddr != 203.0.113.0/24 udp dport { 53, 51840-51850 } drop",
    "iptables-nft -A INPUT ! -s 203.0.113.0/24 -p udp --dport 51840 -j DROP",
    "iptables-nft -A INPUT -p udp --dport 51840 -m conntrack --ctstate NEW -j DROP",
    "iptables-nft -A INPUT -p udp --dport 51840 -s 198.51.100.0/24 -j REJECT",
    "iptables-legacy -A INPUT ! -s 203.0.113.0/24 -p udp --dport 51840 -j DROP",
    "iptables-legacy -A INPUT -p udp --dport 51840 -m state --state NEW -j DROP",
    "iptables-legacy -A INPUT ! -s 203.0.113.0/24 -p udp -m multiport --dports 53,51840:51850 -j DROP",
    "iptables-nft -A INPUT ! -s 203.0.113.0/24 -p udp -m multiport --dports 53,51840:51850 -j DROP",
];
/// Drops of all of them, or of those from nodes.
const DROPS: [&str; 4] = [
    "nft add rule inet f a udp dport 51840 drop",
    "nft add rule inet f a ip saddr { 192.0.2.0/24, 198.51.100.7 } udp dport 51840 counter drop",
    "iptables-nft -A INPUT -p udp --dport 51840 -j REJECT",
    "iptables-legacy -A INPUT -s 192.0.2.0/24 -p udp --dport 51840 -j DROP",
];

#[test]
fn guard_of_wireguard_is_named_while_it_is_silent() {
    let mut world = World::new();
    let chains = ["a", "b", "c", "d"]
        .map(|name| format!("add chain inet f {name} {{ type filter hook input priority 0; }}; "));
    sh(
        &world.node,
        &format!(
            "nft 'add table inet f; {} add set inet f bad {{ type ipv4_addr; flags interval; }};
            add element inet f bad {{ 198.51.100.0/24, 203.0.113.5 }};
            add rule inet f b ct state established,related accept;
            add rule inet f d ip saddr 203.0.113.0/24 accept;
            add rule inet f c ip saddr 203.0.113.0/24 udp dport 51840 accept'",
            chains.concat()
        ),
    );
    GUARDS.iter().for_each(|guard| _ = sh(&world.node, guard));
    let connected = |connected| {
        let mut config = with_listen_port(51840);
        config.peerings[0].connected = connected;
        config
    };
    world.configure(connected(true));
    world.start(&[]);
    world.settle();
    assert_eq!(world.problems(), [""; 0]);
    let removal = |problem: &String| problem.rsplit('`').nth(1).unwrap_or_default().to_owned();
    for drop in DROPS {
        sh(&world.node, drop);
        let is_certain =
            |problem: &String| problem.contains(" drops packets to UDP port 51840 (Wi");
        eventually(drop, SOON, || world.problems().iter().any(is_certain));
        sh(&world.node, &removal(&world.problems()[0]));
        eventually("it is solved", SOON, || world.problems().is_empty());
    }
    let is_named = |problem: &String| problem.contains(" drops some packets to UDP port 51840 (Wi");
    let silence = || {
        world.reconfigure(connected(false));
        eventually("all are named", SOON, || {
            let problems = world.problems();
            problems.len() == GUARDS.len() && problems.iter().all(is_named)
        });
    };
    silence();
    world.reconfigure(connected(true));
    eventually("the peer's packets arrive", SOON, || world.problems().is_empty());
    silence();
    world.problems().iter().for_each(|problem| _ = sh(&world.node, &removal(problem)));
    eventually("all are gone", SOON, || world.problems().is_empty());
}

fn with_listen_port(port: u16) -> NodeConfigSpec {
    let mut config = config();
    config.peerings[0].gateway.as_mut().unwrap().listen_port = Some(port);
    config
}

/// The order of INPUT: somebody's drop of the port, then ours, then the last catch-all.
#[test]
fn accepts_in_input_precede_the_last_drop_only() {
    for backend in BACKENDS {
        let mut world = World::new();
        sh(
            &world.node,
            &format!(
                "{backend} -A INPUT -p tcp --dport 22 -j ACCEPT
                {backend} -A INPUT -s 192.0.2.66 -j DROP
                {backend} -A INPUT -j REJECT"
            ),
        );
        world.configure(config());
        world.start(&[]);
        world.settle();
        eventually("VXLAN passes", SOON, || reaches(&world, 8080));
        let rules = sh(&world.node, &format!("{backend} -S INPUT | grep -n '^-A'"));
        let line = |text: &str| rules.lines().position(|rule| rule.contains(text));
        let ours = line("--dport 4879").unwrap_or_else(|| panic!("{backend}: {rules}"));
        assert!(line("192.0.2.66").unwrap() < ours && ours < line("REJECT").unwrap(), "{rules}");
        assert_eq!(world.problems(), [""; 0], "{backend}");
        sh(&world.node, &format!("{backend} -I INPUT -p udp --dport 4879 -j DROP"));
        assert!(!reaches(&world, 8080), "{backend}: an earlier drop is outranked");
    }
}

#[test]
fn ipv6_catch_alls_let_the_overlay_pass() {
    for backend in ["ip6tables-nft", "ip6tables-legacy"] {
        let mut world = World::new();
        sh(
            &world.node,
            &format!(
                "{backend} -A INPUT -s 2001:db8::66 -j DROP
                {backend} -A INPUT -p ipv6-icmp -j ACCEPT
                {backend} -P INPUT DROP
                {backend} -A FORWARD -p tcp --dport {DENIED} -j DROP
                {backend} -A FORWARD -j REJECT"
            ),
        );
        world.configure(over_ipv6());
        sh(
            &world.gw,
            "ip address add 2001:db8::7/64 dev eth0 nodad
            ip link add overlay6 address 0e:77:0a:50:00:07 type vxlan id 18952 local 2001:db8::7 dstport 4879 \
                nolearning udp6zerocsumrx
            ip link set overlay4 down; ip link set overlay6 up mtu 1430
            ip address add 10.80.0.7/32 dev overlay6
            bridge fdb add 0e:77:0a:50:00:05 dev overlay6 dst 2001:db8::5
            ip neigh add 10.80.0.5 lladdr 0e:77:0a:50:00:05 dev overlay6
            ip neigh add fd77:6566:7400::a50:5 lladdr 0e:77:0a:50:00:05 dev overlay6
            for to in 10.200.1.0/24 10.70.0.9/32; do
                ip route replace $to via 10.80.0.5 dev overlay6 onlink; done
            for to in fd00:200:1::/64 fd00:70::9/128; do
                ip -6 route replace $to via fd77:6566:7400::a50:5 dev overlay6 onlink; done",
        );
        world.start(&[]);
        world.settle();
        let passes = |port| reaches_at(&world, PEER_V6, port);
        eventually("the overlay passes", SOON, || passes(8080));
        assert!(!passes(DENIED), "{backend}: an explicit drop is outranked");
        for (chain, earlier, ours) in
            [("INPUT", "2001:db8::66", "--dport 4879"), ("FORWARD", "REJECT", "-i weft+")]
        {
            let rules = sh(&world.node, &format!("{backend} -S {chain} | grep '^-A'"));
            let line = |text: &str| rules.lines().position(|rule| rule.contains(text)).unwrap();
            assert_eq!(line(earlier) < line(ours), chain == "INPUT", "{backend}: {rules}");
        }
        assert_eq!(world.problems(), [""; 0], "{backend}");
    }
}

/// [`config`] with VXLAN over IPv6.
fn over_ipv6() -> NodeConfigSpec {
    let mut config = config();
    let gateway: IpAddr = "2001:db8::7".parse().unwrap();
    config.peerings[0].gateway.as_mut().unwrap().underlay = gateway;
    config.vxlan_sources = vec![gateway];
    config
}

#[test]
fn drop_for_one_device_is_named_until_solved() {
    let drop = "add chain inet f wan { udp dport 53 accept; drop; }";
    let hook = |name: &str| {
        format!("add chain inet f base {{ type filter hook {name} priority 0; }}; {drop}")
    };
    for (chains, jump) in [
        (hook("input"), "add rule inet f base iifname \"eth0\" jump wan"),
        (hook("input"), "add rule inet f base iif \"eth0\" goto wan"),
        (hook("input"), "add rule inet f base iifname != \"lo\" jump wan"),
        (hook("input"), "add rule inet f base iifname { \"eth0\", \"eth1\" } jump wan"),
        (
            hook("input"),
            "add rule inet f base iifname vmap { \"lo\" : accept, \"eth0\" : jump wan }",
        ),
        (hook("forward"), "add rule inet f base iifname \"pod0\" jump wan"),
    ] {
        let world = guarded(&format!("nft 'add table inet f; {chains}; {jump}'"), &[]);
        assert!(!reaches(&world, 8080), "nothing drops: {jump}");
        let named = || world.problems().iter().any(|p| p.starts_with("chain inet f wan, for "));
        eventually("the chain is named", SOON, named);
        let accept = if jump.contains("pod0") { "oifname \"weft4\"" } else { "udp dport 4879" };
        sh(&world.node, &format!("nft insert rule inet f wan {accept} accept"));
        eventually("the problem is gone", SOON, || world.problems().is_empty());
        assert!(reaches(&world, 8080), "{jump}");
    }
}
