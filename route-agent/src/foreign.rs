use std::collections::BTreeSet;
use std::fmt::Write;

use netlink::Netns;
use netlink::nft::{self, BaseChain, ChainFamily, Hook, NftError};
use netplan::FIREWALL_TABLE;

use crate::legacy;

/// Marks our rules in chains of others.
pub(crate) const COMMENT: &str = "weft";

/// What was found in others' chains.
#[derive(Debug, Default)]
pub(crate) struct Foreign {
    /// Drop what we need to pass.
    pub(crate) problems: BTreeSet<String>,
    /// Those that packets we need to pass go through.
    pub(crate) chains: BTreeSet<BaseChain>,
    pub(crate) changed: bool,
}

/// Sees to it that our accepts stand in each chain that drops what it has no rule for (if
/// `accept`), and in no other. Accepting in our own table would not help: a packet passes only if all chains let it.
pub(crate) fn ensure(netns: &Netns, accept: bool) -> Result<Foreign, NftError> {
    let mut foreign = Foreign::default();
    for chain in nft::base_chains(netns)? {
        if chain.family == ChainFamily::Inet && chain.table == FIREWALL_TABLE {
            continue;
        }
        let rules = nft::rules(netns, &chain)?;
        let drops = chain.drops || rules.iter().any(|rule| rule.drops);
        let wanted = if accept && drops { accepts(chain.hook) } else { &[] };
        let ours = rules.iter().filter(|rule| rule.comment.as_deref() == Some(COMMENT));
        let have: Vec<u64> = ours.map(|rule| rule.handle).collect();
        let mut refused = None;
        if have.len() != wanted.len() {
            refused = nft::run(netns, &script(&chain, &have, wanted)).err();
            foreign.changed |= refused.is_none();
        }
        // One that belongs to a program alone keeps nobody from the others.
        match refused {
            Some(error) => {
                foreign.problems.insert(format!("{} cannot be changed: {error}", name(&chain)));
            }
            None if drops => {
                foreign.problems.insert(problem(&name(&chain), chain.hook, accept));
            }
            None => {}
        }
        foreign.chains.insert(chain);
    }
    foreign.problems.extend(legacy::ensure(netns, accept));
    Ok(foreign)
}

/// Plain matches only: `iptables-nft` can read these, and refuses a table with others in it.
fn accepts(hook: Hook) -> &'static [&'static str] {
    match hook {
        Hook::Forward => &["iifname \"weft*\"", "oifname \"weft*\""],
        Hook::Input => &["udp dport 4879"],
    }
}

fn script(chain: &BaseChain, have: &[u64], want: &[&str]) -> String {
    let BaseChain { family, table, name, .. } = chain;
    let place = format!("{} {table} {name}", family.name());
    let mut script = String::new();
    for handle in have {
        _ = writeln!(script, "delete rule {place} handle {handle}");
    }
    for matches in want {
        _ = writeln!(script, "insert rule {place} {matches} accept comment \"{COMMENT}\"");
    }
    script
}

fn name(chain: &BaseChain) -> String {
    format!("chain {} {} {}", chain.family.name(), chain.table, chain.name)
}

pub(crate) fn problem(chain: &str, hook: Hook, accept: bool) -> String {
    let what = match hook {
        Hook::Forward => "forwarded packets",
        Hook::Input => "packets to this node",
    };
    let done = if accept {
        "weft's own accepts stand in it"
    } else {
        "with --no-accept-rules its owner must let the overlay pass"
    };
    format!("{chain} drops {what} that it has no rule for; {done}")
}
