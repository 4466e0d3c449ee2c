use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aead::{BATCH, nonce};

use crate::crypto::Secret;
use crate::message::{DATA, DATA_HEADER, DATA_OVERHEAD};
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
    key: aead::Key,
    counter: AtomicU64,
}

#[repr(align(128))]
struct Receiving {
    key: aead::Key,
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
            sending: Sending { key: aead::Key::new(sending), counter: AtomicU64::new(0) },
            receiving: Receiving { key: aead::Key::new(receiving), window: ReplayWindow::new() },
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
    /// As [`Sealer::prepare`] does.
    pub fn seal(&self, packet: &[u8], size: usize, dst: &mut [u8]) -> Option<Sealed> {
        let sealed = self.prepare(packet, size, dst)?;
        self.encrypt(&mut dst[..sealed.len], sealed.len);
        Some(sealed)
    }

    /// Writes a data message that is not encrypted yet, so that [`Sealer::encrypt`] may take several
    /// at once. `None` if the key must not be used any more.
    ///
    /// # Panics
    /// If `size` is less than the packet's length, or `dst` shorter than `size` and
    /// [`DATA_OVERHEAD`].
    #[inline]
    pub fn prepare(&self, packet: &[u8], size: usize, dst: &mut [u8]) -> Option<Sealed> {
        let Sending { counter, .. } = &self.0.sending;
        // It is read first, so that it never comes round to zero.
        if counter.load(Ordering::Relaxed) >= REJECT_AFTER_MESSAGES {
            return None;
        }
        let counter = counter.fetch_add(1, Ordering::Relaxed);
        let (header, rest) = dst[..size + DATA_OVERHEAD].split_at_mut(DATA_HEADER);
        header[..4].copy_from_slice(&[DATA, 0, 0, 0]);
        header[4..8].copy_from_slice(&self.0.remote_index.to_le_bytes());
        header[8..].copy_from_slice(&counter.to_le_bytes());
        let (content, padding) = rest.split_at_mut(packet.len());
        content.copy_from_slice(packet);
        padding[..size - packet.len()].fill(0);
        Some(Sealed { len: size + DATA_OVERHEAD, counter })
    }

    /// Encrypts data messages of [`Sealer::prepare`], each once. They have `segment_size` bytes each,
    /// the last one may be shorter.
    #[inline]
    pub fn encrypt(&self, datagrams: &mut [u8], segment_size: usize) {
        for datagrams in datagrams.chunks_mut(segment_size * BATCH) {
            let mut messages: [aead::Message<'_>; BATCH] = Default::default();
            let mut count = 0;
            for (message, datagram) in messages.iter_mut().zip(datagrams.chunks_mut(segment_size)) {
                *message = message_of(datagram);
                count += 1;
            }
            self.0.sending.key.seal_batch(&mut messages[..count]);
        }
    }

    /// Returns whether it is of the same key pair.
    #[inline]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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
    /// Opens up to [`BATCH`] data messages with our index in place. They have `segment_size` bytes
    /// each, and at least [`DATA_OVERHEAD`]; the last one may be shorter. Returns the length of each
    /// one's content, with its padding, which is behind [`DATA_HEADER`] bytes. What is there after an
    /// error is nothing to go by.
    ///
    /// # Panics
    /// If a datagram is shorter than [`DATA_OVERHEAD`].
    #[inline]
    pub fn open(
        &self,
        datagrams: &mut [u8],
        segment_size: usize,
    ) -> [Result<usize, OpenError>; BATCH] {
        let Receiving { key, window } = &self.0.receiving;
        let mut results = [Err(OpenError::Replay); BATCH];
        let mut messages: [aead::Message<'_>; BATCH] = Default::default();
        // Counter, place and length of each message that is worth opening.
        let (mut opening, mut count) = ([(0, 0, 0); BATCH], 0);
        for (i, datagram) in datagrams.chunks_mut(segment_size).enumerate().take(BATCH) {
            let counter = counter_of(datagram);
            if counter < REJECT_AFTER_MESSAGES && window.may_take(counter) {
                opening[count] = (counter, i, datagram.len() - DATA_OVERHEAD);
                messages[count] = message_of(datagram);
                count += 1;
            }
        }
        let authentic = key.open_batch(&mut messages[..count]);
        for (place, (counter, i, len)) in opening[..count].iter().enumerate() {
            results[*i] = match authentic >> place & 1 == 1 {
                false => Err(OpenError::NotAuthentic),
                true if window.take(*counter) => Ok(*len),
                true => Err(OpenError::Replay),
            };
        }
        results
    }
}

#[inline]
fn message_of(datagram: &mut [u8]) -> aead::Message<'_> {
    let nonce = nonce(counter_of(datagram));
    aead::Message { nonce, bytes: &mut datagram[DATA_HEADER..] }
}

#[inline]
fn counter_of(datagram: &[u8]) -> u64 {
    datagram[8..].first_chunk().copied().map_or(u64::MAX, u64::from_le_bytes)
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
            let again = sealed;
            assert_eq!(opener.open(&mut sealed[..48], 48)[0], Ok(16));
            assert_eq!(sealed[16..32], *b"packet\0\0\0\0\0\0\0\0\0\0");
            sealed = again;
            assert_eq!(opener.open(&mut sealed[..48], 48)[0], Err(OpenError::Replay));
        }
    }

    #[test]
    fn message_with_any_byte_changed_is_refused() {
        let [(sealer, _), (_, opener)] = pair();
        let mut sealed = [0; 132];
        sealer.seal(&[7; 100], 100, &mut sealed).unwrap();
        for at in (8..132).filter(|at| *at != 15) {
            let mut damaged = sealed;
            damaged[at] ^= 1;
            assert_eq!(opener.open(&mut damaged, 132)[0], Err(OpenError::NotAuthentic), "{at}");
        }
        assert_eq!(opener.open(&mut sealed, 132)[0], Ok(100), "its counter is not used up");
    }

    #[test]
    fn key_stops_at_its_message_limit() {
        let [(sealer, _), (_, opener)] = pair();
        sealer.0.sending.counter.store(REJECT_AFTER_MESSAGES - 1, Ordering::Relaxed);
        let mut sealed = [0; 32];
        let last = sealer.seal(&[], 0, &mut sealed).unwrap();
        assert_eq!(last.counter, REJECT_AFTER_MESSAGES - 1);
        assert_eq!(opener.open(&mut { sealed }, 32)[0], Ok(0));
        for _ in 0..20_000 {
            assert_eq!(sealer.seal(&[], 0, &mut sealed), None);
        }
        assert_eq!(sealer.0.sending.counter.load(Ordering::Relaxed), REJECT_AFTER_MESSAGES);
        sealed[8..16].copy_from_slice(&REJECT_AFTER_MESSAGES.to_le_bytes());
        assert_eq!(opener.open(&mut sealed, 32)[0], Err(OpenError::Replay));
    }

    /// Two threads seal, two others open what each of the first ones made.
    #[test]
    fn threads_share_a_session_without_loss_or_repeat() {
        // One thread may wait while the other one does all of its work: all counters fit the window.
        const EACH: u32 = 4000;
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
                    for mut message in receiver {
                        let again = &mut { message };
                        assert_eq!(opener.open(&mut message, 36)[0], Ok(4));
                        assert_eq!(opener.open(again, 36)[0], Err(OpenError::Replay));
                        let number = u32::from_be_bytes(message[16..20].try_into().unwrap());
                        assert!(opened.lock().unwrap().insert(number), "{number} came twice");
                    }
                });
            }
        });
        assert_eq!(opened.into_inner().unwrap().len(), 2 * EACH as usize);
        assert_eq!(sealer.0.sending.counter.load(Ordering::Relaxed), u64::from(2 * EACH));
    }

    /// Messages of a train, some of which are damaged, twice there, or repeated: each has its own result.
    #[test]
    fn batch_opens_each_message_by_itself() {
        let [(sealer, _), (_, opener)] = pair();
        let mut train = [0; 40 * BATCH];
        for (i, datagram) in train.chunks_mut(40).enumerate() {
            sealer.prepare(&[i as u8; 8], 8, datagram).unwrap();
        }
        train[40 * 15 + 4..].fill(7);
        let last = &mut train[40 * 15..40 * 15 + 36];
        sealer.prepare(&[15; 4], 4, last).unwrap();
        sealer.encrypt(&mut train[..40 * 15 + 36], 40);
        let mut earlier = train;
        assert_eq!(opener.open(&mut earlier[..40], 40)[0], Ok(8));
        train[40 * 3 + 20] ^= 1;
        train.copy_within(40 * 4..40 * 5, 40 * 5);
        let results = opener.open(&mut train[..40 * 15 + 36], 40);
        let expected = |i| match i {
            0 | 5 => Err(OpenError::Replay),
            3 => Err(OpenError::NotAuthentic),
            15 => Ok(4),
            _ => Ok(8),
        };
        assert_eq!(results, std::array::from_fn(expected));
        for (i, datagram) in train.chunks(40).enumerate() {
            if let Ok(len) = results[i] {
                assert_eq!(datagram[DATA_HEADER..][..len], [i as u8; 8][..len]);
            }
        }
    }
}
