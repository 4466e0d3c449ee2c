//! Figures of a run, and their tables.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Zoned;
use serde::{Deserialize, Serialize};

use crate::abba::Outcome;
use crate::flow::Traffic;
use crate::line::{self, Line};
use crate::machine::{Class, Machine};
use crate::section;
use crate::slice::Slice;
use crate::statistics::{Ratio, percentile};

/// A machine of which other programs use more than this is not fit to measure on.
const BUSY: f64 = 0.03;
/// Shares of responses in a distribution of latencies.
const SHARES: [f64; 13] = [0.01, 0.05, 0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999];

/// Newest figures of one processor.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) class: Class,
    /// Time that ring takes for a packet of 1,420 bytes, in nanoseconds.
    pub(crate) seal_ns: f64,
    /// Versions of the peers.
    pub(crate) peers: Vec<String>,
    pub(crate) lines: BTreeMap<String, LineReport>,
}

/// One line. Pairs of figures are of weft and of its best peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LineReport {
    pub(crate) title: String,
    date: String,
    weft: String,
    /// The line's first figure of every peer, as tried beforehand.
    tried: BTreeMap<String, f64>,
    pub(crate) best: String,
    pairs: usize,
    /// Because the hypervisor took more than 1 % of the time away.
    pairs_dropped: usize,
    slice_seconds: f64,
    /// Median share of all CPU time that programs used which are not part of the measurement.
    others_share: f64,
    lost_share: [f64; 2],
    duplicates: [f64; 2],
    reordered: [f64; 2],
    pub(crate) gbit_per_second: [f64; 2],
    /// CPU seconds of both gateways and of all softirqs; 0 without traffic.
    pub(crate) cpu_per_gbit: [f64; 2],
    figures: Vec<FigureReport>,
    /// Shares of all responses, and milliseconds within which they arrived.
    pub(crate) latencies: [Vec<(f64, f64)>; 2],
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FigureReport {
    unit: String,
    medians: [f64; 2],
    ratio: Option<Ratio>,
    control: Option<Ratio>,
    bar: String,
    met: bool,
    /// Values of each pair.
    pairs: Vec<[f64; 2]>,
}

impl LineReport {
    pub(crate) fn new(
        line: &Line,
        outcome: &Outcome,
        (best, tried): (String, BTreeMap<String, f64>),
        class: Class,
    ) -> Self {
        let medians = |figure: fn(&Slice) -> f64| outcome.medians(figure).map(rounded);
        let sound = outcome.sound().count();
        let figures = line.figures.iter().map(|(figure, bar)| {
            let (medians, ratio) = (outcome.medians(|s| figure.of(s)), outcome.ratio(*figure));
            FigureReport {
                unit: figure.unit().to_owned(),
                medians: medians.map(rounded),
                ratio,
                control: outcome.control(*figure),
                bar: bar.text(class),
                met: bar.is_met(class, medians, ratio),
                pairs: outcome.values(*figure).into_iter().map(|pair| pair.map(rounded)).collect(),
            }
        });
        let [weft_others, peer_others] = medians(|slice| slice.others_share);
        Self {
            title: line.title.clone(),
            date: Zoned::now().date().to_string(),
            weft: section::revision().to_owned(),
            tried: tried.into_iter().map(|(peer, value)| (peer, rounded(value))).collect(),
            best,
            pairs: sound,
            pairs_dropped: outcome.pairs.len() - sound,
            slice_seconds: medians(|slice| slice.seconds)[0],
            others_share: weft_others.max(peer_others),
            lost_share: medians(|slice| slice.lost_share),
            duplicates: medians(|slice| slice.duplicates as f64),
            reordered: medians(|slice| slice.reordered as f64),
            gbit_per_second: medians(|slice| slice.gbit / slice.seconds),
            cpu_per_gbit: medians(|slice| match slice.gbit > 0.0 {
                true => (slice.cpu_seconds + slice.softirq_seconds) / slice.gbit,
                false => 0.0,
            }),
            figures: figures.collect(),
            latencies: [0, 1].map(|side| latencies(outcome, side)),
        }
    }

    fn is_quiet(&self) -> bool {
        self.others_share <= BUSY
    }
}

/// Distribution over all sound slices of one side.
fn latencies(outcome: &Outcome, side: usize) -> Vec<(f64, f64)> {
    let mut all: Vec<f64> =
        outcome.sound().flat_map(|pair| pair.slices[side].latencies.iter().copied()).collect();
    all.sort_by(f64::total_cmp);
    let at = |share| Some((share, rounded(percentile(&all, share)? * 1e3)));
    SHARES.into_iter().filter_map(at).collect()
}

/// Four digits, which is more than is known.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

impl Report {
    /// Losses, duplicates and reordering of the datagrams of a slice, on lines of UDP.
    fn write_losses(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = line::all();
        let is_udp = |line: &&Line| matches!(line.load.traffic, Some(Traffic::Udp { .. }));
        let udp = all.iter().filter(is_udp).filter_map(|line| self.lines.get(&line.name));
        let mut rows = udp.peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        writeln!(
            f,
            "\n| datagrams: weft, best peer | lost | duplicates | reordered |\n|---|---|---|---|"
        )?;
        for LineReport { title, lost_share, duplicates, reordered, .. } in rows {
            let [weft, peer] = lost_share.map(|share| share * 100.0);
            let lost = format!("{weft:.1} %, {peer:.1} %");
            let [[a, b], [c, d]] = [duplicates, reordered];
            writeln!(f, "| {title} | {lost} | {a}, {b} | {c}, {d} |")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}\n", self.machine)?;
        let (class, ns, peers) = (self.class, self.seal_ns, self.peers.join(", "));
        writeln!(f, "Class {class:?}: ring seals 1,420 bytes in {ns:.0} ns. {peers}.\n")?;
        let busy = self.lines.values().filter(|line| !line.is_quiet()).count();
        if busy > 0 {
            let share = self.lines.values().map(|line| line.others_share).fold(0.0, f64::max);
            writeln!(
                f,
                "**Not a quiet machine**: in {busy} of {} lines other programs used more than {:.0} % of it, up to {:.0} %.\n",
                self.lines.len(),
                BUSY * 100.0,
                share * 100.0
            )?;
        }
        writeln!(f, "| line | weft | best peer | ratio | control | bar | met | measured |")?;
        writeln!(f, "|---|---|---|---|---|---|---|---|")?;
        for line in line::all().iter().filter_map(|line| self.lines.get(&line.name)) {
            line.figures.iter().try_for_each(|figure| write_row(f, line, figure))?;
        }
        self.write_losses(f)
    }
}

fn write_row(
    f: &mut fmt::Formatter<'_>,
    line: &LineReport,
    FigureReport { unit, medians: [weft, peer], ratio, control, bar, met, .. }: &FigureReport,
) -> fmt::Result {
    let text = |ratio: &Option<Ratio>| ratio.map_or_else(|| "-".to_owned(), |r| r.to_string());
    let number = |value: &f64| match value {
        value if *value >= 100.0 => format!("{value:.0}"),
        value if *value >= 10.0 => format!("{value:.1}"),
        value if *value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    };
    let (title, best, pairs) = (&line.title, &line.best, line.pairs);
    let (weft, peer, met) = (number(weft), number(peer), if *met { "yes" } else { "**no**" });
    let others = match line.is_quiet() {
        true => String::new(),
        false => format!(", {:.0} % others", line.others_share * 100.0),
    };
    let measured = format!("{}, {}, {pairs} pairs{others}", line.date, line.weft);
    let (ratio, control) = (text(ratio), text(control));
    writeln!(
        f,
        "| {title}: {unit} | {weft} | {peer} {best} | {ratio} | {control} | {bar} | {met} | {measured} |"
    )
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} x [{:.2}, {:.2}]", self.median, self.low, self.high)
    }
}

impl LineReport {
    /// Ratio of the first figure, for progress.
    pub(crate) fn summary(&self) -> String {
        let figure = self.figures.first();
        let ratio = figure.and_then(|figure| figure.ratio);
        ratio.map_or_else(|| "too few undisturbed slices".to_owned(), |ratio| ratio.to_string())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::abba;

    pub(crate) fn report(lines: &[&str]) -> Report {
        let measured = |line: &Line| {
            let outcome = abba::run(3, |side| {
                let gbit = [4.0, 2.0][side];
                let latencies = line.load.requests.map_or_else(Vec::new, |_| vec![0.001, 0.002]);
                let measured = Slice { gbit, seconds: 2.0, latencies, ..Slice::default() };
                Ok(Slice { others_share: 0.2, lost_share: 0.1, duplicates: 3, ..measured })
            });
            let tried = BTreeMap::from([("gotatun".to_owned(), 1.0)]);
            LineReport::new(line, &outcome.unwrap(), ("gotatun".to_owned(), tried), Class::S)
        };
        let all = line::all();
        let selected = all.iter().filter(|line| lines.contains(&line.name.as_str()));
        Report {
            machine: Machine { processor: "P (1)".into(), cores: 2, kernel: "6".into() },
            class: Class::S,
            seal_ns: 1200.0,
            peers: vec!["gotatun 1".to_owned()],
            lines: selected.map(|line| (line.name.clone(), measured(line))).collect(),
        }
    }

    #[test]
    fn row_has_medians_ratio_and_bar() {
        let text = report(&["tcp-1", "tcp-16"]).to_string();
        let row = "| TCP, 1 flow: Gbit/s | 2.00 | 1.00 gotatun | 2.00 x [2.00, 2.00] | 1.00 x [1.00, 1.00] | ≥ 2.9 x | **no** |";
        assert!(text.contains(row), "{text}");
        assert!(
            text.contains("in 2 of 2 lines other programs used more than 3 % of it, up to 20 %")
        );
    }
}
