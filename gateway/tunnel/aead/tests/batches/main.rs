//! Batches of every implementation against ring, and against published vectors.

#![expect(clippy::unwrap_used, reason = "a step that fails is to be seen")]

mod speed;
mod vectors;

use aead::{BATCH, Implementation, Key, Message, TAG, nonce};
use fastrand::Rng;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

/// Bytes before and after a message that nothing may write to.
const MARGIN: usize = 70;

/// Keys of all implementations that this processor supports.
fn keys(bytes: &[u8; 32]) -> Vec<(Implementation, Key)> {
    let all = Implementation::ALL.into_iter();
    all.filter_map(|one| Some((one, Key::with(one, bytes)?))).collect()
}

/// Text and tag, by ring itself.
fn sealed_by_ring(key: &[u8; 32], counter: u64, text: &[u8]) -> Vec<u8> {
    let key = LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, key).unwrap());
    let (nonce, mut bytes) = (Nonce::assume_unique_for_key(nonce(counter)), text.to_vec());
    key.seal_in_place_append_tag(nonce, Aad::empty(), &mut bytes).unwrap();
    bytes
}

/// A message to be, in a buffer with margins.
#[derive(Clone)]
struct Case {
    counter: u64,
    text: Vec<u8>,
    /// Bytes by which its start is off a multiple of 64 in the buffer.
    offset: usize,
}

impl Case {
    fn random(rng: &mut Rng, len: usize) -> Self {
        let mut text = vec![0; len];
        // Runs of zeros and ones make carries that random bytes do not.
        match rng.u8(..4) {
            0 => text.fill(0xff),
            1 => text.fill(0),
            _ => rng.fill(&mut text),
        }
        let edges = [0, u64::from(u32::MAX), 1 << 32, u64::MAX - 1, u64::MAX];
        let counter = if rng.bool() { rng.u64(..) } else { edges[rng.usize(..edges.len())] };
        Self { counter, text, offset: rng.usize(..64) }
    }
}

/// A batch in one buffer, as it would lie in a train.
struct Train {
    buffer: Vec<u8>,
    places: Vec<std::ops::Range<usize>>,
}

impl Train {
    fn new(cases: &[Case], contents: &[Vec<u8>]) -> Self {
        let (mut buffer, mut places) = (Vec::new(), Vec::new());
        for (case, content) in cases.iter().zip(contents) {
            buffer.resize(buffer.len().next_multiple_of(64) + MARGIN + case.offset, 0xa5);
            places.push(buffer.len()..buffer.len() + content.len());
            buffer.extend(content);
        }
        buffer.resize(buffer.len() + MARGIN, 0xa5);
        Self { buffer, places }
    }

    fn with(&mut self, cases: &[Case], run: impl FnOnce(&mut [Message<'_>])) {
        let mut slices = self.buffer.get_disjoint_mut_of(&self.places);
        let mut messages: Vec<Message<'_>> = cases
            .iter()
            .zip(slices.drain(..))
            .map(|(case, bytes)| Message { nonce: nonce(case.counter), bytes })
            .collect();
        run(&mut messages);
    }
}

/// Several ranges that rise and do not overlap.
trait Ranges {
    fn get_disjoint_mut_of(&mut self, ranges: &[std::ops::Range<usize>]) -> Vec<&mut [u8]>;
}

impl Ranges for Vec<u8> {
    fn get_disjoint_mut_of(&mut self, ranges: &[std::ops::Range<usize>]) -> Vec<&mut [u8]> {
        let (mut rest, mut at, mut slices) = (&mut self[..], 0, Vec::new());
        for range in ranges {
            let (slice, after) =
                std::mem::take(&mut rest)[range.start - at..].split_at_mut(range.len());
            slices.push(slice);
            (rest, at) = (after, range.end);
        }
        slices
    }
}

/// Seals and opens a batch with each implementation and compares whole buffers with what ring makes.
fn check(key: &[u8; 32], keys: &[(Implementation, Key)], cases: &[Case], damage: &mut Rng) {
    let texts: Vec<Vec<u8>> =
        cases.iter().map(|case| [&case.text[..], &[0x5a; TAG]].concat()).collect();
    let sealed: Vec<Vec<u8>> =
        cases.iter().map(|case| sealed_by_ring(key, case.counter, &case.text)).collect();
    let expected = Train::new(cases, &sealed);
    for (name, key) in keys {
        let mut train = Train::new(cases, &texts);
        train.with(cases, |messages| key.seal_batch(messages));
        assert!(train.buffer == expected.buffer, "{name} sealed otherwise than ring");
        open(*name, key, cases, &sealed, damage);
    }
}

/// Opens a batch of which some messages have one bit changed.
fn open(name: Implementation, key: &Key, cases: &[Case], sealed: &[Vec<u8>], rng: &mut Rng) {
    let (mut damaged, mut authentic) = (sealed.to_vec(), 0);
    for (i, bytes) in damaged.iter_mut().enumerate() {
        if rng.u8(..4) == 0 {
            let at = rng.usize(..bytes.len());
            bytes[at] ^= 1 << rng.u8(..8);
        } else {
            authentic |= 1 << i;
        }
    }
    let mut train = Train::new(cases, &damaged);
    let mut opened = 0;
    train.with(cases, |messages| opened = key.open_batch(messages));
    assert_eq!(opened, authentic, "{name}");
    for (i, case) in cases.iter().enumerate() {
        let (len, place) = (case.text.len(), train.places[i].clone());
        let (text, tag) = train.buffer[place.clone()].split_at(len);
        assert_eq!(tag, &damaged[i][len..], "{name} leaves the tag");
        if authentic >> i & 1 == 1 {
            assert!(text == case.text, "{name} opened message {i} otherwise than it was");
        } else {
            let is_hidden = text == &damaged[i][..len] || text.iter().all(|byte| *byte == 0);
            assert!(is_hidden, "{name} decrypted what is not authentic");
        }
        // Only margins may be left.
        train.buffer[place].fill(0xa5);
    }
    assert!(train.buffer.iter().all(|byte| *byte == 0xa5), "{name} wrote beside a message");
}

#[test]
fn every_length_alone_equals_ring() {
    let (mut rng, key) = (Rng::with_seed(1), [0x42; 32]);
    let keys = keys(&key);
    for len in (0..=2100).chain([4096, 9000, 65_000, 65_535]) {
        let case = Case::random(&mut rng, len);
        check(&key, &keys, &[case], &mut rng);
    }
}

#[test]
fn batches_of_one_length_equal_ring() {
    let (mut rng, key) = (Rng::with_seed(2), [0x43; 32]);
    let keys = keys(&key);
    for len in (0..=300).chain(1400..=1440) {
        for count in [2, 3, 4, 5, 7, 8, 9, 15, 16] {
            let cases: Vec<Case> = (0..count).map(|_| Case::random(&mut rng, len)).collect();
            check(&key, &keys, &cases, &mut rng);
        }
    }
}

#[test]
fn random_batches_equal_ring() {
    let mut rng = Rng::with_seed(3);
    for _ in 0..400 {
        let mut key = [0; 32];
        rng.fill(&mut key);
        let keys = keys(&key);
        for _ in 0..10 {
            let longest = [1, 20, 100, 300, 1500, 2500][rng.usize(..6)];
            let cases: Vec<Case> = (0..rng.usize(..=BATCH))
                .map(|_| {
                    let len = rng.usize(..=longest);
                    Case::random(&mut rng, len)
                })
                .collect();
            check(&key, &keys, &cases, &mut rng);
        }
    }
}

/// Each bit of the tag and of the text counts, in each place of a batch, and spoils no other message.
#[test]
fn message_with_any_bit_changed_is_refused() {
    const LEN: usize = 36;
    let key = [0x44; 32];
    let cases: Vec<Case> = (0..BATCH as u64)
        .map(|counter| Case { counter, text: vec![counter as u8; LEN], offset: 0 })
        .collect();
    let sealed: Vec<Vec<u8>> =
        cases.iter().map(|case| sealed_by_ring(&key, case.counter, &case.text)).collect();
    for (name, key) in keys(&key) {
        for count in [1, 2, 5, BATCH] {
            for bit in 0..8 * (LEN + TAG) {
                let place = bit % count;
                let mut damaged = sealed[..count].to_vec();
                damaged[place][bit / 8] ^= 1 << (bit % 8);
                let mut opened = 0;
                let mut train = Train::new(&cases, &damaged);
                train.with(&cases[..count], |messages| opened = key.open_batch(messages));
                assert_eq!(opened, ((1 << count) - 1) & !(1 << place), "{name}, bit {bit}");
            }
        }
    }
}

#[test]
fn message_with_another_counter_is_refused() {
    let bytes = [0x45; 32];
    for (name, key) in keys(&bytes) {
        for bit in 0..64 {
            let mut sealed =
                [sealed_by_ring(&bytes, 7, b"text"), sealed_by_ring(&bytes, 8, b"text")];
            let [first, second] = &mut sealed;
            let mut messages = [
                Message { nonce: nonce(7 ^ 1 << bit), bytes: first },
                Message { nonce: nonce(8), bytes: second },
            ];
            assert_eq!(key.open_batch(&mut messages), 0b10, "{name}");
        }
    }
}

/// Sums at the edges of 2^130 - 5, which random text does not make: `r` and `s` come from the key, so
/// only the text is left to choose; all ones and all zeros of every length up to some blocks.
#[test]
fn texts_of_ones_and_zeros_equal_ring() {
    let mut rng = Rng::with_seed(4);
    for seed in 0..64u8 {
        let key = [seed.wrapping_mul(37); 32];
        let keys = keys(&key);
        for len in 0..=260 {
            let [ones, zeros] = [0xff, 0].map(|byte| Case {
                counter: u64::from(seed),
                text: vec![byte; len],
                offset: 0,
            });
            check(&key, &keys, &[ones, zeros], &mut rng);
        }
    }
}

#[test]
#[should_panic(expected = "a batch has at most 16 messages")]
fn more_messages_than_a_batch_are_refused() {
    let mut messages: Vec<Message<'_>> = (0..=BATCH).map(|_| Message::default()).collect();
    Key::new(&[0; 32]).seal_batch(&mut messages);
}

#[test]
fn message_without_room_for_a_tag_is_refused() {
    for (name, key) in keys(&[0; 32]) {
        let sealed = std::panic::catch_unwind(|| {
            key.seal_batch(&mut [Message { nonce: nonce(0), bytes: &mut [0; TAG - 1] }]);
        });
        assert!(sealed.is_err(), "{name}");
    }
}

/// `EXECUTIONS=100000000 cargo test --release -p tunnel-aead -- --ignored --nocapture many_random_batches`
#[test]
#[ignore = "needs EXECUTIONS, a number"]
#[expect(clippy::disallowed_methods, reason = "the number is the caller's")]
fn many_random_batches_equal_ring() {
    let executions: u64 = std::env::var("EXECUTIONS").unwrap().parse().unwrap();
    let seed = std::env::var("SEED").map_or(5, |seed| seed.parse().unwrap());
    let (mut rng, mut done) = (Rng::with_seed(seed), 0);
    while done < executions {
        let mut key = [0; 32];
        rng.fill(&mut key);
        let keys = keys(&key);
        for _ in 0..100 {
            let longest = [16, 64, 100, 300, 1500][rng.usize(..5)];
            let cases: Vec<Case> = (0..rng.usize(1..=BATCH))
                .map(|_| {
                    let len = rng.usize(..=longest);
                    Case::random(&mut rng, len)
                })
                .collect();
            check(&key, &keys, &cases, &mut rng);
            done += cases.len() as u64;
        }
    }
    eprintln!("{done} messages");
}
