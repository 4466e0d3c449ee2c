//! Meaning of a rule, as far as it decides where a packet of the overlay ends.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use fabric_primitives::Cidr;
use nix::net::if_::if_indextoname;

use crate::nfnetlink::{attribute, attributes, number, text};

use super::comment;
use super::loaded::{
    Field, IIF, IIFNAME, L4PROTO, Loaded, MARK, META_KEY, NFPROTO, OIF, OIFNAME, PROTOCOL, States,
    Tracked, Tracking, is_verdict_map, sets_value,
};
use super::lookup::Lookup;
use super::marks::MarkMatch;
use super::ports::{self, Ports};

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
    /// Family of IP that packets must be of, if the rule compares it.
    pub is_ipv4: Option<bool>,
    /// Marks of packets and connections that the rule compares. Not counted in the two below.
    pub marks: Vec<MarkMatch>,
    /// Protocol over IP, by number, and ports, if the rule compares them.
    pub protocol: Option<u8>,
    pub sports: Ports,
    pub dports: Ports,
    /// States or directions of connections are compared, whatever the packets meet that the rule was read for.
    pub is_by_state: bool,
    /// More is compared than the above, and than what holds for each of the packets that the rule was read for.
    pub is_narrow: bool,
    /// None of these packets meets it.
    pub spares_all: bool,
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
    /// Parses a rule's attributes, without table and chain, and the sets that it looks values up in.
    ///
    /// `is_ipv4` is the family of IP of the table, if it has one.
    pub(super) fn parse(
        body: &[u8],
        is_ipv4: Option<bool>,
        tracked: Tracked,
    ) -> Option<(Self, Vec<Lookup>)> {
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
            is_ipv4,
            marks: Vec::new(),
            protocol: None,
            sports: Ports::default(),
            dports: Ports::default(),
            is_by_state: false,
            is_narrow: false,
            spares_all: false,
        };
        let (mut loaded, mut lookups) = (Loaded { tracked, ..Loaded::default() }, Vec::new());
        for (_, expression) in attributes(attribute(body, EXPRESSIONS).unwrap_or_default()) {
            match Lookup::parse(expression, &loaded) {
                Some(lookup) => {
                    if lookup.loads_value {
                        loaded = loaded.of_map();
                    }
                    lookups.push(lookup);
                }
                None => rule.add(expression, &mut loaded),
            }
        }
        Some((rule, lookups))
    }

    /// `loaded` is the value that the next comparison is about.
    fn add(&mut self, expression: &[u8], loaded: &mut Loaded) {
        const NAME: u16 = 1;
        const DATA: u16 = 2;
        const OBJECT: u16 = 1;
        const COUNTER: u32 = 1;
        let data = attribute(expression, DATA).unwrap_or_default();
        match text(expression, NAME) {
            Some("counter" | "log") => {}
            Some("objref") if number(data, OBJECT) == Some(COUNTER) => {}
            Some("bitwise") => match mask(data).filter(|_| loaded.mask.is_none()) {
                Some(mask) => loaded.mask = Some(mask),
                None => {
                    self.is_narrow = true;
                    *loaded = loaded.cleared();
                }
            },
            Some("cmp") => self.compare(data, loaded),
            Some("range") => match (loaded.field.filter(|_| loaded.mask.is_none()), range(data)) {
                (Some(Field::Port { source }), Some(range)) => self.compare_ports(source, range),
                _ => (self.condition, self.is_narrow) = (Condition::Other, true),
            },
            Some("meta") => {
                self.condition = self.condition.max(meta(data));
                let key = number(data, META_KEY);
                self.is_narrow |= meta(data) == Condition::Other
                    && !matches!(key, Some(NFPROTO | PROTOCOL | L4PROTO | MARK));
                *loaded = Loaded { key, ..loaded.cleared() };
            }
            Some("ct") if !sets_value(data) => {
                self.condition = Condition::Other;
                *loaded = Loaded { tracking: Tracking::parse(data), ..loaded.cleared() };
                self.is_narrow |= loaded.tracking.is_none();
            }
            Some("ct") => {}
            Some("payload") => {
                self.condition = Condition::Other;
                *loaded = Loaded { field: Field::parse(data, self.is_ipv4), ..loaded.cleared() };
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
            Some("masq" | "nat" | "redir") => self.verdict = Verdict::Translate,
            // Extensions of the old packet filter, in tables of `iptables-nft`.
            Some("target") => self.verdict = target(data),
            Some("match") if text(data, NAME) == Some("comment") => {}
            Some("match") if is_to_host(data) => (self.is_to_host, self.is_narrow) = (true, true),
            Some("match") => {
                self.condition = Condition::Other;
                if let Some((source, ranges)) = ports::of_extension(data) {
                    return ranges.into_iter().for_each(|range| self.compare_ports(source, range));
                }
                let states = states_of_extension(data);
                self.is_by_state |= states.is_some();
                self.compare_state(states.and_then(|states| states.are_met_by(loaded.tracked)));
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
        if let Some(value) = compared(data) {
            let operator = number(data, OPERATOR).unwrap_or_default();
            self.compare_value(&value, operator, loaded);
        }
    }

    /// Takes in a comparison of a loaded value. The operator 0 is equality, 1 inequality.
    pub(super) fn compare_value(&mut self, value: &[u8], operator: u32, loaded: &Loaded) {
        const LTE: u32 = 3;
        const GTE: u32 = 5;
        let (is_equal, negated) = (operator == 0, operator == 1);
        let mark = MarkMatch::parse(value, loaded.mask.as_deref(), operator);
        if let Some(tracking) = loaded.tracking {
            if tracking == Tracking::Mark
                && !matches!(loaded.tracked, Tracked::No | Tracked::Unknown)
            {
                return self.compare_mark(mark);
            }
            let of_value = (value, loaded.mask.as_deref(), operator);
            let is_met = tracking.is_met_by(loaded.tracked, of_value);
            self.is_by_state = true;
            return self.compare_state(is_met);
        }
        match loaded {
            Loaded { key: Some(key @ (IIF | OIF | IIFNAME | OIFNAME)), .. } => {
                let found = device(*key, value, negated).filter(|_| is_equal || negated);
                self.is_narrow |= found.is_none();
                self.interfaces.extend(found);
            }
            Loaded { key: Some(MARK), .. } => return self.compare_mark(mark),
            Loaded { key: Some(NFPROTO | PROTOCOL), .. } => {
                self.compare_family(value, is_equal, negated);
            }
            Loaded { key: Some(L4PROTO), .. } | Loaded { field: Some(Field::Protocol), .. }
                if is_equal && loaded.mask.is_none() && value.len() == 1 =>
            {
                self.protocol = value.first().copied();
            }
            Loaded { key: Some(L4PROTO), .. } => self.is_narrow = true,
            Loaded { field: Some(Field::Port { source }), mask: None, .. }
                if matches!(operator, 0 | LTE | GTE) && value.len() == 2 =>
            {
                let port = u16::from_be_bytes([value[0], value[1]]);
                match operator {
                    LTE => self.ports(*source).end_at(port),
                    GTE => self.compare_ports(*source, port..=u16::MAX),
                    _ => self.compare_ports(*source, port..=port),
                }
            }
            Loaded { field: Some(Field::Address { source, ipv4 }), mask, .. } => {
                let prefix = prefix(value, mask.as_deref(), *ipv4);
                let source = *source;
                let found = prefix.map(|prefix| AddressMatch { source, prefix, negated });
                self.is_narrow |= found.is_none() || !(is_equal || negated);
                self.addresses.extend(found);
            }
            Loaded { field: Some(Field::Port { .. } | Field::Protocol | Field::OfMap), .. } => {
                self.is_narrow = true;
            }
            Loaded { field: None, .. } => {}
        }
        self.compared.push(value.to_vec());
    }

    pub(super) fn compare_ports(&mut self, source: bool, range: RangeInclusive<u16>) {
        self.ports(source).add(range);
    }

    fn ports(&mut self, source: bool) -> &mut Ports {
        if source { &mut self.sports } else { &mut self.dports }
    }

    pub(super) fn compare_prefix(&mut self, source: bool, prefix: Cidr, negated: bool) {
        self.addresses.push(AddressMatch { source, prefix, negated });
    }

    pub(super) fn with_unknown_condition(&self, verdict: Verdict) -> Self {
        Self { condition: Condition::Other, verdict, is_narrow: true, ..self.clone() }
    }

    fn compare_mark(&mut self, mark: Option<MarkMatch>) {
        self.is_narrow |= mark.is_none();
        self.marks.extend(mark);
    }

    /// Takes in the comparisons of marks, of which no bits are set but these.
    pub fn resolve_marks(&mut self, settable: u32) {
        for mark in std::mem::take(&mut self.marks) {
            self.compare_state(mark.is_met(settable));
        }
    }

    fn compare_family(&mut self, value: &[u8], is_equal: bool, negated: bool) {
        let is_any = |families: [&[u8]; 2]| families.contains(&value);
        let is_ipv4 = is_any([&[libc::NFPROTO_IPV4 as u8], &ethernet(libc::ETH_P_IP)]);
        let is_ipv6 = is_any([&[libc::NFPROTO_IPV6 as u8], &ethernet(libc::ETH_P_IPV6)]);
        self.is_narrow |= !(is_ipv4 || is_ipv6);
        self.is_narrow |= !(is_equal || negated);
        self.is_ipv4 = Some(is_ipv4 != negated);
    }

    /// Takes in a comparison that all of the packets meet, or none, or some.
    fn compare_state(&mut self, is_met: Option<bool>) {
        self.is_narrow |= is_met != Some(true);
        self.spares_all |= is_met == Some(false);
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

/// Type of Ethernet as a rule compares it.
fn ethernet(kind: i32) -> [u8; 2] {
    let [.., high, low] = kind.to_be_bytes();
    [high, low]
}

/// Mask of a bitwise operation; `None` if it flips or shifts bits, too.
fn mask(data: &[u8]) -> Option<Vec<u8>> {
    const MASK: u16 = 4;
    const XOR: u16 = 5;
    const OPERATION: u16 = 6;
    const BYTES: u16 = 1;
    let flipped = attribute(attribute(data, XOR)?, BYTES)?;
    let is_and =
        number(data, OPERATION).is_none_or(|of| of == 0) && flipped.iter().all(|b| *b == 0);
    Some(attribute(attribute(data, MASK)?, BYTES)?.to_vec()).filter(|_| is_and)
}

/// Prefix that addresses equal to `value` under a mask are of.
fn prefix(value: &[u8], mask: Option<&[u8]>, ipv4: bool) -> Option<Cidr> {
    let len = match mask {
        Some(mask) => leading_ones(mask)?,
        None => u32::try_from(value.len() * 8).ok()?,
    };
    let mut octets = [0; 16];
    octets.get_mut(..value.len())?.copy_from_slice(value);
    let [a, b, c, d, ..] = octets;
    let address = if ipv4 { IpAddr::from([a, b, c, d]) } else { IpAddr::from(octets) };
    Cidr::around(address, u8::try_from(len).ok()?)
}

/// Number of ones of a mask that has no other behind them.
fn leading_ones(mask: &[u8]) -> Option<u32> {
    let all: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    let full = mask.iter().take_while(|byte| **byte == 0xff).count();
    let partly = mask.get(full).map_or(0, |byte| byte.leading_ones());
    let leading = u32::try_from(full * 8).ok()? + partly;
    (leading == all).then_some(leading)
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
        Some("MASQUERADE" | "SNAT" | "DNAT" | "REDIRECT" | "NETMAP") => Verdict::Translate,
        Some(name) if decides_nothing(name) => Verdict::Continue,
        _ => Verdict::Other,
    }
}

/// True for a target of the old packet filter behind which all packets go on (iptables-extensions(8)).
pub fn decides_nothing(target: &str) -> bool {
    const TARGETS: [&str; 17] = [
        "AUDIT", "CHECKSUM", "CLASSIFY", "CONNMARK", "CT", "DSCP", "ECN", "HL", "LOG", "MARK",
        "NFLOG", "SET", "TCPMSS", "TEE", "TOS", "TRACE", "TTL",
    ];
    TARGETS.contains(&target)
}

/// One that sets something is no condition.
fn meta(data: &[u8]) -> Condition {
    const SOURCE: u16 = 3;
    match number(data, META_KEY) {
        _ if attribute(data, SOURCE).is_some() => Condition::Always,
        Some(IIF | OIF | IIFNAME | OIFNAME) => Condition::Interface,
        _ => Condition::Other,
    }
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

fn compared(data: &[u8]) -> Option<Vec<u8>> {
    const VALUE: u16 = 3;
    const BYTES: u16 = 1;
    Some(attribute(attribute(data, VALUE)?, BYTES)?.to_vec())
}

/// Ports of a comparison with a range; `None` if all others match instead.
fn range(data: &[u8]) -> Option<RangeInclusive<u16>> {
    const OPERATOR: u16 = 2;
    const FROM: u16 = 3;
    const TO: u16 = 4;
    const BYTES: u16 = 1;
    let port = |key| {
        let bytes = attribute(attribute(data, key)?, BYTES)?;
        Some(u16::from_be_bytes(bytes.try_into().ok()?))
    };
    let range = port(FROM)?..=port(TO)?;
    (number(data, OPERATOR) == Some(0)).then_some(range)
}

/// `None` if it loads a value instead.
fn immediate(data: &[u8]) -> Option<Verdict> {
    const VALUE: u16 = 2;
    verdict(attribute(data, VALUE)?)
}

pub(super) fn verdict(value: &[u8]) -> Option<Verdict> {
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
