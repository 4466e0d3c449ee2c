mod world;

use super::*;
use world::World;

const MS: Duration = Duration::from_millis(1);
/// Milliseconds in a step.
const STEP: u32 = 4;

fn address(i: u8) -> IpAddr {
    IpAddr::from([10, 200, i, 7])
}

fn record(i: u8, epoch: u64) -> ActiveReplica {
    ActiveReplica { address: address(i), epoch }
}

fn connected() -> Tunnel {
    let peer = Some("192.0.2.7:51840".parse().unwrap());
    Tunnel { connected: true, peer, unproven: None, relay: Some(40000), stamp: Tai64n::default() }
}

#[test]
fn gateway_without_replicas_has_tunnel_at_once() {
    let now = Instant::now();
    let mut only = Election::new(1, now);
    only.decide(now);
    assert_eq!(only.role(), Role::Undecided, "no config yet");
    only.set_others(BTreeSet::new(), now);
    only.decide(now);
    assert_eq!((only.role(), only.epoch(), only.deadline()), (Role::Active, 1, None));
}

#[test]
fn restarted_process_keeps_its_epoch() {
    let now = Instant::now();
    let epoch_of = |is_own: bool| {
        let mut only = Election::new(1, now);
        only.set_others(BTreeSet::new(), now);
        only.handle_published(record(2, 7), is_own.then(|| address(2)), now);
        only.decide(now);
        (only.role(), only.epoch())
    };
    assert_eq!(epoch_of(true), (Role::Active, 7));
    assert_eq!(epoch_of(false), (Role::Active, 8), "another pod had it");
}

#[test]
fn killed_process_is_replaced_within_two_heartbeats() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        assert_eq!(world.active(), [1]);
        world.replicas.remove(&1);
        let millis = world.until_active(&[2]);
        assert!(millis <= 330, "seed {seed}: {millis} ms");
        assert_eq!(world.replicas[&2].predecessor().unwrap().tunnel.peer, connected().peer);
        world.start(1);
        world.run(2000);
        assert_eq!(world.active(), [2], "the tunnel stays");
    }
}

/// With the tunnel, as both think, but the peer answers the first one only.
#[test]
fn tunnel_stays_when_a_replica_is_back() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.heard(1);
        world.cut = [(1, 2)].into();
        world.has_api = false;
        world.run(1500 + u32::try_from(seed).unwrap() * 40);
        assert_eq!(world.active(), [1, 2]);
        world.cut.clear();
        (world.has_api, world.has_api_at) = (true, world.now);
        for step in 0..500 {
            world.step();
            assert!(world.active().contains(&1), "seed {seed}");
            assert!(step < 60 || world.active() == [1], "seed {seed}: {step}");
        }
        let epochs = [1, 2].map(|i| world.replicas[&i].epoch());
        assert_eq!((epochs[0], world.record), (epochs[1], Some((1, epochs[0]))), "seed {seed}");
        let contest = world.replicas[&1].contest();
        assert!(
            contest.turns > 0 && contest.at.is_some(),
            "nodes and peer need a sign: {contest:?}"
        );
    }
}

/// The peer may have answered it before it gave way.
#[test]
fn active_one_that_is_back_makes_a_contest() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.heard(1);
        world.cut = [(1, 2)].into();
        world.has_api = false;
        world.run(500);
        world.heard(2);
        world.run(1000);
        assert_eq!(world.replicas[&2].contest(), Contest::default(), "seed {seed}");
        world.cut.clear();
        world.run(1000);
        assert_eq!(world.active(), [2], "seed {seed}");
        let contest = world.replicas[&2].contest();
        assert!(contest.turns > 0 && contest.at.is_some(), "seed {seed}: {contest:?}");
    }
}

/// Nodes take no packets from it.
#[test]
fn unlisted_replica_waits_for_one_that_restarts() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        let unlisted = world.replicas.get_mut(&2).unwrap();
        unlisted.set_ready(false);
        unlisted.set_unlisted(true);
        world.replicas.remove(&1);
        world.run(500);
        world.start(1);
        world.replicas.get_mut(&1).unwrap().set_ready(false);
        for _ in 0..500 {
            world.step();
            assert!(!world.active().contains(&2), "seed {seed}");
        }
        assert_eq!(world.active(), [1]);
        world.replicas.remove(&1);
        let millis = world.until_active(&[2]);
        assert!((1900..2500).contains(&millis), "seed {seed}: {millis} ms");
    }
}

#[test]
fn process_back_before_take_over_is_predecessor() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.replicas.remove(&1);
        world.run(4);
        world.start(1);
        world.run(2000);
        assert_eq!(world.active(), [2]);
        let predecessor = world.replicas[&2].predecessor().map(|of| of.tunnel.peer);
        assert_eq!(predecessor, Some(connected().peer), "seed {seed}");
    }
}

#[test]
fn cut_off_node_is_replaced_within_half_a_second() {
    for seed in 0..50 {
        let mut world = World::new(seed);
        (1..=2).for_each(|i| world.start(i));
        world.run(1000 + u32::try_from(seed).unwrap() * 3);
        let [lost] = world.active()[..] else { panic!("seed {seed}: {:?}", world.active()) };
        let other = 3 - lost;
        world.cut = [(1, 2), (1, 3), (2, 3)].into();
        let before = world.now;
        while world.replicas[&other].role() != Role::Active {
            world.step();
        }
        assert!(world.now - before <= TIMEOUT + MS * 120, "seed {seed}: {:?}", world.now - before);
    }
}

/// Packets to its node get lost, and those from it arrive.
#[test]
fn deaf_replica_is_replaced_until_it_receives() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.heard(1);
        world.deaf = [1].into();
        let millis = world.until_active(&[1, 2]);
        assert!((1100..1800).contains(&millis), "seed {seed}: {millis} ms");
        for _ in 0..1000 {
            world.heard(2);
            world.step();
            assert_eq!(world.active(), [1, 2], "seed {seed}");
        }
        let epoch = world.replicas[&2].epoch();
        assert_eq!(world.record, Some((2, epoch)), "seed {seed}: nodes follow");
        assert_eq!(world.replicas[&2].deaf(world.now), [address(1)], "seed {seed}");
        world.deaf.clear();
        let millis = world.until_active(&[2]);
        assert!(millis <= 150, "seed {seed}: {millis} ms");
        world.run(3000);
        assert_eq!((world.active(), world.replicas[&2].epoch()), (vec![2], epoch), "it stays");
        assert!(world.replicas[&2].deaf(world.now).is_empty(), "seed {seed}");
    }
}

/// The last heartbeat of a starved one is old.
#[test]
fn deaf_replica_is_replaced_by_a_starved_one() {
    let mut world = World::with_standby(1);
    for _ in 0..5 {
        world.paused.insert(2, world.now + MS * 550);
        world.run(700);
        world.heard(1);
    }
    world.paused.insert(2, world.now + MS * 550);
    world.run(500);
    world.heard(1);
    world.deaf = [1].into();
    let millis = world.until_active(&[1, 2]);
    assert!(millis < 5000, "{millis} ms");
}

/// It takes the tunnel over, as it hears no heartbeat, and cannot use it.
#[test]
fn deaf_standby_gives_the_tunnel_back() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.heard(1);
        world.deaf = [2].into();
        let mut without = 0;
        for _ in 0..10_000 / STEP {
            if world.replicas[&1].role() == Role::Active {
                world.heard(1);
            } else {
                without += STEP;
            }
            world.step();
        }
        assert!(without <= 1000, "seed {seed}: {without} ms");
        assert_eq!(world.active(), [1, 2], "seed {seed}");
        world.deaf.clear();
        world.run(300);
        assert_eq!(world.active(), [1], "seed {seed}");
    }
}

/// Loss on the way to its node is no reason to take the tunnel there.
#[test]
fn standby_that_loses_some_packets_takes_nothing_over() {
    let run = |world: &mut World, seconds: u32| {
        for _ in 0..seconds * 1000 / STEP {
            world.active().into_iter().for_each(|i| world.heard(i));
            world.step();
        }
        (world.active(), world.replicas[&1].epoch())
    };
    let mut early = 0;
    for (seed, percent) in (0..24).flat_map(|seed| [(seed, 10), (seed, 30)]) {
        let mut world = World::with_standby(seed);
        run(&mut world, 10);
        world.losses = [(2, percent)].into();
        // While the share is not known, one may happen.
        let known = run(&mut world, 5);
        early += usize::from(known != (vec![1], 1));
        assert_eq!(run(&mut world, 240), known, "seed {seed}, {percent} %");
        world.losses.clear();
        run(&mut world, 60);
        let (active, standby) = if known.0 == [1] { (1, 2) } else { (2, 1) };
        world.cut = [(1, 2)].into();
        world.has_api = false;
        let millis = world.until_active(&[1, 2]);
        assert!(millis <= 550, "seed {seed}, {percent} %, {active} to {standby}: {millis} ms");
    }
    assert!(early <= 10, "{early} of 48");
}

/// The peer, and the other replica, whose kernel goes on to answer.
#[test]
fn two_processes_that_end_at_once_make_nobody_deaf() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.heard(1);
        world.replicas.remove(&2);
        world.run(5000);
        assert!(!world.replicas[&1].is_deaf(world.now), "seed {seed}");
    }
}

#[test]
fn silent_peer_or_standby_alone_makes_nobody_deaf() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        world.has_api = false;
        world.heard(1);
        world.run(5000);
        assert_eq!(world.active(), [1], "seed {seed}: the peer is away");
        let is_deaf = |world: &World| world.replicas[&1].is_deaf(world.now);
        world.cut = [(1, 2)].into();
        world.run(5000);
        assert!(!is_deaf(&world), "seed {seed}: first the peer, then the standby");
        for _ in 0..150 {
            world.heard(1);
            world.step();
        }
        world.run(5000);
        assert!(!is_deaf(&world), "seed {seed}: first the standby, then the peer");
        let mut unprobed = World::with_standby(seed);
        unprobed.has_api = false;
        unprobed.heard(1);
        unprobed.replicas.get_mut(&1).unwrap().set_probe_interval(Duration::ZERO);
        unprobed.cut = [(1, 2)].into();
        unprobed.run(5000);
        assert!(!is_deaf(&unprobed), "seed {seed}: a peer that is not probed need not send");
    }
}

#[test]
fn leaving_replica_is_relieved_at_once() {
    for seed in 0..50 {
        let mut world = World::with_standby(seed);
        let now = world.now;
        world.replicas.get_mut(&1).unwrap().leave(now);
        assert!(world.until_active(&[2]) <= 30);
        let predecessor = world.replicas[&2].predecessor().unwrap();
        assert!(predecessor.is_alive);
        assert_eq!(
            predecessor.peer(),
            Some((address(1), 40000).into()),
            "through the one that leaves"
        );
        world.run(50);
        assert!(world.replicas[&1].is_relieved());
    }
}

#[test]
fn nobody_leaves_without_successor() {
    let now = Instant::now();
    let mut only = Election::new(1, now);
    only.set_others([address(2)].into(), now);
    only.decide(now + TIMEOUT);
    (0..10).for_each(|i| only.decide(now + TIMEOUT + INTERVAL * i));
    assert_eq!(only.role(), Role::Active);
    only.leave(now + TIMEOUT * 4);
    assert_eq!(only.role(), Role::Active);
}

#[test]
fn paused_replica_takes_nothing_over() {
    let mut world = World::with_standby(1);
    world.paused.insert(2, world.now + MS * 3000);
    world.run(3000);
    // Heartbeats of that time are read late, or lost.
    world.on_way.clear();
    world.run(200);
    assert_eq!(world.active(), [1]);
}

#[test]
fn starved_replicas_wait_for_longer() {
    let mut world = World::with_standby(1);
    for millis in [250, 350, 450, 550, 450, 550] {
        world.paused.insert(1, world.now + MS * millis);
        world.run(millis + 300);
        assert_eq!(world.active(), [1], "after {millis} ms");
    }
    world.replicas.remove(&1);
    world.cut = [(1, 2)].into();
    assert!((1200..2100).contains(&world.until_active(&[2])));
}

#[test]
fn cut_makes_no_later_take_over_slower() {
    let mut world = World::with_standby(1);
    world.has_api = false;
    let mut cut = |is_cut: bool, millis| {
        world.cut = is_cut.then_some([(1, 2)]).into_iter().flatten().collect();
        world.run(millis);
        world.active()
    };
    assert_eq!(cut(true, 3000), [1, 2]);
    assert_eq!(cut(false, 1000), [2]);
    assert_eq!(cut(true, 600), [1, 2], "no node is starved");
}

#[test]
fn one_that_stood_still_gives_way() {
    let mut world = World::with_standby(1);
    world.paused.insert(1, world.now + MS * 3000);
    world.run(2900);
    assert_eq!(world.active(), [1, 2], "it does not know yet");
    world.run(300);
    assert_eq!(world.active(), [2]);
}

#[test]
fn record_decides_between_two_that_are_apart() {
    let mut world = World::new(1);
    (1..=2).for_each(|i| world.start(i));
    world.run(1500);
    let [first] = world.active()[..] else { panic!() };
    world.cut = [(1, 2)].into();
    world.run(1000);
    assert_eq!(world.active(), [3 - first], "the later one, by the record");
    for _ in 0..50 {
        world.run(1000);
        assert_eq!(world.active(), [3 - first], "it stays");
    }
    world.replicas.remove(&(3 - first));
    world.start(3 - first);
    assert!(world.until_active(&[3 - first]) < 1000, "its next process has the tunnel");
    world.cut.clear();
    world.run(500);
    assert_eq!(world.active(), [3 - first]);
}

/// Any pod can forge ICMP errors.
#[test]
fn refusals_of_one_that_beats_are_forged() {
    let mut world = World::with_standby(1);
    for _ in 0..500 {
        let now = world.now;
        world.replicas.get_mut(&2).unwrap().handle_refusal(address(1), now);
        world.run(4);
        assert_eq!(world.active(), [1]);
    }
}

#[test]
fn of_one_epoch_lower_address_has_precedence() {
    let now = Instant::now();
    let deposed_by = |other: u8| {
        let mut one = Election::new(1, now);
        one.set_others(BTreeSet::new(), now);
        one.decide(now);
        one.handle_published(record(other, one.epoch()), Some(address(2)), now);
        one.role() == Role::Standby
    };
    assert!(deposed_by(1) && !deposed_by(2) && !deposed_by(3));
}

#[test]
fn hold_ends_with_the_one_that_it_is_for() {
    let now = Instant::now();
    let mut one = Election::new(1, now);
    one.set_others([address(1)].into(), now);
    (0..9).for_each(|i| one.decide(now + INTERVAL * i));
    assert_eq!(one.role(), Role::Active);
    let later = now + INTERVAL * 9;
    one.handle_published(record(1, 9), Some(address(2)), later);
    one.decide(later);
    assert_eq!(one.role(), Role::Standby);
    one.set_others(BTreeSet::new(), later);
    assert!(one.deadline().is_some(), "it is not waited for something that never comes");
    (0..99).for_each(|i| one.decide(later + FORGET + INTERVAL * i));
    assert_eq!(one.role(), Role::Active);
}

#[test]
fn replayed_heartbeat_of_old_is_ignored() {
    let now = Instant::now();
    let mut one = Election::new(5, now);
    let beat = |incarnation, sequence, role| Heartbeat {
        incarnation,
        sequence,
        role,
        epoch: 9,
        ready: true,
        stuck: false,
        deaf: false,
        successor: None,
        tunnel: Tunnel::default(),
    };
    one.set_others([address(2)].into(), now);
    one.handle(address(2), beat(7, 4, Role::Standby), now);
    one.handle(address(2), beat(7, 3, Role::Active), now);
    one.handle(address(2), beat(6, 99, Role::Active), now);
    one.decide(now);
    assert_eq!(one.role(), Role::Undecided);
    one.handle(address(2), beat(7, 5, Role::Active), now);
    one.decide(now);
    assert_eq!(one.role(), Role::Standby);
}

/// Kills, starts, cuts, pauses and losses of the API server at random; then quiet.
#[test]
fn one_replica_has_tunnel_after_any_storm() {
    for seed in 0..1000 {
        let mut world = World::new(seed);
        (1..=3).for_each(|i| world.start(i));
        for _ in 0..12 {
            let millis = u32::try_from(world.draw(400)).unwrap();
            world.run(millis);
            let i = u8::try_from(world.draw(3)).unwrap() + 1;
            let now = world.now;
            // The peer answers those that receive something.
            let receives = |i: &u8| !world.deaf.contains(i);
            world
                .active()
                .into_iter()
                .filter(receives)
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|i| world.heard(i));
            match world.draw(8) {
                0 => drop(world.replicas.remove(&i)),
                1 | 2 => world.start(i),
                3 => {
                    let other = i % 3 + 1;
                    world.cut.insert((i.min(other), i.max(other)));
                }
                4 => {
                    world.cut.clear();
                    world.deaf.clear();
                }
                6 => world.deaf = [i].into(),
                5 => drop(world.paused.insert(i, now + MS * 500)),
                _ => world.has_api = !world.has_api,
            }
        }
        (world.has_api, world.paused) = (true, BTreeMap::new());
        world.cut.clear();
        world.deaf.clear();
        if world.replicas.is_empty() {
            world.start(1);
        }
        // A replica without contact to others may be held back for a while.
        let (mut black, mut longest) = (0, 0);
        for _ in 0..2000 / STEP {
            world.step();
            black = if world.active().is_empty() { black + STEP } else { 0 };
            longest = longest.max(black);
        }
        assert!(longest <= 1000, "seed {seed}: nobody for {longest} ms");
        let active = world.active();
        assert_eq!(active.len(), 1, "seed {seed}: {active:?}");
        world.run(2000);
        assert_eq!(world.active(), active, "seed {seed}: it stays");
    }
}
