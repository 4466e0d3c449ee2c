//! `make bench`: weft against other WireGuards in userspace, in one run on one machine; `make bench-scale`: the
//! control plane with hundreds of simulated nodes.

mod abba;
mod compare;
mod config;
mod contestant;
mod flow;
mod lab;
mod latency;
mod line;
mod load;
mod machine;
mod plot;
mod report;
mod results;
mod scale;
mod search;
mod section;
mod slice;
mod statistics;
mod tunnel;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use weft_tests::StockPeer;

use compare::Tunnels;
use config::{Args, Command, Timing};
use line::Line;
use machine::{Class, Machine};
use report::Report;

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
    weft_tests::require(&[("ethtool", "ethtool")])?;
    let peers = peers();
    if peers.is_empty() {
        eprintln!("bench: skipped: there is no other WireGuard; `make peers` builds them");
        return Ok(());
    }
    let (lines, timing) = (args.lines(), args.timing());
    print_estimate(&lines, timing, peers.len());
    let seal_ns = machine::seal_ns();
    let mut report = Report {
        machine: Machine::this(),
        class: Class::of(seal_ns),
        seal_ns,
        peers: peers.iter().map(|peer| peer.version()).collect::<Result<_>>()?,
        lines: BTreeMap::new(),
    };
    let tunnels = Tunnels::start(&lines, &peers)?;
    let failed = measure(&tunnels, &lines, timing, &mut report);
    write!(io::stdout().lock(), "{report}").context("writing the table")?;
    if let Some(path) = &args.results {
        results::write(report, path)?;
    }
    ensure!(failed.is_empty(), "could not be measured: {}", failed.join(", "));
    Ok(())
}

/// Installed peers; prints which others are missing.
fn peers() -> Vec<StockPeer> {
    let is_there = |peer: &StockPeer| match peer.program() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("bench: without it: {error:#}; `make peers` builds it");
            false
        }
    };
    StockPeer::ALL.into_iter().filter(is_there).collect()
}

fn print_estimate(lines: &[Line], timing: Timing, peers: usize) {
    let minutes = |side: usize| {
        let time: Duration = lines.iter().map(|line| timing.of(line, peers)[side]).sum();
        time.as_secs_f64() / 60.0
    };
    eprintln!("{} lines: about {:.1} minutes, at most {:.1}", lines.len(), minutes(0), minutes(1));
}

/// Measures line by line into `report`; returns those that could not be.
fn measure(tunnels: &Tunnels, lines: &[Line], timing: Timing, report: &mut Report) -> Vec<String> {
    let (start, mut failed) = (Instant::now(), Vec::new());
    for (number, line) in lines.iter().enumerate() {
        let minutes = start.elapsed().as_secs_f64() / 60.0;
        eprint!("{minutes:.1} min, {} of {}, {}:", number + 1, lines.len(), line.name);
        match tunnels.compare(line, timing, report.class) {
            Ok(measured) => {
                eprintln!(" {}", measured.summary());
                report.lines.insert(line.name.clone(), measured);
            }
            Err(error) => {
                eprintln!(" {error:#}");
                failed.push(line.name.clone());
            }
        }
    }
    failed
}
