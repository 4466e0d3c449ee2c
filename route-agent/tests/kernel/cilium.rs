//! Nodes as Cilium 1.18.2 leaves them in its tunnel mode beside kube-proxy: devices, routes, rules and chains.
//!
//! ```text
//!  pod                      node                                      gw (10.201.0.1)
//!  eth0 10.200.1.2/32 ---- lxc1       cilium_host 10.200.1.33/32      |
//!                           ^              | egress: for the pod      |
//!                           +--------------+                          |
//!                          eth0 ===================================== +
//! ```
//! Cilium's programs in the kernel, which are not built here, are left out but for one: what is sent to a pod through
//! cilium_host goes to the pod's device, here by a filter of tc. Since that changes no address, the pod has the MAC
//! address of cilium_host.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use fabric_api::fabric::NodeConfigSpec;
use netlink::Netns;

use crate::node::{PEER, PEER_V6, World, config, connect, eventually, sh};
use crate::policy::{BACKENDS, reached_from_peer};

const SOON: Duration = Duration::from_secs(5);
/// Host in front of the node that is no peer.
const OUTSIDE: [&str; 2] = ["192.0.2.7", "2001:db8::7"];

const DEVICES: &str = "ip link set pod0 down; ip link set pod0 name lxc1
    ip address flush dev lxc1; ip link set lxc1 address 02:00:00:00:00:01 up
    ip link add cilium_host address 02:00:00:00:00:33 type veth peer name cilium_net
    ip link add cilium_vxlan type vxlan external dstport 8472
    for device in cilium_host cilium_net; do
        ip link set $device arp off addrgenmode none up
        sysctl -qw net.ipv4.conf.$device.rp_filter=0 net.ipv4.conf.$device.accept_local=1
        sysctl -qw net.ipv4.conf.$device.send_redirects=0; done
    ip link set cilium_vxlan up; sysctl -qw net.ipv4.conf.lxc1.rp_filter=0 net.ipv4.conf.all.rp_filter=0
    ip address add 10.200.1.33/32 dev cilium_host; ip address add fd00:200:1::33/128 dev cilium_host nodad
    tc qdisc add dev cilium_host clsact
    tc filter add dev cilium_host egress protocol ip prio 1 u32 match ip dst 10.200.1.2/32 \
        action mirred egress redirect dev lxc1
    tc filter add dev cilium_host egress protocol ipv6 prio 2 u32 match ip6 dst fd00:200:1::2/128 \
        action mirred egress redirect dev lxc1";
/// The local table comes after the rules for the proxy: of what goes to it, and, before 1.17, of what it sends.
const ROUTES: &str =
    "ip route add default via 192.0.2.7; ip -6 route add default via 2001:db8::7 dev eth0
    ip route add 10.200.1.33 dev cilium_host proto kernel scope link
    ip route add 10.200.1.0/24 via 10.200.1.33 dev cilium_host proto kernel src 10.200.1.33
    ip route add 10.200.2.0/24 via 10.200.1.33 dev cilium_host proto kernel src 10.200.1.33 mtu 1450
    ip -6 route add fd00:200:1::/64 dev cilium_host proto kernel
    ip -6 route add fd00:200:2::/64 dev cilium_host proto kernel mtu 1450
    ip route add 10.200.1.33 dev cilium_host proto kernel scope link table 2005
    ip route add default via 10.200.1.33 dev cilium_host proto kernel table 2005
    ip -6 route add default dev cilium_host proto kernel table 2005
    for family in -4 -6; do
        ip $family route add local default dev lo proto kernel table 2004
        ip $family rule add priority 100 table local protocol kernel; ip $family rule del priority 0
        ip $family rule add priority 9 fwmark 0x200/0xf00 table 2004 protocol kernel
        ip $family rule add priority 10 fwmark 0xa00/0xf00 table 2005 protocol kernel; done";
const POD: &str = "ip link set eth0 down; ip address flush dev eth0; ip link set eth0 address 02:00:00:00:00:33 up
    ip address add 10.200.1.2/32 dev eth0; ip address add fd00:200:1::2/128 dev eth0 nodad
    ip route add 10.200.1.33 dev eth0 scope link; ip route add default via 10.200.1.33 dev eth0
    ip route add fd00:200:1::33 dev eth0; ip neigh add fd00:200:1::33 lladdr 02:00:00:00:00:01 dev eth0
    ip route add default via fd00:200:1::33 dev eth0";

/// Chains for a family: its pods, and the node's router address, from which hosts' packets reach pods.
fn chains(pods: &str, router: &str, loopback: &str) -> String {
    format!(
        "*raw
:CILIUM_OUTPUT_raw -
:CILIUM_PRE_raw -
-I PREROUTING -m comment --comment \"cilium-feeder: CILIUM_PRE_raw\" -j CILIUM_PRE_raw
-I OUTPUT -m comment --comment \"cilium-feeder: CILIUM_OUTPUT_raw\" -j CILIUM_OUTPUT_raw
-A CILIUM_OUTPUT_raw -o lxc+ -m mark --mark 0xa00/0xfffffeff -j CT --notrack
-A CILIUM_OUTPUT_raw -o cilium_host -m mark --mark 0xa00/0xfffffeff -j CT --notrack
-A CILIUM_OUTPUT_raw -o lxc+ -m mark --mark 0x800/0xe00 -j CT --notrack
-A CILIUM_OUTPUT_raw -o cilium_host -m mark --mark 0x800/0xe00 -j CT --notrack
-A CILIUM_PRE_raw -m mark --mark 0x200/0xf00 -j CT --notrack
COMMIT
*mangle
:CILIUM_POST_mangle -
:CILIUM_PRE_mangle -
-I PREROUTING -m comment --comment \"cilium-feeder: CILIUM_PRE_mangle\" -j CILIUM_PRE_mangle
-I POSTROUTING -m comment --comment \"cilium-feeder: CILIUM_POST_mangle\" -j CILIUM_POST_mangle
-A CILIUM_PRE_mangle ! -o lo -m socket --transparent -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0x800/0xf00 -j MARK --set-xmark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p tcp -m mark --mark 0x3920200 -j TPROXY --on-port 37379 --on-ip {loopback} --tproxy-mark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p udp -m mark --mark 0x3920200 -j TPROXY --on-port 37379 --on-ip {loopback} --tproxy-mark 0x200/0xffffffff
COMMIT
*nat
:CILIUM_OUTPUT_nat -
:CILIUM_POST_nat -
:CILIUM_PRE_nat -
-I PREROUTING -m comment --comment \"cilium-feeder: CILIUM_PRE_nat\" -j CILIUM_PRE_nat
-I OUTPUT -m comment --comment \"cilium-feeder: CILIUM_OUTPUT_nat\" -j CILIUM_OUTPUT_nat
-I POSTROUTING -m comment --comment \"cilium-feeder: CILIUM_POST_nat\" -j CILIUM_POST_nat
-A CILIUM_POST_nat -s {pods} ! -d {pods} ! -o cilium_+ -m comment --comment \"cilium masquerade non-cluster\" -j MASQUERADE
-A CILIUM_POST_nat -m mark --mark 0xa00/0xe00 -j ACCEPT
-A CILIUM_POST_nat ! -s {pods} ! -d {pods} -o cilium_host -m comment --comment \"cilium host->cluster masquerade\" -j SNAT --to-source {router}
-A CILIUM_POST_nat -s {loopback} -o cilium_host -j SNAT --to-source {router}
-A CILIUM_POST_nat -m mark --mark 0xf00/0xf00 -o cilium_host -m conntrack --ctstate DNAT -j SNAT --to-source {router}
COMMIT
*filter
:INPUT ACCEPT
:FORWARD DROP
:CILIUM_FORWARD -
:CILIUM_INPUT -
:CILIUM_OUTPUT -
-I INPUT -m comment --comment \"cilium-feeder: CILIUM_INPUT\" -j CILIUM_INPUT
-I FORWARD -m comment --comment \"cilium-feeder: CILIUM_FORWARD\" -j CILIUM_FORWARD
-I OUTPUT -m comment --comment \"cilium-feeder: CILIUM_OUTPUT\" -j CILIUM_OUTPUT
-A CILIUM_FORWARD -o cilium_host -m comment --comment \"cilium: any->cluster on cilium_host forward accept\" -j ACCEPT
-A CILIUM_FORWARD -i cilium_host -m comment --comment \"cilium: cluster->any on cilium_host forward accept (nodeport)\" -j ACCEPT
-A CILIUM_FORWARD -i lxc+ -m comment --comment \"cilium: cluster->any on lxc+ forward accept\" -j ACCEPT
-A CILIUM_FORWARD -i cilium_net -m comment --comment \"cilium: cluster->any on cilium_net forward accept (nodeport)\" -j ACCEPT
-A CILIUM_INPUT -m mark --mark 0x200/0xf00 -j ACCEPT
-A CILIUM_OUTPUT -m mark --mark 0xa00/0xe00 -j ACCEPT
-A CILIUM_OUTPUT -m mark --mark 0x800/0xe00 -j ACCEPT
-A CILIUM_OUTPUT -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0xd00/0xf00 -m mark ! --mark 0x400/0xf00 -m mark ! --mark 0xa00/0xe00 -m mark ! --mark 0x800/0xe00 -m mark ! --mark 0xf00/0xf00 -m comment --comment \"cilium: host->any mark as from host\" -j MARK --set-xmark 0xc00/0xf00
COMMIT"
    )
}

/// Node with Cilium, and a pod on it.
fn node(backend: &str) -> World {
    let world = World::new();
    sh(&world.node, &format!("{DEVICES}\n{ROUTES}"));
    sh(&world.pod, POD);
    sh(&world.gw, "ip address add 2001:db8::7/64 dev eth0 nodad");
    for (backend, rules) in [
        (backend.to_owned(), chains("10.200.1.0/24", "10.200.1.33", "127.0.0.1")),
        (backend.replace("ip", "ip6"), chains("fd00:200:1::/64", "fd00:200:1::33", "::1")),
    ] {
        sh(&world.node, &format!("{backend}-restore <<'END'\n{rules}\nEND\n"));
    }
    world
}

fn seen(world: &World, from: &Netns, to: &str) -> String {
    world.source_seen(from, to).unwrap_or_else(|error| panic!("{to}: {error}")).to_string()
}

#[test]
fn overlay_passes_beside_cilium() {
    for backend in BACKENDS {
        let mut world = node(backend);
        // All other packets are masqueraded where they leave the node.
        for (to, node) in OUTSIDE.iter().zip(["192.0.2.5", "2001:db8::5"]) {
            assert_eq!(seen(&world, &world.pod, to), node, "{backend}");
        }
        world.configure(config());
        world.start(&[]);
        world.settle();
        assert_eq!(seen(&world, &world.pod, PEER), "10.200.1.2", "{backend}");
        assert_eq!(seen(&world, &world.pod, PEER_V6), "fd00:200:1::2", "{backend}");
        assert_eq!(seen(&world, &world.node, PEER), "10.70.0.9", "{backend}");
        assert_eq!(seen(&world, &world.node, PEER_V6), "fd00:70::9", "{backend}");
        assert!(reached_from_peer(&world, 8080), "the peer does not reach the pod: {backend}");
        assert_eq!(world.problems(), [""; 0], "{backend}");
        for (to, node) in OUTSIDE.iter().zip(["192.0.2.5", "2001:db8::5"]) {
            assert_eq!(seen(&world, &world.pod, to), node, "{backend}: Cilium's rules hold");
        }
    }
}

const COUNTERS: &str = "nft 'add table inet test
    add chain inet test post { type filter hook postrouting priority 300; }
    add rule inet test post oifname { eth0, cilium_host } ip daddr 10.201.0.0/16 counter comment leaked
    add rule inet test post oifname { eth0, cilium_host } ip6 daddr fd00:201::/32 counter comment leaked'";

/// True if packets to peers have left the node by another device than weft's.
fn leaked(world: &World) -> bool {
    let rules = sh(&world.node, "nft list table inet test");
    let mut rules = rules.lines().filter(|rule| rule.contains("leaked"));
    rules.any(|rule| !rule.contains("packets 0 "))
}

#[test]
fn departed_peer_is_refused_beside_cilium() {
    let peers = [PEER, PEER_V6];
    let at = |peer: &str| SocketAddr::new(peer.parse().unwrap(), 80);
    let error_at =
        |from: &Netns, peer: &str| connect(from, at(peer)).err().map(|error| error.kind());
    for backend in BACKENDS {
        let mut world = node(backend);
        let listen =
            |peer| world.gw.run(|| std::net::TcpListener::bind(at(peer))).unwrap().unwrap();
        let _listeners = peers.map(listen);
        sh(&world.node, COUNTERS);
        // Without weft, packets take the default route.
        for peer in peers {
            _ = error_at(&world.pod, peer);
        }
        assert!(leaked(&world), "{backend}");
        sh(&world.node, &format!("nft delete table inet test; {COUNTERS}"));
        world.configure(config());
        world.start(&[]);
        world.settle();
        for peer in peers {
            assert_eq!(error_at(&world.pod, peer), None, "{backend} {peer}");
        }
        let none = NodeConfigSpec { peerings: vec![], refuse_seconds: Some(60), ..config() };
        world.reconfigure(none);
        for peer in peers {
            eventually("pods are refused", SOON, || {
                error_at(&world.pod, peer) == Some(ErrorKind::ConnectionRefused)
            });
            // The route refuses what the host itself sends, before the rules could reset it.
            let of_node = error_at(&world.node, peer);
            assert_eq!(of_node, Some(ErrorKind::HostUnreachable), "{backend} {peer}");
        }
        assert!(!leaked(&world), "{backend}");
    }
}
