//! Two engines with one private key, and one engine behind a NAT that changes its endpoint.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Engine 0, a second one with its key at another address, and engine 1, their peer.
struct Trio {
    pair: Pair,
    second: Engine,
    second_at: SocketAddr,
    second_made: Made,
}

impl Trio {
    /// Engine 0 is connected; the second one has made its own handshake three seconds later.
    fn new() -> Self {
        let mut pair = Pair::connected();
        pair.now += 3 * SECOND;
        pair.run(|_, _| true);
        let mut trio = Self {
            second: engine(pair.configs[0].clone(), 4711, pair.now),
            second_at: SocketAddr::from(([203, 0, 113, 9], 4444)),
            second_made: Made::default(),
            pair,
        };
        trio.second_sends();
        trio
    }

    /// A packet of the second engine; a handshake first if it has no session.
    fn second_sends(&mut self) {
        let Self { pair, second, second_at, second_made } = self;
        second.handle_timeout(pair.now, second_made);
        let mut frame = [&Offload::NONE.write()[..], &udp(b"second")].concat();
        second.handle_frame(&mut frame, pair.now, second_made);
        second.flush(pair.now, second_made);
        while let Some(sent) = second_made.sent.pop_front() {
            pair.deliver(1, *second_at, &sent.bytes);
            while let Some(mut answer) = pair.made[1].sent.pop_front() {
                if answer.to == *second_at {
                    let train = Received {
                        path: pair.addresses[1].into(),
                        segment_size: answer.bytes.len(),
                        bytes: &mut answer.bytes,
                        tos: 0,
                    };
                    second.handle_datagrams(train, pair.now, second_made);
                    second.flush(pair.now, second_made);
                }
            }
        }
    }

    /// A packet of engine 0, with the key that it has.
    fn first_sends(&mut self) {
        self.pair.feed(0, &udp(b"first"));
        while let Some(sent) = self.pair.made[0].sent.pop_front() {
            self.pair.deliver(1, self.pair.addresses[0], &sent.bytes);
        }
    }

    fn first_initiates(&mut self) {
        self.pair.engines[0].initiate(self.pair.now);
        self.pair.run(|_, _| true);
    }

    fn state(&mut self) -> PeerState {
        self.pair.tick();
        self.pair.engines[1].peer_state()
    }
}

#[test]
fn superseded_key_does_not_move_the_endpoint() {
    let mut trio = Trio::new();
    assert_eq!(trio.state().endpoint, Some(trio.second_at), "its handshake was the last");
    let before = trio.pair.made[1].frames.len();
    for _ in 0..5 {
        trio.pair.now += SECOND;
        trio.first_sends();
        assert_eq!(trio.state().endpoint, Some(trio.second_at));
        trio.second_sends();
    }
    assert_eq!(trio.pair.made[1].frames.len(), before + 10, "both are let through");
    assert_eq!(trio.pair.engines[1].counters().endpoint_changes, 1);
    trio.first_initiates();
    trio.first_sends();
    assert_eq!(trio.state().endpoint, Some(trio.pair.addresses[0]), "a newer key moves it");
}

#[test]
fn two_users_of_a_key_are_a_duplicate_while_both_send() {
    let mut trio = Trio::new();
    trio.first_sends();
    assert_eq!(trio.state().duplicate, None, "it may have been overtaken");
    trio.pair.now += 2 * SECOND;
    trio.first_sends();
    let mut both = [trio.pair.addresses[0], trio.second_at];
    both.sort();
    assert_eq!(trio.state().duplicate, Some(both));
    trio.pair.now += 3 * SECOND;
    trio.first_initiates();
    trio.first_sends();
    trio.pair.now += 3 * SECOND;
    trio.second_sends();
    trio.pair.now += 9 * SECOND;
    assert_eq!(trio.state().duplicate, Some(both), "now the other one has the older key");
    trio.first_sends();
    trio.pair.now += 3 * SECOND;
    assert_eq!(trio.state().duplicate, None, "one is left");
}

/// Each takes the session back as soon as it misses answers.
#[test]
fn duplicates_that_initiate_in_turns_are_noticed() {
    let mut trio = Trio::new();
    trio.pair.now += SECOND / 2;
    trio.first_initiates();
    trio.first_sends();
    for _ in 0..4 {
        trio.pair.now += SECOND / 2;
        trio.second_sends();
    }
    assert!(trio.state().duplicate.is_some());
}

#[test]
fn duplicate_that_sent_often_ends_in_three_seconds() {
    let mut trio = Trio::new();
    trio.pair.now += 2 * SECOND;
    for _ in 0..20 {
        trio.pair.now += SECOND / 10;
        trio.first_sends();
    }
    trio.pair.now += 9 * SECOND / 4;
    assert!(trio.state().duplicate.is_some(), "it may be waiting for its next probe");
    trio.pair.now += SECOND / 4;
    assert_eq!(trio.state().duplicate, None);
}

#[test]
fn flipping_endpoint_of_one_peer_is_no_duplicate() {
    let mut pair = Pair::connected();
    let ports = [40_001, 40_002];
    for round in 0..400 {
        pair.now += SECOND;
        if round % 120 == 60 {
            pair.engines[round / 120 % 2].initiate(pair.now);
        }
        pair.addresses[0].set_port(ports[round % 2]);
        assert!(pair.passes(0) && pair.passes(1), "round {round}");
        let state = pair.engines[1].peer_state();
        assert_eq!((state.endpoint, state.duplicate), (Some(pair.addresses[0]), None));
    }
    assert!(pair.engines[1].counters().endpoint_changes >= 399);
}

/// A packet with the older key is overtaken by the handshake and the first with the newer one.
#[test]
fn peer_that_moves_while_it_rekeys_is_no_duplicate() {
    for initiator in 0..2 {
        let mut pair = Pair::connected();
        pair.now += 30 * SECOND;
        pair.feed(0, &udp(b"late"));
        let late = pair.made[0].sent.pop_back().unwrap().bytes;
        let before = pair.addresses[0];
        pair.addresses[0].set_port(40_001);
        assert!(pair.passes(0));
        pair.engines[initiator].initiate(pair.now);
        pair.run(|_, _| true);
        assert!(pair.passes(0) && pair.passes(1), "initiated by {initiator}");
        pair.now += SECOND * 2 / 5;
        pair.deliver(1, before, &late);
        pair.tick();
        let state = pair.engines[1].peer_state();
        assert_eq!((state.endpoint, state.duplicate), (Some(pair.addresses[0]), None));
    }
}
