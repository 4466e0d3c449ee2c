//! Addresses of this host that datagrams to the peer leave from.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn own(last: u8) -> Option<IpAddr> {
    Some([198, 51, 100, last].into())
}

/// Server without a session, and the first initiation of its client.
fn initiated() -> (Pair, Vec<u8>) {
    let mut pair = Pair::new();
    pair.tick();
    let (_, initiation) = pair.next_sent().unwrap();
    (pair, initiation.bytes)
}

/// Delivers to the server as sent to that address of its host.
fn deliver_at(pair: &mut Pair, source: Option<IpAddr>, bytes: &[u8]) {
    let path = UdpPath { remote: pair.addresses[0], source };
    pair.deliver(1, path, bytes);
}

/// The last datagram that the server sent, and its source.
fn last_sent(pair: &mut Pair) -> (Vec<u8>, Option<IpAddr>) {
    let sent = pair.made[1].sent.pop_back().unwrap();
    pair.made[1].sent.clear();
    (sent.bytes, sent.source)
}

/// Server that its client reaches at that address.
fn connected_at(source: Option<IpAddr>) -> Pair {
    let (mut pair, initiation) = initiated();
    deliver_at(&mut pair, source, &initiation);
    let (response, _) = last_sent(&mut pair);
    pair.deliver(0, pair.addresses[1], &response);
    let confirmation = pair.made[0].sent.pop_back().unwrap().bytes;
    deliver_at(&mut pair, source, &confirmation);
    assert!(pair.engines[1].peer_state().has_session);
    pair
}

#[test]
fn answers_leave_from_address_asked() {
    let (mut pair, initiation) = initiated();
    deliver_at(&mut pair, own(2), &initiation);
    let (response, source) = last_sent(&mut pair);
    assert_eq!((response[0], source), (2, own(2)));

    let mut pair = connected_at(own(2));
    for asked in [own(2), own(3)] {
        pair.feed(0, &udp(b"request"));
        let request = pair.made[0].sent.pop_back().unwrap().bytes;
        deliver_at(&mut pair, asked, &request);
        pair.feed(1, &udp(b"answer"));
        assert_eq!(last_sent(&mut pair).1, asked);
    }
    assert_eq!(pair.engines[1].counters().endpoint_changes, 0, "the peer has not moved");
}

#[test]
fn replayed_packet_does_not_change_source() {
    let mut pair = connected_at(own(2));
    pair.feed(0, &udp(b"recorded"));
    let recorded = pair.made[0].sent.pop_back().unwrap().bytes;
    for asked in [own(2), own(3)] {
        deliver_at(&mut pair, asked, &recorded);
    }
    pair.feed(1, &udp(b"answer"));
    assert_eq!(last_sent(&mut pair).1, own(2));
}

/// Sources of the server's next three initiations, all of them lost.
fn initiated_from(pair: &mut Pair) -> Vec<Option<IpAddr>> {
    let mut sources = Vec::new();
    for _ in 0..3 {
        pair.engines[1].handle_timeout(pair.now, &mut pair.made[1]);
        sources.push(last_sent(pair).1);
        pair.now += 2 * SECOND;
    }
    sources
}

#[test]
fn every_other_initiation_leaves_by_route() {
    let mut pair = connected_at(own(2));
    pair.engines[1].initiate(pair.now);
    assert_eq!(initiated_from(&mut pair), [own(2), None, own(2)]);

    let mut pair = connected_at(own(2));
    pair.engines[1].reroute(pair.now);
    assert_eq!(initiated_from(&mut pair), [None, own(2), None]);
    pair.feed(1, &udp(b"data"));
    assert_eq!(last_sent(&mut pair).1, own(2), "packets keep theirs");
}

#[test]
fn lost_responses_are_reported_until_confirmed() {
    let mut pair = Pair::new();
    let unconfirmed = |pair: &Pair| pair.engines[1].peer_state().unconfirmed;
    for responses in 1..4 {
        pair.tick();
        let (_, initiation) = pair.next_sent().unwrap();
        deliver_at(&mut pair, own(2), &initiation.bytes);
        let expected = (responses > 1).then_some((responses, own(2)));
        let found = unconfirmed(&pair).map(|found| (found.responses, found.path.source));
        assert_eq!(found, expected);
        pair.made[1].sent.clear();
        pair.now += 2 * SECOND;
    }
    pair.run(|_, _| true);
    assert_eq!(unconfirmed(&pair), None);
}
