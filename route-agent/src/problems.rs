//! Problems of the node, as its status has them.

use std::collections::BTreeSet;
use std::error::Error;

use fabric_runtime::chain;

#[derive(Default)]
pub(crate) struct Problems {
    /// Those of the last reconcile, without those of other firewalls.
    own: BTreeSet<String>,
    /// All that the status has.
    reported: BTreeSet<String>,
}

impl Problems {
    pub(crate) fn set_own(&mut self, own: BTreeSet<String>) {
        self.own = own;
    }

    /// Adds others to the own ones, and logs what has changed. Returns all.
    pub(crate) fn update(&mut self, others: impl Iterator<Item = String>) -> Vec<String> {
        let all: BTreeSet<_> = self.own.iter().cloned().chain(others).collect();
        for problem in all.difference(&self.reported) {
            tracing::warn!("{problem}");
        }
        for problem in self.reported.difference(&all) {
            tracing::info!("solved: {problem}");
        }
        self.reported = all;
        self.reported.iter().cloned().collect()
    }
}

/// Returns the value, or adds the error to the problems.
pub(crate) fn value_of<T>(
    result: Result<T, impl Error>,
    problems: &mut BTreeSet<String>,
) -> Option<T> {
    result.map_err(|error| problems.insert(chain(&error))).ok()
}
