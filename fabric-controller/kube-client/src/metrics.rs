//! Counters of a program's writes and watches.

use fabric_objects::Kind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

type Labels<const N: usize> = Family<[(&'static str, String); N], Counter>;

/// Writes and watches of one program, by kind. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct StoreMetrics {
    writes: Labels<2>,
    watch_restarts: Labels<1>,
}

/// Result of a write, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    Written,
    /// Refused for a reason that waiting does not end.
    Refused,
    /// No answer within the time limit.
    Unanswered,
}

impl WriteOutcome {
    const ALL: [Self; 3] = [Self::Written, Self::Refused, Self::Unanswered];

    fn as_str(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Refused => "refused",
            Self::Unanswered => "unanswered",
        }
    }
}

impl StoreMetrics {
    /// Registers the counters; those of these kinds start at zero.
    pub fn register(&self, registry: &mut Registry, watched: &[Kind], written: &[Kind]) {
        for kind in watched {
            drop(self.watch_restarts.get_or_create(&watch_labels(kind.as_str())));
        }
        written.iter().for_each(|kind| self.count_from_zero(kind.as_str()));
        let help = "Writes by kind and outcome: written, refused or unanswered";
        registry.register("weft_store_writes", help, self.writes.clone());
        let help = "Watches that failed and were started again, by kind";
        registry.register("weft_store_watch_restarts", help, self.watch_restarts.clone());
    }

    /// Shows writes of `kind` before there are any.
    pub fn count_from_zero(&self, kind: &str) {
        for outcome in WriteOutcome::ALL {
            drop(self.writes.get_or_create(&write_labels(kind, outcome)));
        }
    }

    /// Counts a write of an object of `kind`.
    pub fn count_write(&self, kind: &str, outcome: WriteOutcome) {
        self.writes.get_or_create(&write_labels(kind, outcome)).inc();
    }

    /// Counts a watch of objects of `kind` that failed.
    pub fn count_watch_restart(&self, kind: &str) {
        self.watch_restarts.get_or_create(&watch_labels(kind)).inc();
    }
}

fn write_labels(kind: &str, outcome: WriteOutcome) -> [(&'static str, String); 2] {
    [("kind", kind.to_owned()), ("outcome", outcome.as_str().to_owned())]
}

fn watch_labels(kind: &str) -> [(&'static str, String); 1] {
    [("kind", kind.to_owned())]
}
