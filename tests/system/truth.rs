//! ```text
//!   rome-1 (client) --------- milan-1 (server)        each fault is named within three seconds
//! ```
//!
//! A truth table of `weft status` at default settings: [`faults`] makes each fault and measures the
//! time until cause and remedy are shown, [`healthy`] does what must not alarm. A further fault is
//! one function and one line in [`faults::CASES`].

mod faults;
mod healthy;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::wait_until;

use crate::scene::Scene;

/// From the fault until cause and remedy are shown, and from its end until they are gone.
const MAX: Duration = Duration::from_secs(3);
/// Until a time that is too long is known.
const AT_MOST: Duration = Duration::from_secs(20);
const RUNS: usize = 5;

/// A line of the table.
#[derive(Clone, Debug)]
struct Seen {
    cluster: &'static str,
    reason: &'static str,
    after: Duration,
}

/// A fault and the function that makes it, in a scene of its own.
type Case = (&'static str, fn() -> Result<Vec<Seen>>);

/// Runs a case and ensures that each of its times holds.
fn hold(case: Case) -> Result<()> {
    let (name, run) = case;
    let seen = run().context(name)?;
    print(name, &seen);
    let late: Vec<_> = seen.iter().filter(|seen| seen.after > MAX).collect();
    ensure!(late.is_empty(), "{name}: {late:?}");
    Ok(())
}

fn print(name: &str, seen: &[Seen]) {
    for Seen { cluster, reason, after } in seen {
        eprintln!("truth: {name:<28} {cluster:<6} {reason:<16} {:>5} ms", after.as_millis());
    }
}

/// Time from `start` until this cluster's status names a reason, with `words` in one line of the
/// problems, behind which the remedy follows.
fn named(
    scene: &Scene,
    (cluster, reason): (&'static str, &'static str),
    words: &str,
    start: Instant,
) -> Result<Seen> {
    named_as_one_of(scene, cluster, &[(reason, words)], start)
}

/// The same for a fault that shows in one of several ways, each with its words.
fn named_as_one_of(
    scene: &Scene,
    cluster: &'static str,
    ways: &[(&'static str, &str)],
    start: Instant,
) -> Result<Seen> {
    let mut reason = "";
    wait_until(&format!("{cluster} names one of {ways:?}"), AT_MOST, || {
        let (status, code) = scene.cluster(cluster).status_and_code()?;
        let (problems, reasons) = (strings(&status["problems"]), reasons(&status));
        let is_named = |(reason, words): &&(&str, &str)| {
            let is_line = |line: &String| line.contains(words) && line.contains("; ");
            reasons.iter().any(|of| of == reason) && problems.iter().any(is_line)
        };
        (reason, _) = *ways.iter().find(is_named).with_context(|| format!("not in {status}"))?;
        let states = states(&status);
        ensure!(states.iter().all(|state| state != "Connected"), "{states:?}");
        ensure!(code == 3, "weft status ends with {code}: {status}");
        Ok::<_, anyhow::Error>(())
    })?;
    Ok(Seen { cluster, reason, after: start.elapsed() })
}

/// Time from `start` until this cluster's status shows nothing but a connection.
fn solved(scene: &Scene, cluster: &'static str, start: Instant) -> Result<Seen> {
    wait_until(&format!("{cluster} shows no fault"), AT_MOST, || is_well(scene, cluster))?;
    Ok(Seen { cluster, reason: "(solved)", after: start.elapsed() })
}

/// Fails unless the peering of this cluster is connected, without fault and without any problem.
fn is_well(scene: &Scene, cluster: &str) -> Result<()> {
    let (status, code) = scene.cluster(cluster).status_and_code()?;
    let (states, reasons) = (states(&status), reasons(&status));
    ensure!(states == ["Connected"] && reasons.is_empty(), "{cluster}: {states:?}, {status}");
    ensure!(code == 0, "{cluster}: weft status ends with {code}: {status}");
    let problems = strings(&status["problems"]);
    ensure!(problems.is_empty(), "{cluster}: {problems:?}");
    Ok(())
}

fn states(status: &Value) -> Vec<String> {
    let peerings = status["peerings"].as_array().into_iter().flatten();
    peerings.map(|peering| peering["state"].as_str().unwrap_or_default().to_owned()).collect()
}

fn reasons(status: &Value) -> Vec<String> {
    let peerings = status["peerings"].as_array().into_iter().flatten();
    let faults = peerings.flat_map(|peering| peering["faults"].as_array().into_iter().flatten());
    faults.map(|fault| fault["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

#[test]
#[ignore = "minutes long: make soak"]
fn every_fault_is_named_in_time_five_times() -> Result<()> {
    let mut late = Vec::new();
    for (name, run) in faults::CASES {
        for _ in 0..RUNS {
            let seen = run().context(name)?;
            print(name, &seen);
            late.extend(seen.into_iter().filter(|seen| seen.after > MAX));
        }
    }
    ensure!(late.is_empty(), "{late:?}");
    Ok(())
}

#[test]
#[ignore = "minutes long: make soak"]
fn nothing_healthy_alarms_five_times() -> Result<()> {
    for (name, control) in healthy::CONTROLS {
        for _ in 0..RUNS {
            control().context(name)?;
        }
    }
    Ok(())
}
