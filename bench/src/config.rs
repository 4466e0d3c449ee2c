use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::abba::max_pairs;
use crate::contestant::{Lengths, TRIES};
use crate::line::{self, Line, Method};
use crate::scale::ScaleArgs;
use crate::search::TRIES_BELOW;

/// Compares weft with other WireGuards in userspace (wireguard-go, gotatun, boringtun), on this machine.
///
/// Method: all tunnels are up and warm side by side, in namespaces of their own. For each
/// line, every peer is tried, and the best one and weft take turns in slices of two seconds, in the
/// order A B, B A, A B and so on. Each pair of slices gives one ratio. Reported are the median of the
/// ratios and the interval in which it lies with 95 % confidence (bootstrap). The control compares
/// neighbouring slices of the same tunnel: what this machine calls equal. Pairs during which the
/// hypervisor took more than 1 % of the time away do not count and are repeated. Two runs taken
/// apart cannot be compared.
///
/// Packets go end a - gateway a = underlay = gateway b - end b, through a weft lane, or a stock
/// WireGuard, at each gateway. Lines `pods-...` have weft's from a pod of one cluster to a pod of
/// another (node, VXLAN, gateway, tunnel, gateway, VXLAN, node), the peer's still without any overlay.
///
/// TCP is written and read in blocks of 128 KiB, as iperf3 does, on connections that last for the
/// whole line, with cubic. UDP is numbered and checked by its sink. Tunnels have an MTU of 1,420 bytes,
/// underlays 1,500. This program sends and receives, on the same cores.
///
/// Needs root (namespaces, TUN devices), the weft programs built with --release, and what `make
/// peers` builds into ~/.cache/weft/bin. Everything a run makes (namespaces, devices, processes)
/// goes away with it, however it ends.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Line to measure; all lines unless given. Can be repeated.
    #[arg(long, value_name = "NAME", value_parser = line_named)]
    line: Vec<Line>,
    /// Undisturbed pairs of slices for each line.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pairs: u16,
    /// Length of a slice, such as 2s or 500ms.
    #[arg(long, default_value = "2s", value_name = "TIME", value_parser = duration)]
    slice: Duration,
    /// Four pairs of short slices: all lines in less than five minutes, each far less exact.
    #[arg(long)]
    quick: bool,
    /// Also write the report into this file, in place of its last one for this processor, and raw
    /// figures and plots into the folder `results` beside it.
    #[arg(long, value_name = "FILE")]
    pub(crate) results: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Scale(ScaleArgs),
}

/// Number and length of slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    pub(crate) pairs: usize,
    /// Slices of each peer before the best one is chosen.
    pub(crate) trials: usize,
    pub(crate) slice: Lengths,
    /// Steps of a search for the highest rate.
    pub(crate) step: Lengths,
    pub(crate) steps: u32,
}

/// Time between two slices, in which queues run empty and counters are read.
const BETWEEN: Duration = Duration::from_millis(120);

impl Args {
    pub(crate) fn timing(&self) -> Timing {
        let lengths = |settle, slice| Lengths { settle: Duration::from_millis(settle), slice };
        if self.quick {
            let [slice, step] = [350, 120].map(Duration::from_millis);
            let (slice, step) = (lengths(150, slice), lengths(50, step));
            return Timing { pairs: 4, trials: 1, slice, step, steps: 5 };
        }
        Timing {
            pairs: self.pairs.into(),
            trials: 2,
            slice: lengths(300, self.slice),
            step: lengths(100, Duration::from_millis(300)),
            steps: 7,
        }
    }

    /// Selected lines.
    pub(crate) fn lines(&self) -> Vec<Line> {
        if self.line.is_empty() { line::all() } else { self.line.clone() }
    }
}

impl Timing {
    /// Time that a line takes, and the most that it may take, with so many peers.
    pub(crate) fn of(&self, line: &Line, peers: usize) -> [Duration; 2] {
        let slice = self.slice.settle + self.slice.slice + BETWEEN;
        let step = self.step.settle + self.step.slice + BETWEEN;
        // Half of the rates of a search are tried twice.
        let usual = (self.pairs, self.steps + self.steps / 2);
        let most = (max_pairs(self.pairs), (self.steps + TRIES_BELOW) * TRIES);
        [usual, most].map(|(pairs, steps)| {
            let warm = peers as u32 + 1;
            let slices = (peers * self.trials + 2 * pairs) as u32;
            match line.method {
                Method::Overload | Method::RateOfPeer => (warm + slices) * slice,
                Method::HighestRate => warm * slice + slices * steps * step,
            }
        })
    }
}

fn line_named(name: &str) -> Result<Line, String> {
    let mut lines = line::all();
    match lines.iter().position(|line| line.name == name) {
        Some(found) => Ok(lines.swap_remove(found)),
        None => {
            let names: Vec<_> = lines.into_iter().map(|line| line.name).collect();
            Err(format!("expected one of {}", names.join(", ")))
        }
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
    fn quick_run_takes_less_than_five_minutes() {
        let args = Args::parse_from(["bench", "--quick", "--pairs", "30", "--slice", "3s"]);
        let time: Duration = args.lines().iter().map(|line| args.timing().of(line, 3)[0]).sum();
        assert!(time < Duration::from_secs(240), "{time:?}");
        let args = Args::parse_from(["bench", "--pairs", "30", "--slice", "3s"]);
        assert_eq!((args.timing().pairs, args.timing().slice.slice.as_secs()), (30, 3));
    }

    #[test]
    fn time_of_a_line_counts_trials_and_pairs() {
        let timing = Args::parse_from(["bench", "--pairs", "10", "--slice", "1s"]).timing();
        let lines = line::all();
        // All four once, 3 peers twice, and 10 pairs, or 15 if a third of them is disturbed.
        let slice = Duration::from_millis(1420);
        assert_eq!(timing.of(&lines[0], 3), [30 * slice, 40 * slice]);
    }

    #[test]
    fn all_lines_are_selected_by_default() {
        assert_eq!(Args::parse_from(["bench"]).lines().len(), line::all().len());
        let one = Args::parse_from(["bench", "--line", "udp-64"]).lines();
        assert_eq!(one.iter().map(|line| line.name.as_str()).collect::<Vec<_>>(), ["udp-64"]);
        assert!(Args::try_parse_from(["bench", "--line", "none"]).is_err());
    }
}
