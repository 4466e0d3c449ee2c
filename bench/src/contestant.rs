//! A tunnel whose slices are measured.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use weft_tests::resident_bytes;

use crate::flow::{Counts, Flow};
use crate::latency::Requester;
use crate::load::{Direction, Load};
use crate::machine::{self, CpuTimes, ProcessTimes};
use crate::search;
use crate::slice::Slice;
use crate::tunnel::Tunnel;

/// Share of lost datagrams up to which a rate counts as carried.
const MAX_LOSS: f64 = 0.01;
/// Slices after which a tunnel through which nothing has come is given up.
const WARM_UPS: usize = 3;
/// Tries of a rate.
pub(crate) const TRIES: u32 = 2;

/// A tunnel with flows through it, and requests.
pub(crate) struct Contestant<'a> {
    pub(crate) tunnel: &'a Tunnel,
    flows: Vec<Flow>,
    requester: Option<(Requester, Duration)>,
}

/// Lengths of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lengths {
    /// Bytes are not counted while the window opens and the caches warm up.
    pub(crate) settle: Duration,
    pub(crate) slice: Duration,
}

impl<'a> Contestant<'a> {
    pub(crate) fn open(tunnel: &'a Tunnel, load: &Load) -> Result<Self> {
        let [a, b] = &tunnel.ends;
        let there = [(a, b)];
        let back = [(b, a)];
        let both = [(a, b), (b, a)];
        let directions = match load.direction {
            Direction::There => &there[..],
            Direction::Back => &back,
            Direction::Both => &both,
        };
        let mut flows = Vec::new();
        if let Some(traffic) = load.traffic {
            for (from, to) in directions.iter().flat_map(|way| std::iter::repeat_n(way, load.flows))
            {
                flows.push(Flow::open(from, to, traffic)?);
            }
        }
        let requester = match load.requests {
            Some(pause) => Some((Requester::open(a, b)?, pause)),
            None => None,
        };
        Ok(Self { tunnel, flows, requester })
    }

    /// Measures one slice, at so many bits per second if the rate is held.
    pub(crate) fn measure(&mut self, lengths: Lengths, rate: Option<f64>) -> Result<Slice> {
        let start = self.counts();
        let rate = rate.map(|rate| rate / self.flows.len().max(1) as f64);
        self.flows.iter().for_each(|flow| flow.start(rate));
        std::thread::sleep(lengths.settle);
        let before = self.read()?;
        let mut latencies = match &mut self.requester {
            Some((requester, pause)) => requester.run(lengths.slice, *pause)?,
            None => {
                std::thread::sleep(lengths.slice);
                Vec::new()
            }
        };
        let after = self.read()?;
        self.flows.iter().for_each(Flow::stop);
        let drained: Result<()> = self.flows.iter().try_for_each(Flow::drain);
        drained.with_context(|| format!("{} is stuck", self.tunnel.label))?;
        latencies.sort_by(f64::total_cmp);
        Ok(Slice { latencies, ..between(&before, &after, start, self.counts()) })
    }

    /// Slice at the highest rate of which at most [`MAX_LOSS`] is lost. `goodput` is what arrives at
    /// overload, in bits per second.
    pub(crate) fn highest_rate(
        &mut self,
        lengths: Lengths,
        goodput: f64,
        steps: u32,
    ) -> Result<Slice> {
        let best = search::highest(goodput, steps, |rate| self.carried(lengths, rate))?;
        best.with_context(|| format!("{} loses more than 1 % at any rate", self.tunnel.label))
    }

    /// First slice at full speed in which something arrives, as a machine under load may not run
    /// all programs of a path in each.
    pub(crate) fn warm_up(&mut self, lengths: Lengths) -> Result<Slice> {
        for _ in 0..WARM_UPS {
            let slice = self.measure(lengths, None)?;
            if slice.gbit > 0.0 || self.flows.is_empty() {
                return Ok(slice);
            }
        }
        bail!("{} lets nothing through", self.tunnel.label)
    }

    /// Slice at a rate that is carried. What else runs on the machine costs datagrams, so a rate is
    /// given up only after a second try.
    fn carried(&mut self, lengths: Lengths, rate: f64) -> Result<Option<Slice>> {
        for _ in 0..TRIES {
            let slice = self.measure(lengths, Some(rate))?;
            if slice.gbit > 0.0 && slice.lost_share <= MAX_LOSS {
                return Ok(Some(slice));
            }
        }
        Ok(None)
    }

    fn counts(&self) -> Counts {
        self.flows.iter().map(Flow::counts).fold(Counts::default(), |sum, one| Counts {
            sent: sum.sent + one.sent,
            received: sum.received + one.received,
            duplicates: sum.duplicates + one.duplicates,
            reordered: sum.reordered + one.reordered,
        })
    }

    fn read(&self) -> Result<Reading> {
        let Tunnel { label, ends, pids, .. } = self.tunnel;
        let retransmits = ends.iter().map(|end| end.net.run(machine::retransmits));
        let rss = pids.iter().map(|pid| resident_bytes(*pid)).collect::<Result<Vec<_>>>()?;
        Ok(Reading {
            received: self.counts().received,
            gateways: ProcessTimes::of(pids).with_context(|| format!("measuring {label}"))?,
            own: ProcessTimes::of(&[std::process::id().cast_signed()])?,
            machine: CpuTimes::now()?,
            retransmits: retransmits.sum::<Result<u64>>()?,
            rss_bytes: rss.into_iter().max().unwrap_or(0),
            at: Instant::now(),
        })
    }
}

/// All counters at one moment.
struct Reading {
    at: Instant,
    received: u64,
    gateways: ProcessTimes,
    /// CPU times of this process, which sends and receives.
    own: ProcessTimes,
    machine: CpuTimes,
    retransmits: u64,
    rss_bytes: u64,
}

/// A slice between two readings. Losses are those of all that was sent, the first counts being from
/// before anything was and the last ones from after all had arrived that ever did.
fn between(before: &Reading, after: &Reading, first: Counts, last: Counts) -> Slice {
    let machine = after.machine.since(before.machine);
    let own_user = after.own.user + after.gateways.user - before.own.user - before.gateways.user;
    let sent = (last.sent - first.sent).max(1) as f64;
    Slice {
        gbit: (after.received - before.received) as f64 * 8.0 / 1e9,
        seconds: (after.at - before.at).as_secs_f64(),
        lost_share: (1.0 - (last.received - first.received) as f64 / sent).max(0.0),
        duplicates: last.duplicates - first.duplicates,
        reordered: last.reordered - first.reordered,
        retransmits: after.retransmits - before.retransmits,
        cpu_seconds: after.gateways.total() - before.gateways.total(),
        softirq_seconds: machine.softirq,
        steal_share: machine.steal_share(),
        others_share: ((machine.user - own_user) / machine.total).max(0.0),
        rss_bytes: after.rss_bytes,
        latencies: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(received: u64, retransmits: u64) -> Reading {
        Reading {
            at: Instant::now(),
            received,
            gateways: ProcessTimes::default(),
            own: ProcessTimes::default(),
            machine: CpuTimes::default(),
            retransmits,
            rss_bytes: received,
        }
    }

    #[test]
    fn loss_is_of_all_that_was_sent() {
        let counts = |sent, received, duplicates, reordered| Counts {
            sent,
            received,
            duplicates,
            reordered,
        };
        let (first, last) = (counts(1000, 900, 1, 2), counts(3000, 2800, 4, 7));
        let slice = between(&reading(125_000_000, 5), &reading(375_000_000, 9), first, last);
        assert!((slice.lost_share - 0.05).abs() < 1e-9, "{slice:?}");
        assert_eq!((slice.gbit, slice.duplicates, slice.reordered), (2.0, 3, 5));
        assert_eq!((slice.retransmits, slice.rss_bytes), (4, 375_000_000));
        let idle = between(&reading(0, 0), &reading(0, 0), first, first);
        assert_eq!((idle.gbit, idle.duplicates), (0.0, 0));
    }
}
