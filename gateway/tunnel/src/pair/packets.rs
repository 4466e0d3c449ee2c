//! Single packets and trains on their way through both engines.

use super::*;

#[test]
fn authentic_content_that_is_no_ip_packet_is_life() {
    let mut pair = Pair::connected();
    pair.now += Duration::from_secs(5);
    let mut datagram = [0; 64 + 32];
    let prepared = pair.engines[0].peer.prepare((&[0x50; 64], 64), &mut datagram, pair.now);
    let (len, sealer) = prepared.unwrap();
    sealer.encrypt(&mut datagram[..len], len);
    pair.deliver(1, pair.addresses[0], &datagram[..len]);
    assert_eq!(pair.dropped(1, DropReason::Malformed), 1);
    assert_eq!(pair.engines[1].peer_state().last_authentic, Some(pair.now));
}

#[test]
fn marks_of_congestion_pass_both_ways() {
    let mut pair = Pair::connected();
    let mut packet = udp(b"ect");
    packet[1] = 2;
    pair.feed(0, &packet);
    let mut sent = pair.made[0].sent.pop_back().unwrap();
    assert_eq!(sent.tos, 2, "the outer field is a copy of the inner one");
    let train = Received {
        path: pair.addresses[0].into(),
        segment_size: sent.bytes.len(),
        bytes: &mut sent.bytes,
        tos: 3,
    };
    pair.engines[1].handle_datagrams(train, pair.now, &mut pair.made[1]);
    pair.engines[1].flush(pair.now, &mut pair.made[1]);
    assert_eq!(pair.made[1].frames.last().unwrap()[Offload::LEN + 1] & 3, 3);
}

#[test]
fn oversized_packet_is_dropped_and_counted() {
    let mut pair = Pair::connected();
    pair.feed(0, &udp(&vec![0; 65_500]));
    let counters = pair.engines[0].counters();
    assert_eq!(counters.dropped_outbound[DropReason::Oversized.index()], 1);
    assert!(pair.passes(0));
}

#[test]
fn packets_are_padded_to_16_within_the_mtu() {
    let mut pair = Pair::connected();
    for (payload, sealed) in [(1, 32), (4, 32), (5, 48), (1420 - 28, 1420), (1410 - 28, 1420)] {
        pair.feed(0, &udp(&vec![9; payload]));
        assert_eq!(pair.made[0].sent.pop_back().unwrap().bytes.len(), sealed + 32);
    }
}

#[test]
fn padding_is_zero_whatever_was_sent_before() {
    let mut pair = Pair::connected();
    pair.feed(0, &udp(&[0xee; 1385]));
    pair.made[0].sent.clear();
    let packet = udp(&[9; 69]);
    pair.feed(0, &packet);
    let mut opened = pair.made[0].sent.pop_back().unwrap().bytes;
    let segment_size = opened.len();
    pair.engines[1].peer.open(&mut opened, segment_size, pair.now);
    assert_eq!(opened[16..][..97], packet);
    assert_eq!(opened[16..][97..112], [0; 15]);
}

/// Packets that are held back while the peer goes on to a new key are sealed with the one whose index
/// they have.
#[test]
fn packets_before_a_handshake_keep_their_key() {
    let mut pair = Pair::connected();
    assert!(pair.passes(0) && pair.passes(1));
    let hold_back = |pair: &mut Pair, payload: &[u8]| {
        let mut frame = [&Offload::NONE.write()[..], &udp(payload)].concat();
        pair.engines[1].handle_frame(&mut frame, pair.now, &mut pair.made[1]);
    };
    pair.now += Duration::from_secs(10);
    pair.engines[0].initiate(pair.now);
    pair.tick();
    let initiation = pair.made[0].sent.pop_front().unwrap();
    pair.deliver(1, pair.addresses[0], &initiation.bytes);
    let response = pair.made[1].sent.pop_front().unwrap();
    pair.deliver(0, pair.addresses[1], &response.bytes);
    hold_back(&mut pair, b"first");
    hold_back(&mut pair, b"other");
    assert_eq!(pair.made[1].sent.len(), 0, "they wait for their train");
    let mut confirmation = pair.made[0].sent.pop_front().unwrap().bytes;
    let (remote, segment_size) = (pair.addresses[0], confirmation.len());
    let train = Received { path: remote.into(), segment_size, bytes: &mut confirmation, tos: 0 };
    pair.engines[1].handle_datagrams(train, pair.now, &mut pair.made[1]);
    hold_back(&mut pair, b"third");
    pair.engines[1].flush(pair.now, &mut pair.made[1]);
    let index = |sent: &Sent| sent.bytes[4..8].to_vec();
    let indices: BTreeSet<Vec<u8>> = pair.made[1].sent.iter().map(index).collect();
    assert_eq!(indices.len(), 2, "of either key");
    let before = pair.made[0].frames.len();
    pair.run(|_, _| true);
    let payload = |frame: &Vec<u8>| frame[Offload::LEN + 28];
    let payloads: Vec<u8> = pair.made[0].frames[before..].iter().map(payload).collect();
    assert_eq!(payloads, *b"fot");
}

/// A train of more datagrams than a batch, some of which are no data of the key in use: each has its own
/// fate, and the others keep their order.
#[test]
fn datagrams_of_a_train_are_opened_one_by_one() {
    let mut pair = Pair::connected();
    (0..40u8).for_each(|i| pair.feed(0, &udp(&[i; 100])));
    let sent = pair.made[0].sent.drain(..).map(|sent| sent.bytes);
    let mut datagrams: Vec<Vec<u8>> = sent.collect();
    datagrams[3][40] ^= 1;
    datagrams[5][0] = 9;
    datagrams[20][4] ^= 1;
    datagrams[31] = datagrams[30].clone();
    let segment_size = datagrams[0].len();
    let last = datagrams[39].len() - 1;
    datagrams[39].truncate(last);
    let (remote, mut bytes) = (pair.addresses[0], datagrams.concat());
    let train = Received { path: remote.into(), segment_size, bytes: &mut bytes, tos: 0 };
    pair.engines[1].handle_datagrams(train, pair.now, &mut pair.made[1]);
    pair.engines[1].flush(pair.now, &mut pair.made[1]);
    let reasons = [
        (DropReason::DecryptFailed, 2),
        (DropReason::Malformed, 1),
        (DropReason::NoSession, 1),
        (DropReason::Replay, 1),
    ];
    for (reason, count) in reasons {
        assert_eq!(pair.dropped(1, reason), count, "{reason:?}");
    }
    let payload =
        |frame: &Vec<u8>| frame[Offload::LEN + 28..].iter().step_by(100).copied().collect();
    let got: Vec<u8> =
        pair.made[1].frames.iter().flat_map(|frame| -> Vec<u8> { payload(frame) }).collect();
    let expected: Vec<u8> = (0..39).filter(|i| ![3, 5, 20, 31].contains(i)).collect();
    assert_eq!(got, expected);
}

#[test]
fn packets_of_two_ecn_classes_are_no_train() {
    let mut pair = Pair::connected();
    for ecn in [2, 0, 0] {
        let mut packet = udp(&[9; 100]);
        packet[1] = ecn;
        let mut frame = [&Offload::NONE.write()[..], &packet].concat();
        pair.engines[0].handle_frame(&mut frame, pair.now, &mut pair.made[0]);
    }
    let before = pair.engines[0].counters().trains_sent;
    pair.engines[0].flush(pair.now, &mut pair.made[0]);
    let classes: Vec<u8> = pair.made[0].sent.iter().map(|sent| sent.tos).collect();
    assert_eq!(classes, [2, 0, 0]);
    assert_eq!(pair.engines[0].counters().trains_sent, before + 1, "the last two");
}
