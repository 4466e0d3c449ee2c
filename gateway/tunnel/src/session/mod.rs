//! boringtun's `Tunn`, and what it leaves out: retries without end, a limit of its own on
//! handshakes in front, roaming, a bounded queue, a keepalive that can be changed.

mod limiter;
mod retry;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::errors::WireGuardError;
use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;
use fabric_api::{PrivateKey, PublicKey};

use self::limiter::HandshakeLimiter;
use self::retry::Retry;
use crate::DropReason;
use crate::random::Random;

/// How often boringtun is told that time passes. Its timers count whole seconds.
const TICK: Duration = Duration::from_millis(250);

/// Handshake messages a second that boringtun works on (some 150 us each) before it asks for
/// cookies (some 4 us).
const HANDSHAKES_BEFORE_COOKIES: u64 = 50;

/// Packets that may wait for a session, boringtun's own bound being 256: enough for the first
/// words of many connections, and less than 100 KB.
const MAX_WAITING: usize = 64;

/// First byte of WireGuard's messages (whitepaper section 5.4).
const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
pub(crate) const DATA: u8 = 4;

/// Lengths in bytes of the messages whose first byte is 1, 2, 3, and of an empty data message.
pub(crate) const MAX_HANDSHAKE: usize = 148;
pub(crate) const MIN_DATA: usize = 32;

/// The WireGuard session with one peer, and where that peer is.
pub(crate) struct Session {
    tunn: Tunn,
    limiter: HandshakeLimiter,
    cookies: Arc<RateLimiter>,
    endpoint: Option<SocketAddr>,
    initiate: bool,
    keepalive: Option<Duration>,
    retry: Retry,
    /// Whether boringtun can seal: it has a confirmed session.
    has_session: bool,
    /// Index of a session that we answered with and that the peer has not used yet.
    unconfirmed: Option<u32>,
    waiting: usize,
    next_tick: Instant,
    last_sent: Instant,
    has_sent_since_tick: bool,
    pub(crate) last_handshake: Option<Instant>,
    pub(crate) last_authentic: Option<Instant>,
    pub(crate) attempts: u64,
    pub(crate) handshakes: u64,
}

/// What became of a packet that was to be sealed. Lengths are those of datagrams in `dst`.
pub(crate) enum Sealed {
    Packet(usize),
    /// The packet waits for a session, and this initiation asks for one.
    Handshake(usize),
    Waiting,
    /// Too many wait already.
    Refused,
}

/// What a data message held.
pub(crate) enum Opened {
    /// An IP packet of that many bytes, at the start of `dst`.
    Packet(usize),
    Keepalive,
    Rejected(DropReason),
}

/// Settings that may change without another session.
pub(crate) struct Settings {
    pub(crate) initiate: bool,
    pub(crate) keepalive: Option<Duration>,
}

impl Session {
    pub(crate) fn new(
        keys: (&PrivateKey, &PublicKey),
        settings: Settings,
        random: &mut Random,
        now: Instant,
    ) -> Self {
        let private = x25519::StaticSecret::from(*keys.0.expose());
        let own_public = x25519::PublicKey::from(&private);
        let peer = x25519::PublicKey::from(*keys.1.as_bytes());
        let cookies = Arc::new(RateLimiter::new(&own_public, HANDSHAKES_BEFORE_COOKIES));
        let index = random.next() as u32 >> 8;
        Self {
            tunn: Tunn::new(private, peer, None, None, index, Some(Arc::clone(&cookies))),
            limiter: HandshakeLimiter::new(now),
            cookies,
            endpoint: None,
            initiate: settings.initiate,
            keepalive: settings.keepalive,
            retry: Retry::new(random.next()),
            has_session: false,
            unconfirmed: None,
            waiting: 0,
            next_tick: now,
            last_sent: now,
            has_sent_since_tick: false,
            last_handshake: None,
            last_authentic: None,
            attempts: 0,
            handshakes: 0,
        }
    }

    pub(crate) fn configure(&mut self, settings: Settings, now: Instant) {
        let starts = settings.initiate && !self.initiate && !self.has_session;
        self.initiate = settings.initiate;
        self.keepalive = settings.keepalive;
        if starts {
            self.initiate_now(now);
        }
    }

    pub(crate) fn endpoint(&self) -> Option<SocketAddr> {
        self.endpoint
    }

    /// The peer is said to be elsewhere.
    pub(crate) fn set_endpoint(&mut self, endpoint: Option<SocketAddr>, now: Instant) {
        self.endpoint = endpoint;
        if self.initiate {
            self.initiate_now(now);
        }
    }

    /// Begins a handshake, whatever session there is.
    pub(crate) fn initiate_now(&mut self, now: Instant) {
        self.retry.start(now);
    }

    pub(crate) fn has_session(&self) -> bool {
        self.has_session
    }

    /// When [`Session::poll`] is next due.
    pub(crate) fn deadline(&self) -> Instant {
        [self.retry.due(), self.keepalive_due()]
            .into_iter()
            .flatten()
            .fold(self.next_tick, Instant::min)
    }

    /// Seals `packet` into `dst`, which has room for it, 32 bytes more, and [`MAX_HANDSHAKE`].
    #[inline]
    pub(crate) fn seal(&mut self, packet: &[u8], dst: &mut [u8], now: Instant) -> Sealed {
        if !self.has_session && self.waiting >= MAX_WAITING {
            return Sealed::Refused;
        }
        let length = match self.tunn.encapsulate(packet, dst) {
            TunnResult::WriteToNetwork(message) => message.len(),
            TunnResult::Done
            | TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => {
                self.waiting += 1;
                return Sealed::Waiting;
            }
        };
        if dst[0] == DATA {
            self.has_sent_since_tick = true;
            return Sealed::Packet(length);
        }
        self.waiting += 1;
        self.note_initiation(now);
        Sealed::Handshake(length)
    }

    #[inline]
    pub(crate) fn is_anything_waiting(&self) -> bool {
        self.waiting > 0 && self.has_session
    }

    /// Seals a packet that waited for the session. Returns the lengths of the datagram and of the
    /// packet.
    pub(crate) fn seal_waiting(&mut self, dst: &mut [u8]) -> Option<(usize, usize)> {
        if !self.is_anything_waiting() {
            return None;
        }
        match self.tunn.decapsulate(None, &[], dst) {
            TunnResult::WriteToNetwork(message) if message[0] == DATA => {
                self.waiting -= 1;
                Some((message.len(), message.len() - MIN_DATA))
            }
            TunnResult::WriteToNetwork(_)
            | TunnResult::Done
            | TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => {
                self.waiting = 0;
                None
            }
        }
    }

    /// Opens a data message of at least [`MIN_DATA`] bytes into `dst`, which is no shorter.
    #[inline]
    pub(crate) fn open(
        &mut self,
        from: SocketAddr,
        datagram: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Opened {
        let opened = match self.tunn.decapsulate(Some(from.ip()), datagram, dst) {
            TunnResult::WriteToTunnelV4(packet, _) => Opened::Packet(packet.len()),
            TunnResult::WriteToTunnelV6(packet, _) => Opened::Packet(packet.len()),
            TunnResult::Done => Opened::Keepalive,
            TunnResult::Err(error) => return Opened::Rejected(reason_of(&error)),
            TunnResult::WriteToNetwork(_) => return Opened::Rejected(DropReason::Malformed),
        };
        self.note_authentic(from, now);
        if self.unconfirmed.is_some() && self.unconfirmed == index_at(datagram, 4) {
            self.complete_handshake(now);
        }
        opened
    }

    /// Takes a message that is not data. `Ok` is the length of the answer in `dst`, which has room
    /// for [`MAX_HANDSHAKE`] bytes; 0 if there is none.
    pub(crate) fn handle_handshake(
        &mut self,
        from: SocketAddr,
        datagram: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, DropReason> {
        if datagram.len() > MAX_HANDSHAKE || matches!(datagram, [] | [DATA, ..]) {
            return Err(DropReason::Malformed);
        }
        let is_known = self.endpoint.is_some_and(|endpoint| endpoint.ip() == from.ip());
        if !self.limiter.admits(is_known, now) {
            return Err(DropReason::HandshakeRejected);
        }
        let answer = match self.tunn.decapsulate(Some(from.ip()), datagram, dst) {
            TunnResult::WriteToNetwork(answer) => answer,
            TunnResult::Done => return Ok(0),
            TunnResult::Err(WireGuardError::InvalidMac | WireGuardError::InvalidPacket) => {
                // Cheap to find out, so it takes nothing from whoever knows our public key.
                self.limiter.give_back(is_known);
                return Err(DropReason::HandshakeRejected);
            }
            TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => return Err(DropReason::HandshakeRejected),
        };
        let (length, index) = (answer.len(), index_at(answer, 4));
        match (datagram[0], answer[0]) {
            (INITIATION, RESPONSE) => {
                self.note_authentic(from, now);
                self.unconfirmed = index;
                self.retry.hold_off(now);
            }
            (RESPONSE, DATA) => {
                self.note_authentic(from, now);
                self.complete_handshake(now);
            }
            _ => {}
        }
        Ok(length)
    }

    /// Does what is due at `now`, one thing a call: returns the length of a datagram for the peer in
    /// `dst`, `None` when there is nothing more to do.
    pub(crate) fn poll(&mut self, now: Instant, dst: &mut [u8]) -> Option<usize> {
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            if let Some(length) = self.tick(now, dst) {
                return Some(length);
            }
        }
        if self.retry.due().is_some_and(|due| now >= due) {
            return self.retry(now, dst);
        }
        if self.keepalive_due().is_some_and(|due| now >= due) {
            self.last_sent = now;
            return match self.tunn.encapsulate(&[], dst) {
                TunnResult::WriteToNetwork(message) => Some(message.len()),
                TunnResult::Done
                | TunnResult::Err(_)
                | TunnResult::WriteToTunnelV4(..)
                | TunnResult::WriteToTunnelV6(..) => None,
            };
        }
        None
    }

    fn tick(&mut self, now: Instant, dst: &mut [u8]) -> Option<usize> {
        if std::mem::take(&mut self.has_sent_since_tick) {
            self.last_sent = now;
        }
        self.cookies.reset_count();
        let message = match self.tunn.update_timers(dst) {
            TunnResult::WriteToNetwork(message) => Some((message.len(), message[0])),
            TunnResult::Err(_) => {
                // Expired: boringtun threw away what waited, and never begins again by itself.
                self.waiting = 0;
                None
            }
            TunnResult::Done
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => None,
        };
        self.has_session = self.tunn.time_since_last_handshake().is_some();
        if self.tunn.is_expired() && !self.initiate {
            self.retry.stop();
        }
        if !self.has_session
            && self.initiate
            && self.retry.due().is_none()
            && self.endpoint.is_some()
        {
            self.retry.start(now);
        }
        let (length, kind) = message?;
        self.endpoint?;
        if kind == INITIATION {
            self.note_initiation(now);
        }
        Some(length)
    }

    fn retry(&mut self, now: Instant, dst: &mut [u8]) -> Option<usize> {
        if self.endpoint.is_none() {
            self.retry.stop();
            return None;
        }
        match self.tunn.format_handshake_initiation(dst, true) {
            TunnResult::WriteToNetwork(message) => {
                let length = message.len();
                self.note_initiation(now);
                Some(length)
            }
            TunnResult::Done
            | TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => {
                self.retry.note_attempt(now);
                None
            }
        }
    }

    fn keepalive_due(&self) -> Option<Instant> {
        self.keepalive.filter(|_| self.has_session).map(|interval| self.last_sent + interval)
    }

    fn note_initiation(&mut self, now: Instant) {
        self.attempts += 1;
        self.retry.note_attempt(now);
    }

    /// Whoever can seal for us is the peer, wherever the datagram came from (whitepaper section
    /// 2.1); nothing else moves the endpoint.
    #[inline]
    fn note_authentic(&mut self, from: SocketAddr, now: Instant) {
        self.last_authentic = Some(now);
        if self.endpoint != Some(from) {
            self.endpoint = Some(from);
        }
    }

    fn complete_handshake(&mut self, now: Instant) {
        self.unconfirmed = None;
        self.has_session = true;
        self.handshakes += 1;
        self.last_handshake = Some(now);
        self.retry.stop();
    }
}

fn index_at(message: &[u8], at: usize) -> Option<u32> {
    message.get(at..)?.first_chunk().copied().map(u32::from_le_bytes)
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
