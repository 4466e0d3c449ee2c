use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Kubernetes;

/// One object of a cluster; what is in no namespace has an empty one.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    /// Kind, as `kubectl get` takes it.
    pub kind: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
}

impl<'a> Object<'a> {
    pub fn new(kind: &'a str, namespace: &'a str, name: &'a str) -> Self {
        Self { kind, namespace, name }
    }
}

impl fmt::Display for Object<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)?;
        if self.namespace.is_empty() { Ok(()) } else { write!(f, " in {}", self.namespace) }
    }
}

impl Kubernetes {
    /// An object as it is now.
    pub fn get(&self, object: Object<'_>) -> Result<Value> {
        let Object { kind, namespace, name } = object;
        let text = self.kubectl(&["get", kind, name, "--namespace", namespace, "--output=json"])?;
        serde_json::from_str(&text).with_context(|| format!("kubectl printed {text:?}"))
    }

    /// Waits until an object, which need not exist yet, is in a state that `kubectl wait --for`
    /// accepts: `condition=Ready`, `jsonpath={.status.value}=Connected`, `delete`.
    pub fn wait_for(&self, object: Object<'_>, what: &str, at_most: Duration) -> Result<()> {
        let began = Instant::now();
        let wait = |what: &str| {
            let left = at_most.saturating_sub(began.elapsed()).as_millis();
            let (what, left) = (format!("--for={what}"), format!("--timeout={left}ms"));
            let name = format!("{}/{}", object.kind, object.name);
            let namespace = format!("--namespace={}", object.namespace);
            self.kubectl(&["wait", &name, &namespace, &what, &left]).map(drop)
        };
        let stages: &[&str] = if what == "delete" { &[what] } else { &["create", what] };
        stages.iter().try_for_each(|stage| wait(stage)).with_context(|| {
            let id = &self.spec.id;
            format!("waited {at_most:?} for {what} of {object} of {id}; {}", self.describe(object))
        })
    }

    /// Present state of an object, in one line.
    fn describe(&self, object: Object<'_>) -> String {
        match self.get(object) {
            Ok(found) => format!("its status is {}", found["status"]),
            Err(error) => format!("{error:#}"),
        }
    }
}
