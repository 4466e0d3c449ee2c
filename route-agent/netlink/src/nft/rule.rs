//! Meaning of a rule, as far as it decides where a packet of the overlay ends.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric_primitives::Cidr;
use nix::net::if_::if_indextoname;

use crate::nfnetlink::{attribute, attributes, number, text};

use super::{ELEMENT_KEY, comment};

/// Rule of a chain of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Identifies it within its table.
    pub handle: u64,
    pub comment: Option<String>,
    pub condition: Condition,
    /// Compares the type of the destination with that of this host's addresses. Not counted in `condition`.
    pub is_to_host: bool,
    pub verdict: Verdict,
    /// Values that packets are compared with, in network order.
    pub compared: Vec<Vec<u8>>,
    /// Devices that packets must come in or go out by, all of them.
    pub interfaces: Vec<Interface>,
    /// Prefixes that packets' addresses must be of, all of them.
    pub addresses: Vec<AddressMatch>,
    /// Protocol over IP, by number, and ports, if the rule compares them.
    pub protocol: Option<u8>,
    pub sports: BTreeSet<u16>,
    pub dports: BTreeSet<u16>,
    /// More is compared than the above, and than what holds for every packet that begins a connection.
    pub is_narrow: bool,
    /// No packet that begins a connection meets it.
    pub spares_new: bool,
}

/// Prefix that a rule compares a packet's address with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressMatch {
    /// The source, not the destination.
    pub source: bool,
    pub prefix: Cidr,
    /// All other addresses match instead.
    pub negated: bool,
}

/// Name of a device as a rule compares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The device that packets come in by, not the one that they go out by.
    pub incoming: bool,
    pub name: String,
    /// Names that begin so match, too.
    pub is_prefix: bool,
    /// All others match instead.
    pub negated: bool,
}

/// Set or map in which a rule looks a packet's device up.
#[derive(Debug)]
pub(super) struct Lookup {
    /// Key of the packet's meta data.
    key: u32,
    pub(super) set: String,
    /// Elements have verdicts.
    is_map: bool,
}

impl Interface {
    pub fn matches(&self, device: &str) -> bool {
        let found =
            if self.is_prefix { device.starts_with(&self.name) } else { device == self.name };
        found != self.negated
    }
}

/// Packets that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    Always,
    /// Nothing but the names of devices matters.
    Interface,
    /// Anything else, also what is not understood.
    Other,
}

/// Verdict on a packet that a rule applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Goes on to the next rule.
    Continue,
    Accept,
    /// Dropped or rejected.
    Drop,
    Return,
    Jump(String),
    Goto(String),
    /// Gives the packet another source or destination, for its whole connection.
    Translate,
    /// Exempts the packet from connection tracking.
    Untrack,
    /// A queue, a map of verdicts, or something not understood: may drop.
    Other,
}

impl Rule {
    /// Parses a rule's attributes, without table and chain.
    pub(super) fn parse(body: &[u8]) -> Option<(Self, Option<Lookup>)> {
        const HANDLE: u16 = 3;
        const EXPRESSIONS: u16 = 4;
        const USERDATA: u16 = 7;
        let handle = u64::from_be_bytes(attribute(body, HANDLE)?.try_into().ok()?);
        let comment = attribute(body, USERDATA).and_then(comment).map(str::to_owned);
        let mut rule = Self {
            handle,
            comment,
            condition: Condition::Always,
            is_to_host: false,
            verdict: Verdict::Continue,
            compared: Vec::new(),
            interfaces: Vec::new(),
            addresses: Vec::new(),
            protocol: None,
            sports: BTreeSet::new(),
            dports: BTreeSet::new(),
            is_narrow: false,
            spares_new: false,
        };
        let (mut loaded, mut lookup) = (Loaded::default(), None);
        for (_, expression) in attributes(attribute(body, EXPRESSIONS).unwrap_or_default()) {
            match devices(expression, loaded.key).filter(|_| lookup.is_none()) {
                Some(found) => lookup = Some(found),
                None => rule.add(expression, &mut loaded),
            }
        }
        Some((rule, lookup))
    }

    /// As one rule for each device that it looks up; as one that is not understood if there are other
    /// elements.
    pub(super) fn expand(self, lookup: &Lookup, elements: &BTreeSet<Vec<u8>>) -> Vec<Self> {
        let expanded: Option<Vec<_>> =
            elements.iter().map(|element| self.with_element(lookup, element)).collect();
        let verdict = if lookup.is_map { Verdict::Other } else { self.verdict.clone() };
        let unknown = || Self { condition: Condition::Other, verdict, is_narrow: true, ..self };
        expanded.unwrap_or_else(|| vec![unknown()])
    }

    fn with_element(&self, lookup: &Lookup, element: &[u8]) -> Option<Self> {
        const DATA: u16 = 2;
        const BYTES: u16 = 1;
        let key = attribute(attribute(element, ELEMENT_KEY)?, BYTES)?;
        let mut rule = self.clone();
        rule.interfaces.push(device(lookup.key, key, false)?);
        if lookup.is_map {
            rule.verdict = verdict(attribute(element, DATA)?)?;
        }
        Some(rule)
    }

    /// `loaded` is the value that the next comparison is about.
    fn add(&mut self, expression: &[u8], loaded: &mut Loaded) {
        const NAME: u16 = 1;
        const DATA: u16 = 2;
        let data = attribute(expression, DATA).unwrap_or_default();
        match text(expression, NAME) {
            Some("counter" | "log") => {}
            Some("bitwise") => loaded.mask = mask(data),
            Some("cmp") => self.compare(data, &std::mem::take(loaded)),
            Some("meta") => {
                self.condition = self.condition.max(meta(data));
                let key = number(data, META_KEY);
                self.is_narrow |=
                    meta(data) == Condition::Other && !matches!(key, Some(NFPROTO | L4PROTO));
                *loaded = Loaded { key, ..Loaded::default() };
            }
            Some("ct") if !sets_value(data) => {
                self.condition = Condition::Other;
                *loaded = Loaded { tracking: Tracking::parse(data), ..Loaded::default() };
                self.is_narrow |= loaded.tracking.is_none();
            }
            Some("ct") => {}
            Some("payload") => {
                self.condition = Condition::Other;
                *loaded = Loaded { field: Field::parse(data), ..Loaded::default() };
                self.is_narrow |= loaded.field.is_none();
            }
            Some("immediate") => {
                if let Some(verdict) = immediate(data) {
                    self.verdict = verdict;
                }
            }
            Some("reject") => self.verdict = Verdict::Drop,
            Some("queue") => self.verdict = Verdict::Other,
            Some("notrack") => self.verdict = Verdict::Untrack,
            Some("masq" | "nat") => self.verdict = Verdict::Translate,
            // Extensions of the old packet filter, in tables of `iptables-nft`.
            Some("target") => self.verdict = target(data),
            Some("match") if text(data, NAME) == Some("comment") => {}
            Some("match") if is_to_host(data) => (self.is_to_host, self.is_narrow) = (true, true),
            Some("match") => {
                self.condition = Condition::Other;
                self.compare_new(states_of_extension(data).and_then(States::are_met_by_new));
            }
            Some("lookup") => {
                (self.condition, self.is_narrow) = (Condition::Other, true);
                if is_verdict_map(data) {
                    self.verdict = Verdict::Other;
                }
            }
            _ => (self.condition, self.is_narrow) = (Condition::Other, true),
        }
    }

    fn compare(&mut self, data: &[u8], loaded: &Loaded) {
        const OPERATOR: u16 = 2;
        const NOT_EQUAL: u32 = 1;
        self.interfaces.extend(loaded.key.and_then(|key| interface(key, data)));
        let Some(value) = compared(data) else { return };
        let operator = number(data, OPERATOR).unwrap_or_default();
        let (is_equal, negated) = (operator == 0, operator == NOT_EQUAL);
        if let Some(tracking) = loaded.tracking {
            return self.compare_new(tracking.is_met_by_new(
                &value,
                loaded.mask.as_deref(),
                operator,
            ));
        }
        match loaded {
            Loaded { key: Some(L4PROTO), .. } | Loaded { field: Some(Field::Protocol), .. }
                if is_equal && loaded.mask.is_none() && value.len() == 1 =>
            {
                self.protocol = value.first().copied();
            }
            Loaded { key: Some(L4PROTO), .. } => self.is_narrow = true,
            Loaded { field: Some(Field::Port { source }), mask: None, .. } if is_equal => {
                let port = <[u8; 2]>::try_from(value.as_slice()).map(u16::from_be_bytes);
                let ports = if *source { &mut self.sports } else { &mut self.dports };
                ports.extend(port);
            }
            Loaded { field: Some(Field::Address { source, ipv4 }), mask, .. } => {
                let prefix = prefix(&value, mask.as_deref(), *ipv4);
                let source = *source;
                let found = prefix.map(|prefix| AddressMatch { source, prefix, negated });
                self.is_narrow |= found.is_none() || !(is_equal || negated);
                self.addresses.extend(found);
            }
            Loaded { field: Some(Field::Port { .. } | Field::Protocol), .. } => {
                self.is_narrow = true;
            }
            Loaded { field: None, .. } => {}
        }
        self.compared.push(value);
    }

    /// Takes in a comparison that all packets which begin a connection meet, or none, or some.
    fn compare_new(&mut self, is_met: Option<bool>) {
        self.is_narrow |= is_met != Some(true);
        self.spares_new |= is_met == Some(false);
    }
}

/// Part of connection tracking that a rule compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracking {
    State,
    Direction,
}

impl Tracking {
    /// `None` for what is not understood.
    fn parse(data: &[u8]) -> Option<Self> {
        const KEY: u16 = 2;
        match number(data, KEY)? {
            0 => Some(Self::State),
            1 => Some(Self::Direction),
            _ => None,
        }
    }

    /// Returns whether packets that begin a connection meet a comparison; `None` if some may.
    fn is_met_by_new(self, value: &[u8], mask: Option<&[u8]>, operator: u32) -> Option<bool> {
        let word = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).map(u32::from_ne_bytes).ok();
        let is_zero = value.iter().all(|byte| *byte == 0);
        // Equal, or not equal.
        let is_equal = matches!(operator, 0 | 1).then_some(operator == 0)?;
        match (self, mask) {
            (Self::State, Some(mask)) if is_zero => {
                States { listed: word(mask)?, inverted: is_equal }.are_met_by_new()
            }
            (Self::State, None) => {
                States { listed: word(value)?, inverted: !is_equal }.are_met_by_new()
            }
            // Packets of the end that has begun a connection have direction 0.
            (Self::Direction, None) => Some(is_zero == is_equal),
            (Self::State | Self::Direction, Some(_)) => None,
        }
    }
}

/// States of connections that a rule is about, as bits of nftables and of the old packet filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct States {
    pub listed: u32,
    /// All others are meant instead.
    pub inverted: bool,
}

impl States {
    pub const INVALID: u32 = 1;
    pub const ESTABLISHED: u32 = 1 << 1;
    pub const RELATED: u32 = 1 << 2;
    pub const NEW: u32 = 1 << 3;

    /// Returns whether packets that begin a connection have one of them; `None` if some may: one without tracking, or to
    /// another destination than it was sent to, has a state of its own as well.
    pub fn are_met_by_new(self) -> Option<bool> {
        let has_new = self.listed & Self::NEW != 0;
        let simple = Self::NEW | Self::INVALID | Self::ESTABLISHED | Self::RELATED;
        let is_known = self.listed & !simple == 0 || has_new && !self.inverted;
        is_known.then_some(has_new != self.inverted)
    }
}

/// States that an extension of the old packet filter compares, if it compares nothing else (`xt_conntrack.h`, its
/// third and fourth revision; `xt_state.h`).
fn states_of_extension(data: &[u8]) -> Option<States> {
    const NAME: u16 = 1;
    const REVISION: u16 = 2;
    const INFO: u16 = 3;
    /// Places of the flags of what is compared, of what is inverted, and of the states.
    const FLAGS: usize = 146;
    const STATE: u16 = 1;
    /// It was written as `-m state`.
    const STATE_ALIAS: u16 = 1 << 13;
    let info = attribute(data, INFO)?;
    let short = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
    match (text(data, NAME)?, number(data, REVISION)?) {
        ("conntrack", 2 | 3) => {
            let (flags, inverted) = (short(FLAGS)?, short(FLAGS + 2)?);
            let listed = u32::from(short(FLAGS + 4)?);
            let states = States { listed, inverted: inverted & STATE != 0 };
            (flags & !STATE_ALIAS == STATE).then_some(states)
        }
        ("state", 0) => {
            let listed = u32::from_ne_bytes(info.get(..4)?.try_into().ok()?);
            Some(States { listed, inverted: false })
        }
        _ => None,
    }
}

/// Value that a rule has loaded to compare it.
#[derive(Debug, Default)]
struct Loaded {
    /// Key of the packet's meta data.
    key: Option<u32>,
    field: Option<Field>,
    tracking: Option<Tracking>,
    mask: Option<Vec<u8>>,
}

/// Field of a packet's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Address { source: bool, ipv4: bool },
    Protocol,
    Port { source: bool },
}

impl Field {
    /// `None` for one that is not understood. An address may be cut behind its prefix.
    fn parse(data: &[u8]) -> Option<Self> {
        const BASE: u16 = 2;
        const OFFSET: u16 = 3;
        const NETWORK: u32 = 1;
        const TRANSPORT: u32 = 2;
        Some(match (number(data, BASE)?, number(data, OFFSET)?) {
            (NETWORK, 12) => Self::Address { source: true, ipv4: true },
            (NETWORK, 16) => Self::Address { source: false, ipv4: true },
            (NETWORK, 8) => Self::Address { source: true, ipv4: false },
            (NETWORK, 24) => Self::Address { source: false, ipv4: false },
            (NETWORK, 9 | 6) => Self::Protocol,
            (TRANSPORT, 0) => Self::Port { source: true },
            (TRANSPORT, 2) => Self::Port { source: false },
            _ => return None,
        })
    }
}

fn mask(data: &[u8]) -> Option<Vec<u8>> {
    const MASK: u16 = 4;
    const BYTES: u16 = 1;
    Some(attribute(attribute(data, MASK)?, BYTES)?.to_vec())
}

/// Prefix that addresses equal to `value` under a mask are of.
fn prefix(value: &[u8], mask: Option<&[u8]>, ipv4: bool) -> Option<Cidr> {
    let bits = |byte: &u8| byte.count_ones();
    let len = match mask {
        Some(mask) => mask.iter().map(bits).sum(),
        None => u32::try_from(value.len() * 8).ok()?,
    };
    let mut octets = [0; 16];
    octets.get_mut(..value.len())?.copy_from_slice(value);
    let [a, b, c, d, ..] = octets;
    let address = if ipv4 { IpAddr::from([a, b, c, d]) } else { IpAddr::from(octets) };
    Cidr::around(address, u8::try_from(len).ok()?)
}

/// True for the extension `-m addrtype --dst-type LOCAL`: its mask of source types, that of destination types, 16 bits
/// each, and flags, in the second revision of the extension.
fn is_to_host(data: &[u8]) -> bool {
    const NAME: u16 = 1;
    const REVISION: u16 = 2;
    const INFO: u16 = 3;
    const LOCAL: u16 = 1 << libc::RTN_LOCAL;
    let info = [[0; 2], LOCAL.to_ne_bytes(), [0; 2], [0; 2]].concat();
    text(data, NAME) == Some("addrtype")
        && number(data, REVISION) == Some(1)
        && attribute(data, INFO).is_some_and(|found| found.starts_with(&info))
}

/// Verdict of an extension's target.
fn target(data: &[u8]) -> Verdict {
    const NAME: u16 = 1;
    const INFO: u16 = 3;
    /// A flag in the first of two bytes of the target CT.
    const NOTRACK: u8 = 1;
    let is_untracked = || attribute(data, INFO)?.first().map(|flags| flags & NOTRACK != 0);
    match text(data, NAME) {
        Some("CT") if is_untracked() == Some(true) => Verdict::Untrack,
        Some("NOTRACK") => Verdict::Untrack,
        Some("REJECT") => Verdict::Drop,
        Some("LOG" | "NFLOG" | "MARK" | "CONNMARK") => Verdict::Continue,
        Some("MASQUERADE" | "SNAT") => Verdict::Translate,
        _ => Verdict::Other,
    }
}

/// True for an expression that sets a value instead of loading it.
fn sets_value(data: &[u8]) -> bool {
    const SOURCE: u16 = 4;
    attribute(data, SOURCE).is_some()
}

const META_KEY: u16 = 2;
const NFPROTO: u32 = 15;
const L4PROTO: u32 = 16;
const IIF: u32 = 4;
const OIF: u32 = 5;
const IIFNAME: u32 = 6;
const OIFNAME: u32 = 7;

/// One that sets something is no condition.
fn meta(data: &[u8]) -> Condition {
    const SOURCE: u16 = 3;
    match number(data, META_KEY) {
        _ if attribute(data, SOURCE).is_some() => Condition::Always,
        Some(IIF | OIF | IIFNAME | OIFNAME) => Condition::Interface,
        _ => Condition::Other,
    }
}

/// Device of a comparison, which has its name or its index in this namespace.
fn interface(key: u32, data: &[u8]) -> Option<Interface> {
    const OPERATOR: u16 = 2;
    const NOT_EQUAL: u32 = 1;
    device(key, &compared(data)?, number(data, OPERATOR)? == NOT_EQUAL)
}

fn device(key: u32, value: &[u8], negated: bool) -> Option<Interface> {
    const MAX_NAME: usize = 16;
    let (name, is_prefix) = match key {
        // Several fields in one would be longer.
        IIFNAME | OIFNAME if value.len() > MAX_NAME => return None,
        IIFNAME | OIFNAME => {
            let end = value.iter().position(|byte| *byte == 0);
            let name = value.get(..end.unwrap_or(value.len()))?;
            (String::from_utf8_lossy(name).into_owned(), end.is_none())
        }
        IIF | OIF => {
            let index = u32::from_ne_bytes(value.try_into().ok()?);
            let name = if_indextoname(index).ok()?;
            (name.to_string_lossy().into_owned(), false)
        }
        _ => return None,
    };
    let incoming = matches!(key, IIF | IIFNAME);
    Some(Interface { incoming, name, is_prefix, negated })
}

/// The set of a lookup of the device whose key was loaded.
fn devices(expression: &[u8], loaded: Option<u32>) -> Option<Lookup> {
    const NAME: u16 = 1;
    const DATA: u16 = 2;
    const SET: u16 = 1;
    const FLAGS: u16 = 5;
    let key = loaded.filter(|key| matches!(*key, IIF | OIF | IIFNAME | OIFNAME))?;
    let data = attribute(expression, DATA).filter(|_| text(expression, NAME) == Some("lookup"))?;
    let inverted = number(data, FLAGS).is_some_and(|flags| flags != 0);
    let set = text(data, SET).filter(|_| !inverted)?.to_owned();
    Some(Lookup { key, set, is_map: is_verdict_map(data) })
}

fn compared(data: &[u8]) -> Option<Vec<u8>> {
    const VALUE: u16 = 3;
    const BYTES: u16 = 1;
    Some(attribute(attribute(data, VALUE)?, BYTES)?.to_vec())
}

/// True if the value found is written to the register of verdicts.
fn is_verdict_map(data: &[u8]) -> bool {
    const DESTINATION: u16 = 3;
    number(data, DESTINATION) == Some(0)
}

/// `None` if it loads a value instead.
fn immediate(data: &[u8]) -> Option<Verdict> {
    const VALUE: u16 = 2;
    verdict(attribute(data, VALUE)?)
}

fn verdict(value: &[u8]) -> Option<Verdict> {
    const VERDICT: u16 = 2;
    const CODE: u16 = 1;
    const CHAIN: u16 = 2;
    let verdict = attribute(value, VERDICT)?;
    let chain = || text(verdict, CHAIN).unwrap_or_default().to_owned();
    Some(match number(verdict, CODE)? as i32 {
        libc::NF_DROP => Verdict::Drop,
        libc::NF_ACCEPT => Verdict::Accept,
        libc::NFT_CONTINUE => Verdict::Continue,
        libc::NFT_JUMP => Verdict::Jump(chain()),
        libc::NFT_GOTO => Verdict::Goto(chain()),
        libc::NFT_RETURN => Verdict::Return,
        _ => Verdict::Other,
    })
}
