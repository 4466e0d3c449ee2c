//! ```text
//!   rome-1, rome-2 (client) --[ switch ]-- milan-1, milan-2 (server)      each fault is named within three seconds
//! ```
//!
//! A truth table of `weft status` in Kubernetes at default settings: [`faults`] has a line for each fault,
//! [`healthy`] for what must not alarm.

mod faults;
mod healthy;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::kubernetes::Image;
use weft_tests::{Cluster, Kubernetes, Lab, Netns, skip, wait_until};

use crate::pair::{Pair, SOON};
use crate::stage::{note, play, step};

/// Time from the fault until cause and remedy are shown, and from its end until they are gone.
const MAX: Duration = Duration::from_secs(3);
/// Time limit after which a wait counts as endless.
const AT_MOST: Duration = Duration::from_secs(90);

struct Scene<'a> {
    pair: &'a Pair,
    lab: &'a Lab,
    /// Cluster that runs a gateway with the key of rome's.
    duplicate_gateway: Mutex<Option<Cluster>>,
}

/// Expected output of one of the clusters: its place in the pair, and a text of one line of the problems, behind
/// which the remedy follows.
type Shown = (usize, &'static str);

/// Runs each row `WEFT_RUNS` times, by default once. The worst counts.
#[test]
#[ignore = "minutes long: make soak-rounds"]
fn every_fault_is_named_in_time() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-truth")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| {
                step("both are connected", || pair.connect())?;
                let scene = Scene::new(&pair, &lab);
                scene.wait_well(SOON)?;
                let runs = runs()?;
                let late = step("each fault is named", || faults::all(&scene, runs))?;
                step("nothing else alarms", || healthy::all(&scene, runs))?;
                ensure!(late.is_empty(), "late: {late:#?}");
                Ok(())
            })
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn runs() -> Result<usize> {
    match std::env::var("WEFT_RUNS") {
        Ok(text) => {
            text.parse().with_context(|| format!("WEFT_RUNS is {text:?}, expected a number"))
        }
        Err(_) => Ok(1),
    }
}

/// The rows that cost seconds, of two clusters that are connected. Times are printed, and held by the
/// test above: beside other tests, two clusters do not get the processor in time.
pub(crate) fn cheap_rows(pair: &Pair, lab: &Lab) -> Result<()> {
    let scene = Scene::new(pair, lab);
    scene.wait_well(SOON)?;
    faults::cheap(&scene).map(drop)
}

/// The rows of nodes' addresses that change, of two clusters that are connected.
pub(crate) fn addresses_change(pair: &Pair, lab: &Lab) -> Result<()> {
    let scene = Scene::new(pair, lab);
    scene.wait_well(SOON)?;
    let late = faults::addresses_change(&scene)?;
    ensure!(late.is_empty(), "late: {late:#?}");
    Ok(())
}

impl<'a> Scene<'a> {
    fn new(pair: &'a Pair, lab: &'a Lab) -> Self {
        Self { pair, lab, duplicate_gateway: Mutex::new(None) }
    }

    fn cluster(&self, i: usize) -> &'a Kubernetes {
        &self.pair.clusters[i]
    }

    /// The node of rome that faults are made on.
    fn node(&self) -> &'a Netns {
        self.cluster(0).machine(faults::NODE).host.net()
    }

    fn replace_duplicate(&self, duplicate_gateway: Option<Cluster>) {
        *self.duplicate_gateway.lock().unwrap_or_else(PoisonError::into_inner) = duplicate_gateway;
    }

    /// Time until a cluster shows that text, its peering in another state than Connected, and `weft status`
    /// ends with 3.
    fn time_until(&self, (i, text): Shown, start: Instant) -> Result<Duration> {
        wait_until(&format!("{} shows {text:?}", self.cluster(i).spec.id), AT_MOST, || {
            let (status, code) = self.cluster(i).status_and_code()?;
            let mut problems = status["problems"].as_array().into_iter().flatten();
            let is_it = |line: &Value| {
                let line = line.as_str().unwrap_or_default();
                line.split_once(text).is_some_and(|(_, rest)| rest.contains("; "))
            };
            ensure!(problems.any(is_it), "{status}");
            let state = &status["peerings"][0]["state"];
            ensure!(state != "Connected" && code == 3, "it is {state}, exit code {code}: {status}");
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(start.elapsed())
    }

    fn wait_well(&self, at_most: Duration) -> Result<()> {
        (0..2).try_for_each(|i| wait_until("all is well", at_most, || self.is_well(i)))
    }

    fn is_well(&self, i: usize) -> Result<()> {
        let status = self.cluster(i).status()?;
        let peering = &status["peerings"][0];
        let is_connected = peering["state"] == "Connected" && peering["faults"].is_null();
        ensure!(is_connected, "{}: {status}", self.cluster(i).spec.id);
        ensure!(peering["nodes"]["reachable"] == 2, "{}", peering["nodes"]);
        ensure!(status["problems"].as_array().is_some_and(Vec::is_empty), "{}", status["problems"]);
        Ok(())
    }
}

fn print(name: &str, what: &str, time: Duration) {
    note(&format!("truth: {name:<28} {what:<60} {:>6} ms", time.as_millis()));
}
