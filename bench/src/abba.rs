//! Two tunnels in turns, in one run: nothing else can be compared on a machine that others share.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weft_tests::Netns;

use crate::flow::Flow;
use crate::machine::{self, CpuTimes, ProcessTimes};
use crate::statistics::median;

/// Slices of which the hypervisor took more than this away do not count.
const MAX_STEAL: f64 = 0.01;
/// Bytes are not counted while the window opens and the caches warm up.
const SETTLE: Duration = Duration::from_millis(300);
/// Sent through each tunnel before the first slice.
const WARM_UP: Duration = Duration::from_secs(1);

/// A tunnel that is up, with flows through it.
pub(crate) struct Contestant {
    pub(crate) label: String,
    /// Its gateways' processes.
    pub(crate) pids: Vec<i32>,
    /// Namespace that its flows are sent from.
    pub(crate) sender: Netns,
    pub(crate) flows: Vec<Flow>,
}

/// Length and number of slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) pairs: usize,
    pub(crate) slice: Duration,
}

/// Measurements of one slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    /// Received data.
    pub(crate) gbit: f64,
    pub(crate) gbit_sent: f64,
    pub(crate) seconds: f64,
    /// Used by the gateways' processes.
    pub(crate) cpu_seconds: f64,
    /// Used by all of the machine in softirq, whomever it is charged to.
    pub(crate) softirq_seconds: f64,
    pub(crate) steal_share: f64,
    /// Share of all CPU time that programs used which are not part of the measurement.
    pub(crate) others_share: f64,
    pub(crate) retransmits: u64,
}

impl Slice {
    pub(crate) fn gbit_per_second(&self) -> f64 {
        self.gbit / self.seconds
    }

    /// Share of what was sent that did not arrive; what is under way makes it inexact.
    pub(crate) fn lost_share(&self) -> f64 {
        (1.0 - self.gbit / self.gbit_sent).max(0.0)
    }

    fn is_sound(&self) -> bool {
        self.steal_share <= MAX_STEAL
    }
}

/// Slices in the order A B, B A, A B, …: what drifts slowly hits both alike, and neighbours across
/// two pairs are of the same tunnel, which gives the control for nothing.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) pairs: Vec<Pair>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) a: Slice,
    pub(crate) b: Slice,
    pub(crate) a_first: bool,
}

impl Pair {
    pub(crate) fn ratio(&self) -> f64 {
        self.a.gbit_per_second() / self.b.gbit_per_second()
    }

    fn is_sound(&self) -> bool {
        self.a.is_sound() && self.b.is_sound()
    }

    fn last(&self) -> &Slice {
        if self.a_first { &self.b } else { &self.a }
    }

    fn first(&self) -> &Slice {
        if self.a_first { &self.a } else { &self.b }
    }
}

impl Outcome {
    /// Pairs that were not disturbed.
    pub(crate) fn sound(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.is_sound())
    }

    /// A over B.
    pub(crate) fn ratios(&self) -> Vec<f64> {
        self.sound().map(Pair::ratio).collect()
    }

    /// Neighbouring slices of the same tunnel: what this machine calls equal.
    pub(crate) fn controls(&self) -> Vec<f64> {
        self.pairs
            .windows(2)
            .filter_map(|two| {
                let [before, after] = two else { return None };
                let (one, other) = (before.last(), after.first());
                let sound = one.is_sound() && other.is_sound();
                sound.then(|| one.gbit_per_second() / other.gbit_per_second())
            })
            .collect()
    }

    /// Median of a figure of the sound slices of one side.
    pub(crate) fn median(&self, slices: impl Fn(&Pair) -> f64) -> f64 {
        median(&self.sound().map(slices).collect::<Vec<_>>()).unwrap_or(f64::NAN)
    }
}

/// Lets the two take turns until there are enough sound pairs; after twice as many tries the pairs
/// so far have to do. `report` is called for every pair.
pub(crate) fn run(
    [a, b]: [&Contestant; 2],
    timing: Timing,
    mut report: impl FnMut(&Pair, usize),
) -> Result<Outcome> {
    for contestant in [a, b] {
        measure(contestant, WARM_UP).with_context(|| format!("warming {} up", contestant.label))?;
    }
    let mut outcome = Outcome::default();
    while outcome.sound().count() < timing.pairs && outcome.pairs.len() < 2 * timing.pairs {
        let a_first = outcome.pairs.len() % 2 == 0;
        let (first, second) = if a_first { (a, b) } else { (b, a) };
        let (one, two) = (measure(first, timing.slice)?, measure(second, timing.slice)?);
        let (a, b) = if a_first { (one, two) } else { (two, one) };
        let pair = Pair { a, b, a_first };
        outcome.pairs.push(pair);
        report(&pair, outcome.sound().count());
    }
    Ok(outcome)
}

/// One slice of one tunnel, the other one idle.
fn measure(contestant: &Contestant, length: Duration) -> Result<Slice> {
    contestant.flows.iter().for_each(Flow::start);
    std::thread::sleep(SETTLE);
    let before = Reading::take(contestant)?;
    std::thread::sleep(length);
    let after = Reading::take(contestant)?;
    contestant.flows.iter().for_each(Flow::stop);
    let drained: Result<()> = contestant.flows.iter().try_for_each(Flow::drain);
    drained.with_context(|| format!("{} is stuck", contestant.label))?;
    let machine = after.machine.since(before.machine);
    let own_user = after.own.user + after.gateways.user - before.own.user - before.gateways.user;
    let slice = Slice {
        gbit: (after.received - before.received) as f64 * 8.0 / 1e9,
        gbit_sent: (after.sent - before.sent) as f64 * 8.0 / 1e9,
        seconds: (after.at - before.at).as_secs_f64(),
        cpu_seconds: after.gateways.total() - before.gateways.total(),
        softirq_seconds: machine.softirq,
        steal_share: machine.steal_share(),
        others_share: ((machine.user - own_user) / machine.total).max(0.0),
        retransmits: after.retransmits - before.retransmits,
    };
    ensure!(slice.gbit > 0.0, "{} lets nothing through", contestant.label);
    Ok(slice)
}

/// All counters at one moment.
struct Reading {
    at: Instant,
    sent: u64,
    received: u64,
    gateways: ProcessTimes,
    /// CPU times of this process, which sends and receives.
    own: ProcessTimes,
    machine: CpuTimes,
    retransmits: u64,
}

impl Reading {
    fn take(contestant: &Contestant) -> Result<Self> {
        Ok(Self {
            at: Instant::now(),
            sent: contestant.flows.iter().map(Flow::sent).sum(),
            received: contestant.flows.iter().map(Flow::received).sum(),
            gateways: ProcessTimes::of(&contestant.pids)
                .with_context(|| format!("measuring {}", contestant.label))?,
            own: ProcessTimes::of(&[std::process::id().cast_signed()])?,
            machine: CpuTimes::now()?,
            retransmits: contestant.sender.run(machine::retransmits)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(gbit: f64, steal_share: f64) -> Slice {
        Slice {
            gbit,
            gbit_sent: gbit,
            seconds: 2.0,
            cpu_seconds: 0.0,
            softirq_seconds: 0.0,
            steal_share,
            others_share: 0.0,
            retransmits: 0,
        }
    }

    #[test]
    fn disturbed_pairs_do_not_count() {
        let clean = Pair { a: slice(8.0, 0.0), b: slice(4.0, 0.01), a_first: true };
        let disturbed = Pair { a: slice(8.0, 0.011), b: slice(1.0, 0.0), a_first: false };
        let outcome = Outcome { pairs: vec![clean, disturbed, clean] };
        assert_eq!(outcome.ratios(), [2.0, 2.0]);
        assert_eq!(outcome.median(|pair| pair.b.gbit_per_second()), 2.0);
    }

    #[test]
    fn control_compares_adjacent_slices_of_one_tunnel() {
        let ab = Pair { a: slice(8.0, 0.0), b: slice(4.0, 0.0), a_first: true };
        let ba = Pair { a: slice(10.0, 0.0), b: slice(5.0, 0.0), a_first: false };
        // A 8, B 4 | B 5, A 10 | A 8, B 4
        let outcome = Outcome { pairs: vec![ab, ba, ab] };
        assert_eq!(outcome.controls(), [0.8, 1.25]);
    }
}
