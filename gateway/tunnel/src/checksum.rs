//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! Sums are one's complement sums of big-endian 16-bit words, held in a `u64` that is congruent to
//! them modulo 0xffff: they may be added to each other and to header fields with `+`, and are
//! reduced by [`fold`] at the end. 0 and 0xffff are the same number there; only a sum over nothing
//! but zeros folds to 0.

/// Sum of `bytes`, at most 0xffff. A last odd byte counts as if a zero followed, so only the last
/// of several pieces that are summed one by one may be of odd length.
#[inline]
pub fn sum(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= WIDE && std::arch::is_x86_feature_detected!("avx2") {
        #[allow(unsafe_code)]
        // SAFETY: the processor was just asked whether it has AVX2.
        return unsafe { sum_avx2(bytes) };
    }
    sum_lanes(bytes)
}

/// Reduces a sum to 16 bits, carries added back in.
#[inline]
pub const fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1) that TCP, UDP and ICMPv6
/// checksums cover. `addresses` are source and destination as they stand in the IP header (8 or 32
/// bytes), `length` is that of the transport header and its payload in bytes.
#[inline]
pub fn pseudo_header(addresses: &[u8], protocol: u8, length: usize) -> u64 {
    sum_lanes(addresses) + u64::from(protocol) + length as u64
}

/// Completes a partial checksum: `packet[start..]` is summed, the folded sum of the pseudo-header
/// included that stands at `start + offset`, and the complement is written there. 0 is written as
/// 0xffff, as UDP wants it and Linux does for all protocols.
///
/// Returns false, and changes nothing, if the field lies outside of the packet.
#[must_use]
pub fn complete(packet: &mut [u8], start: usize, offset: usize) -> bool {
    let field = start.saturating_add(offset);
    if field.saturating_add(2) > packet.len() {
        return false;
    }
    let value = !fold(sum(&packet[start..]));
    let value = if value == 0 { 0xffff } else { value };
    packet[field..field + 2].copy_from_slice(&value.to_be_bytes());
    true
}

/// Difference that a change of some covered words makes to their sum, modulo 0xffff.
///
/// Changes add up, so both addresses of a packet make one `Change`, applied once to every checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change(u16);

impl Change {
    pub const NONE: Self = Self(0);

    /// `old` becomes `new`; both of the same even length, at even offsets of what is summed.
    pub fn of_bytes(old: &[u8], new: &[u8]) -> Self {
        Self::of_sums(sum_lanes(old), sum_lanes(new))
    }

    /// A word becomes another, at an even offset of what is summed.
    #[inline]
    pub const fn of_word(old: u16, new: u16) -> Self {
        Self::of_sums(old as u64, new as u64)
    }

    const fn of_sums(old: u64, new: u64) -> Self {
        Self::canonical(add(fold(new), !fold(old)))
    }

    /// 0xffff means no change just as 0 does; with 0 alone `is_none` is one comparison, and a
    /// checksum that need not change keeps its bits.
    const fn canonical(folded: u16) -> Self {
        if folded == 0xffff { Self::NONE } else { Self(folded) }
    }

    #[inline]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Both changes together.
    #[inline]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self::canonical(add(self.0, other.0))
    }

    /// The change that takes this one back.
    #[inline]
    #[must_use]
    pub const fn inverse(self) -> Self {
        Self::canonical(!self.0)
    }

    /// The same change one byte further, where high and low bytes of the words swap roles
    /// (RFC 1071 section 2 B).
    #[inline]
    #[must_use]
    pub const fn at_odd_offset(self) -> Self {
        Self(self.0.swap_bytes())
    }

    /// The new value of a complete checksum (RFC 1624 equation 3).
    #[inline]
    #[must_use]
    pub const fn apply(self, checksum: u16) -> u16 {
        !add(!checksum, self.0)
    }

    /// The new value of a partial checksum: the folded sum of the pseudo-header, not complemented,
    /// as virtio's NEEDS_CSUM has it.
    #[inline]
    #[must_use]
    pub const fn apply_partial(self, partial: u16) -> u16 {
        add(partial, self.0)
    }
}

/// One's complement addition. 0 comes out only if both are 0.
#[inline]
const fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + carry as u16
}

/// Bytes that the wide loop takes at a time.
const WIDE: usize = 64;

/// The same loop, compiled for AVX2: half the time for packets of 1,420 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(bytes: &[u8]) -> u64 {
    sum_lanes(bytes)
}

/// Sums in the machine's own byte order, which only swaps the bytes of the result (RFC 1071
/// section 2 B). Independent 64-bit lanes cannot overflow below 2^32 words each, and compilers
/// turn them into vector registers.
#[inline(always)]
fn sum_lanes(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; WIDE / 4];
    let (wide, rest) = bytes.as_chunks::<WIDE>();
    for chunk in wide {
        let (words, _) = chunk.as_chunks::<4>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane += u64::from(u32::from_ne_bytes(*word));
        }
    }
    let mut total: u64 = lanes.iter().sum();
    let (words, rest) = rest.as_chunks::<4>();
    for word in words {
        total += u64::from(u32::from_ne_bytes(*word));
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total += u64::from(u32::from_ne_bytes(last));
    u64::from(u16::from_be(fold(total)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn the_example_of_rfc_1071_adds_up() {
        assert_eq!(fold(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])), 0xddf2);
    }

    #[test]
    fn the_example_of_rfc_1624_comes_out_as_zero() {
        assert_eq!(Change::of_word(0x5555, 0x3285).apply(0xdd2f), 0x0000);
    }

    #[test]
    fn checksum_is_right_for_every_length() {
        let bytes: Vec<u8> = (0..9001u32).map(|i| (i * 7 + (i >> 3)) as u8).collect();
        for length in (0..600).chain((600..9001).step_by(97)) {
            let piece = &bytes[9001 - length..];
            assert_eq!(fold(sum(piece)), naive(piece), "{length} bytes");
            assert_eq!(fold(sum_lanes(piece)), naive(piece), "{length} bytes, portable");
        }
    }

    #[test]
    fn a_full_buffer_of_ones_does_not_overflow() {
        assert_eq!(fold(sum(&[0xff; 65_536])), 0xffff);
        assert_eq!(fold(u64::MAX), 0xffff);
    }

    #[test]
    fn completed_checksum_of_zero_is_written_as_ones() {
        // The words add up to 0xffff with the partial sum in place.
        let mut packet = [0x12, 0x34, 0xed, 0xcb, 0x00, 0x00];
        assert!(complete(&mut packet, 0, 4));
        assert_eq!(packet, [0x12, 0x34, 0xed, 0xcb, 0xff, 0xff]);
    }

    #[test]
    fn an_equal_sum_is_no_change() {
        let change = Change::of_bytes(&[10, 0, 0, 1], &[0, 1, 10, 0]);
        assert!(change.is_none());
        assert_eq!((change.apply(0xffff), change.apply(0)), (0xffff, 0));
    }

    #[test]
    fn a_checksum_field_outside_of_the_packet_is_refused() {
        let mut packet = [1; 20];
        assert!(!complete(&mut packet, 10, 9) && !complete(&mut packet, usize::MAX, 6));
        assert_eq!(packet, [1; 20]);
        assert!(complete(&mut packet, 10, 8));
    }

    proptest! {
        #[test]
        fn pieces_of_even_length_add_up(bytes in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..200) {
            let at = (at * 2).min(bytes.len() & !1);
            let (a, b) = bytes.split_at(at);
            prop_assert_eq!(fold(sum(a) + sum(b)) % 0xffff, naive(&bytes) % 0xffff);
        }

        #[test]
        fn an_update_equals_a_new_sum(
            mut bytes in prop::collection::vec(any::<u8>(), 8..100),
            new in any::<[u8; 4]>(),
            at in 0usize..100,
        ) {
            bytes[0] = 1; // A sum of nothing but zeros has no checksum that a sender would write.
            let at = 1 + at % (bytes.len() - 4);
            let before = naive(&bytes);
            let change = Change::of_bytes(&bytes[at..at + 4], &new);
            let change = if at % 2 == 1 { change.at_odd_offset() } else { change };
            bytes[at..at + 4].copy_from_slice(&new);
            prop_assert_eq!(change.apply(!before), !naive(&bytes));
            prop_assert_eq!(change.apply_partial(before), naive(&bytes));
            prop_assert_eq!(change.inverse().apply(!naive(&bytes)), !before);
            prop_assert!(change.and(change.inverse()).is_none());
        }

        #[test]
        fn a_completed_checksum_verifies(mut bytes in prop::collection::vec(any::<u8>(), 8..2000)) {
            let pseudo = u16::from_be_bytes([bytes[6], bytes[7]]);
            prop_assert!(complete(&mut bytes, 2, 4));
            prop_assert_ne!(&bytes[6..8], &[0, 0]);
            let total = fold(u64::from(naive(&bytes[2..])) + u64::from(pseudo));
            prop_assert_eq!(total, 0xffff);
        }
    }
}
