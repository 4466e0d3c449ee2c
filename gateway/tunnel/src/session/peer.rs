use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use boringtun::x25519;
use fabric_primitives::PrivateKey;

use super::limiter::{HandshakeLimiter, Verdict};
use super::rejections::Rejections;
use super::{
    Duty, Handled, INITIATION, Keys, MAX_HANDSHAKE, Opened, REJECT_AFTER_TIME, RESPONSE, Session,
    has_low_order, index_at,
};
use crate::random::Random;
use crate::{Config, DropReason, PeerState};

/// Superseded keys that are kept: a rotation passes through up to two pairs, and may be undone.
const MAX_SUPERSEDED: usize = 4;

/// After so long without an answer to data there is an empty one (whitepaper section 6.5).
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum time since something authentic came, and since the last such handshake, until
/// initiations from the peer's address are met with one of ours.
const CALL_BACK: Duration = Duration::from_millis(500);

/// Packets that may wait for a session: enough for the first ones of many connections, and less
/// than 100 KB.
const MAX_WAITING: usize = 64;

/// The other end of the tunnel, through all its keys.
///
/// New keys at one end are of no use before the other end has them, too. Until then, and for
/// [`REJECT_AFTER_TIME`] at most, the superseded ones carry on.
pub(crate) struct Peer {
    /// Newest keys first; the first are those in force. Empty without the peer's key.
    sessions: Vec<Session>,
    /// One for each private key in `sessions`, newest first.
    limiters: Vec<(PrivateKey, HandshakeLimiter)>,
    /// The endpoint as last configured.
    configured: Option<SocketAddr>,
    /// The same, if it was configured while there was a session and no packet has come from it since.
    unproven: Option<SocketAddr>,
    initiate: bool,
    keepalive: Option<Duration>,
    waiting: VecDeque<Vec<u8>>,
    last_sent: Instant,
    /// Since when data of the peer is without any answer.
    unanswered: Option<Instant>,
    last_handshake: Option<Instant>,
    last_authentic: Option<Instant>,
    /// When a handshake was last started because others crowd the peer's messages out.
    called_back: Option<Instant>,
    /// Initiations sent, and handshakes that led to a session.
    pub(crate) attempts: u64,
    pub(crate) handshakes: u64,
    rejections: Rejections,
    /// [`Peer::moves`] of sessions that are no longer held.
    moves_of_removed: u64,
    random: Random,
}

impl Peer {
    /// A peer of whom nothing is known before [`Peer::configure`].
    pub(crate) fn new(random: Random, now: Instant) -> Self {
        Self {
            sessions: Vec::new(),
            limiters: Vec::new(),
            configured: None,
            unproven: None,
            initiate: false,
            keepalive: None,
            waiting: VecDeque::new(),
            last_sent: now,
            unanswered: None,
            last_handshake: None,
            last_authentic: None,
            called_back: None,
            attempts: 0,
            handshakes: 0,
            rejections: Rejections::default(),
            moves_of_removed: 0,
            random,
        }
    }

    /// Takes a config over: other keys supersede those in force, no key for the peer ends all
    /// sessions at once, and another endpoint than the one configured before is where the peer is.
    pub(crate) fn configure(&mut self, config: &Config, now: Instant) {
        let begins = config.initiate && !self.initiate;
        self.initiate = config.initiate;
        self.keepalive = config.keepalive;
        let Some(peer) = config.peer_key else { return self.forget() };
        let moved = config.endpoint.filter(|_| config.endpoint != self.configured);
        self.configured = config.endpoint;
        let is_new = self.use_keys(Keys { private: config.private_key.clone(), peer }, now);
        // Old keys of a peer that has moved may be somebody else's where it is now.
        let concerned = if is_new { 1 } else { self.sessions.len() };
        for session in self.sessions[..concerned].iter_mut().filter(|_| moved.is_some()) {
            session.endpoint = moved;
        }
        if let Some(moved) = moved {
            self.unproven = Some(moved).filter(|_| self.has_session());
        }
        let has_reason = is_new || moved.is_some() || begins && !self.has_session();
        let rotates = is_new && self.sessions.len() > 1;
        if has_reason && self.initiate || rotates {
            self.sessions[0].retry.start(now);
        }
    }

    /// Begins a handshake at the next [`Peer::poll`].
    pub(crate) fn initiate_now(&mut self, now: Instant) {
        let sender = self.sender();
        for (i, session) in self.sessions.iter_mut().enumerate() {
            if i == 0 || Some(i) == sender {
                session.retry.start(now);
            }
        }
    }

    pub(crate) fn state(&self) -> PeerState {
        PeerState {
            endpoint: self.endpoint(),
            unproven_endpoint: self.unproven,
            has_session: self.has_session(),
            last_handshake: self.last_handshake,
            last_authentic: self.last_authentic,
            on_superseded_keys: self.sender().is_some_and(|at| at > 0),
            rejections: self.rejections,
            duplicate: self.sessions.iter().find_map(|session| session.duplicate.endpoints()),
        }
    }

    /// Number of times that packets of the peer have moved its endpoint.
    pub(crate) fn moves(&self) -> u64 {
        self.moves_of_removed + self.sessions.iter().map(|session| session.moves).sum::<u64>()
    }

    /// Returns the endpoint that packets go to.
    #[inline]
    pub(crate) fn endpoint(&self) -> Option<SocketAddr> {
        self.endpoint_of(self.sender().unwrap_or(0))
    }

    /// Returns whether packets can be sealed.
    #[inline]
    pub(crate) fn has_session(&self) -> bool {
        self.sender().is_some()
    }

    /// When [`Peer::poll`] is next due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let sessions = self.sessions.iter().map(Session::deadline);
        let ends = self.sessions.iter().filter_map(end_of);
        sessions.chain(ends).chain(self.keepalive_due()).min()
    }

    /// Seals `packet` into `dst`, which has room for it and for 32 bytes more. Returns the length
    /// of the datagram, `None` if there is no session.
    #[inline]
    pub(crate) fn seal(&mut self, packet: &[u8], dst: &mut [u8], now: Instant) -> Option<usize> {
        let session = self.sessions.iter_mut().find(|session| session.has_session)?;
        let length = session.seal(packet, dst, now)?;
        self.note_sent(now);
        Some(length)
    }

    /// Keeps `packet` until there is a session, and asks for one. False if too many wait already.
    #[cold]
    pub(crate) fn wait(&mut self, packet: &[u8], now: Instant) -> bool {
        let Some(session) = self.sessions.first_mut() else { return false };
        if self.waiting.len() >= MAX_WAITING {
            return false;
        }
        session.begin(now);
        self.waiting.push_back(packet.to_vec());
        true
    }

    #[inline]
    pub(crate) fn is_anything_waiting(&self) -> bool {
        !self.waiting.is_empty() && self.has_session()
    }

    /// A packet that waited for the session that there is now.
    pub(crate) fn next_waiting(&mut self) -> Option<Vec<u8>> {
        self.is_anything_waiting().then(|| self.waiting.pop_front()).flatten()
    }

    /// Opens a data message of at least 32 bytes into `dst`, which is no shorter.
    #[inline]
    pub(crate) fn open(
        &mut self,
        from: SocketAddr,
        datagram: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Opened {
        let index = index_at(datagram, 4);
        let number = index.map(|index| index >> 8);
        let Some(at) = self.sessions.iter().position(|session| Some(session.number) == number)
        else {
            return Opened::Rejected(DropReason::NoSession);
        };
        let session = &mut self.sessions[at];
        let opened = session.open(datagram, dst);
        match opened {
            Opened::Rejected(_) => return opened,
            Opened::Packet(_) if self.unanswered.is_none() => self.unanswered = Some(now),
            Opened::Packet(_) | Opened::Keepalive => {}
        }
        self.last_authentic = Some(now);
        self.unproven = self.unproven.filter(|at| !is_same(*at, from));
        if index.is_some_and(|index| session.note_data(index, from, now)) {
            self.note_handshake(now);
        }
        opened
    }

    /// Takes a message that is not data. `Ok` is the length of the answer in `dst`, which has room
    /// for a handshake message; 0 if there is none.
    pub(crate) fn handle_handshake(
        &mut self,
        from: SocketAddr,
        message: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, DropReason> {
        self.forget_superseded(now);
        if has_low_order(message) {
            return Err(DropReason::Malformed);
        }
        let known = |session: &Session| session.endpoint.is_some_and(|at| at.ip() == from.ip());
        let is_peer = self.sessions.iter().any(known);
        let mut refused = DropReason::NoSession;
        // A message sealed for one of our keys has no valid mac1 for another.
        for i in 0..self.limiters.len() {
            let outcome = match self.limiters[i].1.judge((from, is_peer), message, dst, now) {
                Verdict::Work => return self.dispatch(i, from, message, dst, now),
                Verdict::Cookie(length) => Ok(length),
                Verdict::Busy => Err(DropReason::HandshakeRejected),
                Verdict::Drop(reason) => {
                    refused = reason;
                    continue;
                }
            };
            if is_peer && message[0] == INITIATION {
                self.call_back(now);
            }
            return outcome;
        }
        if message.len() == MAX_HANDSHAKE && message[0] == INITIATION && !self.sessions.is_empty() {
            self.rejections.record_wrong_responder(from, now);
        }
        Err(refused)
    }

    /// Initiates a handshake, as initiations from the peer's address are too many to check. A peer
    /// that has just sent an authentic packet has no need of it; for any other it is a handshake
    /// that a spoofer of the address can neither answer, nor drown the answer.
    fn call_back(&mut self, now: Instant) {
        let is_long_ago = |at: Option<Instant>| at.is_none_or(|at| now >= at + CALL_BACK);
        if is_long_ago(self.last_authentic) && is_long_ago(self.called_back) {
            self.called_back = Some(now);
            self.initiate_now(now);
        }
    }

    /// Does what is due at `now`, one thing a call: returns a datagram's address and its length in
    /// `dst`, `None` when there is nothing more to do.
    pub(crate) fn poll(&mut self, now: Instant, dst: &mut [u8]) -> Option<(SocketAddr, usize)> {
        self.forget_superseded(now);
        let sender = self.sender();
        for i in 0..self.sessions.len() {
            let endpoint = self.endpoint_of(i);
            let duty = Duty {
                // Superseded keys do not initiate unless everything depends on them.
                initiates: endpoint.is_some() && (i == 0 || sender == Some(i)),
                insists: i == 0 && (self.initiate || self.sessions.len() > 1),
            };
            let initiation = self.sessions[i].poll(now, duty, dst);
            if i == 0 && self.sessions[0].is_expired() {
                self.waiting.clear();
            }
            if let (Some(endpoint), Some(length)) = (endpoint, initiation) {
                self.attempts += 1;
                self.note_sent(now);
                self.limiter_of(i).note_sent(&dst[..length]);
                return Some((endpoint, length));
            }
        }
        if self.keepalive_due().is_none_or(|due| now < due) {
            return None;
        }
        self.note_sent(now);
        Some((self.endpoint()?, self.seal(&[], dst, now)?))
    }

    /// Gives the message to the sessions that have the private key of limiter `i`.
    fn dispatch(
        &mut self,
        i: usize,
        from: SocketAddr,
        message: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, DropReason> {
        let sender = self.sender().map(|at| self.sessions[at].number);
        let (private, limiter) = &mut self.limiters[i];
        let number = match message[0] {
            INITIATION => None,
            RESPONSE => index_at(message, 8),
            _ => index_at(message, 4),
        };
        let may_take = |session: &&mut Session| {
            session.keys.private == *private && number.is_none_or(|n| n >> 8 == session.number)
        };
        let mut is_stranger = false;
        for session in self.sessions.iter_mut().filter(may_take) {
            // A session that does not initiate has no way to call back.
            let initiates = Some(session.number) == sender;
            if message[0] == INITIATION && initiates && session.must_call_back(now) {
                break;
            }
            let (length, is_established) = match session.handle_handshake(message, dst, now) {
                Handled::Answered(length) => (length, false),
                Handled::Established(length) => (length, true),
                Handled::Cookie => return Ok(0),
                Handled::Stranger => {
                    is_stranger = true;
                    continue;
                }
                Handled::Rejected => break,
            };
            session.note_handshake(from, now);
            self.last_authentic = Some(now);
            self.unproven = self.unproven.filter(|at| !is_same(*at, from));
            match is_established {
                true => self.note_handshake(now),
                false => limiter.note_sent(&dst[..length]),
            }
            self.note_sent(now);
            return Ok(length);
        }
        if is_stranger {
            self.rejections.record_unknown_key(from, (message, private), now);
        }
        Err(DropReason::HandshakeRejected)
    }

    /// Puts `keys` in force. Returns whether they were not already.
    fn use_keys(&mut self, keys: Keys, now: Instant) -> bool {
        if self.sessions.first().is_some_and(|session| session.keys == keys) {
            return false;
        }
        let endpoint = self.endpoint();
        if let Some(session) = self.sessions.first_mut() {
            session.supersede(now);
        }
        let session = match self.sessions.iter().position(|session| session.keys == keys) {
            // A rotation is undone.
            Some(at) => {
                let session = self.sessions.remove(at);
                Session { superseded: None, endpoint, ..session }
            }
            None => self.new_session(keys, now),
        };
        self.sessions.insert(0, session);
        if self.sessions.len() > 1 + MAX_SUPERSEDED {
            // Those that the peer has not used for longest, or never.
            let received = |at: &usize| self.sessions[*at].received;
            let least = (1..self.sessions.len()).min_by_key(received);
            least.into_iter().for_each(|at| self.remove(at));
        }
        true
    }

    fn new_session(&mut self, keys: Keys, now: Instant) -> Session {
        let number = loop {
            let number = self.random.next() as u32 >> 8;
            if self.sessions.iter().all(|session| session.number != number) {
                break number;
            }
        };
        let limiter = match self.limiters.iter().position(|(key, _)| *key == keys.private) {
            Some(at) => at,
            None => {
                let own = x25519::StaticSecret::from(*keys.private.expose());
                let own = x25519::PublicKey::from(&own);
                let limiter = HandshakeLimiter::new(&own, self.random.next(), now);
                self.limiters.insert(0, (keys.private.clone(), limiter));
                0
            }
        };
        let macs = self.limiters[limiter].1.for_boringtun();
        Session::new(keys, (number, self.random.next()), macs, now)
    }

    fn forget_superseded(&mut self, now: Instant) {
        while self.sessions.last().and_then(end_of).is_some_and(|end| now >= end) {
            self.remove(self.sessions.len() - 1);
        }
    }

    /// Forgets superseded keys, but not where the peer is if nobody else knows.
    fn remove(&mut self, at: usize) {
        let gone = self.sessions.remove(at);
        self.moves_of_removed += gone.moves;
        if let Some(newer) = at.checked_sub(1).map(|at| &mut self.sessions[at]) {
            newer.endpoint = newer.endpoint.or(gone.endpoint);
        }
        let sessions = &self.sessions;
        self.limiters
            .retain(|(key, _)| sessions.iter().any(|session| session.keys.private == *key));
    }

    fn forget(&mut self) {
        self.moves_of_removed = self.moves();
        self.sessions.clear();
        self.limiters.clear();
        self.waiting.clear();
        self.configured = None;
        self.unanswered = None;
        self.last_handshake = None;
        self.last_authentic = None;
        self.rejections = Rejections::default();
    }

    /// The newest session that can seal.
    #[inline]
    fn sender(&self) -> Option<usize> {
        self.sessions.iter().position(|session| session.has_session)
    }

    /// As long as nothing was received with new keys, the endpoint is that of the older ones.
    #[inline]
    fn endpoint_of(&self, at: usize) -> Option<SocketAddr> {
        self.sessions.get(at..)?.iter().find_map(|session| session.endpoint)
    }

    fn limiter_of(&mut self, at: usize) -> &mut HandshakeLimiter {
        let private = &self.sessions[at].keys.private;
        let at = self.limiters.iter().position(|(key, _)| key == private).unwrap_or(0);
        &mut self.limiters[at].1
    }

    fn keepalive_due(&self) -> Option<Instant> {
        self.sender()?;
        let persistent = self.keepalive.map(|interval| self.last_sent + interval);
        let passive = self.unanswered.map(|since| since + KEEPALIVE_TIMEOUT);
        persistent.into_iter().chain(passive).min()
    }

    #[inline]
    fn note_sent(&mut self, now: Instant) {
        self.last_sent = now;
        self.unanswered = None;
    }

    fn note_handshake(&mut self, now: Instant) {
        self.handshakes += 1;
        self.last_handshake = Some(now);
    }
}

/// When superseded keys are no longer good for anything: WireGuard forgets any key by then.
fn end_of(session: &Session) -> Option<Instant> {
    session.superseded.map(|at| at + REJECT_AFTER_TIME)
}

/// A socket of IPv6 writes addresses of IPv4 in another way than a config.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip().to_canonical() == b.ip().to_canonical() && a.port() == b.port()
}

#[cfg(test)]
impl Peer {
    /// Returns how many key pairs are held.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    pub(crate) fn limit_messages(&mut self, limits: super::Limits) {
        self.sessions.iter_mut().for_each(|session| session.limits = limits);
    }
}
