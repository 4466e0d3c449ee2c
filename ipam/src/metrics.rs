//! Metrics of ipam.

use fabric_store::StoreMetrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tonic::{Code, Status};

type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Kind of what is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grantable {
    Prefix,
    Address,
}

/// Clones share all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    requests: Family<Labels<1>, Counter>,
    grants: Family<Labels<1>, Counter>,
    refusals: Family<Labels<2>, Counter>,
    taken: Family<Labels<1>, Gauge>,
    faults: Gauge,
}

impl Grantable {
    const ALL: [Self; 2] = [Self::Prefix, Self::Address];

    fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Address => "address",
        }
    }
}

/// Methods of the service.
const METHODS: [&str; 5] =
    ["IPAcquire", "IPRelease", "NetworkAcquire", "NetworkRelease", "NetworkIsAvailable"];
/// Codes with which ipam refuses.
const REFUSALS: [Code; 5] = [
    Code::AlreadyExists,
    Code::FailedPrecondition,
    Code::InvalidArgument,
    Code::ResourceExhausted,
    Code::Unavailable,
];

impl Metrics {
    pub(crate) fn registry(&self, store: &StoreMetrics) -> Registry {
        self.start_at_zero();
        let mut registry = Registry::default();
        store.register(&mut registry, &[], &[]);
        let ipam = registry.sub_registry_with_prefix("weft_ipam");
        ipam.register("requests", "Calls by method", self.requests.clone());
        ipam.register("grants", "Prefixes and addresses granted", self.grants.clone());
        let help = "Prefixes and addresses refused, by reason";
        ipam.register("refusals", help, self.refusals.clone());
        let help = "Prefixes and addresses that resources hold";
        ipam.register("taken", help, self.taken.clone());
        let help = "Problems with what resources hold, such as two that hold the same";
        ipam.register("faults", help, self.faults.clone());
        registry
    }

    fn start_at_zero(&self) {
        for method in METHODS {
            drop(self.requests.get_or_create(&[("method", method)]));
        }
        for what in Grantable::ALL {
            drop(self.grants.get_or_create(&[("kind", what.as_str())]));
            for code in REFUSALS {
                let labels = [("kind", what.as_str()), ("reason", reason(code))];
                drop(self.refusals.get_or_create(&labels));
            }
        }
        self.set_taken(0, 0);
    }

    pub(crate) fn count_request(&self, method: &'static str) {
        self.requests.get_or_create(&[("method", method)]).inc();
    }

    /// Counts the answer to a request for a prefix or an address.
    pub(crate) fn count_answer<T>(&self, what: Grantable, answer: &Result<T, Status>) {
        match answer {
            Ok(_) => self.grants.get_or_create(&[("kind", what.as_str())]).inc(),
            Err(status) => {
                let labels = [("kind", what.as_str()), ("reason", reason(status.code()))];
                self.refusals.get_or_create(&labels).inc()
            }
        };
    }

    pub(crate) fn set_taken(&self, prefixes: usize, addresses: usize) {
        for (what, count) in Grantable::ALL.into_iter().zip([prefixes, addresses]) {
            let count = count.try_into().unwrap_or(i64::MAX);
            self.taken.get_or_create(&[("kind", what.as_str())]).set(count);
        }
    }

    pub(crate) fn set_faults(&self, count: usize) {
        self.faults.set(count.try_into().unwrap_or(i64::MAX));
    }
}

/// Label of a gRPC code.
#[expect(clippy::wildcard_enum_match_arm, reason = "ipam refuses with no other code")]
fn reason(code: Code) -> &'static str {
    match code {
        Code::AlreadyExists => "taken",
        Code::FailedPrecondition => "outside_pools",
        Code::InvalidArgument => "invalid",
        Code::ResourceExhausted => "none_free",
        Code::Unavailable => "store_unavailable",
        _ => "other",
    }
}
