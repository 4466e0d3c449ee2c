//! Firewalls of others: what only their policy or a catch-all drops passes, what they drop by a
//! rule stays dropped.

use std::fs::File;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use netlink::Netns;
use nix::fcntl::{Flock, FlockArg};

use crate::node::{PEER, World, config, connect, eventually, inside, sh};

pub(crate) const SOON: Duration = Duration::from_secs(5);
pub(crate) const BACKENDS: [&str; 2] = ["iptables-nft", "iptables-legacy"];
/// Port of the peer, and of the pod, that each owner drops packets to by a rule of its own.
pub(crate) const DENIED: u16 = 6666;

/// Docker Engine, which sets the policy and puts its jumps first.
const DOCKER: &str = "*filter
:INPUT ACCEPT
:FORWARD DROP
:DOCKER -
:DOCKER-ISOLATION-STAGE-1 -
:DOCKER-ISOLATION-STAGE-2 -
:DOCKER-USER -
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-ISOLATION-STAGE-1
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
-A DOCKER-ISOLATION-STAGE-2 -j RETURN
-A DOCKER-USER -p tcp --dport 6666 -j DROP
-A DOCKER-USER -j RETURN
COMMIT";

/// ufw with `DEFAULT_FORWARD_POLICY=\"REJECT\"` and a `ufw route deny`.
const UFW: &str = "*filter
:INPUT DROP
:FORWARD DROP
:ufw-before-input -
:ufw-not-local -
:ufw-user-input -
:ufw-reject-input -
:ufw-before-forward -
:ufw-user-forward -
:ufw-after-forward -
:ufw-reject-forward -
:ufw-track-forward -
-A INPUT -j ufw-before-input
-A INPUT -j ufw-reject-input
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -j ufw-not-local
-A ufw-before-input -j ufw-user-input
-A ufw-not-local -m addrtype --dst-type LOCAL -j RETURN
-A ufw-not-local -m addrtype --dst-type MULTICAST -j RETURN
-A ufw-not-local -m addrtype --dst-type BROADCAST -j RETURN
-A ufw-not-local -j DROP
-A ufw-reject-input -j REJECT --reject-with icmp-port-unreachable
-A FORWARD -j ufw-before-forward
-A FORWARD -j ufw-after-forward
-A FORWARD -j ufw-reject-forward
-A FORWARD -j ufw-track-forward
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
-A ufw-user-forward -p tcp --dport 6666 -j DROP
-A ufw-reject-forward -j REJECT --reject-with icmp-port-unreachable
COMMIT";

/// firewalld with `eth0` in a zone of its own, the rest in the default one.
const FIREWALLD: &str = "table inet firewalld {
  chain filter_IN_public_allow { }
  chain filter_IN_public { jump filter_IN_public_allow; reject with icmpx admin-prohibited; }
  chain filter_IN_internal_allow { }
  chain filter_IN_internal { jump filter_IN_internal_allow; reject with icmpx admin-prohibited; }
  chain filter_INPUT_ZONES { iifname \"eth0\" goto filter_IN_internal; goto filter_IN_public; }
  chain filter_INPUT {
    type filter hook input priority 10; policy accept;
    ct state { established, related } accept
    iifname \"lo\" accept
    jump filter_INPUT_ZONES
    reject with icmpx admin-prohibited
  }
  chain filter_FWD_public_deny { tcp dport 6666 reject with icmpx admin-prohibited; }
  chain filter_FWD_public_allow { }
  chain filter_FWD_public {
    jump filter_FWD_public_deny
    jump filter_FWD_public_allow
    reject with icmpx admin-prohibited
  }
  chain filter_FORWARD_ZONES { goto filter_FWD_public; }
  chain filter_FORWARD {
    type filter hook forward priority 10; policy accept;
    ct state { established, related } accept
    ct state invalid drop
    jump filter_FORWARD_ZONES
    reject with icmpx admin-prohibited
  }
}";

/// Felix's own chains; `pod+` stands for `cali+`.
const FELIX: &str = ":INPUT ACCEPT
:FORWARD DROP
:cali-FORWARD -
:cali-from-wl-dispatch -
:cali-to-wl-dispatch -
:cali-fw-pod0 -
:cali-tw-pod0 -
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i pod+ -j cali-from-wl-dispatch
-A cali-FORWARD -o pod+ -j cali-to-wl-dispatch
-A cali-from-wl-dispatch -i pod0 -g cali-fw-pod0
-A cali-from-wl-dispatch -m comment --comment \"Unknown interface\" -j DROP
-A cali-to-wl-dispatch -o pod0 -g cali-tw-pod0
-A cali-to-wl-dispatch -m comment --comment \"Unknown interface\" -j DROP
-A cali-fw-pod0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-fw-pod0 -p tcp -m tcp --dport 6666 -j DROP
-A cali-fw-pod0 -j RETURN
-A cali-tw-pod0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-tw-pod0 -p tcp -m tcp --dport 6666 -j DROP
-A cali-tw-pod0 -j RETURN
";
const FELIX_JUMP: &str =
    "-A FORWARD -m comment --comment \"cali:wUHhoiAYhphO9Mso\" -j cali-FORWARD\n";
const FELIX_LAST: &str = "-A FORWARD -m comment --comment \"cali:S93hcgKJrXEqnTfs\" \
    -m comment --comment \"Policy explicitly accepted packet.\" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A FORWARD -m comment --comment \"cali:mp77cMpurHhyjLrM\" -j MARK --set-xmark 0x10000/0x10000\n";
const FLANNEL: &str = ":FLANNEL-FWD -
-A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment \"flanneld forward\" -j ACCEPT\n";

/// kube-router, its jump first; allowed packets carry a mark.
const KUBE_ROUTER: &str = "*filter
:INPUT ACCEPT
:FORWARD DROP
:KUBE-ROUTER-FORWARD -
:KUBE-POD-FW-X -
:KUBE-NWPLCY-X -
-A FORWARD -m comment --comment \"kube-router netpol\" -j KUBE-ROUTER-FORWARD
-A FORWARD -o kube-bridge -m comment --comment \"allow inbound traffic to pods\" -j ACCEPT
-A KUBE-ROUTER-FORWARD -d 10.200.1.2/32 -m comment --comment \"jump traffic to POD\" -j KUBE-POD-FW-X
-A KUBE-ROUTER-FORWARD -s 10.200.1.2/32 -m comment --comment \"jump traffic of POD\" -j KUBE-POD-FW-X
-A KUBE-POD-FW-X -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-POD-FW-X -m comment --comment \"run through nw policy\" -j KUBE-NWPLCY-X
-A KUBE-POD-FW-X -m mark ! --mark 0x10000/0x10000 -j REJECT --reject-with icmp-port-unreachable
-A KUBE-POD-FW-X -j MARK --set-xmark 0x0/0x10000
-A KUBE-NWPLCY-X -p tcp -m tcp ! --dport 6666 -j MARK --set-xmark 0x10000/0x10000
COMMIT";

fn restore(backend: &str, rules: &str) -> String {
    format!("{backend}-restore <<'END'\n{rules}\nEND\n")
}

/// Node whose firewall `setup` made, with the agent running on it.
pub(crate) fn guarded(setup: &str, arguments: &[&str]) -> World {
    let mut world = World::new();
    sh(&world.node, setup);
    world.configure(config());
    world.start(arguments);
    world.settle();
    world
}

/// True if the peer answers at a port.
pub(crate) fn reaches(world: &World, port: u16) -> bool {
    reaches_at(world, PEER, port)
}

pub(crate) fn reaches_at(world: &World, peer: &str, port: u16) -> bool {
    let to = SocketAddr::new(peer.parse().unwrap(), port);
    let mut listener = None;
    // A child of another test, between fork and exec, may hold the one before.
    eventually("the port is free", SOON, || {
        listener = world.gw.run(|| TcpListener::bind(to)).unwrap().ok();
        listener.is_some()
    });
    connect(&world.pod, to).is_ok()
}

/// True if a connection of the peer's to a port of the pod is established.
pub(crate) fn reached_from_peer(world: &World, port: u16) -> bool {
    sh(
        &world.gw,
        &format!("ip route replace 10.200.1.0/24 via 10.80.0.5 dev overlay4 onlink src {PEER}"),
    );
    let to = SocketAddr::from(([10, 200, 1, 2], port));
    let _listener = world.pod.run(|| TcpListener::bind(to)).unwrap().unwrap();
    connect(&world.gw, to).is_ok()
}

fn overlay_passes_and_denied_port_does_not(setup: &str) {
    let dropping = guarded(setup, &["--no-accept-rules"]);
    assert!(!reaches(&dropping, 8080), "nothing drops: {setup}");
    assert!(!reached_from_peer(&dropping, 8080), "nothing drops what the peer sends: {setup}");
    let world = guarded(setup, &[]);
    eventually("the overlay passes", SOON, || reaches(&world, 8080));
    assert!(reached_from_peer(&world, 8080), "the peer does not reach the pod: {setup}");
    assert!(!reaches(&world, DENIED), "an explicit drop is outranked: {setup}");
    assert!(!reached_from_peer(&world, DENIED), "a drop for pods is outranked: {setup}");
    assert_eq!(world.problems(), [""; 0], "{setup}");
}

#[test]
fn docker_drop_holds_and_overlay_passes() {
    for backend in BACKENDS {
        overlay_passes_and_denied_port_does_not(&restore(backend, DOCKER));
    }
}

#[test]
fn ufw_deny_holds_and_overlay_passes() {
    for backend in BACKENDS {
        overlay_passes_and_denied_port_does_not(&restore(backend, UFW));
    }
}

#[test]
fn firewalld_zone_deny_holds_and_overlay_passes() {
    overlay_passes_and_denied_port_does_not(&format!("nft -f - <<'END'\n{FIREWALLD}\nEND\n"));
}

#[test]
fn felix_policy_holds_when_its_jump_is_first() {
    for backend in BACKENDS {
        let rules = format!("*filter\n{FELIX}{FELIX_JUMP}{FELIX_LAST}COMMIT");
        overlay_passes_and_denied_port_does_not(&restore(backend, &rules));
    }
}

#[test]
fn felix_policy_holds_when_its_jump_is_last() {
    for backend in BACKENDS {
        let others = "-A FORWARD -i docker0 -j ACCEPT\n";
        let rules = format!("*filter\n{FELIX}{others}{FELIX_JUMP}{FELIX_LAST}COMMIT");
        overlay_passes_and_denied_port_does_not(&restore(backend, &rules));
    }
}

#[test]
fn canal_policy_holds_and_overlay_passes() {
    for backend in BACKENDS {
        let rules = format!("*filter\n{FELIX}{FELIX_JUMP}{FLANNEL}{FELIX_LAST}COMMIT");
        overlay_passes_and_denied_port_does_not(&restore(backend, &rules));
    }
}

#[test]
fn kube_router_policy_holds_and_overlay_passes() {
    for backend in BACKENDS {
        overlay_passes_and_denied_port_does_not(&restore(backend, KUBE_ROUTER));
    }
}

#[test]
fn drop_appended_later_outranks_the_accepts() {
    let world = guarded("iptables-nft -P FORWARD DROP", &[]);
    eventually("the overlay passes", SOON, || reaches(&world, DENIED));
    sh(&world.node, "iptables-nft -A FORWARD -p tcp --dport 6666 -j DROP");
    eventually("the drop holds", SOON, || !reaches(&world, DENIED));
    assert!(reaches(&world, 8080));
    assert_eq!(accepts(&world), 2);
}

#[test]
fn felix_appended_again_outranks_the_accepts() {
    let rules = format!("*filter\n{FELIX}{FELIX_JUMP}{FELIX_LAST}COMMIT");
    let world = guarded(&restore("iptables-nft", &rules), &[]);
    eventually("the overlay passes", SOON, || reaches(&world, 8080));
    let again = format!("*filter\n{FELIX_JUMP}{FELIX_JUMP}{FELIX_LAST}COMMIT").replacen(
        "-A FORWARD",
        "-D FORWARD",
        1,
    );
    sh(&world.node, &format!("iptables-nft-restore --noflush <<'END'\n{again}\nEND\n"));
    eventually("the policy holds", SOON, || !reaches(&world, DENIED));
    assert!(reaches(&world, 8080));
}

#[test]
fn catch_all_added_later_lets_the_overlay_pass() {
    let chain = "add chain inet f c { type filter hook forward priority 0; }";
    let world = guarded(&format!("nft 'add table inet f; {chain}'"), &[]);
    eventually("the overlay passes", SOON, || reaches(&world, 8080));
    assert_eq!(accepts(&world), 0);
    sh(&world.node, "nft add rule inet f c reject");
    eventually("the overlay passes again", SOON, || reaches(&world, 8080));
    sh(&world.node, "nft flush chain inet f c");
    eventually("no accept is left", SOON, || accepts(&world) == 0);
}

#[test]
fn rewritten_chain_gets_its_accepts_again() {
    let setup = restore("iptables-nft", UFW);
    let world = guarded(&setup, &[]);
    eventually("the overlay passes", SOON, || reaches(&world, 8080));
    sh(&world.node, &setup);
    eventually("the overlay passes again", SOON, || reaches(&world, 8080));
    assert!(!reaches(&world, DENIED));
}

#[test]
fn accepts_are_readable_by_iptables() {
    let world = guarded("iptables-nft -P FORWARD DROP", &[]);
    let rule = "-A FORWARD -i weft+ -m comment --comment weft -j ACCEPT";
    let listed = || sh(&world.node, "iptables-nft -S FORWARD").contains(rule);
    eventually("iptables lists the accepts", SOON, listed);
}

#[test]
fn no_accept_rules_leaves_others_chains_alone() {
    let mut world = World::new();
    sh(&world.node, "iptables-nft -P FORWARD DROP; iptables-nft -P INPUT DROP");
    let save = || sh(&world.node, "iptables-nft-save -t filter | grep -v '^#'");
    let before = save();
    world.configure(config());
    world.start(&["--no-accept-rules"]);
    world.settle();
    let named = |chain: &str| world.problems().iter().any(|p| p.starts_with(chain));
    eventually("both chains are named", SOON, || {
        named("chain ip filter FORWARD drops") && named("chain ip filter INPUT drops")
    });
    let save = || sh(&world.node, "iptables-nft-save -t filter | grep -v '^#'");
    assert_eq!(save(), before);
    assert!(!reaches(&world, 8080));
}

#[test]
fn problem_goes_once_the_owner_accepts_the_overlay() {
    let world = guarded("iptables-nft -P FORWARD DROP", &["--no-accept-rules"]);
    eventually("the chain is named", SOON, || world.problems().len() == 1);
    sh(
        &world.node,
        "iptables-nft -A FORWARD -i weft4 -j ACCEPT; iptables-nft -A FORWARD -o weft4 -j ACCEPT",
    );
    eventually("the problem is gone", SOON, || world.problems().is_empty());
    assert!(reaches(&world, 8080));
}

#[test]
fn owned_table_is_named_with_its_owners_commands() {
    let mut world = World::new();
    let mut firewalld = Owner::start(&world.node);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("firewalld.nft");
    std::fs::write(&path, FIREWALLD.replace("firewalld {", "firewalld {\n flags owner;")).unwrap();
    firewalld.send(&format!("include \"{}\"", path.display()));
    let loaded = || sh(&world.node, "nft list tables").contains("firewalld");
    eventually("the table is loaded", SOON, loaded);
    world.configure(config());
    world.start(&[]);
    world.settle();
    eventually("both chains are named", SOON, || world.problems().len() == 2);
    for (chain, command) in [
        ("filter_FORWARD, which only firewalld", "--zone=trusted --add-interface=weft4"),
        ("filter_INPUT, which only firewalld", "--add-port=4879/udp"),
    ] {
        let problems = world.problems();
        let named = |p: &String| p.contains(chain) && p.contains(command);
        assert!(problems.iter().any(named), "{problems:?}");
    }
    firewalld.send("insert rule inet firewalld filter_FORWARD_ZONES iifname weft4 accept");
    firewalld.send("insert rule inet firewalld filter_FORWARD_ZONES oifname weft4 accept");
    firewalld.send("add rule inet firewalld filter_IN_internal_allow udp dport 4879 accept");
    eventually("the problems are gone", SOON, || world.problems().is_empty());
    assert!(reaches(&world, 8080));
}

#[test]
fn held_lock_of_iptables_is_named_and_delays_no_route() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let file = File::create(&path).unwrap();
    let held = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).unwrap();
    let mut world = World::new();
    sh(&world.node, "iptables-legacy -P FORWARD DROP");
    world.configure(config());
    let start = Instant::now();
    world.start_with("XTABLES_LOCKFILE", &path);
    world.settle();
    let took = start.elapsed();
    assert!(took < Duration::from_millis(1500), "the routes took {took:?}");
    let named = || world.problems().iter().any(|p| p.contains("has held the lock"));
    eventually("the lock is named", 2 * SOON, named);
    drop(held);
    eventually("the overlay passes", 3 * SOON, || reaches(&world, 8080));
    eventually("the problem is gone", SOON, || world.problems().is_empty());
}

/// Program that owns a table as long as it runs.
struct Owner(Child);

impl Owner {
    fn start(netns: &Netns) -> Self {
        let nft =
            inside(netns, "nft").arg("-i").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Self(nft.unwrap())
    }

    fn send(&mut self, command: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{command}").unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Number of accepts of ours in chains of nftables.
fn accepts(world: &World) -> usize {
    sh(&world.node, "nft list ruleset").matches("comment \"weft\"").count()
}
