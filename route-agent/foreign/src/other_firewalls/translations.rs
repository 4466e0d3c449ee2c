//! Chains of other programs that translate packets of pods to peers: their destinations, or their sources before
//! weft's chain keeps these. Peers accept no other sources of this cluster than its pods' and external addresses.

use fabric_api::fabric::PacketDrop;
use netlink::Netns;
use netlink::nft::{self, Chain, Hook, NftError, Tracked, Verdict};
use netplan::{FIREWALL_TABLE, SOURCES_PRIORITY};

use super::drop_points::Rule;
use super::pod_packets::{Packets, Search};
use super::{Found, Treatment, of_chain};

/// Names the first rule of each such chain.
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
            Ok::<_, NftError>(rules.into_iter().map(Rule::from).collect())
        };
        for pods in treatment.pods_of(base.family) {
            let packets = Packets { pods, to_peers: true, hook };
            let mut search = Search::new((treatment, packets), Verdict::Translate, &mut load);
            search.visit(&base.name)?;
            let Search { visited, found: translating, is_certain, .. } = search;
            found.chains.extend(visited.into_keys().map(|name| Chain { name, ..base.clone() }));
            if let Some((name, rule)) = translating {
                let chain = Chain { name, ..base.clone() };
                let (drop, removal) = translation((hook, &base), &chain, &rule);
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
fn translation((hook, base): (Hook, &Chain), chain: &Chain, rule: &Rule) -> (PacketDrop, String) {
    let place = format!("{} {} {}", chain.family.name(), chain.table, chain.name);
    let (base, chain, handle) = (&base.name, of_chain(chain), &rule.id);
    let removal = format!("nft delete rule {place} handle {handle}");
    let (end, priority) = match hook {
        Hook::Postrouting => (
            "source, with which peers drop them",
            format!("give the chain {base} the priority srcnat or a later one, or "),
        ),
        Hook::Ingress
        | Hook::Egress
        | Hook::Prerouting
        | Hook::Input
        | Hook::Forward
        | Hook::Output => ("destination", String::new()),
    };
    let cause = format!(
        "{chain} (hook {hook}): the rule with handle {handle} gives packets of pods to peers another {end}"
    );
    let remedy = format!(
        "have its owner {priority}except packets to peers, or remove the rule (`{removal}`)"
    );
    (PacketDrop { cause, remedy }, removal)
}
