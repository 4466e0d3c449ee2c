//! Firewalls of others that drop the node's own packets of the overlay, or those for it, while an agent
//! runs. See `node` for the topology; gw answers probes.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fabric_api::fabric::{GatewayProbe, NodeConfigStatus, OVERLAY_PROBE_PORT, OverlayProbe};

use crate::node::{World, config, eventually, sh};

const SOON: Duration = Duration::from_secs(8);

/// Rules of one chain at a hook, and parts of the cause.
const RULES: [(&str, &str, &str); 6] = [
    ("output", "udp dport 4879 drop", "packets to UDP port 4879 (VXLAN)"),
    ("output", "ip daddr 192.0.2.7 udp dport 4879 drop", "packets to UDP port 4879 (VXLAN)"),
    ("output", "udp dport 12346 reject", "packets to UDP port 12346 (overlay probes)"),
    ("output", "oifname weft4 drop", "packets of the overlay"),
    ("input", "ip saddr 192.0.2.7 udp dport 4879 drop", "packets to UDP port 4879 (VXLAN)"),
    ("input", "udp sport 12346 drop", "packets from UDP port 12346 (overlay probes)"),
];

#[test]
fn rule_that_drops_own_packets_is_named_until_gone() {
    let world = Probed::start();
    for (hook, rule, packets) in RULES {
        let chain = format!("add chain inet f c {{ type filter hook {hook} priority 0; }}");
        sh(&world.node, &format!("nft 'add table inet f; {chain}; add rule inet f c {rule}'"));
        let cause = format!("chain inet f c (hook {hook}): the rule with handle 2 drops {packets}");
        let remedy = "nft delete rule inet f c handle 2";
        world.names(&cause, remedy);
        let is_named = |problem: &String| problem.starts_with(&cause) && problem.contains(remedy);
        assert!(world.problems().iter().any(is_named), "{:?}", world.problems());
        sh(&world.node, remedy);
        world.is_solved(rule);
        sh(&world.node, "nft delete table inet f");
    }
}

#[test]
fn rule_of_iptables_output_is_named_until_gone() {
    let world = Probed::start();
    let rule = "OUTPUT -p udp -m udp --dport 4879 -j DROP";
    let handle = "nft delete rule ip filter OUTPUT handle";
    let causes = [
        (
            "iptables-legacy",
            "iptables-legacy's chain OUTPUT (hook output)",
            "iptables-legacy -D OUTPUT",
        ),
        ("iptables-nft", "chain ip filter OUTPUT (hook output)", handle),
    ];
    for (backend, cause, remedy) in causes {
        sh(&world.node, &format!("{backend} -A {rule}"));
        world.names(cause, remedy);
        sh(&world.node, &format!("{backend} -D {rule}"));
        world.is_solved(backend);
    }
}

#[test]
fn rule_that_untracks_all_packets_is_named_until_gone() {
    let world = Probed::start();
    let chain = "add chain inet f c { type filter hook prerouting priority raw; }";
    sh(
        &world.node,
        &format!(
            "nft 'add table inet f; {chain}'
            iptables-nft -t raw -A OUTPUT -p udp --dport 4879 -j NOTRACK
            iptables-legacy -t raw -A PREROUTING -i pod0 -j NOTRACK"
        ),
    );
    for (command, cause, remedy) in [
        (
            "nft add rule inet f c notrack",
            "chain inet f c: the rule with handle 2 exempts",
            "`nft delete rule inet f c handle 2`",
        ),
        (
            "iptables-nft -t raw -A PREROUTING -i weft+ -j NOTRACK",
            "chain ip raw PREROUTING: the rule with handle",
            "`nft delete rule ip raw PREROUTING handle",
        ),
        (
            "iptables-legacy -t raw -A PREROUTING -j CT --notrack",
            "iptables-legacy's chain PREROUTING",
            "`iptables-legacy -t raw -D PREROUTING -j CT --notrack`",
        ),
    ] {
        sh(&world.node, command);
        world.names(cause, remedy);
        let drops = world.reported().packet_drops;
        assert_eq!(drops.len(), 1, "{drops:?}");
        sh(&world.node, drops[0].remedy.rsplit('`').nth(1).unwrap());
        world.is_solved(command);
    }
}

#[test]
fn output_that_drops_all_is_named_while_unreachable() {
    let world = Probed::start();
    let chain = |policy| {
        format!(
            "nft 'add table inet f; add chain inet f c {{ type filter hook output priority 0; policy {policy}; }}'"
        )
    };
    sh(&world.node, &chain("accept"));
    sh(&world.node, "nft add rule inet f c oifname { eth0, weft4, lo } accept");
    sh(&world.node, &chain("drop"));
    thread::sleep(Duration::from_secs(3));
    assert_eq!((world.problems(), world.reported().packet_drops), (Vec::new(), Vec::new()));
    sh(&world.node, "nft flush chain inet f c");
    world.names(
        "chain inet f c drops packets of this node that no rule of it accepts",
        "let its owner accept UDP port 4879 (VXLAN) and 12346 (overlay probes)",
    );
    assert_eq!(world.problems(), [""; 0], "its rules may let them pass");
    sh(&world.node, &chain("accept"));
    world.is_solved("policy");
}

/// A node whose gateway answers probes.
struct Probed {
    world: World,
    ends: Arc<AtomicBool>,
    responder: Option<JoinHandle<()>>,
}

impl Probed {
    fn start() -> Self {
        let mut config = config();
        config.peerings[0].gateway.as_mut().unwrap().probe =
            Some(GatewayProbe { port: OVERLAY_PROBE_PORT, node: None });
        let world = World::running(config);
        let socket = world.gw.run(|| UdpSocket::bind("10.80.0.7:12346")).unwrap().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ends);
        let responder = Some(thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                respond(&socket);
            }
        }));
        let probed = Self { world, ends, responder };
        // One that has never answered is not lost.
        thread::sleep(Duration::from_secs(2));
        probed.is_solved("start");
        probed
    }

    fn reported(&self) -> NodeConfigStatus {
        self.world.status().map(|(_, status)| status).unwrap_or_default()
    }

    fn names(&self, cause: &str, remedy: &str) {
        eventually(&format!("{cause} {remedy}"), SOON, || {
            let drops = self.reported().packet_drops;
            drops
                .first()
                .is_some_and(|drop| drop.cause.starts_with(cause) && drop.remedy.contains(remedy))
        });
    }

    fn is_solved(&self, what: &str) {
        eventually(&format!("{what}: solved"), SOON, || {
            let status = self.reported();
            status.unreachable_gateways.is_empty()
                && status.packet_drops.is_empty()
                && status.problems.is_empty()
        });
    }
}

impl std::ops::Deref for Probed {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Drop for Probed {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.responder.take().map(JoinHandle::join);
    }
}

fn respond(socket: &UdpSocket) {
    let mut buffer = [0; 1024];
    let Ok((length, from)) = socket.recv_from(&mut buffer) else { return };
    if let Some(probe) = OverlayProbe::parse(&buffer[..length]) {
        let reply = OverlayProbe { reply: true, ..probe };
        // A firewall may refuse it.
        _ = socket.send_to(&reply.encode(), from);
    }
}
