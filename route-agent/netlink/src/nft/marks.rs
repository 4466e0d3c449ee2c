//! Marks of packets and connections, and what rules set them to. Both have the same model: a mark has no bits but
//! those that some rule sets, whichever of the two, since rules also copy one to the other.

use std::io;

use crate::Netns;
use crate::nfnetlink::{Nfnetlink, attribute, attributes, number, text};

use super::loaded::{CT_MARK, MARK, META_KEY, sets_value};
use super::{GET_RULE, NftError, TABLE_NAME};

/// All tables, whatever their family.
const UNSPECIFIED: u8 = 0;

/// Comparison of a mark, under a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkMatch {
    pub mask: u32,
    pub value: u32,
    /// All other marks match instead.
    pub negated: bool,
}

impl MarkMatch {
    /// `None` if it is no comparison of equality.
    pub(super) fn parse(value: &[u8], mask: Option<&[u8]>, operator: u32) -> Option<Self> {
        let mask = mask.map_or(Some(u32::MAX), word)?;
        let negated = matches!(operator, 0 | 1).then_some(operator == 1)?;
        Some(Self { mask, value: word(value)?, negated })
    }

    /// Returns whether marks that have none but these bits match; `None` if some may.
    pub fn is_met(self, settable: u32) -> Option<bool> {
        if self.value & !(self.mask & settable) != 0 {
            Some(self.negated)
        } else if self.mask & settable == 0 {
            Some(!self.negated)
        } else {
            None
        }
    }
}

/// Bits of marks that rules may set, but for those of some tables.
pub fn settable_marks(netns: &Netns, except: &[&str]) -> Result<u32, NftError> {
    netns.run(|| settable_marks_here(except))?.map_err(NftError::Read)
}

fn settable_marks_here(except: &[&str]) -> io::Result<u32> {
    const EXPRESSIONS: u16 = 4;
    let mut settable = 0;
    for body in Nfnetlink::open()?.dump(GET_RULE, UNSPECIFIED, &[])? {
        if text(&body, TABLE_NAME).is_some_and(|table| except.contains(&table)) {
            continue;
        }
        // Bits that the value loaded last may have, beside those of marks.
        let mut loaded = u32::MAX;
        for (_, expression) in attributes(attribute(&body, EXPRESSIONS).unwrap_or_default()) {
            settable |= bits_set(expression, &mut loaded);
        }
    }
    Ok(settable)
}

fn bits_set(expression: &[u8], loaded: &mut u32) -> u32 {
    const NAME: u16 = 1;
    const DATA: u16 = 2;
    const META_SOURCE: u16 = 3;
    let data = attribute(expression, DATA).unwrap_or_default();
    let is_mark = number(data, META_KEY) == Some(MARK);
    match text(expression, NAME) {
        Some("meta") if attribute(data, META_SOURCE).is_some() && is_mark => return *loaded,
        Some("ct") if sets_value(data) && number(data, META_KEY) == Some(CT_MARK) => {
            return *loaded;
        }
        Some("meta" | "ct") => *loaded = if is_mark { 0 } else { u32::MAX },
        Some("bitwise") => *loaded = flipped(data).map_or(u32::MAX, |bits| *loaded | bits),
        Some("immediate") => *loaded = immediate(data).unwrap_or(u32::MAX),
        Some("target") => return bits_of_target(data),
        Some("cmp" | "counter" | "limit" | "log" | "match") => {}
        _ => *loaded = u32::MAX,
    }
    0
}

/// Bits that a bitwise operation may set; `None` if it shifts.
fn flipped(data: &[u8]) -> Option<u32> {
    const XOR: u16 = 5;
    const BYTES: u16 = 1;
    word(attribute(attribute(data, XOR)?, BYTES)?)
}

fn immediate(data: &[u8]) -> Option<u32> {
    const VALUE: u16 = 2;
    const BYTES: u16 = 1;
    word(attribute(attribute(data, VALUE)?, BYTES)?)
}

/// Bits that a target of the old packet filter sets (`xt_mark.h`, `xt_connmark.h`).
fn bits_of_target(data: &[u8]) -> u32 {
    const NAME: u16 = 1;
    const REVISION: u16 = 2;
    const INFO: u16 = 3;
    /// Place of what the target CONNMARK does, behind three words.
    const MODE: usize = 12;
    const SET: u8 = 0;
    let info = attribute(data, INFO).unwrap_or_default();
    let first = info.get(..4).and_then(word).unwrap_or(u32::MAX);
    match (text(data, NAME), number(data, REVISION)) {
        (Some("MARK"), Some(2)) => first,
        (Some("CONNMARK"), Some(1)) if info.get(MODE) == Some(&SET) => first,
        (Some("CONNMARK"), Some(1)) => 0,
        (Some("MARK" | "CONNMARK" | "HMARK" | "TPROXY" | "SET"), _) => u32::MAX,
        _ => 0,
    }
}

/// Registers of marks have the byte order of the host.
fn word(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_without_settable_bits_is_zero() {
        let equal = |value| MarkMatch { mask: u32::MAX, value, negated: false };
        let not = |value| MarkMatch { negated: true, ..equal(value) };
        assert_eq!(
            [equal(0), equal(1), not(0), not(1)].map(|of| of.is_met(0)),
            [Some(true), Some(false), Some(false), Some(true)]
        );
        assert_eq!([equal(0), equal(1), not(1)].map(|of| of.is_met(5)), [None; 3]);
        assert_eq!(not(2).is_met(5), Some(true), "bit 2 is nobody's");
        let masked = MarkMatch { mask: 2, ..equal(0) };
        assert_eq!([masked.is_met(5), masked.is_met(2)], [Some(true), None]);
    }
}
