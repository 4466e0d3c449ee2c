//! Metrics and probes of the agent.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_runtime::{Heartbeat, Monitoring, Readiness};
use fabric_store::{Kind, Problem, Store};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Part of the [`Readiness`] that is there once the newest config has been reconciled.
const CONFIG: &str = "config";
/// Why a node refuses packets to peers.
pub(crate) const NOT_CONNECTED: &str = "not_connected";
pub(crate) const NO_PEERING: &str = "no_peering";
/// Why it refuses packets from them: another program's rule or route would have taken them out of it.
pub(crate) const DIVERTED: &str = "diverted";
const NO_CONFIG: &str = "there is no NodeConfig of this node yet";

/// State that `/metrics`, `/healthz` and `/readyz` report.
#[derive(Debug)]
pub(crate) struct Vitals {
    /// Heartbeat of the main loop.
    pub(crate) heartbeat: Heartbeat,
    readiness: Readiness,
    has_config: bool,
    reconcile_seconds: Histogram,
    steps: Counter,
    failures: Counter,
    problems: Gauge,
    refused: Family<[(&'static str, &'static str); 1], Counter>,
    /// As last counted by the kernel.
    counted: BTreeMap<&'static str, u64>,
}

impl Vitals {
    pub(crate) fn new() -> Self {
        let readiness = Readiness::default();
        readiness.missing(CONFIG, NO_CONFIG);
        Self {
            heartbeat: Heartbeat::default(),
            readiness,
            has_config: false,
            // From 1 ms to 16 s.
            reconcile_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            steps: Counter::default(),
            failures: Counter::default(),
            problems: Gauge::default(),
            refused: refused_packets(),
            counted: BTreeMap::new(),
        }
    }

    pub(crate) fn monitoring(&self, store: &Store) -> Monitoring {
        let mut registry = Registry::default();
        store.metrics().register(
            &mut registry,
            &[Kind::NodeConfig, Kind::FabricRecord],
            &[Kind::NodeConfig],
        );
        let agent = registry.sub_registry_with_prefix("weft_agent");
        let help =
            "Time that it takes to compare the node with its config and change it, in seconds";
        agent.register("reconcile_seconds", help, self.reconcile_seconds.clone());
        let help = "Changes made to the kernel's tables";
        agent.register("steps", help, self.steps.clone());
        let help = "Changes of the kernel's tables that failed";
        agent.register("failures", help, self.failures.clone());
        let help = "Problems, failing and faulty paths, and undone steps in the status of the NodeConfig now";
        agent.register("problems", help, self.problems.clone());
        let help = "Packets to and from peers that the node refused, read every 30 s at least";
        agent.register("refused_packets", help, self.refused.clone());
        let (heartbeats, readiness) = (vec![self.heartbeat.clone()], self.readiness.clone());
        Monitoring { registry, heartbeats, readiness }
    }

    /// Not ready until this generation of the config is reconciled.
    pub(crate) fn received(&mut self, generation: Option<i64>) {
        self.has_config = true;
        let generation = generation.unwrap_or_default();
        self.readiness.missing(CONFIG, format!("generation {generation} is not applied yet"));
    }

    /// Not ready for want of a config, if there is none yet, and why.
    pub(crate) fn cannot_read(&self, problems: &[Problem]) {
        if self.has_config {
            return;
        }
        let why: Vec<_> = problems.iter().map(ToString::to_string).collect();
        self.readiness.missing(CONFIG, [&[NO_CONFIG.to_owned()], &why[..]].concat().join("; "));
    }

    pub(crate) fn reconciled(&self, took: Duration) {
        self.readiness.fulfilled(CONFIG);
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn set_problems(&self, count: usize) {
        self.problems.set(count.try_into().unwrap_or(i64::MAX));
    }

    /// Adds what the kernel has counted. A table that was replaced counts from 0 again.
    pub(crate) fn count_refused(&mut self, reason: &'static str, now: u64) {
        let before = self.counted.insert(reason, now).unwrap_or(now);
        let more = if now < before { now } else { now - before };
        self.refused.get_or_create(&[("reason", reason)]).inc_by(more);
    }

    pub(crate) fn applied(&self, steps: usize, failures: usize) {
        self.steps.inc_by(steps.try_into().unwrap_or(u64::MAX));
        self.failures.inc_by(failures.try_into().unwrap_or(u64::MAX));
    }
}

fn refused_packets() -> Family<[(&'static str, &'static str); 1], Counter> {
    let refused = Family::<[(&'static str, &'static str); 1], Counter>::default();
    for reason in [NOT_CONNECTED, NO_PEERING, DIVERTED] {
        refused.get_or_create(&[("reason", reason)]).inc_by(0);
    }
    refused
}
