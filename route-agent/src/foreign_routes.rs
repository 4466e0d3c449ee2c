//! Routes and rules of others that take packets between pods and peers away from weft's rules. They are
//! named, and left alone.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use fabric_api::Cidr;
use fabric_api::fabric::Diversion;
use jiff::Timestamp;
use netlink::{ForeignAction, ForeignRoute, ForeignRule, Handle, LOCAL_TABLE, NetlinkError};
use netplan::{Family, Firewall, RouteKey};

use crate::names::{
    self, GATEWAY_PROTOCOL, MAIN_TABLE, POD_ROUTES_PRIORITY, PRIORITY, PROTOCOL, TABLE,
};

/// A rule or route, and what it does.
pub(crate) struct Foreign {
    pub(crate) problem: String,
    /// Command that removes it.
    pub(crate) removal: String,
    /// The peers' prefixes of which it takes packets.
    pub(crate) prefixes: Vec<Cidr>,
}

/// Those of both families.
pub(crate) async fn find(
    handle: &Handle,
    firewall: &Firewall,
) -> Result<Vec<Foreign>, NetlinkError> {
    let mut found = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        let traffic = Traffic::of(firewall, family);
        let routes = handle.table_routes(family, TABLE).await?;
        let foreign = routes.iter().filter(|route| !is_wefts(route));
        found.extend(foreign.map(|route| foreign_route(route, family, &traffic.peers)));
        let rules = handle.all_rules(family).await?;
        let before_pods = preceding(&rules, POD_ROUTES_PRIORITY).count();
        let candidates: Vec<_> = preceding(&rules, PRIORITY)
            .enumerate()
            .map(|(index, rule)| (rule, index < before_pods && traffic.may_take_from_peers(rule)))
            .filter(|(rule, from_peers)| *from_peers || traffic.may_take_to_peers(rule))
            .collect();
        let looks_up = |(rule, from_peers): &(&ForeignRule, bool)| {
            let ForeignAction::Lookup(table, _) = rule.action else { return Vec::new() };
            if *from_peers { vec![table, MAIN_TABLE] } else { vec![table] }
        };
        let wanted: BTreeSet<u32> = candidates.iter().flat_map(looks_up).collect();
        let mut tables = Tables::new();
        for table in wanted {
            tables.insert(table, handle.table_routes(family, table).await?);
        }
        for (rule, from_peers) in candidates {
            let from_peers = from_peers && traffic.takes_from_peers(rule, &tables);
            let taken = Taken {
                to: if traffic.may_take_to_peers(rule) {
                    taken(rule, &traffic.peers, &tables)
                } else {
                    Vec::new()
                },
                from: if from_peers { traffic.senders(rule) } else { Vec::new() },
            };
            if taken.is_empty() {
                continue;
            }
            let local = tables.get(&LOCAL_TABLE).map(Vec::as_slice).unwrap_or_default();
            found.push(match rule.action {
                ForeignAction::Lookup(LOCAL_TABLE, _) => local_route(local, family, taken.to),
                ForeignAction::Lookup(..)
                | ForeignAction::Goto(_)
                | ForeignAction::Refuse(_)
                | ForeignAction::Nothing => foreign_rule(rule, family, taken),
            });
        }
    }
    Ok(found)
}

type Tables = BTreeMap<u32, Vec<ForeignRoute>>;

/// Peers' prefixes of which a rule takes packets, by direction.
struct Taken {
    to: Vec<Cidr>,
    /// Packets from there to pods of this node.
    from: Vec<Cidr>,
}

/// Packets of one family that weft routes.
struct Traffic<'a> {
    peers: Vec<Cidr>,
    pods: Vec<Cidr>,
    /// Devices by which no pod is reached.
    exits: &'a BTreeSet<String>,
}

/// Makes `noted` what was found, with the times at which it was found first.
pub(crate) fn note(noted: &mut Vec<Diversion>, found: &[Foreign]) {
    let before = std::mem::take(noted);
    for foreign in found.iter().filter(|foreign| !foreign.prefixes.is_empty()) {
        let removal = foreign.removal.clone();
        let known = before.iter().find(|of| of.removal == removal).map(|of| of.since.clone());
        let since = known.unwrap_or_else(|| format!("{:.3}", Timestamp::now()));
        let prefixes = foreign.prefixes.iter().map(ToString::to_string).collect();
        noted.push(Diversion { removal, prefixes, since });
    }
}

fn is_wefts(route: &ForeignRoute) -> bool {
    [PROTOCOL, GATEWAY_PROTOCOL].contains(&route.protocol)
}

/// Rules of others that the kernel comes to before weft's own of a priority.
fn preceding(rules: &[ForeignRule], priority: u32) -> impl Iterator<Item = &ForeignRule> {
    let is_ours = |rule: &ForeignRule| rule.protocol == PROTOCOL;
    let precedes = move |rule: &&ForeignRule| {
        rule.priority < priority || rule.priority == priority && !is_ours(rule)
    };
    rules.iter().take_while(precedes).filter(move |rule| !is_ours(rule))
}

impl Taken {
    fn is_empty(&self) -> bool {
        self.to.is_empty() && self.from.is_empty()
    }
}

impl<'a> Traffic<'a> {
    fn of(firewall: &'a Firewall, family: Family) -> Self {
        let of_family = |prefixes: &BTreeSet<Cidr>| {
            prefixes.iter().filter(|of| Family::of_prefix(of) == family).copied().collect()
        };
        let (peers, pods) = (of_family(&firewall.peers), of_family(&firewall.local_pods));
        Self { peers, pods, exits: &firewall.exits }
    }

    /// True unless its selectors leave all packets from pods to peers out.
    fn may_take_to_peers(&self, rule: &ForeignRule) -> bool {
        !is_about_others(rule)
            && !rule.iif.as_deref().is_some_and(|iif| iif == "lo" || is_overlay(iif))
            && touches(rule.to, &self.peers)
            && touches(rule.from, &self.pods)
    }

    /// True unless its selectors leave all packets from peers to pods out.
    fn may_take_from_peers(&self, rule: &ForeignRule) -> bool {
        !is_about_others(rule)
            && !self.pods.is_empty()
            && rule.iif.as_deref().is_none_or(is_overlay)
            && touches(rule.to, &self.pods)
            && touches(rule.from, &self.peers)
    }

    /// Peers' prefixes that the rule's source selects.
    fn senders(&self, rule: &ForeignRule) -> Vec<Cidr> {
        let selects = |peer: &&Cidr| rule.from.is_none_or(|from| from.overlaps(peer));
        self.peers.iter().filter(selects).copied().collect()
    }

    /// True if packets to pods would take another way than the main table's routes to them.
    fn takes_from_peers(&self, rule: &ForeignRule, tables: &Tables) -> bool {
        match rule.action {
            ForeignAction::Nothing | ForeignAction::Lookup(LOCAL_TABLE, _) => false,
            ForeignAction::Refuse(_) => true,
            ForeignAction::Goto(next) => next > POD_ROUTES_PRIORITY,
            ForeignAction::Lookup(table, suppressed) => {
                let in_table = |table| tables.get(&table).map(Vec::as_slice).unwrap_or_default();
                let (routes, main) = (in_table(table), in_table(MAIN_TABLE));
                let routes: Vec<_> = routes.iter().filter(|r| counts(r, suppressed)).collect();
                let leads_to_pods = |route: &ForeignRoute| {
                    !route.to.is_everything()
                        && (table == MAIN_TABLE
                            || route.kind == "throw"
                            || self.is_way_to_pods(route, main))
                };
                let (good, bad): (Vec<_>, Vec<_>) =
                    routes.into_iter().partition(|route| leads_to_pods(route));
                let mut pods = self.pods.iter().filter_map(|pods| common(*pods, rule.to));
                pods.any(|pods| {
                    let is_shadowed = |bad: &ForeignRoute| {
                        let covers = |route: &&ForeignRoute| {
                            route.to.len() > bad.to.len()
                                && common(route.to, Some(pods)) == Some(pods)
                        };
                        good.iter().any(covers)
                    };
                    bad.iter().any(|bad| bad.to.overlaps(&pods) && !is_shadowed(bad))
                })
            }
        }
    }

    /// True for a CNI's route in a table of its own: it leaves the node by no device of the underlay,
    /// and the main table has no other way there.
    fn is_way_to_pods(&self, route: &ForeignRoute, main: &[ForeignRoute]) -> bool {
        let is_exit = route.dev.as_ref().is_some_and(|dev| self.exits.contains(dev));
        let mut same =
            main.iter().filter(|m| !m.to.is_everything() && m.to.overlaps(&route.to)).peekable();
        let agrees = same.peek().is_none() || same.any(|main| main.dev == route.dev);
        route.kind.is_empty() && !is_exit && agrees
    }
}

/// Marks without more are a decision of their owner about some packets only.
fn is_about_others(rule: &ForeignRule) -> bool {
    rule.is_narrow || !rule.mark.is_empty() && rule.to.is_none() && rule.iif.is_none()
}

fn is_overlay(device: &str) -> bool {
    [Family::Ipv4, Family::Ipv6].map(names::device).contains(&device)
}

fn touches(prefix: Option<Cidr>, of: &[Cidr]) -> bool {
    prefix.is_none_or(|prefix| of.iter().any(|other| other.overlaps(&prefix)))
}

/// Addresses that both have.
fn common(a: Cidr, b: Option<Cidr>) -> Option<Cidr> {
    let Some(b) = b else { return Some(a) };
    a.overlaps(&b).then_some(if a.len() < b.len() { b } else { a })
}

/// True if a lookup that suppresses prefixes up to a length finds the route.
fn counts(route: &ForeignRoute, suppressed: Option<u32>) -> bool {
    suppressed.is_none_or(|len| u32::from(route.to.len()) > len)
}

/// The peers' prefixes whose packets the rule takes.
fn taken(rule: &ForeignRule, peers: &[Cidr], tables: &Tables) -> Vec<Cidr> {
    let to = |peer: &&Cidr| rule.to.is_none_or(|to| to.overlaps(peer));
    let concerned = peers.iter().filter(to).copied();
    match rule.action {
        ForeignAction::Nothing => Vec::new(),
        ForeignAction::Refuse(_) => concerned.collect(),
        ForeignAction::Goto(next) => concerned.filter(|_| next > PRIORITY).collect(),
        ForeignAction::Lookup(table, suppressed) => {
            let routes = tables.get(&table).map(Vec::as_slice).unwrap_or_default();
            let takes = |route: &&ForeignRoute| route.kind != "throw" && counts(route, suppressed);
            let has_route =
                |peer: &Cidr| routes.iter().filter(takes).any(|route| route.to.overlaps(peer));
            concerned.filter(has_route).collect()
        }
    }
}

fn foreign_route(route: &ForeignRoute, family: Family, peers: &[Cidr]) -> Foreign {
    let mut text = [route.kind, " "].concat().trim_start().to_owned() + &route.to.to_string();
    if let Some(gateway) = route.gateway {
        text += &format!(" via {gateway}");
    }
    // The kernel chooses the device of an unreachable IPv6 route.
    if let Some(dev) = route.dev.as_ref().filter(|_| route.kind.is_empty()) {
        text += &format!(" dev {dev}");
    }
    if route.metric != 0 {
        text += &format!(" metric {}", route.metric);
    }
    let removal = format!("ip {}route del {text} table {TABLE}", option(family));
    let problem = format!(
        "the route `{text}` in table {TABLE}, which is weft's, is another program's and takes packets: \
         have its owner use another table, or remove it (`{removal}`)"
    );
    // A wider one comes after weft's own, and so does one of the same prefix with a higher metric.
    let takes = |peer: &&Cidr| match route.to.len().cmp(&peer.len()) {
        Ordering::Less => false,
        Ordering::Equal => route.metric <= RouteKey::METRIC,
        Ordering::Greater => true,
    };
    let prefixes = peers.iter().filter(|peer| peer.contains(route.to.address()));
    let prefixes = prefixes.filter(takes).copied().collect();
    Foreign { problem, removal, prefixes }
}

/// First route in the local table that takes packets to these prefixes.
fn local_route(routes: &[ForeignRoute], family: Family, prefixes: Vec<Cidr>) -> Foreign {
    let takes = |route: &&ForeignRoute| {
        route.kind != "throw" && prefixes.iter().any(|peer| route.to.overlaps(peer))
    };
    let to = routes.iter().find(takes).map(|route| route.to.to_string()).unwrap_or_default();
    let peer = prefixes.first().map(ToString::to_string).unwrap_or_default();
    let removal = format!("ip {}route del {to} table local", option(family));
    let problem = format!(
        "the route {to} in the kernel's table local takes packets to {peer}: have its owner remove it \
         (`{removal}`)"
    );
    Foreign { problem, removal, prefixes }
}

fn foreign_rule(rule: &ForeignRule, family: Family, taken: Taken) -> Foreign {
    let mut selectors = format!("priority {}", rule.priority);
    let mut select = |name: &str, value: Option<String>| {
        selectors += &value.map(|value| format!(" {name}{value}")).unwrap_or_default();
    };
    select("from ", rule.from.map(|from| from.to_string()));
    select("to ", rule.to.map(|to| to.to_string()));
    select("iif ", rule.iif.clone());
    let parts = [&rule.mark, &rule.ports].map(|part| Some(part.clone()).filter(|p| !p.is_empty()));
    let is_part = parts.iter().any(Option::is_some);
    parts.into_iter().for_each(|part| select("", part));
    let action = match rule.action {
        ForeignAction::Lookup(table, suppressed) => {
            let suppress = suppressed.map(|len| format!(" suppress_prefixlength {len}"));
            format!("table {table}{}", suppress.unwrap_or_default())
        }
        ForeignAction::Goto(next) => format!("goto {next}"),
        ForeignAction::Refuse(kind) => kind.to_owned(),
        ForeignAction::Nothing => "nop".to_owned(),
    };
    let removal = format!("ip {}rule del {selectors} {action}", option(family));
    let packets = if is_part { "a part of the packets" } else { "packets" };
    let to = taken.to.first().map(|peer| format!("to {peer}"));
    let from = taken.from.first().map(|peer| format!("from {peer} to this node's pods"));
    let what = [to, from].into_iter().flatten().collect::<Vec<_>>().join(" and ");
    let first = if taken.from.is_empty() { PRIORITY } else { POD_ROUTES_PRIORITY };
    let problem = format!(
        "the {family} rule `{selectors} {action}` comes before weft's of priority {first} and takes {packets} \
         {what}: have its owner give it a priority over {PRIORITY}, or remove it (`{removal}`)"
    );
    let prefixes: BTreeSet<Cidr> = taken.to.into_iter().chain(taken.from).collect();
    Foreign { problem, removal, prefixes: prefixes.into_iter().collect() }
}

/// Option of `ip`.
fn option(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "",
        Family::Ipv6 => "-6 ",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn rule(priority: u32, action: ForeignAction) -> ForeignRule {
        let (from, to, iif) = (None, None, None);
        let (ports, mark) = (String::new(), String::new());
        ForeignRule { priority, from, to, iif, ports, mark, is_narrow: false, action, protocol: 3 }
    }

    fn route(to: &str) -> ForeignRoute {
        let (gateway, dev) = (None, Some("eth0".to_owned()));
        let (table, to) = (MAIN_TABLE, cidr(to));
        ForeignRoute { table, to, metric: 0, kind: "", gateway, dev, protocol: 3 }
    }

    #[test]
    fn rules_behind_wefts_take_nothing() {
        let lookup = ForeignAction::Lookup(254, None);
        let ours = |priority| ForeignRule { protocol: PROTOCOL, ..rule(priority, lookup.clone()) };
        let rules = [
            rule(0, ForeignAction::Lookup(255, None)),
            ours(POD_ROUTES_PRIORITY),
            rule(PRIORITY, lookup.clone()),
            ours(PRIORITY),
            rule(PRIORITY, lookup.clone()),
            rule(32766, lookup.clone()),
        ];
        assert_eq!(preceding(&rules, PRIORITY).count(), 2);
        assert_eq!(preceding(&rules, POD_ROUTES_PRIORITY).count(), 1);
    }

    #[test]
    fn rule_takes_what_its_table_has_a_route_for() {
        let peers = [cidr("10.201.0.0/16")];
        let tables = BTreeMap::from([
            (254, vec![route("0.0.0.0/0"), route("192.0.2.0/24")]),
            (255, vec![route("127.0.0.0/8")]),
            (7, vec![route("10.201.4.0/24")]),
        ]);
        let takes = |action| !taken(&rule(50, action), &peers, &tables).is_empty();
        assert!(takes(ForeignAction::Lookup(254, None)));
        assert!(!takes(ForeignAction::Lookup(254, Some(0))), "its default route does not count");
        assert!(!takes(ForeignAction::Lookup(255, None)));
        assert!(takes(ForeignAction::Lookup(7, Some(0))));
        assert!(takes(ForeignAction::Refuse("blackhole")) && takes(ForeignAction::Goto(32766)));
        assert!(!takes(ForeignAction::Goto(100)) && !takes(ForeignAction::Nothing));
    }

    /// Firewall of a node with one pod CIDR, whose underlay is eth0.
    fn firewall() -> Firewall {
        Firewall {
            peers: [cidr("10.201.0.0/16")].into(),
            local_pods: [cidr("10.200.1.0/24")].into(),
            exits: ["eth0".to_owned()].into(),
            ..Firewall::default()
        }
    }

    #[test]
    fn selectors_that_leave_peers_out_take_nothing() {
        let firewall = firewall();
        let traffic = Traffic::of(&firewall, Family::Ipv4);
        let all = rule(50, ForeignAction::Refuse("blackhole"));
        let takes = |rule: ForeignRule| traffic.may_take_to_peers(&rule);
        let (lo, weft4) = (Some("lo".to_owned()), Some("weft4".to_owned()));
        let mark = "fwmark 0x1/0xff".to_owned();
        assert!(takes(all.clone()));
        assert!(takes(ForeignRule { to: Some(cidr("10.0.0.0/8")), ..all.clone() }));
        assert!(!takes(ForeignRule { to: Some(cidr("10.9.0.0/16")), ..all.clone() }));
        assert!(takes(ForeignRule { from: Some(cidr("10.200.1.7/32")), ..all.clone() }));
        assert!(!takes(ForeignRule { from: Some(cidr("192.0.2.5/32")), ..all.clone() }));
        assert!(!takes(ForeignRule { iif: lo, ..all.clone() }));
        assert!(!takes(ForeignRule { iif: weft4.clone(), ..all.clone() }));
        assert!(takes(ForeignRule { ports: "ipproto icmp".to_owned(), ..all.clone() }));
        let marked = ForeignRule { mark, ..all.clone() };
        assert!(!takes(marked.clone()), "its owner's decision");
        assert!(takes(ForeignRule { to: Some(cidr("10.201.0.0/16")), ..marked }));
        assert!(!takes(ForeignRule { is_narrow: true, ..all.clone() }));
        assert!(traffic.may_take_from_peers(&ForeignRule { iif: weft4, ..all.clone() }));
        let from = Some(cidr("10.200.1.0/24"));
        assert!(!traffic.may_take_from_peers(&ForeignRule { from, ..all }));
    }

    #[test]
    fn cni_table_that_leads_to_pods_takes_nothing() {
        let firewall = firewall();
        let traffic = Traffic::of(&firewall, Family::Ipv4);
        let by = |to: &str, dev: &str| ForeignRoute { dev: Some(dev.to_owned()), ..route(to) };
        let throw = ForeignRoute { kind: "throw", ..route("10.200.0.0/16") };
        let main = |pods: &[ForeignRoute]| [&[route("0.0.0.0/0")], pods].concat();
        let takes = |own: &[ForeignRoute], pods: &[ForeignRoute], table, suppressed| {
            let tables = BTreeMap::from([(7, own.to_vec()), (MAIN_TABLE, main(pods))]);
            traffic.takes_from_peers(&rule(50, ForeignAction::Lookup(table, suppressed)), &tables)
        };
        let (default, cni0) = (by("0.0.0.0/0", "wan"), by("10.200.1.0/24", "cni0"));
        let bridge = std::slice::from_ref(&cni0);
        let own = std::slice::from_ref(&default);
        assert!(takes(own, bridge, 7, None));
        assert!(!takes(own, bridge, 7, Some(0)));
        assert!(!takes(&[default.clone(), cni0.clone()], &[], 7, None), "a CNI's own table");
        assert!(!takes(&[default.clone(), throw], bridge, 7, None));
        assert!(takes(&[by("10.200.1.0/24", "eth0")], bridge, 7, None));
        assert!(takes(&[by("10.200.1.0/25", "dummy0")], bridge, 7, None), "main has another way");
        assert!(takes(&[default, by("10.200.1.2/32", "veth1")], &[], 7, None), "no pod's address");
        assert!(!takes(&[], bridge, MAIN_TABLE, None));
        let pod = by("10.200.1.2/32", "veth1");
        assert!(takes(&[], std::slice::from_ref(&pod), MAIN_TABLE, None), "no pod's address");
        let to_pod = ForeignRule {
            to: Some(cidr("10.200.1.2/32")),
            ..rule(20, ForeignAction::Lookup(MAIN_TABLE, None))
        };
        let tables = BTreeMap::from([(MAIN_TABLE, main(&[pod]))]);
        assert!(!traffic.takes_from_peers(&to_pod, &tables), "Cilium's rule of a pod");
    }

    #[test]
    fn remedies_are_commands() {
        let to = Some(cidr("10.201.0.0/16"));
        let found = ForeignRule { to, ..rule(50, ForeignAction::Lookup(254, None)) };
        let taken = || Taken { to: vec![cidr("10.201.0.0/16")], from: Vec::new() };
        let problem = foreign_rule(&found, Family::Ipv4, taken()).problem;
        assert!(
            problem.contains("`ip rule del priority 50 to 10.201.0.0/16 table 254`"),
            "{problem}"
        );
        let (ports, mark) = ("ipproto icmp".to_owned(), "fwmark 0x1/0xff".to_owned());
        let found = ForeignRule { ports, mark, ..found };
        let problem = foreign_rule(&found, Family::Ipv4, taken()).problem;
        assert!(problem.contains("takes a part of the packets to 10.201.0.0/16"), "{problem}");
        let command =
            "`ip rule del priority 50 to 10.201.0.0/16 fwmark 0x1/0xff ipproto icmp table 254`";
        assert!(problem.contains(command), "{problem}");
        let found = ForeignRoute { metric: 1024, ..route("fd00:201::/64") };
        let problem = foreign_route(&found, Family::Ipv6, &[]).problem;
        let command = "`ip -6 route del fd00:201::/64 dev eth0 metric 1024 table 18952`";
        assert!(problem.contains(command), "{problem}");
    }

    #[test]
    fn route_in_the_local_table_is_the_one_to_remove() {
        let routes = [route("127.0.0.0/8"), route("10.201.4.0/24")];
        let found = local_route(&routes, Family::Ipv4, vec![cidr("10.201.0.0/16")]);
        assert_eq!(found.removal, "ip route del 10.201.4.0/24 table local");
        assert!(found.problem.contains("takes packets to 10.201.0.0/16"), "{}", found.problem);
    }

    #[test]
    fn route_takes_prefixes_that_hold_it() {
        let peers = [cidr("10.201.0.0/16"), cidr("10.202.0.0/16")];
        let takes = |to: &str| foreign_route(&route(to), Family::Ipv4, &peers).prefixes;
        assert_eq!(takes("10.201.4.0/24"), [peers[0]]);
        assert_eq!(takes("10.202.0.0/16"), [peers[1]]);
        assert_eq!(takes("0.0.0.0/0"), [], "weft's own is longer");
    }
}
