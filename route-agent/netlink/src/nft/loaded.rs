//! Values of packets that rules load to compare them or look them up.

use crate::nfnetlink::{attribute, number};

/// Key of a packet's mark.
pub(super) const MARK: u32 = 3;
/// Key of a connection's mark.
pub(super) const CT_MARK: u32 = 3;
pub(super) const META_KEY: u16 = 2;
/// Type of Ethernet.
pub(super) const PROTOCOL: u32 = 1;
pub(super) const NFPROTO: u32 = 15;
pub(super) const L4PROTO: u32 = 16;
pub(super) const IIF: u32 = 4;
pub(super) const OIF: u32 = 5;
pub(super) const IIFNAME: u32 = 6;
pub(super) const OIFNAME: u32 = 7;

/// Packets that a chain's rules are read for, by what connection tracking knows of them at its hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tracked {
    /// Those that it has not seen yet.
    No,
    /// Those that begin a connection.
    #[default]
    New,
    /// Those of established connections, from the end that has begun them.
    Established,
    /// Those from the other end.
    Reply,
    /// The order of two hooks with one priority is that of their registration, which nothing shows.
    Unknown,
}

impl Tracked {
    /// All packets that have to pass where these do: a connection needs those that follow its first one.
    pub fn all(self) -> &'static [Self] {
        match self {
            Self::No => &[Self::No],
            Self::New | Self::Established | Self::Reply => {
                &[Self::New, Self::Established, Self::Reply]
            }
            Self::Unknown => &[Self::Unknown],
        }
    }
}

/// Value that a rule has loaded to compare it.
#[derive(Clone, Debug, Default)]
pub(super) struct Loaded {
    /// Key of the packet's meta data.
    pub(super) key: Option<u32>,
    pub(super) field: Option<Field>,
    pub(super) tracking: Option<Tracking>,
    pub(super) mask: Option<Vec<u8>>,
    pub(super) tracked: Tracked,
}

impl Loaded {
    pub(super) fn cleared(&self) -> Self {
        Self { tracked: self.tracked, ..Self::default() }
    }

    pub(super) fn of_map(&self) -> Self {
        Self { field: Some(Field::OfMap), ..self.cleared() }
    }

    /// Returns whether a comparison of the value, under its mask, is understood.
    pub(super) fn is_known(&self) -> bool {
        match (self.key, self.field, self.tracking) {
            (Some(IIF | OIF | IIFNAME | OIFNAME | L4PROTO), ..) => self.mask.is_none(),
            (Some(MARK), ..) | (_, Some(Field::Address { .. }), _) => true,
            (_, Some(Field::Port { .. } | Field::Protocol), _) | (.., Some(_)) => {
                self.mask.is_none()
            }
            _ => false,
        }
    }
}

/// Field of a packet's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Address {
        source: bool,
        ipv4: bool,
    },
    Protocol,
    Port {
        source: bool,
    },
    /// Value that a map has for a field: no comparison of it is understood.
    OfMap,
}

impl Field {
    /// `None` for one that is not understood, or lies elsewhere in packets of that family. An address may be cut behind
    /// its prefix.
    pub(super) fn parse(data: &[u8], is_ipv4: Option<bool>) -> Option<Self> {
        const BASE: u16 = 2;
        const OFFSET: u16 = 3;
        const NETWORK: u32 = 1;
        const TRANSPORT: u32 = 2;
        let (v4, v6) = (is_ipv4 != Some(false), is_ipv4 != Some(true));
        Some(match (number(data, BASE)?, number(data, OFFSET)?) {
            (NETWORK, 12) if v4 => Self::Address { source: true, ipv4: true },
            (NETWORK, 16) if v4 => Self::Address { source: false, ipv4: true },
            (NETWORK, 8) if v6 => Self::Address { source: true, ipv4: false },
            (NETWORK, 24) if v6 => Self::Address { source: false, ipv4: false },
            (NETWORK, 9) if v4 => Self::Protocol,
            (NETWORK, 6) if v6 => Self::Protocol,
            (TRANSPORT, 0) => Self::Port { source: true },
            (TRANSPORT, 2) => Self::Port { source: false },
            _ => return None,
        })
    }
}

/// Part of connection tracking that a rule compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tracking {
    State,
    Direction,
    Mark,
}

impl Tracking {
    /// `None` for what is not understood.
    pub(super) fn parse(data: &[u8]) -> Option<Self> {
        const KEY: u16 = 2;
        match number(data, KEY)? {
            0 => Some(Self::State),
            1 => Some(Self::Direction),
            CT_MARK => Some(Self::Mark),
            _ => None,
        }
    }

    /// Returns whether such packets meet a comparison; `None` if some may.
    pub(super) fn is_met_by(
        self,
        tracked: Tracked,
        (value, mask, operator): (&[u8], Option<&[u8]>, u32),
    ) -> Option<bool> {
        match (self, tracked) {
            (Self::State, _) => States::compared(value, mask, operator)?.are_met_by(tracked),
            // There is nothing to compare.
            (Self::Direction | Self::Mark, Tracked::No) => Some(false),
            (Self::Direction, Tracked::New | Tracked::Established | Tracked::Reply)
                if mask.is_none() && matches!(operator, 0 | 1) =>
            {
                let is_original = value.iter().all(|byte| *byte == 0);
                Some((is_original == (tracked != Tracked::Reply)) == (operator == 0))
            }
            (
                Self::Direction | Self::Mark,
                Tracked::New | Tracked::Established | Tracked::Reply | Tracked::Unknown,
            ) => None,
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

    /// States that meet a comparison of nftables; `None` if it is none of equality with some of them.
    fn compared(value: &[u8], mask: Option<&[u8]>, operator: u32) -> Option<Self> {
        let word = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).map(u32::from_ne_bytes).ok();
        let is_equal = matches!(operator, 0 | 1).then_some(operator == 0)?;
        match mask {
            Some(mask) if word(value)? == 0 => {
                Some(Self { listed: word(mask)?, inverted: is_equal })
            }
            Some(_) => None,
            None => Some(Self { listed: word(value)?, inverted: !is_equal }),
        }
    }

    /// Returns whether such packets have one of them; `None` if some may: one without tracking, or to another destination
    /// than it was sent to, has a state of its own as well.
    pub fn are_met_by(self, tracked: Tracked) -> Option<bool> {
        let own = match tracked {
            Tracked::New => Self::NEW,
            Tracked::Established | Tracked::Reply => Self::ESTABLISHED,
            // Before connection tracking all packets are compared as invalid.
            Tracked::No => return Some((self.listed & Self::INVALID != 0) != self.inverted),
            Tracked::Unknown => return None,
        };
        let has_own = self.listed & own != 0;
        let simple = Self::NEW | Self::INVALID | Self::ESTABLISHED | Self::RELATED;
        let is_known = self.listed & !simple == 0 || has_own && !self.inverted;
        is_known.then_some(has_own != self.inverted)
    }
}

/// True for an expression that sets a value instead of loading it.
pub(super) fn sets_value(data: &[u8]) -> bool {
    const SOURCE: u16 = 4;
    attribute(data, SOURCE).is_some()
}

/// True if the value found is written to the register of verdicts.
pub(super) fn is_verdict_map(data: &[u8]) -> bool {
    const DESTINATION: u16 = 3;
    number(data, DESTINATION) == Some(0)
}
