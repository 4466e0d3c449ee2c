//! Notices of replicas that have taken a gateway's tunnel over: see `node` for the topology.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use fabric_api::fabric::{
    ActiveReplica, GatewayProbe, NodeConfigSpec, OVERLAY_PROBE_PORT, OverlayProbe,
};

use crate::node::{World, config, eventually, sh};

const MAC: &str = "0e:77:0a:50:00:07";
const SOON: Duration = Duration::from_secs(5);
/// Time in which a notice that counts is applied.
const A_WHILE: Duration = Duration::from_secs(1);

/// Two replicas, of which the one at 192.0.2.7 has the tunnel since `epoch`.
fn with_replicas(epoch: u64) -> NodeConfigSpec {
    let mut config = config();
    let gateway = config.peerings[0].gateway.as_mut().unwrap();
    gateway.mac = Some(MAC.to_owned());
    gateway.probe = Some(GatewayProbe { port: OVERLAY_PROBE_PORT, node: None });
    gateway.replicas = vec![[192, 0, 2, 7].into(), [192, 0, 2, 9].into()];
    gateway.epoch = Some(epoch);
    config.vxlan_sources.push([192, 0, 2, 9].into());
    config
}

/// Address that VXLAN to the gateway goes to.
fn destination(world: &World) -> String {
    let fdb = sh(&world.node, &format!("bridge fdb show dev weft4 | grep {MAC}"));
    fdb.split_whitespace().skip_while(|word| *word != "dst").nth(1).unwrap_or_default().to_owned()
}

fn notice(address: [u8; 4], epoch: u64) -> Vec<u8> {
    let active = Some(ActiveReplica { address: address.into(), epoch });
    let (node, reply) = ("n1".to_owned(), true);
    OverlayProbe { node, reply, active, ..OverlayProbe::default() }.encode()
}

/// Socket of the gateway, and where the node's probes come from.
fn probed(world: &World) -> (UdpSocket, SocketAddr) {
    let gateway = world.gw.run(|| UdpSocket::bind("10.80.0.7:12346")).unwrap().unwrap();
    gateway.set_read_timeout(Some(SOON)).unwrap();
    let (_, from) = gateway.recv_from(&mut [0; 1024]).unwrap();
    (gateway, from)
}

#[test]
fn later_take_over_of_a_replica_moves_vxlan() {
    let mut world = World::new();
    world.configure(with_replicas(3));
    world.start(&[]);
    world.settle();
    assert_eq!(destination(&world), "192.0.2.7");
    let (gateway, from) = probed(&world);
    // A replica that this node has never probed sends its notice there.
    assert_eq!(from, "10.70.0.9:12346".parse().unwrap());

    for (address, epoch) in [([192, 0, 2, 9], 3), ([192, 0, 2, 8], 9)] {
        gateway.send_to(&notice(address, epoch), from).unwrap();
        std::thread::sleep(A_WHILE);
        assert_eq!(destination(&world), "192.0.2.7", "{address:?}, {epoch}");
    }
    gateway.send_to(&notice([192, 0, 2, 9], 10), from).unwrap();
    eventually("it goes to the successor", A_WHILE, || destination(&world) == "192.0.2.9");

    // Only a later config has precedence over the notice.
    world.reconfigure(with_replicas(10));
    assert_eq!(destination(&world), "192.0.2.7");
    gateway.send_to(&notice([192, 0, 2, 9], 11), from).unwrap();
    eventually("it goes to the successor again", A_WHILE, || destination(&world) == "192.0.2.9");
    let mut config = with_replicas(10);
    config.peerings[0].mtu -= 10;
    world.reconfigure(config);
    assert_eq!(destination(&world), "192.0.2.9");
}

/// The gateway is probed from another port then, and a successor knows only the usual one.
#[test]
fn take_over_of_a_lost_gateway_is_followed() {
    let mut world = World::new();
    world.configure(with_replicas(3));
    world.start(&[]);
    world.settle();
    let (gateway, from) = probed(&world);
    eventually("it is probed from another port", Duration::from_secs(20), || {
        gateway.recv_from(&mut [0; 1024]).unwrap().1 != from
    });
    gateway.send_to(&notice([192, 0, 2, 9], 4), from).unwrap();
    eventually("it goes to the successor", A_WHILE, || destination(&world) == "192.0.2.9");
}

/// The config of the gateway was deleted, and with it how often its tunnel had been taken over.
#[test]
fn take_overs_that_count_anew_are_followed() {
    let mut world = World::new();
    world.configure(with_replicas(3));
    world.start(&[]);
    world.settle();
    let (gateway, from) = probed(&world);
    gateway.send_to(&notice([192, 0, 2, 9], 10), from).unwrap();
    eventually("it goes to the successor", A_WHILE, || destination(&world) == "192.0.2.9");
    let mut unknown = with_replicas(10);
    unknown.peerings[0].gateway.as_mut().unwrap().epoch = None;
    for config in [with_replicas(10), unknown, with_replicas(1)] {
        world.reconfigure(config);
    }
    assert_eq!(destination(&world), "192.0.2.7");
    gateway.send_to(&notice([192, 0, 2, 9], 2), from).unwrap();
    eventually("it goes to the successor again", A_WHILE, || destination(&world) == "192.0.2.9");
}

/// Conntrack takes its packet for an answer to the node's own probe.
#[test]
fn notice_of_a_pod_is_ignored() {
    let mut world = World::new();
    world.configure(with_replicas(3));
    world.start(&[]);
    world.settle();
    let (_gateway, from) = probed(&world);
    sh(&world.node, "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.pod0.rp_filter=0");
    sh(&world.pod, "ip address add 10.80.0.7/32 dev lo");
    let pod = world.pod.run(|| UdpSocket::bind("10.80.0.7:12346")).unwrap().unwrap();
    pod.send_to(&notice([192, 0, 2, 9], 4), from).unwrap();
    std::thread::sleep(A_WHILE);
    assert_eq!(destination(&world), "192.0.2.7");
}
