//! Routes and rules of others that take packets to peers away from weft's table. They are named, and
//! left alone.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::Cidr;
use netlink::{ForeignAction, ForeignRoute, ForeignRule, Handle, NetlinkError};
use netplan::Family;

use crate::names::{GATEWAY_PROTOCOL, PRIORITY, PROTOCOL, TABLE};

/// Problems of both families. `peers` are the prefixes that weft routes, `pods` the sources of packets
/// to them.
pub(crate) async fn problems(
    handle: &Handle,
    (peers, pods): (&BTreeSet<Cidr>, &BTreeSet<Cidr>),
) -> Result<BTreeSet<String>, NetlinkError> {
    let mut problems = BTreeSet::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        let routes = handle.table_routes(family, TABLE).await?;
        let foreign = routes.iter().filter(|route| !is_wefts(route));
        problems.extend(foreign.map(|route| route_problem(route, family)));
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
        let of_family: Vec<_> =
            peers.iter().filter(|peer| Family::of_prefix(peer) == family).copied().collect();
        for rule in candidates {
            if let Some(taken) = taken(rule, &of_family, &tables) {
                problems.insert(rule_problem(rule, family, &taken));
            }
        }
    }
    Ok(problems)
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

/// The first of the peers' prefixes whose packets the rule takes.
fn taken(
    rule: &ForeignRule,
    peers: &[Cidr],
    tables: &BTreeMap<u32, Vec<ForeignRoute>>,
) -> Option<Cidr> {
    let to = |peer: &&Cidr| rule.to.is_none_or(|to| to.overlaps(peer));
    let mut concerned = peers.iter().filter(to);
    match rule.action {
        ForeignAction::Nothing => None,
        ForeignAction::Refuse(_) => concerned.next().copied(),
        ForeignAction::Goto(next) => concerned.next().filter(|_| next > PRIORITY).copied(),
        ForeignAction::Lookup(table, suppressed) => {
            let routes = tables.get(&table)?;
            let counts = |route: &&ForeignRoute| {
                route.kind != "throw"
                    && suppressed.is_none_or(|len| u32::from(route.to.len()) > len)
            };
            let has_route =
                |peer: &&Cidr| routes.iter().filter(counts).any(|route| route.to.overlaps(peer));
            concerned.find(has_route).copied()
        }
    }
}

fn route_problem(route: &ForeignRoute, family: Family) -> String {
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
    format!(
        "the route `{text}` in table {TABLE}, which is weft's, is another program's and takes packets: \
         have its owner use another table, or remove it (`ip {}route del {text} table {TABLE}`)",
        option(family)
    )
}

fn rule_problem(rule: &ForeignRule, family: Family, peer: &Cidr) -> String {
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
    format!(
        "the {family} rule `{selectors} {action}` comes before weft's of priority {PRIORITY} and takes packets \
         to {peer}: have its owner give it a priority over {PRIORITY}, or remove it (`ip {}rule del \
         {selectors} {action}`)",
        option(family)
    )
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
        let takes = |action| taken(&rule(50, action), &peers, &tables).is_some();
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
        let problem = rule_problem(&found, Family::Ipv4, &cidr("10.201.0.0/16"));
        assert!(
            problem.contains("`ip rule del priority 50 to 10.201.0.0/16 table 254`"),
            "{problem}"
        );
        let found = ForeignRoute { metric: 1024, ..route("fd00:201::/64") };
        let problem = route_problem(&found, Family::Ipv6);
        let command = "`ip -6 route del fd00:201::/64 dev eth0 metric 1024 table 18952`";
        assert!(problem.contains(command), "{problem}");
    }
}
