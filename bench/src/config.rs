use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use weft_tests::StockPeer;

use crate::abba::Timing;
use crate::flow::{Load, Traffic};
use crate::scale::ScaleArgs;

/// Compares weft with wireguard-go, or another WireGuard in userspace, on this machine.
///
/// How it measures: both tunnels are up and warm side by side, and take turns in slices of two
/// seconds, in the order A B, B A, A B and so on. Each pair of slices gives one ratio. Reported are
/// the median of the ratios and the interval in which it lies with 95 % confidence (bootstrap). The
/// control compares neighbouring slices of the same tunnel: what this machine calls equal. Pairs
/// during which the hypervisor took more than 1 % of the time away do not count and are repeated.
/// A difference is shown only if its interval excludes 1. Two runs taken apart cannot be compared.
///
/// Scenarios:
///
/// * point-to-point: one flow through two weft lanes, no overlay, against one through two of the
///   other, in the same namespaces: end a - gateway a = underlay = gateway b - end b.
/// * pod-to-pod: one flow from a pod of one cluster to a pod of another through all of weft
///   (node, VXLAN, gateway, tunnel, gateway, VXLAN, node) against the same other one with no
///   overlay at all.
///
/// Flows are plain TCP, blocks of 128 KiB, written and read as iperf3 does, on connections that
/// last for the whole run, or UDP (--traffic). Tunnels have an MTU of 1,420 bytes, underlays 1,500. Congestion control
/// is set on the sender's route.
///
/// Needs root (namespaces, TUN devices), the weft programs built with --release, and what `make
/// peers` builds into ~/.cache/weft/bin. Everything a run makes (namespaces, devices, processes)
/// goes away with it, however it ends.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// What to measure; all scenarios unless given. Can be repeated.
    #[arg(long, value_enum)]
    pub(crate) scenario: Vec<ScenarioName>,
    /// What to compare weft with.
    #[arg(long, value_enum, default_value_t = StockPeer::WireguardGo)]
    pub(crate) against: StockPeer,
    /// How many undisturbed pairs of slices to take.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) pairs: u16,
    /// How long a slice lasts, such as 2s or 500ms.
    #[arg(long, default_value = "2s", value_name = "TIME", value_parser = duration)]
    pub(crate) slice: Duration,
    /// Kind of the flows. Senders of UDP send more than any tunnel takes: compared is what arrives.
    #[arg(long, value_enum, default_value_t = Traffic::Tcp)]
    pub(crate) traffic: Traffic,
    /// Flows side by side through each tunnel.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) flows: u16,
    /// Congestion control of the senders. BBR paces: its timers run TCP on the gateways' account
    /// and hide half of any difference.
    #[arg(long, default_value = "cubic", value_name = "NAME")]
    pub(crate) congestion: String,
    /// Four pairs of half a second: shows that it works, its figures mean nothing.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Also write the report as JSON to this file; `-` writes it to standard output instead of the
    /// table.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Scale(ScaleArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScenarioName {
    PointToPoint,
    PodToPod,
}

impl Args {
    pub(crate) fn timing(&self) -> Timing {
        if self.quick {
            return Timing { pairs: 4, slice: Duration::from_millis(500) };
        }
        Timing { pairs: self.pairs.into(), slice: self.slice }
    }

    pub(crate) fn load(&self) -> Load<'_> {
        Load { traffic: self.traffic, flows: self.flows.into(), congestion: &self.congestion }
    }

    pub(crate) fn selects(&self, scenario: ScenarioName) -> bool {
        self.scenario.is_empty() || self.scenario.contains(&scenario)
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let signed: jiff::SignedDuration =
        text.parse().map_err(|_| "expected a time such as 2s or 500ms".to_owned())?;
    let length: Duration = signed.try_into().map_err(|_| "a time cannot be negative".to_owned())?;
    if length < Duration::from_millis(100) {
        return Err("a slice shorter than 100ms shows nothing".to_owned());
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_wins_over_pairs_and_slice() {
        let args = Args::parse_from(["bench", "--quick", "--pairs", "30", "--slice", "3s"]);
        assert_eq!((args.timing().pairs, args.timing().slice), (4, Duration::from_millis(500)));
        let args = Args::parse_from(["bench", "--pairs", "30", "--slice", "3s"]);
        assert_eq!((args.timing().pairs, args.timing().slice), (30, Duration::from_secs(3)));
    }

    #[test]
    fn all_scenarios_are_selected_by_default() {
        let all = Args::parse_from(["bench"]);
        assert!(all.selects(ScenarioName::PointToPoint) && all.selects(ScenarioName::PodToPod));
        let one = Args::parse_from(["bench", "--scenario", "pod-to-pod"]);
        assert!(!one.selects(ScenarioName::PointToPoint) && one.selects(ScenarioName::PodToPod));
    }
}
