use std::collections::BTreeMap;

use fabric_api::check::Fault;
use fabric_objects::{ObjectRef, Problem};

/// Problems with the manifests and with their content, by the object that they are about.
#[derive(Debug, Default)]
pub struct Problems(BTreeMap<Option<ObjectRef>, Vec<Problem>>);

impl Problems {
    /// Begins with those that the store has reported.
    pub fn new(known: &[Problem]) -> Self {
        let mut all = Self::default();
        for problem in known {
            all.0.entry(problem.object.clone()).or_default().push(problem.clone());
        }
        all
    }

    /// Adds a problem, unless the store has reported the same: that one has its source. Of an object whose
    /// newest version is not used, the store's alone matter.
    pub fn add(&mut self, object: &ObjectRef, field: &str, message: impl Into<String>) {
        let field = Some(field.to_owned()).filter(|field| !field.is_empty());
        let (object, message) = (Some(object.clone()), message.into());
        let known = self.0.entry(object.clone()).or_default();
        let is_same = |of: &Problem| of.field == field && of.message == message;
        if !known.iter().any(|of| is_same(of) || of.is_last_good_in_use()) {
            known.push(Problem { source: String::new(), object, field, message });
        }
    }

    pub fn fault(&mut self, object: &ObjectRef, fault: &Fault) {
        self.add(object, &fault.field, fault.message.clone());
    }

    /// Adds the fault, or returns the value if there is none.
    pub fn accepted<T>(&mut self, object: &ObjectRef, checked: Result<T, Fault>) -> Option<T> {
        checked.map_err(|fault| self.fault(object, &fault)).ok()
    }

    /// Problems of one object.
    pub fn of(&self, object: &ObjectRef) -> &[Problem] {
        self.0.get(&Some(object.clone())).map(Vec::as_slice).unwrap_or_default()
    }

    pub fn into_sorted(self) -> Vec<Problem> {
        let mut all: Vec<Problem> = self.0.into_values().flatten().collect();
        all.sort();
        all.dedup();
        all
    }
}
