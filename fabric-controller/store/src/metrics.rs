//! Counters of a program's requests to its store.

use fabric_objects::Kind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::StoreError;

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
    /// Not answered.
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

    fn of(error: &StoreError) -> Self {
        if error.is_unreachable() { Self::Unanswered } else { Self::Refused }
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

    /// Counts the result of a write; `is_write` is false where nothing had to be written.
    pub(crate) fn count<T>(
        &self,
        kind: Kind,
        result: &Result<T, StoreError>,
        is_write: impl FnOnce(&T) -> bool,
    ) {
        match result {
            Ok(done) if !is_write(done) => {}
            Ok(_) => self.count_write(kind.as_str(), WriteOutcome::Written),
            Err(error) => self.count_write(kind.as_str(), WriteOutcome::of(error)),
        }
    }
}

fn write_labels(kind: &str, outcome: WriteOutcome) -> [(&'static str, String); 2] {
    [("kind", kind.to_owned()), ("outcome", outcome.as_str().to_owned())]
}

fn watch_labels(kind: &str) -> [(&'static str, String); 1] {
    [("kind", kind.to_owned())]
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn writes_are_counted_by_kind_and_outcome() {
        let (metrics, mut registry) = (StoreMetrics::default(), Registry::default());
        metrics.register(&mut registry, &[Kind::Node], &[Kind::NodeConfig]);
        metrics.count(Kind::NodeConfig, &Ok(true), |written| *written);
        metrics.count(Kind::NodeConfig, &Ok(false), |written| *written);
        let refused = Err::<(), _>(StoreError::NoPlace);
        metrics.count(Kind::NodeConfig, &refused, |()| true);
        metrics.count_watch_restart("Node");
        let mut text = String::new();
        text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"weft_store_writes_total{kind="NodeConfig",outcome="written"} 1"#,
            r#"weft_store_writes_total{kind="NodeConfig",outcome="refused"} 1"#,
            r#"weft_store_writes_total{kind="NodeConfig",outcome="unanswered"} 0"#,
            r#"weft_store_watch_restarts_total{kind="Node"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
