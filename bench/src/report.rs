//! Results of an ABBA comparison, for people and for programs.

use std::fmt;

use clap::ValueEnum;
use comfy_table::{Table, presets};
use serde::Serialize;
use weft_tests::resident_bytes;

use crate::abba::{Contestant, Outcome, Pair, Slice};
use crate::flow::Load;
use crate::statistics::Ratio;

/// A machine of which other programs use more than this is not fit to measure on.
const BUSY: f64 = 0.03;

/// All of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: String,
    /// Name of the program that weft was compared with.
    pub(crate) against: String,
    pub(crate) scenarios: Vec<Scenario>,
}

/// Kind of traffic that is measured, with its pairs.
#[derive(Debug, Serialize)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) traffic: String,
    pub(crate) congestion: String,
    pub(crate) flows: usize,
    pub(crate) slice_seconds: f64,
    pub(crate) pairs: usize,
    /// Because the hypervisor took more than 1 % of the time away.
    pub(crate) pairs_dropped: usize,
    /// Median share of all CPU time that programs used which are not part of the measurement.
    pub(crate) others_share: f64,
    /// Throughput of the first contestant over that of the second.
    pub(crate) ratio: Option<Ratio>,
    /// The same tunnel against itself.
    pub(crate) control: Option<Ratio>,
    /// CPU seconds per Gbit of the first contestant's gateways over those of the second.
    pub(crate) cpu_ratio: Option<Ratio>,
    pub(crate) contestants: [Figures; 2],
}

/// Medians over the sound slices.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) label: String,
    pub(crate) gbit_per_second: f64,
    /// CPU time of both gateways' processes, all threads, user and kernel.
    pub(crate) gateway_cpu_seconds_per_gbit: f64,
    /// CPU time of the whole machine: the share of the packets' way that is charged to no process.
    pub(crate) softirq_seconds_per_gbit: f64,
    pub(crate) retransmits_per_second: f64,
    /// Share of the sent data that did not arrive; for TCP next to none.
    pub(crate) lost_share: f64,
    /// Memory of the larger of the two gateways, at the end.
    pub(crate) rss_bytes: u64,
}

impl Scenario {
    pub(crate) fn of(
        name: &str,
        outcome: &Outcome,
        contestants: [&Contestant; 2],
        load: Load<'_>,
    ) -> Self {
        let cpu = |pair: &Pair| {
            per_gbit(&pair.a, pair.a.cpu_seconds) / per_gbit(&pair.b, pair.b.cpu_seconds)
        };
        let cpu_ratios: Vec<f64> =
            outcome.sound().map(cpu).filter(|r| r.is_finite() && *r > 0.0).collect();
        let [a, b] = contestants;
        let sound = outcome.sound().count();
        Self {
            name: name.to_owned(),
            traffic: load
                .traffic
                .to_possible_value()
                .map_or_else(String::new, |v| v.get_name().to_owned()),
            congestion: load.congestion.to_owned(),
            flows: a.flows.len(),
            slice_seconds: outcome.median(|pair| pair.a.seconds),
            pairs: sound,
            pairs_dropped: outcome.pairs.len() - sound,
            others_share: outcome.median(|pair| pair.a.others_share.max(pair.b.others_share)),
            ratio: Ratio::of(&outcome.ratios()),
            control: Ratio::of(&outcome.controls()),
            cpu_ratio: Ratio::of(&cpu_ratios),
            contestants: [
                Figures::of(a, outcome, |pair| pair.a),
                Figures::of(b, outcome, |pair| pair.b),
            ],
        }
    }
}

impl Figures {
    fn of(contestant: &Contestant, outcome: &Outcome, side: fn(&Pair) -> Slice) -> Self {
        let median = |figure: fn(&Slice) -> f64| outcome.median(|pair| figure(&side(pair)));
        let rss = contestant.pids.iter().filter_map(|pid| resident_bytes(*pid).ok()).max();
        Self {
            label: contestant.label.clone(),
            gbit_per_second: median(Slice::gbit_per_second),
            gateway_cpu_seconds_per_gbit: median(|slice| per_gbit(slice, slice.cpu_seconds)),
            softirq_seconds_per_gbit: median(|slice| per_gbit(slice, slice.softirq_seconds)),
            retransmits_per_second: median(|slice| slice.retransmits as f64 / slice.seconds),
            lost_share: median(Slice::lost_share),
            rss_bytes: rss.unwrap_or(0),
        }
    }
}

fn per_gbit(slice: &Slice, seconds: f64) -> f64 {
    seconds / slice.gbit
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}; {}", self.machine, self.against)?;
        self.scenarios.iter().try_for_each(|scenario| write!(f, "\n{scenario}"))
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} {} flow(s), {}, {} pairs of {:.1} s slices ({} dropped for steal)",
            self.name,
            self.flows,
            self.traffic,
            self.congestion,
            self.pairs,
            self.slice_seconds,
            self.pairs_dropped
        )?;
        let mut table = Table::new();
        table.load_preset(presets::UTF8_BORDERS_ONLY).set_header([
            "",
            "Gbit/s",
            "gateway CPU s/Gbit",
            "softirq s/Gbit",
            "retransmits/s",
            "lost %",
            "RSS MB",
        ]);
        for figures in &self.contestants {
            table.add_row([
                figures.label.clone(),
                format!("{:.2}", figures.gbit_per_second),
                format!("{:.3}", figures.gateway_cpu_seconds_per_gbit),
                format!("{:.3}", figures.softirq_seconds_per_gbit),
                format!("{:.0}", figures.retransmits_per_second),
                format!("{:.1}", figures.lost_share * 100.0),
                format!("{:.1}", figures.rss_bytes as f64 / 1e6),
            ]);
        }
        writeln!(f, "{table}")?;
        let [a, b] = &self.contestants;
        let rows = [
            (format!("{} / {}", a.label, b.label), self.ratio),
            ("A/A control".to_owned(), self.control),
            ("CPU per Gbit".to_owned(), self.cpu_ratio),
        ];
        for (label, ratio) in rows {
            match ratio {
                Some(ratio) => writeln!(f, "  {label:<32} {ratio}")?,
                None => writeln!(f, "  {label:<32} too few undisturbed slices")?,
            }
        }
        if self.others_share > BUSY {
            let percent = self.others_share * 100.0;
            writeln!(f, "  Other programs used {percent:.0} % of the machine: measure again.")?;
        }
        Ok(())
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.excludes_one() { "" } else { "  no difference shown" };
        write!(f, "{:.2} x  [{:.2}, {:.2}]{verdict}", self.median, self.low, self.high)
    }
}
