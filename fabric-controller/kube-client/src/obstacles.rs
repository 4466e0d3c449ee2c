//! Reasons why the controller cannot read all that it needs: a missing definition, a denied list. And
//! what it repairs of other programs.

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

/// Obstacles of each reader. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Obstacles {
    of_readers: watch::Sender<BTreeMap<Reader, BTreeSet<Problem>>>,
    repairs: watch::Sender<BTreeSet<String>>,
}

/// Notification of changes.
pub type Changes = watch::Receiver<BTreeMap<Reader, BTreeSet<Problem>>>;

impl Obstacles {
    /// Replaces those of a reader.
    pub fn set(&self, reader: Reader, problems: BTreeSet<Problem>) {
        self.of_readers.send_if_modified(|all| {
            let before = all.get(&reader).cloned().unwrap_or_default();
            let changed = before != problems;
            all.insert(reader, problems);
            changed
        });
    }

    /// Removes those of all readers: another part of the program reads from now on.
    pub fn clear(&self) {
        self.of_readers.send_if_modified(|all| !std::mem::take(all).is_empty());
        self.set_repairs(BTreeSet::new());
    }

    /// Replaces the descriptions of what is repaired. No obstacle follows from that.
    pub fn set_repairs(&self, repairs: BTreeSet<String>) {
        self.repairs.send_replace(repairs);
    }

    pub fn repairs(&self) -> BTreeSet<String> {
        self.repairs.borrow().clone()
    }

    /// Obstacles of all readers, each once.
    pub fn all(&self) -> BTreeSet<Problem> {
        self.of_readers.borrow().values().flatten().cloned().collect()
    }

    /// One line for all of them; none if there are none.
    pub fn text(&self) -> Option<String> {
        let messages: BTreeSet<String> = self.all().into_iter().map(|p| p.message).collect();
        (!messages.is_empty()).then(|| messages.into_iter().collect::<Vec<_>>().join("; "))
    }

    pub fn changes(&self) -> Changes {
        self.of_readers.subscribe()
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
        let obstacles = Obstacles::default();
        let mut changes = obstacles.changes();
        obstacles.set(Reader::Store, [problem("no Node")].into());
        obstacles.set(Reader::Gateways, [problem("no Node"), problem("no Pod")].into());
        assert_eq!(obstacles.text().as_deref(), Some("no Node; no Pod"));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        obstacles.set(Reader::Store, [problem("no Node")].into());
        assert!(!changes.has_changed().unwrap(), "it is the same");
        obstacles.set(Reader::Store, BTreeSet::new());
        obstacles.set(Reader::Gateways, BTreeSet::new());
        assert_eq!(obstacles.text(), None);
    }
}
