//! Keepalives and limits (whitepaper sections 6.1 to 6.5), by the engine's clock.

use super::*;
use crate::session::Limits;

const SECOND: Duration = Duration::from_secs(1);

/// Keepalives that each end sends in so many seconds.
fn keepalives(pair: &mut Pair, seconds: u32) -> [usize; 2] {
    let mut sent = [0; 2];
    for _ in 0..seconds * 10 {
        pair.now += SECOND / 10;
        pair.run(|from, message| {
            sent[from] += usize::from(message.bytes.len() == 32);
            true
        });
    }
    sent
}

fn feeds(pair: &mut Pair, from: usize, count: usize) {
    for _ in 0..count {
        pair.feed(from, &udp(b"one way only"));
    }
    pair.run(|_, _| true);
}

#[test]
fn unanswered_data_gets_keepalive_after_10_s() {
    let mut pair = Pair::connected();
    // A long idle time before counts for nothing.
    pair.now += 100 * SECOND;
    pair.run(|_, _| true);
    feeds(&mut pair, 0, 3);
    assert_eq!(keepalives(&mut pair, 9), [0, 0]);
    feeds(&mut pair, 0, 3);
    assert_eq!(keepalives(&mut pair, 2), [0, 1]);
    assert_eq!(keepalives(&mut pair, 60), [0, 0], "a keepalive is not answered");
}

#[test]
fn data_that_is_answered_needs_no_keepalive() {
    let mut pair = Pair::connected();
    // Less than 120 s, after which there is another handshake.
    for _ in 0..50 {
        feeds(&mut pair, 0, 1);
        assert_eq!(keepalives(&mut pair, 2), [0, 0]);
        feeds(&mut pair, 1, 1);
    }
    assert_eq!(keepalives(&mut pair, 60), [1, 0]);
}

#[test]
fn traffic_one_way_only_is_answered_every_ten_seconds() {
    let mut pair = Pair::connected();
    let mut sent = 0;
    for _ in 0..100 {
        feeds(&mut pair, 1, 1);
        let [client, server] = keepalives(&mut pair, 1);
        assert_eq!(server, 0);
        sent += client;
    }
    assert!((9..=10).contains(&sent), "{sent}");
}

#[test]
fn keepalive_interval_counts_from_last_packet() {
    let mut pair = Pair::connected();
    let config = Config { keepalive: Some(25 * SECOND), ..pair.configs[0].clone() };
    pair.engines[0].configure(config, pair.now);
    for _ in 0..3 {
        feeds(&mut pair, 0, 1);
        feeds(&mut pair, 1, 1);
        // What is received does not put it off, what is sent does.
        assert_eq!(keepalives(&mut pair, 9)[0], 0);
        feeds(&mut pair, 0, 1);
        assert_eq!(keepalives(&mut pair, 24)[0], 0);
        assert_eq!(keepalives(&mut pair, 2)[0], 1);
    }
}

/// Seconds at which engine `from` initiates, while engine `feeder` is fed a packet every so often.
fn initiations(pair: &mut Pair, from: usize, (feeder, every): (usize, u32)) -> Vec<u128> {
    let (start, mut times) = (pair.now, Vec::new());
    for tenth in 0..6000 {
        pair.now += SECOND / 10;
        if tenth % (every * 10) == 0 {
            pair.feed(feeder, &udp(b"now and then"));
        }
        let at = (pair.now - start).as_secs();
        pair.run(|end, sent| {
            if sent.bytes[0] == 1 {
                assert_eq!(end, from, "at {at} s");
                times.push(at.into());
            }
            true
        });
    }
    times
}

/// The time for an answer begins with the packet, however long the idle time before it was.
#[test]
fn initiator_rekeys_after_120_s_at_any_rate() {
    for every in [1, 14, 16, 37, 53, 100] {
        let sends = initiations(&mut Pair::connected(), 0, (0, every));
        assert!((2..=4).contains(&sends.len()), "every {every} s: {sends:?}");
        assert!(sends.windows(2).all(|pair| pair[1] - pair[0] >= 120), "{sends:?}");
    }
}

/// It answers every ten seconds, and these answers are sent with the key, too.
#[test]
fn receiving_initiator_rekeys_in_time() {
    for every in [1, 16, 53] {
        let sends = initiations(&mut Pair::connected(), 0, (1, every));
        assert!((2..=4).contains(&sends.len()), "every {every} s: {sends:?}");
    }
}

#[test]
fn unanswered_data_starts_handshake_after_15_s() {
    let mut pair = Pair::connected();
    pair.now += 100 * SECOND;
    for _ in 0..149 {
        pair.feed(0, &udp(b"anybody there?"));
        pair.run(|_, sent| sent.bytes[0] == 4 && sent.bytes.len() == 32);
        pair.now += SECOND / 10;
        pair.made.iter_mut().for_each(|made| made.sent.clear());
    }
    assert_eq!(pair.engines[0].counters().handshake_attempts, 1);
    pair.now += SECOND / 2;
    pair.run(|_, _| true);
    assert_eq!(pair.engines[0].counters().handshake_attempts, 2);
}

/// Counters of the data messages that engine 0 sends while it is fed so many packets.
fn counters_of(pair: &mut Pair, count: usize, mut passes: impl FnMut(&Sent) -> bool) -> Vec<u64> {
    let mut counters = Vec::new();
    for _ in 0..count {
        pair.feed(0, &udp(b"counted"));
        pair.run(|from, sent| {
            if from == 0 && sent.bytes[0] == 4 && sent.bytes.len() > 32 {
                counters.push(u64::from_le_bytes(*sent.bytes[8..].first_chunk().unwrap()));
            }
            passes(sent)
        });
    }
    counters
}

#[test]
fn after_so_many_messages_another_key_is_agreed_on() {
    let mut pair = Pair::connected();
    pair.engines[0].peer.limit_messages(Limits { rekey: 100, reject: 1000 });
    let counters = counters_of(&mut pair, 1000, |_| true);
    assert!(counters.len() == 1000 && counters.iter().all(|&counter| counter <= 101));
    assert_eq!(pair.made[1].frames.len(), 1000, "nothing is lost on the way");
    assert!((10..=11).contains(&pair.engines[0].counters().handshakes));
}

#[test]
fn key_past_message_limit_seals_nothing() {
    let mut pair = Pair::connected();
    pair.engines[0].peer.limit_messages(Limits { rekey: 100, reject: 200 });
    let counters = counters_of(&mut pair, 300, |sent| sent.bytes[0] == 4);
    assert_eq!(counters.last(), Some(&199));
    let dropped = pair.engines[0].counters().dropped_outbound[DropReason::NoSession.index()];
    assert_eq!(dropped, 300 - counters.len() as u64);
    pair.now += 2 * SECOND;
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1), "until the next handshake");
}

#[test]
fn key_past_message_limit_opens_nothing() {
    let mut pair = Pair::connected();
    pair.engines[1].peer.limit_messages(Limits { rekey: 100, reject: 200 });
    let counters = counters_of(&mut pair, 300, |_| true);
    assert!(counters.iter().any(|&counter| counter >= 200));
    assert!(
        counters.iter().filter(|&&c| c >= 200).count() as u64
            == pair.dropped(1, DropReason::Replay)
    );
}

/// The counter has 64 bits and is written as they are.
#[test]
fn the_limits_are_wireguards() {
    assert_eq!(Limits::WIREGUARD.rekey, 2u64.pow(60));
    assert_eq!(Limits::WIREGUARD.reject, u64::MAX - 8192);
}
