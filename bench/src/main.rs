//! `make bench`: weft against a stock WireGuard, in one run on one machine; `make bench-scale`: the control
//! plane with hundreds of simulated nodes.

mod abba;
mod baseline;
mod config;
mod flow;
mod lab;
mod machine;
mod report;
mod scale;
mod statistics;
mod weft;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use abba::{Contestant, Pair};
use config::{Args, Command, ScenarioName};
use lab::Lab;
use report::{Report, Scenario};
use weft::Fabric;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("bench: built without --release: the figures of weft mean nothing");
    }
    if let Some(Command::Scale(args)) = &args.command {
        return scale::run(args);
    }
    if let Err(error) = args.against.program() {
        eprintln!("bench: skipped: {error:#}; `make peers` builds it");
        return Ok(());
    }
    let mut scenarios = Vec::new();
    if args.selects(ScenarioName::PointToPoint) {
        let scenario = point_to_point(args);
        scenarios.push(scenario.context("point-to-point could not be measured")?);
    }
    if args.selects(ScenarioName::PodToPod) {
        let scenario = pod_to_pod(args);
        scenarios.push(scenario.context("pod-to-pod could not be measured")?);
    }
    let report =
        Report { machine: machine::describe(), against: args.against.version()?, scenarios };
    publish(&report, args.json.as_deref())
}

/// One lane at each end against one stock peer at each end, in the same namespaces.
fn point_to_point(args: &Args) -> Result<Scenario> {
    let lab = Lab::new().context("cannot set the namespaces up")?;
    let (weft, _lanes) = weft::start_lanes(&lab, 1, args.load())?;
    let (other, _processes) = baseline::start(&lab, args.against, 2, args.load())?;
    compare("point-to-point", [&weft, &other], args)
}

/// All of weft between two pods against a stock peer without any overlay.
fn pod_to_pod(args: &Args) -> Result<Scenario> {
    let fabric = Fabric::start().context("cannot set two clusters up")?;
    let weft = fabric.contestant(args.load())?;
    let lab = Lab::new().context("cannot set the namespaces up")?;
    let (other, _processes) = baseline::start(&lab, args.against, 1, args.load())?;
    compare("pod-to-pod", [&weft, &other], args)
}

fn compare(name: &str, contestants: [&Contestant; 2], args: &Args) -> Result<Scenario> {
    let timing = args.timing();
    let labels = contestants.map(|contestant| contestant.label.clone());
    let outcome = abba::run(contestants, timing, |pair, sound| {
        print_progress(name, &labels, pair);
        eprintln!(" ({sound} of {})", timing.pairs);
    })?;
    Ok(Scenario::of(name, &outcome, contestants, args.load()))
}

fn print_progress(name: &str, [a, b]: &[String; 2], pair: &Pair) {
    let (x, y) = (pair.a.gbit_per_second(), pair.b.gbit_per_second());
    eprint!("{name}: {a} {x:.2}, {b} {y:.2} Gbit/s, {:.2} x", pair.ratio());
}

/// The table, the JSON, or both.
fn publish(report: &Report, json: Option<&Path>) -> Result<()> {
    let mut out = io::stdout().lock();
    let text = serde_json::to_string_pretty(report).context("writing JSON")?;
    match json {
        Some(path) if path == Path::new("-") => return writeln!(out, "{text}").context("writing"),
        Some(path) => std::fs::write(path, text + "\n")
            .with_context(|| format!("writing {}", path.display()))?,
        None => {}
    }
    write!(out, "{report}").context("writing the table")
}
