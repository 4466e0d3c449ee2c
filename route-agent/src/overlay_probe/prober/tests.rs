use super::*;

const MILLI: Duration = Duration::from_millis(1);

/// A clock, and gateways that answer at once as long as `answers` holds.
struct World {
    start: Instant,
    now: Instant,
    prober: Prober,
    /// Time in milliseconds and last octet of the destination of each small probe, those of a train once.
    sent: Vec<(u128, u8)>,
    /// Number of probes of full size.
    full: usize,
    answers_in_size: bool,
}

impl World {
    fn new(gateways: u8) -> Self {
        let (start, mut prober) = (Instant::now(), Prober::new(7));
        let targets: Vec<_> = (1..=gateways).map(target).collect();
        prober.follow(&targets, start);
        Self { start, now: start, prober, sent: Vec::new(), full: 0, answers_in_size: true }
    }

    fn pass(&mut self, millis: u32, answers: impl Fn(u8) -> bool) {
        self.pass_probes(millis, |probe| answers(octet(probe.to)));
    }

    fn pass_probes(&mut self, millis: u32, answers: impl Fn(&Probe) -> bool) {
        let end = self.now + millis * MILLI;
        while let Some(at) = self.prober.deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            for probe in self.prober.poll(self.now) {
                let number = octet(probe.to);
                match probe.size {
                    Some(_) => self.full += 1,
                    None => {
                        let sent = ((self.now - self.start).as_millis(), number);
                        self.sent.extend(Some(sent).filter(|sent| self.sent.last() != Some(sent)));
                    }
                }
                if answers(&probe) {
                    self.prober.handle_reply(probe.to, probe.nonce, self.now);
                    let is_full = self.answers_in_size.then_some(probe.size.is_some());
                    self.prober.handle_size(probe.to, probe.nonce, is_full);
                }
            }
        }
        self.now = end;
    }

    fn unreachable(&self) -> Vec<u8> {
        self.prober.unreachable().map(|(target, _)| octet(target.address)).collect()
    }
}

fn target(number: u8) -> Target {
    let address = SocketAddr::from(([10, 80, 0, number], 12346));
    let (mac, underlay) = (None, [192, 0, 2, number].into());
    let host = Some("n1".to_owned());
    Target { peer: format!("peer-{number}"), address, mac, underlay, host, mtu: 1440 }
}

fn octet(address: SocketAddr) -> u8 {
    let IpAddr::V4(ip) = address.ip() else { panic!("not IPv4") };
    ip.octets()[3]
}

#[test]
fn gateway_is_probed_once_a_second() {
    let mut world = World::new(1);
    world.pass(60_000, |_| true);
    assert_eq!(world.sent.len(), 61, "{:?}", world.sent);
    assert!(world.unreachable().is_empty());
}

#[test]
fn only_gateways_that_answered_are_lost() {
    let mut world = World::new(2);
    world.pass(10_000, |number| number == 1);
    assert_eq!(world.unreachable(), [2]);
    assert_eq!(world.prober.lost().count(), 0);
    world.pass(10_000, |_| false);
    assert_eq!(world.unreachable(), [1, 2]);
    let lost: Vec<_> = world.prober.lost().map(|(target, _)| octet(target.address)).collect();
    assert_eq!(lost, [1]);
}

#[test]
fn gateways_of_one_node_are_probed_in_turn() {
    let mut world = World::new(5);
    world.pass(900, |_| true);
    world.sent.clear();
    world.pass(50_000, |_| true);
    let turns: Vec<_> = world.sent.iter().map(|(_, number)| *number).collect();
    assert_eq!(turns, [1, 2, 3, 4, 5].repeat(10), "one a second, each every five seconds");
}

#[test]
fn many_gateways_are_probed_every_ten_seconds() {
    let mut world = World::new(100);
    world.pass(10_000, |_| true);
    world.sent.clear();
    world.pass(100_000, |_| true);
    assert_eq!(world.sent.len(), 100 * 10);
}

#[test]
fn lost_gateways_are_probed_every_2_seconds() {
    let mut world = World::new(100);
    world.pass(20_000, |_| true);
    world.pass(60_000, |number| number > 50);
    assert_eq!(world.prober.lost().count(), 50);
    world.sent.clear();
    world.pass(20_000, |number| number > 50);
    let of = |number| world.sent.iter().filter(|(_, of)| *of == number).count();
    assert_eq!((of(1), of(50), of(100)), (10, 10, 2));
    world.pass(2000, |_| true);
    assert_eq!(world.prober.lost().count(), 0);
}

#[test]
fn gateway_that_never_answered_waits_for_its_turn() {
    let mut world = World::new(100);
    world.pass(60_000, |_| false);
    world.sent.clear();
    world.pass(10_000, |_| false);
    assert_eq!(world.sent.len(), 100);
}

#[test]
fn gateway_without_replies_is_named_in_3_seconds() {
    let mut world = World::new(1);
    world.pass(1001, |_| true);
    world.pass(2100, |_| false);
    assert!(world.unreachable().is_empty(), "one lost probe is no fault");
    world.pass(300, |_| false);
    assert_eq!(world.unreachable(), [1]);
    world.pass(60_000, |_| false);
    assert_eq!(world.unreachable(), [1]);
    world.pass(1000, |_| true);
    assert!(world.unreachable().is_empty());
}

#[test]
fn all_gateways_of_a_lost_node_are_named_soon() {
    let mut world = World::new(30);
    world.pass(60_100, |_| true);
    world.pass(2600, |_| false);
    assert_eq!(world.unreachable().len(), 30);
}

/// Number of a thousand losses of this share that are reported within that time.
fn reported_in_time(percent: u64, millis: u32) -> usize {
    let is_in_time = |seed: &u32| {
        let mut world = World::new(1);
        world.pass(1001 + seed, |_| true);
        let random = std::cell::Cell::new(u64::from(*seed) << 32 | 0x9e37_79b9);
        world.pass(millis, |_| {
            let next = random.get() ^ random.get() << 13;
            let next = next ^ next >> 7;
            random.set(next ^ next << 17);
            random.get() % 100 >= percent
        });
        world.prober.lossy().count() > 0
    };
    (0..1000).filter(is_in_time).count()
}

#[test]
fn loss_is_reported_in_two_to_three_seconds() {
    let one_way = [2000, 2500, 3000].map(|millis| reported_in_time(40, millis));
    let both_ways = [2000, 2500, 3000].map(|millis| reported_in_time(64, millis));
    let is_enough = |of: [usize; 3]| of.iter().zip([940, 980, 990]).all(|(of, least)| *of >= least);
    assert!(is_enough(one_way) && is_enough(both_ways), "{one_way:?} and {both_ways:?} of 1000");
}

#[test]
fn all_gateways_of_a_lossy_node_are_named_soon() {
    let mut world = World::new(3);
    world.pass(10_000, |_| true);
    let number = std::cell::Cell::new(0_u32);
    let is_answered = |_| number.replace(number.get() + 1) % 5 > 1;
    world.pass(10_000, is_answered);
    let lossy = world.prober.lossy();
    let lossy: Vec<_> = lossy.map(|(target, _)| octet(target.address)).collect();
    assert_eq!(lossy, [1, 2, 3]);
    assert!(world.unreachable().is_empty());
    world.pass(10_000, is_answered);
    world.sent.clear();
    world.pass(10_000, is_answered);
    assert!(world.sent.len() < 250, "{} probes in 10 s", world.sent.len());
    world.pass(5000, |_| false);
    assert_eq!(world.prober.lossy().count(), 0, "none answers");
    assert_eq!(world.unreachable(), [1, 2, 3]);
}

#[test]
fn repeated_outages_are_no_loss() {
    let mut world = World::new(2);
    for _ in 0..20 {
        world.pass(2700, |_| true);
        assert_eq!(world.prober.lossy().count(), 0, "{:?}", world.now - world.start);
        world.pass(2800, |_| false);
        assert_eq!(world.unreachable().len(), 2);
    }
}

#[test]
fn way_for_small_packets_only_is_named() {
    let mut world = World::new(2);
    let small = |probe: &Probe| probe.size.is_none();
    world.pass_probes(10_000, |_| true);
    assert_eq!(world.prober.cramped().count(), 0);
    world.pass_probes(10_000, small);
    assert_eq!(world.prober.cramped().count(), 2);
    assert!(world.unreachable().is_empty() && world.prober.lossy().count() == 0);
    world.sent.clear();
    world.full = 0;
    world.pass_probes(20_000, small);
    assert_eq!(world.prober.cramped().count(), 2);
    assert_eq!((world.sent.len(), world.full), (20, 20), "one of each a turn");
    world.pass_probes(2000, |_| true);
    assert_eq!(world.prober.cramped().count(), 0);
    world.answers_in_size = false;
    world.pass_probes(20_000, small);
    assert_eq!(world.prober.cramped().count(), 0, "a gateway of before took its place");
}

#[test]
fn suspended_agent_reports_no_gateway() {
    let mut world = World::new(1);
    world.pass(999, |_| true);
    world.pass(2, |_| false);
    world.now += Duration::from_secs(20);
    world.pass(1, |_| false);
    assert!(world.unreachable().is_empty());
    world.pass(1000, |_| true);
    assert!(world.unreachable().is_empty());
}

#[test]
fn replies_of_others_and_old_ones_do_not_count() {
    let mut world = World::new(1);
    let probe = world.prober.poll(world.now).remove(0);
    let other = SocketAddr::new(probe.to.ip(), 9);
    assert!(!world.prober.handle_reply(other, probe.nonce, world.now));
    assert!(!world.prober.handle_reply(probe.to, probe.nonce - 1, world.now));
    assert!(!world.prober.handle_reply(probe.to, probe.nonce + 9, world.now));
    assert!(world.prober.handle_reply(probe.to, probe.nonce, world.now));
    assert!(!world.prober.handle_reply(probe.to, probe.nonce, world.now), "twice");
}

#[test]
fn gateway_that_cannot_report_is_known_until_it_can() {
    let mut world = World::new(1);
    let to = world.prober.poll(world.now).remove(0).to;
    let since = world.now;
    for cut_off in [true, true, false] {
        world.prober.handle_cut_off(to, cut_off, world.now);
        let known: Vec<_> = world.prober.cut_off().map(|(_, since)| since).collect();
        assert_eq!(known, if cut_off { vec![since] } else { Vec::new() });
        world.now += Duration::from_secs(1);
    }
}

#[test]
fn announced_time_of_the_next_probe_holds() {
    let mut world = World::new(20);
    let mut announced: BTreeMap<SocketAddr, Instant> = BTreeMap::new();
    for step in 0..60_000 {
        world.now += MILLI;
        for probe in world.prober.poll(world.now) {
            let late = announced.insert(probe.to, world.now + probe.next);
            assert!(late.is_none_or(|due| world.now <= due), "{probe:?} is late");
            // For ten of the sixty seconds, nobody answers.
            if !(20_000..30_000).contains(&step) {
                world.prober.handle_reply(probe.to, probe.nonce, world.now);
            }
        }
    }
}

#[test]
fn way_that_fails_again_and_again_is_lossy() {
    for phase in 0..20 {
        for (down, up) in [(700, 1300), (1000, 1000), (1000, 2000)] {
            let mut world = World::new(1);
            world.pass(20_001 + 97 * phase, |_| true);
            for _ in 0..6 {
                world.pass(down, |_| false);
                world.pass(up, |_| true);
            }
            world.pass(down, |_| false);
            assert_eq!(world.prober.lossy().count(), 1, "{down} and {up} ms, phase {phase}");
            world.pass(2400, |_| true);
            assert_eq!(world.prober.lossy().count(), 0, "{down} and {up} ms, phase {phase}");
        }
    }
}

#[test]
fn loss_of_a_way_to_ten_gateways_is_over_soon() {
    for phase in 0..20 {
        let mut world = World::new(10);
        let underlay = target(1).underlay;
        let targets = (1..=10).map(|number| Target { underlay, ..target(number) });
        world.prober.follow(&targets.collect::<Vec<_>>(), world.now);
        world.pass(20_001 + 97 * phase, |_| true);
        let number = std::cell::Cell::new(0_u32);
        world.pass(20_000, |_| number.replace(number.get() + 1) % 5 > 1);
        assert_eq!(world.prober.lossy().count(), 10, "phase {phase}");
        world.pass(2400, |_| true);
        assert_eq!(world.prober.lossy().count(), 0, "phase {phase}");
    }
}
