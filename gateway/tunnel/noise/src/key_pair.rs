use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::aead::Aad;

use crate::crypto::{CipherKey, Secret, nonce};
use crate::message::{DATA, DATA_HEADER, DATA_OVERHEAD, TAG};
use crate::replay::{ReplayWindow, WINDOW};

/// Messages of a key, after which it neither seals nor opens any more (whitepaper section 6.1).
pub const REJECT_AFTER_MESSAGES: u64 = u64::MAX - WINDOW;

/// The keys of a session, which a handshake has agreed on. Wiped from memory when dropped.
pub struct KeyPair {
    local_index: u32,
    remote_index: u32,
    sending: Sending,
    receiving: Receiving,
}

/// Apart from the other direction by a cache line, or two for processors that load them in pairs.
#[repr(align(128))]
struct Sending {
    key: CipherKey,
    counter: AtomicU64,
}

#[repr(align(128))]
struct Receiving {
    key: CipherKey,
    window: ReplayWindow,
}

impl KeyPair {
    pub(crate) fn new(
        (local_index, remote_index): (u32, u32),
        sending: &Secret,
        receiving: &Secret,
    ) -> Self {
        Self {
            local_index,
            remote_index,
            sending: Sending { key: CipherKey::new(sending), counter: AtomicU64::new(0) },
            receiving: Receiving { key: CipherKey::new(receiving), window: ReplayWindow::new() },
        }
    }

    /// Index that the peer writes on what it seals with this key.
    pub fn local_index(&self) -> u32 {
        self.local_index
    }

    /// Returns both directions.
    pub fn split(self) -> (Sealer, Opener) {
        let pair = Arc::new(self);
        (Sealer(Arc::clone(&pair)), Opener(pair))
    }
}

/// Direction to the peer. Clones may be used on several threads at once: no counter is used twice.
#[derive(Clone)]
pub struct Sealer(Arc<KeyPair>);

/// A data message that was sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Length in bytes.
    pub len: usize,
    pub counter: u64,
}

impl Sealer {
    /// Seals `packet`, padded with zeros to `size` bytes, into the start of `dst`. `None` if the key
    /// must not be used any more.
    ///
    /// # Panics
    /// If `size` is less than the packet's length, or `dst` shorter than `size` and
    /// [`DATA_OVERHEAD`].
    #[inline]
    pub fn seal(&self, packet: &[u8], size: usize, dst: &mut [u8]) -> Option<Sealed> {
        let Sending { key, counter } = &self.0.sending;
        // It is read first, so that it never comes round to zero.
        if counter.load(Ordering::Relaxed) >= REJECT_AFTER_MESSAGES {
            return None;
        }
        let counter = counter.fetch_add(1, Ordering::Relaxed);
        let (header, rest) = dst.split_at_mut(DATA_HEADER);
        header[..4].copy_from_slice(&[DATA, 0, 0, 0]);
        header[4..8].copy_from_slice(&self.0.remote_index.to_le_bytes());
        header[8..].copy_from_slice(&counter.to_le_bytes());
        let (text, rest) = rest.split_at_mut(size);
        let (content, padding) = text.split_at_mut(packet.len());
        content.copy_from_slice(packet);
        padding.fill(0);
        let tag = key.get().seal_in_place_separate_tag(nonce(counter), Aad::empty(), text);
        rest[..TAG].copy_from_slice(tag.ok()?.as_ref());
        Some(Sealed { len: size + DATA_OVERHEAD, counter })
    }
}

/// Direction from the peer. Clones may be used on several threads at once: no message is opened twice.
#[derive(Clone)]
pub struct Opener(Arc<KeyPair>);

/// Reason for which a data message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("the counter was received before, is too late or above the limit of a key")]
    Replay,
    #[error("the message was not sealed with this key")]
    NotAuthentic,
}

impl Opener {
    /// Opens a data message with our index into the start of `dst`, which is at most
    /// [`DATA_OVERHEAD`] bytes shorter. Returns the length of the content, with its padding. What
    /// is in `dst` after an error is nothing to go by.
    ///
    /// # Panics
    /// If `datagram` is shorter than [`DATA_OVERHEAD`], or `dst` too short.
    #[inline]
    pub fn open(&self, datagram: &[u8], dst: &mut [u8]) -> Result<usize, OpenError> {
        let Receiving { key, window } = &self.0.receiving;
        let (header, rest) = datagram.split_at(DATA_HEADER);
        let (sealed, tag) = rest.split_at(rest.len() - TAG);
        let counter = counter_of(header);
        if counter >= REJECT_AFTER_MESSAGES || !window.may_take(counter) {
            return Err(OpenError::Replay);
        }
        let text = &mut dst[..sealed.len()];
        text.copy_from_slice(sealed);
        let tag = tag.try_into().map_err(|_| OpenError::NotAuthentic)?;
        key.get()
            .open_in_place_separate_tag(nonce(counter), Aad::empty(), tag, text, 0..)
            .map_err(|_| OpenError::NotAuthentic)?;
        match window.take(counter) {
            true => Ok(sealed.len()),
            false => Err(OpenError::Replay),
        }
    }
}

#[inline]
fn counter_of(header: &[u8]) -> u64 {
    header[8..].first_chunk().copied().map_or(u64::MAX, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use zeroize::Zeroizing;

    use super::*;

    fn key(byte: u8) -> Secret {
        Zeroizing::new([byte; 32])
    }

    /// Both ends of a session.
    fn pair() -> [(Sealer, Opener); 2] {
        [
            KeyPair::new((1, 2), &key(3), &key(4)).split(),
            KeyPair::new((2, 1), &key(4), &key(3)).split(),
        ]
    }

    #[test]
    fn sealed_message_has_the_whitepapers_layout() {
        let [(sealer, _), (_, opener)] = pair();
        for counter in 0..3 {
            let mut sealed = [0xee; 64];
            let made = sealer.seal(b"packet", 16, &mut sealed).unwrap();
            assert_eq!(made, Sealed { len: 48, counter });
            assert_eq!(sealed[..8], [4, 0, 0, 0, 2, 0, 0, 0]);
            assert_eq!(sealed[8..16], counter.to_le_bytes());
            assert_eq!(sealed[48..], [0xee; 16], "nothing behind it is touched");
            let mut opened = [0xaa; 16];
            assert_eq!(opener.open(&sealed[..48], &mut opened), Ok(16));
            assert_eq!(opened, *b"packet\0\0\0\0\0\0\0\0\0\0");
            assert_eq!(opener.open(&sealed[..48], &mut opened), Err(OpenError::Replay));
        }
    }

    #[test]
    fn message_with_any_byte_changed_is_refused() {
        let [(sealer, _), (_, opener)] = pair();
        let mut sealed = [0; 132];
        sealer.seal(&[7; 100], 100, &mut sealed).unwrap();
        let mut opened = [0; 100];
        for at in (8..132).filter(|at| *at != 15) {
            let mut damaged = sealed;
            damaged[at] ^= 1;
            assert_eq!(opener.open(&damaged, &mut opened), Err(OpenError::NotAuthentic), "{at}");
        }
        assert_eq!(opener.open(&sealed, &mut opened), Ok(100), "its counter is not used up");
    }

    #[test]
    fn key_stops_at_its_message_limit() {
        let [(sealer, _), (_, opener)] = pair();
        sealer.0.sending.counter.store(REJECT_AFTER_MESSAGES - 1, Ordering::Relaxed);
        let mut sealed = [0; 32];
        let last = sealer.seal(&[], 0, &mut sealed).unwrap();
        assert_eq!(last.counter, REJECT_AFTER_MESSAGES - 1);
        assert_eq!(opener.open(&sealed, &mut []), Ok(0));
        for _ in 0..20_000 {
            assert_eq!(sealer.seal(&[], 0, &mut sealed), None);
        }
        assert_eq!(sealer.0.sending.counter.load(Ordering::Relaxed), REJECT_AFTER_MESSAGES);
        sealed[8..16].copy_from_slice(&REJECT_AFTER_MESSAGES.to_le_bytes());
        assert_eq!(opener.open(&sealed, &mut []), Err(OpenError::Replay));
    }

    /// Two threads seal, two others open what each of the first ones made.
    #[test]
    fn threads_share_a_session_without_loss_or_repeat() {
        const EACH: u32 = 20_000;
        let [(sealer, _), (_, opener)] = pair();
        let opened = Mutex::new(BTreeSet::new());
        std::thread::scope(|scope| {
            for thread in 0..2u32 {
                let (sender, receiver) = std::sync::mpsc::sync_channel(64);
                let (sealer, opener, opened) = (sealer.clone(), opener.clone(), &opened);
                scope.spawn(move || {
                    for number in 0..EACH {
                        let mut message = [0; 36];
                        let content = (thread * EACH + number).to_be_bytes();
                        sealer.seal(&content, 4, &mut message).unwrap();
                        sender.send(message).unwrap();
                    }
                });
                scope.spawn(move || {
                    for message in receiver {
                        let mut content = [0; 4];
                        assert_eq!(opener.open(&message, &mut content), Ok(4));
                        assert_eq!(opener.open(&message, &mut content), Err(OpenError::Replay));
                        let number = u32::from_be_bytes(content);
                        assert!(opened.lock().unwrap().insert(number), "{number} came twice");
                    }
                });
            }
        });
        assert_eq!(opened.into_inner().unwrap().len(), 2 * EACH as usize);
        assert_eq!(sealer.0.sending.counter.load(Ordering::Relaxed), u64::from(2 * EACH));
    }
}
