//! The WireGuard sessions with one peer: boringtun's `Tunn`, and what it leaves out.
//!
//! * [`Peer`] holds the sessions of the present keys and of those just superseded, and what does
//!   not depend on keys: where packets wait, when a keepalive is due, what was received when.
//! * [`Session`] is one key pair's `Tunn`, with retries without end and limits on messages.
//! * [`limiter`] decides which handshake messages are worth their cost.

mod duplicate;
mod key;
mod limiter;
mod peer;
mod rejections;
mod retry;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::errors::WireGuardError;
use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;
use fabric_primitives::{PrivateKey, PublicKey};

use self::duplicate::DuplicateDetector;
use self::key::{Key, place_of};
pub(crate) use self::peer::Peer;
pub use self::rejections::{RejectedInitiation, Rejections};
use self::retry::Retry;
use crate::DropReason;

/// Interval at which boringtun's timers are advanced, other than by handshakes and the ends of
/// keys: it has no clock of its own between two such moments, and would date keys back.
const TICK: Duration = Duration::from_secs(1);

/// Lifetime of a key (whitepaper section 6.1). boringtun forgets it just after.
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
const JUST_AFTER: Duration = Duration::from_millis(1);
/// Time before its end from which a key is no longer sealed with: the peer may have agreed on it a
/// little earlier, and packets take their time. They wait for the next one instead.
const LAST_SECONDS: Duration = Duration::from_secs(5);

/// Age of a key at which its initiator starts another handshake as soon as it sends something with
/// it, or receives with one that is [`RECEIVE_GRACE`] older (whitepaper section 6.2).
const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
const RECEIVE_GRACE: Duration = Duration::from_secs(45);

/// After so long without any answer to data there is a handshake: KEEPALIVE_TIMEOUT and
/// REKEY_TIMEOUT (whitepaper section 6.5).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// boringtun holds the keys of so many handshakes, each in a place that follows from its index.
const PLACES: u8 = 8;

/// A stale initiation is answered with one of ours at most this often: WireGuard's REKEY_TIMEOUT.
const STALE_INTERVAL: Duration = Duration::from_secs(5);

/// First byte of WireGuard's messages (whitepaper section 5.4).
const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const COOKIE_REPLY: u8 = 3;
pub(crate) const DATA: u8 = 4;

/// Lengths in bytes of the longest message whose first byte is 1, 2 or 3, and of an empty data
/// message.
pub(crate) const MAX_HANDSHAKE: usize = 148;
pub(crate) const MIN_DATA: usize = 32;

/// The points of Curve25519 with which everybody agrees on the same secret, apart from the highest
/// bit, which does not count (<https://cr.yp.to/ecdh.html#validate>).
pub(crate) const LOW_ORDER: [[u8; 32]; 7] = {
    const fn with_ends(first: u8, inner: u8, last: u8) -> [u8; 32] {
        let mut point = [inner; 32];
        point[0] = first;
        point[31] = last;
        point
    }
    [
        with_ends(0, 0, 0),
        with_ends(1, 0, 0),
        *b"\xe0\xeb\x7a\x7c\x3b\x41\xb8\xae\x16\x56\xe3\xfa\xf1\x9f\xc4\x6a\
           \xda\x09\x8d\xeb\x9c\x32\xb1\xfd\x86\x62\x05\x16\x5f\x49\xb8\x00",
        *b"\x5f\x9c\x95\xbc\xa3\x50\x8c\x24\xb1\xd0\xb1\x55\x9c\x83\xef\x5b\
           \x04\x44\x5c\xc4\x58\x1c\x8e\x86\xd8\x22\x4e\xdd\xd0\x9f\x11\x57",
        with_ends(0xec, 0xff, 0x7f),
        with_ends(0xed, 0xff, 0x7f),
        with_ends(0xee, 0xff, 0x7f),
    ]
};

/// Messages with one key, after which another handshake is due, and after which none is sent or
/// believed any more.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) rekey: u64,
    pub(crate) reject: u64,
}

impl Limits {
    /// REKEY_AFTER_MESSAGES and REJECT_AFTER_MESSAGES (whitepaper section 6.1).
    pub(crate) const WIREGUARD: Self = Self { rekey: 1 << 60, reject: u64::MAX - (1 << 13) };
}

/// Our private and the peer's public key.
#[derive(PartialEq, Eq)]
struct Keys {
    private: PrivateKey,
    peer: PublicKey,
}

/// The tunnel of one key pair. It seals as soon as a handshake has come to its end, and opens what
/// was sealed with any of its last handshakes.
struct Session {
    tunn: Tunn,
    keys: Keys,
    /// Upper 24 bits of all the indices that the peer knows us by.
    number: u32,
    /// Source of the last authentic packet of these keys, or the configured endpoint.
    endpoint: Option<SocketAddr>,
    /// When something authentic came last.
    received: Option<Instant>,
    /// Since when other keys are in force.
    superseded: Option<Instant>,
    retry: Retry,
    limits: Limits,
    /// boringtun can seal: it has a confirmed session, and not for its [`LAST_SECONDS`] only.
    has_session: bool,
    /// The key that boringtun seals with: of those that both ends are known to have, the one agreed
    /// on last.
    current: Option<Key>,
    /// The keys that boringtun holds, each in its place, and how many there have been.
    held: [Option<Key>; PLACES as usize],
    keys_made: u64,
    /// Lowest byte of the index of the key that the peer used last: it may be an older one, as long
    /// as no packet has confirmed the current one to it.
    used: Option<u8>,
    /// Index of a session that we answered with and that the peer has not used yet.
    unconfirmed: Option<u32>,
    /// Index of the initiation that boringtun waits for an answer to. If none ever comes it forgets
    /// all sessions, so such a handshake has to be brought to its end.
    pending: Option<u32>,
    /// Lowest byte of the last index given away.
    last_index: u8,
    /// boringtun had given up at the last tick.
    had_expired: bool,
    /// When the first packet was sealed to which there was no answer of any kind.
    unheard: Option<Instant>,
    /// When a stale initiation was last answered.
    stale: Option<Instant>,
    /// Moves of the endpoint that the peer's packets made.
    moves: u64,
    duplicate: DuplicateDetector,
    next_tick: Instant,
}

/// Content of a data message.
pub(crate) enum Opened {
    /// An IP packet of that many bytes, at the start of `dst`.
    Packet(usize),
    Keepalive,
    Rejected(DropReason),
}

/// Outcome of a handshake message. Lengths are those of an answer in `dst`.
enum Handled {
    /// An initiation, answered.
    Answered(usize),
    /// A response: there is a session, and this keepalive confirms it to the peer.
    Established(usize),
    Cookie,
    /// An initiation with another peer's key.
    Stranger,
    Rejected,
}

/// Actions that a session may start by itself.
#[derive(Clone, Copy)]
struct Duty {
    /// Initiate, if there is a reason.
    initiates: bool,
    /// Not rest before there is a session.
    insists: bool,
}

impl Session {
    /// `index` and `seed` are any random numbers. The limits on handshakes are not `macs`'s task.
    fn new(keys: Keys, (index, seed): (u32, u64), macs: Arc<RateLimiter>, now: Instant) -> Self {
        let private = x25519::StaticSecret::from(*keys.private.expose());
        let peer = x25519::PublicKey::from(*keys.peer.as_bytes());
        Self {
            tunn: Tunn::new(private, peer, None, None, index, Some(macs)),
            keys,
            number: index,
            endpoint: None,
            received: None,
            superseded: None,
            retry: Retry::new(seed),
            limits: Limits::WIREGUARD,
            has_session: false,
            current: None,
            held: [None; PLACES as usize],
            keys_made: 0,
            used: None,
            unconfirmed: None,
            pending: None,
            last_index: 0,
            had_expired: false,
            unheard: None,
            stale: None,
            moves: 0,
            duplicate: DuplicateDetector::default(),
            next_tick: now,
        }
    }

    fn deadline(&self) -> Instant {
        let tick = self.tick_due();
        self.retry.due().map_or(tick, |due| due.min(tick))
    }

    fn tick_due(&self) -> Instant {
        self.unheard.map_or(self.next_tick, |since| self.next_tick.min(since + ANSWER_TIMEOUT))
    }

    /// Other keys are in force. Without a session there is nothing to keep up.
    fn supersede(&mut self, now: Instant) {
        self.superseded = Some(now);
        if !self.has_session {
            self.retry.stop();
        }
    }

    /// Seals `packet` into `dst`, which has room for it and for [`MIN_DATA`] bytes more. `None`, if
    /// the key must not be used any more, or there is none.
    #[inline]
    fn seal(&mut self, packet: &[u8], dst: &mut [u8], now: Instant) -> Option<usize> {
        let TunnResult::WriteToNetwork(message) = self.tunn.encapsulate(packet, dst) else {
            return None;
        };
        if !packet.is_empty() && self.unheard.is_none() {
            self.unheard = Some(now);
        }
        let is_old = self.rekey_at().is_some_and(|at| now >= at);
        if is_old || message[0] != DATA || counter_of(message) >= self.limits.rekey {
            return self.seal_last(message.len(), dst, now);
        }
        Some(message.len())
    }

    #[cold]
    fn seal_last(&mut self, length: usize, dst: &[u8], now: Instant) -> Option<usize> {
        self.begin(now);
        if dst[0] == INITIATION {
            self.last_index = dst[4];
        }
        (dst[0] == DATA && counter_of(dst) < self.limits.reject).then_some(length)
    }

    /// Opens a data message of at least [`MIN_DATA`] bytes into `dst`, which is no shorter.
    #[inline]
    fn open(&mut self, datagram: &[u8], dst: &mut [u8]) -> Opened {
        if counter_of(datagram) >= self.limits.reject {
            return Opened::Rejected(DropReason::Replay);
        }
        match self.tunn.decapsulate(None, datagram, dst) {
            TunnResult::WriteToTunnelV4(packet, _) => Opened::Packet(packet.len()),
            TunnResult::WriteToTunnelV6(packet, _) => Opened::Packet(packet.len()),
            TunnResult::Done => Opened::Keepalive,
            TunnResult::Err(error) => Opened::Rejected(reason_of(&error)),
            TunnResult::WriteToNetwork(_) => Opened::Rejected(DropReason::Malformed),
        }
    }

    /// Takes a message that is not data. `dst` has room for [`MAX_HANDSHAKE`] bytes.
    fn handle_handshake(&mut self, message: &[u8], dst: &mut [u8], now: Instant) -> Handled {
        self.tell_time();
        self.next_tick = now;
        match self.tunn.decapsulate(None, message, dst) {
            TunnResult::WriteToNetwork(answer) if answer[0] == RESPONSE => {
                self.unconfirmed = index_at(answer, 4);
                self.last_index = answer[4];
                self.hold(self.unconfirmed, false, now);
                self.pending = None;
                self.retry.hold_off(now);
                Handled::Answered(answer.len())
            }
            TunnResult::WriteToNetwork(keepalive) => {
                let length = keepalive.len();
                let index = index_at(message, 8);
                self.pending = self.pending.filter(|_| self.pending != index);
                self.unconfirmed = None;
                let key = self.hold(index, true, now);
                self.establish(key, now);
                Handled::Established(length)
            }
            TunnResult::Done => {
                // A cookie: with it the next attempt need not wait. One for a response of ours is
                // of use to the peer's next attempt only.
                if index_at(message, 4) != self.unconfirmed {
                    self.retry.hurry(now);
                }
                Handled::Cookie
            }
            TunnResult::Err(WireGuardError::WrongKey) => Handled::Stranger,
            TunnResult::Err(WireGuardError::WrongTai64nTimestamp) => {
                self.handle_stale(now);
                Handled::Rejected
            }
            TunnResult::Err(WireGuardError::UnexpectedPacket) => {
                // To an initiation that boringtun remembers no more: it only knows the last two.
                self.retry.note_late(now);
                Handled::Rejected
            }
            TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => Handled::Rejected,
        }
    }

    /// The peer's initiation is authentic, but stamped earlier than one before: it was recorded, or
    /// the peer has started again and its clock stepped back. In the latter case it will not be
    /// listened to until its clock has caught up, so it has to be us who initiate.
    fn handle_stale(&mut self, now: Instant) {
        let may = self.stale.is_none_or(|last| now >= last + STALE_INTERVAL);
        if may && self.retry.due().is_none() {
            self.stale = Some(now);
            self.retry.start_slowly(now);
        }
    }

    /// Takes note of an authentic handshake message. It is newer than any key, so its sender is
    /// where the peer is now (whitepaper section 2.1).
    fn note_handshake(&mut self, from: SocketAddr, now: Instant) {
        self.note_alive(now);
        self.move_to(from);
    }

    /// Takes note of a data message, sealed with the key of that index. Returns whether it
    /// completes a handshake.
    ///
    /// Only the current key and newer ones move the endpoint: a gateway that seals with a
    /// superseded one could not open what it would be sent.
    #[inline]
    fn note_data(&mut self, index: u32, from: SocketAddr, now: Instant) -> bool {
        self.note_alive(now);
        self.used = Some(index as u8);
        if self.current.is_some_and(|key| key.index == index && key.used.is_some()) {
            self.move_to(from);
            return false;
        }
        self.note_other_key(index, from, now)
    }

    /// Takes note of a data message that was not sealed with the current key, or is the first that
    /// was. Like boringtun, goes on with that key unless it was agreed on earlier than the current
    /// one. It need not be that of the last answer, which may have been lost or still be on its way.
    #[cold]
    fn note_other_key(&mut self, index: u32, from: SocketAddr, now: Instant) -> bool {
        let place = place_of(index);
        let Some(key) = self.held[place].filter(|key| key.index == index) else { return false };
        if let Some(current) = self.current.filter(|current| key.after < current.after) {
            match current.has_superseded(&key) {
                true => self.duplicate.note(&current, (from, self.endpoint), now),
                false => self.move_to(from),
            }
            return false;
        }
        self.move_to(from);
        let is_completed = !key.is_confirmed;
        let key = Key { is_confirmed: true, used: key.used.or(Some(now)), ..key };
        self.held[place] = Some(key);
        self.current = Some(key);
        if is_completed {
            self.unconfirmed = self.unconfirmed.filter(|last| *last != index);
            self.establish(self.current, now);
        }
        is_completed
    }

    #[inline]
    fn note_alive(&mut self, now: Instant) {
        self.received = Some(now);
        self.unheard = None;
    }

    #[inline]
    fn move_to(&mut self, from: SocketAddr) {
        if self.endpoint != Some(from) {
            self.moves += u64::from(self.endpoint.is_some());
            self.endpoint = Some(from);
        }
    }

    /// boringtun has put a key in its place.
    fn hold(&mut self, index: Option<u32>, is_initiator: bool, now: Instant) -> Option<Key> {
        let (index, after) = (index?, self.keys_made);
        self.keys_made += 1;
        let key = Key::new(index, after, is_initiator, now);
        self.held[place_of(key.index)] = Some(key);
        Some(key)
    }

    /// The handshake has come to its end.
    fn establish(&mut self, key: Option<Key>, now: Instant) {
        self.current = key;
        self.has_session = true;
        match self.pending {
            Some(_) => self.retry.postpone(now),
            None => self.retry.stop(),
        }
    }

    fn rekey_at(&self) -> Option<Instant> {
        self.current.and_then(Key::rekey_at)
    }

    /// Returns whether the key of the next handshake would take the place of one in use, were the
    /// initiation of that handshake answered. If so, starts one of our own instead: it is as good,
    /// and leaves that place out.
    #[cold]
    fn must_call_back(&mut self, now: Instant) -> bool {
        let is_in_use = self.is_place_in_use(self.last_index.wrapping_add(1));
        if is_in_use {
            self.retry.start(now);
        }
        is_in_use
    }

    fn is_place_in_use(&self, index: u8) -> bool {
        let current = self.current.map(|key| key.index as u8);
        let mut in_use = current.into_iter().chain(self.used);
        in_use.any(|key| key % PLACES == index % PLACES)
    }

    /// A handshake is due, unless there is one already.
    fn begin(&mut self, now: Instant) {
        if self.retry.due().is_none() {
            self.retry.start(now);
        }
    }

    /// Does what is due at `now`. Returns the length of an initiation in `dst`.
    fn poll(&mut self, now: Instant, duty: Duty, dst: &mut [u8]) -> Option<usize> {
        if now >= self.tick_due() {
            self.tick(now, duty);
        }
        if self.retry.due().is_none_or(|due| now < due) {
            return None;
        }
        let length = self.initiate(duty, dst)?;
        self.retry.note_attempt(now);
        Some(length)
    }

    fn tick(&mut self, now: Instant, duty: Duty) {
        self.duplicate.expire(now);
        let ends = self.held.iter().flatten().map(|key| key.end());
        let ends = ends.flat_map(|end| [end - LAST_SECONDS, end + JUST_AFTER]);
        let ends = ends.chain(self.duplicate.deadline());
        self.next_tick = ends.filter(|end| *end > now).fold(now + TICK, Instant::min);
        self.tell_time();
        if self.tunn.time_since_last_handshake().is_none() {
            (self.current, self.used) = (None, None);
        }
        self.has_session = self.current.is_some_and(|key| now < key.end() - LAST_SECONDS);
        let had_expired = std::mem::replace(&mut self.had_expired, self.tunn.is_expired());
        if self.had_expired && !had_expired {
            self.pending = None;
            // boringtun has given up; a packet may ask for more later.
            if !duty.insists {
                self.retry.stop();
            }
        }
        if self.unheard.is_some_and(|since| now >= since + ANSWER_TIMEOUT) {
            self.unheard = None;
            self.begin(now);
        }
        let on_receive = self.rekey_at().map(|at| at + RECEIVE_GRACE);
        if on_receive.is_some_and(|at| self.received >= Some(at)) {
            self.begin(now);
        }
        if !self.has_session && duty.initiates && duty.insists {
            self.begin(now);
        }
    }

    /// Advances boringtun's timers to now.
    fn tell_time(&mut self) {
        // Too short for an initiation, which boringtun then leaves alone: when to make one is
        // decided here. It has no jitter, and expects an answer 15 s after it last received
        // anything, however young the packet to be answered is. Keepalives are the peer's task.
        let _ = self.tunn.update_timers(&mut [0; MIN_DATA]);
    }

    fn initiate(&mut self, duty: Duty, dst: &mut [u8]) -> Option<usize> {
        self.retry.stop();
        if !duty.initiates {
            return None;
        }
        let mut length = self.format_initiation(dst)?;
        while self.is_place_in_use(self.last_index) {
            length = self.format_initiation(dst)?;
        }
        self.pending = index_at(dst, 4);
        Some(length)
    }

    fn format_initiation(&mut self, dst: &mut [u8]) -> Option<usize> {
        match self.tunn.format_handshake_initiation(dst, true) {
            TunnResult::WriteToNetwork(message) => {
                self.last_index = message[4];
                Some(message.len())
            }
            TunnResult::Done
            | TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => None,
        }
    }

    /// Returns whether boringtun gave up: what waited, waited too long.
    fn is_expired(&self) -> bool {
        self.tunn.is_expired()
    }
}

fn index_at(message: &[u8], at: usize) -> Option<u32> {
    message.get(at..)?.first_chunk().copied().map(u32::from_le_bytes)
}

/// Returns whether a handshake message has an ephemeral key of low order. Nobody makes one by
/// chance, and what it agrees on is no secret.
fn has_low_order(message: &[u8]) -> bool {
    let at = if message.first() == Some(&RESPONSE) { 12 } else { 8 };
    let Some(mut point) = message.get(at..).and_then(|rest| rest.first_chunk().copied()) else {
        return false;
    };
    point[31] &= 0x7f;
    LOW_ORDER.contains(&point)
}

/// The counter of a data message.
#[inline]
fn counter_of(message: &[u8]) -> u64 {
    message[8..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

fn reason_of(error: &WireGuardError) -> DropReason {
    match error {
        WireGuardError::DuplicateCounter | WireGuardError::InvalidCounter => DropReason::Replay,
        WireGuardError::NoCurrentSession | WireGuardError::WrongIndex => DropReason::NoSession,
        WireGuardError::InvalidPacket => DropReason::Malformed,
        WireGuardError::DestinationBufferTooSmall
        | WireGuardError::IncorrectPacketLength
        | WireGuardError::UnexpectedPacket
        | WireGuardError::WrongPacketType
        | WireGuardError::WrongKey
        | WireGuardError::InvalidTai64nTimestamp
        | WireGuardError::WrongTai64nTimestamp
        | WireGuardError::InvalidMac
        | WireGuardError::InvalidAeadTag
        | WireGuardError::LockFailed
        | WireGuardError::ConnectionExpired
        | WireGuardError::UnderLoad => DropReason::DecryptFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_of_low_order_are_those_that_agree_on_nothing() {
        let private = x25519::StaticSecret::from([0x55; 32]);
        let agrees =
            |point| private.diffie_hellman(&x25519::PublicKey::from(point)).was_contributory();
        assert!(LOW_ORDER.into_iter().all(|point| !agrees(point)));
        for point in LOW_ORDER {
            assert!(PublicKey::from_bytes(&point).is_err());
        }
        let mut near = LOW_ORDER[2];
        near[0] ^= 1;
        assert!(agrees(near));
    }
}
