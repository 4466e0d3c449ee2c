//! Routes and rules of others that take packets between pods and peers away from weft's rules. They are
//! named, and left alone.

mod pod_tables;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use fabric_api::Cidr;
use fabric_api::fabric::Diversion;
use jiff::Timestamp;
use netlink::{ForeignAction, ForeignRoute, ForeignRule, Handle, LOCAL_TABLE, Mark, NetlinkError};
use netplan::names::{
    self, GATEWAY_PROTOCOL, MAIN_TABLE, POD_ROUTES_PRIORITY, PRIORITY, PROTOCOL, TABLE,
};
use netplan::{Family, Firewall, RouteKey};

/// A rule or route, and what it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    pub problem: String,
    /// Command that removes it, or solves the cause.
    pub removal: String,
    /// Cause, if it does not take packets away.
    pub cause: Option<String>,
    /// The peers' prefixes of which it certainly takes packets.
    pub prefixes: Vec<Cidr>,
}

/// Those of both families.
pub async fn find(
    handle: &Handle,
    firewall: &Firewall,
    all_routes: &[ForeignRoute],
) -> Result<Vec<Foreign>, NetlinkError> {
    let mut found = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        let traffic = Traffic::of(firewall, family);
        let routes = handle.table_routes(family, TABLE).await?;
        let foreign = routes.iter().filter(|route| !is_wefts(route));
        found.extend(foreign.map(|route| foreign_route(route, family, &traffic.peers)));
        let rules = handle.all_rules(family).await?;
        found.extend(pod_tables::find(&rules, all_routes, &traffic));
        let before_pods = preceding(&rules, POD_ROUTES_PRIORITY).count();
        let candidates: Vec<_> = preceding(&rules, PRIORITY)
            .enumerate()
            .filter(|(_, rule)| !is_known_mark(rule))
            .map(|(index, rule)| (rule, index < before_pods && !traffic.senders(rule).is_empty()))
            .filter(|(rule, from_peers)| *from_peers || !traffic.destinations(rule).is_empty())
            .collect();
        let looks_up = |(rule, from_peers): &(&ForeignRule, bool)| {
            let ForeignAction::Lookup(table, _) = rule.action else { return Vec::new() };
            if *from_peers { vec![table, MAIN_TABLE] } else { vec![table] }
        };
        let wanted: BTreeSet<u32> = candidates.iter().flat_map(looks_up).collect();
        let mut tables = Tables::new();
        for table in wanted {
            let mut routes = handle.table_routes(family, table).await?;
            // Those of the node's own addresses: its networks within a prefix are named as such.
            routes.retain(|route| table != LOCAL_TABLE || route.protocol != KERNEL);
            tables.insert(table, routes);
        }
        for (rule, from_peers) in candidates {
            let from_peers = from_peers && traffic.takes_from_peers(rule, &tables);
            let taken = Taken {
                to: taken(rule, traffic.destinations(rule), &tables),
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

/// Protocol of routes that the kernel makes by itself (`RTPROT_KERNEL`).
const KERNEL: u8 = 2;

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
pub fn note(noted: &mut Vec<Diversion>, found: &[Foreign]) {
    let before = std::mem::take(noted);
    for foreign in found.iter().filter(|foreign| !foreign.prefixes.is_empty()) {
        let removal = foreign.removal.clone();
        let is_same = |of: &&Diversion| of.removal == removal && of.cause == foreign.cause;
        let known = before.iter().find(is_same).map(|of| of.since.clone());
        let since = known.unwrap_or_else(|| format!("{:.3}", Timestamp::now()));
        let prefixes = foreign.prefixes.iter().map(ToString::to_string).collect();
        noted.push(Diversion { removal, cause: foreign.cause.clone(), prefixes, since });
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

    /// Peers' prefixes that a rule selects packets of pods to.
    fn destinations(&self, rule: &ForeignRule) -> Vec<Cidr> {
        let is_met = !rule.iif.as_deref().is_some_and(|iif| iif == "lo" || is_overlay(iif));
        let selects = |peer: &&Cidr| selects(rule, is_met, &self.pods, std::slice::from_ref(peer));
        self.peers.iter().filter(selects).copied().collect()
    }

    /// Peers' prefixes that a rule selects packets from, to pods of this node.
    fn senders(&self, rule: &ForeignRule) -> Vec<Cidr> {
        let is_met = rule.iif.as_deref().is_none_or(is_overlay);
        let selects = |peer: &&Cidr| selects(rule, is_met, std::slice::from_ref(peer), &self.pods);
        let peers = self.peers.iter().filter(|_| !self.pods.is_empty());
        peers.filter(selects).copied().collect()
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
                let routes: Vec<_> =
                    routes.iter().filter(|r| counts(r, rule, suppressed)).collect();
                let leads_to_pods = |route: &ForeignRoute| {
                    !route.to.is_everything()
                        && (table == MAIN_TABLE
                            || route.kind == "throw"
                            || self.is_way_to_pods(route, main))
                };
                let (good, bad): (Vec<_>, Vec<_>) =
                    routes.into_iter().partition(|route| leads_to_pods(route));
                let to = rule.to.filter(|_| !rule.is_inverted);
                let mut pods = self.pods.iter().filter_map(|pods| common(*pods, to));
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

/// True if a rule selects some of the packets between these prefixes. `is_met`: they come in on its
/// device.
fn selects(rule: &ForeignRule, is_met: bool, sources: &[Cidr], destinations: &[Cidr]) -> bool {
    let some = is_met
        && !rule.is_for_sockets
        && touches(rule.from, sources)
        && touches(rule.to, destinations);
    if !rule.is_inverted {
        return some;
    }
    let all = some
        && rule.mark.is_none()
        && rule.fields.is_empty()
        && covers(rule.from, sources)
        && covers(rule.to, destinations);
    !all
}

/// True if nothing but a mark decides, which nobody may set: unmarked packets are not taken.
fn is_about_marks(rule: &ForeignRule) -> bool {
    let is_marked = |mark: Mark| (mark.value != 0) != rule.is_inverted;
    rule.mark.is_some_and(is_marked) && rule.to.is_none() && rule.iif.is_none()
}

/// True for packets that a CNI, kube-proxy or Tailscale marks for itself: bits 0x4000 and 0x8000
/// (Kubernetes), 0xf00 (Cilium), or those from 0x10000 on (Calico, kube-router, Tailscale).
fn is_known_mark(rule: &ForeignRule) -> bool {
    let bits = rule.mark.map_or(0, |mark| mark.value & mark.mask);
    let is_of = |owner: u32| bits & !owner == 0;
    bits != 0 && is_about_marks(rule) && [0xc000, 0xf00, 0xffff_0000].into_iter().any(is_of)
}

fn is_overlay(device: &str) -> bool {
    [Family::Ipv4, Family::Ipv6].map(names::device).contains(&device)
}

fn touches(prefix: Option<Cidr>, of: &[Cidr]) -> bool {
    prefix.is_none_or(|prefix| of.iter().any(|other| other.overlaps(&prefix)))
}

fn covers(prefix: Option<Cidr>, of: &[Cidr]) -> bool {
    let contains =
        |prefix: Cidr, other: &Cidr| prefix.len() <= other.len() && prefix.overlaps(other);
    prefix.is_none_or(|prefix| of.iter().all(|other| contains(prefix, other)))
}

/// Addresses that both have.
fn common(a: Cidr, b: Option<Cidr>) -> Option<Cidr> {
    b.map_or(Some(a), |b| a.and(&b))
}

/// True if a rule's lookup that suppresses prefixes up to a length finds the route. A transparent proxy
/// has a local route for marked packets.
fn counts(route: &ForeignRoute, rule: &ForeignRule, suppressed: Option<u32>) -> bool {
    let is_proxied = route.kind == "local" && is_about_marks(rule);
    !is_proxied && suppressed.is_none_or(|len| u32::from(route.to.len()) > len)
}

/// Those of the selected destinations whose packets the rule takes.
fn taken(rule: &ForeignRule, selected: Vec<Cidr>, tables: &Tables) -> Vec<Cidr> {
    let concerned = selected.into_iter();
    match rule.action {
        ForeignAction::Nothing => Vec::new(),
        ForeignAction::Refuse(_) => concerned.collect(),
        ForeignAction::Goto(next) => concerned.filter(|_| next > PRIORITY).collect(),
        ForeignAction::Lookup(table, suppressed) => {
            let routes = tables.get(&table).map(Vec::as_slice).unwrap_or_default();
            let takes =
                |route: &&ForeignRoute| route.kind != "throw" && counts(route, rule, suppressed);
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
    Foreign { problem, removal, cause: None, prefixes }
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
    Foreign { problem, removal, cause: None, prefixes }
}

fn foreign_rule(rule: &ForeignRule, family: Family, taken: Taken) -> Foreign {
    let not = if rule.is_inverted { "not " } else { "" };
    let mut selectors = format!("{not}priority {}", rule.priority);
    let mut select = |name: &str, value: Option<String>| {
        selectors += &value.map(|value| format!(" {name}{value}")).unwrap_or_default();
    };
    select("from ", rule.from.map(|from| from.to_string()));
    select("to ", rule.to.map(|to| to.to_string()));
    select("iif ", rule.iif.clone());
    select("", rule.mark.map(|mark| mark.to_string()));
    select("", Some(rule.fields.clone()).filter(|fields| !fields.is_empty()));
    let is_part = !rule.fields.is_empty() || rule.mark.is_some() && !rule.is_inverted;
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
    let taken = taken.to.into_iter().chain(taken.from);
    let prefixes: BTreeSet<Cidr> = taken.filter(|_| !is_about_marks(rule)).collect();
    let prefixes = prefixes.into_iter().collect();
    Foreign { problem, removal, cause: None, prefixes }
}

/// Option of `ip`.
fn option(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "",
        Family::Ipv6 => "-6 ",
    }
}

#[cfg(test)]
mod tests;
