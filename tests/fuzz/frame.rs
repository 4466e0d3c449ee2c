//! Frames from the tunnel device: a virtio header and a packet or a train.

use std::time::Duration;

use tunnel::packet::{Gso, Offload};

use crate::packet::{assert_within, transport_error};
use crate::world::{SENT_FROM, SENT_TO, World, peer_address};

/// Between two frames.
const PAUSE: Duration = Duration::from_millis(100);

/// Packets sent are sealed for the peer and between allowed addresses, and the packets of a train
/// have right checksums.
#[test]
fn frame() {
    bolero::check!()
        .with_max_len(4096)
        .for_each(|bytes: &[u8]| World::after(PAUSE, |w| check(w, bytes)));
}

fn check(world: &mut World, frame: &[u8]) {
    let before = (world.engine.counters().tx_packets, world.dropped());
    world.read(frame);
    let sent = std::mem::take(&mut world.made.sent);
    assert!(world.made.frames.is_empty());
    let after = (world.engine.counters().tx_packets, world.dropped());
    assert_eq!(after.0 - before.0, sent.len() as u64);
    match sent.len() {
        0 => assert_eq!(after.1 - before.1, 1, "dropped and not counted"),
        _ => assert_eq!(after.1, before.1, "sent and counted as dropped"),
    }

    for (to, datagram) in sent {
        assert_eq!(to, peer_address());
        let packet = world.peer.open(&datagram).unwrap();
        assert_within(&packet, &SENT_FROM, &SENT_TO);
        assert!(datagram.len() >= packet.len() + 32 && datagram.len() <= packet.len() + 47);
        if is_train(frame) {
            assert_eq!(transport_error(&packet).unwrap_or(0), 0);
        }
    }
}

/// Returns whether the frame is a train, whose packets get new checksums.
fn is_train(frame: &[u8]) -> bool {
    let header = frame.first_chunk().and_then(|header| Offload::parse(header).ok());
    header.is_some_and(|offload| offload.gso != Gso::None)
}
