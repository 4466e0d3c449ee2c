//! Counts of the store's writes, by kind and outcome.

use fabric_kube_client::{StoreMetrics, WriteOutcome};
use fabric_objects::Kind;

use crate::error::StoreError;

/// Counts the result of a write; `is_write` is false where nothing had to be written.
pub(crate) fn count<T>(
    metrics: &StoreMetrics,
    kind: Kind,
    result: &Result<T, StoreError>,
    is_write: impl FnOnce(&T) -> bool,
) {
    match result {
        Ok(done) if !is_write(done) => {}
        Ok(_) => metrics.count_write(kind.as_str(), WriteOutcome::Written),
        Err(error) => metrics.count_write(kind.as_str(), outcome(error)),
    }
}

fn outcome(error: &StoreError) -> WriteOutcome {
    if error.is_unreachable() { WriteOutcome::Unanswered } else { WriteOutcome::Refused }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn writes_are_counted_by_kind_and_outcome() {
        let (metrics, mut registry) = (StoreMetrics::default(), Registry::default());
        metrics.register(&mut registry, &[Kind::Node], &[Kind::NodeConfig]);
        count(&metrics, Kind::NodeConfig, &Ok(true), |written| *written);
        count(&metrics, Kind::NodeConfig, &Ok(false), |written| *written);
        let refused = Err::<(), _>(StoreError::NoPlace);
        count(&metrics, Kind::NodeConfig, &refused, |()| true);
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
