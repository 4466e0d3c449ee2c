//! Chains of other programs that translate VXLAN to this node, or packets of pods to peers: their destinations, or
//! their sources before weft's chain keeps these. Peers accept no other sources of this cluster than its pods' and external addresses.

use std::collections::BTreeSet;

use fabric_api::fabric::{PacketDrop, VXLAN_PORT};
use netlink::Netns;
use netlink::nft::{self, Chain, Hook, NftError, Tracked, Verdict};
use netplan::{FIREWALL_TABLE, SOURCES_PRIORITY};

use super::drop_points::{Rule, Walk};
use super::pod_packets::{Packets, Search};
use super::{Found, Treatment, of_chain, of_port};

const DESTINATION: &str = "destination";
const SOURCE: &str = "source, with which peers drop them";

/// Names the first rule of each such chain, and those that lead VXLAN to this node elsewhere.
pub(super) fn find(
    netns: &Netns,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    let sources = nft::source_nat_chains(netns, SOURCES_PRIORITY)?;
    let targets = nft::target_nat_chains(netns)?;
    let sources = sources.into_iter().map(|base| (Hook::Postrouting, base));
    let all = sources.chain(targets.into_iter().map(|base| (Hook::Prerouting, base)));
    for (hook, base) in all.filter(|(_, base)| base.table != FIREWALL_TABLE) {
        let mut load = |name: &str| {
            let chain = Chain { name: name.to_owned(), ..base.clone() };
            let rules = nft::chain_rules(netns, &chain, Tracked::New)?;
            Ok::<Vec<Rule>, NftError>(rules.into_iter().map(Rule::from).collect())
        };
        let (end, priority) = if hook == Hook::Prerouting {
            find_vxlan(&base, treatment, &mut load, found)?;
            (DESTINATION, String::new())
        } else {
            (
                SOURCE,
                format!("give the chain {} the priority srcnat or a later one, or ", base.name),
            )
        };
        for pods in treatment.pods_of(base.family) {
            let packets = Packets { pods, to_peers: true, hook };
            let mut search = Search::new((treatment, packets), Verdict::Translate, &mut load);
            search.visit(&base.name)?;
            let Search { visited, found: translating, is_certain, .. } = search;
            found.chains.extend(visited.into_keys().map(|name| Chain { name, ..base.clone() }));
            if let Some((name, rule)) = translating {
                let chain = Chain { name, ..base.clone() };
                let taken = (hook, "packets of pods to peers", end);
                let (drop, removal) = translation(&chain, &rule, taken, &priority);
                found.add_problem(&drop);
                if is_certain {
                    treatment.add_fault(found, (Some(&rule), packets), (&drop, removal));
                }
            }
        }
    }
    Ok(())
}

/// Names the rules that give VXLAN to this node another destination. Packets to it meet those about its addresses.
fn find_vxlan(
    base: &Chain,
    treatment: &Treatment,
    load: &mut dyn FnMut(&str) -> Result<Vec<Rule>, NftError>,
    found: &mut Found,
) -> Result<(), NftError> {
    // Such a rule takes packets as one does that drops them.
    let as_drop = |mut rule: Rule| {
        if rule.verdict == Verdict::Translate {
            rule.verdict = Verdict::Drop;
        }
        rule
    };
    let mut load = |name: &str| load(name).map(|rules| rules.into_iter().map(as_drop).collect());
    let mut walk = Walk::new(Hook::Input, (false, &treatment.ways), &mut load);
    walk.base_chain(&base.name, false)?;
    let Walk { chains, drops, .. } = walk;
    found.chains.extend(chains.into_keys().map(|name| Chain { name, ..base.clone() }));
    let ports = (&BTreeSet::new(), &[VXLAN_PORT].into());
    for (name, rule) in drops {
        if let Some(port) = rule.port((Hook::Input, &treatment.ways), ports, &treatment.hosts) {
            let chain = Chain { name, ..base.clone() };
            let taken = (Hook::Prerouting, &*of_port(&rule, port), DESTINATION);
            let (drop, _) = translation(&chain, &rule, taken, "");
            found.add_rule((Hook::Input, &rule), drop);
        }
    }
    Ok(())
}

/// Cause and remedy of a rule that gives packets another end, and the command of the remedy.
fn translation(
    chain: &Chain,
    rule: &Rule,
    (hook, taken, end): (Hook, &str, &str),
    priority: &str,
) -> (PacketDrop, String) {
    let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
    let (chain, handle) = (of_chain(chain), &rule.id);
    let removal = format!("nft delete rule {place} handle {handle}");
    let cause =
        format!("{chain} (hook {hook}): the rule with handle {handle} gives {taken} another {end}");
    let remedy = format!("have its owner {priority}except them, or remove the rule (`{removal}`)");
    (PacketDrop { cause, remedy }, removal)
}
