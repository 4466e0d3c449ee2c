//! Accepts for the overlay in the chains of other firewalls that drop what they have no rule for.
//!
//! Accepting in our own table would not help: a packet passes only if all chains let it pass. Our
//! accepts stand where such a chain would drop a packet without a decision, never before a rule
//! that might: a drop of a NetworkPolicy engine holds. This waits for locks of other programs, so it is
//! a task of its own.

mod drop_points;
mod iptables;
mod nft;
mod pod_packets;
mod translations;
mod untracked;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::Cidr;
use fabric_api::fabric::{OVERLAY_PROBE_PORT, PacketDrop, VXLAN_PORT};
use fabric_runtime::chain;
use netlink::nft::{Chain, Hook};
use netlink::{ChurnLimiter, Netns, legacy_rules};
use tokio::sync::watch;
use tokio::time::sleep;

pub use drop_points::Way;
use drop_points::{Accept, Admitted, DropPoint, Rule};

use crate::foreign_routes::Foreign;

/// Marks our rules in chains of others.
const COMMENT: &str = "weft";
/// Pause before a next try after another program held a lock.
const RETRY: Duration = Duration::from_secs(5);
/// Minimum interval at which rules of the old packet filter are compared with those before.
const COMPARE: Duration = Duration::from_secs(1);
/// The same as a multiple of the processor time that it takes.
const COMPARE_COST: u32 = 300;

/// Treatment of chains of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Has accepts where they are needed.
    Accept,
    /// Has none, but reports where some are needed.
    Report,
    /// Has none.
    #[default]
    Remove,
}

/// State of the chains of others.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Chains that drop packets of the overlay.
    pub problems: BTreeSet<String>,
    /// Steps that could not be taken.
    pub failures: BTreeSet<String>,
    /// Chains that drop this node's own packets of the overlay or those for it, or may do so.
    pub drops: BTreeSet<Dropping>,
    /// Rules that let no packet of pods to peers pass as it is, or none back.
    pub faults: Vec<Foreign>,
    /// Chains of nftables that packets of the overlay go through.
    pub chains: BTreeSet<Chain>,
    changed: bool,
    /// Another program holds a lock.
    locked: bool,
    request: u64,
}

/// Chain that drops packets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dropping {
    /// It drops what it has no rule for, and may have one.
    pub is_uncertain: bool,
    pub drop: PacketDrop,
}

impl Found {
    /// Certain ones first.
    pub fn packet_drops(&self) -> Vec<PacketDrop> {
        self.drops.iter().map(|dropping| dropping.drop.clone()).collect()
    }

    fn add_problem(&mut self, drop: &PacketDrop) {
        self.problems.insert(format!("{}: {}", drop.cause, drop.remedy));
    }

    /// A rule of a chain takes packets, or may do so: one of a remainder counts once packets are missing.
    fn add_rule(&mut self, (hook, rule): (Hook, &Rule), is_remainder: bool, drop: PacketDrop) {
        if !is_remainder {
            self.add_problem(&drop);
        }
        let is_of_node = match hook {
            Hook::Forward => false,
            Hook::Input | Hook::Output => true,
            Hook::Ingress | Hook::Egress => rule.has_ports(),
            Hook::Prerouting | Hook::Postrouting => rule.is_for_overlay() || rule.has_ports(),
        };
        if is_of_node {
            self.drops.insert(Dropping { is_uncertain: is_remainder, drop });
        }
    }

    /// A chain drops what it has no rule for.
    fn add_chain(&mut self, hook: Hook, drop: PacketDrop) {
        // Rules by which it lets the node's own packets pass are not understood well enough.
        if hook != Hook::Output {
            self.add_problem(&drop);
        }
        if hook != Hook::Forward {
            self.drops.insert(Dropping { is_uncertain: true, drop });
        }
    }
}

/// Drops of what no rule decides about, from one base chain on.
struct Drops {
    points: BTreeSet<DropPoint>,
    by_interface: BTreeSet<DropPoint>,
    admitted: Admitted,
    /// Rules that drop some packets, and their chains.
    rules: Vec<(String, Rule)>,
}

/// Treatment of chains of others.
#[derive(Clone, Debug, Default)]
pub struct Treatment {
    pub mode: Mode,
    pub ways: Vec<Way>,
    /// UDP ports of WireGuard, of servers on this host. A manifest has the gateway listen there, and
    /// WireGuard answers nobody whose key it does not know, so they are let in like VXLAN.
    pub listen_ports: BTreeSet<u16>,
    /// Those of them whose peers are not connected.
    pub silent_ports: BTreeSet<u16>,
    /// Prefixes of peers.
    pub peers: BTreeSet<Cidr>,
    /// Pod CIDRs of this node, and devices that lead to pods.
    pub pods: BTreeSet<Cidr>,
    pub pod_devices: BTreeSet<String>,
    /// Addresses that the overlay runs on, of this node and of gateways.
    pub hosts: BTreeSet<IpAddr>,
    /// Those of them that gateways on this host send VXLAN to it from.
    pub links: BTreeSet<IpAddr>,
}

impl Treatment {
    /// Packets of the overlay or WireGuard that a rule takes, all of them.
    fn taken_by(&self, (hook, devices): (Hook, &BTreeSet<String>), rule: &Rule) -> Option<String> {
        if self.mode == Mode::Remove || rule.ours || !rule.is_possible_at(hook) {
            return None;
        }
        if rule.is_for_overlay() {
            return Some("packets of the overlay".to_owned());
        }
        match hook {
            Hook::Ingress if self.has_device(devices, Hook::Input) => self.incoming_by(rule),
            Hook::Egress if self.has_device(devices, Hook::Output) => self.outgoing_by(rule),
            Hook::Ingress | Hook::Egress => None,
            Hook::Forward => self.forwarded_by(hook, rule),
            Hook::Input => self.incoming_by(rule),
            Hook::Output => self.outgoing_by(rule),
            Hook::Prerouting => self.forwarded_by(hook, rule).or_else(|| self.incoming_by(rule)),
            Hook::Postrouting => self.forwarded_by(hook, rule).or_else(|| self.outgoing_by(rule)),
        }
    }

    fn forwarded_by(&self, hook: Hook, rule: &Rule) -> Option<String> {
        // On the gateway's host VXLAN is forwarded, too, by devices that no packet of a pod takes.
        let is_of_pods =
            |dev: &Option<String>| dev.as_ref().is_some_and(|dev| self.pod_devices.contains(dev));
        let ways = self.ways.iter();
        let ways = ways.filter(|way| is_of_pods(&way.incoming) || is_of_pods(&way.outgoing));
        if let Some(peer) = rule.peer(&self.peers, ways) {
            return Some(format!("packets of the peers' prefix {peer}"));
        }
        self.pods_that_meet(hook, rule).map(of_pods)
    }

    /// True if one of the devices is one that packets of the overlay, of this node or for it, take at a hook.
    fn has_device(&self, devices: &BTreeSet<String>, hook: Hook) -> bool {
        let ways = self.ways.iter().filter(|way| way.hook == hook);
        let mut taken = ways.filter_map(|way| way.incoming.as_ref().or(way.outgoing.as_ref()));
        taken.any(|dev| devices.contains(dev))
    }

    /// True unless the peer of a port that the rule takes packets of is not connected.
    fn is_remainder(&self, rule: &Rule) -> bool {
        rule.is_remainder(&self.hosts, &self.listen_ports)
            && rule.dports.first_of(&self.silent_ports).is_none()
    }

    fn incoming_by(&self, rule: &Rule) -> Option<String> {
        let ways = (Hook::Input, &*self.ways);
        let ports = (&[OVERLAY_PROBE_PORT].into(), &self.ports());
        // Packets of peers come from addresses that are not known here, those of a gateway here from none of a node.
        let from_others = || {
            let is_of_link = self.links.iter().any(|link| rule.is_from(*link));
            let of_links = Some(self.ports()).filter(|_| is_of_link && rule.interfaces.is_empty());
            let all = of_links.unwrap_or_else(|| self.listen_ports.clone());
            let rule = rule.of_all_sources();
            let port = |ports| rule.port(ways, (&BTreeSet::new(), ports), &self.hosts);
            port(&self.silent_ports).or_else(|| port(&all))
        };
        let port = rule.port(ways, ports, &self.hosts).or_else(from_others)?;
        let is_remainder = rule.is_remainder(&self.hosts, &self.listen_ports);
        Some(if is_remainder { "some " } else { "" }.to_owned() + &of_port(rule, port))
    }

    fn outgoing_by(&self, rule: &Rule) -> Option<String> {
        let ports = (&BTreeSet::new(), &[VXLAN_PORT, OVERLAY_PROBE_PORT].into());
        rule.port((Hook::Output, &self.ways), ports, &self.hosts).map(|port| of_port(rule, port))
    }

    /// UDP ports of this node that packets must reach.
    fn ports(&self) -> BTreeSet<u16> {
        self.listen_ports.iter().copied().chain([VXLAN_PORT]).collect()
    }

    /// Returns the ports of packets that nobody lets pass at a hook; no port at all are forwarded
    /// packets. `None` if all are let pass.
    fn missing(&self, hook: Hook, admitted: &Admitted) -> Option<BTreeSet<u16>> {
        match hook {
            Hook::Ingress | Hook::Egress | Hook::Prerouting | Hook::Postrouting => None,
            Hook::Forward => (!admitted.overlay).then(BTreeSet::new),
            Hook::Input | Hook::Output => {
                let ports = if hook == Hook::Input {
                    self.ports()
                } else {
                    [VXLAN_PORT, OVERLAY_PROBE_PORT].into()
                };
                let missing = &ports - &admitted.ports;
                Some(missing).filter(|missing| !missing.is_empty())
            }
        }
    }

    /// Returns whether accepts of ours stand in chains of a hook.
    fn accepts_at(&self, hook: Hook) -> bool {
        self.mode == Mode::Accept && matches!(hook, Hook::Input | Hook::Forward)
    }

    /// Accepts for the ports of this node, and for the answers to overlay probes: these come in by
    /// weft's devices, and a chain need not accept what is established. Nothing but answers gets so
    /// far (table `inet weft`).
    fn input_accepts(&self, from_port: String, to_port: fn(u16) -> String) -> BTreeSet<Accept> {
        let answers = Accept { matches: from_port, port: Some(OVERLAY_PROBE_PORT) };
        let to = |port| Accept { matches: to_port(port), port: Some(port) };
        self.ports().into_iter().map(to).chain([answers]).collect()
    }
}

#[derive(Clone, Debug, Default)]
struct Request {
    number: u64,
    treatment: Treatment,
}

/// Handle of the task that looks after the chains of others.
pub struct OtherFirewalls {
    requests: watch::Sender<Request>,
    found: watch::Receiver<Found>,
}

impl OtherFirewalls {
    pub fn start(netns: Netns) -> Self {
        let (requests, pending) = watch::channel(Request::default());
        let (results, found) = watch::channel(Found::default());
        tokio::spawn(work(netns, pending, results));
        Self { requests, found }
    }

    /// Has all chains looked at. Returns at once.
    pub fn request(&self, treatment: Treatment) -> u64 {
        let mut number = 0;
        self.requests.send_modify(|request| {
            number = request.number + 1;
            *request = Request { number, treatment: treatment.clone() };
        });
        number
    }

    /// Takes all accepts of ours away; returns what could not be done.
    pub async fn remove(&mut self) -> BTreeSet<String> {
        let number = self.request(Treatment::default());
        let done = self.found.wait_for(|found| found.request >= number).await;
        done.map(|found| found.failures.clone()).unwrap_or_default()
    }

    /// Returns after the next look. Can be cancelled without missing one.
    pub async fn changed(&mut self) {
        if self.found.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    pub fn found(&self) -> Found {
        self.found.borrow().clone()
    }
}

async fn work(netns: Netns, mut pending: watch::Receiver<Request>, results: watch::Sender<Found>) {
    let mut accepts = nft::Accepts::default();
    let mut limiter = ChurnLimiter::default();
    let (mut locked, mut legacy_rules) = (false, None);
    loop {
        let is_requested = pending.borrow().number > 0;
        tokio::select! {
            requested = pending.changed() => if requested.is_err() { return },
            () = sleep(RETRY), if locked => {}
            () = legacy_rules_changed(&netns, legacy_rules), if is_requested => {}
        }
        let Request { number, treatment } = pending.borrow_and_update().clone();
        let netns = netns.clone();
        let look = move || {
            let digest = || legacy_rules::digest(&netns).ok().map(|(digest, _)| digest);
            let before = digest();
            let found = ensure(&netns, &treatment, &mut accepts);
            // Rules that change meanwhile may not be those that were looked at. One that comes and goes meanwhile
            // shows in neither, and stays named until the next look if it was seen.
            let legacy_rules = before.filter(|_| before == digest());
            (found, accepts, legacy_rules)
        };
        let (mut found, state, digest) = match tokio::task::spawn_blocking(look).await {
            Ok(looked) => looked,
            Err(error) if error.is_cancelled() => return,
            Err(error) => {
                let failure =
                    format!("cannot look at other firewalls, by a fault of weft: {error}");
                let found = Found { failures: [failure].into(), ..Found::default() };
                (found, nft::Accepts::default(), None)
            }
        };
        (accepts, legacy_rules) = (state, digest);
        found.request = number;
        locked = found.locked;
        if found.changed {
            limiter.note();
        }
        results.send_replace(found);
        limiter.throttle().await;
    }
}

/// Returns when rules of the old packet filter, which notifies of nothing, are others than those of the last look.
/// Can be cancelled.
async fn legacy_rules_changed(netns: &Netns, looked_at: Option<legacy_rules::Digest>) {
    let mut interval = COMPARE;
    loop {
        sleep(interval).await;
        let netns = netns.clone();
        let read = tokio::task::spawn_blocking(move || legacy_rules::digest(&netns)).await;
        // A look reports what cannot be read.
        let Ok(Ok((digest, cost))) = read else { continue };
        if looked_at != Some(digest) {
            return;
        }
        interval = COMPARE.max(cost * COMPARE_COST);
    }
}

/// Takes away all accepts of ours; returns what could not be done.
pub fn remove(netns: &Netns) -> BTreeSet<String> {
    ensure(netns, &Treatment::default(), &mut nft::Accepts::default()).failures
}

fn ensure(netns: &Netns, treatment: &Treatment, accepts: &mut nft::Accepts) -> Found {
    let mut found = Found::default();
    if let Err(error) = accepts.ensure(netns, treatment, &mut found) {
        found.failures.insert(chain(&error));
    }
    iptables::ensure(netns, treatment, &mut found);
    if treatment.mode != Mode::Remove {
        for find in [translations::find, untracked::find] {
            let failure = find(netns, treatment, &mut found).err();
            found.failures.extend(failure.map(|error| chain(&error)));
        }
    }
    found
}

fn port_name(port: &u16) -> String {
    match *port {
        VXLAN_PORT => format!("{port} (VXLAN)"),
        OVERLAY_PROBE_PORT => format!("{port} (overlay probes)"),
        _ => format!("{port} (WireGuard)"),
    }
}

fn of_port(rule: &Rule, port: u16) -> String {
    let end = if rule.sports.is_empty() { "to" } else { "from" };
    format!("packets {end} UDP port {}", port_name(&port))
}

fn of_pods(pods: &Cidr) -> String {
    format!("packets between pods of {pods} and peers")
}

fn of_chain(Chain { family, table, name }: &Chain) -> String {
    format!("chain {} {table} {name}", family.name())
}

fn of_some_devices(chain: &str) -> String {
    format!("{chain}, for packets of some devices,")
}

/// Problem of a base chain whose policy takes packets, with the command that changes it.
fn policy_drop((chain, hook): (&str, Hook), taken: &str, removal: &str) -> PacketDrop {
    PacketDrop {
        cause: format!("{chain} (hook {hook}): its policy drops {taken}, which no rule accepts"),
        remedy: format!("have its owner accept them, or change the policy (`{removal}`)"),
    }
}

/// Problem of a chain that drops packets, with what its owner can do. `ports` are those that packets
/// to this node have.
fn remedy(chain: &str, (hook, ports): (Hook, &BTreeSet<u16>), firewalld: bool) -> PacketDrop {
    let packets = match hook {
        Hook::Ingress | Hook::Egress => "packets of devices",
        Hook::Prerouting | Hook::Forward | Hook::Postrouting => "forwarded packets",
        Hook::Input => "packets to this node",
        Hook::Output => "packets of this node",
    };
    let each = |format: fn(&u16) -> String| ports.iter().map(format).collect::<Vec<_>>();
    let accept = match (hook, firewalld) {
        (Hook::Prerouting | Hook::Forward | Hook::Postrouting, true) => {
            "firewall-cmd --permanent --zone=trusted --add-interface=weft4 \
             --add-interface=weft6; firewall-cmd --permanent --new-policy=weft; firewall-cmd \
             --permanent --policy=weft --add-ingress-zone=ANY; firewall-cmd --permanent \
             --policy=weft --add-egress-zone=trusted; firewall-cmd --permanent --policy=weft \
             --set-target=ACCEPT; firewall-cmd --reload"
                .to_owned()
        }
        (Hook::Input, true) => {
            let options = each(|port| format!("--add-port={port}/udp")).join(" ");
            format!("firewall-cmd --permanent {options}; firewall-cmd --reload")
        }
        (
            Hook::Ingress | Hook::Egress | Hook::Prerouting | Hook::Forward | Hook::Postrouting,
            _,
        ) => "let its owner accept what comes in or goes out by the devices weft4 and weft6"
            .to_owned(),
        (Hook::Input, false) | (Hook::Output, _) => {
            let ports = each(port_name);
            format!("let its owner accept UDP port {}", ports.join(" and "))
        }
    };
    let cause = format!("{chain} drops {packets} that no rule of it accepts");
    PacketDrop { cause, remedy: accept }
}
