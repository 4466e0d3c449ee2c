//! ```text
//!   pod-1-1 --- rome-1 (client) =========== milan-1 (server) --- pod-1-1
//! ```
//!
//! Effects that only time shows. Nothing else is to run beside this: it measures what the machine
//! can do.

mod changes;
mod footprint;
mod load;
mod machine;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::{Cluster, ClusterSpec, Lab, skip_disturbed};

use changes::Changes;
use footprint::Footprints;
use load::{Ends, Load};
use machine::Machine;

const TIMEOUT: Duration = Duration::from_secs(20);
const PORT: u16 = 30_742;
const SINK: u16 = 5000;

/// Minutes of the run, unless `WEFT_MINUTES` overrides it.
const MINUTES: u64 = 30;
const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
/// Extra time, so that the shortest soak sees a rekey, too.
const REKEY: Duration = Duration::from_secs(10);
const MOST_LOSS: f64 = 1e-5;

/// Packets a second: the first rate that is tried, and how much more each further one is.
const FIRST_RATE: f64 = 4_000.0;
const STEP: f64 = 1.25;
const STEP_LENGTH: Duration = Duration::from_secs(2);
/// A generator that falls behind this share of its rate has found its own limit.
const KEPT: f64 = 0.95;

const CHANGE_EVERY: Duration = Duration::from_secs(3);
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

#[test]
#[ignore = "minutes long: make soak"]
fn half_of_loss_free_rate_stays_loss_free() -> Result<()> {
    let lab = Lab::new(&format!("weft-soak-{}", std::process::id()))?;
    let cluster = |id, number| Cluster::new(&lab, ClusterSpec::new(id, number, 1));
    let mut clusters = [cluster("rome", 1)?, cluster("milan", 2)?];
    let result = clusters.iter_mut().try_for_each(Cluster::start);
    let result = result.and_then(|()| soak(&clusters));
    if result.is_err() {
        clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
    }
    result
}

fn soak(clusters: &[Cluster; 2]) -> Result<()> {
    let ends = peer(clusters)?;
    let rate = loss_free_rate(&ends)? / 2.0;
    let minutes = std::env::var("WEFT_MINUTES").ok().and_then(|n| n.parse().ok());
    let length = MINUTE * u32::try_from(minutes.unwrap_or(MINUTES))? + REKEY;
    eprintln!("for {length:?} at {rate:.0} packets/s, half of what passed without loss:");

    let (mut changes, mut footprints) = (Changes::new(clusters), Footprints::default());
    let load = Load::start(&ends, rate)?;
    let start = Instant::now();
    let (mut next_change, mut next_sample, mut next_line) = (CHANGE_EVERY, SAMPLE_EVERY, MINUTE);
    let (mut machine, mut next_look) = (Machine::new(), SECOND);
    while start.elapsed() < length {
        std::thread::sleep(Duration::from_millis(100));
        let now = start.elapsed();
        if now >= next_look {
            machine.look(load.tally().sent, load.left_out(), rate);
            next_look += SECOND;
        }
        if now >= next_change {
            changes.next()?;
            next_change += CHANGE_EVERY;
        }
        if now >= next_sample {
            footprints.sample(clusters);
            next_sample += SAMPLE_EVERY;
        }
        if now >= next_line {
            let tally = load.tally();
            eprintln!(
                "{now:>5.0?}: {tally} or on its way, {} changes; {footprints}",
                changes.count()
            );
            next_line += MINUTE;
        }
    }
    let tally = load.stop();
    eprintln!("in all: {tally}, {} changes; {machine}; {footprints}", changes.count());
    let mut lost = 0;
    for (first, count) in &tally.missing {
        let second = machine.second_of(*first);
        let excused = machine.is_cause(second);
        eprintln!("  lost: {count}, {second} s after the start; excused: {excused}");
        lost += if excused { 0 } else { *count };
    }
    clusters[0].is_connected("milan")?;
    clusters[1].is_connected("rome")?;
    footprints.are_flat()?;
    ensure!(tally.duplicated == 0, "{} came twice", tally.duplicated);
    let most = (tally.sent as f64 * MOST_LOSS) as u64;
    ensure!(lost <= most, "lost {lost} of {}; {most} may be", tally.sent);
    // Losses within the bounds need no excuse.
    if tally.lost() > most && !machine.was_quiet() {
        skip_disturbed(&format!("{machine}: losses cannot be judged"));
    }
    Ok(())
}

/// Joins the clusters; the way from a pod of the first to one of the second.
fn peer([rome, milan]: &[Cluster; 2]) -> Result<Ends> {
    let peering = Peering::new(&rome.spec, &milan.spec, PORT);
    rome.apply("milan", &join(&peering.client_documents()))?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    rome.wait_connected("milan", TIMEOUT)?;
    milan.wait_connected("rome", TIMEOUT)?;
    let pod = |cluster: &Cluster| cluster.nodes[0].pods[0].clone();
    let (from, at) = (pod(rome), pod(milan));
    let seen = rome.view(&milan.spec)?.of(at.addresses[0])?;
    Ok(Ends { from: from.ns, to: SocketAddr::new(seen, SINK), at: at.ns })
}

/// Packets a second of the highest step up to which nothing was lost. One loss is repeated.
fn loss_free_rate(ends: &Ends) -> Result<f64> {
    let (mut rate, mut passed) = (FIRST_RATE, None);
    loop {
        let mut tally = load::run(ends, rate, STEP_LENGTH)?;
        if tally.lost() > 0 {
            tally = load::run(ends, rate, STEP_LENGTH)?;
        }
        let reached = tally.sent as f64 / STEP_LENGTH.as_secs_f64();
        eprintln!("{rate:.0} packets/s: {tally}");
        if tally.lost() > 0 || reached < rate * KEPT {
            break;
        }
        passed = Some(rate);
        rate *= STEP;
    }
    passed.ok_or_else(|| anyhow::anyhow!("even {rate:.0} packets/s were not free of loss"))
}
