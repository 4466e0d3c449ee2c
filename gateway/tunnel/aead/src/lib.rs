//! ChaCha20-Poly1305 (RFC 8439) for several messages of one key at once, as WireGuard's data
//! messages need it: in place, without additional data.
//!
//! * `avx512` and `avx2` compute blocks of ChaCha20 of several messages side by side, one in each
//!   lane of a vector, and Poly1305 likewise. `batch` and `poly1305` are common to both.
//! * Everything else is left to ring: messages with additional data, other processors, and what
//!   ring is faster at.
//!
//! No branch and no address depends on keys or on text, only on lengths, and on whether a tag is
//! right.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod batch;
mod implementation;
mod key;
#[cfg(target_arch = "x86_64")]
mod poly1305;

pub use implementation::{Implementation, Unsupported};
pub use key::Key;

/// Bytes of a tag.
pub const TAG: usize = 16;

/// Bytes of a nonce.
pub const NONCE: usize = 12;

/// Messages of a batch, at most.
pub const BATCH: usize = 16;

/// Nonce of WireGuard's message with this counter.
#[inline]
pub fn nonce(counter: u64) -> [u8; NONCE] {
    let mut nonce = [0; NONCE];
    nonce[4..].copy_from_slice(&counter.to_le_bytes());
    nonce
}

/// A message to be sealed or opened in place.
#[derive(Default)]
pub struct Message<'a> {
    pub nonce: [u8; NONCE],
    /// The text, and [`TAG`] bytes for the tag.
    pub bytes: &'a mut [u8],
}

impl Message<'_> {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn text(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - TAG]
    }

    /// Splits it into text and tag.
    ///
    /// # Panics
    /// If there is no room for a tag.
    #[inline(always)]
    fn split(&mut self) -> (&mut [u8], &mut [u8; TAG]) {
        match self.bytes.split_last_chunk_mut() {
            Some(parts) => parts,
            None => panic!("a message has {TAG} bytes for its tag"),
        }
    }
}
