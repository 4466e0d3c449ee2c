//! ChaCha20 with 16 blocks side by side, Poly1305 with 8 or 16 lanes in radix 2^44.
#![allow(unsafe_code, reason = "instructions, and memory that they read and write")]

use std::arch::x86_64::*;

use crate::batch::{self, BLOCK, CONSTANTS, LANES, Pass, TagKeys, Vectors, Words};
use crate::poly1305::{self, Number, Spread};
use crate::{BATCH, Message, TAG};

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
pub(crate) fn seal(key: &Words, messages: &mut [Message<'_>]) {
    batch::seal::<Avx512>(key, messages);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
pub(crate) fn open(key: &Words, messages: &mut [Message<'_>]) -> u32 {
    batch::open::<Avx512>(key, messages)
}

/// Only for processors with the instructions: `seal` and `open` above use it.
pub(crate) struct Avx512;

impl Vectors for Avx512 {
    #[inline(always)]
    fn keystream(key: &Words, pass: &Pass, blocks: &mut [[u8; BLOCK]; LANES]) {
        // SAFETY: the callers of `seal` and `open` have checked that the processor has the instructions.
        unsafe {
            match pass.count <= 16 {
                true => compute::<1>(key, pass, blocks),
                false => compute::<2>(key, pass, blocks),
            }
        }
    }

    #[inline(always)]
    fn xor(text: &mut [u8], block: &[u8; BLOCK]) {
        // SAFETY: as above.
        unsafe { xor(text, block) }
    }

    #[inline(always)]
    fn tags(keys: &TagKeys, messages: &[Message<'_>]) -> [[u8; TAG]; BATCH] {
        // SAFETY: as above.
        unsafe { tags(keys, messages) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn load<T>(values: &[T; BLOCK]) -> __m512i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn load_u32(values: &[u32; 16]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn load_u64(values: &[u64; 8]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn store_u64(vector: __m512i) -> [u64; 8] {
    let mut values = [0; 8];
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_storeu_si512(values.as_mut_ptr().cast(), vector) };
    values
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn xor(text: &mut [u8], block: &[u8; BLOCK]) {
    let stream = load(block);
    if let Ok(text) = <&mut [u8; BLOCK]>::try_from(&mut *text) {
        let mixed = _mm512_xor_si512(load(text), stream);
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_storeu_si512(text.as_mut_ptr().cast(), mixed) };
        return;
    }
    let mask = (1 << text.len()) - 1;
    // SAFETY: the mask has as many bits as the text has bytes, fewer than 64; only these are accessed.
    unsafe {
        let mixed = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, text.as_ptr().cast()), stream);
        _mm512_mask_storeu_epi8(text.as_mut_ptr().cast(), mask, mixed);
    }
}

/// Computes the first `16 N` blocks of a pass.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn compute<const N: usize>(key: &Words, pass: &Pass, blocks: &mut [[u8; BLOCK]; LANES]) {
    let mut start = [[_mm512_setzero_si512(); 16]; N];
    for (i, start) in start.iter_mut().enumerate() {
        for (word, value) in start.iter_mut().zip(CONSTANTS.iter().chain(key)) {
            *word = _mm512_set1_epi32(*value as i32);
        }
        for (word, values) in start[12..].iter_mut().zip(&pass.words) {
            *word = load_u32(&values[i]);
        }
    }
    let mut states = start;
    for _ in 0..10 {
        double_round(&mut states);
    }
    for (i, (mut state, start)) in states.into_iter().zip(start).enumerate() {
        for (word, start) in state.iter_mut().zip(start) {
            *word = _mm512_add_epi32(*word, start);
        }
        for (block, vector) in blocks[16 * i..].iter_mut().zip(transpose(state)) {
            // SAFETY: the array has 64 bytes.
            unsafe { _mm512_storeu_si512(block.as_mut_ptr().cast(), vector) };
        }
    }
}

/// `a += b; d ^= a; d <<<= n` for the words of each column or diagonal.
macro_rules! steps {
    ($v:ident <<< $n:literal: $($a:literal $b:literal $d:literal),*) => {
        $($v[$a] = _mm512_add_epi32($v[$a], $v[$b]);)*
        $($v[$d] = _mm512_rol_epi32::<$n>(_mm512_xor_si512($v[$d], $v[$a]));)*
    };
}

/// A round of columns and one of diagonals, of several states in turns: one alone would wait for its
/// own results most of the time.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn double_round<const N: usize>(states: &mut [[__m512i; 16]; N]) {
    macro_rules! all {
        ($n:literal: $($words:tt)*) => {
            for v in states.iter_mut() {
                steps!(v <<< $n: $($words)*);
            }
        };
    }
    all!(16: 0 4 12, 1 5 13, 2 6 14, 3 7 15);
    all!(12: 8 12 4, 9 13 5, 10 14 6, 11 15 7);
    all!(8: 0 4 12, 1 5 13, 2 6 14, 3 7 15);
    all!(7: 8 12 4, 9 13 5, 10 14 6, 11 15 7);
    all!(16: 0 5 15, 1 6 12, 2 7 13, 3 4 14);
    all!(12: 10 15 5, 11 12 6, 8 13 7, 9 14 4);
    all!(8: 0 5 15, 1 6 12, 2 7 13, 3 4 14);
    all!(7: 10 15 5, 11 12 6, 8 13 7, 9 14 4);
}

/// Turns words of all blocks into blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn transpose(v: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = v;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    // Vector 4 i + j: in each quarter q, words 4 i to 4 i + 3 of block 4 q + j.
    let mut fours = v;
    for i in 0..4 {
        for j in 0..2 {
            let (a, b) = (pairs[4 * i + j], pairs[4 * i + j + 2]);
            fours[4 * i + 2 * j] = _mm512_unpacklo_epi64(a, b);
            fours[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    let mut blocks = v;
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let even_ab = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
        let even_cd = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
        let odd_ab = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
        let odd_cd = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
        blocks[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even_ab, even_cd);
        blocks[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd_ab, odd_cd);
        blocks[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even_ab, even_cd);
        blocks[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd_ab, odd_cd);
    }
    blocks
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn tags(keys: &TagKeys, messages: &[Message<'_>]) -> [[u8; TAG]; BATCH] {
    let spread = Spread::new(messages);
    match spread.lanes() <= 8 {
        true => poly1305::tags::<Limbs, 1>(&spread, keys, messages),
        false => poly1305::tags::<Limbs, 2>(&spread, keys, messages),
    }
}

/// Limbs of 44, 44 and 42 bits, and a few more, in each of 8 lanes.
#[derive(Clone, Copy)]
struct Limbs([__m512i; 3]);

impl Number for Limbs {
    const LANES: usize = 8;

    #[inline(always)]
    fn load(values: &[u128]) -> Self {
        let limb = |shift: u32| {
            let value = |i: usize| (values[i] >> shift) as u64 & LOW_44 as u64;
            // SAFETY: only `tags` uses this type, which has the instructions.
            unsafe { load_u64(&std::array::from_fn(value)) }
        };
        Self([limb(0), limb(44), limb(88)])
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { multiply(self.0, other.0) })
    }

    #[inline(always)]
    fn replace(self, lanes: u32, other: Self) -> Self {
        // SAFETY: as above.
        let limb = |i| unsafe { _mm512_mask_mov_epi64(self.0[i], lanes as u8, other.0[i]) };
        Self([0, 1, 2].map(limb))
    }

    #[inline(always)]
    unsafe fn add_block(self, power: Self, blocks: &[*const u8], lanes: u32) -> Self {
        // SAFETY: as above, and the caller's.
        Self(unsafe { add_block(self.0, power.0, blocks, lanes as u8) })
    }

    #[inline(always)]
    fn store(self, limbs: &mut [[u64; 3]]) {
        for (i, limb) in self.0.into_iter().enumerate() {
            // SAFETY: as above.
            let values = unsafe { store_u64(limb) };
            limbs.iter_mut().zip(values).for_each(|(limbs, value)| limbs[i] = value);
        }
    }
}

const LOW_44: i64 = (1 << 44) - 1;
const LOW_42: i64 = (1 << 42) - 1;

/// `sum power + block` in those lanes.
///
/// # Safety
/// 16 bytes are read from each of 8 pointers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
unsafe fn add_block(
    sum: [__m512i; 3],
    power: [__m512i; 3],
    blocks: &[*const u8],
    lanes: __mmask8,
) -> [__m512i; 3] {
    // SAFETY: the caller's.
    let load = |i: usize| unsafe { _mm_loadu_si128(blocks[i].cast()) };
    let join = |i: usize| {
        let vector = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(load(i)), load(i + 2));
        let vector = _mm512_inserti32x4::<2>(vector, load(i + 4));
        _mm512_inserti32x4::<3>(vector, load(i + 6))
    };
    let (even, odd) = (join(0), join(1));
    let (low, high) = (_mm512_unpacklo_epi64(even, odd), _mm512_unpackhi_epi64(even, odd));
    let low_44 = _mm512_set1_epi64(LOW_44);
    let middle = _mm512_or_si512(_mm512_srli_epi64::<44>(low), _mm512_slli_epi64::<20>(high));
    let block = [
        _mm512_and_si512(low, low_44),
        _mm512_and_si512(middle, low_44),
        // A block ends with a bit of its own, 2^128.
        _mm512_or_si512(_mm512_srli_epi64::<24>(high), _mm512_set1_epi64(1 << 40)),
    ];
    let product = multiply(sum, power);
    [0, 1, 2].map(|i| _mm512_mask_add_epi64(sum[i], lanes, product[i], block[i]))
}

/// Multiplies modulo 2^130 - 5. Limbs of `a` may have 46 bits; those of `b` and of the product exceed
/// theirs by 2^11 at most.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512ifma")]
fn multiply(a: [__m512i; 3], b: [__m512i; 3]) -> [__m512i; 3] {
    // 2^132 = 20 (mod 2^130 - 5).
    let times_20 = |b| _mm512_add_epi64(_mm512_slli_epi64::<4>(b), _mm512_slli_epi64::<2>(b));
    let (c1, c2) = (times_20(b[1]), times_20(b[2]));
    let zero = _mm512_setzero_si512();
    let low = |x: [__m512i; 3]| {
        let sum = _mm512_madd52lo_epu64(zero, a[0], x[0]);
        _mm512_madd52lo_epu64(_mm512_madd52lo_epu64(sum, a[1], x[1]), a[2], x[2])
    };
    let high = |x: [__m512i; 3]| {
        let sum = _mm512_madd52hi_epu64(zero, a[0], x[0]);
        _mm512_madd52hi_epu64(_mm512_madd52hi_epu64(sum, a[1], x[1]), a[2], x[2])
    };
    let columns = [[b[0], c2, c1], [b[1], b[0], c2], [b[2], b[1], b[0]]];
    let ([d0, d1, d2], [e0, e1, e2]) = (columns.map(low), columns.map(high));
    // The upper halves are worth 2^52 each: 2^8 of the next limb, and 2^10 beyond the last.
    let d1 = _mm512_add_epi64(d1, _mm512_slli_epi64::<8>(e0));
    let d2 = _mm512_add_epi64(d2, _mm512_slli_epi64::<8>(e1));
    let (low_44, low_42) = (_mm512_set1_epi64(LOW_44), _mm512_set1_epi64(LOW_42));
    let over = _mm512_add_epi64(_mm512_srli_epi64::<42>(d2), _mm512_slli_epi64::<10>(e2));
    let over = _mm512_add_epi64(over, _mm512_slli_epi64::<2>(over));
    let h0 = _mm512_add_epi64(_mm512_and_si512(d0, low_44), over);
    let h1 = _mm512_add_epi64(_mm512_and_si512(d1, low_44), _mm512_srli_epi64::<44>(d0));
    let h2 = _mm512_add_epi64(_mm512_and_si512(d2, low_42), _mm512_srli_epi64::<44>(d1));
    let h1 = _mm512_add_epi64(h1, _mm512_srli_epi64::<44>(h0));
    [_mm512_and_si512(h0, low_44), h1, h2]
}
