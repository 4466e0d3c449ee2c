//! Chains of all programs at the hooks that packets of the overlay pass, and their rules.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, io};

use crate::Netns;
use crate::nfnetlink::{Nfnetlink, attribute, attributes, number, put_text, text};

use super::sets::Sets;
use super::{GET_CHAIN, GET_RULE, GET_TABLE, NftError, Rule, TABLE_NAME, Tracked};

/// Name of a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chain {
    pub family: ChainFamily,
    pub table: String,
    pub name: String,
}

/// A chain that the kernel sends packets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseChain {
    pub chain: Chain,
    pub hook: Hook,
    /// Devices whose packets it gets, if it is one of devices.
    pub devices: BTreeSet<String>,
    pub priority: i32,
    /// Its policy: what no rule decides about is dropped.
    pub drops: bool,
    /// Only the program that made the table can change it (`flags owner`).
    pub owned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChainFamily {
    Inet,
    Ip,
    Ip6,
    Netdev,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    Ingress,
    Egress,
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

const CHAIN_NAME: u16 = 3;
const CHAIN_TYPE: u16 = 7;
const CHAIN_OF_RULE: u16 = 2;
/// Nested in a chain.
const HOOK: u16 = 4;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;

/// A table of family `ip`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpTable {
    pub name: String,
    /// Number by which it can be deleted, whatever its name.
    pub handle: u64,
    /// Names of its chains.
    pub chains: BTreeSet<String>,
}

/// All tables of family `ip`.
pub fn ip_tables(netns: &Netns) -> Result<Vec<IpTable>, NftError> {
    netns.run(ip_tables_here)?.map_err(NftError::Read)
}

fn ip_tables_here() -> io::Result<Vec<IpTable>> {
    const HANDLE: u16 = 4;
    let (socket, ip) = (Nfnetlink::open()?, ChainFamily::Ip.number());
    let mut chains: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for body in socket.dump(GET_CHAIN, ip, &[])? {
        if let (Some(table), Some(chain)) = (text(&body, TABLE_NAME), text(&body, CHAIN_NAME)) {
            chains.entry(table.to_owned()).or_default().insert(chain.to_owned());
        }
    }
    let tables = socket.dump(GET_TABLE, ip, &[])?;
    let table = |body: &Vec<u8>| {
        let name = text(body, TABLE_NAME)?.to_owned();
        let handle = u64::from_be_bytes(attribute(body, HANDLE)?.try_into().ok()?);
        Some(IpTable { handle, chains: chains.get(&name).cloned().unwrap_or_default(), name })
    };
    Ok(tables.iter().filter_map(table).collect())
}

/// All filter chains.
pub fn base_chains(netns: &Netns) -> Result<Vec<BaseChain>, NftError> {
    netns.run(base_chains_here)?.map_err(NftError::Read)
}

fn base_chains_here() -> io::Result<Vec<BaseChain>> {
    let socket = Nfnetlink::open()?;
    let mut chains = Vec::new();
    for family in [ChainFamily::Inet, ChainFamily::Ip, ChainFamily::Ip6, ChainFamily::Netdev] {
        let owned = tables_with(OWNER, &socket, family)?;
        let found = chains_at_work(&socket, family)?;
        chains.extend(found.iter().filter_map(|body| base_chain(family, &owned, body)));
    }
    Ok(chains)
}

/// Flags of tables (linux/netfilter/nf_tables.h).
const DORMANT: u32 = 1;
const OWNER: u32 = 2;

fn tables_with(flag: u32, socket: &Nfnetlink, family: ChainFamily) -> io::Result<BTreeSet<String>> {
    const FLAGS: u16 = 2;
    let tables = socket.dump(GET_TABLE, family.number(), &[])?;
    let flagged = tables.iter().filter(|t| number(t, FLAGS).is_some_and(|f| f & flag != 0));
    Ok(flagged.filter_map(|table| text(table, TABLE_NAME)).map(str::to_owned).collect())
}

/// Chains of a family, but for those of dormant tables, through which no packet goes.
fn chains_at_work(socket: &Nfnetlink, family: ChainFamily) -> io::Result<Vec<Vec<u8>>> {
    let dormant = tables_with(DORMANT, socket, family)?;
    let mut chains = socket.dump(GET_CHAIN, family.number(), &[])?;
    chains.retain(|body| text(body, TABLE_NAME).is_none_or(|table| !dormant.contains(table)));
    Ok(chains)
}

fn base_chain(family: ChainFamily, owned: &BTreeSet<String>, body: &[u8]) -> Option<BaseChain> {
    const POLICY: u16 = 5;
    let at = attribute(body, HOOK)?;
    let hook = match (family, number(at, HOOK_NUMBER)?) {
        (ChainFamily::Netdev, 0) | (ChainFamily::Inet, 5) => Hook::Ingress,
        (ChainFamily::Netdev, 1) => Hook::Egress,
        (ChainFamily::Netdev, _) => return None,
        (ChainFamily::Inet | ChainFamily::Ip | ChainFamily::Ip6, number) => match number {
            0 => Hook::Prerouting,
            1 => Hook::Input,
            2 => Hook::Forward,
            3 => Hook::Output,
            4 => Hook::Postrouting,
            _ => return None,
        },
    };
    // One of type route filters, too, and has the route looked up again: mangle's OUTPUT.
    let filters = matches!(text(body, CHAIN_TYPE), Some("filter" | "route"));
    let table = text(body, TABLE_NAME)?.to_owned();
    let owned = owned.contains(&table);
    let chain = Chain { family, table, name: text(body, CHAIN_NAME)?.to_owned() };
    let priority = number(at, HOOK_PRIORITY)? as i32;
    let drops = number(body, POLICY) == Some(0);
    let devices = devices(at);
    filters.then_some(BaseChain { chain, hook, devices, priority, drops, owned })
}

/// Devices of a hook: one, or a list.
fn devices(hook: &[u8]) -> BTreeSet<String> {
    const DEVICE: u16 = 3;
    const DEVICES: u16 = 4;
    let list = attributes(attribute(hook, DEVICES).unwrap_or_default());
    let name = |name: &[u8]| {
        name.strip_suffix(&[0]).and_then(|name| std::str::from_utf8(name).ok()).map(str::to_owned)
    };
    let listed = list.filter_map(|(_, device)| name(device));
    listed.chain(text(hook, DEVICE).map(str::to_owned)).collect()
}

impl BaseChain {
    /// Returns whether connection tracking has seen the packets of pods that go through the chain.
    pub fn tracked(&self) -> Tracked {
        match (self.hook, self.priority.cmp(&libc::NF_IP_PRI_CONNTRACK)) {
            (Hook::Ingress, _) | (Hook::Prerouting | Hook::Output, Ordering::Less) => Tracked::No,
            (Hook::Prerouting | Hook::Output, Ordering::Equal) => Tracked::Unknown,
            (Hook::Prerouting | Hook::Output, Ordering::Greater)
            | (Hook::Input | Hook::Forward | Hook::Postrouting | Hook::Egress, _) => Tracked::New,
        }
    }
}

/// Chains that translate sources and that the kernel comes to before `priority`.
pub fn source_nat_chains(netns: &Netns, priority: i32) -> Result<Vec<Chain>, NftError> {
    const POSTROUTING: u32 = 4;
    let found = netns.run(|| chains_before("nat", &[POSTROUTING], priority))?;
    found.map_err(NftError::Read)
}

/// Chains that translate destinations of incoming packets.
pub fn target_nat_chains(netns: &Netns) -> Result<Vec<Chain>, NftError> {
    const PREROUTING: u32 = 0;
    let found = netns.run(|| chains_before("nat", &[PREROUTING], i32::MAX))?;
    found.map_err(NftError::Read)
}

/// Chains that may exempt packets, incoming ones or those of this machine, from connection tracking.
pub fn raw_chains(netns: &Netns) -> Result<Vec<Chain>, NftError> {
    const PREROUTING: u32 = 0;
    const OUTPUT: u32 = 3;
    let found =
        netns.run(|| chains_before("filter", &[PREROUTING, OUTPUT], libc::NF_IP_PRI_CONNTRACK))?;
    found.map_err(NftError::Read)
}

fn chains_before(kind: &str, hooks: &[u32], priority: i32) -> io::Result<Vec<Chain>> {
    let socket = Nfnetlink::open()?;
    let mut chains = Vec::new();
    for family in [ChainFamily::Inet, ChainFamily::Ip, ChainFamily::Ip6] {
        for body in chains_at_work(&socket, family)? {
            let hook = attribute(&body, HOOK);
            let at = |key| hook.and_then(|hook| number(hook, key));
            let is_there = text(&body, CHAIN_TYPE) == Some(kind)
                && at(HOOK_NUMBER).is_some_and(|hook| hooks.contains(&hook))
                && at(HOOK_PRIORITY).is_some_and(|found| (found as i32) < priority);
            if let (true, Some(table), Some(name)) =
                (is_there, text(&body, TABLE_NAME), text(&body, CHAIN_NAME))
            {
                chains.push(Chain { family, table: table.to_owned(), name: name.to_owned() });
            }
        }
    }
    Ok(chains)
}

/// The rules of a chain, in their order. One that looks values up is there once for each element of the set.
pub fn chain_rules(netns: &Netns, chain: &Chain, tracked: Tracked) -> Result<Vec<Rule>, NftError> {
    let (family, table, name) = (chain.family, &*chain.table, &*chain.name);
    let read = || rules_here((family, table), Some(name), tracked);
    let mut rules = netns.run(read)?.map_err(NftError::Read)?;
    Ok(rules.remove(name).unwrap_or_default())
}

/// The rules of all chains of a table that have any, by chain.
pub fn table_rules(
    netns: &Netns,
    family: ChainFamily,
    table: &str,
) -> Result<BTreeMap<String, Vec<Rule>>, NftError> {
    netns.run(|| rules_here((family, table), None, Tracked::New))?.map_err(NftError::Read)
}

fn rules_here(
    (family, table): (ChainFamily, &str),
    chain: Option<&str>,
    tracked: Tracked,
) -> io::Result<BTreeMap<String, Vec<Rule>>> {
    let mut body = Vec::new();
    put_text(&mut body, TABLE_NAME, table);
    if let Some(chain) = chain {
        put_text(&mut body, CHAIN_OF_RULE, chain);
    }
    let mut rules: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
    let (socket, number) = (Nfnetlink::open()?, family.number());
    let mut sets = Sets::new(number, table);
    for body in socket.dump(GET_RULE, number, &body)? {
        let Some(found) = text(&body, CHAIN_OF_RULE) else { continue };
        let here = text(&body, TABLE_NAME) == Some(table) && chain.is_none_or(|c| c == found);
        let parsed = Rule::parse(&body, family.is_ipv4(), tracked).filter(|_| here);
        let Some((rule, lookups)) = parsed else { continue };
        rules.entry(found.to_owned()).or_default().extend(sets.expand(rule, &lookups)?);
    }
    Ok(rules)
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
        })
    }
}

impl ChainFamily {
    fn number(self) -> u8 {
        let number = match self {
            Self::Inet => libc::NFPROTO_INET,
            Self::Ip => libc::NFPROTO_IPV4,
            Self::Ip6 => libc::NFPROTO_IPV6,
            Self::Netdev => libc::NFPROTO_NETDEV,
        };
        number as u8
    }

    /// Family of IP of all packets that chains of this family get, if they get one only.
    pub fn is_ipv4(self) -> Option<bool> {
        match self {
            Self::Inet | Self::Netdev => None,
            Self::Ip => Some(true),
            Self::Ip6 => Some(false),
        }
    }

    /// As `nft` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Netdev => "netdev",
        }
    }
}
