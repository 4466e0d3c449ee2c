//! Initiations, responses and cookies: late, stale, forged, recorded.

use blake2::digest::consts::U16;
use blake2::digest::{KeyInit, Mac};
use blake2::{Blake2s256, Blake2sMac, Digest};

use super::*;

/// First, inner and last bytes of points that agree on nothing (<https://cr.yp.to/ecdh.html#validate>).
const LOW_ORDER: [(u8, u8, u8); 5] =
    [(0, 0, 0), (1, 0, 0), (0xec, 0xff, 0x7f), (0xed, 0xff, 0x7f), (0xee, 0xff, 0x7f)];

/// Does not deliver engine 0's next initiation.
fn initiation(pair: &mut Pair) -> Vec<u8> {
    pair.engines[0].initiate(pair.now);
    pair.tick();
    pair.made[0].sent.pop_back().unwrap().bytes
}

/// Returns engine 1's answer to it.
fn response(pair: &mut Pair, initiation: &[u8]) -> Vec<u8> {
    pair.deliver(1, pair.addresses[0], initiation);
    pair.made[1].sent.pop_back().unwrap().bytes
}

#[test]
fn a_response_that_takes_its_time_is_taken() {
    for late in [300, 900, 1900] {
        let mut pair = Pair::new();
        let initiation = initiation(&mut pair);
        let response = response(&mut pair, &initiation);
        let end = pair.now + Duration::from_millis(late);
        while pair.now < end {
            pair.now += Duration::from_millis(50);
            pair.run(|_, _| false);
        }
        pair.deliver(0, pair.addresses[1], &response);
        assert!(pair.engines[0].peer_state().has_session, "{late} ms");
        pair.run(|_, _| true);
        assert!(pair.passes(0) && pair.passes(1), "{late} ms");
    }
}

/// Attempts follow each other faster than that.
#[test]
fn a_handshake_takes_any_round_trip_of_a_few_seconds() {
    for round_trip in [500, 1500, 2500, 3500, 4500, 5500] {
        for seed in 0..5 {
            let mut pair = Pair::new();
            pair.engines[0] = engine(pair.configs[0].clone(), seed, pair.now);
            let delay = Duration::from_millis(round_trip / 2);
            let (start, mut on_the_way) = (pair.now, VecDeque::new());
            while pair.now < start + Duration::from_secs(25) {
                pair.tick();
                while let Some((from, sent)) = pair.next_sent() {
                    on_the_way.push_back((pair.now + delay, from, sent.bytes));
                }
                while on_the_way.front().is_some_and(|(at, ..)| *at <= pair.now) {
                    let (_, from, bytes) = on_the_way.pop_front().unwrap();
                    pair.deliver(1 - from, pair.addresses[from], &bytes);
                }
                pair.now += Duration::from_millis(50);
            }
            let attempts = pair.engines[0].counters().handshake_attempts;
            assert!(attempts <= 12, "{round_trip} ms, seed {seed}: {attempts} attempts");
            assert!(pair.passes(0) && pair.passes(1), "{round_trip} ms, seed {seed}");
        }
    }
}

/// The keys of eight handshakes are held. While none of the answers arrives, the one in use is not to
/// lose its place.
#[test]
fn answers_that_are_lost_do_not_end_the_session() {
    let mut pair = Pair::connected();
    for second in 0..60 {
        pair.now += Duration::from_secs(1);
        pair.engines[0].initiate(pair.now);
        if second % 3 == 0 {
            pair.engines[1].initiate(pair.now);
        }
        for from in 0..2 {
            let before = pair.made[1 - from].frames.len();
            pair.feed(from, &udp(&[second]));
            pair.run(|end, sent| sent.bytes[0] == 4 || end == 0 && sent.bytes[0] == 1);
            assert_eq!(pair.made[1 - from].frames.len(), before + 1, "end {from}, {second} s");
        }
    }
    // Nor are they a reason not to answer a peer that has started again, however often.
    for seed in 0..20 {
        pair.engines[0] = engine(pair.configs[0].clone(), seed, pair.now);
        pair.run(|end, sent| seed % 10 == 9 || end == 0 || sent.bytes[0] == 4);
        pair.now += Duration::from_millis(1500);
    }
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
}

/// As many as one after the other can be.
#[test]
fn hundredth_handshake_in_a_row_is_answered() {
    let mut pair = Pair::connected();
    for handshake in 2..=300 {
        pair.now += Duration::from_millis(100);
        pair.engines[0].initiate(pair.now);
        pair.run(|_, message| {
            assert_ne!(message.bytes[0], 3, "a cookie for handshake {handshake}");
            true
        });
        assert_eq!(pair.engines[0].counters().handshakes, handshake);
    }
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn genuine_cookie_does_not_move_endpoint() {
    let mut pair = Pair::connected();
    let forged = pair.addresses[0];
    flood(&mut pair, forged, 3000);
    pair.now += Duration::from_millis(5);
    let initiation = initiation(&mut pair);
    let cookie = response(&mut pair, &initiation);
    assert_eq!((cookie[0], cookie.len()), (3, 64));
    let before = pair.engines[0].peer_state();
    pair.deliver(0, SocketAddr::from(([203, 0, 113, 66], 1)), &cookie);
    assert_eq!(pair.engines[0].peer_state(), before);
    // It was good all the same.
    pair.now += Duration::from_millis(100);
    let handshakes = pair.engines[0].counters().handshakes;
    pair.run(|_, _| true);
    assert_eq!(pair.engines[0].counters().handshakes, handshakes + 1);
}

/// None of its own messages arrives among those that bear its address.
#[test]
fn flooded_responder_initiates_handshake() {
    for floods in [false, true] {
        let mut pair = Pair::connected();
        let (peer, start) = (pair.addresses[0], pair.now);
        pair.engines[0] = engine(pair.configs[0].clone(), 5, pair.now);
        let before = pair.engines[1].counters().handshake_attempts;
        while pair.now < start + Duration::from_millis(900) {
            pair.now += Duration::from_millis(100);
            if floods {
                flood(&mut pair, peer, 60);
            }
            pair.run(|from, sent| from == 1 && sent.bytes[0] != 3 || sent.bytes[0] == 2);
        }
        let attempts = pair.engines[1].counters().handshake_attempts - before;
        assert_eq!(attempts, u64::from(floods), "only where it is needed, and once");
        assert_eq!(pair.engines[0].peer_state().has_session, floods);
    }
}

/// A recorded initiation is all that an attacker needs for this, so it must not move anything.
#[test]
fn replayed_initiation_triggers_one_every_5_s() {
    for is_there in [true, false] {
        let mut pair = Pair::connected();
        let recorded = initiation(&mut pair);
        pair.deliver(1, pair.addresses[0], &recorded);
        pair.run(|_, _| true);
        let before = pair.engines[1].counters().handshake_attempts;
        let forger = SocketAddr::from(([203, 0, 113, 66], 1));
        for _ in 0..300 {
            pair.now += Duration::from_millis(100);
            pair.deliver(1, forger, &recorded);
            let peer = pair.addresses[0];
            pair.run(|from, sent| {
                assert!(from == 0 || sent.to == peer, "something for the forger");
                is_there
            });
            assert_eq!(pair.engines[1].peer_state().endpoint, Some(peer));
        }
        let attempts = pair.engines[1].counters().handshake_attempts - before;
        assert!((5..=7).contains(&attempts), "{attempts} in 30 s");
        assert!(pair.passes(0) && pair.passes(1));
    }
}

/// A restarted end knows of no initiation before; what was recorded then is answered, and moves nothing.
#[test]
fn unconfirmed_initiation_moves_no_endpoint() {
    let mut pair = Pair::connected();
    let recorded = initiation(&mut pair);
    let config = Config { endpoint: Some(pair.addresses[0]), ..pair.configs[1].clone() };
    pair.engines[1] = engine(config, 7, pair.now);
    pair.engines[1].initiate(pair.now);
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    let forger = SocketAddr::from(([203, 0, 113, 66], 1));
    pair.deliver(1, forger, &recorded);
    pair.run(|_, sent| sent.to != forger);
    assert_eq!(pair.engines[1].peer_state().endpoint, Some(pair.addresses[0]));
    assert!(pair.passes(0) && pair.passes(1));
}

/// Its initiation is stamped earlier than one from before it started again.
#[test]
fn end_with_clock_set_back_is_initiated_to() {
    let mut pair = Pair::new();
    let behind = Stamper::new(Duration::ZERO, pair.now, Tai64n::default());
    let mut restarted = Engine::new(pair.configs[0].clone(), 5, behind, pair.now);
    let mut made = Made::default();
    restarted.handle_timeout(pair.now, &mut made);
    let stale = made.sent.pop_back().unwrap().bytes;
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    pair.engines[0] = restarted;
    pair.deliver(1, pair.addresses[0], &stale);
    assert!(pair.made[1].sent.is_empty(), "not answered");
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    let counters = pair.engines[0].counters();
    assert_eq!((counters.handshake_attempts, counters.handshakes), (1, 1));
}

/// The same, if it knows the last timestamp.
#[test]
fn successor_with_its_clock_behind_is_believed() {
    let mut pair = Pair::connected();
    pair.now += Duration::from_secs(60);
    let floor = pair.engines[0].last_stamp();
    let behind = Stamper::new(Duration::ZERO, pair.now, floor);
    pair.engines[0] = Engine::new(pair.configs[0].clone(), 5, behind, pair.now);
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    assert_eq!(pair.engines[0].counters().handshakes, 1);
    assert_eq!(pair.engines[1].counters().handshake_attempts, 0, "nobody had to call it");
}

#[test]
fn ephemeral_keys_of_low_order_are_not_answered() {
    let mut pair = Pair::connected();
    let initiation = initiation(&mut pair);
    let mac1_key = Blake2s256::new()
        .chain_update(b"mac1----")
        .chain_update(pair.configs[1].private_key.public().as_bytes())
        .finalize();
    for (first, inner, last) in LOW_ORDER {
        for sign in [0, 0x80] {
            let mut forged = initiation.clone();
            forged[8..40].fill(inner);
            (forged[8], forged[39]) = (first, last | sign);
            let mac1 = <Blake2sMac<U16> as KeyInit>::new_from_slice(&mac1_key).unwrap();
            let mac1 = mac1.chain_update(&forged[..116]).finalize().into_bytes();
            forged[116..132].copy_from_slice(&mac1);
            let before = pair.dropped(1, DropReason::Malformed);
            pair.deliver(1, pair.addresses[0], &forged);
            assert!(pair.made[1].sent.is_empty());
            assert_eq!(pair.dropped(1, DropReason::Malformed), before + 1);
        }
    }
    assert_eq!(response(&mut pair, &initiation)[0], 2);
}

#[test]
fn session_indices_are_unpredictable() {
    let mut indices = BTreeSet::new();
    for seed in 0..200 {
        let mut pair = Pair::new();
        pair.engines[0] = engine(pair.configs[0].clone(), seed, pair.now);
        let initiation = initiation(&mut pair);
        indices.insert(u32::from_le_bytes(*initiation[4..].first_chunk().unwrap()) >> 8);
    }
    assert!(indices.len() >= 199, "{} of 200 differ", indices.len());
    let bits = (0..24).map(|bit| indices.iter().filter(|index| *index >> bit & 1 == 1).count());
    assert!(bits.clone().all(|ones| (60..140).contains(&ones)), "{:?}", bits.collect::<Vec<_>>());
}

#[test]
fn initiation_of_unknown_key_is_recorded() {
    let mut pair = Pair::connected();
    let stranger = PrivateKey::generate();
    let config = Config { private_key: stranger.clone(), ..pair.configs[0].clone() };
    pair.engines[0] = engine(config, 7, pair.now);
    pair.run(|_, _| true);
    let rejections = pair.engines[1].peer_state().rejections;
    let recorded = rejections.unknown_key.unwrap();
    assert_eq!((recorded.from, recorded.key), (pair.addresses[0], Some(stranger.public())));
    assert_eq!(rejections.wrong_responder, None);
}

#[test]
fn initiation_for_another_responder_is_recorded() {
    let mut pair = Pair::connected();
    let wrong = PrivateKey::generate().public();
    let config = Config { peer_key: Some(wrong), ..pair.configs[0].clone() };
    pair.engines[0] = engine(config, 7, pair.now);
    for _ in 0..3 {
        pair.run(|_, _| true);
        pair.now += Duration::from_millis(1400);
    }
    let rejections = pair.engines[1].peer_state().rejections;
    let recorded = rejections.wrong_responder.unwrap();
    assert_eq!((recorded.from, recorded.key), (pair.addresses[0], None));
    assert!(recorded.previous.is_some(), "{recorded:?}");
    assert_eq!(rejections.unknown_key, None);
}

#[test]
fn superseded_keys_in_use_are_reported() {
    let mut pair = Pair::connected();
    let newer = PrivateKey::generate();
    pair.configs[0].private_key = newer.clone();
    pair.engines[0].configure(pair.configs[0].clone(), pair.now);
    pair.run(|_, _| true);
    assert!(pair.engines[0].peer_state().on_superseded_keys);
    pair.configs[1].peer_key = Some(newer.public());
    pair.engines[1].configure(pair.configs[1].clone(), pair.now);
    pair.run(|_, _| true);
    assert!(!pair.engines[0].peer_state().on_superseded_keys);
}
