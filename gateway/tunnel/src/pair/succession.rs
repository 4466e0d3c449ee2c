//! A second gateway with the same keys takes the place of a first one.

use super::*;

impl Pair {
    /// The server's successor, which has no session. The peer's packets get to it from now on.
    fn succeed(&mut self, change: impl FnOnce(&mut Config)) -> Engine {
        let mut config = self.configs[1].clone();
        change(&mut config);
        let successor = engine(config, 5, self.now);
        std::mem::replace(&mut self.engines[1], successor)
    }
}

#[test]
fn retired_engine_takes_no_part_in_handshakes() {
    let mut pair = Pair::connected();
    pair.engines[1].retire();
    assert!(pair.passes(0) && pair.passes(1), "under the keys that there are");
    pair.engines[1].initiate(pair.now);
    pair.engines[0].initiate(pair.now);
    let mut sent = Vec::new();
    pair.run(|from, message| {
        sent.push((from, message.bytes.len()));
        true
    });
    assert_eq!(sent, [(0, 148)], "it neither begins nor answers one");
    assert!(pair.passes(1));
}

#[test]
fn datagrams_for_another_gateway_are_foreign() {
    let mut pair = Pair::connected();
    pair.feed(0, &udp(b"own"));
    let own = pair.made[0].sent.pop_back().unwrap().bytes;
    assert!(!pair.engines[1].is_foreign(&own));
    let first = pair.succeed(|_| {});
    assert!(pair.engines[1].is_foreign(&own) && !first.is_foreign(&own));
    pair.engines[0].initiate(pair.now);
    pair.tick();
    let initiation = pair.made[0].sent.pop_back().unwrap().bytes;
    for datagram in [&initiation[..], &[], &own[..8]] {
        assert!(first.is_foreign(datagram));
    }
}

#[test]
fn server_without_session_calls_back_source_of_data() {
    for calls_back in [false, true] {
        let mut pair = Pair::connected();
        pair.succeed(|config| config.calls_back = calls_back);
        pair.addresses[0] = SocketAddr::from(([203, 0, 113, 9], 4444));
        pair.feed(0, &udp(b"lost"));
        (0..2).for_each(|_| pair.run(|_, _| true));
        assert_eq!(pair.engines[1].peer_state().has_session, calls_back);
        assert_eq!(pair.passes(0) && pair.passes(1), calls_back);
    }
}

#[test]
fn client_that_was_idle_is_called_back() {
    let mut pair = Pair::connected();
    pair.succeed(|config| config.calls_back = true);
    pair.now += Duration::from_secs(25);
    pair.addresses[0] = SocketAddr::from(([203, 0, 113, 9], 4444));
    pair.feed(0, &udp(b"lost"));
    (0..2).for_each(|_| pair.run(|_, _| true));
    assert!(pair.engines[1].peer_state().has_session);
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn stray_data_moves_no_endpoint() {
    let mut pair = Pair::connected();
    let known = pair.addresses[0];
    pair.feed(0, &udp(b"stray"));
    let stray = pair.made[0].sent.pop_back().unwrap().bytes;
    pair.succeed(|config| (config.calls_back, config.endpoint) = (true, Some(known)));
    let somebody = SocketAddr::from(([203, 0, 113, 66], 9));
    pair.deliver(1, somebody, &stray);
    pair.tick();
    assert_eq!(pair.made[1].sent.pop_front().unwrap().to, somebody);
    assert_eq!(pair.engines[1].peer_state().endpoint, Some(known));
    pair.now += Duration::from_secs(181);
    pair.tick();
    pair.made[1].sent.clear();
    pair.deliver(1, somebody, &stray);
    pair.tick();
    assert!(pair.made[1].sent.is_empty(), "later it calls nobody back");
}

#[test]
fn stray_data_is_answered_twice_a_second_at_most() {
    let mut pair = Pair::connected();
    pair.feed(0, &udp(b"stray"));
    let stray = pair.made[0].sent.pop_back().unwrap().bytes;
    pair.succeed(|config| config.calls_back = true);
    let mut answers = 0;
    for i in 0..100u8 {
        pair.now += Duration::from_millis(20);
        pair.deliver(1, SocketAddr::from(([203, 0, 113, i], 9)), &stray);
        pair.tick();
        answers += pair.made[1].sent.drain(..).count();
    }
    assert!((3..=5).contains(&answers), "{answers} in two seconds");
}

#[test]
fn way_through_predecessor_is_left_for_good() {
    let mut pair = Pair::connected();
    let (relay, direct) = (SocketAddr::from(([10, 200, 1, 7], 40000)), pair.addresses[0]);
    pair.succeed(|config| {
        (config.relay, config.initiate) = (Some(relay.ip()), true);
        config.endpoint = Some(relay);
    });
    pair.addresses[0] = relay;
    pair.run(|_, _| true);
    assert!(pair.passes(0) && pair.passes(1));
    let endpoint = |pair: &Pair| pair.engines[1].peer_state().endpoint;
    assert_eq!(endpoint(&pair), Some(relay));
    pair.addresses[0] = direct;
    assert!(pair.passes(0));
    assert_eq!(endpoint(&pair), Some(direct));
    pair.addresses[0] = relay;
    assert!(pair.passes(0), "packets that are on their way still count");
    assert_eq!(endpoint(&pair), Some(direct));
}

#[test]
fn unproven_endpoint_is_known_to_the_successor() {
    let mut pair = Pair::connected();
    let (found, wrong) = (pair.addresses[1], SocketAddr::from(([203, 0, 113, 9], 4444)));
    let config = pair.configs[0].clone();
    let config = Config { endpoint: Some(found), unproven: Some(wrong), initiate: true, ..config };
    pair.engines[0] = engine(config.clone(), 5, pair.now);
    let mut tries = 0;
    for _ in 0..60 {
        pair.tick();
        pair.run(|_, sent| {
            tries += u32::from(sent.to == wrong);
            sent.to != wrong
        });
        pair.now += Duration::from_secs(1);
    }
    assert!((3..10).contains(&tries), "{tries} initiations beside the session");
    let state = pair.engines[0].peer_state();
    assert_eq!((state.endpoint, state.unproven_endpoint), (Some(found), Some(wrong)));
    assert!(pair.passes(0) && pair.passes(1));
    let edited = SocketAddr::from(([203, 0, 113, 10], 4444));
    let config = Config { endpoint: Some(edited), unproven: None, ..config };
    pair.engines[0].configure(config, pair.now);
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, Some(edited));
}
