//! Against boringtun, message by message in memory, in both roles.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;
use fabric_primitives::{PrivateKey, PublicKey};
use noise::*;

mod schedules;
mod speed;

/// An empty IPv4 packet: boringtun looks at what it opens.
const PACKET: [u8; 20] = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];

const FROM: ([u8; 4], u16) = ([192, 0, 2, 1], 51820);

/// Our end, boringtun's, and the keys of both.
struct Scene {
    ours: Handshake,
    stamper: Stamper,
    tunn: Tunn,
    now: Instant,
    keys: [PrivateKey; 2],
}

impl Scene {
    fn new() -> Self {
        Self::with(|_| None)
    }

    /// `limiter` makes boringtun's limiter from its public key.
    fn with(limiter: impl Fn(&x25519::PublicKey) -> Option<Arc<RateLimiter>>) -> Self {
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let now = now();
        let public = theirs(keys[1].public());
        Self {
            ours: Handshake::new(Arc::new(LocalKey::new(&keys[0])), keys[1].public()),
            stamper: Stamper::new(Duration::from_secs(9), now, Tai64n::default()),
            tunn: tunn(&keys[1], keys[0].public(), limiter(&public)),
            now,
            keys,
        }
    }

    fn initiate(&mut self, index: u32) -> [u8; INITIATION_LEN] {
        self.ours.initiate(index, self.stamper.stamp(self.now), self.now)
    }

    fn respond(
        &mut self,
        message: &[u8],
        index: u32,
    ) -> Result<([u8; RESPONSE_LEN], KeyPair), HandshakeError> {
        let received = self.ours.local().open_initiation(initiation(message))?;
        self.ours.respond(received, index, self.now)
    }
}

#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
fn now() -> Instant {
    Instant::now()
}

fn theirs(key: PublicKey) -> x25519::PublicKey {
    x25519::PublicKey::from(*key.as_bytes())
}

fn tunn(own: &PrivateKey, peer: PublicKey, limiter: Option<Arc<RateLimiter>>) -> Tunn {
    let own = x25519::StaticSecret::from(*own.expose());
    let unlimited = || RateLimiter::new(&x25519::PublicKey::from(&own), u64::MAX);
    let limiter = limiter.unwrap_or_else(|| Arc::new(unlimited()));
    Tunn::new(own.clone(), theirs(peer), None, None, 7, Some(limiter))
}

/// boringtun's answer to a datagram, or its initiation.
fn answer(result: TunnResult<'_>) -> Option<Vec<u8>> {
    match result {
        TunnResult::WriteToNetwork(message) => Some(message.to_vec()),
        TunnResult::Done
        | TunnResult::Err(_)
        | TunnResult::WriteToTunnelV4(..)
        | TunnResult::WriteToTunnelV6(..) => None,
    }
}

fn handled(tunn: &mut Tunn, message: &[u8]) -> Option<Vec<u8>> {
    answer(tunn.decapsulate(None, message, &mut [0; 2000]))
}

fn their_initiation(tunn: &mut Tunn) -> Vec<u8> {
    answer(tunn.format_handshake_initiation(&mut [0; 200], true)).expect("it always makes one")
}

fn initiation(message: &[u8]) -> Initiation<'_> {
    let Some(Message::Initiation(initiation)) = Message::parse(message) else {
        panic!("no initiation: {message:?}")
    };
    initiation
}

fn response(message: &[u8]) -> Response<'_> {
    let Some(Message::Response(response)) = Message::parse(message) else {
        panic!("no response: {message:?}")
    };
    response
}

fn cookie_reply(message: &[u8]) -> CookieReply<'_> {
    let Some(Message::CookieReply(reply)) = Message::parse(message) else {
        panic!("no cookie reply: {message:?}")
    };
    reply
}

/// Packets of any length pass both ways between our key pair and boringtun's.
fn passes((sealer, opener): &(Sealer, Opener), tunn: &mut Tunn) {
    for len in [20, 21, 100, 1420, 65_000] {
        let mut packet = PACKET.to_vec();
        packet.resize(len, 0xab);
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        let mut buffer = vec![0; len + 48];
        let padded = len.next_multiple_of(16);
        let sealed = sealer.seal(&packet, padded, &mut buffer).expect("the key is new");
        let mut opened = vec![0; 66_000];
        let result = tunn.decapsulate(None, &buffer[..sealed.len], &mut opened);
        let TunnResult::WriteToTunnelV4(content, _) = result else { panic!("{result:?}") };
        assert_eq!(content, packet);
        let TunnResult::WriteToNetwork(sealed) = tunn.encapsulate(&packet, &mut opened) else {
            panic!("no session")
        };
        let (segment_size, mut again) = (sealed.len(), sealed.to_vec());
        assert_eq!(opener.open(sealed, segment_size)[0], Ok(len));
        assert_eq!(sealed[DATA_HEADER..][..len], packet);
        assert_eq!(opener.open(&mut again, segment_size)[0], Err(OpenError::Replay));
    }
}

#[test]
fn boringtun_answers_our_initiation() {
    let mut scene = Scene::new();
    for index in [1, u32::MAX] {
        let initiation = scene.initiate(index);
        let answer = handled(&mut scene.tunn, &initiation).unwrap();
        let pair = scene.ours.complete(response(&answer), scene.now).unwrap();
        assert_eq!(pair.local_index(), index);
        passes(&pair.split(), &mut scene.tunn);
    }
}

#[test]
fn boringtun_takes_our_response() {
    let mut scene = Scene::new();
    for index in [1, u32::MAX] {
        let initiation = their_initiation(&mut scene.tunn);
        let (answer, pair) = scene.respond(&initiation, index).unwrap();
        let mut keepalive = handled(&mut scene.tunn, &answer).unwrap();
        let pair = pair.split();
        assert_eq!(receiver_index(&keepalive), index);
        assert_eq!(pair.1.open(&mut keepalive, DATA_OVERHEAD)[0], Ok(0));
        passes(&pair, &mut scene.tunn);
    }
}

#[test]
fn lost_responses_leave_older_initiations_answerable() {
    let mut scene = Scene::new();
    let initiations: Vec<_> = (0..10).map(|index| scene.initiate(index)).collect();
    let answers: Vec<_> =
        initiations.iter().map(|message| handled(&mut scene.tunn, message).unwrap()).collect();
    for late in [0, 1] {
        assert!(!scene.ours.expects(late));
        let taken = scene.ours.complete(response(&answers[late as usize]), scene.now);
        assert_eq!(taken.err(), Some(HandshakeError::Unexpected));
    }
    let fourth = scene.ours.complete(response(&answers[4]), scene.now).unwrap();
    assert_eq!(fourth.local_index(), 4);
    assert!(!scene.ours.expects(3) && scene.ours.expects(5), "later ones stay");
    let again = scene.ours.complete(response(&answers[4]), scene.now);
    assert_eq!(again.err(), Some(HandshakeError::Unexpected), "a response is taken once");
    let last = scene.ours.complete(response(&answers[9]), scene.now).unwrap();
    passes(&last.split(), &mut scene.tunn);
}

#[test]
fn repeated_or_earlier_initiation_is_stale() {
    let mut scene = Scene::new();
    let first = their_initiation(&mut scene.tunn);
    let second = their_initiation(&mut scene.tunn);
    assert!(scene.respond(&second, 1).is_ok());
    for stale in [&first, &second] {
        assert_eq!(scene.respond(stale, 2).err(), Some(HandshakeError::Stale));
    }
    let third = their_initiation(&mut scene.tunn);
    assert!(scene.respond(&third, 3).is_ok());
}

#[test]
fn successor_with_its_clock_behind_is_believed() {
    let mut scene = Scene::new();
    let initiation = scene.initiate(1);
    assert!(handled(&mut scene.tunn, &initiation).is_some());
    let behind = Duration::ZERO;
    let successor = Handshake::new(Arc::new(LocalKey::new(&scene.keys[0])), *scene.ours.peer());
    let last = std::mem::replace(&mut scene.ours, successor);
    let floor = scene.stamper.last();
    scene.stamper = Stamper::new(behind, scene.now, Tai64n::default());
    let refused = scene.initiate(2);
    assert_eq!(handled(&mut scene.tunn, &refused), None, "it does not know the floor");
    scene.stamper = Stamper::new(behind, scene.now, floor);
    let believed = scene.initiate(3);
    let answer = handled(&mut scene.tunn, &believed).unwrap();
    passes(&scene.ours.complete(response(&answer), scene.now).unwrap().split(), &mut scene.tunn);
    assert!(last.expects(1));
}

#[test]
fn strangers_are_named_and_not_answered() {
    let mut scene = Scene::new();
    let stranger = PrivateKey::generate();
    let mut caller = tunn(&stranger, scene.keys[0].public(), None);
    let message = their_initiation(&mut caller);
    let received = scene.ours.local().open_initiation(initiation(&message)).unwrap();
    assert_eq!(received.peer(), Some(stranger.public()));
    assert!(!received.is_from(scene.ours.peer()));
    let refused = scene.ours.respond(received, 1, scene.now);
    assert_eq!(refused.err(), Some(HandshakeError::NotAuthentic));
}

#[test]
fn initiation_for_another_key_does_not_open() {
    let mut scene = Scene::new();
    let mut caller = tunn(&scene.keys[1], PrivateKey::generate().public(), None);
    let message = their_initiation(&mut caller);
    assert_eq!(scene.respond(&message, 1).err(), Some(HandshakeError::NotAuthentic));
}

#[test]
fn handshake_with_any_byte_changed_is_refused() {
    let mut scene = Scene::new();
    let genuine = their_initiation(&mut scene.tunn);
    for at in 8..INITIATION_LEN - 32 {
        let mut damaged = genuine.clone();
        damaged[at] ^= 1;
        let refused = scene.respond(&damaged, 1).err();
        assert_eq!(refused, Some(HandshakeError::NotAuthentic), "byte {at} of an initiation");
    }
    assert!(scene.respond(&genuine, 1).is_ok());
    let ours = scene.initiate(2);
    let genuine = handled(&mut scene.tunn, &ours).unwrap();
    for at in 12..RESPONSE_LEN - 32 {
        let mut damaged = genuine.clone();
        damaged[at] ^= 1;
        let refused = scene.ours.complete(response(&damaged), scene.now).err();
        assert_eq!(refused, Some(HandshakeError::NotAuthentic), "byte {at} of a response");
    }
    assert!(scene.ours.complete(response(&genuine), scene.now).is_ok());
}

#[test]
fn ephemeral_key_of_low_order_is_refused() {
    let mut scene = Scene::new();
    let mut message = their_initiation(&mut scene.tunn);
    let ours = scene.initiate(1);
    let mut answer = handled(&mut scene.tunn, &ours).unwrap();
    let mut p_minus_1 = [0xff; 32];
    (p_minus_1[0], p_minus_1[31]) = (0xec, 0x7f);
    let mut one = [0; 32];
    one[0] = 1;
    for point in [[0; 32], one, p_minus_1] {
        message[8..40].copy_from_slice(&point);
        assert_eq!(scene.respond(&message, 2).err(), Some(HandshakeError::LowOrder));
        answer[12..44].copy_from_slice(&point);
        let refused = scene.ours.complete(response(&answer), scene.now);
        assert_eq!(refused.err(), Some(HandshakeError::LowOrder));
    }
    assert!(scene.ours.expects(1), "the genuine response may still come");
}

#[test]
fn boringtun_under_load_takes_our_mac2() {
    let mut scene = Scene::with(|own| Some(Arc::new(RateLimiter::new(own, 0))));
    let first = scene.initiate(1);
    assert_eq!(first[INITIATION_LEN - 16..], [0; 16]);
    let ask = |tunn: &mut Tunn, message: &[u8]| {
        let from = Some(SocketAddr::from(FROM).ip());
        answer(tunn.decapsulate(from, message, &mut [0; 200])).unwrap()
    };
    let reply = ask(&mut scene.tunn, &first);
    assert_eq!(scene.ours.take_cookie(cookie_reply(&reply), scene.now), Ok(true));
    let second = scene.initiate(2);
    let answer = ask(&mut scene.tunn, &second);
    passes(&scene.ours.complete(response(&answer), scene.now).unwrap().split(), &mut scene.tunn);
    scene.now += Duration::from_secs(120);
    let third = scene.initiate(3);
    assert_eq!(third[INITIATION_LEN - 16..], [0; 16], "a cookie lives for two minutes");
}

#[test]
fn boringtun_takes_our_cookie() {
    let mut scene = Scene::new();
    let checker = CookieChecker::new(&scene.keys[0].public(), scene.now);
    let from = SocketAddr::from(FROM);
    let first = their_initiation(&mut scene.tunn);
    let message = Message::parse(&first).unwrap();
    assert!(checker.has_valid_mac1(&message) && !message.has_mac2());
    assert!(!checker.has_valid_mac2(&message, from, scene.now));
    let reply = checker.reply(&message, from, scene.now).unwrap();
    assert_eq!(handled(&mut scene.tunn, &reply), None);
    let second = their_initiation(&mut scene.tunn);
    let message = Message::parse(&second).unwrap();
    assert!(checker.has_valid_mac1(&message) && message.has_mac2());
    assert!(checker.has_valid_mac2(&message, from, scene.now));
    let later = scene.now + Duration::from_secs(120);
    assert!(!checker.has_valid_mac2(&message, from, later), "the secret has changed");
}

#[test]
fn cookie_is_for_one_address_and_port() {
    let mut scene = Scene::new();
    let checker = CookieChecker::new(&scene.keys[0].public(), scene.now);
    for from in ["192.0.2.1:51820", "[2001:db8::1]:51820"] {
        let from: SocketAddr = from.parse().unwrap();
        let first = their_initiation(&mut scene.tunn);
        let reply = checker.reply(&Message::parse(&first).unwrap(), from, scene.now).unwrap();
        handled(&mut scene.tunn, &reply);
        let second = their_initiation(&mut scene.tunn);
        let message = Message::parse(&second).unwrap();
        assert!(checker.has_valid_mac2(&message, from, scene.now));
        let mut elsewhere = from;
        elsewhere.set_port(51821);
        assert!(!checker.has_valid_mac2(&message, elsewhere, scene.now), "{elsewhere}");
        elsewhere = SocketAddr::new([192, 0, 2, 2].into(), 51820);
        assert!(!checker.has_valid_mac2(&message, elsewhere, scene.now), "{elsewhere}");
    }
}

#[test]
fn macs_with_any_bit_changed_are_refused() {
    let mut scene = Scene::new();
    let checker = CookieChecker::new(&scene.keys[0].public(), scene.now);
    let from = SocketAddr::from(FROM);
    let first = their_initiation(&mut scene.tunn);
    let reply = checker.reply(&Message::parse(&first).unwrap(), from, scene.now).unwrap();
    handled(&mut scene.tunn, &reply);
    let genuine = their_initiation(&mut scene.tunn);
    for bit in 0..256 {
        let mut damaged = genuine.clone();
        damaged[INITIATION_LEN - 32 + bit / 8] ^= 1 << (bit % 8);
        let message = Message::parse(&damaged).unwrap();
        assert_eq!(checker.has_valid_mac1(&message), bit >= 128);
        assert!(!checker.has_valid_mac2(&message, from, scene.now), "bit {bit}");
    }
}

#[test]
fn cookie_replies_that_fit_no_message_are_refused() {
    let mut scene = Scene::new();
    let checker = CookieChecker::new(&scene.keys[1].public(), scene.now);
    let from = SocketAddr::from(FROM);
    let message = scene.initiate(1);
    let genuine = checker.reply(&Message::parse(&message).unwrap(), from, scene.now).unwrap();
    for at in 4..COOKIE_REPLY_LEN {
        let mut damaged = genuine;
        damaged[at] ^= 1;
        let refused = scene.ours.take_cookie(cookie_reply(&damaged), scene.now);
        let expected =
            if at < 8 { HandshakeError::Unexpected } else { HandshakeError::NotAuthentic };
        assert_eq!(refused, Err(expected), "byte {at}");
    }
    assert_eq!(scene.ours.take_cookie(cookie_reply(&genuine), scene.now), Ok(true));
    let initiation = their_initiation(&mut scene.tunn);
    let (answer, _) = scene.respond(&initiation, 2).unwrap();
    let reply = checker.reply(&Message::parse(&answer).unwrap(), from, scene.now).unwrap();
    let taken = scene.ours.take_cookie(cookie_reply(&reply), scene.now);
    assert_eq!(taken, Ok(false), "it answers a response");
}

#[test]
fn messages_of_any_other_length_are_none() {
    for kind in 0..=5 {
        for len in 0..200 {
            let mut message = vec![0; len];
            message.iter_mut().take(1).for_each(|first| *first = kind);
            let is_message = matches!((kind, len), (1, 148) | (2, 92) | (3, 64));
            assert_eq!(Message::parse(&message).is_some(), is_message, "{kind}, {len}");
        }
    }
    let mut reserved = [0; 148];
    (reserved[0], reserved[2]) = (1, 1);
    assert!(Message::parse(&reserved).is_none());
}

#[test]
fn indices_are_random_and_unique() {
    let mut taken = std::collections::BTreeSet::new();
    for _ in 0..2000 {
        let index = random_index(|index| taken.contains(&index));
        assert!(taken.insert(index));
    }
    for bit in 0..32 {
        let ones = taken.iter().filter(|index| *index >> bit & 1 == 1).count();
        assert!((800..1200).contains(&ones), "bit {bit}: {ones} of 2000");
    }
    let odd = random_index(|index| index % 2 == 0);
    assert_eq!(odd % 2, 1);
}
