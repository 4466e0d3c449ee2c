//! `mac1`, `mac2` and cookies (whitepaper sections 5.3 and 5.4.7).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use chacha20poly1305::aead::{AeadInPlace, KeyInit};
use chacha20poly1305::{Key, XChaCha20Poly1305};
use fabric_primitives::PublicKey;
use rand_core::{OsRng, RngCore};
use zeroize::Zeroizing;

use crate::crypto::{Secret, hash, is_mac, mac};
use crate::error::HandshakeError;
use crate::message::{COOKIE_REPLY_LEN, CookieReply, MAC, Message, TAG};

/// Validity of a cookie, at both ends.
const COOKIE_LIFETIME: Duration = Duration::from_secs(120);

type Cookie = [u8; 16];

/// Keys of the MACs and cookies of messages to one public key.
struct MacKeys {
    mac1: [u8; 32],
    cookie: [u8; 32],
}

impl MacKeys {
    fn new(receiver: &PublicKey) -> Self {
        let key = |label: &[u8]| hash(&[label, receiver.as_bytes()]);
        Self { mac1: key(b"mac1----"), cookie: key(b"cookie--") }
    }

    fn cookie_cipher(&self) -> XChaCha20Poly1305 {
        XChaCha20Poly1305::new(Key::from_slice(&self.cookie))
    }
}

/// Checks the MACs of messages to us, and gives cookies.
///
/// The secret behind the cookies changes every two minutes; a cookie is for one address and port.
pub struct CookieChecker {
    keys: MacKeys,
    secret: Secret,
    start: Instant,
}

impl CookieChecker {
    /// `own` is our public key.
    pub fn new(own: &PublicKey, now: Instant) -> Self {
        let mut secret = Zeroizing::new([0; 32]);
        OsRng.fill_bytes(&mut secret[..]);
        Self { keys: MacKeys::new(own), secret, start: now }
    }

    /// Returns whether the sender knows our public key. A cookie reply has no `mac1`.
    pub fn has_valid_mac1(&self, message: &Message<'_>) -> bool {
        message.with_macs().is_some_and(|message| {
            let (covered, mac1) = message.mac1();
            is_mac(&self.keys.mac1, &[covered], mac1)
        })
    }

    /// Returns whether the sender has received a cookie at `from`.
    pub fn has_valid_mac2(&self, message: &Message<'_>, from: SocketAddr, now: Instant) -> bool {
        message.with_macs().is_some_and(|message| {
            let cookie = self.cookie(from, now);
            is_mac(&cookie, &[message.covered_by_mac2()], message.mac2())
        })
    }

    /// Returns the cookie reply to a message, `None` to another cookie reply.
    pub fn reply(
        &self,
        message: &Message<'_>,
        from: SocketAddr,
        now: Instant,
    ) -> Option<[u8; COOKIE_REPLY_LEN]> {
        let message = message.with_macs()?;
        let mut nonce = [0; 24];
        OsRng.fill_bytes(&mut nonce);
        let mut cookie = self.cookie(from, now);
        let (_, mac1) = message.mac1();
        let cipher = self.keys.cookie_cipher();
        let tag = cipher.encrypt_in_place_detached(&nonce.into(), mac1, &mut cookie).ok()?;
        let mut reply = CookieReply::blank();
        reply[CookieReply::RECEIVER].copy_from_slice(&message.sender_index());
        reply[CookieReply::NONCE].copy_from_slice(&nonce);
        let (text, place) = reply[CookieReply::COOKIE].split_at_mut(cookie.len());
        text.copy_from_slice(&cookie);
        place.copy_from_slice(&tag);
        Some(reply)
    }

    fn cookie(&self, from: SocketAddr, now: Instant) -> Cookie {
        let age = now.saturating_duration_since(self.start);
        let period = age.as_secs() / COOKIE_LIFETIME.as_secs();
        let secret = mac(&self.secret[..], &[&period.to_le_bytes()]);
        let port = from.port().to_be_bytes();
        match from {
            SocketAddr::V4(v4) => mac(&secret, &[&v4.ip().octets(), &port]),
            SocketAddr::V6(v6) => mac(&secret, &[&v6.ip().octets(), &port]),
        }
    }
}

/// Adds MACs to messages to one peer, by its last cookie.
pub(crate) struct MacAppender {
    keys: MacKeys,
    cookie: Option<(Zeroizing<Cookie>, Instant)>,
}

impl MacAppender {
    pub(crate) fn new(peer: &PublicKey) -> Self {
        Self { keys: MacKeys::new(peer), cookie: None }
    }

    /// Fills the last bytes of `message` in, and returns `mac1`.
    pub(crate) fn append(&self, message: &mut [u8], now: Instant) -> [u8; MAC] {
        let (covered, macs) = message.split_at_mut(message.len() - 2 * MAC);
        let (place1, place2) = macs.split_at_mut(MAC);
        let mac1 = mac(&self.keys.mac1, &[covered]);
        place1.copy_from_slice(&mac1);
        match &self.cookie {
            Some((cookie, end)) if now < *end => {
                place2.copy_from_slice(&mac(&cookie[..], &[covered, &mac1]));
            }
            Some(_) | None => place2.fill(0),
        }
        mac1
    }

    /// Takes the cookie from the reply to the message with that `mac1`.
    pub(crate) fn take(
        &mut self,
        reply: CookieReply<'_>,
        mac1: &[u8; MAC],
        now: Instant,
    ) -> Result<(), HandshakeError> {
        let sealed = reply.encrypted_cookie();
        let mut cookie = Zeroizing::new([0; 16]);
        cookie.copy_from_slice(&sealed[..16]);
        let tag: [u8; TAG] = std::array::from_fn(|i| sealed[16 + i]);
        self.keys
            .cookie_cipher()
            .decrypt_in_place_detached(&reply.nonce().into(), mac1, &mut cookie[..], &tag.into())
            .map_err(|_| HandshakeError::NotAuthentic)?;
        self.cookie = Some((cookie, now + COOKIE_LIFETIME));
        Ok(())
    }
}
