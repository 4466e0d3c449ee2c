//! Intervals between writes of one status: that of a new peering changes several times a second, and its writes
//! would make those late that nodes and gateways wait for.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::networking::NETWORK_CIDRS_CONFIGURED;
use fabric_store::{Object, ObjectRef};
use tokio::time::Instant;

/// Minimum time before a first status that only reports progress.
const PROGRESS: Duration = Duration::from_secs(1);
/// Minimum time between two statuses of one object, for each one that a round writes.
const INTERVAL: Duration = Duration::from_millis(25);

/// Schedule of statuses.
#[derive(Debug, Default)]
pub struct StatusPacing {
    /// Time of the next write, by object.
    earliest: BTreeMap<ObjectRef, Instant>,
    /// Number written in this round, and in the one before that wrote any.
    written: u32,
    written_before: u32,
    /// Times at which all that wait may be written: those that only report progress, and the others.
    due: [Option<Instant>; 2],
}

impl StatusPacing {
    /// Begins a round, in which all statuses are looked at.
    pub fn begin(&mut self) {
        let now = Instant::now();
        self.earliest.retain(|_, earliest| now < *earliest + PROGRESS);
        if self.written > 0 {
            self.written_before = std::mem::take(&mut self.written);
        }
        self.due = [None; 2];
    }

    /// Returns whether the object may get this status now. If not, it is due later.
    pub fn is_due(&mut self, reference: &ObjectRef, status: &Object) -> bool {
        let (now, is_progress) = (Instant::now(), is_progress(status));
        let earliest = match self.earliest.get(reference) {
            Some(earliest) => *earliest,
            None if is_progress => {
                *self.earliest.entry(reference.clone()).or_insert(now + PROGRESS)
            }
            None => now,
        };
        let is_due = earliest <= now;
        // All that wait are written at once: the last one waits for no more than an interval.
        let due = &mut self.due[usize::from(is_progress)];
        *due = (*due).max((!is_due).then_some(earliest));
        is_due
    }

    pub fn written(&mut self, object: &ObjectRef) {
        self.written += 1;
        let interval = INTERVAL * self.written.max(self.written_before);
        self.earliest.insert(object.clone(), Instant::now() + interval);
    }

    /// Time of the next write.
    pub fn due(&self) -> Option<Instant> {
        self.due.into_iter().flatten().min()
    }
}

/// True for a Configuration that waits, for ipam or for nodes.
fn is_progress(status: &Object) -> bool {
    let Object::Configuration(configuration) = status else { return false };
    let mut conditions = configuration.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|of| of.type_ == NETWORK_CIDRS_CONFIGURED && of.reason.starts_with("Waiting"))
}

#[cfg(test)]
mod tests {
    use fabric_api::networking::Configuration;
    use serde_json::json;

    use super::*;

    fn configuration(reason: &str) -> Object {
        let condition = json!({"type": NETWORK_CIDRS_CONFIGURED, "status": "False", "reason": reason,
            "message": "", "lastTransitionTime": "2026-01-31T12:00:00Z"});
        let configuration: Configuration = serde_json::from_value(json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
            "metadata": {"name": "milan", "namespace": "t"},
            "spec": {"remote": {"cidr": {"pod": [], "external": []}}},
            "status": {"conditions": [condition]},
        }))
        .unwrap();
        configuration.into()
    }

    /// Looks at a status at that time, in ms, and writes it if it is due. Returns whether it was, and when
    /// the next look is due.
    struct Looks(StatusPacing, Instant);

    impl Looks {
        async fn at(&mut self, ms: u64, reason: &str) -> (bool, Option<u128>) {
            tokio::time::advance(self.1 + Duration::from_millis(ms) - Instant::now()).await;
            let status = configuration(reason);
            self.0.begin();
            let is_due = self.0.is_due(&status.reference(), &status);
            if is_due {
                self.0.written(&status.reference());
            }
            (is_due, self.0.due().map(|due| (due - self.1).as_millis()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn statuses_of_many_are_written_less_often() {
        let mut looks = Looks(StatusPacing::default(), Instant::now());
        assert_eq!(looks.at(0, "InvalidConfiguration").await, (true, None), "the first at once");
        assert_eq!(looks.at(10, "Configured").await, (false, Some(25)));
        assert_eq!(looks.at(25, "Configured").await, (true, None));
        looks.0.written = 100;
        assert_eq!(looks.at(1_000, "InvalidConfiguration").await, (true, None));
        assert_eq!(looks.at(1_100, "Configured").await, (false, Some(3_500)));
        assert_eq!(looks.at(3_500, "Configured").await, (true, None));
    }

    #[tokio::test(start_paused = true)]
    async fn progress_is_written_if_it_lasts() {
        let mut looks = Looks(StatusPacing::default(), Instant::now());
        assert_eq!(looks.at(0, "WaitingForNetworks").await, (false, Some(1_000)));
        assert_eq!(looks.at(300, "WaitingForNodes").await, (false, Some(1_000)));
        assert_eq!(looks.at(1_000, "WaitingForNodes").await, (true, None));
    }
}
