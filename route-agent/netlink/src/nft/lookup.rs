//! Lookup of a packet's value in a set or map.

use crate::nfnetlink::{attribute, number, text};

use super::loaded::{Loaded, is_verdict_map};

/// Set or map in which a rule looks a value up.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    pub(super) loaded: Loaded,
    pub(super) set: String,
    /// Elements have verdicts.
    pub(super) is_map: bool,
    /// Elements have values, which are loaded: as in a set, others do not match.
    pub(super) loads_value: bool,
    /// Values match that are not in the set.
    pub(super) inverted: bool,
}

impl Lookup {
    /// `None` for another expression, or one that is not understood.
    pub(super) fn parse(expression: &[u8], loaded: &Loaded) -> Option<Self> {
        const NAME: u16 = 1;
        const DATA: u16 = 2;
        const SET: u16 = 1;
        const DESTINATION: u16 = 3;
        const FLAGS: u16 = 5;
        let is_lookup = loaded.is_known() && text(expression, NAME) == Some("lookup");
        let data = attribute(expression, DATA).filter(|_| is_lookup)?;
        let is_map = is_verdict_map(data);
        let loads_value = !is_map && number(data, DESTINATION).is_some();
        let set = text(data, SET)?;
        let inverted = number(data, FLAGS).is_some_and(|flags| flags != 0);
        Some(Self { loaded: loaded.clone(), set: set.to_owned(), is_map, loads_value, inverted })
    }
}
