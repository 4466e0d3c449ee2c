//! Choice of the handshake messages that are worth a Diffie-Hellman, and of the senders that have
//! to prove their address first (whitepaper section 5.3).
//!
//! Costs of a message beside its receiving: next to nothing if it names no message of ours, 1 us to
//! check `mac1`, 4 us to check a cookie or to make one, 3 to 15 us to send it (the most where the
//! other end is on the same machine), 60 us to find that its sender is a stranger.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::TunnResult;
use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::x25519;

use super::{COOKIE_REPLY, INITIATION, RESPONSE, index_at};
use crate::DropReason;

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

/// Verdict on a handshake message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is worth a Diffie-Hellman.
    Work,
    /// It is answered with a cookie, of so many bytes.
    Cookie(usize),
    /// There are too many like it.
    Busy,
    Drop(DropReason),
}

/// Bounds what handshake messages cost, so that a flood neither disturbs a session nor hinders
/// another one from being made.
///
/// * An answer that names none of our last messages costs next to nothing: a stranger who
///   cannot listen does not know their indices.
/// * As long as few come, messages are worked on as they are. Then they need a cookie, and those
///   that have one have shares of their own.
/// * The peer's address has shares of its own, so no flood from elsewhere takes its place. Other
///   addresses have one each (as far as a table of hashes distinguishes them; of IPv6 a /64 is
///   one), so none takes another's.
pub(super) struct HandshakeLimiter {
    /// Only ever checks `mac1`.
    macs: Arc<RateLimiter>,
    /// Always wants a cookie.
    cookies: RateLimiter,
    start: Instant,
    peer: Shares,
    others: Shares,
    answers: Bucket,
    checks_of_peer: Bucket,
    cookies_for_peer: Bucket,
    sources: Box<[Bucket]>,
    /// Key of the table of sources, so that no sender knows which others share its place.
    key: u64,
    /// Indices of our last messages: boringtun remembers two, and while keys are rotated there are
    /// two of it. That an answer comes too late is worth knowing, too.
    sent: [Option<u32>; 8],
}

#[derive(Default)]
struct Shares {
    unproven: Bucket,
    proven: Bucket,
}

impl HandshakeLimiter {
    /// `seed` is any random number.
    pub(super) fn new(own: &x25519::PublicKey, seed: u64, now: Instant) -> Self {
        Self {
            macs: Arc::new(RateLimiter::new(own, u64::MAX)),
            cookies: RateLimiter::new(own, 0),
            start: now,
            peer: Shares::default(),
            others: Shares::default(),
            answers: Bucket::default(),
            checks_of_peer: Bucket::default(),
            cookies_for_peer: Bucket::default(),
            sources: vec![Bucket::default(); SOURCES].into(),
            key: seed,
            sent: [None; 8],
        }
    }

    /// A limiter for boringtun that leaves the limits to this one.
    pub(super) fn for_boringtun(&self) -> Arc<RateLimiter> {
        Arc::clone(&self.macs)
    }

    /// Notes an initiation or response of ours: it may be answered from now on.
    pub(super) fn note_sent(&mut self, message: &[u8]) {
        self.sent.rotate_right(1);
        self.sent[0] = index_at(message, 4);
    }

    /// Decides on a message that is not data. `is_peer`: it has the peer's address, as far as that
    /// is known. A cookie is put into `dst`, which has room for it.
    pub(super) fn judge(
        &mut self,
        (from, is_peer): (SocketAddr, bool),
        message: &[u8],
        dst: &mut [u8],
        now: Instant,
    ) -> Verdict {
        const REJECTED: Verdict = Verdict::Drop(DropReason::HandshakeRejected);
        let now = now.saturating_duration_since(self.start);
        let names = match (message.first_chunk(), message.len()) {
            (Some([INITIATION, 0, 0, 0]), 148) => None,
            (Some([RESPONSE, 0, 0, 0]), 92) => Some(index_at(message, 8)),
            (Some([COOKIE_REPLY, 0, 0, 0]), 64) => Some(index_at(message, 4)),
            _ => return Verdict::Drop(DropReason::Malformed),
        };
        if names.is_some_and(|index| !self.sent.contains(&index)) {
            return REJECTED;
        }
        if message[0] == COOKIE_REPLY {
            return if self.answers.take(&UNPROVEN, now) { Verdict::Work } else { REJECTED };
        }
        // A cookie is checked, or given, only to somebody who knows our public key.
        if self.macs.verify_packet(None, message, dst).is_err() {
            return REJECTED;
        }
        let shares = if is_peer { &mut self.peer } else { &mut self.others };
        let unproven = if names.is_some() { &mut self.answers } else { &mut shares.unproven };
        if unproven.take(&UNPROVEN, now) {
            return Verdict::Work;
        }
        // Without a cookie it can only be given one.
        let shows_one = message[message.len() - 16..] != [0; 16];
        let may_check = match (is_peer, shows_one) {
            (true, true) => self.checks_of_peer.take(&CHECKS_OF_PEER, now),
            (true, false) => self.cookies_for_peer.take(&COOKIES_FOR_PEER, now),
            (false, _) => self.sources[place_of(from.ip(), self.key)].take(&CHECKS_OF_SOURCE, now),
        };
        if !may_check {
            return Verdict::Busy;
        }
        match self.cookies.verify_packet(Some(with_port(from)), message, dst) {
            Ok(_) if shares.proven.take(&PROVEN, now) => Verdict::Work,
            Err(TunnResult::WriteToNetwork(cookie))
                if !(is_peer && shows_one)
                    || self.cookies_for_peer.take(&COOKIES_FOR_PEER, now) =>
            {
                Verdict::Cookie(cookie.len())
            }
            Ok(_) | Err(_) => Verdict::Busy,
        }
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

/// Returns the input of a cookie. boringtun leaves the port out (whitepaper section 5.4.7 has it),
/// so it goes in as a part of the address, in which IPv4 leaves enough room; of two IPv6 addresses
/// that become equal so, both are in one /64.
fn with_port(from: SocketAddr) -> IpAddr {
    let bits = match from {
        SocketAddr::V4(v4) => u128::from(v4.ip().to_bits()) << 16,
        SocketAddr::V6(v6) => v6.ip().to_bits(),
    };
    Ipv6Addr::from_bits(bits ^ u128::from(from.port())).into()
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a clock has to start somewhere")]
mod tests {
    use super::*;
    use boringtun::noise::Tunn;
    use boringtun::x25519::{PublicKey, StaticSecret};

    const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 5);

    /// A limiter, and somebody who knows its key.
    struct Scene {
        limiter: HandshakeLimiter,
        caller: Tunn,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let own = PublicKey::from(&StaticSecret::from([7; 32]));
            let now = Instant::now();
            let caller = Tunn::new(StaticSecret::from([9; 32]), own, None, None, 1, None);
            Self { limiter: HandshakeLimiter::new(&own, 3, now), caller, now }
        }

        fn initiation(&mut self) -> Vec<u8> {
            let mut dst = [0; 148];
            let made = self.caller.format_handshake_initiation(&mut dst, true);
            let TunnResult::WriteToNetwork(message) = made else { panic!("{made:?}") };
            message.to_vec()
        }

        fn judge(&mut self, from: SocketAddr, message: &[u8]) -> Verdict {
            let who = (from, from.ip() == PEER.ip());
            self.limiter.judge(who, message, &mut [0; 148], self.now)
        }

        /// A second of many messages; how many were worked on, answered with a cookie, dropped.
        fn flood(&mut self, from: impl Fn(u32) -> SocketAddr, message: &[u8]) -> [usize; 3] {
            let mut counts = [0; 3];
            let start = self.now;
            for i in 0..100_000 {
                self.now = start + Duration::from_micros(10) * i;
                counts[match self.judge(from(i), message) {
                    Verdict::Work => 0,
                    Verdict::Cookie(64) => 1,
                    Verdict::Cookie(length) => panic!("a cookie of {length} bytes"),
                    Verdict::Busy | Verdict::Drop(_) => 2,
                }] += 1;
            }
            counts
        }

        /// Returns the attempts of a caller, as the peer or as a stranger, until one is worked on.
        fn calls_until_heard(&mut self, from: SocketAddr) -> usize {
            for call in 1..=10 {
                let message = self.initiation();
                let (mut dst, who) = ([0; 148], (from, from.ip() == PEER.ip()));
                match self.limiter.judge(who, &message, &mut dst, self.now) {
                    Verdict::Work => return call,
                    Verdict::Cookie(length) => {
                        let mut nothing = [0; 148];
                        let taken = self.caller.decapsulate(None, &dst[..length], &mut nothing);
                        assert!(matches!(taken, TunnResult::Done), "{taken:?}");
                    }
                    Verdict::Busy | Verdict::Drop(_) => {}
                }
            }
            11
        }
    }

    fn elsewhere(i: u32) -> SocketAddr {
        SocketAddr::from((std::net::Ipv4Addr::from(0x0a00_0000 + i), 5))
    }

    #[test]
    fn a_flood_with_one_address_leaves_all_other_shares_alone() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let [worked, cookies, dropped] = scene.flood(|_| elsewhere(1), &message);
        assert!(worked <= 100 && cookies <= 20 && dropped > 99_000, "{worked} {cookies}");
        assert_eq!(scene.judge(PEER, &message), Verdict::Work, "the peer, as if nothing were");
        assert_eq!(scene.calls_until_heard(elsewhere(2)), 2, "a cookie, then a response");
    }

    #[test]
    fn a_flood_with_any_addresses_costs_a_bounded_share_of_a_core() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let [worked, cookies, _] = scene.flood(elsewhere, &message);
        assert!(worked <= 100 && cookies <= 20 * SOURCES, "{worked} {cookies}");
        let [worked, cookies, _] = scene.flood(elsewhere, &message);
        assert!(worked <= 60 && cookies <= 11 * SOURCES, "{worked} {cookies}");
        assert_eq!(scene.judge(PEER, &message), Verdict::Work);
    }

    #[test]
    fn a_flood_with_the_peers_own_address_only_makes_it_show_a_cookie() {
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
    fn a_cookie_is_for_one_address_and_port_and_does_not_buy_everything() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        scene.flood(|_| elsewhere(1), &message);
        assert_eq!(scene.calls_until_heard(elsewhere(2)), 2);
        let with_cookie = scene.initiation();
        assert_eq!(scene.judge(elsewhere(2), &with_cookie), Verdict::Work);
        let mut other_port = elsewhere(2);
        other_port.set_port(6);
        assert_eq!(scene.judge(other_port, &with_cookie), Verdict::Cookie(64));
        assert_eq!(scene.judge(elsewhere(3), &with_cookie), Verdict::Cookie(64));
        let [worked, ..] = scene.flood(|_| elsewhere(2), &with_cookie);
        assert!(worked <= 100, "{worked} of one whose address is proven");
    }

    #[test]
    fn what_is_not_for_us_takes_from_no_share() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        let mut wrong_mac = message.clone();
        wrong_mac[120] ^= 1;
        let mut response = vec![0; 92];
        response[0] = RESPONSE;
        let mut cookie = vec![0; 64];
        cookie[0] = COOKIE_REPLY;
        scene.limiter.note_sent(&message);
        for forged in [&wrong_mac, &response, &cookie] {
            assert_eq!(scene.flood(|_| PEER, forged)[2], 100_000);
        }
        for odd in [&message[..147], &[], &[1], &[1, 0, 0, 0], &[9; 148], &[1, 1, 0, 0]] {
            assert_eq!(scene.judge(PEER, odd), Verdict::Drop(DropReason::Malformed));
        }
        assert_eq!(scene.judge(PEER, &message), Verdict::Work);
    }

    /// `mac1` of what a stranger sends is right, and it observed our initiation.
    #[test]
    fn a_flood_of_answers_that_name_our_message_is_bounded() {
        let mut scene = Scene::new();
        let message = scene.initiation();
        scene.limiter.note_sent(&message);
        let mut cookie = vec![0; 64];
        cookie[0] = COOKIE_REPLY;
        cookie[4..8].copy_from_slice(&message[4..8]);
        assert!(scene.flood(|_| PEER, &cookie)[0] <= 100);
    }

    /// `cargo test -p tunnel -- --ignored --nocapture what_a_message_costs`
    #[test]
    #[ignore = "measures"]
    fn what_a_message_costs() {
        let time = |what: &str, mut f: Box<dyn FnMut()>| {
            let start = Instant::now();
            (0..20_000).for_each(|_| f());
            eprintln!("{what}: {} ns", start.elapsed().as_nanos() / 20_000);
        };
        let mut scene = Scene::new();
        let copy = scene.initiation();
        time(
            "unknown index",
            Box::new(move || {
                let mut response = [2; 92];
                response[1..4].fill(0);
                scene.judge(PEER, &response);
            }),
        );
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
        let own = StaticSecret::from([7; 32]);
        let stranger = PublicKey::from(&StaticSecret::from([8; 32]));
        let macs = Scene::new().limiter.for_boringtun();
        let mut tunn = Tunn::new(own, stranger, None, None, 1, Some(macs));
        time(
            "a stranger's initiation",
            Box::new(move || {
                assert!(matches!(tunn.decapsulate(None, &copy, &mut [0; 200]), TunnResult::Err(_)));
            }),
        );
    }
}
