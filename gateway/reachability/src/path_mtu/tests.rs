use super::*;
use crate::path_mtu::tests::sim::Sim;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn every_path_is_found_to_the_byte_within_a_second() {
    for mtu in
        (MIN_PATH_MTU..=9000).step_by(97).chain([MIN_PATH_MTU, 1279, 1280, 1340, 1500, 8999, 9000])
    {
        let mut sim = Sim::new(9000, mtu);
        sim.run(SECOND);
        assert_eq!(sim.path.found(), Some(mtu));
    }
}

#[test]
fn limit_is_respected_after_one_round_trip() {
    let mut sim = Sim::new(1400, 9000);
    sim.run(sim.rtt + Duration::from_millis(1));
    assert_eq!(sim.path.found(), Some(1400));
    assert_eq!(sim.largest_sent, 1400);
}

#[test]
fn path_change_under_load_is_found_within_2_s() {
    for rtt in [1, 30, 130] {
        for (before, after) in
            [(9000, 1500), (1500, 1280), (9000, 8999), (1280, 9000), (1400, 1401), (1500, 1100)]
        {
            let mut sim = Sim::new(9000, before);
            sim.rtt = Duration::from_millis(rtt);
            sim.busy = true;
            sim.run(5 * SECOND);
            assert_eq!(sim.path.found(), Some(before));
            sim.mtu = after;
            let start = sim.now;
            while sim.path.found() != Some(after) {
                sim.run(Duration::from_millis(1));
                assert!(sim.now - start <= 2 * SECOND, "{before} to {after}, {rtt} ms");
            }
        }
    }
}

#[test]
fn path_below_1280_is_found_from_any_size_before() {
    for before in [1280, 1400, 1500, 9000] {
        for after in [MIN_PATH_MTU, 577, 927, 928, 929, 1000, 1100, 1240, 1279] {
            let mut sim = Sim::new(9000, before);
            sim.run(5 * SECOND);
            assert_eq!(sim.path.found(), Some(before));
            sim.mtu = after;
            sim.run(12 * SECOND);
            assert_eq!(sim.path.found(), Some(after), "from {before}");
            sim.mtu = before;
            sim.run(12 * SECOND);
            assert_eq!(sim.path.found(), Some(before), "from {after}");
        }
    }
}

#[test]
fn idle_path_is_probed_within_12_s() {
    for (before, after) in [(1500, 1400), (1400, 1500)] {
        let mut sim = Sim::new(1500, before);
        sim.run(5 * SECOND);
        sim.mtu = after;
        sim.run(12 * SECOND);
        assert_eq!(sim.path.found(), Some(after));
    }
}

#[test]
fn idle_path_sends_nothing_until_a_flow_starts() {
    let mut sim = Sim::new(1500, 1500);
    sim.run(5 * SECOND);
    sim.polls = 0;
    sim.run(MINUTE);
    assert!(sim.polls <= 6 * 3, "{} looks in a minute", sim.polls);
    (sim.busy, sim.mtu) = (true, 1400);
    sim.run(SECOND);
    assert_eq!(sim.path.found(), Some(1400));
}

#[test]
fn loss_and_long_queues_change_nothing() {
    for seed in 0..20 {
        let mut sim = Sim::new(9000, 1500);
        sim.busy = true;
        sim.run(5 * SECOND);
        assert_eq!(sim.path.found(), Some(1500));
        sim.random = seed * 7919 + 1;
        sim.loss_percent = 8;
        sim.jitter = Duration::from_millis(300);
        let start = sim.now;
        while sim.now - start < 5 * MINUTE {
            sim.run(Duration::from_millis(10));
            assert_eq!(sim.path.found(), Some(1500), "seed {seed}, after {:?}", sim.now - start);
        }
    }
}

/// The share is that of round trips.
#[test]
fn heavy_loss_changes_nothing() {
    for (loss_percent, seed) in [20, 40, 50, 60, 70, 80, 90, 95]
        .into_iter()
        .flat_map(|loss| (0..20).map(move |seed| (loss, seed)))
    {
        let mut sim = Sim::new(1500, 1500);
        sim.busy = seed % 2 == 0;
        sim.run(5 * SECOND);
        sim.random = seed * 7919 + 1;
        sim.loss_percent = loss_percent;
        for _ in 0..300 {
            sim.path.handle_life(None, sim.now);
            sim.run(Duration::from_millis(100));
            assert_eq!(sim.path.found(), Some(1500), "{loss_percent} % loss, seed {seed}");
        }
        sim.loss_percent = 0;
        sim.path.handle_life(None, sim.now);
        sim.run(15 * SECOND);
        assert_eq!(sim.path.found(), Some(1500));
    }
}

#[test]
fn a_cut_is_no_smaller_path_and_costs_nothing() {
    let mut sim = Sim::new(9000, 1500);
    sim.busy = true;
    sim.run(5 * SECOND);
    sim.cut = true;
    sim.run(2 * SECOND);
    let sent = sim.bytes_sent;
    sim.run(MINUTE);
    assert_eq!((sim.path.found(), sim.bytes_sent), (Some(1500), sent));
    (sim.cut, sim.mtu) = (false, 1400);
    sim.path.handle_life(Some(sim.rtt), sim.now);
    sim.run(SECOND);
    assert_eq!(sim.path.found(), Some(1400));
}

#[test]
fn sizes_below_min_path_mtu_are_not_probed() {
    let mut sim = Sim::new(MIN_PATH_MTU, 1500);
    sim.run(MINUTE);
    assert_eq!((sim.path.found(), sim.bytes_sent), (None, 0));
    let mut sim = Sim::new(1500, 500);
    sim.run(MINUTE);
    assert_eq!(sim.path.found(), None);
    // Pongs arrive all the time; searches become rare.
    sim.bytes_sent = 0;
    for _ in 0..600 {
        sim.path.handle_life(Some(sim.rtt), sim.now);
        sim.run(SECOND);
    }
    assert!(sim.bytes_sent < 20 * 2 * 23 * 1500, "{}", sim.bytes_sent);
}

#[test]
fn cut_after_fruitless_searches_is_forgotten_at_once() {
    let mut sim = Sim::new(1500, 500);
    sim.run_alive(5 * MINUTE);
    assert_eq!(sim.path.found(), None);
    sim.mtu = 1500;
    sim.run_alive(2 * MINUTE);
    assert_eq!(sim.path.found(), Some(1500), "found at last");
    (sim.cut, sim.busy) = (true, true);
    sim.run(2 * SECOND);
    (sim.cut, sim.mtu) = (false, 1400);
    sim.run_alive(3 * SECOND);
    assert_eq!(sim.path.found(), Some(1400), "the pause is the first one's");
}

#[test]
fn hours_of_fruitless_searches_keep_the_pause() {
    let mut sim = Sim::new(1500, 500);
    sim.run_alive(5 * 60 * MINUTE);
    let mut searches = 0;
    for minute in 0..40 {
        sim.bytes_sent = 0;
        sim.run_alive(MINUTE);
        let most = 2 * 23 * 1500;
        assert!(sim.bytes_sent <= most, "{} bytes in minute {minute}", sim.bytes_sent);
        searches += u32::from(sim.bytes_sent > 0);
    }
    assert!(searches > 30, "{searches} searches in 40 minutes");
}

#[test]
fn another_limit_or_way_is_looked_at_at_once() {
    let mut sim = Sim::new(1500, 9000);
    sim.run(SECOND);
    sim.path.set_limit(9000, sim.now);
    assert_eq!(sim.path.found(), Some(1500));
    sim.run(SECOND);
    assert_eq!(sim.path.found(), Some(9000));
    sim.path.set_limit(1400, sim.now);
    assert_eq!(sim.path.found(), Some(1400));
    sim.mtu = 1300;
    sim.path.search(sim.now);
    sim.run(SECOND);
    assert_eq!(sim.path.found(), Some(1300));
}

#[test]
fn found_mtu_is_kept_over_restart() {
    let now = Instant::now();
    assert_eq!(PathMtu::new(9000, Some(1500), now).found(), Some(1500));
    assert_eq!(PathMtu::new(1400, Some(1500), now).found(), Some(1400));
    assert_eq!(PathMtu::new(9000, Some(0), now).found(), None);
}

#[test]
fn looking_costs_little() {
    for (limit, mtu, busy, at_most) in [
        (1500, 1500, false, 160),
        (1500, 1400, false, 300),
        (1500, 1500, true, 5_100),
        (9000, 1500, true, 7_600),
    ] {
        let mut sim = Sim::new(limit, mtu);
        sim.busy = busy;
        sim.run(5 * SECOND);
        sim.bytes_sent = 0;
        sim.run(100 * SECOND);
        let rate = sim.bytes_sent / 100;
        assert!(rate <= at_most, "{rate} bytes/s at {mtu} of {limit}, busy: {busy}");
    }
}

mod sim {
    use super::*;

    /// A path, and a manual clock.
    pub(super) struct Sim {
        pub(super) path: PathMtu,
        pub(super) mtu: u32,
        pub(super) rtt: Duration,
        /// Added to it at most, as if by a queue; the order is kept.
        pub(super) jitter: Duration,
        pub(super) loss_percent: u64,
        pub(super) cut: bool,
        pub(super) busy: bool,
        pub(super) now: Instant,
        pub(super) bytes_sent: u64,
        pub(super) largest_sent: u32,
        pub(super) random: u64,
        answers: VecDeque<(Instant, u32)>,
        large: u64,
        pub(super) polls: u64,
    }

    impl Sim {
        /// A peer that has just sent a packet.
        pub(super) fn new(limit: u32, mtu: u32) -> Self {
            let (now, rtt) = (Instant::now(), Duration::from_millis(10));
            let mut path = PathMtu::new(limit, None, now);
            path.handle_life(Some(rtt), now);
            Self {
                path,
                mtu,
                rtt,
                jitter: Duration::ZERO,
                loss_percent: 0,
                cut: false,
                busy: false,
                now,
                bytes_sent: 0,
                largest_sent: 0,
                random: 1,
                answers: VecDeque::new(),
                large: 0,
                polls: 0,
            }
        }

        pub(super) fn run(&mut self, time: Duration) {
            let end = self.now + time;
            loop {
                if self.busy && self.path.rests_at().is_some() {
                    self.poll();
                }
                let answer = self.answers.front().map(|(at, _)| *at);
                let next = [answer, self.path.deadline()].into_iter().flatten().min();
                let Some(next) = next.filter(|next| *next <= end) else { break };
                self.now = self.now.max(next);
                if answer == Some(next) {
                    let (_, nonce) = self.answers.pop_front().unwrap();
                    self.path.handle_answer(nonce, self.now);
                } else {
                    self.poll();
                }
            }
            self.now = end;
        }

        /// Packets of no particular size come from the peer all the time.
        pub(super) fn run_alive(&mut self, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                self.path.handle_life(Some(self.rtt), self.now);
                self.run(SECOND / 4);
            }
        }

        fn poll(&mut self) {
            self.large += u64::from(self.busy);
            self.polls += 1;
            for probe in self.path.poll(self.large, self.now) {
                self.bytes_sent += u64::from(probe.size);
                self.largest_sent = self.largest_sent.max(probe.size);
                let lost = self.cut || self.draw(100) < self.loss_percent;
                if lost || probe.size > self.mtu {
                    continue;
                }
                let queue = self.jitter.mul_f64(self.draw(1000) as f64 / 1000.0);
                let last = self.answers.back().map_or(self.now, |(at, _)| *at);
                self.answers.push_back((last.max(self.now + self.rtt + queue), probe.nonce));
            }
        }

        /// xorshift64, below `bound`.
        fn draw(&mut self, bound: u64) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.random % bound
        }
    }
}
