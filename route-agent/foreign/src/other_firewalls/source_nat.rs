//! Chains of other programs that translate sources of pods before weft's chain keeps them: peers accept no
//! other sources of this cluster than its pods' and external addresses.

use fabric_api::fabric::PacketDrop;
use netlink::Netns;
use netlink::nft::{self, Chain, Hook, NftError, Tracked, Verdict};
use netplan::{FIREWALL_TABLE, SOURCES_PRIORITY};

use super::drop_points::Rule;
use super::pod_packets::{Packets, Search};
use super::{Found, Treatment, of_chain};

/// Names the first rule of each such chain that translates packets of pods to peers.
pub(super) fn find(
    netns: &Netns,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), NftError> {
    let bases = nft::source_nat_chains(netns, SOURCES_PRIORITY)?;
    for base in bases.iter().filter(|base| base.table != FIREWALL_TABLE) {
        let mut load = |name: &str| {
            let chain = Chain { name: name.to_owned(), ..base.clone() };
            let rules = nft::chain_rules(netns, &chain, Tracked::New)?;
            Ok::<_, NftError>(rules.into_iter().map(Rule::from).collect())
        };
        for pods in treatment.pods_of(base.family) {
            let packets = Packets { pods, to_peers: true, hook: Hook::Postrouting };
            let mut search = Search::new((treatment, packets), Verdict::Translate, &mut load);
            search.visit(&base.name)?;
            let Search { visited, found: translating, is_certain, .. } = search;
            found.chains.extend(visited.into_keys().map(|name| Chain { name, ..base.clone() }));
            if let Some((name, rule)) = translating {
                let chain = Chain { name, ..base.clone() };
                let (drop, removal) = translation(base, &chain, &rule);
                found.add_problem(&drop);
                if is_certain {
                    treatment.add_fault(found, (Some(&rule), packets), (&drop, removal));
                }
            }
        }
    }
    Ok(())
}

/// Cause and remedy, and the command of the latter.
fn translation(base: &Chain, chain: &Chain, rule: &Rule) -> (PacketDrop, String) {
    let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
    let (base, chain, handle) = (&base.name, of_chain(chain), &rule.id);
    let removal = format!("nft delete rule {place} handle {handle}");
    let drop = PacketDrop {
        cause: format!(
            "{chain} (hook postrouting): the rule with handle {handle} gives packets of pods to peers another \
             source, with which peers drop them"
        ),
        remedy: format!(
            "have its owner give the chain {base} the priority srcnat or a later one, or except packets to \
             peers, or remove the rule (`{removal}`)"
        ),
    };
    (drop, removal)
}
