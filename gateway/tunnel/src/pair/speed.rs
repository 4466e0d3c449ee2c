//! Cost of a train of 45 segments through two engines, beside that with ring alone.

use std::hint::black_box;

use super::*;

/// Trains of a turn, and turns of each.
const TRAINS: u32 = 40;
const TURNS: usize = 200;

/// Output in memory that was there before.
#[derive(Default)]
struct Sunk {
    sent: Vec<(Vec<u8>, usize)>,
    used: usize,
}

impl Wire for Sunk {
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        if self.sent.len() == self.used {
            self.sent.push(Default::default());
        }
        let (bytes, segment_size) = &mut self.sent[self.used];
        bytes.clear();
        bytes.extend_from_slice(train.bytes);
        *segment_size = train.segment_size;
        self.used += 1;
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        black_box(frame);
        Ok(())
    }
}

/// `cargo test --release -p tunnel -- --ignored --nocapture trains_beside_ring`
#[test]
#[ignore = "measures"]
fn trains_beside_ring() {
    // Keys that are made from now on are ring's; the pair's are the fastest.
    let fast = Pair::connected();
    aead::Implementation::Ring.force().unwrap();
    let mut pairs = [fast, Pair::connected()];
    for (what, payload, segments) in
        [("45 x 1420", 1368, 45), ("2 x 1420", 1368, 2), ("45 x 100", 48, 45)]
    {
        let frame = tcp_train(payload, segments);
        let mut times = [(); 2].map(|()| [vec![], vec![]]);
        for turn in 0..2 * TURNS {
            // A, B, B, A: what drifts hits both.
            let which = usize::from(matches!(turn % 4, 1 | 2));
            let [sealing, opening] = turn_of(&mut pairs[which], &frame);
            times[which][0].push(sealing / f64::from(segments));
            times[which][1].push(opening / f64::from(segments));
        }
        let [[fast_sealing, fast_opening], [sealing, opening]] = times;
        report(&format!("{what} B, out"), fast_sealing, sealing);
        report(&format!("{what} B, in"), fast_opening, opening);
    }
}

/// A train of TCP as the TUN hands it over.
fn tcp_train(payload: u16, segments: u32) -> Vec<u8> {
    let data = vec![0x5a; usize::from(payload) * segments as usize];
    let mut packet = Vec::new();
    let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 1, 0, 2], 64);
    let options = [etherparse::TcpOptionElement::Timestamp(1, 2)];
    builder.tcp(1, 2, 3, 4).ack(5).options(&options).unwrap().write(&mut packet, &data).unwrap();
    let offload = Offload {
        needs_checksum: true,
        gso: crate::packet::Gso::TcpV4,
        gso_size: payload,
        checksum_start: 20,
        checksum_offset: 16,
        ..Offload::NONE
    };
    [&offload.write()[..], &packet].concat()
}

/// Nanoseconds for each train, out and in.
fn turn_of(pair: &mut Pair, frame: &[u8]) -> [f64; 2] {
    let mut sunk = Sunk::default();
    let mut buffer = frame.to_vec();
    let (mut sealing, mut opening) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..TRAINS {
        buffer.copy_from_slice(frame);
        sunk.used = 0;
        let start = time();
        pair.engines[0].handle_frame(&mut buffer, pair.now, &mut sunk);
        pair.engines[0].flush(pair.now, &mut sunk);
        sealing += time() - start;
        let mut sent = std::mem::take(&mut sunk.sent);
        let start = time();
        for (bytes, segment_size) in &mut sent[..sunk.used] {
            let (remote, segment_size) = (pair.addresses[0], *segment_size);
            let train = Received { path: remote.into(), bytes, segment_size, tos: 0 };
            pair.engines[1].handle_datagrams(train, pair.now, &mut sunk);
        }
        pair.engines[1].flush(pair.now, &mut sunk);
        opening += time() - start;
        sunk.sent = sent;
    }
    [sealing, opening].map(|time| time.as_nanos() as f64 / f64::from(TRAINS))
}

#[expect(clippy::disallowed_methods, reason = "it measures")]
fn time() -> Instant {
    Instant::now()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints both medians, and that of the ratios of neighbours.
fn report(what: &str, ours: Vec<f64>, ring: Vec<f64>) {
    let ratio = median(ours.iter().zip(&ring).map(|(ours, ring)| ours / ring).collect());
    let (ours, ring) = (median(ours), median(ring));
    eprintln!("{what}: {ours:.0} ns a packet, with ring {ring:.0} ns, ratio {ratio:.3}");
}
