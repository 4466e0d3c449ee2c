//! Points of other programs' chains at which packets that no rule decides about are dropped.
//!
//! An accept right before such a point lets the overlay pass and outranks no rule of anybody.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::OVERLAY_PROBE_PORT;
use netlink::nft::{self, AddressMatch, Condition, Hook, Interface, Ports, Verdict};
use netplan::{Family, names};

use super::COMMENT;

/// Number of the protocol.
const UDP: u8 = 17;
/// Accepts with which drops behind them are compared.
const MAX_ACCEPTS: usize = 256;

/// Rule of a chain, of either packet filter.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Position in its chain: a handle of nft, a line of iptables.
    pub(crate) id: String,
    pub(crate) ours: bool,
    pub(crate) condition: Condition,
    pub(crate) verdict: Verdict,
    /// Compares the type of the destination with that of this host's addresses. Not counted in `condition`.
    pub(crate) is_to_host: bool,
    /// Names the overlay's devices.
    pub(crate) names_overlay: bool,
    /// UDP ports that packets must have, if the rule names any.
    pub(crate) ports: BTreeSet<u16>,
    /// Devices that packets must come in or go out by, all of them.
    pub(crate) interfaces: Vec<Interface>,
    /// Prefixes that packets' addresses must be of, all of them.
    pub(crate) addresses: Vec<AddressMatch>,
    /// Family of IP that packets must be of, if the rule compares it.
    pub(crate) is_ipv4: Option<bool>,
    /// Protocol over IP and ports, if the rule compares them.
    pub(crate) protocol: Option<u8>,
    pub(crate) sports: Ports,
    pub(crate) dports: Ports,
    /// Compares states of connections.
    pub(crate) is_by_state: bool,
    /// More is compared than the above, and than what holds for each of the packets that the rule was read for: a
    /// decision about some only.
    pub(crate) is_narrow: bool,
    /// None of these packets meets it.
    pub(crate) spares_all: bool,
    /// Rules before it that accept some packets of its ports.
    pub(crate) accepts: Vec<Self>,
}

impl From<nft::Rule> for Rule {
    fn from(rule: nft::Rule) -> Self {
        let port = |value: &Vec<u8>| <[u8; 2]>::try_from(value.as_slice()).ok();
        Self {
            id: rule.handle.to_string(),
            ours: rule.comment.as_deref() == Some(COMMENT) && rule.verdict == Verdict::Accept,
            condition: rule.condition,
            is_to_host: rule.is_to_host,
            verdict: rule.verdict,
            names_overlay: rule.compared.iter().any(|value| value.starts_with(b"weft")),
            ports: rule.compared.iter().filter_map(port).map(u16::from_be_bytes).collect(),
            interfaces: rule.interfaces,
            addresses: rule.addresses,
            is_ipv4: rule.is_ipv4,
            protocol: rule.protocol,
            sports: rule.sports,
            dports: rule.dports,
            is_by_state: rule.is_by_state,
            is_narrow: rule.is_narrow || !rule.marks.is_empty(),
            spares_all: rule.spares_all,
            accepts: Vec::new(),
        }
    }
}

/// Packets that rules of their chains' owners let pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// Those by the overlay's devices.
    pub(crate) overlay: bool,
    pub(crate) ports: BTreeSet<u16>,
}

/// Accept of ours in a chain of another program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Accept {
    /// Condition, in the language of the packet filter.
    pub(crate) matches: String,
    /// UDP port in it.
    pub(crate) port: Option<u16>,
}

/// Devices that packets of the overlay come in and go out by at a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    pub hook: Hook,
    /// None if they are of this node.
    pub incoming: Option<String>,
    /// None if they are for this node.
    pub outgoing: Option<String>,
}

/// Place of an accept: in `chain`, before its rule number `index` or behind the last one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DropPoint {
    pub(crate) chain: String,
    pub(crate) index: usize,
}

impl Way {
    /// Returns true if these are the devices that the rule compares.
    fn has(&self, rule: &Rule) -> bool {
        let device = |incoming| if incoming { &self.incoming } else { &self.outgoing };
        let name = |incoming| device(incoming).as_deref().unwrap_or_default();
        rule.interfaces.iter().all(|of| of.matches(name(of.incoming)))
    }
}

/// Chains that every packet of a hook goes through, from a base chain on.
pub(crate) struct Walk<'a, E> {
    hook: Hook,
    /// Follow jumps by interface, too: zones are such chains.
    zones: bool,
    /// Ways of the packets that go through the chains.
    ways: Vec<&'a Way>,
    /// Devices that a packet has to come in or go out by to get into the present chain.
    dispatched: Vec<Interface>,
    load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    pub(crate) chains: BTreeMap<String, Vec<Rule>>,
    pub(crate) points: BTreeSet<DropPoint>,
    /// The same for packets of some devices only. These may be a policy's, so they get no accept.
    pub(crate) by_interface: BTreeSet<DropPoint>,
    pub(crate) admitted: Admitted,
    /// Rules that drop some packets, and their chains.
    pub(crate) drops: Vec<(String, Rule)>,
    /// Rules so far that accept some of all packets, at most [`MAX_ACCEPTS`].
    accepts: Vec<Rule>,
    /// The present chain is one for packets of some devices only.
    is_partial: bool,
    ends: BTreeMap<String, End>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Packets that no rule decided about go back to the caller.
    Returns,
    /// No packet comes back.
    Final,
}

impl<'a, E> Walk<'a, E> {
    pub(crate) fn new(
        hook: Hook,
        (zones, ways): (bool, &'a [Way]),
        load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    ) -> Self {
        let ways = ways.iter().filter(|way| way.hook == hook).collect();
        let (chains, points, by_interface, ends) = Default::default();
        let (dispatched, admitted, drops) = (Vec::new(), Admitted::default(), Vec::new());
        let (accepts, is_partial) = (Vec::new(), false);
        Self {
            hook,
            zones,
            ways,
            dispatched,
            load,
            chains,
            points,
            by_interface,
            admitted,
            drops,
            accepts,
            is_partial,
            ends,
        }
    }

    pub(crate) fn base_chain(&mut self, chain: &str, policy_drops: bool) -> Result<(), E> {
        if self.visit(chain)? == End::Returns && policy_drops {
            let index = self.chains.get(chain).map_or(0, Vec::len);
            self.points.insert(DropPoint { chain: chain.to_owned(), index });
        }
        self.by_interface.retain(|point| !self.points.contains(point));
        Ok(())
    }

    fn visit(&mut self, chain: &str) -> Result<End, E> {
        if let Some(end) = self.ends.get(chain) {
            return Ok(*end);
        }
        let rules = (self.load)(chain)?;
        // The kernel takes no loops; what is read while it changes may look like one.
        self.ends.insert(chain.to_owned(), End::Returns);
        self.chains.insert(chain.to_owned(), rules.clone());
        let mut certain = None;
        let end = self.visit_rules(chain, &rules, &mut certain)?;
        self.accepts.truncate(certain.unwrap_or(usize::MAX));
        self.ends.insert(chain.to_owned(), end);
        Ok(end)
    }

    /// `certain` becomes the number of accepts that are met by all packets which return to the caller: others leave the
    /// chain before the next one.
    fn visit_rules(
        &mut self,
        chain: &str,
        rules: &[Rule],
        certain: &mut Option<usize>,
    ) -> Result<End, E> {
        for (index, rule) in rules.iter().enumerate() {
            let at = DropPoint { chain: chain.to_owned(), index };
            let drops = rule.verdict == Verdict::Drop;
            if !rule.ours && !drops {
                self.admitted.overlay |= rule.names_overlay;
                self.admitted.ports.extend(&rule.ports);
            }
            let is_kept = !self.is_partial && self.accepts.len() < MAX_ACCEPTS;
            let may_matter = rule.may_cover() || rule.may_accept_ports();
            if rule.verdict == Verdict::Accept && may_matter && is_kept {
                self.accepts.push(rule.clone());
            }
            let is_met = || !self.accepts.iter().any(|accept| accept.covers(rule));
            if drops && rule.condition != Condition::Always && is_met() {
                let mut rule = rule.clone();
                rule.accepts = self.accepts_of(&rule);
                rule.interfaces.extend(self.dispatched.iter().cloned());
                self.drops.push((chain.to_owned(), rule));
            }
            if matches!(rule.verdict, Verdict::Return | Verdict::Goto(_) | Verdict::Other) {
                certain.get_or_insert(self.accepts.len());
            }
            match (self.condition(rule), &rule.verdict) {
                (Condition::Always, Verdict::Drop) => {
                    self.points.insert(at);
                    return Ok(End::Final);
                }
                (Condition::Always, Verdict::Accept) => return Ok(End::Final),
                (Condition::Always, Verdict::Return) => return Ok(End::Returns),
                (Condition::Always, Verdict::Goto(to)) => return self.follow(at, to),
                (Condition::Always, Verdict::Jump(to)) => {
                    if self.follow(at, to)? == End::Final {
                        return Ok(End::Final);
                    }
                }
                (Condition::Interface, Verdict::Jump(to) | Verdict::Goto(to))
                    if self.zones && !to.contains("_policy_") =>
                {
                    let was_partial = std::mem::replace(&mut self.is_partial, true);
                    self.visit(to)?;
                    self.is_partial = was_partial;
                }
                (Condition::Interface, Verdict::Jump(to) | Verdict::Goto(to))
                    if !self.zones && self.ways.iter().any(|way| way.has(rule)) =>
                {
                    self.dispatch(rule, to)?;
                }
                (Condition::Interface, Verdict::Drop)
                    if self.hook != Hook::Forward && self.ways.iter().any(|way| way.has(rule)) =>
                {
                    self.by_interface.insert(at);
                }
                (
                    Condition::Always | Condition::Interface | Condition::Other,
                    Verdict::Continue
                    | Verdict::Other
                    | Verdict::Translate
                    | Verdict::Untrack
                    | Verdict::Accept
                    | Verdict::Drop
                    | Verdict::Return
                    | Verdict::Jump(_)
                    | Verdict::Goto(_),
                ) => {}
            }
        }
        Ok(End::Returns)
    }

    /// Rules so far that accept some of the packets of a rule's ports.
    fn accepts_of(&self, rule: &Rule) -> Vec<Rule> {
        let is_met =
            |of: &Rule| of.interfaces.is_empty() || self.ways.iter().any(|way| way.has(of));
        let all = self.accepts.iter().filter(|accept| accept.may_spare(rule) && is_met(accept));
        all.cloned().collect()
    }

    /// Condition of a rule: among packets of some devices only, a comparison of these decides nothing.
    /// All that comes to INPUT is for this host, but for broadcasts, and nothing in the others.
    fn condition(&self, rule: &Rule) -> Condition {
        if rule.is_to_host && self.hook != Hook::Input {
            return Condition::Other;
        }
        let is_decided = !self.dispatched.is_empty() && rule.condition == Condition::Interface;
        if is_decided && self.ways.iter().all(|way| way.has(rule)) {
            return Condition::Always;
        }
        rule.condition
    }

    /// Goes into a chain to which a rule leads packets of some devices only.
    fn dispatch(&mut self, rule: &Rule, to: &str) -> Result<(), E> {
        let some = self.ways.iter().copied().filter(|way| way.has(rule)).collect();
        let ways = std::mem::replace(&mut self.ways, some);
        let (outer, was_partial) = (self.dispatched.len(), self.is_partial);
        self.is_partial = true;
        self.dispatched.extend(rule.interfaces.iter().cloned());
        let (points, ends) = (self.points.clone(), std::mem::take(&mut self.ends));
        self.visit(to)?;
        let found = std::mem::replace(&mut self.points, points);
        self.by_interface.extend(found.difference(&self.points).cloned());
        self.dispatched.truncate(outer);
        self.is_partial = was_partial;
        (self.ways, self.ends) = (ways, ends);
        Ok(())
    }

    /// Goes into a chain. If that does nothing but drop, or nothing but accept before it drops,
    /// the rule that leads there is the point: others may lead to the chain, too.
    fn follow(&mut self, from: DropPoint, to: &str) -> Result<End, E> {
        let end = self.visit(to)?;
        let point = self.points.iter().find(|point| point.chain == to).cloned();
        if let (End::Final, Some(point)) = (end, point) {
            let rules = self.chains.get(to).and_then(|rules| rules.get(..point.index));
            if is_plain(rules.unwrap_or_default()) {
                self.points.remove(&point);
                self.points.insert(from);
            }
        }
        Ok(end)
    }
}

fn is_plain(rules: &[Rule]) -> bool {
    let others = || rules.iter().filter(|rule| !rule.ours).map(|rule| &rule.verdict);
    others().all(|verdict| matches!(verdict, Verdict::Continue | Verdict::Drop))
        || others().all(|verdict| matches!(verdict, Verdict::Continue | Verdict::Accept))
}

impl Rule {
    /// Rule that all packets meet.
    pub(crate) fn of_all(id: String, verdict: Verdict) -> Self {
        Self {
            id,
            ours: false,
            condition: Condition::Always,
            verdict,
            is_to_host: false,
            names_overlay: false,
            ports: BTreeSet::new(),
            interfaces: Vec::new(),
            addresses: Vec::new(),
            is_ipv4: None,
            protocol: None,
            sports: Ports::default(),
            dports: Ports::default(),
            is_by_state: false,
            is_narrow: false,
            spares_all: false,
            accepts: Vec::new(),
        }
    }

    /// True if behind this rule there are fewer packets than before it, not all of them accepted.
    fn may_drop(&self) -> bool {
        !self.ours && !matches!(self.verdict, Verdict::Continue | Verdict::Accept)
    }

    /// False for a rule that compares more than is known of it.
    fn may_cover(&self) -> bool {
        self.is_known() && !self.has_ports()
    }

    fn may_accept_ports(&self) -> bool {
        self.is_known() && self.has_ports() && self.protocol == Some(UDP)
    }

    fn is_known(&self) -> bool {
        !self.is_narrow && !self.spares_all && !self.is_to_host
    }

    /// True if some of the packets that meet the other rule, which compares ports, may meet this one.
    fn may_spare(&self, other: &Self) -> bool {
        let meet = |own: &Ports, ports: &Ports| own.is_empty() || !own.is_disjoint(ports);
        other.has_ports()
            && self.protocol.is_none_or(|protocol| other.protocol == Some(protocol))
            && self.is_ipv4.is_none_or(|ipv4| other.is_ipv4.is_none_or(|other| ipv4 == other))
            && meet(&self.sports, &other.sports)
            && meet(&self.dports, &other.dports)
    }

    /// True if it takes what remains, which may be none of weft's: rules before it accept packets of these hosts, or some
    /// of a rule about WireGuard's ports, or it compares states of these or sources that not all of these hosts are.
    pub(crate) fn is_remainder(&self, hosts: &BTreeSet<IpAddr>, ports: &BTreeSet<u16>) -> bool {
        let has_port = self.dports.first_of(ports).is_some();
        let meets_host = |accept: &Self| accept.addresses.iter().all(|of| has_host(of, hosts));
        let mut sources = self.addresses.iter().filter(|of| of.source);
        let is_limited = self.is_by_state || sources.clone().any(|of| of.negated);
        has_port && (is_limited || !self.accepts.is_empty())
            || self.has_ports() && sources.any(|of| !has_host(of, hosts))
            || self.accepts.iter().any(meets_host)
    }

    /// True if it takes packets from an address.
    pub(crate) fn is_from(&self, ip: IpAddr) -> bool {
        let is_met = |of: &AddressMatch| {
            of.prefix.is_ipv4() == ip.is_ipv4() && of.prefix.contains(ip) != of.negated
        };
        self.addresses.iter().filter(|of| of.source).all(is_met)
    }

    /// The same rule about packets from everywhere.
    pub(crate) fn of_all_sources(&self) -> Self {
        let mut rule = self.clone();
        rule.addresses.retain(|of| !of.source);
        rule
    }

    /// True if all packets that meet the other rule meet this one.
    fn covers(&self, other: &Self) -> bool {
        let is_implied = |of: &AddressMatch| {
            let mut prefixes = other.addresses.iter().filter(|by| by.source == of.source);
            prefixes.any(|by| {
                let contains = of.prefix.overlaps(&by.prefix) && of.prefix.len() <= by.prefix.len();
                contains && !of.negated && !by.negated
            })
        };
        self.may_cover()
            && self.protocol.is_none_or(|protocol| other.protocol == Some(protocol))
            && self.is_ipv4.is_none_or(|is_ipv4| other.is_ipv4 == Some(is_ipv4))
            && self.interfaces.iter().all(|of| other.interfaces.contains(of))
            && self.addresses.iter().all(is_implied)
    }

    /// Returns whether packets may meet the rule at a hook: before routing they have no outgoing device.
    pub(crate) fn is_possible_at(&self, hook: Hook) -> bool {
        let mut outgoing = self.interfaces.iter().filter(|of| !of.incoming);
        hook != Hook::Prerouting || outgoing.all(|of| of.matches(""))
    }

    /// The peer's prefix whose forwarded packets the rule is about, if it is about nothing narrower.
    pub(crate) fn peer<'a, 'w>(
        &self,
        peers: &'a BTreeSet<Cidr>,
        ways: impl Iterator<Item = &'w Way>,
    ) -> Option<&'a Cidr> {
        let mut ways = ways.filter(|way| way.hook == Hook::Forward);
        let is_met = self.interfaces.is_empty() || ways.any(|way| way.has(self));
        if !is_met || self.is_narrow || self.protocol.is_some() || self.has_ports() {
            return None;
        }
        let is_of = |of: &AddressMatch, peer: &Cidr| !of.negated && of.prefix.overlaps(peer);
        peers.iter().find(|peer| self.addresses.iter().any(|of| is_of(of, peer)))
    }

    /// Returns the port if all UDP packets meet the rule that have it at one end and pass a hook, between
    /// these hosts at least.
    pub(crate) fn port(
        &self,
        (hook, ways): (Hook, &[Way]),
        (sports, dports): (&BTreeSet<u16>, &BTreeSet<u16>),
        hosts: &BTreeSet<IpAddr>,
    ) -> Option<u16> {
        let is_met = !self.is_narrow
            && self.protocol == Some(UDP)
            && self.addresses.iter().all(|of| has_host(of, hosts))
            && (self.is_by_overlay() || ways.iter().any(|way| way.hook == hook && way.has(self)));
        let port = match (self.sports.is_empty(), self.dports.is_empty()) {
            (true, false) => self.dports.first_of(dports),
            (false, true) => self.sports.first_of(sports),
            (true, true) | (false, false) => return None,
        };
        port.filter(|_| is_met)
    }

    /// Returns true if it exempts probes of gateways, or the answers, from connection tracking.
    pub(crate) fn untracks_probes(&self, hosts: &BTreeSet<IpAddr>) -> bool {
        let has_port = |ports: &Ports| ports.is_empty() || ports.contains(OVERLAY_PROBE_PORT);
        let is_by_weft = |of: &Interface| {
            [Family::Ipv4, Family::Ipv6].map(names::device).iter().any(|dev| of.matches(dev))
        };
        self.verdict == Verdict::Untrack
            && !self.is_narrow
            && self.protocol.is_none_or(|protocol| protocol == UDP)
            && has_port(&self.sports)
            && has_port(&self.dports)
            && self.interfaces.iter().all(is_by_weft)
            && self.addresses.iter().all(|of| has_host(of, hosts))
    }

    pub(crate) fn has_ports(&self) -> bool {
        !self.sports.is_empty() || !self.dports.is_empty()
    }

    /// Returns whether it names weft's devices and nothing narrower.
    pub(crate) fn is_for_overlay(&self) -> bool {
        !self.is_narrow
            && self.addresses.is_empty()
            && self.protocol.is_none()
            && self.is_by_overlay()
    }

    fn is_by_overlay(&self) -> bool {
        self.interfaces.iter().any(|of| !of.negated && of.name.starts_with("weft"))
    }
}

/// True for a match that one of these addresses meets.
fn has_host(of: &AddressMatch, hosts: &BTreeSet<IpAddr>) -> bool {
    hosts.iter().any(|ip| of.prefix.contains(*ip)) != of.negated
}

/// True if all accepts that `rules` has of ours are the `wanted` ones, right before rule `index`
/// but for rules that drop nothing.
pub(crate) fn are_in_place(rules: &[Rule], index: usize, wanted: &BTreeSet<Accept>) -> bool {
    let ours = |rules: &[Rule]| rules.iter().filter(|rule| rule.ours).count();
    let before = rules.get(..index).unwrap_or(rules);
    let last = before.iter().rposition(Rule::may_drop).map_or(0, |last| last + 1);
    let ports = rules.iter().filter(|rule| rule.ours).flat_map(|rule| rule.ports.iter().copied());
    ours(&before[last..]) == wanted.len()
        && ours(rules) == wanted.len()
        && ports.collect::<BTreeSet<_>>()
            == wanted.iter().filter_map(|accept| accept.port).collect()
}
