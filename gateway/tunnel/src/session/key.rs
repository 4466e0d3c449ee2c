use std::time::{Duration, Instant};

use noise::{KeyPair, Opener, Sealer};

/// Lifetime of a key (whitepaper section 6.1).
pub(super) const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);

/// Age of a key at which its initiator starts another handshake as soon as it sends something with
/// it, or receives something when it is [`RECEIVE_GRACE`] older (whitepaper section 6.2).
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
pub(super) const RECEIVE_GRACE: Duration = Duration::from_secs(45);

/// Time before its end from which a key is no longer sealed with: the peer may have agreed on it a
/// little earlier, and packets take their time. They wait for the next one instead.
const LAST_SECONDS: Duration = Duration::from_secs(5);

/// Longest time between the ends of two handshakes that were under way at once.
const CROSSING: Duration = Duration::from_secs(1);

/// Keys that are held: enough for every handshake whose messages are on their way at once.
const MAX_HELD: usize = 8;

/// A key pair that a handshake has agreed on.
pub(super) struct Key {
    /// Receiver index that the peer writes on what it seals with this key.
    pub(super) index: u32,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
    /// Time at which it was agreed on, as far as this end knows.
    born: Instant,
    /// It is our task to replace it.
    is_initiator: bool,
    /// Both ends are known to have it.
    is_confirmed: bool,
    /// Time at which the peer first sealed with it.
    pub(super) used: Option<Instant>,
}

impl Key {
    /// The initiator knows that the responder has the key, and not the other way round.
    pub(super) fn new(pair: KeyPair, is_initiator: bool, born: Instant) -> Self {
        let index = pair.local_index();
        let (sealer, opener) = pair.split();
        Self { index, sealer, opener, born, is_initiator, is_confirmed: is_initiator, used: None }
    }

    /// Records that the peer seals with it. Returns whether that completes the handshake.
    pub(super) fn note_use(&mut self, now: Instant) -> bool {
        self.used.get_or_insert(now);
        !std::mem::replace(&mut self.is_confirmed, true)
    }

    /// True if the peer has gone on to this key from `older`.
    ///
    /// With a handshake of either end under way at once each may take the other one for the newer, and seal
    /// with its key until the next: that is no superseded key. Its own ones a peer begins one after the other.
    pub(super) fn has_superseded(&self, older: &Self) -> bool {
        let may_cross = self.is_initiator || older.is_initiator;
        self.used.is_some() && (!may_cross || self.born >= older.born + CROSSING)
    }

    pub(super) fn rekey_at(&self) -> Option<Instant> {
        self.is_initiator.then(|| self.born + REKEY_AFTER_TIME)
    }

    pub(super) fn end(&self) -> Instant {
        self.born + REJECT_AFTER_TIME
    }

    pub(super) fn last_sealed_at(&self) -> Instant {
        self.end() - LAST_SECONDS
    }
}

/// Keys of the last handshakes, in the order in which they were agreed on.
#[derive(Default)]
pub(super) struct KeyRing {
    held: Vec<Key>,
    /// Place of the key that is sealed with: of those that both ends are known to have, the one
    /// agreed on last.
    current: Option<usize>,
    /// Index of the key that the peer used last: it may be an older one, as long as no packet has
    /// confirmed the current one to it.
    pub(super) used: Option<u32>,
}

impl KeyRing {
    #[inline]
    pub(super) fn current(&self) -> Option<&Key> {
        self.held.get(self.current?)
    }

    #[inline]
    pub(super) fn is_current(&self, at: usize) -> bool {
        self.current == Some(at)
    }

    /// Returns the current key if it was agreed on later than the one at `at`.
    pub(super) fn newer_current(&self, at: usize) -> Option<&Key> {
        self.current().filter(|_| self.current > Some(at))
    }

    /// Returns the place of the key with that index.
    #[inline]
    pub(super) fn position(&self, index: u32) -> Option<usize> {
        self.held.iter().position(|key| key.index == index)
    }

    #[inline]
    pub(super) fn key(&self, at: usize) -> &Key {
        &self.held[at]
    }

    /// Makes the key at `at` the current one.
    pub(super) fn select(&mut self, at: usize) -> &mut Key {
        self.current = Some(at);
        &mut self.held[at]
    }

    /// Adds a key and returns its place. If there are too many, the oldest that is not in use goes:
    /// with answers that are lost, many may never be used.
    pub(super) fn insert(&mut self, key: Key) -> usize {
        if self.held.len() == MAX_HELD {
            let is_in_use =
                |at: usize| self.is_current(at) || self.used == Some(self.held[at].index);
            let unused = (0..MAX_HELD).find(|at| !is_in_use(*at));
            unused.into_iter().for_each(|at| self.remove(at));
        }
        self.held.push(key);
        self.held.len() - 1
    }

    /// Removes the keys that have come to their end.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(at) = self.held.iter().position(|key| now >= key.end()) {
            self.remove(at);
        }
    }

    /// Time at which [`Self::expire`] is next due, or the current key is no longer to be sealed with.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let last_sealed = self.current().map(Key::last_sealed_at).filter(|at| now < *at);
        self.held.iter().map(Key::end).chain(last_sealed).min()
    }

    fn remove(&mut self, at: usize) {
        self.held.remove(at);
        self.current = match self.current {
            Some(current) if current == at => None,
            Some(current) if current > at => Some(current - 1),
            current => current,
        };
    }
}
