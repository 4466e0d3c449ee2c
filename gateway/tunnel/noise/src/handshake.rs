//! Handshake of Noise_IKpsk2 (whitepaper section 5.4.2 to 5.4.5).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_primitives::{PrivateKey, PublicKey};
use rand_core::OsRng;
use subtle::ConstantTimeEq;
use x25519_dalek::{SharedSecret, StaticSecret};

use crate::cookie::MacAppender;
use crate::crypto::{Transcript, agree};
use crate::error::HandshakeError;
use crate::key_pair::KeyPair;
use crate::message::{CookieReply, INITIATION_LEN, Initiation, MAC, RESPONSE_LEN, Response};
use crate::stamp::Tai64n;

/// Initiations whose responses are awaited: with one a second, a response may take so many seconds.
const MAX_PENDING: usize = 8;

/// Time for which an initiation may be answered. Later a response, perhaps one that was held back on its
/// way, would lead to a key that the peer has dropped.
const ANSWERABLE: Duration = Duration::from_secs(10);

/// Our static key.
pub struct LocalKey {
    secret: StaticSecret,
    public: PublicKey,
}

impl LocalKey {
    pub fn new(private: &PrivateKey) -> Self {
        Self { secret: StaticSecret::from(*private.expose()), public: private.public() }
    }

    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Opens an initiation to this key as far as its sender's static key, which takes one
    /// Diffie-Hellman. Whether the sender has that key is up to [`Handshake::respond`].
    pub fn open_initiation(
        &self,
        initiation: Initiation<'_>,
    ) -> Result<ReceivedInitiation, HandshakeError> {
        let mut transcript = Transcript::new(self.public.as_bytes());
        let ephemeral = initiation.ephemeral();
        transcript.mix_ephemeral(&ephemeral);
        let ephemeral = ephemeral.into();
        let key = transcript.mix_to_key(agree(&self.secret, &ephemeral)?.as_bytes());
        let peer = transcript.open(&key, initiation.encrypted_static())?;
        Ok(ReceivedInitiation {
            transcript,
            ephemeral,
            peer: *peer,
            encrypted_timestamp: initiation.encrypted_timestamp(),
            remote_index: initiation.sender_index(),
        })
    }
}

/// An initiation, from any sender that knows our public key.
pub struct ReceivedInitiation {
    transcript: Transcript,
    ephemeral: x25519_dalek::PublicKey,
    peer: [u8; 32],
    encrypted_timestamp: [u8; 28],
    remote_index: u32,
}

impl ReceivedInitiation {
    /// Returns whether it names that static key as its sender's.
    pub fn is_from(&self, peer: &PublicKey) -> bool {
        self.peer.ct_eq(peer.as_bytes()).into()
    }

    /// Static key of the sender, if it is one.
    pub fn peer(&self) -> Option<PublicKey> {
        PublicKey::from_bytes(&self.peer).ok()
    }
}

/// Handshakes with one peer, in both roles.
pub struct Handshake {
    local: Arc<LocalKey>,
    peer: PublicKey,
    static_shared: SharedSecret,
    macs: MacAppender,
    /// Oldest first.
    pending: VecDeque<Pending>,
    /// Index and `mac1` of the last response.
    response: Option<(u32, [u8; MAC])>,
    /// Timestamp of the peer's last initiation.
    newest: Tai64n,
}

/// An initiation that was sent.
struct Pending {
    index: u32,
    sent: Instant,
    mac1: [u8; MAC],
    transcript: Transcript,
    ephemeral: StaticSecret,
}

impl Handshake {
    pub fn new(local: Arc<LocalKey>, peer: PublicKey) -> Self {
        Self {
            static_shared: local.secret.diffie_hellman(&(*peer.as_bytes()).into()),
            macs: MacAppender::new(&peer),
            pending: VecDeque::with_capacity(MAX_PENDING),
            response: None,
            newest: Tai64n::default(),
            local,
            peer,
        }
    }

    pub fn local(&self) -> &LocalKey {
        &self.local
    }

    pub fn peer(&self) -> &PublicKey {
        &self.peer
    }

    /// Returns whether an answer to that index is expected.
    pub fn expects(&self, index: u32) -> bool {
        self.mac1_of(index).is_some()
    }

    /// Makes an initiation with a new `index` of ours. The last few remain answerable.
    pub fn initiate(&mut self, index: u32, stamp: Tai64n, now: Instant) -> [u8; INITIATION_LEN] {
        let ephemeral = StaticSecret::random_from_rng(OsRng);
        self.initiate_with(ephemeral, (index, stamp), now)
    }

    fn initiate_with(
        &mut self,
        ephemeral: StaticSecret,
        (index, stamp): (u32, Tai64n),
        now: Instant,
    ) -> [u8; INITIATION_LEN] {
        let mut message = Initiation::blank(index);
        let mut transcript = Transcript::new(self.peer.as_bytes());
        let public = x25519_dalek::PublicKey::from(&ephemeral).to_bytes();
        message[Initiation::EPHEMERAL].copy_from_slice(&public);
        transcript.mix_ephemeral(&public);
        // The peer's key is no point of low order: this is a secret.
        let shared = ephemeral.diffie_hellman(&(*self.peer.as_bytes()).into());
        let key = transcript.mix_to_key(shared.as_bytes());
        let own = self.local.public.as_bytes();
        transcript.seal(&key, own, &mut message[Initiation::STATIC]);
        let key = transcript.mix_to_key(self.static_shared.as_bytes());
        transcript.seal(&key, &stamp.to_bytes(), &mut message[Initiation::TIMESTAMP]);
        let mac1 = self.macs.append(&mut message, now);
        self.expire(now);
        if self.pending.len() == MAX_PENDING {
            self.pending.pop_front();
        }
        self.pending.push_back(Pending { index, sent: now, mac1, transcript, ephemeral });
        message
    }

    /// Answers an initiation of the peer, with a new `index` of ours.
    pub fn respond(
        &mut self,
        initiation: ReceivedInitiation,
        index: u32,
        now: Instant,
    ) -> Result<([u8; RESPONSE_LEN], KeyPair), HandshakeError> {
        let ephemeral = StaticSecret::random_from_rng(OsRng);
        self.respond_with(ephemeral, initiation, index, now)
    }

    fn respond_with(
        &mut self,
        ephemeral: StaticSecret,
        initiation: ReceivedInitiation,
        index: u32,
        now: Instant,
    ) -> Result<([u8; RESPONSE_LEN], KeyPair), HandshakeError> {
        if !initiation.is_from(&self.peer) {
            return Err(HandshakeError::NotAuthentic);
        }
        let ReceivedInitiation { mut transcript, remote_index, .. } = initiation;
        let key = transcript.mix_to_key(self.static_shared.as_bytes());
        let stamp = Tai64n::from_bytes(*transcript.open(&key, &initiation.encrypted_timestamp)?);
        if stamp <= self.newest {
            return Err(HandshakeError::Stale);
        }
        self.newest = stamp;
        let mut message = Response::blank(index);
        message[Response::RECEIVER].copy_from_slice(&remote_index.to_le_bytes());
        let public = x25519_dalek::PublicKey::from(&ephemeral).to_bytes();
        message[Response::EPHEMERAL].copy_from_slice(&public);
        transcript.mix_ephemeral(&public);
        transcript.mix(agree(&ephemeral, &initiation.ephemeral)?.as_bytes());
        transcript.mix(agree(&ephemeral, &(*self.peer.as_bytes()).into())?.as_bytes());
        let key = transcript.mix_preshared_key();
        transcript.seal(&key, &[], &mut message[Response::NOTHING]);
        let mac1 = self.macs.append(&mut message, now);
        self.response = Some((index, mac1));
        let [receiving, sending] = transcript.split();
        Ok((message, KeyPair::new((index, remote_index), &sending, &receiving)))
    }

    /// Completes a handshake of ours with the peer's response. Initiations from before the one that
    /// was answered are forgotten, later ones may still be answered: the peer may have started anew.
    pub fn complete(
        &mut self,
        response: Response<'_>,
        now: Instant,
    ) -> Result<KeyPair, HandshakeError> {
        self.expire(now);
        let index = response.receiver_index();
        let at = self.pending.iter().position(|pending| pending.index == index);
        let at = at.ok_or(HandshakeError::Unexpected)?;
        let Pending { transcript, ephemeral, .. } = &self.pending[at];
        let mut transcript = transcript.clone();
        let public = response.ephemeral();
        transcript.mix_ephemeral(&public);
        let public = public.into();
        transcript.mix(agree(ephemeral, &public)?.as_bytes());
        transcript.mix(agree(&self.local.secret, &public)?.as_bytes());
        let key = transcript.mix_preshared_key();
        transcript.open::<0>(&key, response.encrypted_nothing())?;
        self.pending.drain(..=at);
        let [sending, receiving] = transcript.split();
        Ok(KeyPair::new((index, response.sender_index()), &sending, &receiving))
    }

    /// Takes the cookie that our next messages will have for two minutes. Returns whether it answers
    /// an initiation, and not a response.
    pub fn take_cookie(
        &mut self,
        reply: CookieReply<'_>,
        now: Instant,
    ) -> Result<bool, HandshakeError> {
        let index = reply.receiver_index();
        let mac1 = self.mac1_of(index).ok_or(HandshakeError::Unexpected)?;
        self.macs.take(reply, &mac1, now)?;
        Ok(self.pending.iter().any(|pending| pending.index == index))
    }

    fn expire(&mut self, now: Instant) {
        self.pending.retain(|pending| now < pending.sent + ANSWERABLE);
    }

    fn mac1_of(&self, index: u32) -> Option<[u8; MAC]> {
        let pending = self.pending.iter().map(|pending| (pending.index, pending.mac1));
        pending.chain(self.response).find(|(own, _)| *own == index).map(|(_, mac1)| mac1)
    }
}
