//! Meaning of a rule, as far as it decides where a packet of the overlay ends.

use crate::nfnetlink::{attribute, attributes, number, text};

use super::comment;

/// Rule of a chain of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Identifies it within its table.
    pub handle: u64,
    pub comment: Option<String>,
    pub condition: Condition,
    pub verdict: Verdict,
    /// Values that packets are compared with, in network order.
    pub compared: Vec<Vec<u8>>,
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

/// What becomes of a packet that a rule applies to.
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
    /// A queue, a map of verdicts, or something not understood: may drop.
    Other,
}

impl Rule {
    /// Parses a rule's attributes, without table and chain.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        const HANDLE: u16 = 3;
        const EXPRESSIONS: u16 = 4;
        const USERDATA: u16 = 7;
        let handle = u64::from_be_bytes(attribute(body, HANDLE)?.try_into().ok()?);
        let comment = attribute(body, USERDATA).and_then(comment).map(str::to_owned);
        let mut rule = Self {
            handle,
            comment,
            condition: Condition::Always,
            verdict: Verdict::Continue,
            compared: Vec::new(),
        };
        for (_, expression) in attributes(attribute(body, EXPRESSIONS).unwrap_or_default()) {
            rule.add(expression);
        }
        Some(rule)
    }

    fn add(&mut self, expression: &[u8]) {
        const NAME: u16 = 1;
        const DATA: u16 = 2;
        let data = attribute(expression, DATA).unwrap_or_default();
        match text(expression, NAME) {
            Some("counter" | "log" | "bitwise") => {}
            Some("cmp") => self.compared.extend(compared(data)),
            Some("meta") => self.condition = self.condition.max(meta(data)),
            Some("immediate") => {
                if let Some(verdict) = immediate(data) {
                    self.verdict = verdict;
                }
            }
            Some("reject") => self.verdict = Verdict::Drop,
            Some("queue") => self.verdict = Verdict::Other,
            // Extensions of the old packet filter, in tables of `iptables-nft`.
            Some("target") => self.verdict = target(text(data, NAME)),
            Some("match") if text(data, NAME) == Some("comment") => {}
            Some("lookup") => {
                self.condition = Condition::Other;
                if is_verdict_map(data) {
                    self.verdict = Verdict::Other;
                }
            }
            _ => self.condition = Condition::Other,
        }
    }
}

/// Verdict of an extension's target, by name.
fn target(name: Option<&str>) -> Verdict {
    match name {
        Some("REJECT") => Verdict::Drop,
        Some("LOG" | "NFLOG" | "MARK" | "CONNMARK") => Verdict::Continue,
        _ => Verdict::Other,
    }
}

/// One that sets something is no condition.
fn meta(data: &[u8]) -> Condition {
    const KEY: u16 = 2;
    const SOURCE: u16 = 3;
    const IIFNAME: u32 = 6;
    const OIFNAME: u32 = 7;
    match number(data, KEY) {
        _ if attribute(data, SOURCE).is_some() => Condition::Always,
        Some(IIFNAME | OIFNAME) => Condition::Interface,
        _ => Condition::Other,
    }
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
    const VERDICT: u16 = 2;
    const CODE: u16 = 1;
    const CHAIN: u16 = 2;
    let verdict = attribute(attribute(data, VALUE)?, VERDICT)?;
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
