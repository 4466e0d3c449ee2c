//! The table of `cases.yaml`.

use std::collections::BTreeMap;

use gateway_templates::render;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::go::{self, Outcome};
use crate::{chain, folder, read, template, variables};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    gateways: BTreeMap<String, Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    gateway: String,
    metadata: Option<Value>,
    spec: Option<Value>,
    /// A whole template instead of metadata and spec.
    file: Option<String>,
    /// Error that weft reports for it.
    error: Option<String>,
    /// Reason why weft does otherwise than Go, and the spec that weft makes.
    differs: Option<String>,
    value: Option<Value>,
}

impl Case {
    fn template(&self) -> Value {
        if let Some(file) = &self.file {
            return template(&folder().join(file));
        }
        let usual = || json!({ "name": "{{ .Name }}", "namespace": "{{ .Namespace }}" });
        let metadata = self.metadata.clone().unwrap_or_else(usual);
        match &self.spec {
            Some(spec) => json!({ "metadata": metadata, "spec": spec }),
            None => json!({ "metadata": metadata }),
        }
    }

    /// Compares weft's result with the expected one.
    fn check(&self, gateway: &Value, go: &Outcome) -> Result<(), String> {
        let found = render(&self.template(), &variables(gateway)).map_err(|e| chain(&e));
        let expected = self.expected(gateway, go)?;
        if found == expected {
            return Ok(());
        }
        Err(format!("{}\n  found    {found:?}\n  expected {expected:?}", self.name))
    }

    fn expected(&self, gateway: &Value, go: &Outcome) -> Result<Result<Value, String>, String> {
        match (go, &self.error, &self.value) {
            (_, Some(error), None) if self.differs.is_some() => Ok(Err(error.clone())),
            (_, None, Some(spec)) if self.differs.is_some() => Ok(Ok(with_spec(gateway, spec))),
            (Outcome::Value { value }, None, None) => Ok(Ok(value.clone())),
            (Outcome::Error { .. }, Some(error), None) => Ok(Err(error.clone())),
            _ => Err(format!("{}: Go makes {go:?} of it; what should weft?", self.name)),
        }
    }
}

fn with_spec(gateway: &Value, spec: &Value) -> Value {
    let of = &gateway["metadata"];
    json!({ "metadata": { "name": of["name"], "namespace": of["namespace"] }, "spec": spec })
}

#[test]
fn weft_renders_what_go_renders() {
    let table: Table = serde_json::from_value(read(&folder().join("cases.yaml"))).unwrap();
    let cases: Vec<_> = table
        .cases
        .iter()
        .map(|c| json!({ "name": c.name, "gateway": c.gateway, "template": c.template() }))
        .collect();
    let go = go::outcomes(&json!({ "gateways": table.gateways, "cases": cases }));
    assert_eq!(go.len(), table.cases.len(), "every case has a name of its own");
    let faults: Vec<_> = table
        .cases
        .iter()
        .filter_map(|case| case.check(&table.gateways[&case.gateway], &go[&case.name]).err())
        .collect();
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), go.len(), faults.join("\n"));
}
