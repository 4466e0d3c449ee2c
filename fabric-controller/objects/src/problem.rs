use std::fmt;

use crate::ObjectRef;

/// Fault of a manifest or an object. Prints as one line that names file, object, field, what was
/// found and what is expected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// File name, with `:line` where it is known; empty in Kubernetes.
    pub source: String,
    pub object: Option<ObjectRef>,
    /// Path of the field, such as `spec.remote.cidr.pod[0]`.
    pub field: Option<String>,
    pub message: String,
}

/// End of the message of a fault in a version that is not used.
const LAST_GOOD_IN_USE: &str = "; the last good version stays in use";

impl Problem {
    /// Fault of an object's newest version, in whose place the last good one stays in use.
    #[must_use]
    pub fn with_last_good_in_use(mut self) -> Self {
        self.message.push_str(LAST_GOOD_IN_USE);
        self
    }

    /// Returns whether the object in use is an earlier version than the one with the fault.
    pub fn is_last_good_in_use(&self) -> bool {
        self.message.ends_with(LAST_GOOD_IN_USE)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.source.is_empty() {
            write!(f, "{}: ", self.source)?;
        }
        if let Some(object) = &self.object {
            write!(f, "{object}: ")?;
        }
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        match self.message.trim() {
            "" => f.write_str("wrong, and nothing says why"),
            message => f.write_str(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_without_message_prints_no_empty_text() {
        for message in ["", " \n"] {
            let (source, message) = ("a.yaml:13".to_owned(), message.to_owned());
            let problem = Problem { source, object: None, field: None, message };
            assert_eq!(problem.to_string(), "a.yaml:13: wrong, and nothing says why");
        }
    }
}
