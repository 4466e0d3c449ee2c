//! Sealing and opening of a batch, whatever the vectors.
//!
//! ChaCha20's blocks are independent of each other: a pass computes [`LANES`] of them, first block 0
//! of each message, which is its key of Poly1305, then those of all texts one after the other.

use std::ops::Range;

use crate::{BATCH, Message, TAG};

/// Blocks of a pass.
pub(crate) const LANES: usize = 32;

/// Bytes of a block of ChaCha20.
pub(crate) const BLOCK: usize = 64;

/// ChaCha20's constants: "expand 32-byte k".
pub(crate) const CONSTANTS: [u32; 4] = [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574];

/// ChaCha20's key as words.
pub(crate) type Words = [u32; 8];

pub(crate) fn words(key: &[u8; 32]) -> Words {
    let mut words = [0; 8];
    for (word, bytes) in words.iter_mut().zip(key.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words
}

/// Keys of Poly1305: a message's `r` and `s`.
pub(crate) type TagKeys = [[u8; 32]; BATCH];

/// One kind of vectors. Its functions are inlined into a function that enables their instructions.
pub(crate) trait Vectors {
    /// Computes a pass into the first of the blocks.
    fn keystream(key: &Words, pass: &Pass, blocks: &mut [[u8; BLOCK]; LANES]);

    /// XORs a block, or the start of one, into `text`, which has at most [`BLOCK`] bytes.
    fn xor(text: &mut [u8], block: &[u8; BLOCK]);

    /// Computes the tags of the messages' ciphertexts.
    fn tags(keys: &TagKeys, messages: &[Message<'_>]) -> [[u8; TAG]; BATCH];
}

/// The blocks to compute at once, each in a lane of its own: words 12 to 15 of their states, which are
/// the number of the block in its message and the nonce.
#[derive(Default)]
pub(crate) struct Pass {
    pub(crate) words: [[[u32; 16]; LANES / 16]; 4],
    /// Lanes in use.
    pub(crate) count: usize,
}

#[inline(always)]
pub(crate) fn seal<V: Vectors>(key: &Words, messages: &mut [Message<'_>]) {
    let mut passes = Passes::new();
    passes.compute_first::<V>(key, messages);
    let keys = passes.tag_keys();
    passes.apply_all::<V>(key, messages, u32::MAX);
    let tags = V::tags(&keys, messages);
    for (message, computed) in messages.iter_mut().zip(&tags) {
        *message.split().1 = *computed;
    }
}

/// Returns which messages are authentic. Only these are decrypted.
#[inline(always)]
pub(crate) fn open<V: Vectors>(key: &Words, messages: &mut [Message<'_>]) -> u32 {
    let mut passes = Passes::new();
    passes.compute_first::<V>(key, messages);
    let tags = V::tags(&passes.tag_keys(), messages);
    let mut authentic = 0;
    for (i, (message, computed)) in messages.iter_mut().zip(&tags).enumerate() {
        let is_equal =
            u128::from_le_bytes(*message.split().1) ^ u128::from_le_bytes(*computed) == 0;
        authentic |= u32::from(is_equal) << i;
    }
    passes.apply_all::<V>(key, messages, authentic);
    authentic
}

/// The pass at hand and its blocks.
struct Passes {
    /// Lanes before `runs` start: those of block 0 of each message, in the first pass.
    keys: usize,
    runs: Cursor,
    pass: Pass,
    blocks: [[u8; BLOCK]; LANES],
}

/// The first block of texts that is not in a pass yet.
#[derive(Clone, Copy, Default)]
struct Cursor {
    message: usize,
    /// Blocks of that message's text before it.
    blocks: usize,
}

/// Blocks of one text in successive lanes.
struct Run {
    message: usize,
    /// Blocks of the text before them.
    blocks: usize,
    lanes: Range<usize>,
}

impl Passes {
    #[inline(always)]
    fn new() -> Self {
        let (runs, pass) = (Cursor::default(), Pass::default());
        Self { keys: 0, runs, pass, blocks: [[0; BLOCK]; LANES] }
    }

    #[inline(always)]
    fn compute_first<V: Vectors>(&mut self, key: &Words, messages: &[Message<'_>]) {
        self.keys = messages.len();
        for (lane, message) in messages.iter().enumerate() {
            self.pass.set(lane..lane + 1, 0, message);
        }
        self.compute::<V>(key, messages);
    }

    #[inline(always)]
    fn compute<V: Vectors>(&mut self, key: &Words, messages: &[Message<'_>]) {
        let (mut cursor, mut lane) = (self.runs, self.keys);
        while let Some(run) = cursor.next_run(messages, lane) {
            lane = run.lanes.end;
            self.pass.set(run.lanes, run.blocks as u32 + 1, &messages[run.message]);
        }
        self.pass.count = lane;
        if lane > 0 {
            V::keystream(key, &self.pass, &mut self.blocks);
        }
    }

    /// Keys of Poly1305, which are in the first pass.
    #[inline(always)]
    fn tag_keys(&self) -> TagKeys {
        let mut keys = [[0; 32]; BATCH];
        for (key, block) in keys.iter_mut().zip(&self.blocks[..self.keys]) {
            key.copy_from_slice(&block[..32]);
        }
        keys
    }

    /// XORs this pass and all later ones into the texts of the `chosen` messages.
    #[inline(always)]
    fn apply_all<V: Vectors>(&mut self, key: &Words, messages: &mut [Message<'_>], chosen: u32) {
        while self.pass.count > 0 {
            let mut lane = self.keys;
            while let Some(run) = self.runs.next_run(messages, lane) {
                lane = run.lanes.end;
                if chosen >> run.message & 1 == 1 {
                    let text = &mut messages[run.message].split().0[run.blocks * BLOCK..];
                    for (text, block) in text.chunks_mut(BLOCK).zip(&self.blocks[run.lanes]) {
                        V::xor(text, block);
                    }
                }
            }
            self.keys = 0;
            self.compute::<V>(key, messages);
        }
    }
}

impl Pass {
    /// Sets successive blocks of a message, from number `first` on.
    #[inline(always)]
    fn set(&mut self, lanes: Range<usize>, first: u32, message: &Message<'_>) {
        let [numbers, nonce @ ..] = &mut self.words;
        for (i, number) in numbers.as_flattened_mut()[lanes.clone()].iter_mut().enumerate() {
            *number = first + i as u32;
        }
        for (words, bytes) in nonce.iter_mut().zip(message.nonce.as_chunks().0) {
            words.as_flattened_mut()[lanes.clone()].fill(u32::from_le_bytes(*bytes));
        }
    }
}

impl Cursor {
    /// Returns the blocks that come next, in lanes from `lane` on.
    #[inline(always)]
    fn next_run(&mut self, messages: &[Message<'_>], lane: usize) -> Option<Run> {
        let mut left = 0;
        while left == 0 {
            left = messages.get(self.message)?.text().len().div_ceil(BLOCK) - self.blocks;
            if left == 0 {
                *self = Self { message: self.message + 1, blocks: 0 };
            }
        }
        let count = left.min(LANES - lane);
        let run = Run { message: self.message, blocks: self.blocks, lanes: lane..lane + count };
        self.blocks += count;
        (count > 0).then_some(run)
    }
}
