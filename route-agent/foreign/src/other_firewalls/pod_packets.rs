//! Rules of other programs about packets between this node's pods and peers.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::Cidr;
use fabric_api::fabric::PacketDrop;
use netlink::nft::{AddressMatch, ChainFamily, Condition, Hook, Interface, Verdict};
use netplan::{Family, names};

use super::drop_points::Rule;
use super::{Found, Mode, Treatment};
use crate::foreign_routes::Foreign;

/// Packets between a pod CIDR of this node and peers, of one direction, at a hook. Nothing translates their
/// addresses on this node.
#[derive(Clone, Copy)]
pub(super) struct Packets<'a> {
    pub(super) pods: &'a Cidr,
    pub(super) to_peers: bool,
    pub(super) hook: Hook,
}

impl Treatment {
    /// The pod CIDR whose packets to or from a peer all meet the rule.
    pub(super) fn pods_that_meet(&self, hook: Hook, rule: &Rule) -> Option<&Cidr> {
        let meet =
            |pods: &&Cidr| Packets::of(pods, hook).iter().any(|packets| self.meet(rule, *packets));
        self.pods.iter().find(meet)
    }

    /// True if all packets of pods to or from a peer meet the rule. One about a single pod is a policy.
    fn meet(&self, rule: &Rule, packets: Packets<'_>) -> bool {
        let Packets { pods, to_peers, .. } = packets;
        let mut of_pods = rule.addresses.iter().filter(|of| of.source == to_peers);
        let mut by_pods = rule.interfaces.iter().filter(|of| of.incoming == to_peers);
        !rule.is_narrow
            && rule.protocol.is_none()
            && !rule.has_ports()
            && self.may_meet(rule, packets)
            && of_pods.all(|of| holds(of, pods, true))
            && by_pods.all(|of| self.devices(packets, of).iter().all(|dev| of.matches(dev)))
    }

    /// True if no packet between pods and peers, of one direction, gets past the rule.
    fn all_meet(&self, rule: &Rule, packets: Packets<'_>) -> bool {
        let Packets { pods, to_peers, .. } = packets;
        let mut of_peers = rule.addresses.iter().filter(|of| of.source != to_peers);
        self.meet(rule, packets)
            && of_peers.all(|of| self.peers_like(pods).all(|peer| holds(of, peer, true)))
    }

    /// True unless states, devices or addresses leave all packets of pods to or from peers out that begin a connection.
    fn may_meet(&self, rule: &Rule, packets: Packets<'_>) -> bool {
        let Packets { pods, to_peers, .. } = packets;
        let is_by = |of: &Interface| self.devices(packets, of).iter().any(|dev| of.matches(dev));
        let is_of = |of: &AddressMatch| {
            if of.prefix.is_ipv4() != pods.is_ipv4() {
                false
            } else if of.source == to_peers {
                holds(of, pods, false)
            } else {
                self.peers_like(pods).any(|peer| holds(of, peer, false))
            }
        };
        !rule.spares_all
            && rule.is_ipv4.is_none_or(|is_ipv4| is_ipv4 == pods.is_ipv4())
            && rule.interfaces.iter().all(is_by)
            && rule.addresses.iter().all(is_of)
            && self.peers_like(pods).next().is_some()
    }

    /// Devices that packets come in by, or go out by, whichever a rule compares. Before routing they have none of
    /// the latter, which is compared as an empty name.
    fn devices(&self, packets: Packets<'_>, compared: &Interface) -> Vec<&str> {
        let has_no_other = matches!(packets.hook, Hook::Ingress | Hook::Prerouting);
        if has_no_other && !compared.incoming {
            vec![""]
        } else if compared.incoming == packets.to_peers {
            self.pod_devices.iter().map(String::as_str).collect()
        } else {
            [Family::Ipv4, Family::Ipv6].map(names::device).into()
        }
    }

    /// Peers' prefixes of the same family.
    fn peers_like(&self, pods: &Cidr) -> impl Iterator<Item = &Cidr> {
        let is_ipv4 = pods.is_ipv4();
        self.peers.iter().filter(move |peer| peer.is_ipv4() == is_ipv4)
    }
}

/// Base chain that a search begins at.
#[derive(Clone, Copy)]
pub(super) struct Start<'a> {
    pub(super) family: ChainFamily,
    pub(super) hook: Hook,
    /// Devices whose packets it gets, if its hook is one of devices.
    pub(super) devices: &'a BTreeSet<String>,
    pub(super) chain: &'a str,
    /// Its policy: what no rule decides about is dropped.
    pub(super) drops: bool,
    /// Accepts of ours may stand in chains for packets of some devices, too.
    pub(super) has_accepts_inside: bool,
}

/// Walk of the packets of pods to or from peers through chains, until a rule has a verdict on all of them.
pub(super) struct Search<'a, E> {
    treatment: &'a Treatment,
    packets: Packets<'a>,
    /// A drop of all that is forwarded gets an accept, or is reported with its chain.
    has_accepts: bool,
    has_accepts_inside: bool,
    wanted: Verdict,
    load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    /// Chains, and whether they leave nothing to decide.
    pub(super) visited: BTreeMap<String, bool>,
    /// The first rule with the wanted verdict, and its chain.
    pub(super) found: Option<(String, Rule)>,
    /// No rule before it decides about some of the packets.
    pub(super) is_certain: bool,
}

impl<'a, E> Search<'a, E> {
    pub(super) fn new(
        (treatment, packets): (&'a Treatment, Packets<'a>),
        wanted: Verdict,
        load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    ) -> Self {
        let has_accepts = packets.hook == Hook::Forward;
        let (visited, found) = (BTreeMap::new(), None);
        Self {
            treatment,
            packets,
            has_accepts,
            has_accepts_inside: false,
            wanted,
            load,
            visited,
            found,
            is_certain: true,
        }
    }

    /// Returns true once nothing is left to decide.
    pub(super) fn visit(&mut self, chain: &str) -> Result<bool, E> {
        if let Some(is_decided) = self.visited.get(chain) {
            return Ok(*is_decided);
        }
        // The kernel takes no loops; what is read while it changes may look like one.
        self.visited.insert(chain.to_owned(), false);
        let is_decided = self.visit_rules(chain)?;
        self.visited.insert(chain.to_owned(), is_decided);
        Ok(is_decided)
    }

    fn visit_rules(&mut self, chain: &str) -> Result<bool, E> {
        for rule in (self.load)(chain)? {
            let all = self.treatment.all_meet(&rule, self.packets);
            let is_met = all || self.treatment.meet(&rule, self.packets);
            let is_drop_point = self.has_accepts
                && rule.verdict == Verdict::Drop
                && rule.condition == Condition::Always;
            if is_met && rule.verdict == self.wanted && !is_drop_point {
                self.found = Some((chain.to_owned(), rule));
                return Ok(true);
            }
            match &rule.verdict {
                Verdict::Continue | Verdict::Untrack => continue,
                Verdict::Accept | Verdict::Drop | Verdict::Translate if all => return Ok(true),
                Verdict::Return if all => return Ok(false),
                Verdict::Jump(to) | Verdict::Goto(to) if is_met => {
                    let is_goto = matches!(rule.verdict, Verdict::Goto(_));
                    let is_end = self.follow(&rule, to)?;
                    self.note_jump(chain, &rule);
                    let is_decided = is_end && (all || self.found.is_some());
                    self.is_certain &= is_decided || !is_end && (all || !is_goto);
                    if is_decided || all && is_goto {
                        return Ok(is_decided);
                    }
                }
                // The rest still has to pass a later drop.
                Verdict::Drop => {}
                Verdict::Accept
                | Verdict::Return
                | Verdict::Translate
                | Verdict::Jump(_)
                | Verdict::Goto(_)
                | Verdict::Other => {
                    self.is_certain &= !self.treatment.may_meet(&rule, self.packets);
                }
            }
        }
        Ok(false)
    }

    /// Restricts a rule found behind a jump to the packets that the jump is about. If the rule takes all that come there,
    /// others may come as well, and the jump is what takes these.
    fn note_jump(&mut self, chain: &str, jump: &Rule) {
        let Some((at, rule)) = &mut self.found else { return };
        rule.addresses.extend(jump.addresses.iter().cloned());
        if rule.condition == Condition::Always && jump.condition != Condition::Always {
            let addresses = std::mem::take(&mut rule.addresses);
            (*at, *rule) = (chain.to_owned(), Rule { addresses, ..jump.clone() });
        }
    }

    /// Goes into a chain that a rule leads to. No accept is put into one for some packets only.
    fn follow(&mut self, rule: &Rule, to: &str) -> Result<bool, E> {
        let is_for_all = rule.condition == Condition::Always || self.has_accepts_inside;
        let had_accepts = self.has_accepts;
        self.has_accepts &= is_for_all;
        let is_decided = self.visit(to);
        self.has_accepts = had_accepts;
        is_decided
    }
}

impl Treatment {
    /// Calls `add` with each rule from a chain on that drops all packets between a pod CIDR and a peer, of
    /// one direction, if none before it decides about some of them; without a rule if the policy does. Returns the
    /// chains that these packets go through.
    pub(super) fn find_faults<E>(
        &self,
        start: Start<'_>,
        load: &mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
        add: &mut dyn FnMut(Packets<'_>, &str, Option<&Rule>),
    ) -> Result<BTreeSet<String>, E> {
        let mut visited = BTreeSet::new();
        let pods = self.pods_of(start.family).filter(|_| self.mode != Mode::Remove);
        let all = pods.flat_map(|pods| Packets::of(pods, start.hook));
        for packets in all.filter(|packets| self.pass(&start, packets.to_peers)) {
            let mut search = Search::new((self, packets), Verdict::Drop, load);
            search.has_accepts_inside = start.has_accepts_inside;
            let is_decided = search.visit(start.chain)?;
            visited.extend(search.visited.into_keys());
            // Forwarded packets have an accept against the policy, or it is reported with its chain.
            let is_left = start.drops && !is_decided && start.hook != Hook::Forward;
            match search.found.filter(|_| search.is_certain) {
                Some((chain, rule)) => add(packets, &chain, Some(&rule)),
                None if is_left && search.is_certain => add(packets, start.chain, None),
                None => {}
            }
        }
        Ok(visited)
    }

    /// Returns true if all packets of one direction pass the hook: each comes in by one device and goes out by another.
    fn pass(&self, start: &Start<'_>, to_peers: bool) -> bool {
        let of_pods = match start.hook {
            Hook::Ingress => to_peers,
            Hook::Egress => !to_peers,
            Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Output | Hook::Postrouting => {
                return true;
            }
        };
        if of_pods {
            !self.pod_devices.is_empty() && self.pod_devices.is_subset(start.devices)
        } else {
            let overlay = [Family::Ipv4, Family::Ipv6].map(names::device);
            overlay.iter().any(|dev| start.devices.contains(*dev))
        }
    }

    /// Pod CIDRs whose packets go through chains of a family.
    pub(super) fn pods_of(&self, family: ChainFamily) -> impl Iterator<Item = &Cidr> {
        self.pods.iter().filter(move |pods| match family {
            ChainFamily::Inet | ChainFamily::Netdev => true,
            ChainFamily::Ip => pods.is_ipv4(),
            ChainFamily::Ip6 => !pods.is_ipv4(),
        })
    }

    /// Adds a fault of all packets between pods and peers of one direction, by a rule or a policy. It is a problem,
    /// too, if it is none yet.
    pub(super) fn add_fault(
        &self,
        found: &mut Found,
        (rule, Packets { pods, to_peers, .. }): (Option<&Rule>, Packets<'_>),
        (drop, removal): (&PacketDrop, String),
    ) {
        let is_named = |problem: &String| problem.contains(&format!("`{removal}`"));
        if !found.problems.iter().any(is_named) {
            found.add_problem(drop);
        }
        let holds_for = |peer: &&Cidr| {
            let addresses = rule.iter().flat_map(|rule| &rule.addresses);
            let mut of_peers = addresses.filter(|of| of.source != to_peers);
            of_peers.all(|of| holds(of, peer, true))
        };
        let prefixes: Vec<Cidr> = self.peers_like(pods).filter(holds_for).copied().collect();
        if let Some(known) = found.faults.iter_mut().find(|known| known.removal == removal) {
            let more = prefixes.into_iter().filter(|prefix| !known.prefixes.contains(prefix));
            return known.prefixes.extend(more.collect::<Vec<_>>());
        }
        let problem = format!("{}: {}", drop.cause, drop.remedy);
        let cause = Some(drop.cause.clone());
        found.faults.push(Foreign { problem, removal, cause, prefixes });
    }
}

impl<'a> Packets<'a> {
    fn of(pods: &'a Cidr, hook: Hook) -> [Self; 2] {
        [true, false].map(|to_peers| Self { pods, to_peers, hook })
    }
}

/// True if an address match holds for all addresses of a prefix, or for some.
fn holds(of: &AddressMatch, prefix: &Cidr, all: bool) -> bool {
    let overlaps = of.prefix.overlaps(prefix);
    let contains = overlaps && of.prefix.len() <= prefix.len();
    match (of.negated, all) {
        (false, true) => contains,
        (false, false) => overlaps,
        (true, true) => !overlaps,
        (true, false) => !contains,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn rule(interfaces: &[(bool, &str)], verdict: Verdict) -> Rule {
        let interface = |(incoming, name): &(bool, &str)| Interface {
            incoming: *incoming,
            name: (*name).to_owned(),
            is_prefix: false,
            negated: false,
        };
        Rule {
            condition: Condition::Interface,
            interfaces: interfaces.iter().map(interface).collect(),
            ..Rule::of_all("1".to_owned(), verdict)
        }
    }

    /// Number of faults that chains make on a node with these devices of pods.
    fn faults(devices: &[&str], chains: &BTreeMap<&str, Vec<Rule>>) -> usize {
        let treatment = Treatment {
            mode: Mode::Accept,
            peers: ["10.201.0.0/16".parse().unwrap()].into(),
            pods: ["10.200.1.0/24".parse().unwrap()].into(),
            pod_devices: devices.iter().map(|dev| (*dev).to_owned()).collect(),
            ..Treatment::default()
        };
        let mut load =
            |name: &str| Ok::<_, Infallible>(chains.get(name).cloned().unwrap_or_default());
        let mut count = 0;
        let add = &mut |_: Packets<'_>, _: &str, _: Option<&Rule>| count += 1;
        let (family, hook, chain) = (ChainFamily::Ip, Hook::Forward, "base");
        let devices = &BTreeSet::new();
        let start = Start { family, hook, devices, chain, drops: false, has_accepts_inside: false };
        let Ok(_) = treatment.find_faults(start, &mut load, add);
        count
    }

    #[test]
    fn drop_for_one_pods_device_is_no_fault() {
        let chains = BTreeMap::from([("base", vec![rule(&[(true, "veth1")], Verdict::Drop)])]);
        assert_eq!(faults(&["veth1"], &chains), 1);
        assert_eq!(faults(&["veth1", "veth2"], &chains), 0);
    }

    #[test]
    fn rule_that_may_accept_leaves_a_drop_uncertain() {
        let drop = || rule(&[(false, "weft4")], Verdict::Drop);
        let narrow = Rule { is_narrow: true, ..rule(&[], Verdict::Accept) };
        let elsewhere = Rule { is_narrow: true, ..rule(&[(false, "eth0")], Verdict::Accept) };
        assert_eq!(faults(&["cni0"], &BTreeMap::from([("base", vec![narrow, drop()])])), 0);
        assert_eq!(faults(&["cni0"], &BTreeMap::from([("base", vec![elsewhere, drop()])])), 1);
        let accept = rule(&[(true, "cni0")], Verdict::Accept);
        let chains = BTreeMap::from([
            ("base", vec![rule(&[], Verdict::Goto("next".to_owned())), drop()]),
            ("next", vec![accept]),
        ]);
        assert_eq!(faults(&["cni0"], &chains), 0, "nothing comes back from a goto");
    }
}
