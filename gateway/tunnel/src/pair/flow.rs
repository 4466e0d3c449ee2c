//! A packet each way every millisecond over a network with latency, and what becomes of them while
//! keys, endpoints and sessions change.

use super::*;

const STEP: Duration = Duration::from_millis(1);
const LATENCY: Duration = Duration::from_millis(20);

pub(super) struct Flow {
    pub(super) pair: Pair,
    in_flight: VecDeque<(Instant, usize, Sent)>,
    fed: [u32; 2],
    random: Random,
}

impl Flow {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            pair: Pair::connected(),
            in_flight: VecDeque::new(),
            fed: [0; 2],
            random: Random::new(seed),
        }
    }

    /// Some milliseconds: none, less than a round trip, or more.
    pub(super) fn run_a_while(&mut self) {
        let most = [1, 10, 100][self.random.next() as usize % 3];
        let ms = self.random.next() % most;
        self.run_for(ms);
    }

    pub(super) fn run_for(&mut self, ms: u64) {
        for _ in 0..ms {
            for from in 0..2 {
                self.pair.feed(from, &udp(&self.fed[from].to_be_bytes()));
                self.fed[from] += 1;
            }
            self.step();
        }
    }

    /// Time passes, packets arrive.
    fn step(&mut self) {
        self.pair.now += STEP;
        self.pair.tick();
        while let Some((from, sent)) = self.pair.next_sent() {
            self.in_flight.push_back((self.pair.now + LATENCY, from, sent));
        }
        while self.in_flight.front().is_some_and(|(due, ..)| *due <= self.pair.now) {
            let Some((_, from, sent)) = self.in_flight.pop_front() else { break };
            if sent.to == self.pair.addresses[1 - from] {
                self.pair.deliver(1 - from, self.pair.addresses[from], &sent.bytes);
            }
        }
    }

    /// Waits for what is on its way, and checks that all has come, once, and nothing else.
    #[track_caller]
    pub(super) fn assert_nothing_lost(&mut self, what: &str) {
        for _ in 0..200 {
            self.step();
        }
        for from in 0..2 {
            let frames = std::mem::take(&mut self.pair.made[1 - from].frames);
            let mut got: Vec<u32> =
                frames.iter().map(|f| u32::from_be_bytes(*f.last_chunk().unwrap())).collect();
            got.sort_unstable();
            let fed = std::mem::take(&mut self.fed[from]);
            let missing: Vec<u32> =
                (0..fed).filter(|number| got.binary_search(number).is_err()).collect();
            assert!(missing.is_empty(), "{what}: from {from} lost {missing:?}");
            assert_eq!(got.len(), fed as usize, "{what}: something came twice");
        }
    }
}

/// Around a rekey packets of the old session are still on their way, and the new one is not yet
/// known at both ends.
#[test]
fn sessions_never_run_empty_around_a_rekey() {
    let mut flow = Flow::new(1);
    for round in 0..60 {
        flow.run_a_while();
        let now = flow.pair.now;
        match round % 3 {
            2 => flow.pair.engines.iter_mut().for_each(|engine| engine.initiate(now)),
            from => flow.pair.engines[from].initiate(now),
        }
        flow.run_for(300);
    }
    flow.assert_nothing_lost("rekeys");
    assert!(flow.pair.engines.iter().all(|engine| engine.counters().handshakes >= 40));
}

#[test]
fn moving_end_loses_packets_in_flight_only() {
    let mut flow = Flow::new(2);
    flow.run_for(100);
    flow.pair.addresses[0].set_port(7);
    flow.run_for(100);
    let frames = &flow.pair.made[0].frames;
    let lost = flow.fed[1] as usize - frames.len() - LATENCY.as_millis() as usize;
    assert!(lost <= 2 * LATENCY.as_millis() as usize, "{lost}");
}
