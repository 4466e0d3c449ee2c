//! Datagrams from the underlay, the peer's and strangers'.

use std::time::Duration;

use tunnel::packet::Offload;

use crate::input::Input;
use crate::packet::{assert_within, cut};
use crate::world::{WRITTEN_FROM, WRITTEN_TO, World, elsewhere, peer_address};

/// Between two handshakes, whose bounds count by the second, and between other inputs.
const HANDSHAKE_PAUSE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);
/// Handshakes take a hundred times as long as anything else, so few inputs make one.
const KINDS: u8 = 20;

/// First byte: whose datagrams these are (modulo 20), and above that the traffic class.
#[test]
fn datagram() {
    bolero::check!().with_max_len(4096).for_each(|bytes: &[u8]| {
        let mut input = Input::new(bytes);
        let (kind, tos) = {
            let byte = input.byte();
            (byte % KINDS, byte / KINDS)
        };
        let pause = if matches!(kind, 1 | 2) { HANDSHAKE_PAUSE } else { PAUSE };
        World::after(pause, |world| match kind {
            0 | 3..=7 => strangers(world, &mut input, tos),
            1 => damaged_initiation(world, &mut input),
            2 => damaged_response(world, &mut input),
            _ => the_peers(world, &mut input, tos),
        });
    });
}

/// Any bytes as a train: nothing is written, and the peer's state stays.
fn strangers(world: &mut World, input: &mut Input<'_>, tos: u8) {
    let before = world.engine.peer_state();
    let segment = usize::from(input.word());
    let bytes = input.rest();
    let segment = if segment == 0 { bytes.len() } else { segment };
    let dropped = world.dropped();
    world.receive(elsewhere(), bytes, segment, tos);
    assert_eq!(world.engine.peer_state(), before);
    assert!(world.made.frames.is_empty());
    // Cookies are the only answer there can be.
    assert!(world.made.sent.iter().all(|(to, bytes)| *to == elsewhere() && bytes[0] == 3));
    let datagrams = bytes.chunks(segment.max(1)).count() as u64;
    assert_eq!(world.dropped() - dropped + world.made.sent.len() as u64, datagrams);
}

/// The input is what happened to the peer's initiation: nothing, if it is all zeros.
fn damaged_initiation(world: &mut World, input: &mut Input<'_>) {
    let mut initiation = world.peer.initiate();
    let is_damaged = damage(&mut initiation, input);
    let before = world.engine.peer_state();
    world.receive(elsewhere(), &initiation, initiation.len(), 0);
    assert!(world.made.frames.is_empty() && world.made.sent.len() <= 1);
    if is_damaged {
        assert_eq!(world.engine.peer_state(), before);
    } else if let Some((_, response)) = world.made.sent.pop() {
        if let Some(keepalive) = world.peer.answer(&response) {
            world.receive(elsewhere(), &keepalive, keepalive.len(), 0);
        }
        world.settle();
    }
}

/// The same with the response to the engine's initiation; the genuine one comes after it.
fn damaged_response(world: &mut World, input: &mut Input<'_>) {
    world.engine.initiate(world.now);
    world.engine.handle_timeout(world.now, &mut world.made);
    let (_, initiation) = world.made.sent.pop().unwrap();
    // Under load the peer answers with a cookie.
    let Some(response) = world.peer.answer(&initiation).filter(|r| r[0] == 2) else { return };
    let (before, handshakes) = (world.engine.peer_state(), world.engine.counters().handshakes);
    let mut damaged = response.clone();
    if damage(&mut damaged, input) {
        world.receive(elsewhere(), &damaged, damaged.len(), 0);
        assert_eq!(world.engine.peer_state(), before);
        assert_eq!(world.engine.counters().handshakes, handshakes);
    }
    world.receive(elsewhere(), &response, response.len(), 0);
    world.settle();
}

/// Applies the input to `message`; true if that changed what makes it genuine, which is all but
/// the second MAC at its end.
fn damage(message: &mut Vec<u8>, input: &mut Input<'_>) -> bool {
    let cut = usize::from(input.byte());
    let covered = message.len() - 16;
    message.truncate(message.len().saturating_sub(cut));
    let patch = input.rest();
    message.iter_mut().zip(patch).for_each(|(byte, with)| *byte ^= with);
    cut > 0 || patch.iter().take(covered).any(|byte| *byte != 0)
}

/// Content that the peer sealed, packet or not, each with its length in front: what is written is right,
/// and what is not written is counted.
fn the_peers(world: &mut World, input: &mut Input<'_>, tos: u8) {
    let (mut datagrams, mut keepalives) = (Vec::new(), 0);
    while !input.is_empty() && datagrams.len() < 64 {
        let length = usize::from(input.word());
        let packet = input.take(length);
        keepalives += u64::from(packet.is_empty());
        datagrams.push(world.peer.seal(packet));
    }
    let before = world.engine.counters().clone();
    let dropped = world.dropped();
    for datagram in &mut datagrams.clone() {
        let train = tunnel::Received {
            path: peer_address().into(),
            segment_size: datagram.len(),
            bytes: datagram,
            tos,
        };
        world.engine.handle_datagrams(train, world.now, &mut world.made);
    }
    world.engine.flush(world.now, &mut world.made);
    let mut written = 0;
    for frame in &world.made.frames {
        assert!(frame.len() <= Offload::LEN + 65_535);
        for packet in cut(frame) {
            assert_within(&packet, &WRITTEN_FROM, &WRITTEN_TO);
            written += 1;
        }
    }
    assert!(world.made.sent.is_empty());
    let after = world.engine.counters();
    assert_eq!(after.rx_packets - before.rx_packets, written);
    assert_eq!(world.dropped() - dropped + written + keepalives, datagrams.len() as u64);
}
