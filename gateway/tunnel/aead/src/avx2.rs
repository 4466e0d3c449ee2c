//! ChaCha20 with 8 blocks side by side, Poly1305 with 4, 8 or 16 lanes in radix 2^26.
#![allow(unsafe_code, reason = "instructions, and memory that they read and write")]

use std::arch::x86_64::*;

use crate::batch::{self, BLOCK, CONSTANTS, LANES, Pass, TagKeys, Vectors, Words};
use crate::poly1305::{self, Number, Spread};
use crate::{BATCH, Message, TAG};

#[target_feature(enable = "avx2")]
pub(crate) fn seal(key: &Words, messages: &mut [Message<'_>]) {
    batch::seal::<Avx2>(key, messages);
}

#[target_feature(enable = "avx2")]
pub(crate) fn open(key: &Words, messages: &mut [Message<'_>]) -> u32 {
    batch::open::<Avx2>(key, messages)
}

/// Only for processors with the instructions: `seal` and `open` above use it.
pub(crate) struct Avx2;

impl Vectors for Avx2 {
    #[inline(always)]
    fn keystream(key: &Words, pass: &Pass, blocks: &mut [[u8; BLOCK]; LANES]) {
        let numbers = pass.words.each_ref().map(|words| words.as_flattened());
        for (i, blocks) in blocks.chunks_exact_mut(8).enumerate().take(pass.count.div_ceil(8)) {
            let words = numbers.map(|words| std::array::from_fn(|lane| words[8 * i + lane]));
            // SAFETY: the callers of `seal` and `open` have checked that the processor has the instructions.
            unsafe { compute(key, &words, blocks) };
        }
    }

    #[inline(always)]
    fn xor(text: &mut [u8], block: &[u8; BLOCK]) {
        match <&mut [u8; BLOCK]>::try_from(&mut *text) {
            Ok(text) => text.iter_mut().zip(block).for_each(|(byte, key)| *byte ^= key),
            Err(_) => text.iter_mut().zip(block).for_each(|(byte, key)| *byte ^= key),
        }
    }

    #[inline(always)]
    fn tags(keys: &TagKeys, messages: &[Message<'_>]) -> [[u8; TAG]; BATCH] {
        // SAFETY: as above.
        unsafe { tags(keys, messages) }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load<T>(values: &[T]) -> __m256i {
    assert!(size_of_val(values) == 32);
    // SAFETY: there are 32 bytes.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

/// Rotates each word to the left by `N` bits.
#[inline]
#[target_feature(enable = "avx2")]
fn rotate<const N: i32, const REST: i32>(words: __m256i) -> __m256i {
    let bytes = |order: i64| {
        _mm256_shuffle_epi8(words, _mm256_set_epi64x(order + EIGHT, order, order + EIGHT, order))
    };
    const EIGHT: i64 = 0x0808_0808_0808_0808;
    match N {
        16 => bytes(0x0504_0706_0100_0302),
        8 => bytes(0x0605_0407_0201_0003),
        _ => _mm256_or_si256(_mm256_slli_epi32::<N>(words), _mm256_srli_epi32::<REST>(words)),
    }
}

/// `a += b; d ^= a; d <<<= n` for the words of each column or diagonal.
macro_rules! steps {
    ($v:ident <<< $n:literal: $($a:literal $b:literal $d:literal),*) => {
        $($v[$a] = _mm256_add_epi32($v[$a], $v[$b]);)*
        $($v[$d] = rotate::<$n, { 32 - $n }>(_mm256_xor_si256($v[$d], $v[$a]));)*
    };
}

/// Computes 8 blocks; `words` are words 12 to 15 of their states.
#[target_feature(enable = "avx2")]
fn compute(key: &Words, words: &[[u32; 8]; 4], blocks: &mut [[u8; BLOCK]]) {
    let mut start = [_mm256_setzero_si256(); 16];
    for (word, value) in start.iter_mut().zip(CONSTANTS.iter().chain(key)) {
        *word = _mm256_set1_epi32(*value as i32);
    }
    for (word, values) in start[12..].iter_mut().zip(words) {
        *word = load(values);
    }
    let mut v = start;
    for _ in 0..10 {
        steps!(v <<< 16: 0 4 12, 1 5 13, 2 6 14, 3 7 15);
        steps!(v <<< 12: 8 12 4, 9 13 5, 10 14 6, 11 15 7);
        steps!(v <<< 8: 0 4 12, 1 5 13, 2 6 14, 3 7 15);
        steps!(v <<< 7: 8 12 4, 9 13 5, 10 14 6, 11 15 7);
        steps!(v <<< 16: 0 5 15, 1 6 12, 2 7 13, 3 4 14);
        steps!(v <<< 12: 10 15 5, 11 12 6, 8 13 7, 9 14 4);
        steps!(v <<< 8: 0 5 15, 1 6 12, 2 7 13, 3 4 14);
        steps!(v <<< 7: 10 15 5, 11 12 6, 8 13 7, 9 14 4);
    }
    for (word, start) in v.iter_mut().zip(start) {
        *word = _mm256_add_epi32(*word, start);
    }
    for half in 0..2 {
        let vectors = transpose(std::array::from_fn(|i| v[8 * half + i]));
        for (block, vector) in blocks.iter_mut().zip(vectors) {
            let half = &mut block[32 * half..][..32];
            // SAFETY: the slice has 32 bytes.
            unsafe { _mm256_storeu_si256(half.as_mut_ptr().cast(), vector) };
        }
    }
}

/// Turns 8 words of 8 blocks into half of each block.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(v: [__m256i; 8]) -> [__m256i; 8] {
    let mut pairs = v;
    for i in 0..4 {
        pairs[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    // Vector 4 i + j: in each half h, words 4 i to 4 i + 3 of block 4 h + j.
    let mut fours = v;
    for i in 0..2 {
        for j in 0..2 {
            let (a, b) = (pairs[4 * i + j], pairs[4 * i + j + 2]);
            fours[4 * i + 2 * j] = _mm256_unpacklo_epi64(a, b);
            fours[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a, b);
        }
    }
    let mut blocks = v;
    for j in 0..4 {
        blocks[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
        blocks[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
    }
    blocks
}

#[target_feature(enable = "avx2")]
fn tags(keys: &TagKeys, messages: &[Message<'_>]) -> [[u8; TAG]; BATCH] {
    let spread = Spread::new(messages);
    match spread.lanes() {
        0..=4 => poly1305::tags::<Limbs, 1>(&spread, keys, messages),
        5..=8 => poly1305::tags::<Limbs, 2>(&spread, keys, messages),
        _ => poly1305::tags::<Limbs, 4>(&spread, keys, messages),
    }
}

/// Limbs of 26 bits, and a few more, in each of 4 lanes.
#[derive(Clone, Copy)]
struct Limbs([__m256i; 5]);

impl Number for Limbs {
    const LANES: usize = 4;

    #[inline(always)]
    fn load(values: &[u128]) -> Self {
        let limb = |shift: u32| {
            let value = |i: usize| (values[i] >> shift) as u64 & LOW_26 as u64;
            // SAFETY: only `tags` uses this type, which has the instructions.
            unsafe { load::<u64>(&[value(0), value(1), value(2), value(3)]) }
        };
        Self([limb(0), limb(26), limb(52), limb(78), limb(104)])
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { multiply(self.0, other.0) })
    }

    #[inline(always)]
    fn replace(self, lanes: u32, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { replace(self.0, lanes, other.0) })
    }

    #[inline(always)]
    unsafe fn add_block(self, power: Self, blocks: &[*const u8], lanes: u32) -> Self {
        // SAFETY: as above, and the caller's.
        Self(unsafe { add_block(self.0, power.0, blocks, lanes) })
    }

    #[inline(always)]
    fn store(self, limbs: &mut [[u64; 3]]) {
        let mut values = [[0u64; 4]; 5];
        for (values, limb) in values.iter_mut().zip(self.0) {
            // SAFETY: as above, and the array has 32 bytes.
            unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), limb) };
        }
        for (lane, limbs) in limbs.iter_mut().enumerate() {
            let [l0, l1, l2, l3, l4] = values.map(|limb| limb[lane]);
            let low = l0 + (l1 << 26);
            *limbs = [
                low & ((1 << 44) - 1),
                (low >> 44) + (l2 << 8) + ((l3 & 0x3ff) << 34),
                (l3 >> 10) + (l4 << 16),
            ];
        }
    }
}

const LOW_26: i64 = (1 << 26) - 1;

#[inline]
#[target_feature(enable = "avx2")]
fn replace(limbs: [__m256i; 5], lanes: u32, other: [__m256i; 5]) -> [__m256i; 5] {
    let bits = _mm256_set_epi64x(8, 4, 2, 1);
    let mask = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(lanes.into()), bits), bits);
    [0, 1, 2, 3, 4].map(|i| _mm256_blendv_epi8(limbs[i], other[i], mask))
}

/// `sum power + block` in those lanes.
///
/// # Safety
/// 16 bytes are read from each of 4 pointers.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_block(
    sum: [__m256i; 5],
    power: [__m256i; 5],
    blocks: &[*const u8],
    lanes: u32,
) -> [__m256i; 5] {
    // SAFETY: the caller's.
    let load = |i: usize| unsafe { _mm_loadu_si128(blocks[i].cast()) };
    let join =
        |i: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load(i)), load(i + 2));
    let (even, odd) = (join(0), join(1));
    let (low, high) = (_mm256_unpacklo_epi64(even, odd), _mm256_unpackhi_epi64(even, odd));
    let low_26 = |vector| _mm256_and_si256(vector, _mm256_set1_epi64x(LOW_26));
    let middle = _mm256_or_si256(_mm256_srli_epi64::<52>(low), _mm256_slli_epi64::<12>(high));
    let block = [
        low_26(low),
        low_26(_mm256_srli_epi64::<26>(low)),
        low_26(middle),
        low_26(_mm256_srli_epi64::<14>(high)),
        // A block ends with a bit of its own, 2^128.
        _mm256_or_si256(_mm256_srli_epi64::<40>(high), _mm256_set1_epi64x(1 << 24)),
    ];
    let product = multiply(sum, power);
    replace(sum, lanes, [0, 1, 2, 3, 4].map(|i| _mm256_add_epi64(product[i], block[i])))
}

/// Multiplies modulo 2^130 - 5. Limbs of `a` may have 28 bits; those of `b` and of the product exceed
/// theirs by 2^11 at most.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply(a: [__m256i; 5], b: [__m256i; 5]) -> [__m256i; 5] {
    let times_5 = |x| _mm256_add_epi64(x, _mm256_slli_epi64::<2>(x));
    let add = |x, y| _mm256_add_epi64(x, y);
    let [b0, b1, b2, b3, b4] = b;
    // 2^130 = 5 (mod 2^130 - 5).
    let [c1, c2, c3, c4] = [b1, b2, b3, b4].map(times_5);
    let column = |x: [__m256i; 5]| {
        let [p0, p1, p2, p3, p4] = [0, 1, 2, 3, 4].map(|i| _mm256_mul_epu32(a[i], x[i]));
        add(add(add(p0, p1), add(p2, p3)), p4)
    };
    let d0 = column([b0, c4, c3, c2, c1]);
    let d1 = column([b1, b0, c4, c3, c2]);
    let d2 = column([b2, b1, b0, c4, c3]);
    let d3 = column([b3, b2, b1, b0, c4]);
    let d4 = column([b4, b3, b2, b1, b0]);
    let low_26 = |vector| _mm256_and_si256(vector, _mm256_set1_epi64x(LOW_26));
    let carry = |from, to| (low_26(from), add(to, _mm256_srli_epi64::<26>(from)));
    // Two chains at a time: from limbs 0 and 3.
    let (h0, d1) = carry(d0, d1);
    let (h3, d4) = carry(d3, d4);
    let (h1, d2) = carry(d1, d2);
    let (h4, h0) = (low_26(d4), add(h0, times_5(_mm256_srli_epi64::<26>(d4))));
    let (h2, h3) = carry(d2, h3);
    let (h0, h1) = carry(h0, h1);
    let (h3, h4) = carry(h3, h4);
    [h0, h1, h2, h3, h4]
}
