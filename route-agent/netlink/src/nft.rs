//! Our firewall table: put there by `nft` in one transaction, read back by netlink.
//!
//! Output of `nft list` depends on its version, so it is never compared with anything.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netplan::{REFUSAL_TABLE, Refusal};
use sha2::{Digest, Sha256};

use crate::multicast::Multicast;
use crate::nfnetlink::{Kind, Nfnetlink, attribute, attributes, put, put_text, text};
use crate::{NetlinkError, Netns, NetnsError};

mod chains;
mod loaded;
mod lookup;
mod marks;
mod ports;
mod rule;
mod sets;

pub use chains::{
    BaseChain, Chain, ChainFamily, Hook, IpTable, base_chains, chain_rules, ip_tables, raw_chains,
    source_nat_chains, table_rules, target_nat_chains,
};
pub use loaded::{States, Tracked};
pub use marks::{MarkMatch, settable_marks};
pub use ports::Ports;
pub use rule::{AddressMatch, Condition, Interface, Rule, Verdict, decides_nothing};

/// A table as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its comment.
    pub mark: Option<String>,
    /// Digest of all chains, rules, sets and elements. Equal as long as nobody changes any.
    pub digest: [u8; 32],
}

#[derive(Debug, thiserror::Error)]
pub enum NftError {
    #[error("the program nft is missing; install the package nftables")]
    Missing,
    #[error("cannot start nft")]
    Start(#[source] io::Error),
    #[error("nft refuses: {0}")]
    Refused(String),
    #[error("cannot read the packet filter's tables")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Namespace(#[from] NetnsError),
}

/// Kinds of messages of nftables' own subsystem.
const fn kind(number: u8) -> Kind {
    Kind(10, number)
}
const NEW_TABLE: u8 = 0;
const DEL_TABLE: u8 = 2;
const GET_TABLE: Kind = kind(1);
const NEW_CHAIN: u8 = 3;
const GET_CHAIN: Kind = kind(4);
const DEL_CHAIN: u8 = 5;
const NEW_RULE: u8 = 6;
const GET_RULE: Kind = kind(7);
const DEL_RULE: u8 = 8;
const GET_SET: Kind = kind(10);
const NEW_ELEMENTS: u8 = 12;
const GET_ELEMENTS: Kind = kind(13);
const DEL_ELEMENTS: u8 = 14;
const GET_OBJECT: Kind = kind(19);

const INET: u8 = libc::NFPROTO_INET as u8;
/// The table's name is the first attribute of everything in a table.
const TABLE_NAME: u16 = 1;
const SET_NAME: u16 = 2;
/// Key of an element of a set.
const ELEMENT_KEY: u16 = 1;
const NFNLGRP_NFTABLES: u32 = 7;

/// Has `nft` read `script`, in one transaction.
pub fn run(netns: &Netns, script: &str) -> Result<(), NftError> {
    netns.run(|| run_here(script))?
}

fn run_here(script: &str) -> Result<(), NftError> {
    let child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| {
        let missing = error.kind() == io::ErrorKind::NotFound;
        if missing { NftError::Missing } else { NftError::Start(error) }
    })?;
    let mut input = child.stdin.take();
    let written = input.as_mut().map_or(Ok(()), |input| input.write_all(script.as_bytes()));
    drop(input);
    let output = child.wait_with_output().map_err(NftError::Start)?;
    if output.status.success() {
        return written.map_err(NftError::Start);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(NftError::Refused(errors.lines().take(3).collect::<Vec<_>>().join("; ")))
}

/// Reads a table of family `inet`; `None` if there is none.
pub fn table(netns: &Netns, name: &str) -> Result<Option<Table>, NftError> {
    match netns.run(|| table_here(name))? {
        // It may go while it is read.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        read => read.map(Some).map_err(NftError::Read),
    }
}

fn table_here(name: &str) -> io::Result<Table> {
    const USERDATA: u16 = 6;
    let socket = Nfnetlink::open()?;
    let mut named = Vec::new();
    put_text(&mut named, TABLE_NAME, name);
    let found = socket.ask(GET_TABLE, INET, &named)?.unwrap_or_default();
    let mut digest = Sha256::new();
    for kind in [GET_CHAIN, GET_RULE] {
        for body in socket.dump(kind, INET, &named)? {
            if text(&body, TABLE_NAME) == Some(name) {
                digest.update(&body);
            }
        }
    }
    for set in socket.dump(GET_SET, INET, &named)? {
        if text(&set, TABLE_NAME) == Some(name) {
            digest.update(&set);
            let set = text(&set, SET_NAME).unwrap_or_default();
            for element in elements(&socket, INET, (name, set))? {
                digest.update(element);
            }
        }
    }
    let mark = attribute(&found, USERDATA).and_then(comment).map(str::to_owned);
    Ok(Table { mark, digest: digest.finalize().into() })
}

/// Sorted, for a hash table gives them in any order.
fn elements(
    socket: &Nfnetlink,
    family: u8,
    (table, set): (&str, &str),
) -> io::Result<BTreeSet<Vec<u8>>> {
    Ok(elements_in(&socket.dump(GET_ELEMENTS, family, &named_set(table, set))?))
}

fn named_set(table: &str, set: &str) -> Vec<u8> {
    let mut body = Vec::new();
    put_text(&mut body, TABLE_NAME, table);
    put_text(&mut body, SET_NAME, set);
    body
}

fn elements_in(bodies: &[Vec<u8>]) -> BTreeSet<Vec<u8>> {
    const ELEMENTS: u16 = 3;
    let lists = bodies.iter().filter_map(|body| attribute(body, ELEMENTS));
    lists.flat_map(attributes).map(|(_, element)| element.to_vec()).collect()
}

/// Reads the table of refused prefixes; `None` if there is none.
pub fn refusal(netns: &Netns) -> Result<Option<Refusal>, NftError> {
    match netns.run(refusal_here)? {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        read => read.map(Some).map_err(NftError::Read),
    }
}

fn refusal_here() -> io::Result<Refusal> {
    let socket = Nfnetlink::open()?;
    let mut named = Vec::new();
    put_text(&mut named, TABLE_NAME, REFUSAL_TABLE);
    socket.ask(GET_TABLE, INET, &named)?;
    let mut refusal = Refusal::default();
    for set in socket.dump(GET_SET, INET, &named)? {
        if text(&set, TABLE_NAME) != Some(REFUSAL_TABLE) {
            continue;
        }
        let set = text(&set, SET_NAME).unwrap_or_default();
        for element in elements(&socket, INET, (REFUSAL_TABLE, set))? {
            if let Some((key, left)) = timed_key(&element) {
                refusal.add_element(set, key, left);
            }
        }
    }
    Ok(refusal)
}

/// Number of packets that a table's named counter has counted; 0 if there is none.
pub fn counted_packets(netns: &Netns, table: &str, counter: &str) -> Result<u64, NftError> {
    match netns.run(|| counted_packets_here(table, counter))? {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(0),
        read => read.map_err(NftError::Read),
    }
}

fn counted_packets_here(table: &str, counter: &str) -> io::Result<u64> {
    const NAME: u16 = 2;
    const TYPE: u16 = 3;
    const DATA: u16 = 4;
    const COUNTER: u32 = 1;
    const PACKETS: u16 = 2;
    let mut named = Vec::new();
    put_text(&mut named, TABLE_NAME, table);
    put_text(&mut named, NAME, counter);
    put(&mut named, TYPE, &COUNTER.to_be_bytes());
    let found = Nfnetlink::open()?.ask(GET_OBJECT, INET, &named)?.unwrap_or_default();
    let packets = attribute(&found, DATA).and_then(|data| attribute(data, PACKETS));
    let packets = packets.and_then(|bytes| bytes.try_into().ok());
    Ok(packets.map_or(0, u64::from_be_bytes))
}

/// Key of an element, and the time until it expires.
fn timed_key(element: &[u8]) -> Option<(&[u8], Duration)> {
    const EXPIRATION: u16 = 5;
    const VALUE: u16 = 1;
    let key = attribute(attribute(element, ELEMENT_KEY)?, VALUE)?;
    let left = attribute(element, EXPIRATION).and_then(|bytes| bytes.try_into().ok());
    Some((key, Duration::from_millis(left.map_or(0, u64::from_be_bytes))))
}

/// User data is type, length, value; type 0 is the comment, which ends with a zero byte.
fn comment(userdata: &[u8]) -> Option<&str> {
    let mut rest = userdata;
    while let [kind, len, tail @ ..] = rest {
        let (value, next) = tail.split_at_checked(usize::from(*len))?;
        if *kind == 0 {
            return std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok();
        }
        rest = next;
    }
    None
}

/// Changes of tables of ours, and of the chains of others that matter.
#[derive(Debug)]
pub struct Events {
    multicast: Multicast,
    tables: &'static [&'static str],
    /// Chains of others whose rules matter.
    pub watched: BTreeSet<Chain>,
}

impl Events {
    /// Must be called within a tokio runtime.
    pub fn open(netns: &Netns, tables: &'static [&'static str]) -> Result<Self, NetlinkError> {
        let multicast = Multicast::open(netns, NETLINK_NETFILTER, &[NFNLGRP_NFTABLES])?;
        Ok(Self { multicast, tables, watched: BTreeSet::new() })
    }

    /// Like [`crate::Events::changed`].
    pub async fn changed(&mut self) -> io::Result<()> {
        let (tables, watched) = (self.tables, &self.watched);
        self.multicast.changed(&mut |message| matters(message, tables, watched)).await
    }
}

fn matters(message: &[u8], ours: &[&str], watched: &BTreeSet<Chain>) -> bool {
    let (Some(kind), Some(body)) = (message.get(4), message.get(20..)) else { return true };
    let table = text(body, TABLE_NAME);
    let is_ours = table.is_some_and(|table| ours.contains(&table));
    match *kind {
        // A table may be dormant no longer.
        NEW_TABLE | NEW_CHAIN | DEL_CHAIN | DEL_TABLE => true,
        // Rules may look values up in these.
        NEW_ELEMENTS | DEL_ELEMENTS if !is_ours => {
            watched.iter().any(|chain| Some(&*chain.table) == table)
        }
        NEW_RULE | DEL_RULE if !is_ours => {
            let chain = text(body, 2);
            watched.iter().any(|w| Some(&*w.table) == table && Some(&*w.name) == chain)
        }
        _ => is_ours,
    }
}
