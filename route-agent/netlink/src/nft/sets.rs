//! Elements of the sets and maps in which rules look values of packets up: what these rules stand for.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use fabric_primitives::Cidr;

use crate::nfnetlink::{Nfnetlink, attribute, attributes, number, text};

use super::loaded::Field;
use super::lookup::Lookup;
use super::rule::{Rule, Verdict, verdict};
use super::{ELEMENT_KEY, GET_ELEMENTS, elements_in, named_set};

/// Messages of the kernel with elements of a set, some dozens each, that are read of it. Larger ones are not
/// understood.
const MAX_MESSAGES: usize = 64;
/// Number of rules that one with lookups may stand for, and all that are read at once.
const MAX_RULES: usize = 4096;
const MAX_ALL_RULES: usize = 65_536;

/// Element of a set: a value or the first one of an interval.
#[derive(Clone, Debug)]
struct Element {
    key: Vec<u8>,
    /// An interval ends before it.
    is_end: bool,
    /// `None` but in a map of verdicts.
    verdict: Option<Verdict>,
}

/// Sets that rules of a table name, each read once.
pub(super) struct Sets<'a> {
    family: u8,
    table: &'a str,
    elements: BTreeMap<String, Option<BTreeSet<Vec<u8>>>>,
    /// Number of rules so far.
    expanded: usize,
}

impl<'a> Sets<'a> {
    pub(super) fn new(family: u8, table: &'a str) -> Self {
        Self { family, table, elements: BTreeMap::new(), expanded: 0 }
    }

    /// As one rule for each element of the sets that it looks values up in; as one that is not understood if
    /// there are other elements, or too many. No packet meets one that looks for a value in an empty set.
    pub(super) fn expand(&mut self, rule: Rule, lookups: &[Lookup]) -> io::Result<Vec<Rule>> {
        let mut rules = vec![rule];
        for lookup in lookups {
            let Some(first) = rules.first() else { break };
            let unknown = |rule: &Rule| {
                let verdict = if lookup.is_map { Verdict::Other } else { rule.verdict.clone() };
                vec![rule.with_unknown_condition(verdict)]
            };
            // Nothing follows from a rule without a verdict.
            let has_verdict = lookup.is_map || first.verdict != Verdict::Continue;
            let is_read = has_verdict && self.expanded < MAX_ALL_RULES;
            let elements = if is_read { self.elements(lookup)? } else { None };
            let each = |rule: &Rule| {
                let expanded = elements.as_ref().and_then(|found| lookup.expand(rule, found));
                expanded.unwrap_or_else(|| unknown(rule))
            };
            let expanded: Vec<Rule> = rules.iter().flat_map(each).take(MAX_RULES + 1).collect();
            rules = if expanded.len() > MAX_RULES { unknown(first) } else { expanded };
        }
        self.expanded += rules.len();
        Ok(rules)
    }

    /// Elements in the order of their values; `None` if some are not understood.
    fn elements(&mut self, lookup: &Lookup) -> io::Result<Option<Vec<Element>>> {
        let set = &lookup.set;
        if !self.elements.contains_key(set) {
            let body = named_set(self.table, set);
            let found = Nfnetlink::dump_at_most(MAX_MESSAGES, GET_ELEMENTS, self.family, &body)?;
            self.elements.insert(set.clone(), found.map(|found| elements_in(&found)));
        }
        let found = self.elements[set].as_ref();
        let parse = |element: &Vec<u8>| Element::parse(element, lookup.is_map);
        let found: Option<Vec<Element>> = found.and_then(|found| found.iter().map(parse).collect());
        Ok(found.map(|mut elements| {
            elements.sort_by(|a, b| (&a.key, !a.is_end).cmp(&(&b.key, !b.is_end)));
            elements
        }))
    }
}

impl Element {
    /// `None` for one that matches all other values, several fields or at a limited rate.
    fn parse(element: &[u8], is_map: bool) -> Option<Self> {
        const DATA: u16 = 2;
        const FLAGS: u16 = 3;
        const EXPRESSION: u16 = 7;
        const KEY_END: u16 = 10;
        const EXPRESSIONS: u16 = 11;
        const BYTES: u16 = 1;
        const NAME: u16 = 1;
        const INTERVAL_END: u32 = 1;
        let key = attribute(attribute(element, ELEMENT_KEY)?, BYTES)?.to_vec();
        let is_counter = |expression| text(expression, NAME) == Some("counter");
        let is_plain = attribute(element, KEY_END).is_none()
            && attribute(element, EXPRESSION).is_none_or(is_counter)
            && attribute(element, EXPRESSIONS)
                .is_none_or(|all| attributes(all).all(|(_, e)| is_counter(e)));
        let is_end = number(element, FLAGS).is_some_and(|flags| flags & INTERVAL_END != 0);
        let verdict = attribute(element, DATA).filter(|_| is_map).map(verdict);
        let is_known = is_plain && verdict != Some(None);
        is_known.then_some(Self { key, is_end, verdict: verdict.flatten() })
    }
}

impl Lookup {
    /// `None` if its elements are not understood.
    fn expand(&self, rule: &Rule, elements: &[Element]) -> Option<Vec<Rule>> {
        let mut rules = Vec::from_iter(self.inverted.then(|| rule.clone()));
        let operator = u32::from(self.inverted);
        let mut count = 0;
        let mut add = |verdict: &Option<Verdict>, compare: &dyn Fn(&mut Rule)| {
            count += 1;
            if count > MAX_RULES {
                return None;
            }
            if !self.inverted {
                rules.push(rule.clone());
            }
            let rule = rules.last_mut()?;
            compare(rule);
            if self.is_map {
                rule.verdict = verdict.clone()?;
            }
            Some(())
        };
        // An interval without an end is one of all addresses, or the address is 0.
        if matches!(elements, [only] if !only.is_end && only.key.iter().all(|byte| *byte == 0)) {
            return None;
        }
        if elements.iter().any(|element| element.is_end) {
            match self.loaded.field.filter(|_| self.loaded.mask.is_none())? {
                Field::Address { source, ipv4 } => {
                    for (verdict, first, last) in intervals(elements, if ipv4 { 32 } else { 128 })?
                    {
                        for prefix in prefixes(first, last, ipv4) {
                            add(&verdict, &|rule| {
                                rule.compare_prefix(source, prefix, self.inverted);
                            })?;
                        }
                    }
                }
                Field::Port { source } if !self.inverted => {
                    for (verdict, first, last) in intervals(elements, 16)? {
                        let range = u16::try_from(first).ok()?..=u16::try_from(last).ok()?;
                        add(&verdict, &|rule| rule.compare_ports(source, range.clone()))?;
                    }
                }
                Field::Port { .. } | Field::Protocol | Field::OfMap => return None,
            }
        } else {
            for Element { key, verdict, .. } in elements {
                add(verdict, &|rule| rule.compare_value(key, operator, &self.loaded))?;
            }
        }
        Some(rules)
    }
}

/// Intervals of values of so many bits, as first and last one, those without a gap and with one verdict joined.
fn intervals(elements: &[Element], bits: u32) -> Option<Vec<(Option<Verdict>, u128, u128)>> {
    let mut found: Vec<(Option<Verdict>, u128, u128)> = Vec::new();
    let mut open: Option<(u128, Option<Verdict>)> = None;
    for element in elements {
        let at = value(&element.key, bits)?;
        if let Some((first, verdict)) = open.take() {
            let last = at.checked_sub(1)?;
            match found.last_mut() {
                Some((known, _, end)) if *known == verdict && end.checked_add(1) == Some(first) => {
                    *end = last;
                }
                _ => found.push((verdict, first, last)),
            }
        }
        if !element.is_end {
            open = Some((at, element.verdict.clone()));
        }
    }
    let last = u128::MAX >> (128 - bits);
    found.extend(open.map(|(first, verdict)| (verdict, first, last)));
    Some(found)
}

fn value(key: &[u8], bits: u32) -> Option<u128> {
    let value = key.iter().fold(0, |value, byte| value << 8 | u128::from(*byte));
    (u32::try_from(key.len() * 8) == Ok(bits)).then_some(value)
}

/// Largest prefixes that make up an interval of addresses.
fn prefixes(first: u128, last: u128, ipv4: bool) -> Vec<Cidr> {
    let bits: u32 = if ipv4 { 32 } else { 128 };
    let (mut found, mut next) = (Vec::new(), Some(first));
    while let Some(at) = next.filter(|at| *at <= last) {
        let end_of = |free: u32| {
            let size = 1_u128.checked_shl(free).map_or(u128::MAX, |size| size - 1);
            (at & size == 0).then_some(at | size)
        };
        let fits = |free: &u32| end_of(*free).is_some_and(|end| end <= last);
        let Some(free) = (0..=bits).rev().find(fits) else { return found };
        let address = if ipv4 {
            IpAddr::from((at as u32).to_be_bytes())
        } else {
            IpAddr::from(at.to_be_bytes())
        };
        found.extend(u8::try_from(bits - free).ok().and_then(|len| Cidr::around(address, len)));
        next = end_of(free).and_then(|end| end.checked_add(1));
    }
    found
}
