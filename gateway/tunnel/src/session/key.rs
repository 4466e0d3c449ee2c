use std::time::{Duration, Instant};

use super::{PLACES, REJECT_AFTER_TIME, REKEY_AFTER_TIME};

/// Longest time between the ends of two handshakes that were under way at once.
const CROSSING: Duration = Duration::from_secs(1);

/// A key that boringtun holds.
#[derive(Clone, Copy)]
pub(super) struct Key {
    /// Receiver index that the peer writes on what it seals with this key.
    pub(super) index: u32,
    /// When it was agreed on, as far as this end knows, and after how many others.
    pub(super) born: Instant,
    pub(super) after: u64,
    /// It is our task to replace it.
    pub(super) is_initiator: bool,
    /// Both ends are known to have it.
    pub(super) is_confirmed: bool,
    /// When the peer first sealed with it.
    pub(super) used: Option<Instant>,
}

impl Key {
    pub(super) fn new(index: u32, after: u64, is_initiator: bool, born: Instant) -> Self {
        Self { index, born, after, is_initiator, is_confirmed: is_initiator, used: None }
    }

    /// True if the peer has gone on to this key from `older`.
    ///
    /// With two handshakes under way at once each end may take the other one for the newer, and seal
    /// with its key until the next: that is no superseded key.
    pub(super) fn has_superseded(&self, older: &Self) -> bool {
        self.used.is_some() && self.born >= older.born + CROSSING
    }

    pub(super) fn rekey_at(self) -> Option<Instant> {
        self.is_initiator.then(|| self.born + REKEY_AFTER_TIME)
    }

    pub(super) fn end(self) -> Instant {
        self.born + REJECT_AFTER_TIME
    }
}

/// Place in which boringtun holds the key of that index.
pub(super) fn place_of(index: u32) -> usize {
    index as usize % usize::from(PLACES)
}
