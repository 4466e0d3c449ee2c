//! The WireGuard sessions with one peer: when to shake hands, which key to seal with, where the peer
//! is. Messages and keys themselves are [`noise`]'s.
//!
//! * [`Peer`] holds the sessions of the present keys and of those just superseded, and what does
//!   not depend on keys: where packets wait, when a keepalive is due, what was received when.
//! * [`Session`] is one pair of static keys, with retries without end and limits on messages.
//! * [`limiter`] decides which handshake messages are worth their cost.

mod duplicate;
mod key;
mod limiter;
mod peer;
mod rejections;
mod retry;
mod strays;
mod unconfirmed;
mod unproven;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use fabric_primitives::PublicKey;
use noise::{
    BATCH, CookieReply, Handshake, HandshakeError, INITIATION_LEN, LocalKey, OpenError,
    RESPONSE_LEN, ReceivedInitiation, Response, Sealer, Tai64n,
};

use self::duplicate::DuplicateDetector;
use self::key::{Key, KeyRing, RECEIVE_GRACE, REJECT_AFTER_TIME};
pub(crate) use self::peer::Peer;
pub use self::rejections::{RejectedInitiation, Rejections};
use self::retry::Retry;
pub use self::unconfirmed::Unconfirmed;
use crate::{DropReason, UdpPath};

/// After so long without any answer to data there is a handshake: KEEPALIVE_TIMEOUT and
/// REKEY_TIMEOUT (whitepaper section 6.5).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A session that is to exist and does not is missed this often, if nothing is tried.
const RETRY_CHECK: Duration = Duration::from_secs(1);

/// A stale initiation is answered with one of ours at most this often: WireGuard's REKEY_TIMEOUT.
const STALE_INTERVAL: Duration = Duration::from_secs(5);

/// First byte of data messages, and the length of an empty one.
pub(crate) const DATA: u8 = noise::DATA;
pub(crate) const MIN_DATA: usize = noise::DATA_OVERHEAD;

/// Place of the packet in a data message.
pub(crate) const PACKET: usize = noise::DATA_HEADER;

/// Length in bytes of the longest other message.
pub(crate) const MAX_HANDSHAKE: usize = INITIATION_LEN;

/// Messages with one key, after which another handshake is due, and after which none is sent or
/// believed any more.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) rekey: u64,
    pub(crate) reject: u64,
}

impl Limits {
    /// REKEY_AFTER_MESSAGES and REJECT_AFTER_MESSAGES (whitepaper section 6.1).
    pub(crate) const WIREGUARD: Self =
        Self { rekey: 1 << 60, reject: noise::REJECT_AFTER_MESSAGES };
}

/// The tunnel of one pair of static keys. It seals as soon as a handshake has come to its end, and
/// opens what was sealed with any of its last handshakes.
struct Session {
    handshake: Handshake,
    keys: KeyRing,
    /// Path of the last authentic packet of these keys, or to the configured endpoint.
    path: Option<UdpPath>,
    /// It is that of a packet.
    is_endpoint_authentic: bool,
    /// [`Config::relay`](crate::Config::relay).
    relay: Option<IpAddr>,
    /// Time of the last authentic message.
    received: Option<Instant>,
    /// Since when other keys are in force.
    superseded: Option<Instant>,
    retry: Retry,
    limits: Limits,
    /// Until when the current key may be sealed with. `None` once that has passed.
    sealable_until: Option<Instant>,
    /// Time at which the first packet was sealed to which there was no answer of any kind.
    unheard: Option<Instant>,
    /// Time of the last answer to a stale initiation.
    stale: Option<Instant>,
    /// Moves of the endpoint that the peer's packets made.
    moves: u64,
    duplicate: DuplicateDetector,
    unconfirmed: Option<Unconfirmed>,
    /// Deadline of the next [`Session::check`].
    next_check: Option<Instant>,
}

/// Content of a data message.
#[derive(Clone, Copy)]
pub(crate) enum Opened {
    /// An IP packet of that many bytes, at [`PACKET`].
    Packet(usize),
    /// Authentic, but no IP packet.
    NotIp,
    Keepalive,
    Rejected(DropReason),
}

impl Opened {
    #[inline]
    fn of(datagram: &[u8], opened: Result<usize, OpenError>) -> Self {
        match opened {
            Ok(0) => Self::Keepalive,
            Ok(len) => packet_len(&datagram[PACKET..][..len]).map_or(Self::NotIp, Self::Packet),
            Err(OpenError::Replay) => Self::Rejected(DropReason::Replay),
            Err(OpenError::NotAuthentic) => Self::Rejected(DropReason::DecryptFailed),
        }
    }
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
    /// `seed` is any random number.
    fn new(handshake: Handshake, seed: u64, now: Instant) -> Self {
        Self {
            handshake,
            keys: KeyRing::default(),
            path: None,
            is_endpoint_authentic: false,
            relay: None,
            received: None,
            superseded: None,
            retry: Retry::new(seed),
            limits: Limits::WIREGUARD,
            sealable_until: None,
            unheard: None,
            stale: None,
            moves: 0,
            duplicate: DuplicateDetector::default(),
            unconfirmed: None,
            next_check: Some(now),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.check_due().into_iter().chain(self.retry.deadline()).min()
    }

    fn check_due(&self) -> Option<Instant> {
        let unheard = self.unheard.map(|since| since + ANSWER_TIMEOUT);
        unheard.into_iter().chain(self.next_check).min()
    }

    /// End of the use of superseded keys: WireGuard discards any key by then.
    fn end(&self) -> Option<Instant> {
        self.superseded.map(|at| at + REJECT_AFTER_TIME)
    }

    /// Other keys are in force. Without a session there is nothing to keep up.
    fn supersede(&mut self, now: Instant) {
        self.superseded = Some(now);
        self.next_check = Some(now);
        if !self.has_session() {
            self.retry.stop();
        }
    }

    /// Returns whether these are its static keys.
    fn is_of(&self, local: &LocalKey, peer: Option<&PublicKey>) -> bool {
        self.has_key(local) && peer == Some(self.handshake.peer())
    }

    /// Returns whether this is its private key.
    fn has_key(&self, local: &LocalKey) -> bool {
        self.handshake.local().public() == local.public()
    }

    #[inline]
    fn has_session(&self) -> bool {
        self.sealable_until.is_some()
    }

    #[inline]
    fn can_seal(&self, now: Instant) -> bool {
        self.sealable_until.is_some_and(|until| now < until)
    }

    /// Returns whether `index` is that of a key or of a message that may be answered.
    fn holds(&self, index: u32) -> bool {
        self.keys.position(index).is_some() || self.handshake.expects(index)
    }

    /// Writes a data message with `packet`, padded to `size` bytes, into `dst`, which has room for that
    /// and for [`MIN_DATA`] bytes more. Returns its length and who is to encrypt it. `None`, if the key
    /// must not be used any more, or there is none.
    #[inline]
    fn prepare(
        &mut self,
        (packet, size): (&[u8], usize),
        dst: &mut [u8],
        now: Instant,
    ) -> Option<(usize, &Sealer)> {
        let key = self.keys.current()?;
        let sealed = key.sealer.prepare(packet, size, dst)?;
        let is_old = key.rekey_at().is_some_and(|at| now >= at);
        if !packet.is_empty() && self.unheard.is_none() {
            self.unheard = Some(now);
        }
        if is_old || sealed.counter >= self.limits.rekey {
            self.begin(now);
        }
        let sealer = &self.keys.current()?.sealer;
        (sealed.counter < self.limits.reject).then_some((sealed.len, sealer))
    }

    /// Seals a keepalive into `dst` and returns its length.
    fn seal_keepalive(&mut self, dst: &mut [u8], now: Instant) -> Option<usize> {
        let (len, sealer) = self.prepare((&[], 0), dst, now)?;
        sealer.encrypt(&mut dst[..len], len);
        Some(len)
    }

    /// Opens up to [`BATCH`] data messages of at least [`MIN_DATA`] bytes with the key at `at`, in place.
    #[inline]
    fn open(
        &self,
        at: usize,
        datagrams: &mut [u8],
        segment_size: usize,
        now: Instant,
    ) -> [Opened; BATCH] {
        let key = self.keys.key(at);
        if now >= key.end() {
            return [Opened::Rejected(DropReason::NoSession); BATCH];
        }
        let mut outcomes = [Opened::Rejected(DropReason::Replay); BATCH];
        let results = key.opener.open(datagrams, segment_size);
        let datagrams = datagrams.chunks(segment_size);
        for ((outcome, result), datagram) in outcomes.iter_mut().zip(results).zip(datagrams) {
            if counter_of(datagram) < self.limits.reject {
                *outcome = Opened::of(datagram, result);
            }
        }
        outcomes
    }

    /// Makes an initiation with a new `index` of ours.
    fn initiate(&mut self, index: u32, stamp: Tai64n, now: Instant) -> [u8; INITIATION_LEN] {
        self.retry.note_attempt(now);
        self.handshake.initiate(index, stamp, now)
    }

    /// Answers an initiation of the peer, with a new `index` of ours.
    fn respond(
        &mut self,
        initiation: ReceivedInitiation,
        index: u32,
        now: Instant,
    ) -> Result<[u8; RESPONSE_LEN], HandshakeError> {
        let answer = self.handshake.respond(initiation, index, now);
        if answer.as_ref().err() == Some(&HandshakeError::Stale) {
            self.handle_stale(now);
        }
        let (message, pair) = answer?;
        self.keys.insert(Key::new(pair, false, now));
        self.received = Some(now);
        self.plan_check(now);
        self.retry.hold_off(now);
        Ok(message)
    }

    /// Takes the peer's response: there is a session.
    fn complete(&mut self, response: Response<'_>, now: Instant) -> Result<(), HandshakeError> {
        let pair = self.handshake.complete(response, now)?;
        let at = self.keys.insert(Key::new(pair, true, now));
        self.keys.select(at);
        self.establish(now);
        Ok(())
    }

    /// With a cookie the next attempt need not wait. One for a response of ours is of use to the
    /// peer's next attempt only.
    fn take_cookie(&mut self, reply: CookieReply<'_>, now: Instant) -> Result<(), HandshakeError> {
        if self.handshake.take_cookie(reply, now)? {
            self.retry.hurry(now);
        }
        Ok(())
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

    /// Counts a response to the peer, which its next authentic packet confirms.
    fn note_unconfirmed(&mut self, path: UdpPath, now: Instant) {
        let responses = self.unconfirmed.map_or(0, |before| before.responses).saturating_add(1);
        self.unconfirmed = Some(Unconfirmed { path, responses, last: now });
    }

    /// Responses since then; a single one is on its way.
    fn unconfirmed(&self) -> Option<Unconfirmed> {
        self.unconfirmed.filter(|unconfirmed| unconfirmed.responses > 1)
    }

    /// Takes note of a response to an initiation of ours: its sender is where the peer is now
    /// (whitepaper section 2.1). The sender of an initiation is, too, once it uses the key.
    fn note_response(&mut self, from: UdpPath, now: Instant) {
        self.note_alive(now);
        self.move_to(from);
    }

    /// Takes note of a data message, sealed with the key at `at`. Returns whether it completes a
    /// handshake.
    ///
    /// Only the current key and newer ones move the endpoint: a gateway that seals with a
    /// superseded one could not open what it would be sent.
    #[inline]
    fn note_data(&mut self, at: usize, from: UdpPath, now: Instant) -> bool {
        self.note_alive(now);
        let key = self.keys.key(at);
        let is_used = key.used.is_some();
        self.keys.used = Some(key.index);
        if is_used && self.keys.is_current(at) {
            self.move_to(from);
            return false;
        }
        self.note_other_key(at, from, now)
    }

    /// Takes note of a data message that was not sealed with the current key, or is the first that
    /// was. Goes on with that key unless it was agreed on earlier than the current one. It need not
    /// be that of the last answer, which may have been lost or still be on its way.
    #[cold]
    fn note_other_key(&mut self, at: usize, from: UdpPath, now: Instant) -> bool {
        if let Some(current) = self.keys.newer_current(at) {
            match current.has_superseded(self.keys.key(at)) {
                true => {
                    let endpoint = self.path.map(|path| path.remote);
                    self.duplicate.note(current, (from.remote, endpoint), now);
                }
                false => self.move_to(from),
            }
            self.plan_check(now);
            return false;
        }
        self.move_to(from);
        let is_completed = self.keys.select(at).note_use(now);
        match is_completed {
            true => self.establish(now),
            false => self.plan_check(now),
        }
        is_completed
    }

    #[inline]
    fn note_alive(&mut self, now: Instant) {
        self.received = Some(now);
        self.unheard = None;
        self.unconfirmed = None;
        let rekey_at = self.keys.current().and_then(Key::rekey_at);
        if rekey_at.is_some_and(|at| now >= at + RECEIVE_GRACE) {
            self.begin(now);
        }
    }

    #[inline]
    fn move_to(&mut self, from: UdpPath) {
        let is_relay = |path: UdpPath| self.relay == Some(path.remote.ip().to_canonical());
        let has_other = self.path.is_some_and(|path| !is_relay(path)) && self.is_endpoint_authentic;
        if is_relay(from) && has_other {
            return;
        }
        if self.path != Some(from) {
            let is_move = self.path.is_some_and(|path| path.remote != from.remote);
            self.moves += u64::from(is_move);
            self.path = Some(from);
        }
        self.is_endpoint_authentic = true;
    }

    /// The handshake has come to its end.
    fn establish(&mut self, now: Instant) {
        self.retry.stop();
        self.plan_check(now);
    }

    /// A handshake is due, unless there is one already.
    fn begin(&mut self, now: Instant) {
        if self.retry.due().is_none() {
            self.retry.start(now);
        }
    }

    /// Does what is due at `now`. Returns whether an initiation is.
    fn poll(&mut self, now: Instant, duty: Duty) -> bool {
        if self.check_due().is_some_and(|due| now >= due) {
            self.check(now, duty);
        }
        let is_due = self.retry.due().is_some_and(|due| now >= due);
        if is_due && !duty.initiates {
            self.retry.stop();
        }
        is_due && duty.initiates
    }

    fn check(&mut self, now: Instant, duty: Duty) {
        self.keys.expire(now);
        self.duplicate.expire(now);
        self.plan_check(now);
        if self.unheard.is_some_and(|since| now >= since + ANSWER_TIMEOUT) {
            self.unheard = None;
            self.begin(now);
        }
        if !self.has_session() && duty.insists {
            self.begin(now);
            let again = now + RETRY_CHECK;
            self.next_check = Some(self.next_check.map_or(again, |at| at.min(again)));
        }
    }

    /// Keys have changed, or time has passed.
    fn plan_check(&mut self, now: Instant) {
        let last_sealed_at = self.keys.current().map(Key::last_sealed_at);
        self.sealable_until = last_sealed_at.filter(|at| now < *at);
        let duplicate = self.duplicate.deadline();
        self.next_check = self.keys.deadline(now).into_iter().chain(duplicate).min();
    }

    /// Returns whether handshakes have been tried in vain for so long that what waits for a session
    /// has waited too long. Without a duty to go on, they end.
    fn gives_up(&mut self, now: Instant, duty: Duty) -> bool {
        let has_failed = self.retry.has_failed(now);
        if has_failed && !duty.insists {
            self.retry.stop();
        }
        has_failed
    }
}

/// The counter of a data message.
#[inline]
fn counter_of(message: &[u8]) -> u64 {
    message[8..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// Length of the IP packet at the start of what was opened, without padding. `None` if it is none, or
/// longer.
#[inline]
fn packet_len(opened: &[u8]) -> Option<usize> {
    let length = match opened {
        [first, _, a, b, ..] if first >> 4 == 4 && opened.len() >= 20 => {
            usize::from(u16::from_be_bytes([*a, *b]))
        }
        [first, _, _, _, a, b, ..] if first >> 4 == 6 && opened.len() >= 40 => {
            40 + usize::from(u16::from_be_bytes([*a, *b]))
        }
        _ => return None,
    };
    (length <= opened.len()).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_that_of_the_ip_header() {
        let packet = |first: u8, at: usize, length: u16| {
            let mut packet = [0; 64];
            packet[0] = first;
            packet[at..at + 2].copy_from_slice(&length.to_be_bytes());
            packet
        };
        assert_eq!(packet_len(&packet(0x45, 2, 20)), Some(20));
        assert_eq!(packet_len(&packet(0x45, 2, 64)), Some(64));
        assert_eq!(packet_len(&packet(0x45, 2, 65)), None);
        assert_eq!(packet_len(&packet(0x60, 4, 0)), Some(40));
        assert_eq!(packet_len(&packet(0x60, 4, 24)), Some(64));
        assert_eq!(packet_len(&packet(0x60, 4, 25)), None);
        assert_eq!(packet_len(&packet(0x50, 2, 20)), None);
        assert_eq!(packet_len(&packet(0x45, 2, 19)[..19]), None);
        assert_eq!(packet_len(&packet(0x60, 4, 0)[..39]), None);
    }
}
