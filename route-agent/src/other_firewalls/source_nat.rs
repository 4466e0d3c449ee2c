//! Chains of other programs that translate sources of pods before weft's chain keeps them: peers accept no
//! other sources of this cluster than its pods' and external addresses.

use std::collections::BTreeSet;

use fabric_api::Cidr;
use fabric_api::fabric::PacketDrop;
use netlink::Netns;
use netlink::nft::{self, Chain, ChainFamily, NftError, Verdict};
use netplan::{FIREWALL_TABLE, SOURCES_PRIORITY};

use super::drop_points::Rule;
use super::nft::{of_chain, rule};
use super::{Found, Treatment};

/// Names the first rule of each such chain that translates packets of pods to peers.
pub(super) fn find(
    netns: &Netns,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    let bases = nft::source_nat_chains(netns, SOURCES_PRIORITY)?;
    for base in bases.iter().filter(|base| base.table != FIREWALL_TABLE) {
        let sees = |pods: &&Cidr| match base.family {
            ChainFamily::Inet => true,
            ChainFamily::Ip => pods.is_ipv4(),
            ChainFamily::Ip6 => !pods.is_ipv4(),
        };
        for pods in treatment.pods.iter().filter(sees) {
            let mut search =
                Search { netns, treatment, pods, visited: BTreeSet::new(), found: None };
            search.visit(base)?;
            found.chains.extend(search.visited);
            if let Some((chain, rule)) = search.found {
                found.add_problem(&translation(base, &chain, &rule));
            }
        }
    }
    Ok(())
}

struct Search<'a> {
    netns: &'a Netns,
    treatment: &'a Treatment,
    pods: &'a Cidr,
    visited: BTreeSet<Chain>,
    found: Option<(Chain, Rule)>,
}

impl Search<'_> {
    /// Returns true once nothing is left to decide: a rule is found, or one accepts all packets.
    fn visit(&mut self, chain: &Chain) -> Result<bool, NftError> {
        if !self.visited.insert(chain.clone()) {
            return Ok(false);
        }
        for rule in nft::chain_rules(self.netns, chain)?.into_iter().map(rule) {
            let all = self.treatment.all_meet(&rule, self.pods);
            if !all && !self.treatment.meet(&rule, (self.pods, true)) {
                continue;
            }
            match &rule.verdict {
                Verdict::Translate => {
                    self.found = Some((chain.clone(), rule));
                    return Ok(true);
                }
                Verdict::Accept | Verdict::Drop if all => return Ok(true),
                Verdict::Return if all => return Ok(false),
                Verdict::Jump(to) | Verdict::Goto(to) => {
                    let is_decided = self.visit(&Chain { name: to.clone(), ..chain.clone() })?;
                    if is_decided && (all || self.found.is_some()) {
                        return Ok(true);
                    }
                }
                Verdict::Accept
                | Verdict::Drop
                | Verdict::Return
                | Verdict::Continue
                | Verdict::Untrack
                | Verdict::Other => {}
            }
        }
        Ok(false)
    }
}

fn translation(base: &Chain, chain: &Chain, rule: &Rule) -> PacketDrop {
    let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
    let (base, chain, handle) = (&base.name, of_chain(chain), &rule.id);
    PacketDrop {
        cause: format!(
            "{chain} (hook postrouting): the rule with handle {handle} gives packets of pods to peers another \
             source, with which peers drop them"
        ),
        remedy: format!(
            "have its owner give the chain {base} the priority srcnat or a later one, or except packets to \
             peers, or remove the rule (`nft delete rule {place} handle {handle}`)"
        ),
    }
}
