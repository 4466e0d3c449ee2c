//! Ports that rules compare.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::nfnetlink::{attribute, number, text};

/// Ports that packets may have, in ranges; any if there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(Vec<RangeInclusive<u16>>);

impl Ports {
    pub fn add(&mut self, range: RangeInclusive<u16>) {
        self.0.push(range);
    }

    /// Leaves out those of the last range that are beyond its new end.
    pub(super) fn end_at(&mut self, end: u16) {
        let start = self.0.pop().map_or(0, |range| *range.start());
        self.0.push(start..=end);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }

    /// The first one of these that is among them.
    pub fn first_of(&self, ports: &BTreeSet<u16>) -> Option<u16> {
        ports.iter().copied().find(|port| self.contains(*port))
    }

    pub fn is_disjoint(&self, other: &Self) -> bool {
        let overlap = |a: &RangeInclusive<u16>, b: &RangeInclusive<u16>| {
            a.start() <= b.end() && b.start() <= a.end()
        };
        !self.0.iter().any(|a| other.0.iter().any(|b| overlap(a, b)))
    }
}

/// Ports that an extension of the old packet filter lists (`xt_multiport.h`, its second revision), and whether they are
/// those of sources.
pub(super) fn of_extension(data: &[u8]) -> Option<(bool, Vec<RangeInclusive<u16>>)> {
    const NAME: u16 = 1;
    const REVISION: u16 = 2;
    const INFO: u16 = 3;
    /// Places of the ports, of the flags of those that begin a range, and of the flag of inversion.
    const PORTS: usize = 2;
    const BEGINS: usize = 32;
    const INVERTED: usize = 47;
    let info = attribute(data, INFO)?;
    let is_known = text(data, NAME) == Some("multiport")
        && number(data, REVISION) == Some(1)
        && info.get(INVERTED) == Some(&0);
    let [source @ (0 | 1), count, ..] = *info.get(..PORTS).filter(|_| is_known)? else {
        return None;
    };
    let mut places = 0..usize::from(count);
    let port = |place: usize| {
        let at = PORTS + 2 * place;
        Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?))
    };
    let mut ranges = Vec::new();
    while let Some(place) = places.next() {
        let begins = *info.get(BEGINS + place)? != 0;
        let end = if begins { places.next()? } else { place };
        ranges.push(port(place)?..=port(end)?);
    }
    Some((source == 0, ranges))
}
