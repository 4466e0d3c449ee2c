//! One line: tries every peer, then lets weft and the best of them take turns.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use weft_tests::StockPeer;

use crate::abba::{self, Outcome};
use crate::config::Timing;
use crate::contestant::Contestant;
use crate::line::{Figure, Line, Method};
use crate::machine::Class;
use crate::report::LineReport;
use crate::slice::Slice;
use crate::statistics::median;
use crate::tunnel::Tunnel;

/// All tunnels of a run, side by side.
pub(crate) struct Tunnels {
    weft: Option<Tunnel>,
    fabric: Option<Tunnel>,
    peers: Vec<Tunnel>,
}

/// A contestant of a line, and the rate that is held.
struct Turn<'a> {
    contestant: Contestant<'a>,
    method: Method,
    timing: Timing,
    /// Bits per second: goodput at full speed, for the other methods.
    rate: f64,
}

impl Tunnels {
    /// Tunnels that these lines need. Peers that `make peers` could not build are left out.
    pub(crate) fn start(lines: &[Line], peers: &[StockPeer]) -> Result<Self> {
        let wants = |between_pods| lines.iter().any(|line| line.between_pods == between_pods);
        let peers: Result<Vec<_>> = peers
            .iter()
            .map(|peer| Tunnel::stock(*peer).with_context(|| format!("cannot start {peer}")))
            .collect();
        Ok(Self {
            weft: wants(false).then(Tunnel::lanes).transpose().context("cannot start lanes")?,
            fabric: wants(true)
                .then(Tunnel::fabric)
                .transpose()
                .context("cannot set two clusters up")?,
            peers: peers?,
        })
    }

    /// Measures one line.
    pub(crate) fn compare(&self, line: &Line, timing: Timing, class: Class) -> Result<LineReport> {
        let weft = if line.between_pods { &self.fabric } else { &self.weft };
        let weft = weft.as_ref().context("its tunnel was not started")?;
        let all = || self.peers.iter().chain([weft]);
        all().try_for_each(|tunnel| tunnel.set_udp_segmentation(line.udp_segmentation))?;
        let (best, values) = self.best_peer(line, timing)?;
        let mut weft = Turn::open(weft, line, timing)?;
        if line.method == Method::RateOfPeer {
            weft.method = Method::RateOfPeer;
            weft.rate = best.rate;
        }
        let label = best.contestant.tunnel.label.clone();
        let mut turns = [weft, best];
        let outcome: Outcome = abba::run(timing.pairs, |side| {
            eprint!(".");
            turns[side].slice()
        })?;
        Ok(LineReport::new(line, &outcome, (label, values), class))
    }

    /// The best peer of a line, warm, and the first figure of each peer.
    fn best_peer(&self, line: &Line, timing: Timing) -> Result<(Turn<'_>, BTreeMap<String, f64>)> {
        let (figure, _) = line.figures[0];
        let (mut best, mut values) = (None::<(Turn<'_>, f64)>, BTreeMap::new());
        for tunnel in &self.peers {
            let label = &tunnel.label;
            let (turn, value) =
                match Turn::open(tunnel, line, timing).and_then(|turn| turn.trial(figure)) {
                    Ok(tried) => tried,
                    Err(error) => {
                        eprint!(" {label} failed ({error:#})");
                        continue;
                    }
                };
            eprint!(" {label} {value:.3}");
            values.insert(label.clone(), value);
            if best.as_ref().is_none_or(|(_, best)| figure.is_better(value, *best)) {
                best = Some((turn, value));
            }
        }
        eprint!(" {} ", figure.unit());
        let (best, _) = best.context("no peer carries it")?;
        Ok((best, values))
    }
}

impl<'a> Turn<'a> {
    /// Opens the flows of a line and warms the tunnel up with one slice.
    fn open(tunnel: &'a Tunnel, line: &Line, timing: Timing) -> Result<Self> {
        let contestant = Contestant::open(tunnel, &line.load)
            .with_context(|| format!("no path through {}", tunnel.label))?;
        let method = match line.method {
            Method::HighestRate => Method::HighestRate,
            Method::Overload | Method::RateOfPeer => Method::Overload,
        };
        let mut turn = Self { contestant, method, timing, rate: 0.0 };
        let slice = turn.contestant.warm_up(timing.slice)?;
        turn.rate = Figure::Throughput.of(&slice) * 1e9;
        Ok(turn)
    }

    fn slice(&mut self) -> Result<Slice> {
        let Timing { slice, step, steps, .. } = self.timing;
        match self.method {
            Method::Overload => self.contestant.measure(slice, None),
            Method::RateOfPeer => self.contestant.measure(slice, Some(self.rate)),
            Method::HighestRate => self.contestant.highest_rate(step, self.rate, steps),
        }
    }

    /// Median of a figure over some slices.
    fn trial(mut self, figure: Figure) -> Result<(Self, f64)> {
        let slices: Result<Vec<_>> = (0..self.timing.trials).map(|_| self.slice()).collect();
        let slices = slices?;
        let of = |figure: Figure| {
            let values: Vec<_> = slices.iter().map(|slice| figure.of(slice)).collect();
            median(&values).context("no slice was measured")
        };
        if self.method == Method::Overload {
            self.rate = of(Figure::Throughput)? * 1e9;
        }
        let value = of(figure)?;
        Ok((self, value))
    }
}
