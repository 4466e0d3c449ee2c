//! Routes and rules of others that take packets to peers away from weft's table. They are named, and
//! left alone.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use fabric_api::Cidr;
use fabric_api::fabric::Diversion;
use jiff::Timestamp;
use netlink::{ForeignAction, ForeignRoute, ForeignRule, Handle, LOCAL_TABLE, NetlinkError};
use netplan::{Family, RouteKey};

use crate::names::{GATEWAY_PROTOCOL, PRIORITY, PROTOCOL, TABLE};

/// A rule or route, and what it does.
pub(crate) struct Foreign {
    pub(crate) problem: String,
    /// Command that removes it.
    pub(crate) removal: String,
    /// The peers' prefixes of which it takes packets.
    pub(crate) prefixes: Vec<Cidr>,
}

/// Those of both families. `peers` are the prefixes that weft routes, `pods` the sources of packets
/// to them.
pub(crate) async fn find(
    handle: &Handle,
    (peers, pods): (&BTreeSet<Cidr>, &BTreeSet<Cidr>),
) -> Result<Vec<Foreign>, NetlinkError> {
    let mut found = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        let of_family: Vec<_> =
            peers.iter().filter(|peer| Family::of_prefix(peer) == family).copied().collect();
        let routes = handle.table_routes(family, TABLE).await?;
        let foreign = routes.iter().filter(|route| !is_wefts(route));
        found.extend(foreign.map(|route| foreign_route(route, family, &of_family)));
        let rules = handle.all_rules(family).await?;
        let candidates: Vec<_> =
            preceding(&rules).filter(|rule| may_take(rule, peers, pods)).collect();
        let mut tables = BTreeMap::new();
        for rule in &candidates {
            if let ForeignAction::Lookup(table, _) = rule.action
                && !tables.contains_key(&table)
            {
                tables.insert(table, handle.table_routes(family, table).await?);
            }
        }
        for rule in candidates {
            let prefixes = taken(rule, &of_family, &tables);
            if prefixes.is_empty() {
                continue;
            }
            let local = tables.get(&LOCAL_TABLE).map(Vec::as_slice).unwrap_or_default();
            found.push(match rule.action {
                ForeignAction::Lookup(LOCAL_TABLE, _) => local_route(local, family, prefixes),
                ForeignAction::Lookup(..)
                | ForeignAction::Goto(_)
                | ForeignAction::Refuse(_)
                | ForeignAction::Nothing => foreign_rule(rule, family, prefixes),
            });
        }
    }
    Ok(found)
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

/// Rules that the kernel comes to before weft's own.
fn preceding(rules: &[ForeignRule]) -> impl Iterator<Item = &ForeignRule> {
    let is_ours = |rule: &ForeignRule| rule.protocol == PROTOCOL && rule.priority == PRIORITY;
    rules.iter().take_while(move |rule| rule.priority <= PRIORITY && !is_ours(rule))
}

/// True unless its selectors leave all packets from pods to peers out. Marks and the like are a
/// decision of their owner about some packets only.
fn may_take(rule: &ForeignRule, peers: &BTreeSet<Cidr>, pods: &BTreeSet<Cidr>) -> bool {
    let touches = |prefix: Option<Cidr>, of: &BTreeSet<Cidr>| {
        prefix.is_none_or(|prefix| of.iter().any(|other| other.overlaps(&prefix)))
    };
    !rule.is_narrow
        && rule.iif.as_deref() != Some("lo")
        && touches(rule.to, peers)
        && touches(rule.from, pods)
}

/// The peers' prefixes whose packets the rule takes.
fn taken(
    rule: &ForeignRule,
    peers: &[Cidr],
    tables: &BTreeMap<u32, Vec<ForeignRoute>>,
) -> Vec<Cidr> {
    let to = |peer: &&Cidr| rule.to.is_none_or(|to| to.overlaps(peer));
    let concerned = peers.iter().filter(to).copied();
    match rule.action {
        ForeignAction::Nothing => Vec::new(),
        ForeignAction::Refuse(_) => concerned.collect(),
        ForeignAction::Goto(next) => concerned.filter(|_| next > PRIORITY).collect(),
        ForeignAction::Lookup(table, suppressed) => {
            let routes = tables.get(&table).map(Vec::as_slice).unwrap_or_default();
            let counts = |route: &&ForeignRoute| {
                route.kind != "throw"
                    && suppressed.is_none_or(|len| u32::from(route.to.len()) > len)
            };
            let has_route =
                |peer: &Cidr| routes.iter().filter(counts).any(|route| route.to.overlaps(peer));
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

fn foreign_rule(rule: &ForeignRule, family: Family, prefixes: Vec<Cidr>) -> Foreign {
    let mut selectors = format!("priority {}", rule.priority);
    let mut select = |name: &str, value: Option<String>| {
        selectors += &value.map(|value| format!(" {name} {value}")).unwrap_or_default();
    };
    select("from", rule.from.map(|from| from.to_string()));
    select("to", rule.to.map(|to| to.to_string()));
    select("iif", rule.iif.clone());
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
    let peer = prefixes.first().map(ToString::to_string).unwrap_or_default();
    let problem = format!(
        "the {family} rule `{selectors} {action}` comes before weft's of priority {PRIORITY} and takes packets \
         to {peer}: have its owner give it a priority over {PRIORITY}, or remove it (`{removal}`)"
    );
    Foreign { problem, removal, prefixes }
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
        ForeignRule { priority, from, to, iif, is_narrow: false, action, protocol: 3 }
    }

    fn route(to: &str) -> ForeignRoute {
        let (gateway, dev) = (None, Some("eth0".to_owned()));
        ForeignRoute { to: cidr(to), metric: 0, kind: "", gateway, dev, protocol: 3 }
    }

    #[test]
    fn rules_behind_wefts_take_nothing() {
        let lookup = ForeignAction::Lookup(254, None);
        let ours = ForeignRule { protocol: PROTOCOL, ..rule(PRIORITY, lookup.clone()) };
        let rules = [
            rule(0, ForeignAction::Lookup(255, None)),
            rule(PRIORITY, lookup.clone()),
            ours,
            rule(PRIORITY, lookup.clone()),
            rule(32766, lookup),
        ];
        assert_eq!(preceding(&rules).count(), 2);
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

    #[test]
    fn selectors_that_leave_peers_out_take_nothing() {
        let sets = [["10.201.0.0/16"], ["10.200.1.0/24"]].map(|set| set.map(cidr).into());
        let [peers, pods]: [BTreeSet<Cidr>; 2] = sets;
        let all = rule(50, ForeignAction::Refuse("blackhole"));
        let takes = |rule: ForeignRule| may_take(&rule, &peers, &pods);
        assert!(takes(all.clone()));
        assert!(takes(ForeignRule { to: Some(cidr("10.0.0.0/8")), ..all.clone() }));
        assert!(!takes(ForeignRule { to: Some(cidr("10.9.0.0/16")), ..all.clone() }));
        assert!(takes(ForeignRule { from: Some(cidr("10.200.1.7/32")), ..all.clone() }));
        assert!(!takes(ForeignRule { from: Some(cidr("192.0.2.5/32")), ..all.clone() }));
        assert!(!takes(ForeignRule { iif: Some("lo".to_owned()), ..all.clone() }));
        assert!(!takes(ForeignRule { is_narrow: true, ..all }));
    }

    #[test]
    fn remedies_are_commands() {
        let to = Some(cidr("10.201.0.0/16"));
        let found = ForeignRule { to, ..rule(50, ForeignAction::Lookup(254, None)) };
        let problem = foreign_rule(&found, Family::Ipv4, vec![cidr("10.201.0.0/16")]).problem;
        assert!(
            problem.contains("`ip rule del priority 50 to 10.201.0.0/16 table 254`"),
            "{problem}"
        );
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
