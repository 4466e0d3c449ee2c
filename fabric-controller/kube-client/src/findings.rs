//! Findings of the controller that no object of the user may show: obstacles, which are reasons why it
//! cannot read all that it needs (a missing definition, a denied list), and repairs of what others stored. And
//! faults of gateways and of the cluster's ID: Liqo's definitions of gateways have no place for conditions.

use std::collections::{BTreeMap, BTreeSet};

use fabric_objects::Problem;
use tokio::sync::watch;

/// Part of the controller that reads from the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reader {
    /// Checks that it could work, while another replica does.
    Standby,
    /// Resources of weft and Liqo.
    Store,
    /// Objects that gateways consist of.
    Gateways,
    /// IPs for Liqo's other modules, and what they are made from.
    LiqoIps,
}

/// Obstacles of each reader, repairs, and faults. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    obstacles: watch::Sender<BTreeMap<Reader, BTreeSet<Problem>>>,
    repairs: watch::Sender<BTreeSet<String>>,
    /// Messages by object.
    faults: watch::Sender<BTreeMap<String, String>>,
}

/// Notification of changed obstacles.
pub type Changes = watch::Receiver<BTreeMap<Reader, BTreeSet<Problem>>>;

impl Findings {
    /// Replaces the obstacles of a reader.
    pub fn set(&self, reader: Reader, problems: BTreeSet<Problem>) {
        self.obstacles.send_if_modified(|all| {
            let before = all.get(&reader).cloned().unwrap_or_default();
            let changed = before != problems;
            all.insert(reader, problems);
            changed
        });
    }

    /// Removes all of them: another part of the program reads from now on.
    pub fn clear(&self) {
        self.obstacles.send_if_modified(|all| !std::mem::take(all).is_empty());
        self.set_repairs(BTreeSet::new());
        self.set_faults(BTreeMap::new());
    }

    /// Replaces the descriptions of what is repaired. No obstacle follows from that.
    pub fn set_repairs(&self, repairs: BTreeSet<String>) {
        self.repairs.send_replace(repairs);
    }

    pub fn repairs(&self) -> BTreeSet<String> {
        self.repairs.borrow().clone()
    }

    /// Replaces the faults that objects may not show themselves, by object.
    pub fn set_faults(&self, faults: BTreeMap<String, String>) {
        self.faults.send_replace(faults);
    }

    pub fn faults(&self) -> BTreeMap<String, String> {
        self.faults.borrow().clone()
    }

    /// Obstacles of all readers, each once.
    pub fn obstacles(&self) -> BTreeSet<Problem> {
        self.obstacles.borrow().values().flatten().cloned().collect()
    }

    /// One line for all of them; none if there are none.
    pub fn text(&self) -> Option<String> {
        let messages: BTreeSet<String> = self.obstacles().into_iter().map(|p| p.message).collect();
        (!messages.is_empty()).then(|| messages.into_iter().collect::<Vec<_>>().join("; "))
    }

    pub fn changes(&self) -> Changes {
        self.obstacles.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(message: &str) -> Problem {
        let message = message.to_owned();
        Problem { source: String::new(), object: None, field: None, message }
    }

    #[test]
    fn obstacle_of_two_readers_is_reported_once() {
        let findings = Findings::default();
        let mut changes = findings.changes();
        findings.set(Reader::Store, [problem("no Node")].into());
        findings.set(Reader::Gateways, [problem("no Node"), problem("no Pod")].into());
        assert_eq!(findings.text().as_deref(), Some("no Node; no Pod"));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        findings.set(Reader::Store, [problem("no Node")].into());
        assert!(!changes.has_changed().unwrap(), "it is the same");
        findings.set(Reader::Store, BTreeSet::new());
        findings.set(Reader::Gateways, BTreeSet::new());
        assert_eq!(findings.text(), None);
    }
}
