//! Chains of other programs that translate VXLAN and WireGuard to this node, or packets of pods to peers: their destinations, or
//! their sources before weft's chain keeps these. Peers accept no other sources of this cluster than its pods' and external addresses.

use std::collections::BTreeSet;
use std::fs;

use fabric_api::fabric::PacketDrop;
use netlink::Netns;
use netlink::nft::{self, Chain, ChainFamily, Hook, NftError, Tracked, Verdict};
use netplan::{FIREWALL_TABLE, SOURCES_PRIORITY};

use super::drop_points::{Rule, Walk};
use super::iptables::{self, Table};
use super::pod_packets::{Packets, Search};
use super::{Found, Treatment, of_chain, of_port};

/// Table of the old packet filter that translates.
const NAT: &str = "nat";
const DESTINATION: &str = "destination";
const SOURCE: &str = "source, with which peers drop them";

/// A base chain of one of the two packet filters, and how its rules are named.
trait Place {
    fn rules(&mut self, chain: &str) -> Result<Vec<Rule>, NftError>;
    fn family(&self) -> ChainFamily;
    /// Description of a rule of a chain, and the command that removes it.
    fn name(&self, chain: &str, hook: Hook, rule: &Rule) -> (String, String);
    fn visit(&self, chains: Vec<String>, found: &mut Found);
}

struct Nftables<'a> {
    netns: &'a Netns,
    base: Chain,
}

impl Place for Nftables<'_> {
    fn rules(&mut self, chain: &str) -> Result<Vec<Rule>, NftError> {
        let chain = Chain { name: chain.to_owned(), ..self.base.clone() };
        let rules = nft::chain_rules(self.netns, &chain, Tracked::New)?;
        Ok(rules.into_iter().map(Rule::from).collect())
    }

    fn family(&self) -> ChainFamily {
        self.base.family
    }

    fn name(&self, chain: &str, hook: Hook, rule: &Rule) -> (String, String) {
        let chain = Chain { name: chain.to_owned(), ..self.base.clone() };
        let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
        let handle = &rule.id;
        let removal = format!("nft delete rule {place} handle {handle}");
        (format!("{} (hook {hook}): the rule with handle {handle}", of_chain(&chain)), removal)
    }

    fn visit(&self, chains: Vec<String>, found: &mut Found) {
        let chains = chains.into_iter().map(|name| Chain { name, ..self.base.clone() });
        found.chains.extend(chains);
    }
}

impl Place for Table<'_> {
    fn rules(&mut self, chain: &str) -> Result<Vec<Rule>, NftError> {
        Ok(self.chains.get(chain).cloned().unwrap_or_default())
    }

    fn family(&self) -> ChainFamily {
        self.family()
    }

    fn name(&self, chain: &str, hook: Hook, rule: &Rule) -> (String, String) {
        let cause = format!("{} (hook {hook}): the rule `{}`", self.title(chain), rule.id);
        (cause, self.removal_of(rule))
    }

    fn visit(&self, _: Vec<String>, _: &mut Found) {}
}

/// Names the first rule of each such chain, and those that lead what is sent to this node elsewhere.
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
        let name = base.name.clone();
        find_in(&mut Nftables { netns, base }, (&name, hook), treatment, found)?;
    }
    for (program, rules) in legacy_rules(netns) {
        let mut table = Table::parse((program, NAT), Tracked::New, &rules);
        // Sources are translated behind weft's chain there.
        find_in(&mut table, ("PREROUTING", Hook::Prerouting), treatment, found)?;
    }
    Ok(())
}

/// Tables of the old packet filter. What cannot be read is reported with its other tables.
fn legacy_rules(netns: &Netns) -> Vec<(&'static str, String)> {
    let read = |(program, names)| {
        // Asking the program would make the table where there is none.
        let tables = fs::read_to_string(format!("/proc/thread-self/net/{names}")).ok()?;
        let is_present = tables.lines().any(|table| table == NAT);
        let rules = is_present.then(|| iptables::run(program, &["-t", NAT, "-S"], "").ok());
        rules.flatten().map(|rules| (program, rules))
    };
    netns.run(|| iptables::VERSIONS.into_iter().filter_map(read).collect()).unwrap_or_default()
}

fn find_in(
    place: &mut dyn Place,
    (base, hook): (&str, Hook),
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    let (end, priority) = if hook == Hook::Prerouting {
        find_ports(place, base, treatment, found)?;
        (DESTINATION, String::new())
    } else {
        (SOURCE, format!("give the chain {base} the priority srcnat or a later one, or "))
    };
    for pods in treatment.pods_of(place.family()) {
        let packets = Packets { pods, to_peers: true, hook };
        let mut load = |name: &str| place.rules(name);
        let mut search = Search::new((treatment, packets), Verdict::Translate, &mut load);
        search.visit(base)?;
        let Search { visited, found: translating, is_certain, .. } = search;
        place.visit(visited.into_keys().collect(), found);
        if let Some((name, rule)) = translating {
            let taken = ("packets of pods to peers", end);
            let (drop, removal) = translation(place.name(&name, hook, &rule), taken, &priority);
            found.add_problem(&drop);
            if is_certain {
                treatment.add_fault(found, (Some(&rule), packets), (&drop, removal));
            }
        }
    }
    Ok(())
}

/// Names the rules that give packets to ports of weft on this node another destination. They meet those about its
/// addresses.
fn find_ports(
    place: &mut dyn Place,
    base: &str,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    // Such a rule takes packets as one does that drops them.
    let as_drop = |mut rule: Rule| {
        if rule.verdict == Verdict::Translate {
            rule.verdict = Verdict::Drop;
        }
        rule
    };
    let mut load = |name: &str| {
        let rules = place.rules(name)?;
        Ok::<Vec<Rule>, NftError>(rules.into_iter().map(as_drop).collect())
    };
    let mut walk = Walk::new(Hook::Input, (false, &treatment.ways), &mut load);
    walk.base_chain(base, false)?;
    let Walk { chains, drops, .. } = walk;
    place.visit(chains.into_keys().collect(), found);
    let (none, ports) = (BTreeSet::new(), treatment.ports());
    for (name, rule) in drops {
        if let Some(port) =
            rule.port((Hook::Input, &treatment.ways), (&none, &ports), &treatment.hosts)
        {
            let taken = (&*of_port(&rule, port), DESTINATION);
            let (drop, _) = translation(place.name(&name, Hook::Prerouting, &rule), taken, "");
            found.add_rule((Hook::Input, &rule), false, drop);
        }
    }
    Ok(())
}

/// Cause and remedy of a rule that gives packets another end, and the command of the remedy.
fn translation(
    (rule, removal): (String, String),
    (taken, end): (&str, &str),
    priority: &str,
) -> (PacketDrop, String) {
    let cause = format!("{rule} gives {taken} another {end}");
    let remedy = format!("have its owner {priority}except them, or remove the rule (`{removal}`)");
    (PacketDrop { cause, remedy }, removal)
}
