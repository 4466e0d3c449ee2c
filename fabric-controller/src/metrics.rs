//! Metrics of the controller.

use std::time::Duration;

use fabric_store::StoreMetrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::kinds::{READ, STATUSES, WRITTEN};

/// Kinds that are written beside those of the store, in Kubernetes.
const DEPLOYED: [&str; 5] = ["Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"];

/// Clones share all of them.
#[derive(Clone, Debug)]
pub struct Metrics {
    store: StoreMetrics,
    compile_seconds: Histogram,
    queue_length: Gauge,
    problems: Gauge,
    elected: Gauge,
    ipam_requests: Family<[(&'static str, &'static str); 1], Counter>,
}

/// Answer of ipam to a request for a prefix or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpamOutcome {
    Granted,
    Refused,
    Unanswered,
}

impl IpamOutcome {
    const ALL: [Self; 3] = [Self::Granted, Self::Refused, Self::Unanswered];

    fn labels(self) -> [(&'static str, &'static str); 1] {
        let outcome = match self {
            Self::Granted => "granted",
            Self::Refused => "refused",
            Self::Unanswered => "unanswered",
        };
        [("outcome", outcome)]
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            store: StoreMetrics::default(),
            // From 1 ms to 16 s.
            compile_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            queue_length: Gauge::default(),
            problems: Gauge::default(),
            elected: Gauge::default(),
            ipam_requests: Family::default(),
        }
    }
}

impl Metrics {
    /// All of them, as `/metrics` serves them.
    pub fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        let written: Vec<_> = WRITTEN.into_iter().chain(STATUSES).collect();
        self.store.register(&mut registry, &READ, &written);
        let controller = registry.sub_registry_with_prefix("weft_controller");
        let help = "Time that it takes to compile all resources, in seconds";
        controller.register("compile_seconds", help, self.compile_seconds.clone());
        let help = "Changes that waited when the main loop last took some";
        controller.register("queue_length", help, self.queue_length.clone());
        let help = "Problems that are published now";
        controller.register("problems", help, self.problems.clone());
        let help = "Whether this replica works, and does not stand by: 1 or 0";
        controller.register("elected", help, self.elected.clone());
        for outcome in IpamOutcome::ALL {
            drop(self.ipam_requests.get_or_create(&outcome.labels()));
        }
        let help = "Requests for a prefix or an address: granted, refused or unanswered";
        controller.register("ipam_requests", help, self.ipam_requests.clone());
        registry
    }

    /// Counts writes of [`DEPLOYED`] kinds from zero on.
    pub fn of_kubernetes(self) -> Self {
        DEPLOYED.iter().for_each(|kind| self.store.count_from_zero(kind));
        self
    }

    /// Counters for the stores of this program.
    pub fn store(&self) -> StoreMetrics {
        self.store.clone()
    }

    pub fn set_elected(&self, elected: bool) {
        self.elected.set(elected.into());
    }

    pub(crate) fn compiled(&self, took: Duration) {
        self.compile_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn set_queue_length(&self, length: usize) {
        self.queue_length.set(length.try_into().unwrap_or(i64::MAX));
    }

    pub(crate) fn set_problems(&self, count: usize) {
        self.problems.set(count.try_into().unwrap_or(i64::MAX));
    }

    pub(crate) fn count_ipam(&self, outcome: IpamOutcome, requests: usize) {
        let requests = requests.try_into().unwrap_or(u64::MAX);
        self.ipam_requests.get_or_create(&outcome.labels()).inc_by(requests);
    }
}
