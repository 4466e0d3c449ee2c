//! Choice of the handshake messages that are worth a Diffie-Hellman, and of the senders that have
//! to prove their address first (whitepaper section 5.3).
//!
//! Costs of a message beside its receiving: next to nothing if it names no message of ours, 1 us to
//! check `mac1`, 4 us to check a cookie or to make one, 3 to 15 us to send it (the most where the
//! other end is on the same machine), 60 us to find that its sender is a stranger.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_primitives::PublicKey;
use noise::{COOKIE_REPLY_LEN, CookieChecker, Message};

/// Messages that are worked on without any proof, of each kind of sender: up to 1 % of a core.
const UNPROVEN: Rate = Rate::per_second(50);

/// Messages that are worked on because their sender showed a cookie. It can be reached at its
/// source address, and so, outside the peer's own address, can a stranger.
const PROVEN: Rate = Rate::per_second(100);

/// Cookies checked at the peer's address: up to a fifth of a core, so that the owner of one gets an
/// answer among many that pretend to have one.
const CHECKS_OF_PEER: Rate = Rate::per_second(50_000);

/// Cookies given at the peer's address, spoofed or not: up to a fifth of a core. In a faster flood
/// with just that address, the peer has to try more than once.
const COOKIES_FOR_PEER: Rate = Rate::per_second(10_000);

/// Cookies checked or given at each other address. A peer needs two a handshake.
const CHECKS_OF_SOURCE: Rate = Rate::per_second(10);

/// Other addresses that are distinguished: times [`CHECKS_OF_SOURCE`] it is the most that they can
/// cost together, a fifth of a core.
const SOURCES: usize = 1024;

/// A handshake message that may be for us.
#[derive(Clone, Copy)]
pub(super) struct Arrival<'a> {
    pub(super) from: SocketAddr,
    /// It has the peer's address, as far as that is known.
    pub(super) is_peer: bool,
    pub(super) message: Message<'a>,
}

/// Verdict on a handshake message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is worth a Diffie-Hellman.
    Work,
    /// It is answered with this cookie reply.
    Cookie([u8; COOKIE_REPLY_LEN]),
    /// There are too many like it.
    Busy,
    /// Its `mac1` is not for this key.
    Foreign,
}

/// Bounds what handshake messages cost, so that a flood neither disturbs a session nor hinders
/// another one from being made.
///
/// * As long as few come, messages are worked on as they are. Then they need a cookie, and those
///   that have one have shares of their own.
/// * The peer's address has shares of its own, so no flood from elsewhere takes its place. Other
///   addresses have one each (as far as a table of hashes distinguishes them; of IPv6 a /64 is
///   one), so none takes another's.
pub(super) struct HandshakeLimiter {
    cookies: CookieChecker,
    start: Instant,
    peer: Shares,
    others: Shares,
    answers: Bucket,
    checks_of_peer: Bucket,
    cookies_for_peer: Bucket,
    sources: Box<[Bucket]>,
    /// Key of the table of sources, so that no sender knows which others share its place.
    key: u64,
}

#[derive(Default)]
struct Shares {
    unproven: Bucket,
    proven: Bucket,
}

impl HandshakeLimiter {
    /// `seed` is any random number.
    pub(super) fn new(own: &PublicKey, seed: u64, now: Instant) -> Self {
        Self {
            cookies: CookieChecker::new(own, now),
            start: now,
            peer: Shares::default(),
            others: Shares::default(),
            answers: Bucket::default(),
            checks_of_peer: Bucket::default(),
            cookies_for_peer: Bucket::default(),
            sources: vec![Bucket::default(); SOURCES].into(),
            key: seed,
        }
    }

    /// Decides on a message. An answer must name a message of ours.
    pub(super) fn judge(&mut self, arrival: Arrival<'_>, now: Instant) -> Verdict {
        let Arrival { from, is_peer, message } = arrival;
        let since_start = now.saturating_duration_since(self.start);
        if let Message::CookieReply(_) = message {
            return match self.answers.take(&UNPROVEN, since_start) {
                true => Verdict::Work,
                false => Verdict::Busy,
            };
        }
        // A cookie is checked, or given, only to somebody who knows our public key.
        if !self.cookies.has_valid_mac1(&message) {
            return Verdict::Foreign;
        }
        let shares = if is_peer { &mut self.peer } else { &mut self.others };
        let unproven = match message {
            Message::Initiation(_) => &mut shares.unproven,
            Message::Response(_) | Message::CookieReply(_) => &mut self.answers,
        };
        if unproven.take(&UNPROVEN, since_start) {
            return Verdict::Work;
        }
        // Without a cookie it can only be given one.
        let shows_one = message.has_mac2();
        let may_check = match (is_peer, shows_one) {
            (true, true) => self.checks_of_peer.take(&CHECKS_OF_PEER, since_start),
            (true, false) => self.cookies_for_peer.take(&COOKIES_FOR_PEER, since_start),
            (false, _) => {
                let source = &mut self.sources[place_of(from.ip(), self.key)];
                source.take(&CHECKS_OF_SOURCE, since_start)
            }
        };
        if !may_check {
            return Verdict::Busy;
        }
        if self.cookies.has_valid_mac2(&message, from, now) {
            return match shares.proven.take(&PROVEN, since_start) {
                true => Verdict::Work,
                false => Verdict::Busy,
            };
        }
        let may_give =
            !(is_peer && shows_one) || self.cookies_for_peer.take(&COOKIES_FOR_PEER, since_start);
        let reply = may_give.then(|| self.cookies.reply(&message, from, now)).flatten();
        reply.map_or(Verdict::Busy, Verdict::Cookie)
    }
}

/// Rate of an event, and how often it may happen at once.
struct Rate {
    interval: Duration,
    burst: Duration,
}

impl Rate {
    /// As often at once as in a second, but no more than the kernel buffers in some milliseconds.
    const fn per_second(times: u32) -> Self {
        let interval = Duration::from_nanos(1_000_000_000 / times as u64);
        let burst = if times < 1000 { 1000 } else { 100 };
        Self { interval, burst: Duration::from_millis(burst) }
    }
}

/// A bucket of tokens, as the moment at which it will be full again (ATM Forum's generic cell rate
/// algorithm). Starts full.
#[derive(Clone, Copy, Default)]
struct Bucket {
    full_at: Duration,
}

impl Bucket {
    /// Takes a token at `now`, which counts from the limiter's start.
    fn take(&mut self, rate: &Rate, now: Duration) -> bool {
        let full_at = self.full_at.max(now) + rate.interval;
        let has_one = full_at <= now + rate.burst;
        if has_one {
            self.full_at = full_at;
        }
        has_one
    }
}

/// Returns the place of an address in the table of sources.
fn place_of(ip: IpAddr, key: u64) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    match ip {
        IpAddr::V4(v4) => v4.hash(&mut hasher),
        IpAddr::V6(v6) => v6.segments()[..4].hash(&mut hasher),
    }
    hasher.finish() as usize % SOURCES
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
mod tests {
    use std::net::Ipv6Addr;
    use std::sync::Arc;

    use fabric_primitives::PrivateKey;
    use noise::{Handshake, LocalKey, Stamper, Tai64n};

    use super::*;

    const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 5);

    /// A limiter, and somebody who knows its key.
    struct Scene {
        limiter: HandshakeLimiter,
        caller: Handshake,
        stamper: Stamper,
        calls: u32,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let [own, caller] = [7, 9].map(|byte| PrivateKey::from_bytes(&[byte; 32]).unwrap());
            let now = Instant::now();
            Self {
                limiter: HandshakeLimiter::new(&own.public(), 3, now),
                caller: Handshake::new(Arc::new(LocalKey::new(&caller)), own.public()),
                stamper: Stamper::new(Duration::ZERO, now, Tai64n::default()),
                calls: 0,
                now,
            }
        }

        fn initiation(&mut self) -> Vec<u8> {
            self.calls += 1;
            self.caller.initiate(self.calls, self.stamper.stamp(self.now), self.now).to_vec()
        }

        fn judge(&mut self, from: SocketAddr, message: &[u8]) -> Verdict {
            let message = Message::parse(message).unwrap();
            let is_peer = from.ip() == PEER.ip();
            self.limiter.judge(Arrival { from, is_peer, message }, self.now)
        }

        /// A second of many messages; how many were worked on, answered with a cookie, dropped.
        fn flood(&mut self, from: impl Fn(u32) -> SocketAddr, message: &[u8]) -> [usize; 3] {
            let mut counts = [0; 3];
            let start = self.now;
            for i in 0..100_000 {
                self.now = start + Duration::from_micros(10) * i;
                counts[match self.judge(from(i), message) {
                    Verdict::Work => 0,
                    Verdict::Cookie(_) => 1,
                    Verdict::Busy | Verdict::Foreign => 2,
                }] += 1;
            }
            counts
        }

        /// Returns the attempts of a caller, as the peer or as a stranger, until one is worked on.
        fn calls_until_heard(&mut self, from: SocketAddr) -> usize {
            for call in 1..=10 {
                let message = self.initiation();
                match self.judge(from, &message) {
                    Verdict::Work => return call,
                    Verdict::Cookie(reply) => self.take(&reply),
                    Verdict::Busy | Verdict::Foreign => {}
                }
            }
            11
        }

        fn take(&mut self, reply: &[u8]) {
            let Some(Message::CookieReply(reply)) = Message::parse(reply) else { panic!() };
            assert_eq!(self.caller.take_cookie(reply, self.now), Ok(true));
        }
    }

    fn elsewhere(i: u32) -> SocketAddr {
        SocketAddr::from((std::net::Ipv4Addr::from(0x0a00_0000 + i), 5))
    }

    #[test]
    fn flood_from_one_address_spares_other_shares() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let [worked, cookies, dropped] = scene.flood(|_| elsewhere(1), &message);
        assert!(worked <= 100 && cookies <= 20 && dropped > 99_000, "{worked} {cookies}");
        assert_eq!(scene.judge(PEER, &message), Verdict::Work, "the peer, as if nothing were");
        assert_eq!(scene.calls_until_heard(elsewhere(2)), 2, "a cookie, then a response");
    }

    #[test]
    fn flood_from_any_address_costs_bounded_cpu() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let [worked, cookies, _] = scene.flood(elsewhere, &message);
        assert!(worked <= 100 && cookies <= 20 * SOURCES, "{worked} {cookies}");
        let [worked, cookies, _] = scene.flood(elsewhere, &message);
        assert!(worked <= 60 && cookies <= 11 * SOURCES, "{worked} {cookies}");
        assert_eq!(scene.judge(PEER, &message), Verdict::Work);
    }

    #[test]
    fn flood_with_peer_address_requires_cookie() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let [worked, cookies, _] = scene.flood(|_| PEER, &message);
        assert!(worked <= 100 && (9_900..=11_100).contains(&cookies), "{worked} {cookies}");
        scene.now += Duration::from_millis(1);
        assert!(scene.calls_until_heard(PEER) <= 2);
    }

    #[test]
    fn ipv6_flood_from_one_64_has_one_share() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let inside = |i: u32| {
            let bits = 0x2001_0db8_u128 << 96 | u128::from(i);
            SocketAddr::from((Ipv6Addr::from_bits(bits), 5))
        };
        let [worked, cookies, _] = scene.flood(inside, &message);
        assert!(worked <= 100 && cookies <= 20, "{worked} {cookies}");
        let other = SocketAddr::from((Ipv6Addr::from_bits(0x2001_0db8_0000_0001_u128 << 64), 5));
        assert_eq!(scene.calls_until_heard(other), 2, "a cookie, then a response");
    }

    #[test]
    fn wrong_cookies_get_bounded_answers() {
        let mut scene = Scene::new();
        let mut message = scene.initiation();
        message[140] = 1;
        let [worked, cookies, _] = scene.flood(|_| PEER, &message);
        assert!(worked <= 100 && (9_900..=11_100).contains(&cookies), "{worked} {cookies}");
    }

    #[test]
    fn cookie_is_bound_to_address_and_limited() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        scene.flood(|_| elsewhere(1), &message);
        assert_eq!(scene.calls_until_heard(elsewhere(2)), 2);
        let with_cookie = scene.initiation();
        assert_eq!(scene.judge(elsewhere(2), &with_cookie), Verdict::Work);
        let mut other_port = elsewhere(2);
        other_port.set_port(6);
        for from in [other_port, elsewhere(3)] {
            let verdict = scene.judge(from, &with_cookie);
            assert!(matches!(verdict, Verdict::Cookie(_)), "{from}: {verdict:?}");
        }
        let [worked, ..] = scene.flood(|_| elsewhere(2), &with_cookie);
        assert!(worked <= 100, "{worked} of one whose address is proven");
    }

    #[test]
    fn foreign_messages_spend_no_share() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let mut wrong_mac = message.clone();
        wrong_mac[120] ^= 1;
        let mut response = vec![0; 92];
        response[0] = 2;
        for forged in [&wrong_mac, &response] {
            assert_eq!(scene.judge(PEER, forged), Verdict::Foreign);
            assert_eq!(scene.flood(|_| PEER, forged)[2], 100_000);
        }
        assert_eq!(scene.judge(PEER, &message), Verdict::Work);
    }

    /// `mac1` of what a stranger sends is right, and it observed our initiation.
    #[test]
    fn flood_of_responses_to_own_index_is_bounded() {
        let mut scene = Scene::new();
        let mut cookie = vec![0; 64];
        cookie[0] = 3;
        assert!(scene.flood(|_| PEER, &cookie)[0] <= 100);
    }

    /// `cargo test -p tunnel -- --ignored --nocapture handshake_message_cost_is_bounded`
    #[test]
    #[ignore = "measures"]
    fn handshake_message_cost_is_bounded() {
        let time = |what: &str, mut f: Box<dyn FnMut()>| {
            let start = Instant::now();
            (0..20_000).for_each(|_| f());
            eprintln!("{what}: {} ns", start.elapsed().as_nanos() / 20_000);
        };
        let copy = Scene::new().initiation();
        let mut scene = Scene::new();
        let message = copy.clone();
        scene.flood(|_| elsewhere(1), &message);
        time("refused", Box::new(move || _ = scene.judge(elsewhere(1), &message)));
        let mut scene = Scene::new();
        let message = copy.clone();
        time(
            "cookie",
            Box::new(move || {
                scene.now += Duration::from_micros(21);
                scene.judge(PEER, &message);
            }),
        );
        let own = LocalKey::new(&PrivateKey::from_bytes(&[7; 32]).unwrap());
        time(
            "a stranger's initiation",
            Box::new(move || {
                let Some(Message::Initiation(initiation)) = Message::parse(&copy) else { panic!() };
                assert!(own.open_initiation(initiation).is_ok());
            }),
        );
    }
}
