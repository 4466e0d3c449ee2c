use std::hash::{Hash as _, Hasher as _};

use super::*;

const MS: Duration = Duration::from_millis(1);
const RTT: Duration = MS;

/// A log whose probes get lost by a rule.
struct Sim {
    log: ProbeLog,
    start: Instant,
    now: Instant,
    stamp: i128,
    sent: Vec<Instant>,
    round_trip: Duration,
    /// Answers on their way.
    answers: VecDeque<(Instant, i128)>,
    /// Between two trains.
    interval: Duration,
    /// Time between two packets of the peer, if there are any.
    receives: Option<Duration>,
    received: Option<Instant>,
    is_cut: bool,
}

impl Sim {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            log: ProbeLog::default(),
            start: now,
            now,
            stamp: 0,
            sent: Vec::new(),
            round_trip: RTT,
            answers: VecDeque::new(),
            interval: 2000 * MS,
            receives: None,
            received: None,
            is_cut: false,
        }
    }

    fn send(&mut self, is_lost: impl Fn(i128) -> bool) {
        self.stamp += 1;
        self.sent.push(self.now);
        self.log.handle_sent(self.stamp, self.now);
        if !is_lost(self.stamp) {
            self.answers.push_back((self.now + self.round_trip, self.stamp));
        }
    }

    fn receive(&mut self) {
        while let Some((at, stamp)) =
            self.answers.front().copied().filter(|(at, _)| *at <= self.now)
        {
            self.answers.pop_front();
            self.log.handle_answer(stamp, self.round_trip, at);
        }
    }

    /// Goes on for so long, with a train every interval while nothing is suspected.
    fn run(&mut self, time: Duration, is_lost: impl Fn(i128) -> bool) {
        self.run_from(self.now, time, is_lost);
    }

    /// The same, with the first train at another time.
    fn run_from(&mut self, mut train_at: Instant, time: Duration, is_lost: impl Fn(i128) -> bool) {
        let end = self.now + time;
        while self.now < end {
            self.receive();
            let since = self.now - self.start;
            let last = self.receives.map(|every| {
                self.now - Duration::from_millis((since.as_millis() % every.as_millis()) as u64)
            });
            self.received = last.or(self.received);
            self.log.set_received(self.received, self.is_cut);
            if self.now >= train_at {
                let count = if self.log.is_bursting() { 1 } else { TRAIN };
                (0..count).for_each(|_| self.send(&is_lost));
                train_at += self.interval;
            }
            if self.log.deadline().is_some_and(|due| self.now >= due)
                && self.log.handle_tick(self.now)
            {
                self.send(&is_lost);
            }
            self.now += MS;
        }
    }
}

/// Time until a loss of 90 % in one direction is named at the sender, and for how long it is not within the 20 s after
/// that, in ms, of an idle tunnel: all answers and probes of the peer arrive, which reports that it has received none of
/// the probes that are unanswered.
fn one_way_loss(seed: u64) -> (u64, u64) {
    let mut sim = Sim::new();
    let random = |stamp: u64| {
        let mut hasher = std::hash::DefaultHasher::new();
        (seed, stamp).hash(&mut hasher);
        hasher.finish() % 1000
    };
    let is_lost = |stamp: i128| random(stamp as u64) < 900;
    sim.run(2000 * MS, |_| false);
    // Trains of both ends.
    let mut train_at = sim.now + 2 * random(0) as u32 * MS;
    let mut theirs = sim.now + 2 * random(u64::MAX) as u32 * MS;
    let (mut first, mut unnamed) = (None, 0);
    for ms in 0..40_000 {
        let before = sim.log.last_answer();
        sim.run_from(train_at, MS, is_lost);
        if sim.now > train_at {
            train_at += sim.log.pace(sim.interval, sim.now);
        }
        if sim.log.last_answer() != before {
            sim.is_cut = false;
        }
        if sim.now >= theirs {
            sim.received = Some(sim.now);
            let unanswered = sim.log.unanswered().map(|probes| probes.first);
            sim.is_cut = unanswered.is_some_and(|first| sim.now > first + 2 * RTT);
            theirs += if sim.log.is_bursting() { 100 * MS } else { sim.interval };
        }
        let is_silent = sim.log.unanswered().is_some_and(|probes| probes.is_silence());
        let is_named = sim.log.loss_percent().is_some() || sim.is_cut && is_silent;
        unnamed += u64::from(first.is_some() && !is_named);
        if is_named {
            first.get_or_insert(ms);
        }
        if first.is_some_and(|first| ms >= first + 20_000) {
            break;
        }
    }
    (first.unwrap_or(40_000), unnamed)
}

#[test]
fn heavy_loss_in_one_direction_is_named_soon() {
    let all: Vec<_> = (0..1000).map(one_way_loss).collect();
    let (mut took, mut unnamed): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    took.sort();
    unnamed.sort();
    assert!(took[950] <= 2900 && took[999] <= 3500, "{:?}", &took[950..]);
    assert!(unnamed[900] <= 300 && unnamed[999] <= 1500, "{:?}", &unnamed[900..]);
}

/// Two of five, in no regular order.
fn forty_percent(stamp: i128) -> bool {
    [true, false, false, true, false, false, false, true, true, false][(stamp % 10) as usize]
}

#[test]
fn answered_probes_need_no_burst() {
    let mut sim = Sim::new();
    sim.run(10_000 * MS, |_| false);
    assert_eq!((sim.sent.len(), sim.log.loss_percent()), (5 * TRAIN, None));
    assert_eq!(sim.log.unanswered(), None);
}

#[test]
fn forty_percent_loss_shows_in_a_second_and_clears() {
    let mut sim = Sim::new();
    sim.run(900 * MS, forty_percent);
    assert!(sim.log.loss_percent().is_some(), "{:?}", sim.log);
    sim.run(8000 * MS, forty_percent);
    assert_eq!(sim.log.loss_percent(), Some(40));
    sim.run(2500 * MS, |_| false);
    assert_eq!(sim.log.loss_percent(), None);
    assert!(!sim.log.is_bursting());
}

/// A probe in a hundred is answered, or none, and packets of pods arrive.
#[test]
fn loss_of_nearly_all_probes_shows_and_stays() {
    let (often, seldom) = (Some(10 * MS), Some(1500 * MS));
    for (every, receives) in
        [(100, often), (i128::MAX, often), (i128::MAX, seldom), (i128::MAX, None)]
    {
        let mut sim = Sim { receives, ..Sim::new() };
        sim.run(1900 * MS, |_| false);
        let is_lost = |stamp: i128| stamp % every != 0;
        let train_at = sim.now + 100 * MS;
        sim.run_from(train_at, 3000 * MS, is_lost);
        for _ in 0..3000 {
            let train_at = sim.now + 2000 * MS;
            sim.run_from(train_at, 10 * MS, is_lost);
            assert_eq!(sim.log.loss_percent(), receives.map(|_| 90), "{:?}", sim.log);
        }
    }
}

/// The first packet of the peer comes some time before the first answer, or is that one. Another outage begins soon.
#[test]
fn outage_that_ends_is_no_loss() {
    let often = Some(10 * MS);
    for (meanwhile, is_cut) in [(None, false), (often, true)] {
        for until_answered in [None, Some(0), Some(300)] {
            let mut sim = Sim { receives: often, ..Sim::new() };
            let mut train_at = sim.now;
            let mut run = |sim: &mut Sim, time: u32, is_lost: bool| {
                for _ in 0..time {
                    sim.run_from(train_at, MS, |_| is_lost);
                    if sim.now > train_at {
                        train_at += sim.interval;
                    }
                    let loss = sim.log.loss_percent();
                    assert_eq!(loss, None, "{is_cut} {until_answered:?} {:?}", sim.log);
                }
            };
            run(&mut sim, 1900, false);
            for (outage, until_next) in [(5000, 1300), (1500, 1300)] {
                sim.receives = meanwhile;
                run(&mut sim, 500, true);
                sim.is_cut = is_cut;
                run(&mut sim, outage - 500, true);
                while until_answered.is_none() && sim.log.unanswered().is_some() {
                    run(&mut sim, 1, false);
                }
                (sim.receives, sim.is_cut) = (often, false);
                run(&mut sim, until_answered.unwrap_or_default(), true);
                run(&mut sim, until_next, false);
            }
        }
    }
}

/// Times at which a loss is shown, in ms, of outages from 5 s on until 65 s.
fn shown(up: u64, down: u64, round_trip: Duration) -> Vec<u64> {
    shown_with(up, down, round_trip, |_| {})
}

/// The same, after something at the begin of each outage.
fn shown_with(up: u64, down: u64, round_trip: Duration, begin: impl Fn(&mut Sim)) -> Vec<u64> {
    let mut sim = Sim { round_trip, ..Sim::new() };
    let (mut train_at, mut shown) = (sim.now, Vec::new());
    for ms in 0..90_000 {
        let is_down = (5000..65_000).contains(&ms) && ms % (up + down) < down;
        sim.receives = (!is_down).then_some(10 * MS);
        if is_down && ms % (up + down) == 0 {
            begin(&mut sim);
        }
        sim.run_from(train_at, MS, |_| is_down);
        if sim.now > train_at {
            train_at += sim.log.pace(sim.interval, sim.now);
        }
        shown.extend(sim.log.loss_percent().map(|_| ms));
    }
    shown
}

#[test]
fn outages_that_repeat_are_loss() {
    let all = [
        (1300, 700),
        (500, 700),
        (1000, 1000),
        (1500, 1500),
        (1000, 2000),
        (700, 1900),
        (2000, 2000),
        (3000, 1500),
        (4500, 1500),
    ];
    for (up, down) in all {
        for round_trip in [MS, 100 * MS] {
            let shown = shown(up, down, round_trip);
            let case = format!("{up} {down} {round_trip:?}");
            let since = shown.first().expect(&case);
            let at_most = 5500 + (3 * (up + down)).max(9500);
            assert!((5000..=at_most).contains(since), "{case}: from {since} on");
            let is_due = |ms: &u64| up <= 700 || (1300..down).contains(&(ms % (up + down)));
            let missed =
                (21_000..65_000).filter(is_due).filter(|ms| shown.binary_search(ms).is_err());
            let missed = missed.count();
            assert!(missed <= 4000, "{case}: not shown for {missed} ms");
            // Longer than that after the end of one.
            let is_late = |ms: &&u64| **ms >= 67_500 || **ms % (up + down) >= down + 1500;
            assert_eq!(shown.iter().find(is_late), None, "{case}");
        }
    }
}

/// As of a link that is mended and cut by hand, or a peer that waits for a processor now and then.
#[test]
fn few_outages_and_short_ones_are_no_loss() {
    for (up, down) in [(8500, 1500), (4600, 400), (60_000, 4000)] {
        for round_trip in [MS, 300 * MS] {
            assert_eq!(shown(up, down, round_trip).first(), None, "{up} {down} {round_trip:?}");
        }
    }
}

/// As of a peering that is removed and applied again.
#[test]
fn outages_after_an_announced_end_are_no_loss() {
    let announce = |sim: &mut Sim| sim.log.handle_departure(sim.now);
    for (up, down) in [(6000, 4000), (1500, 1500), (1000, 2000)] {
        for round_trip in [MS, 300 * MS] {
            let first = shown_with(up, down, round_trip, announce).first().copied();
            assert_eq!(first, None, "{up} {down} {round_trip:?}");
        }
    }
}

#[test]
fn bursts_and_losses_end_at_any_round_trip() {
    for round_trip in [1, 300, 600, 900, 1200, 1800] {
        let mut sim = Sim { round_trip: round_trip * MS, receives: Some(10 * MS), ..Sim::new() };
        sim.run(10_000 * MS, |_| false);
        assert_eq!(sim.log.loss_percent(), None, "{round_trip} ms: {:?}", sim.log);
        sim.run(10_000 * MS, forty_percent);
        assert!(sim.log.loss_percent().is_some(), "{round_trip} ms: {:?}", sim.log);
        sim.run(10_000 * MS, |_| false);
        let is_over = sim.log.loss_percent().is_none() && !sim.log.is_bursting();
        assert!(is_over, "{round_trip} ms: {:?}", sim.log);
    }
}

/// The answers of that time are lost.
#[test]
fn host_that_stands_still_ends_no_loss() {
    let mut sim = Sim { receives: Some(10 * MS), ..Sim::new() };
    sim.run(3000 * MS, forty_percent);
    for _ in 0..5 {
        assert!(sim.log.loss_percent().is_some(), "{:?}", sim.log);
        sim.now += 700 * MS;
        sim.answers.clear();
        for _ in 0..2500 {
            sim.run_from(sim.now + 1000 * MS, MS, forty_percent);
            assert!(sim.log.loss_percent().is_some(), "{:?}", sim.log);
        }
    }
    sim.run(3000 * MS, |_| false);
    assert_eq!(sim.log.loss_percent(), None);
}

/// Number of 1,000 random losses of 40 % that are not named within this time of the first train that
/// has any, or of the peer's request for a burst. A train of either end shows them.
fn late_of_thousand(is_asked: bool, time: Duration) -> usize {
    let is_late = |seed: &u64| {
        let mut sim = Sim { interval: 1000 * MS, ..Sim::new() };
        sim.run(1000 * MS, |_| false);
        if is_asked {
            sim.log.handle_request(sim.now);
        } else {
            sim.now += 1000 * MS;
        }
        let is_lost = |stamp: i128| {
            let mut hasher = std::hash::DefaultHasher::new();
            (seed, stamp).hash(&mut hasher);
            hasher.finish() % 100 < 40
        };
        let next_train = sim.now + if is_asked { 1000 * MS } else { Duration::ZERO };
        sim.run_from(next_train, time, is_lost);
        sim.log.loss_percent().is_none()
    };
    (0..1000).filter(is_late).count()
}

#[test]
fn random_loss_is_named_by_the_next_train() {
    let late = late_of_thousand(false, 900 * MS);
    assert!(late <= 60, "{late} of 1,000");
}

#[test]
fn random_loss_is_named_by_the_next_two_trains() {
    let late = late_of_thousand(false, 1700 * MS);
    assert!(late <= 10, "{late} of 1,000");
}

/// The train before was answered, which proves nothing of now.
#[test]
fn random_loss_is_named_in_a_burst_for_the_peer() {
    let late = late_of_thousand(true, 1700 * MS);
    assert!(late <= 20, "{late} of 1,000");
}

#[test]
fn pause_of_a_peer_is_no_loss() {
    let mut sim = Sim::new();
    sim.run(1900 * MS, |_| false);
    let before = sim.stamp;
    // As long as a restart takes.
    sim.run(900 * MS, |stamp| stamp > before);
    assert_eq!(sim.log.loss_percent(), None);
    sim.run(4000 * MS, |_| false);
    assert_eq!((sim.log.loss_percent(), sim.log.is_bursting()), (None, false));
}

#[test]
fn unanswered_probe_starts_slowing_burst() {
    let mut sim = Sim::new();
    sim.run(400 * MS, |_| true);
    let probes = sim.log.unanswered().unwrap();
    assert!(probes.turns >= 4, "{probes:?}");
    assert!(probes.last - probes.first >= 250 * MS, "{probes:?}");
    assert_eq!(sim.log.loss_percent(), None, "no probe is no loss");
    sim.run(9000 * MS, |_| true);
    assert!(sim.sent.len() < 80, "{} probes in {:?}", sim.sent.len(), sim.now - sim.start);
}

#[test]
fn suspended_host_reports_no_loss() {
    let mut sim = Sim::new();
    sim.send(|_| true);
    sim.now += 5000 * MS;
    assert!(!sim.log.handle_tick(sim.now), "nothing proves that the peer is silent");
    assert_eq!(sim.log.unanswered(), None);
    sim.run_from(sim.now + 2000 * MS, 500 * MS, |_| true);
    assert!(sim.log.unanswered().unwrap().is_silence(), "it is probed before the next train");
    sim.run(3000 * MS, |_| false);
    assert!(!sim.log.is_bursting());
}

#[test]
fn trains_are_denser_for_some_time_after_a_burst() {
    let mut sim = Sim::new();
    sim.run(3000 * MS, forty_percent);
    assert_eq!(sim.log.pace(sim.interval, sim.now), sim.interval);
    sim.run(4000 * MS, |_| false);
    assert_eq!(sim.log.pace(sim.interval, sim.now), sim.interval / 2);
    sim.run(AFTER_BURST, |_| false);
    assert_eq!(sim.log.pace(sim.interval, sim.now), sim.interval);
}

#[test]
fn peer_that_misses_answers_asks_for_one_burst() {
    let mut sim = Sim::new();
    sim.log.handle_request(sim.now);
    assert!(sim.log.is_bursting() && !sim.log.is_suspicious());
    sim.run(1500 * MS, |_| false);
    sim.log.handle_request(sim.now);
    assert!(!sim.log.is_bursting(), "not again so soon");
}

#[test]
fn answers_that_overtake_each_other_are_no_loss() {
    let mut log = ProbeLog::default();
    let now = Instant::now();
    for stamp in 0..TRAIN as i128 {
        log.handle_sent(stamp, now);
    }
    log.handle_answer(TRAIN as i128 - 1, RTT, now + RTT);
    assert!(log.deadline().is_some(), "earlier ones are still on their way");
    (0..TRAIN as i128 - 1).for_each(|stamp| log.handle_overtaken(stamp));
    assert_eq!(log.deadline(), None);
}
