//! CNIs that reach the node's pods by a routing table of their own, to which a rule behind weft's leads:
//! weft's first rules know the main table only, and refuse what peers send to these pods.

use std::collections::BTreeSet;

use fabric_api::Cidr;
use netlink::{ForeignAction, ForeignRoute, ForeignRule};
use netplan::Family;
use netplan::names::{MAIN_TABLE, POD_ROUTES_PRIORITY};

use super::{Foreign, Traffic, option, preceding};

/// One for each pod CIDR that only a table of another program leads to.
pub(super) fn find(
    rules: &[ForeignRule],
    routes: &[ForeignRoute],
    traffic: &Traffic<'_>,
) -> Vec<Foreign> {
    let looks_up = |rule: &ForeignRule| match rule.action {
        ForeignAction::Lookup(table, _) if !rule.is_inverted => Some(table),
        ForeignAction::Lookup(..)
        | ForeignAction::Goto(_)
        | ForeignAction::Refuse(_)
        | ForeignAction::Nothing => None,
    };
    let first: BTreeSet<u32> = preceding(rules, POD_ROUTES_PRIORITY).filter_map(looks_up).collect();
    let cidrs = traffic.pods.iter().filter(|pods| **pods != Cidr::host(pods.address()));
    let of_pods = |pods: &Cidr| {
        let leads = |r: &&ForeignRoute| !r.to.is_everything() && r.to.overlaps(pods);
        let main = routes.iter().filter(leads).any(|route| route.table == MAIN_TABLE);
        // A wider one is no CNI's.
        let of_cni = routes.iter().filter(leads).filter(|route| route.to.len() >= pods.len());
        let tables: BTreeSet<u32> = of_cni.map(|route| route.table).collect();
        let is_found = main || !tables.is_disjoint(&first);
        let its = |rule: &&ForeignRule| {
            let to_pods = rule.to.is_none_or(|to| to.overlaps(pods));
            to_pods && looks_up(rule).is_some_and(|table| tables.contains(&table))
        };
        let rule = rules.iter().filter(|_| !is_found).find(its)?;
        Some(fault(pods, rule.priority, looks_up(rule)?, traffic))
    };
    cidrs.filter_map(of_pods).collect()
}

fn fault(pods: &Cidr, priority: u32, table: u32, traffic: &Traffic<'_>) -> Foreign {
    let family = Family::of_prefix(pods);
    let cause = format!(
        "its pods {pods} are reached by routes of table {table} only, to which the {family} rule of priority \
         {priority} leads behind weft's of priority {POD_ROUTES_PRIORITY}: what peers send to them is refused"
    );
    let before = POD_ROUTES_PRIORITY - 1;
    let removal = format!(
        "ip {}rule add priority {before} to {pods} table {table} suppress_prefixlength 0",
        option(family)
    );
    let problem = format!("{cause} (`{removal}`)");
    let peers = traffic.peers.iter().filter(|peer| peer.is_ipv4() == pods.is_ipv4());
    Foreign { problem, removal, cause: Some(cause), prefixes: peers.copied().collect() }
}
