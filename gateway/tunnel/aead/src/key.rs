#![allow(unsafe_code, reason = "calls of code for instructions that were looked for")]

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use crate::{BATCH, Implementation, Message, NONCE, TAG};

/// A key of ChaCha20-Poly1305, wiped from memory when dropped.
pub struct Key {
    implementation: Implementation,
    /// It is used for every batch, whatever is the fastest.
    is_forced: bool,
    #[cfg(target_arch = "x86_64")]
    words: zeroize::Zeroizing<crate::batch::Words>,
    ring: LessSafeKey,
}

impl Key {
    /// A key for the forced implementation, or for the fastest one.
    pub fn new(key: &[u8; 32]) -> Self {
        match Implementation::forced() {
            Some(forced) => Self::make(forced, true, key),
            None => Self::make(Implementation::fastest(), false, key),
        }
    }

    /// A key for that implementation only, whose instructions the processor may lack.
    pub fn with(implementation: Implementation, key: &[u8; 32]) -> Option<Self> {
        implementation.is_supported().then(|| Self::make(implementation, true, key))
    }

    fn make(implementation: Implementation, is_forced: bool, key: &[u8; 32]) -> Self {
        Self {
            implementation,
            is_forced,
            #[cfg(target_arch = "x86_64")]
            words: crate::batch::words(key).into(),
            ring: ring_key(key),
        }
    }

    /// Encrypts the text of each message and appends its tag.
    ///
    /// # Panics
    /// If there are more than [`BATCH`] messages, or one has no room for a tag.
    #[inline]
    pub fn seal_batch(&self, messages: &mut [Message<'_>]) {
        assert!(messages.len() <= BATCH, "a batch has at most {BATCH} messages");
        match self.implementation_for(messages) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a key is made for an implementation only if the processor has its instructions.
            Implementation::Avx512 => unsafe { crate::avx512::seal(&self.words, messages) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Implementation::Avx2 => unsafe { crate::avx2::seal(&self.words, messages) },
            _ => messages.iter_mut().for_each(|message| {
                let nonce = message.nonce;
                let (text, tag) = message.split();
                *tag = self.seal(nonce, &[], text);
            }),
        }
    }

    /// Decrypts the text of each message whose tag is right, and returns which those are: bit `i` is
    /// that of `messages[i]`. The others are left as they are, or with zeros for their text.
    ///
    /// # Panics
    /// If there are more than [`BATCH`] messages, or one has no room for a tag.
    #[inline]
    pub fn open_batch(&self, messages: &mut [Message<'_>]) -> u32 {
        assert!(messages.len() <= BATCH, "a batch has at most {BATCH} messages");
        match self.implementation_for(messages) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a key is made for an implementation only if the processor has its instructions.
            Implementation::Avx512 => unsafe { crate::avx512::open(&self.words, messages) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Implementation::Avx2 => unsafe { crate::avx2::open(&self.words, messages) },
            _ => messages.iter_mut().enumerate().fold(0, |authentic, (i, message)| {
                let nonce = message.nonce;
                let (text, tag) = message.split();
                authentic | u32::from(self.open(nonce, &[], text, tag)) << i
            }),
        }
    }

    /// Encrypts `text` and returns the tag of it and of `aad`.
    #[inline]
    pub fn seal(&self, nonce: [u8; NONCE], aad: &[u8], text: &mut [u8]) -> [u8; TAG] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        match self.ring.seal_in_place_separate_tag(nonce, Aad::from(aad), text) {
            Ok(tag) => *tag.as_ref().first_chunk().unwrap_or(&[0; TAG]),
            Err(_) => unreachable!("ChaCha20 takes 256 GiB"),
        }
    }

    /// Decrypts `text` if `tag` is that of it and of `aad`. Otherwise returns false, and zeros for the
    /// text.
    #[inline]
    pub fn open(&self, nonce: [u8; NONCE], aad: &[u8], text: &mut [u8], tag: &[u8; TAG]) -> bool {
        let (nonce, tag) = (Nonce::assume_unique_for_key(nonce), (*tag).into());
        self.ring.open_in_place_separate_tag(nonce, Aad::from(aad), tag, text, 0..).is_ok()
    }

    /// The fastest implementation for such a batch, as measured on a Zen 5. A pass costs the same for one
    /// message as for several: few short messages, and with AVX2 long ones, are left to ring.
    #[inline]
    fn implementation_for(&self, messages: &[Message<'_>]) -> Implementation {
        let longest = messages.iter().map(|message| message.bytes.len()).max().unwrap_or(0);
        let pays = match self.implementation {
            Implementation::Ring => false,
            Implementation::Avx512 => messages.len() > 1 || longest >= 1024,
            Implementation::Avx2 => messages.len() >= 4 && longest <= 32 * messages.len(),
        };
        match (pays || self.is_forced) && !messages.is_empty() {
            true => self.implementation,
            false => Implementation::Ring,
        }
    }

    fn wipe(&mut self) {
        self.ring = ring_key(&[0; 32]);
    }
}

impl Drop for Key {
    /// ring has no means of its own to wipe a key, so zeros take its place. They are read as far as
    /// the compiler knows, so that it does not leave them out.
    fn drop(&mut self) {
        self.wipe();
        std::hint::black_box(&self.ring);
    }
}

fn ring_key(key: &[u8; 32]) -> LessSafeKey {
    let Ok(key) = UnboundKey::new(&CHACHA20_POLY1305, key) else {
        unreachable!("the key has 32 bytes")
    };
    LessSafeKey::new(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wiped_key_is_that_of_zeros() {
        let [mut key, zeros] = [3, 0].map(|byte| Key::new(&[byte; 32]));
        let tag = |key: &Key| key.seal([1; NONCE], &[], &mut [7; 20]);
        assert_ne!(tag(&key), tag(&zeros));
        key.wipe();
        assert_eq!(tag(&key), tag(&zeros));
    }
}
