//! Noise's symmetric state on BLAKE2s and ChaCha20-Poly1305 (whitepaper section 5.4).

use aead::nonce;
use blake2::digest::{FixedOutput, KeyInit, Mac, Update};
use blake2::{Blake2s256, Blake2sMac, Digest};
use hmac::SimpleHmac;
use x25519_dalek::{PublicKey, SharedSecret, StaticSecret};
use zeroize::Zeroizing;

use crate::error::HandshakeError;

pub(crate) type Secret = Zeroizing<[u8; 32]>;

const CONSTRUCTION: &[u8] = b"Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
const IDENTIFIER: &[u8] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";

pub(crate) fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Blake2s256::new();
    parts.iter().for_each(|part| Digest::update(&mut hasher, part));
    hasher.finalize().into()
}

/// Keyed BLAKE2s of 16 bytes. `key` has at most 32 bytes.
pub(crate) fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 16] {
    keyed(key, parts).finalize_fixed().into()
}

/// Compares in constant time.
pub(crate) fn is_mac(key: &[u8], parts: &[&[u8]], expected: &[u8]) -> bool {
    keyed(key, parts).verify_slice(expected).is_ok()
}

fn keyed(key: &[u8], parts: &[&[u8]]) -> Blake2sMac<blake2::digest::consts::U16> {
    let Ok(mut mac) = KeyInit::new_from_slice(key) else {
        unreachable!("keys of MACs have 16 or 32 bytes")
    };
    parts.iter().for_each(|part| Update::update(&mut mac, part));
    mac
}

fn hmac(key: &[u8; 32], parts: &[&[u8]]) -> Secret {
    let Ok(mut mac) = <SimpleHmac<Blake2s256> as KeyInit>::new_from_slice(key) else {
        unreachable!("HMAC takes keys of any length")
    };
    parts.iter().for_each(|part| Update::update(&mut mac, part));
    Zeroizing::new(mac.finalize_fixed().into())
}

/// HKDF (RFC 5869) with HMAC-BLAKE2s, as Noise uses it.
fn derive<const N: usize>(key: &[u8; 32], input: &[u8]) -> [Secret; N] {
    let extracted = hmac(key, &[input]);
    let mut last: Option<Secret> = None;
    let mut number = 0;
    [(); N].map(|()| {
        number += 1;
        let before = last.as_ref().map_or(&[][..], |last| &last[..]);
        let output = hmac(&extracted, &[before, &[number]]);
        last = Some(output.clone());
        output
    })
}

/// X25519, where the result is a secret.
pub(crate) fn agree(
    secret: &StaticSecret,
    public: &PublicKey,
) -> Result<SharedSecret, HandshakeError> {
    let shared = secret.diffie_hellman(public);
    // Zero in constant time: the other side's point is of low order (RFC 7748 section 6.1).
    match shared.was_contributory() {
        true => Ok(shared),
        false => Err(HandshakeError::LowOrder),
    }
}

/// State of a handshake: chaining key, and hash of everything sent and received.
#[derive(Clone)]
pub(crate) struct Transcript {
    chaining_key: Secret,
    hash: [u8; 32],
}

impl Transcript {
    pub(crate) fn new(responder: &[u8; 32]) -> Self {
        let chaining_key = hash(&[CONSTRUCTION]);
        let start = hash(&[&chaining_key, IDENTIFIER]);
        Self { hash: hash(&[&start, responder]), chaining_key: Zeroizing::new(chaining_key) }
    }

    fn mix_hash(&mut self, data: &[u8]) {
        self.hash = hash(&[&self.hash, data]);
    }

    /// Mixes a secret into the chaining key.
    pub(crate) fn mix(&mut self, input: &[u8]) {
        [self.chaining_key] = derive(&self.chaining_key, input);
    }

    /// The same, and a key for the next ciphertext.
    pub(crate) fn mix_to_key(&mut self, input: &[u8]) -> Secret {
        let key;
        [self.chaining_key, key] = derive(&self.chaining_key, input);
        key
    }

    pub(crate) fn mix_ephemeral(&mut self, public: &[u8; 32]) {
        self.mix_hash(public);
        self.mix(public);
    }

    /// Mixes the preshared key, which is zero as long as there is none, and returns a key.
    pub(crate) fn mix_preshared_key(&mut self) -> Secret {
        let (hashed, key);
        [self.chaining_key, hashed, key] = derive(&self.chaining_key, &[0; 32]);
        self.mix_hash(&hashed[..]);
        key
    }

    /// Seals `plain` into `sealed`, which has [`TAG`] bytes more.
    pub(crate) fn seal(&mut self, key: &Secret, plain: &[u8], sealed: &mut [u8]) {
        let (text, tag) = sealed.split_at_mut(plain.len());
        text.copy_from_slice(plain);
        tag.copy_from_slice(&aead::Key::new(key).seal(nonce(0), &self.hash, text));
        self.mix_hash(sealed);
    }

    /// Opens `N` bytes and a tag.
    pub(crate) fn open<const N: usize>(
        &mut self,
        key: &Secret,
        sealed: &[u8],
    ) -> Result<Zeroizing<[u8; N]>, HandshakeError> {
        let mut text = Zeroizing::new([0; N]);
        let (cipher_text, tag) = sealed.split_last_chunk().ok_or(HandshakeError::NotAuthentic)?;
        text.copy_from_slice(cipher_text);
        if !aead::Key::new(key).open(nonce(0), &self.hash, &mut text[..], tag) {
            return Err(HandshakeError::NotAuthentic);
        }
        self.mix_hash(sealed);
        Ok(text)
    }

    /// Returns the initiator's and the responder's key.
    pub(crate) fn split(self) -> [Secret; 2] {
        derive(&self.chaining_key, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start values as other implementations write them down.
    #[test]
    fn start_is_that_of_the_whitepaper() {
        let key = hash(&[CONSTRUCTION]);
        assert_eq!(key[..4], [96, 226, 109, 174]);
        assert_eq!(key[28..], [139, 120, 205, 54]);
        let start = hash(&[&key, IDENTIFIER]);
        assert_eq!(start[..4], [34, 17, 179, 97]);
        assert_eq!(start[28..], [186, 7, 158, 243]);
    }

    /// RFC 7693 appendix B.
    #[test]
    fn blake2s_vectors_match() {
        assert_eq!(hash(&[b"a", b"bc"])[..4], [0x50, 0x8c, 0x5e, 0x8c]);
        assert_ne!(mac(&[1; 32], &[b"x"]), mac(&[1; 16], &[b"x"]));
        assert!(is_mac(&[1; 32], &[b"a", b"b"], &mac(&[1; 32], &[b"ab"])));
    }

    #[test]
    fn mac_with_any_bit_changed_is_refused() {
        let right = mac(&[3; 32], &[b"message"]);
        assert!(is_mac(&[3; 32], &[b"message"], &right));
        for bit in 0..128 {
            let mut wrong = right;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_mac(&[3; 32], &[b"message"], &wrong));
        }
        assert!(!is_mac(&[3; 32], &[b"message"], &right[..15]));
    }

    #[test]
    fn points_of_low_order_agree_on_nothing() {
        let secret = StaticSecret::from([0x55; 32]);
        for point in [0, 1] {
            let mut bytes = [0; 32];
            bytes[0] = point;
            let agreed = agree(&secret, &PublicKey::from(bytes));
            assert_eq!(agreed.err(), Some(HandshakeError::LowOrder));
        }
        assert!(agree(&secret, &PublicKey::from([9; 32])).is_ok());
    }
}
