use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

/// A peer's WireGuard public key: a point of Curve25519 that is not of low order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

/// A WireGuard private key. Shown as `<redacted>`, wiped from memory when dropped; there is no
/// way to print one.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(Zeroizing<[u8; 32]>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("the key is {0} bytes long; expected 32 (44 characters of base64)")]
    Length(usize),
    #[error("the key is not base64; expected the text that `wg pubkey` prints")]
    Base64,
    #[error(
        "the key is a point of low order, with which no secret can be agreed; make a new pair with `weft keys`"
    )]
    LowOrder,
    #[error("the key is all zero, which anybody can guess; make a new pair with `weft keys`")]
    Zero,
}

/// Every encoding of a point of low order on Curve25519 or its twist, with the highest bit, which
/// X25519 ignores (RFC 7748 section 5), cleared: 0, 1, two of order 8, and p - 1, p, p + 1.
const LOW_ORDER: [[u8; 32]; 7] = [
    [0; 32],
    little_endian(1, 0, 0),
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4,
        0x6a, 0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49,
        0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef,
        0x5b, 0x04, 0x44, 0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f,
        0x11, 0x57,
    ],
    little_endian(0xec, 0xff, 0x7f),
    little_endian(0xed, 0xff, 0x7f),
    little_endian(0xee, 0xff, 0x7f),
];

const fn little_endian(first: u8, middle: u8, last: u8) -> [u8; 32] {
    let mut bytes = [middle; 32];
    (bytes[0], bytes[31]) = (first, last);
    bytes
}

impl PublicKey {
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KeyError> {
        let key: [u8; 32] = bytes.try_into().map_err(|_| KeyError::Length(bytes.len()))?;
        let mut masked = key;
        masked[31] &= 0x7f;
        if LOW_ORDER.contains(&masked) { Err(KeyError::LowOrder) } else { Ok(Self(key)) }
    }

    pub fn from_base64(text: &str) -> Result<Self, KeyError> {
        Self::from_bytes(&STANDARD.decode(text.trim()).map_err(|_| KeyError::Base64)?)
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl PrivateKey {
    /// A new key from the operating system's random numbers.
    pub fn generate() -> Self {
        let secret = StaticSecret::random_from_rng(rand_core::OsRng);
        Self(Zeroizing::new(secret.to_bytes()))
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KeyError> {
        let key: [u8; 32] = bytes.try_into().map_err(|_| KeyError::Length(bytes.len()))?;
        if key == [0; 32] { Err(KeyError::Zero) } else { Ok(Self(Zeroizing::new(key))) }
    }

    /// The key itself, for the cipher, for writing a Secret, and for what a gateway keeps in memory
    /// for its next start; nothing else may use it.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn public(&self) -> PublicKey {
        let secret = StaticSecret::from(*self.0);
        PublicKey(x25519_dalek::PublicKey::from(&secret).to_bytes())
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<redacted>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_order_and_misshapen_public_keys_are_refused() {
        assert_eq!(PublicKey::from_bytes(&[0; 32]), Err(KeyError::LowOrder));
        let mut one = [0; 32];
        one[0] = 1;
        assert_eq!(PublicKey::from_bytes(&one), Err(KeyError::LowOrder));
        assert_eq!(PublicKey::from_bytes(&[7; 31]), Err(KeyError::Length(31)));
        assert_eq!(PublicKey::from_base64("not base64!"), Err(KeyError::Base64));
    }

    #[test]
    fn private_key_of_zeros_is_refused() {
        assert_eq!(PrivateKey::from_bytes(&[0; 32]), Err(KeyError::Zero));
        assert_eq!(PrivateKey::from_bytes(&[0; 31]), Err(KeyError::Length(31)));
        assert!(PrivateKey::from_bytes(&[1; 32]).is_ok());
    }

    /// A low-order point gives the all-zero secret with any own key (RFC 7748 section 6.1).
    #[test]
    fn low_order_points_are_exactly_rejected() {
        let own = StaticSecret::from([0x55; 32]);
        let gives_a_secret = |key: [u8; 32]| {
            own.diffie_hellman(&x25519_dalek::PublicKey::from(key)).was_contributory()
        };
        for point in LOW_ORDER {
            for highest_bit in [0, 0x80] {
                let mut key = point;
                key[31] |= highest_bit;
                assert!(!gives_a_secret(key), "{key:x?}");
                assert_eq!(PublicKey::from_bytes(&key), Err(KeyError::LowOrder));
                key[0] ^= 0x10;
                assert!(gives_a_secret(key), "{key:x?}");
                assert!(PublicKey::from_bytes(&key).is_ok());
            }
        }
    }

    #[test]
    fn key_pair_round_trips_and_is_never_printed() {
        let private = PrivateKey::generate();
        let public = private.public();
        assert_eq!(PublicKey::from_base64(&public.to_string()), Ok(public));
        assert_eq!(format!("{private:?}"), "<redacted>");
    }
}
