//! Rules of other programs that exempt a node's probes from connection tracking. Without it no answer to a
//! probe is known as one, and nothing is translated: neither sources of the node itself, which gateways have no
//! route back to, nor destinations of IP resources. Packets of pods need no translation here.

use fabric_api::fabric::PacketDrop;
use netlink::Netns;
use netlink::nft::{self, NftError, Tracked};

use super::drop_points::Rule;
use super::{Dropping, Found, Treatment, of_chain};

/// Finds them in chains of nftables.
pub(super) fn find(
    netns: &Netns,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    for chain in nft::raw_chains(netns)? {
        let rules = nft::chain_rules(netns, &chain, Tracked::No)?.into_iter().map(Rule::from);
        for rule in rules.filter(|rule| rule.untracks_probes(&treatment.hosts)) {
            let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
            let of = format!("{}: the rule with handle {}", of_chain(&chain), rule.id);
            found.add_untracked(&of, &format!("nft delete rule {place} handle {}", rule.id));
        }
        found.chains.insert(chain);
    }
    Ok(())
}

/// Finds them among the rules of a chain of the old packet filter.
pub(super) fn find_among(
    (program, chain): (&str, &str),
    rules: &[Rule],
    treatment: &Treatment,
    found: &mut Found,
) {
    for rule in rules.iter().filter(|rule| rule.untracks_probes(&treatment.hosts)) {
        let of = format!("{program}'s chain {chain}: the rule `{}`", rule.id);
        let removal = rule.id.replacen("-A", "-D", 1);
        found.add_untracked(&of, &format!("{program} -t raw {removal}"));
    }
}

impl Found {
    fn add_untracked(&mut self, rule: &str, removal: &str) {
        let cause = format!(
            "{rule} exempts packets from connection tracking: answers to probes are dropped, and packets of the \
             node itself and for IP resources are not translated"
        );
        let remedy = format!(
            "have its owner except what goes out or comes in by the devices weft4 and weft6, or remove it \
             (`{removal}`)"
        );
        self.drops.insert(Dropping { is_uncertain: false, drop: PacketDrop { cause, remedy } });
    }
}
