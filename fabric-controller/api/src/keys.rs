use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use boringtun::x25519;
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
}

impl PublicKey {
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KeyError> {
        let key: [u8; 32] = bytes.try_into().map_err(|_| KeyError::Length(bytes.len()))?;
        // Whatever our own key is, a low-order point gives the all-zero secret (RFC 7748 section 6.1).
        let probe = x25519::StaticSecret::from([0x55; 32]);
        let shared = probe.diffie_hellman(&x25519::PublicKey::from(key));
        if shared.was_contributory() { Ok(Self(key)) } else { Err(KeyError::LowOrder) }
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
        let secret = x25519::StaticSecret::random_from_rng(rand_core::OsRng);
        Self(Zeroizing::new(secret.to_bytes()))
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KeyError> {
        let key: [u8; 32] = bytes.try_into().map_err(|_| KeyError::Length(bytes.len()))?;
        Ok(Self(Zeroizing::new(key)))
    }

    /// The key itself, for the cipher and for writing a Secret; nothing else may ask for it.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    pub fn public(&self) -> PublicKey {
        let secret = x25519::StaticSecret::from(*self.0);
        PublicKey(x25519::PublicKey::from(&secret).to_bytes())
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
    fn a_pair_round_trips_and_the_private_half_never_prints() {
        let private = PrivateKey::generate();
        let public = private.public();
        assert_eq!(PublicKey::from_base64(&public.to_string()), Ok(public));
        assert_eq!(format!("{private:?}"), "<redacted>");
    }
}
