//! Cost of a message beside ring, in one process and in turns.

use std::time::Instant;

use super::*;

/// Messages of a turn, and turns of each.
const MESSAGES: usize = 1600;
const TURNS: usize = 100;

/// `cargo test --release -p tunnel-aead -- --ignored --nocapture sealing_and_opening`
#[test]
#[ignore = "measures"]
fn sealing_and_opening() {
    let keys = keys(&[9; 32]);
    let (_, ring) = &keys[0];
    for (name, key) in &keys[1..] {
        for len in [1420, 1280, 512, 256, 128, 64, 32] {
            for count in [1, 2, 4, 8, 16] {
                compare(&format!("{name}, {count} x {len} B"), [key, ring], len, count);
            }
        }
    }
}

fn compare(what: &str, keys: [&Key; 2], len: usize, count: usize) {
    let mut buffer = vec![0x55; count * (len + TAG)];
    let [mut sealing, mut opening] = [[vec![], vec![]], [vec![], vec![]]];
    let mut first = 0;
    for turn in 0..2 * TURNS {
        // A, B, B, A: what drifts hits both.
        let which = usize::from(matches!(turn % 4, 1 | 2));
        sealing[which].push(time(count, || {
            keys[which].seal_batch(&mut batch(&mut buffer, len, first)[..count]);
            first += 1;
        }));
        // Each text is opened again and again: one made of zeros by ring would not be authentic.
        keys[which].seal_batch(&mut batch(&mut buffer, len, first)[..count]);
        let sealed = buffer.clone();
        let copying = time(count, || buffer.copy_from_slice(std::hint::black_box(&sealed)));
        opening[which].push(
            time(count, || {
                buffer.copy_from_slice(std::hint::black_box(&sealed));
                let opened = keys[which].open_batch(&mut batch(&mut buffer, len, first)[..count]);
                assert_eq!(opened, (1 << count) - 1);
            }) - copying,
        );
    }
    report(&format!("{what}, seal"), sealing);
    report(&format!("{what}, open"), opening);
}

fn batch(buffer: &mut [u8], len: usize, first: u64) -> [Message<'_>; BATCH] {
    let mut messages: [Message<'_>; BATCH] = Default::default();
    for (i, (message, bytes)) in
        messages.iter_mut().zip(buffer.chunks_exact_mut(len + TAG)).enumerate()
    {
        *message = Message { nonce: nonce(first + i as u64), bytes };
    }
    messages
}

/// Nanoseconds for each message of a turn.
fn time(count: usize, mut batch: impl FnMut()) -> f64 {
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let start = Instant::now();
    (0..MESSAGES / count).for_each(|_| batch());
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let elapsed = start.elapsed();
    elapsed.as_nanos() as f64 / MESSAGES as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints both medians, and that of the ratios of neighbours.
fn report(what: &str, [ours, ring]: [Vec<f64>; 2]) {
    let ratio = median(ours.iter().zip(&ring).map(|(ours, ring)| ours / ring).collect());
    let (ours, ring) = (median(ours), median(ring));
    eprintln!("{what}: {ours:.0} ns, ring {ring:.0} ns, ratio {ratio:.3}");
}
