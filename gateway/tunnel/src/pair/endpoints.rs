//! Endpoints of the peer, and packets that move them.

use super::*;

#[test]
fn endpoint_follows_authentic_packets() {
    let mut pair = Pair::connected();
    let elsewhere = SocketAddr::from(([203, 0, 113, 9], 4444));
    pair.addresses[0] = elsewhere;
    assert!(pair.passes(0), "one data packet is enough");
    assert_eq!(pair.engines[1].peer_state().endpoint, Some(elsewhere));
    assert!(pair.passes(1), "and answers go there");
}

#[test]
fn endpoint_is_authentic_once_the_peer_answers() {
    let mut pair = Pair::new();
    let is_authentic = |pair: &Pair| pair.engines[0].peer_state().is_endpoint_authentic;
    assert!(!is_authentic(&pair));
    pair.run(|_, _| true);
    assert!(is_authentic(&pair));
    let moved = SocketAddr::from(([203, 0, 113, 9], 4444));
    pair.configs[0].endpoint = Some(moved);
    pair.engines[0].configure(pair.configs[0].clone(), pair.now);
    assert!(!is_authentic(&pair), "nothing has come from there");
    assert!(pair.passes(1));
    assert!(is_authentic(&pair) && pair.engines[0].peer_state().endpoint != Some(moved));
}

#[test]
fn silent_peer_is_tried_at_its_configured_endpoint() {
    let mut pair = Pair::connected();
    let (configured, elsewhere) = (pair.addresses[1], SocketAddr::from(([203, 0, 113, 9], 4444)));
    pair.addresses[1] = elsewhere;
    assert!(pair.passes(1));
    assert_eq!(pair.engines[0].peer_state().endpoint, Some(elsewhere));
    pair.addresses[1] = configured;
    pair.engines[0].go_back(pair.now);
    pair.run(|_, _| true);
    let state = pair.engines[0].peer_state();
    assert!(state.endpoint == Some(configured) && state.is_endpoint_authentic);
    assert!(pair.passes(0) && pair.passes(1));
    pair.engines[1].go_back(pair.now);
    pair.run(|_, _| true);
    assert!(pair.passes(1), "nothing is configured, so it stays");
}

#[test]
fn nothing_that_is_not_authentic_moves_the_endpoint() {
    let mut pair = Pair::connected();
    let before = pair.engines[1].peer_state();
    let forger = SocketAddr::from(([203, 0, 113, 66], 1));
    pair.feed(0, &udp(b"seen"));
    let genuine = pair.made[0].sent.back().unwrap().bytes.clone();
    pair.run(|_, _| true);
    let mut random = Random::new(3);
    for kind in 1..=4u8 {
        for length in [148, 92, 64, 32, 100] {
            let mut forged: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            forged[..4].copy_from_slice(&[kind, 0, 0, 0]);
            pair.deliver(1, forger, &forged);
        }
    }
    pair.deliver(1, forger, &genuine);
    let mut damaged = genuine;
    damaged[8] = damaged[8].wrapping_add(1);
    pair.deliver(1, forger, &damaged);
    let state = pair.engines[1].peer_state();
    assert_eq!(PeerState { rejections: before.rejections, ..state }, before);
    assert_eq!(pair.dropped(1, DropReason::Replay), 1);
    assert!(pair.dropped(1, DropReason::DecryptFailed) >= 1);
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn other_rules_or_another_endpoint_keep_the_session() {
    let mut pair = Pair::connected();
    let config = Config { keepalive: Some(Duration::from_secs(5)), ..pair.configs[0].clone() };
    pair.engines[0].configure(config.clone(), pair.now);
    assert!(pair.engines[0].peer_state().has_session);
    assert!(pair.passes(0));
    assert_eq!(pair.engines[0].counters().handshake_attempts, 1);
    let moved = SocketAddr::from(([192, 0, 2, 77], 51820));
    pair.addresses[1] = moved;
    pair.engines[0].configure(Config { endpoint: Some(moved), ..config }, pair.now);
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, Some(moved));
    assert!(pair.engines[0].peer_state().has_session && pair.passes(0) && pair.passes(1));
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, None, "it answers");
}

/// As if the server had moved later than the client's config, and its packets still arrived by the old way.
#[test]
fn unproven_endpoint_is_tried_beside_the_session() {
    let (mut pair, moved) = led_elsewhere();
    answers_at_both(&mut pair, Duration::from_secs(11));
    pair.addresses[1] = moved;
    assert_eq!(pair.engines[0].peer_state().endpoint, Some(moved));
    assert!(pair.passes(0) && pair.passes(1));
}

/// As if a successor of the server listened where the client's config led to long ago.
#[test]
fn session_of_the_peer_hurries_the_unproven_endpoint() {
    let (mut pair, moved) = led_elsewhere();
    for _ in 0..100 {
        pair.run(|_, sent| sent.to != moved);
        pair.now += Duration::from_secs(1);
        pair.tick();
    }
    pair.run(|_, sent| sent.to != moved);
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, Some(moved));
    let (known, now) = (Some(pair.addresses[0]), pair.now);
    let server = Config { endpoint: known, initiate: true, ..pair.configs[1].clone() };
    pair.engines[1].configure(server, now);
    pair.engines[1].initiate(now);
    answers_at_both(&mut pair, Duration::from_secs(3));
    assert_eq!(pair.engines[0].peer_state().endpoint, Some(moved));
}

/// A connected pair whose client's config leads to where nobody is, and that address.
fn led_elsewhere() -> (Pair, SocketAddr) {
    let mut pair = Pair::connected();
    let moved = SocketAddr::from(([192, 0, 2, 77], 51820));
    let config = Config { endpoint: Some(moved), ..pair.configs[0].clone() };
    pair.engines[0].configure(config, pair.now);
    pair.run(|_, sent| sent.to != moved);
    assert!(pair.passes(1) && pair.passes(0), "by the old way");
    (pair, moved)
}

/// The server is at both endpoints, and answers from the one that it was sent to last, until the client's is proven.
fn answers_at_both(pair: &mut Pair, within: Duration) {
    let (began, mut way) = (pair.now, pair.addresses[1]);
    while pair.engines[0].peer_state().unproven_endpoint.is_some() {
        pair.now += Duration::from_secs(1);
        assert!(pair.now <= began + within, "not proven");
        pair.tick();
        while let Some((from, sent)) = pair.next_sent() {
            if from == 0 {
                way = sent.to;
                pair.deliver(1, pair.addresses[0], &sent.bytes);
            } else {
                pair.deliver(0, way, &sent.bytes);
            }
        }
    }
}

/// As after a restart of the client, whose endpoint was edited: the server still knows where it is.
#[test]
fn endpoint_is_unproven_while_only_the_peer_initiates() {
    let mut pair = Pair::new();
    let wrong = SocketAddr::from(([203, 0, 113, 9], 51820));
    let [client, server] = pair.configs.clone();
    pair.engines[0].configure(Config { endpoint: Some(wrong), ..client.clone() }, pair.now);
    let known = Config { endpoint: Some(pair.addresses[0]), initiate: true, ..server };
    pair.engines[1].configure(known, pair.now);
    pair.run(|_, _| true);
    let state = pair.engines[0].peer_state();
    assert_eq!((state.endpoint, state.unproven_endpoint), (Some(pair.addresses[1]), Some(wrong)));
    pair.engines[0].configure(client, pair.now);
    assert!(pair.passes(1));
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, None);
}

#[test]
fn wrong_endpoint_stays_unproven_while_packets_roam() {
    let mut pair = Pair::connected();
    let config = pair.configs[0].clone();
    let (found, wrong) = (pair.addresses[1], SocketAddr::from(([203, 0, 113, 9], 51820)));
    pair.engines[0].configure(Config { endpoint: Some(wrong), ..config.clone() }, pair.now);
    assert!(pair.passes(1), "the peer's packets still arrive");
    let state = pair.engines[0].peer_state();
    assert_eq!((state.endpoint, state.unproven_endpoint), (Some(found), Some(wrong)));
    pair.engines[0].configure(config, pair.now);
    assert!(pair.passes(0) && pair.passes(1));
    assert_eq!(pair.engines[0].peer_state().unproven_endpoint, None);
}
