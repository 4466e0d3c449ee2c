use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_primitives::PublicKey;
use noise::{
    BATCH, CookieReply, Handshake, HandshakeError, Initiation, LocalKey, Message, Response, Sealer,
    Stamper, Tai64n, random_index, receiver_index,
};

use super::limiter::{Arrival, HandshakeLimiter, Verdict};
use super::rejections::Rejections;
use super::strays::Strays;
use super::unproven::Unproven;
use super::{Duty, Opened, Session};
use crate::random::Random;
use crate::{Config, DropReason, PeerState, UdpPath};

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
/// [`super::REJECT_AFTER_TIME`] at most, the superseded ones carry on.
pub(crate) struct Peer {
    /// Newest keys first; the first are those in force. Empty without the peer's key.
    sessions: Vec<Session>,
    /// One for each private key in `sessions`, newest first.
    locals: Vec<Local>,
    stamper: Stamper,
    /// The endpoint as last configured.
    configured: Option<SocketAddr>,
    unproven: Unproven,
    initiate: bool,
    is_retired: bool,
    strays: Strays,
    keepalive: Option<Duration>,
    waiting: VecDeque<Vec<u8>>,
    last_sent: Instant,
    /// Since when data of the peer is without any answer.
    unanswered: Option<Instant>,
    last_handshake: Option<Instant>,
    last_authentic: Option<Instant>,
    /// Time of the last handshake started because messages of others displace the peer's.
    called_back: Option<Instant>,
    /// Initiations sent, and handshakes that led to a session.
    pub(crate) attempts: u64,
    pub(crate) handshakes: u64,
    rejections: Rejections,
    /// [`Peer::moves`] of sessions that are no longer held.
    moves_of_removed: u64,
    random: Random,
}

/// A private key of ours.
struct Local {
    key: Arc<LocalKey>,
    limiter: HandshakeLimiter,
}

impl Peer {
    /// A peer of whom nothing is known before [`Peer::configure`].
    pub(crate) fn new(random: Random, stamper: Stamper, now: Instant) -> Self {
        Self {
            sessions: Vec::new(),
            locals: Vec::new(),
            stamper,
            configured: None,
            unproven: Unproven::default(),
            initiate: false,
            is_retired: false,
            strays: Strays::default(),
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
        self.strays.set_enabled(config.calls_back, now);
        let Some(peer) = config.peer_key else { return self.forget() };
        let moved = config.endpoint.filter(|_| config.endpoint != self.configured);
        self.configured = config.endpoint;
        let local = self.local_of(config, now);
        let is_new = self.use_keys(local, peer, now);
        self.sessions.iter_mut().for_each(|session| session.relay = config.relay);
        // Old keys of a peer that has moved may be somebody else's where it is now.
        let concerned = if is_new { 1 } else { self.sessions.len() };
        for session in self.sessions[..concerned].iter_mut().filter(|_| moved.is_some()) {
            (session.path, session.is_endpoint_authentic) = (moved.map(UdpPath::from), false);
        }
        if let Some(moved) = moved {
            self.unproven.configure(config.unproven.unwrap_or(moved), now);
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

    /// The same from the address that the kernel chooses.
    pub(crate) fn reroute(&mut self, now: Instant) {
        self.initiate_now(now);
        self.sessions.iter_mut().for_each(|session| session.retry.is_rerouted = true);
    }

    /// Sends to the configured endpoint again, if there is one, and begins a handshake there.
    pub(crate) fn go_back(&mut self, config: &Config, now: Instant) {
        self.configured = None;
        self.configure(config, now);
    }

    /// Sets whether attempts of a handshake follow each other slowly.
    pub(crate) fn set_slow(&mut self, is_slow: bool, now: Instant) {
        self.sessions.iter_mut().for_each(|session| session.retry.set_slow(is_slow, now));
    }

    /// Neither begins nor answers handshakes from now on.
    pub(crate) fn retire(&mut self) {
        self.is_retired = true;
    }

    pub(crate) fn state(&self) -> PeerState {
        PeerState {
            endpoint: self.path().map(|path| path.remote),
            is_endpoint_authentic: self.is_endpoint_authentic(),
            unproven_endpoint: self.unproven.endpoint(),
            has_session: self.has_session(),
            last_handshake: self.last_handshake,
            last_authentic: self.last_authentic,
            on_superseded_keys: self.sender().is_some_and(|at| at > 0),
            rejections: self.rejections,
            unconfirmed: self.sessions.iter().find_map(Session::unconfirmed),
            duplicate: self.sessions.iter().find_map(|session| session.duplicate.endpoints()),
        }
    }

    pub(crate) fn last_stamp(&self) -> Tai64n {
        self.stamper.last()
    }

    /// Number of times that packets of the peer have moved its endpoint.
    pub(crate) fn moves(&self) -> u64 {
        self.moves_of_removed + self.sessions.iter().map(|session| session.moves).sum::<u64>()
    }

    /// Returns the path of packets to the peer.
    #[inline]
    pub(crate) fn path(&self) -> Option<UdpPath> {
        self.path_of(self.sender().unwrap_or(0))
    }

    fn is_endpoint_authentic(&self) -> bool {
        let sessions = self.sessions.get(self.sender().unwrap_or(0)..).unwrap_or_default();
        let session = sessions.iter().find(|session| session.path.is_some());
        session.is_some_and(|session| session.is_endpoint_authentic)
    }

    #[inline]
    fn has_session(&self) -> bool {
        self.sender().is_some()
    }

    /// Returns whether packets can be sealed.
    #[inline]
    pub(crate) fn can_seal(&self, now: Instant) -> bool {
        self.sender().is_some_and(|at| self.sessions[at].can_seal(now))
    }

    /// Deadline of the next [`Peer::poll`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let sessions = self.sessions.iter().filter_map(Session::deadline);
        let ends = self.sessions.iter().filter_map(Session::end);
        let due = self.strays.deadline().into_iter().chain(self.keepalive_due());
        let unproven = self.path_of_initiator().and_then(|path| self.unproven.deadline(path));
        sessions.chain(ends).chain(due).chain(unproven).min()
    }

    /// Path of the session, if this end initiates.
    fn path_of_initiator(&self) -> Option<UdpPath> {
        self.path().filter(|_| self.initiate && !self.is_retired && self.has_session())
    }

    /// Writes a data message with `packet`, padded to `size` bytes, into `dst`, which has room for that
    /// and for 32 bytes more. Returns its length and who is to encrypt it before it is sent, `None` if
    /// there is no session.
    #[inline]
    pub(crate) fn prepare(
        &mut self,
        (packet, size): (&[u8], usize),
        dst: &mut [u8],
        now: Instant,
    ) -> Option<(usize, &Sealer)> {
        let session = self.sessions.iter_mut().find(|session| session.has_session())?;
        let prepared = session.prepare((packet, size), dst, now)?;
        self.last_sent = now;
        self.unanswered = None;
        Some(prepared)
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
    pub(crate) fn is_anything_waiting(&self, now: Instant) -> bool {
        !self.waiting.is_empty() && self.can_seal(now)
    }

    /// A packet that waited for the session that there is now.
    pub(crate) fn next_waiting(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.is_anything_waiting(now).then(|| self.waiting.pop_front()).flatten()
    }

    /// Opens up to [`BATCH`] data messages of at least 32 bytes, with one receiver index, in place. They
    /// have `segment_size` bytes each, the last one may be shorter.
    #[inline]
    pub(crate) fn open(
        &self,
        datagrams: &mut [u8],
        segment_size: usize,
        now: Instant,
    ) -> [Opened; BATCH] {
        let index = receiver_index(datagrams);
        let held = |session: &Session| session.keys.position(index);
        match self.sessions.iter().find_map(|session| Some((held(session)?, session))) {
            Some((at, session)) => session.open(at, datagrams, segment_size, now),
            None => [Opened::Rejected(DropReason::NoSession); BATCH],
        }
    }

    /// Takes note of a message with that receiver index that was opened.
    #[inline]
    pub(crate) fn note_opened(&mut self, from: UdpPath, index: u32, opened: Opened, now: Instant) {
        match opened {
            Opened::Rejected(_) => return,
            Opened::Packet(_) | Opened::NotIp => _ = self.unanswered.get_or_insert(now),
            Opened::Keepalive => {}
        }
        self.last_authentic = Some(now);
        self.unproven.note(from);
        let mut sessions = self.sessions.iter_mut();
        let held = sessions.find_map(|session| Some((session.keys.position(index)?, session)));
        if held.is_some_and(|(at, session)| session.note_data(at, from, now)) {
            self.unproven.hurry(now);
            self.note_handshake(now);
        }
    }

    /// Takes note of the source of data under unknown keys.
    #[cold]
    pub(crate) fn note_stray(&mut self, from: UdpPath, now: Instant) {
        if !self.has_session() && !self.is_retired {
            self.strays.note(from, now);
        }
    }

    /// Returns whether there is a key for data with that receiver index.
    pub(crate) fn has_key(&self, index: u32) -> bool {
        self.sessions.iter().any(|session| session.keys.position(index).is_some())
    }

    /// Takes a message that is not data. `Ok` is the length of the answer in `dst`, which has room
    /// for a handshake message; 0 if there is none.
    pub(crate) fn handle_handshake(
        &mut self,
        from: UdpPath,
        message: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, DropReason> {
        if self.is_retired {
            return Err(DropReason::HandshakeRejected);
        }
        self.forget_superseded(now);
        let message = Message::parse(message).ok_or(DropReason::Malformed)?;
        // A stranger who cannot listen does not know our indices, so this costs next to nothing.
        let is_expected = |index| self.sessions.iter().any(|s| s.handshake.expects(index));
        if message.receiver_index().is_some_and(|index| !is_expected(index)) {
            return Err(DropReason::HandshakeRejected);
        }
        let known = self.sessions.iter().filter_map(|session| session.path);
        let is_peer = known.map(|path| path.remote.ip()).any(|ip| ip == from.remote.ip());
        let is_initiation = matches!(message, Message::Initiation(_));
        // A message for one of our keys has no valid mac1 for another.
        for i in 0..self.locals.len() {
            let arrival = Arrival { from: from.remote, is_peer, message };
            let outcome = match self.locals[i].limiter.judge(arrival, now) {
                Verdict::Work => return self.dispatch(i, (from, message), dst, now),
                Verdict::Cookie(reply) => Ok(put(&reply, dst)),
                Verdict::Busy => Err(DropReason::HandshakeRejected),
                Verdict::Foreign => continue,
            };
            if is_peer && is_initiation {
                self.call_back(now);
            }
            return outcome;
        }
        if self.sessions.is_empty() {
            return Err(DropReason::NoSession);
        }
        if is_initiation {
            self.rejections.record_wrong_responder(from.remote, now);
        }
        Err(DropReason::HandshakeRejected)
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

    /// Does what is due at `now`, one thing a call: returns a datagram's path and its length in
    /// `dst`, `None` when there is nothing more to do.
    pub(crate) fn poll(&mut self, now: Instant, dst: &mut [u8]) -> Option<(UdpPath, usize)> {
        self.forget_superseded(now);
        let sender = self.sender();
        for i in 0..self.sessions.len() {
            let path = self.path_of(i);
            let duty = Duty {
                // Superseded keys do not initiate unless everything depends on them.
                initiates: !self.is_retired && path.is_some() && (i == 0 || sender == Some(i)),
                insists: i == 0 && (self.initiate || self.sessions.len() > 1),
            };
            if self.sessions[i].gives_up(now, duty) && i == 0 {
                self.waiting.clear();
            }
            if let (true, Some(path)) = (self.sessions[i].poll(now, duty), path) {
                let (index, stamp) = (self.new_index(), self.stamper.stamp(now));
                let path = self.sessions[i].retry.path(path);
                let initiation = self.sessions[i].initiate(index, stamp, now);
                self.attempts += 1;
                self.note_sent(now);
                return Some((path, put(&initiation, dst)));
            }
        }
        let path = self.path_of_initiator();
        let unproven = || path.and_then(|path| self.unproven.take(path, now));
        if let Some(to) = self.strays.take().or_else(unproven) {
            let (index, stamp) = (self.new_index(), self.stamper.stamp(now));
            let initiation = self.sessions.first_mut()?.initiate(index, stamp, now);
            self.attempts += 1;
            return Some((to, put(&initiation, dst)));
        }
        if self.keepalive_due().is_none_or(|due| now < due) {
            return None;
        }
        self.note_sent(now);
        let path = self.path()?;
        let session = self.sessions.iter_mut().find(|session| session.has_session())?;
        Some((path, session.seal_keepalive(dst, now)?))
    }

    /// Handles a message for the private key at `i`.
    fn dispatch(
        &mut self,
        i: usize,
        (from, message): (UdpPath, Message<'_>),
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, DropReason> {
        let handled = match message {
            Message::Initiation(initiation) => self.respond(i, (from, initiation), dst, now),
            Message::Response(response) => self.complete((from, response), dst, now),
            Message::CookieReply(reply) => self.take_cookie(reply, now).map(|()| 0),
        };
        handled.map_err(|error| match error {
            HandshakeError::LowOrder => DropReason::Malformed,
            HandshakeError::NotAuthentic | HandshakeError::Stale | HandshakeError::Unexpected => {
                DropReason::HandshakeRejected
            }
        })
    }

    fn respond(
        &mut self,
        i: usize,
        (from, initiation): (UdpPath, Initiation<'_>),
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, HandshakeError> {
        let local = &self.locals[i].key;
        let received = local.open_initiation(initiation)?;
        let is_for = |s: &Session| s.is_of(local, received.peer().as_ref());
        let Some(at) = self.sessions.iter().position(is_for) else {
            self.rejections.record_unknown_key(from.remote, received.peer(), now);
            return Err(HandshakeError::NotAuthentic);
        };
        let index = self.new_index();
        let session = &mut self.sessions[at];
        let response = session.respond(received, index, now)?;
        // It may be a recorded one, whose sender cannot confirm the key that it leads to. Only if no
        // other endpoint is known, this one serves until then.
        session.path.get_or_insert(from);
        session.note_unconfirmed(from, now);
        self.note_sent(now);
        Ok(put(&response, dst))
    }

    /// Takes a response, and confirms the session with a keepalive.
    fn complete(
        &mut self,
        (from, response): (UdpPath, Response<'_>),
        dst: &mut [u8],
        now: Instant,
    ) -> Result<usize, HandshakeError> {
        let at = self.awaiting(response.receiver_index())?;
        self.sessions[at].complete(response, now)?;
        self.sessions[at].note_response(from, now);
        self.last_authentic = Some(now);
        self.unproven.note(from);
        self.note_sent(now);
        self.note_handshake(now);
        Ok(self.sessions[at].seal_keepalive(dst, now).unwrap_or(0))
    }

    fn take_cookie(&mut self, reply: CookieReply<'_>, now: Instant) -> Result<(), HandshakeError> {
        let at = self.awaiting(reply.receiver_index())?;
        self.sessions[at].take_cookie(reply, now)
    }

    /// Returns the session that expects an answer to that index.
    fn awaiting(&self, index: u32) -> Result<usize, HandshakeError> {
        let expects = |session: &Session| session.handshake.expects(index);
        self.sessions.iter().position(expects).ok_or(HandshakeError::Unexpected)
    }

    /// An index that the peer does not know us by yet.
    fn new_index(&self) -> u32 {
        random_index(|index| self.sessions.iter().any(|session| session.holds(index)))
    }

    /// Puts keys in force. Returns whether they were not already.
    fn use_keys(&mut self, local: Arc<LocalKey>, peer: PublicKey, now: Instant) -> bool {
        let is_of = |session: &Session| session.is_of(&local, Some(&peer));
        if self.sessions.first().is_some_and(is_of) {
            return false;
        }
        let known = self.sessions.iter().position(is_of);
        let (path, is_endpoint_authentic) = (self.path(), self.is_endpoint_authentic());
        if let Some(session) = self.sessions.first_mut() {
            session.supersede(now);
        }
        let session = match known {
            // A rotation is undone.
            Some(at) => {
                let session = self.sessions.remove(at);
                Session {
                    superseded: None,
                    path,
                    is_endpoint_authentic,
                    next_check: Some(now),
                    ..session
                }
            }
            None => Session::new(Handshake::new(local, peer), self.random.next(), now),
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

    /// The private key of `config`, with what it already has if it is not new.
    fn local_of(&mut self, config: &Config, now: Instant) -> Arc<LocalKey> {
        let public = config.private_key.public();
        if let Some(known) = self.locals.iter().find(|local| *local.key.public() == public) {
            return Arc::clone(&known.key);
        }
        let key = Arc::new(LocalKey::new(&config.private_key));
        let limiter = HandshakeLimiter::new(&public, self.random.next(), now);
        self.locals.insert(0, Local { key: Arc::clone(&key), limiter });
        key
    }

    fn forget_superseded(&mut self, now: Instant) {
        while self.sessions.last().and_then(Session::end).is_some_and(|end| now >= end) {
            self.remove(self.sessions.len() - 1);
        }
    }

    /// Forgets superseded keys, but not where the peer is if nobody else knows.
    fn remove(&mut self, at: usize) {
        let gone = self.sessions.remove(at);
        self.moves_of_removed += gone.moves;
        if let Some(newer) = at.checked_sub(1).map(|at| &mut self.sessions[at])
            && newer.path.is_none()
        {
            newer.path = gone.path;
            newer.is_endpoint_authentic = gone.is_endpoint_authentic;
        }
        let sessions = &self.sessions;
        self.locals.retain(|local| sessions.iter().any(|session| session.has_key(&local.key)));
    }

    fn forget(&mut self) {
        self.moves_of_removed = self.moves();
        self.sessions.clear();
        self.locals.clear();
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
        self.sessions.iter().position(Session::has_session)
    }

    /// As long as nothing was received with new keys, the path is that of the older ones.
    #[inline]
    fn path_of(&self, at: usize) -> Option<UdpPath> {
        self.sessions.get(at..)?.iter().find_map(|session| session.path)
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

/// Puts a message at the start of `dst`, and returns its length.
fn put(message: &[u8], dst: &mut [u8]) -> usize {
    dst[..message.len()].copy_from_slice(message);
    message.len()
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
