//! Poly1305 (RFC 8439 section 2.5) of several messages at once, apart from the arithmetic.
//!
//! A message's blocks are dealt to [`Spread::width`] lanes in turn. Each lane sums up its blocks with
//! the `width`th power of `r`; in the end it is multiplied by the power that its last block is to
//! have, and a message's sum is that of its lanes:
//!
//! `b0 r^5 + b1 r^4 + b2 r^3 + b3 r^2 + b4 r = (b0 r^4 + b2 r^2 + b4) r + (b1 r^2 + b3) r^2`

#![allow(unsafe_code, reason = "blocks are read by pointers")]

use crate::batch::TagKeys;
use crate::{BATCH, Message, TAG};

/// Bytes of a block.
pub(crate) const BLOCK: usize = 16;

/// Lanes of all vectors together, at most.
pub(crate) const LANES: usize = 16;

/// A number modulo 2^130 - 5 in each lane of a vector. Its functions are inlined into a function that
/// enables their instructions.
pub(crate) trait Number: Copy {
    const LANES: usize;

    /// `values` has a number less than 2^128 for each lane.
    fn load(values: &[u128]) -> Self;

    fn multiply(self, other: Self) -> Self;

    /// Takes the lanes with a bit in `lanes` from `other`.
    fn replace(self, lanes: u32, other: Self) -> Self;

    /// In those lanes, `self power + block`.
    ///
    /// # Safety
    /// [`BLOCK`] bytes are read from the pointer of each lane.
    unsafe fn add_block(self, power: Self, blocks: &[*const u8], lanes: u32) -> Self;

    /// Stores limbs of 44 bits, and a few more. The topmost has up to 46.
    fn store(self, limbs: &mut [[u64; 3]]);
}

/// Distribution of a batch's blocks over lanes.
pub(crate) struct Spread {
    /// Lanes of a message, a power of 2. Message `m` has those from `m * width` on.
    width: usize,
    /// `width` is 2 to the power of this.
    shift: u32,
    /// Bytes of each message's text.
    lens: [usize; BATCH],
    messages: usize,
}

impl Spread {
    #[inline(always)]
    pub(crate) fn new(messages: &[Message<'_>]) -> Self {
        let mut lens = [0; BATCH];
        for (len, message) in lens.iter_mut().zip(messages) {
            *len = message.text().len();
        }
        let longest = lens.iter().max().map_or(1, |len| len / BLOCK + 2);
        let mut shift = 0;
        // A power of `r` costs about as much as two blocks.
        while messages.len() << (shift + 1) <= LANES && 4 << shift <= longest {
            shift += 1;
        }
        Self { width: 1 << shift, shift, lens, messages: messages.len() }
    }

    /// Lanes in use.
    #[inline(always)]
    pub(crate) fn lanes(&self) -> usize {
        self.messages << self.shift
    }

    /// Place of a lane or of a block among the lanes of its message.
    #[inline(always)]
    fn place(&self, lane: usize) -> usize {
        lane & (self.width - 1)
    }

    /// Message of a lane, or any for one that is not in use.
    #[inline(always)]
    fn message(&self, lane: usize) -> usize {
        let message = lane >> self.shift;
        if message < self.messages { message } else { 0 }
    }

    /// Number of whole blocks of text in a lane.
    #[inline(always)]
    fn whole_blocks(&self, lane: usize) -> usize {
        let message = lane >> self.shift;
        if message >= self.messages {
            return 0;
        }
        (self.lens[message] / BLOCK + self.width - 1 - self.place(lane)) >> self.shift
    }

    /// Power of `r` by which a lane is multiplied in the end: from 1 to the width.
    #[inline(always)]
    fn power(&self, lane: usize) -> usize {
        let blocks = self.lens[self.message(lane)].div_ceil(BLOCK) + 1;
        self.place(blocks + self.width - 1 - self.place(lane)) + 1
    }

    /// Lane of a message's cut last block, if its text has one, and that block.
    #[inline(always)]
    fn cut_block(&self, message: usize, text: &[u8]) -> Option<(usize, [u8; BLOCK])> {
        let whole = text.len() / BLOCK;
        let rest = &text[whole * BLOCK..];
        if rest.is_empty() {
            return None;
        }
        let mut block = [0; BLOCK];
        block[..rest.len()].copy_from_slice(rest);
        Some(((message << self.shift) + self.place(whole), block))
    }

    /// Lane of the block that ends a message, and that block: the lengths of additional data, of which
    /// there is none, and of the text.
    #[inline(always)]
    fn length_block(&self, message: usize) -> (usize, [u8; BLOCK]) {
        let len = self.lens[message];
        let mut block = [0; BLOCK];
        block[8..].copy_from_slice(&(len as u64).to_le_bytes());
        ((message << self.shift) + self.place(len.div_ceil(BLOCK)), block)
    }
}

/// Computes the tags of ciphertexts with `V` vectors.
#[inline(always)]
pub(crate) fn tags<N: Number, const V: usize>(
    spread: &Spread,
    keys: &TagKeys,
    messages: &[Message<'_>],
) -> [[u8; TAG]; BATCH] {
    let [step, last] = powers::<N, V>(spread, keys);
    let mut sums = [N::load(&[0; LANES][..N::LANES]); V];
    add_whole_blocks(&mut sums, &step, spread, messages);
    let cut = |i: usize| spread.cut_block(i, messages[i].text());
    add_blocks(&mut sums, &step, (0..messages.len()).filter_map(cut));
    add_blocks(&mut sums, &step, (0..messages.len()).map(|i| spread.length_block(i)));
    let mut limbs = [[0; 3]; LANES];
    for (i, (sum, last)) in sums.iter().zip(last).enumerate() {
        sum.multiply(last).store(&mut limbs[i * N::LANES..][..N::LANES]);
    }
    let mut tags = [[0; TAG]; BATCH];
    for (i, tag) in tags.iter_mut().enumerate().take(messages.len()) {
        let lanes = &limbs[i << spread.shift..][..spread.width];
        *tag = finish([0, 1, 2].map(|limb| lanes.iter().map(|lane| lane[limb]).sum()), &keys[i]);
    }
    tags
}

/// Powers of each lane's `r`: that from block to block, and that in the end.
#[inline(always)]
fn powers<N: Number, const V: usize>(spread: &Spread, keys: &TagKeys) -> [[N; V]; 2] {
    let mut r = [0; LANES];
    // Bit `n` of `exponents[i]` is bit `i` of the last power of lane `n`: no secret.
    let mut exponents = [0u32; 5];
    for lane in 0..V * N::LANES {
        r[lane] = u128_at(&keys[spread.message(lane)], 0) & CLAMP;
        for (bit, lanes) in exponents.iter_mut().enumerate() {
            *lanes |= (spread.power(lane) as u32 >> bit & 1) << lane;
        }
    }
    let mut squares = [0; V].map(|_: usize| N::load(&[1; LANES][..N::LANES]));
    let mut last = squares;
    for (i, square) in squares.iter_mut().enumerate() {
        *square = N::load(&r[i * N::LANES..][..N::LANES]);
    }
    // Square and multiply, in each lane with its own exponent.
    for (bit, lanes) in exponents.iter().enumerate().take(spread.shift as usize + 1) {
        for i in 0..V {
            last[i] = last[i].replace(lanes >> (i * N::LANES), last[i].multiply(squares[i]));
            if bit < spread.shift as usize {
                squares[i] = squares[i].multiply(squares[i]);
            }
        }
    }
    [squares, last]
}

/// Adds all blocks that texts have whole.
#[inline(always)]
fn add_whole_blocks<N: Number, const V: usize>(
    sums: &mut [N; V],
    powers: &[N; V],
    spread: &Spread,
    messages: &[Message<'_>],
) {
    let mut counts = [0; LANES];
    let mut pointers = [std::ptr::null(); LANES];
    for lane in 0..V * N::LANES {
        counts[lane] = spread.whole_blocks(lane);
        let text = messages[spread.message(lane)].text().as_ptr();
        pointers[lane] = text.wrapping_add(spread.place(lane) * BLOCK);
    }
    let stride = spread.width * BLOCK;
    let mut done = 0;
    // Lanes with the same number of blocks are done at the same time. One that is done goes on
    // reading in a lane that is not, and nothing of that is added to its sum.
    while let Some(end) = counts.iter().copied().filter(|count| *count > done).min() {
        let (mut lanes, mut longest) = (0, 0);
        for lane in 0..V * N::LANES {
            lanes |= u32::from(counts[lane] > done) << lane;
            longest = if counts[lane] > counts[longest] { lane } else { longest };
        }
        for lane in 0..V * N::LANES {
            if counts[lane] <= done {
                pointers[lane] = pointers[longest];
            }
        }
        for block in done..end {
            let pointers = pointers.map(|pointer: *const u8| pointer.wrapping_add(block * stride));
            for (i, (sum, power)) in sums.iter_mut().zip(powers).enumerate() {
                let (pointers, lanes) =
                    (&pointers[i * N::LANES..][..N::LANES], lanes >> (i * N::LANES));
                // SAFETY: each pointer is that of a lane with at least `end` whole blocks in its text.
                *sum = unsafe { sum.add_block(*power, pointers, lanes) };
            }
        }
        done = end;
    }
}

/// Adds blocks, each in its lane.
#[inline(always)]
fn add_blocks<N: Number, const V: usize>(
    sums: &mut [N; V],
    powers: &[N; V],
    blocks: impl Iterator<Item = (usize, [u8; BLOCK])>,
) {
    let (mut by_lane, mut lanes) = ([[0; BLOCK]; LANES], 0);
    for (lane, block) in blocks {
        by_lane[lane] = block;
        lanes |= 1 << lane;
    }
    if lanes == 0 {
        return;
    }
    let pointers = by_lane.each_ref().map(|block| block.as_ptr());
    for (i, (sum, power)) in sums.iter_mut().zip(powers).enumerate() {
        let (pointers, lanes) = (&pointers[i * N::LANES..][..N::LANES], lanes >> (i * N::LANES));
        // SAFETY: the pointers are those of whole blocks.
        *sum = unsafe { sum.add_block(*power, pointers, lanes) };
    }
}

/// Bits that `r` may have.
const CLAMP: u128 = 0x0fff_fffc_0fff_fffc_0fff_fffc_0fff_ffff;

#[inline(always)]
fn u128_at(key: &[u8; 32], at: usize) -> u128 {
    key[at..].first_chunk().copied().map_or(0, u128::from_le_bytes)
}

const LOW_44: u64 = (1 << 44) - 1;
const LOW_42: u64 = (1 << 42) - 1;

/// Computes the tag from a message's sum, `h[0] + h[1] 2^44 + h[2] 2^88`, each less than 2^60.
#[inline(always)]
fn finish(h: [u64; 3], key: &[u8; 32]) -> [u8; TAG] {
    let [mut h0, mut h1, mut h2] = h;
    // Twice: the second time nothing leaves the top any more, except for one.
    for _ in 0..2 {
        h1 += h0 >> 44;
        h0 &= LOW_44;
        h2 += h1 >> 44;
        h1 &= LOW_44;
        h0 += (h2 >> 42) * 5;
        h2 &= LOW_42;
    }
    h1 += h0 >> 44;
    h0 &= LOW_44;
    h2 += h1 >> 44;
    h1 &= LOW_44;
    // It is less than 2^130 + 5 here: h - p, if that is not negative, is h + 5 without bit 130.
    let g0 = h0 + 5;
    let g1 = h1 + (g0 >> 44);
    let g2 = h2 + (g1 >> 44);
    let over = 0u64.wrapping_sub(g2 >> 42);
    let select = |h: u64, g: u64| u128::from((h & !over) | (g & over));
    let (h0, h1, h2) = (select(h0, g0 & LOW_44), select(h1, g1 & LOW_44), select(h2, g2 & LOW_42));
    (h0 | h1 << 44 | h2 << 88).wrapping_add(u128_at(key, 16)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use poly1305::universal_hash::{KeyInit, UniversalHash};

    use super::*;
    use crate::Implementation;
    use crate::avx2::Avx2;
    use crate::avx512::Avx512;
    use crate::batch::Vectors;

    /// RustCrypto's tag of a ciphertext.
    fn expected(key: &[u8; 32], text: &[u8]) -> [u8; TAG] {
        let mut poly1305 = poly1305::Poly1305::new(key.into());
        poly1305.update_padded(text);
        poly1305.update_padded(&(text.len() as u128).rotate_left(64).to_le_bytes());
        poly1305.finalize().into()
    }

    fn check(keys: &TagKeys, texts: &[Vec<u8>]) {
        let mut bytes: Vec<Vec<u8>> =
            texts.iter().map(|text| [&text[..], &[0; TAG]].concat()).collect();
        let messages: Vec<Message<'_>> =
            bytes.iter_mut().map(|bytes| Message { nonce: [0; 12], bytes }).collect();
        let mut all = Vec::new();
        if Implementation::Avx2.is_supported() {
            all.push(Avx2::tags(keys, &messages));
        }
        if Implementation::Avx512.is_supported() {
            all.push(Avx512::tags(keys, &messages));
        }
        for tags in all {
            for (i, text) in texts.iter().enumerate() {
                assert_eq!(tags[i], expected(&keys[i], text), "message {i} of {}", texts.len());
            }
        }
    }

    /// With `r` = 1 a sum is that of the blocks: here from 2^130 - 13 to 2^130 + 7, around the prime.
    #[test]
    fn sums_around_the_prime_are_reduced() {
        for s in [0, 5, u128::MAX] {
            let mut key = [0; 32];
            key[0] = 1;
            key[16..].copy_from_slice(&s.to_le_bytes());
            for distance in 0..20 {
                // Two blocks and that of the length, each with 2^128.
                let sum = u128::MAX - 12 - (32 << 64);
                let text = [sum.wrapping_add(distance).to_le_bytes(), [0; 16]].concat();
                check(&[key; BATCH], &[text]);
            }
        }
    }

    /// Largest `r` and blocks of ones make the largest limbs, for each spread over lanes.
    #[test]
    fn largest_and_smallest_limbs_do_not_overflow() {
        for count in 1..=BATCH {
            for len in [0, 1, 16, 17, 32, 100, 160, 1420, 4000] {
                for byte in [0xff, 0, 0x80, 1] {
                    let keys = [[0xff; 32], [0; 32], [0xfc; 32], [0x0f; 32]];
                    let keys = std::array::from_fn(|i| keys[i % 4]);
                    check(&keys, &vec![vec![byte; len]; count]);
                }
            }
        }
    }

    #[test]
    fn random_keys_equal_rustcrypto() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..5000 {
            let mut keys = [[0; 32]; BATCH];
            keys.iter_mut().for_each(|key| rng.fill(key));
            let longest = [20, 100, 700][rng.usize(..3)];
            let texts = (0..rng.usize(1..=BATCH)).map(|_| {
                let mut text = vec![0; rng.usize(..longest)];
                rng.fill(&mut text);
                text
            });
            check(&keys, &texts.collect::<Vec<_>>());
        }
    }
}
